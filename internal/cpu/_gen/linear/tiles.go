package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/gotypes"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
	"gorgonia.org/leanattention/internal/cpu/_gen/amx"
)

const (
	tileSource = "kernels.go"
	tileTypes  = "args.go"
)

// matmulTiles makes the kernels of linear layers of many rows.
func matmulTiles(g *gen) {
	for _, t := range []dtype{f32, f16, bf16} {
		packRows(g, t)
	}
	for rows := 4; rows <= 6; rows++ {
		tile(g, avx2, rows)
	}
	for rows := 8; rows <= 14; rows++ {
		tile(g, avx512, rows)
	}
	p := newPartsGen(g)
	for parts := 1; parts <= 3; parts++ {
		p.split(parts)
	}
	p.pairs(f32, 3)
	p.pairs(f16, 2)
	p.pairs(bf16, 1)
	p.columns(f16, 2)
	p.columns(bf16, 1)
	for _, ways := range [][2]int{{1, 1}, {3, 1}, {2, 2}, {3, 2}, {3, 3}} {
		p.tile(ways[0], ways[1])
	}
	odd(g)
	p.large()
}

// tile holds the sums of some rows and two vectors of features in registers. Rows are read where they are, an
// element at a time for both vectors.
func tile(g *gen, set isa, rows int) {
	g.kernel(fmt.Sprintf("tileF32x%d", rows), set, tileSource, "tileF32Go", tileTypes)
	a := g.Dereference(g.Param("a"))
	x, row := bases(g, g.field(a, "X"), g.field(a, "XRow"), rows)
	w, n := g.field(a, "W"), g.field(a, "N")
	sums := g.vecs(2 * rows)
	g.zero(sums...)
	wv, xv := g.vecs(2), g.vec()
	size := 4 * set.lanes
	product := func(k int) {
		for i := range wv {
			g.VMOVUPS(Mem{Base: w, Disp: (2*k + i) * size}, wv[i])
		}
		for r := range rows {
			m := row(r)
			m.Disp = 4 * k
			g.VBROADCASTSS(m, xv)
			for i := range wv {
				g.VFMADD231PS(wv[i], xv, sums[2*r+i])
			}
		}
	}
	advance := func(by int) {
		for k := range by {
			product(k)
		}
		for _, b := range x {
			g.ADDQ(Imm(uint64(4*by)), b)
		}
		g.ADDQ(U32(uint32(2*by*size)), w)
	}
	const unrolled = 4
	g.SUBQ(Imm(unrolled), n)
	g.JL(LabelRef("rest"))
	g.Label("loop")
	advance(unrolled)
	g.SUBQ(Imm(unrolled), n)
	g.JGE(LabelRef("loop"))
	g.Label("rest")
	g.ADDQ(Imm(unrolled), n)
	g.JZ(LabelRef("sum"))
	g.Label("ones")
	advance(1)
	g.DECQ(n)
	g.JNZ(LabelRef("ones"))

	g.Label("sum")
	_, to := bases(g, g.field(a, "Y"), g.field(a, "YRow"), rows)
	more := g.field(a, "More")
	g.TESTQ(more, more)
	g.JZ(LabelRef("write"))
	each := func(do func(m Mem, v reg.VecVirtual)) {
		for i, v := range sums {
			m := to(i / 2)
			m.Disp = i % 2 * size
			do(m, v)
		}
	}
	each(func(m Mem, v reg.VecVirtual) { g.VADDPS(m, v, v) })
	g.Label("write")
	each(func(m Mem, v reg.VecVirtual) { g.VMOVUPS(v, m) })
	g.ret()
}

// bases returns registers that reach rows which lie a distance apart, and where each row is.
func bases(g *gen, first, apart reg.GPVirtual, rows int) (of []reg.GPVirtual, row func(r int) Mem) {
	of = []reg.GPVirtual{first}
	for r := 3; r < rows; r += 3 {
		b, last := g.GP64(), of[len(of)-1]
		g.LEAQ(Mem{Base: last, Index: apart, Scale: 2}, b)
		g.ADDQ(apart, b)
		of = append(of, b)
	}
	return of, func(r int) Mem {
		m := Mem{Base: of[r/3]}
		if r%3 > 0 {
			m.Index, m.Scale = apart, uint8(r%3)
		}
		return m
	}
}

// packRows transposes eight rows.
func packRows(g *gen, t dtype) {
	const rows = 8
	g.kernel("pack"+t.name, avx2, tileSource, "pack"+t.name+"Go", tileTypes)
	a := g.Dereference(g.Param("a"))
	src := g.rows(a, rows)
	dst, step, n := g.field(a, "Dst"), g.field(a, "DstStep"), g.field(a, "N")
	k := g.GP64()
	g.XORQ(k, k)
	from := func(r int) Mem { return Mem{Base: src[r], Index: k, Scale: uint8(t.size)} }
	// The rows of the next call, as a rule: memory is asked for them in the order of these.
	ahead := g.field(a, "SrcRow")
	g.SHLQ(Imm(3), ahead)

	g.SUBQ(Imm(rows), n)
	g.JL(LabelRef("rest"))
	g.Label("loop")
	v := g.vecs(rows)
	for r := range v {
		g.widen(t, from(r), v[r])
	}
	for r := range v {
		g.PREFETCHT0(Mem{Base: src[r], Index: ahead, Scale: 1})
	}
	g.ADDQ(Imm(uint64(rows*t.size)), ahead)
	for _, c := range g.transpose8(v) {
		g.VMOVUPS(c, Mem{Base: dst})
		g.ADDQ(step, dst)
	}
	g.ADDQ(Imm(rows), k)
	g.SUBQ(Imm(rows), n)
	g.JGE(LabelRef("loop"))
	g.Label("rest")
	g.ADDQ(Imm(rows), n)
	g.JZ(LabelRef("done"))
	g.Label("ones")
	one := g.vec()
	for r := range rows {
		g.widenOne(t, from(r), one)
		g.VMOVSS(one.AsX(), Mem{Base: dst, Disp: 4 * r})
	}
	g.ADDQ(step, dst)
	g.INCQ(k)
	g.DECQ(n)
	g.JNZ(LabelRef("ones"))
	g.Label("done")
	g.ret()
}

// transpose8 returns the columns of eight rows of eight.
func (g *gen) transpose8(v []reg.VecVirtual) []reg.VecVirtual {
	four := func(v []reg.VecVirtual) []reg.VecVirtual { // columns i and i+4 of four rows
		t, c := g.vecs(4), g.vecs(4)
		for i := range 2 {
			g.VUNPCKLPS(v[2*i+1], v[2*i], t[2*i])
			g.VUNPCKHPS(v[2*i+1], v[2*i], t[2*i+1])
		}
		for i := range 2 {
			g.VUNPCKLPD(t[2+i], t[i], c[2*i])
			g.VUNPCKHPD(t[2+i], t[i], c[2*i+1])
		}
		return c
	}
	lo, hi := four(v[:4]), four(v[4:])
	c := g.vecs(8)
	for i := range 4 {
		g.VPERM2F128(Imm(0x20), hi[i], lo[i], c[i])
		g.VPERM2F128(Imm(0x31), hi[i], lo[i], c[4+i])
	}
	return c
}

// parts makes what is computed in tile registers, of three parts at most.
type partsGen struct {
	*gen
	config, upper, words Mem

	neighbours Mem // element i of a vector of bfloat16, and of another

	bits16, bits32, limit16, limit32 Mem // all but the sign, and 2^56, of bfloat16 and of float32
}

const (
	stepRows  = 16
	stepDepth = 32
	stepBytes = 64 * stepRows

	splitAhead = 4 // steps of x
)

// amxTiles is AVX-512 with tile registers.
var amxTiles = isa{"AMX", 16}

func newPartsGen(g *gen) *partsGen {
	p := &partsGen{gen: g}
	data := func(name string, of ...Constant) Mem {
		m := g.StaticGlobal(name)
		g.DataAttributes(attr.RODATA | attr.NOPTR)
		for _, c := range of {
			g.AppendDatum(c)
		}
		return m
	}
	var config, words []Constant
	for _, x := range amx.Config(stepRows) {
		config = append(config, U64(x))
	}
	for i := range uint32(16) {
		words = append(words, U32(4*i+1|(4*i+3)<<16))
	}
	p.config = data("linearTileConfig", config...)
	p.upper = data("upperBits", U32(0xffff0000))
	p.words = data("upperWords", words...) // of 32 elements
	var neighbours []Constant
	for i := range uint32(16) {
		neighbours = append(neighbours, U32(i|(32+i)<<16))
	}
	p.neighbours = data("neighbours", neighbours...)
	p.bits16, p.bits32 = data("bits16", U32(0x7fff7fff)), data("bits32", U32(0x7fffffff))
	p.limit16, p.limit32 = data("limit16", U32(0x5b805b80)), data("limit32", U32(0x5b800000))
	return p
}

// split makes the kernel that splits x.
func (p *partsGen) split(parts int) {
	p.kernel(fmt.Sprintf("splitX%d", parts), amxTiles, tileSource, fmt.Sprintf("splitX%dGo", parts), tileTypes)
	p.pack(f32, parts, nil)
	p.ret()
}

// pairs makes the kernel that splits weights and puts them in pairs.
func (p *partsGen) pairs(t dtype, parts int) {
	p.kernel("pairs"+t.name, amxTiles, tileSource, "pairs"+t.name+"Go", tileTypes)
	p.pack(t, parts, p.transpose16)
	p.ret()
}

// columns makes the kernel that splits values and puts those of neighbouring keys in pairs.
func (p *partsGen) columns(t dtype, parts int) {
	p.kernel("columns"+t.name, amxTiles, tileSource, "columns"+t.name+"Go", tileTypes)
	a := p.Dereference(p.Param("a"))
	dst, dstStep, dstPart := p.field(a, "Dst"), p.field(a, "DstStep"), p.field(a, "DstPart")
	src, srcRow, n := p.field(a, "Src"), p.field(a, "SrcRow"), p.field(a, "N")
	upper, order, zero, seen := p.ZMM(), p.ZMM(), p.ZMM(), p.sizes(t)
	p.VPBROADCASTD(p.upper, upper)
	p.VMOVDQU32(p.neighbours, order)
	p.zero(zero)
	// The line of dst in its step, and from the end of a step to the next.
	line, jump := p.GP64(), p.GP64()
	p.XORQ(line, line)
	p.MOVQ(dstStep, jump)
	p.SUBQ(U32(stepBytes), jump)

	pair := func(keys int) {
		x := []reg.VecVirtual{zero, zero}
		for i := range keys {
			x[i] = p.ZMM()
			at := Mem{Base: src}
			if i > 0 {
				at.Index, at.Scale = srcRow, 1
			}
			if t == bf16 { // whose elements need no arithmetic
				p.VMOVDQU32(at, x[i].AsY())
			} else {
				p.widen(t, at, x[i])
			}
			seen.see(x[i])
		}
		if t == bf16 {
			pairs := p.ZMM()
			p.VMOVDQA32(order, pairs)
			p.VPERMI2W(x[1], x[0], pairs)
			p.VMOVDQU32(pairs, Mem{Base: dst})
			return
		}
		at := dst
		for part := range parts {
			low, high := p.ZMM(), p.ZMM()
			p.VPSRLD(Imm(16), x[0], low)
			p.VPANDD(upper, x[1], high)
			if part < parts-1 {
				first := p.ZMM()
				p.VPANDD(upper, x[0], first)
				p.VSUBPS(first, x[0], x[0])
				if keys > 1 {
					p.VSUBPS(high, x[1], x[1])
				}
			}
			p.VPORD(high, low, low)
			p.VMOVDQU32(low, Mem{Base: at})
			if part < parts-1 {
				next := p.GP64()
				p.MOVQ(at, next)
				p.ADDQ(dstPart, next)
				at = next
			}
		}
	}
	p.Label("pair")
	p.SUBQ(Imm(2), n)
	p.JL(LabelRef("last"))
	pair(2)
	p.LEAQ(Mem{Base: src, Index: srcRow, Scale: 2}, src)
	p.ADDQ(Imm(64), dst)
	p.ADDQ(Imm(64), line)
	p.CMPQ(line, U32(stepBytes))
	p.JL(LabelRef("pair"))
	p.XORQ(line, line)
	p.ADDQ(jump, dst)
	p.JMP(LabelRef("pair"))
	p.Label("last")
	p.ADDQ(Imm(2), n)
	p.JZ(LabelRef("done"))
	pair(1)
	p.Label("done")
	p.ORQ(seen.large(), p.fieldAt(a, "Odd"))
	p.ret()
}

// pack writes parts a step at a time, of which each part is changed at the end.
func (p *partsGen) pack(t dtype, parts int, change func(at reg.GPVirtual)) {
	a := p.Dereference(p.Param("a"))
	dst, dstStep, dstPart := p.field(a, "Dst"), p.field(a, "DstStep"), p.field(a, "DstPart")
	src, srcRow, n := p.field(a, "Src"), p.field(a, "SrcRow"), p.field(a, "N")
	ahead := p.GP64() // the rows of the next call, as a rule
	p.MOVQ(srcRow, ahead)
	p.SHLQ(Imm(4), ahead)
	upper, words := p.ZMM(), p.ZMM()
	p.VPBROADCASTD(p.upper, upper)
	p.VMOVDQU32(p.words, words)
	var seen *sizes
	if change != nil && t != f32 {
		seen = p.sizes(t)
	}
	p.Label("step")
	// The elements that are there.
	all, count := p.GP32(), p.GP64()
	p.MOVQ(n, count)
	limit := p.GP64()
	p.MOVQ(U32(stepDepth), limit)
	p.CMPQ(count, limit)
	p.CMOVQGT(limit, count)
	p.MOVL(U32(0xffffffff), all)
	p.BZHIL(count.As32(), all, all)
	both, low, high := p.K(), p.K(), p.K()
	p.KMOVD(all, both)
	p.KMOVW(all, low)
	p.SHRL(Imm(16), all)
	p.KMOVW(all, high)

	from, to, left := p.GP64(), p.GP64(), p.field(a, "Rows")
	p.MOVQ(src, from)
	p.MOVQ(dst, to)
	p.Label("row")
	for line := 0; line < stepDepth*t.size; line += 64 {
		m := Mem{Base: from, Disp: splitAhead*stepDepth*t.size + line}
		if change != nil {
			m.Index, m.Scale, m.Disp = ahead, 1, line
		}
		p.PREFETCHT0(m)
	}
	if t == bf16 {
		v := p.ZMM()
		p.VMOVDQU16_Z(Mem{Base: from}, both, v)
		seen.see(v)
		p.VMOVDQU32(v, Mem{Base: to})
	} else {
		x := []reg.VecVirtual{p.ZMM(), p.ZMM()}
		for i, m := range []reg.OpmaskVirtual{low, high} {
			p.widenMasked(t, Mem{Base: from, Disp: 16 * t.size * i}, m, x[i])
			if seen != nil {
				seen.see(x[i])
			}
		}
		out := p.GP64()
		p.MOVQ(to, out)
		for part := range parts {
			pairs := p.ZMM()
			if parts == 1 {
				p.Instruction(amx.Round(x[1], x[0], pairs))
			} else {
				p.VMOVDQA32(words, pairs)
				p.VPERMI2W(x[1], x[0], pairs)
			}
			p.VMOVDQU32(pairs, Mem{Base: out})
			if part < parts-1 {
				for _, v := range x {
					h := p.ZMM()
					p.VPANDD(upper, v, h)
					p.VSUBPS(h, v, v)
				}
				p.ADDQ(dstPart, out)
			}
		}
	}
	p.ADDQ(srcRow, from)
	p.ADDQ(Imm(64), to)
	p.DECQ(left)
	p.JNZ(LabelRef("row"))
	if change != nil {
		at := p.GP64()
		p.MOVQ(dst, at)
		for part := range parts {
			change(at)
			if part < parts-1 {
				p.ADDQ(dstPart, at)
			}
		}
	}
	p.ADDQ(Imm(uint64(stepDepth*t.size)), src)
	p.ADDQ(dstStep, dst)
	p.SUBQ(Imm(stepDepth), n)
	p.JG(LabelRef("step"))
	if seen != nil {
		p.ORQ(seen.large(), p.fieldAt(a, "Odd"))
	}
}

// sizes keeps the greatest magnitude of numbers: their bits but for the sign.
type sizes struct {
	*partsGen
	t          dtype
	bits, most reg.VecVirtual
}

// sizes begins with none. Those of float16 are seen as float32.
func (p *partsGen) sizes(t dtype) *sizes {
	s := &sizes{p, t, p.ZMM(), p.ZMM()}
	if t == bf16 {
		p.VPBROADCASTD(p.bits16, s.bits)
	} else {
		p.VPBROADCASTD(p.bits32, s.bits)
	}
	p.zero(s.most)
	return s
}

func (s *sizes) see(v reg.VecVirtual) {
	x := s.ZMM()
	s.VPANDD(s.bits, v, x)
	if s.t == bf16 {
		s.VPMAXUW(x, s.most, s.most)
	} else {
		s.VPMAXUD(x, s.most, s.most)
	}
}

// large returns 0 if all that was seen is less than 2^56.
func (s *sizes) large() reg.GPVirtual {
	const notLess = 5
	limit, k, n := s.ZMM(), s.K(), s.GP64()
	if s.t == bf16 {
		s.VPBROADCASTD(s.limit16, limit)
		s.VPCMPUW(Imm(notLess), limit, s.most, k)
	} else {
		s.VPBROADCASTD(s.limit32, limit)
		s.VPCMPUD(Imm(notLess), limit, s.most, k)
	}
	s.KMOVD(k, n.As32())
	return n
}

// large makes the kernel that looks for what is large, or not a number.
func (p *partsGen) large() {
	p.kernel("large", avx512, tileSource, "largeGo", "")
	from, n := p.arg("p"), p.arg("n")
	s, v := p.sizes(f32), p.vec()
	k, end := p.GP64(), p.GP64()
	p.XORQ(k, k)
	p.MOVQ(n, end)
	p.ANDQ(I32(-16), end)
	p.JZ(LabelRef("rest"))
	at := Mem{Base: from, Index: k, Scale: 4}
	p.Label("loop")
	p.VMOVUPS(at, v)
	s.see(v)
	p.ADDQ(Imm(16), k)
	p.CMPQ(k, end)
	p.JLT(LabelRef("loop"))
	p.Label("rest")
	p.SUBQ(k, n)
	p.JZ(LabelRef("done"))
	p.VMOVUPS_Z(at, p.mask(n), v)
	s.see(v)
	p.Label("done")
	p.Store(s.large(), p.Return("large"))
	p.ret()
}

// transpose16 transposes 16 rows of 16 pairs where they lie.
func (p *partsGen) transpose16(at reg.GPVirtual) {
	line := func(i int) Mem { return Mem{Base: at, Disp: 64 * i} }
	p.columns16(line, line)
}

// tile makes the kernel of a tile from parts.
func (p *partsGen) tile(xParts, wParts int) {
	p.kernel(fmt.Sprintf("tileX%dW%d", xParts, wParts), amxTiles, tileSource, "tilePartsGo", tileTypes)
	a := p.Dereference(p.Param("a"))
	config := p.GP64()
	p.LEAQ(p.config, config)
	p.Instruction(amx.LoadConfig(config))
	xRow, yRow, line := p.field(a, "XRow"), p.field(a, "YRow"), p.GP64()
	p.MOVQ(U32(64), line)
	tiles, panel, top := p.field(a, "Tiles"), p.field(a, "W"), p.field(a, "Y")
	p.Label("columns")
	tall, rows, y := p.field(a, "Tall"), p.field(a, "X"), p.GP64()
	p.MOVQ(top, y)
	// sums does something with each tile of y.
	sums := func(do func(at reg.GPVirtual, t int)) {
		for t := range 4 {
			at := p.GP64()
			if t >= 2 {
				p.MOVQ(yRow, at)
				p.SHLQ(Imm(4), at)
				p.ADDQ(y, at)
				if t%2 > 0 {
					p.ADDQ(Imm(64), at)
				}
			} else {
				p.LEAQ(Mem{Base: y, Disp: 64 * t}, at)
			}
			do(at, t)
		}
	}
	p.Label("rows")
	x, n, w, more := p.GP64(), p.field(a, "N"), p.GP64(), p.field(a, "More")
	p.MOVQ(rows, x)
	p.MOVQ(panel, w)
	p.TESTQ(more, more)
	p.JNZ(LabelRef("more"))
	for t := range 4 {
		p.Instruction(amx.Zero(t))
	}
	p.JMP(LabelRef("step"))
	p.Label("more")
	sums(func(at reg.GPVirtual, t int) { p.Instruction(amx.Load(at, yRow, t)) })

	p.Label("step")
	p.products(xParts, wParts, x, w, xRow, line)
	p.ADDQ(U32(uint32(xParts*stepBytes)), x)
	p.ADDQ(U32(uint32(2*wParts*stepBytes)), w)
	p.DECQ(n)
	p.JNZ(LabelRef("step"))
	sums(func(at reg.GPVirtual, t int) { p.Instruction(amx.Store(t, at, yRow)) })
	p.ADDQ(p.fieldAt(a, "XStep"), rows)
	p.ADDQ(p.fieldAt(a, "YStep"), y)
	p.DECQ(tall)
	p.JNZ(LabelRef("rows"))
	p.ADDQ(U32(2*4*stepRows), top)
	p.ADDQ(p.fieldAt(a, "WStep"), panel)
	p.DECQ(tiles)
	p.JNZ(LabelRef("columns"))
	p.Instruction(amx.Release())
	p.ret()
}

// Tile registers: sums, first those of 16 rows, then those of the others; x, and weights.
const tileX, tileW = 4, 6

// products adds up the products of a step. A tile is loaded just before the first product that needs it, between others.
// What later steps need is asked for meanwhile: the thread that shares the core leaves less of its caches than a strip of x and
// the weights of a tile take.
func (p *partsGen) products(xParts, wParts int, x, w, xRow, line reg.GPVirtual) {
	below := p.GP64() // the other 16 rows of x
	p.LEAQ(Mem{Base: x, Index: xRow, Scale: 1}, below)
	n := 0
	for j := range wParts {
		n += xParts - j
	}
	var later []Mem
	fetch := func(base reg.GPVirtual, bytes int) {
		for line := 0; line < bytes; line += 64 {
			later = append(later, Mem{Base: base, Disp: max(aheadProducts/n, 1)*bytes + line})
		}
	}
	fetch(w, 2*wParts*stepBytes)
	fetch(x, xParts*stepBytes)
	fetch(below, xParts*stepBytes)
	each := (len(later) + 4*n - 1) / (4 * n)

	has := [8]int{tileX: -1, -1, -1, -1} // the parts that are in registers
	load := func(t, part int) {
		if has[t] == part {
			return
		}
		has[t] = part
		m := Mem{Base: w, Disp: (2*part + t - tileW) * stepBytes}
		if t < tileW {
			m = Mem{Base: []reg.GPVirtual{x, below}[t-tileX], Disp: part * stepBytes}
		}
		at := p.GP64()
		p.LEAQ(m, at)
		p.Instruction(amx.Load(at, line, t))
	}
	for j := range wParts {
		// Small ones first, and back: the last part of x stays for the next of w.
		for m := range xParts - j {
			i := xParts - j - 1 - m
			if j%2 == 1 {
				i = m
			}
			for _, t := range []int{0, 2, 3, 1} { // a tile of those before stays
				load(tileW+t%2, j)
				load(tileX+t/2, i)
				p.Instruction(amx.Multiply(tileX+t/2, tileW+t%2, t))
				for _, m := range later[:min(each, len(later))] {
					p.PREFETCHT0(m)
				}
				later = later[min(each, len(later)):]
			}
		}
	}
}

// aheadProducts is how many products of tiles, four at a time, memory is asked ahead of.
const aheadProducts = 4

// odd makes the kernel that looks for what is not finite: 0 times it is NaN, and so is the sum of all.
func odd(g *gen) {
	g.kernel("odd", avx512, tileSource, "oddGo", "")
	from, n := g.arg("p"), g.arg("n")
	zero, sum, v := g.vec(), g.vec(), g.vec()
	g.zero(zero, sum)
	k, end := g.GP64(), g.GP64()
	g.XORQ(k, k)
	g.MOVQ(n, end)
	g.ANDQ(I32(-16), end)
	g.JZ(LabelRef("rest"))
	at := Mem{Base: from, Index: k, Scale: 4}
	g.Label("loop")
	g.VFMADD231PS(at, zero, sum)
	g.ADDQ(Imm(16), k)
	g.CMPQ(k, end)
	g.JLT(LabelRef("loop"))
	g.Label("rest")
	g.SUBQ(k, n)
	g.JZ(LabelRef("done"))
	g.VMOVUPS_Z(at, g.mask(n), v)
	g.VFMADD231PS(v, zero, sum)
	g.Label("done")
	unordered, seen := g.K(), g.GP64()
	g.VCMPPS(Imm(3), sum, sum, unordered)
	g.KMOVW(unordered, seen.As32())
	g.Store(seen, g.Return("odd"))
	g.ret()
}

// rows returns where the rows lie that a pack kernel reads; for those behind the last, the last.
func (g *gen) rows(a gotypes.Component, n int) []reg.GPVirtual {
	row, there := g.field(a, "SrcRow"), g.field(a, "Rows")
	of := []reg.GPVirtual{g.field(a, "Src")}
	for r := 1; r < n; r++ {
		next, last := g.GP64(), of[r-1]
		g.LEAQ(Mem{Base: last, Index: row, Scale: 1}, next)
		g.CMPQ(there, Imm(uint64(r)))
		g.CMOVQLE(last, next)
		of = append(of, next)
	}
	return of
}
