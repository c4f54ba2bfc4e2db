package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
	"gorgonia.org/leanattention/internal/cpu/_gen/amx"
)

// Products of integers in tile registers: see blocks_strips.go of package linear.

const stripSource = "blocks_strips.go"

// Offsets in an xStrip and in a weightStrip, and their size. Integers are at 0.
const (
	stripScales, stripSecond, stripSize = 2048, 2048 + 256, 2048 + 512
	stripBlock                          = 512  // of integers
	stripSums                           = 1024 // of a tile register
)

// linearStrips makes the kernels that multiply integers in tile registers.
func linearStrips(g *gen) {
	g.stripX()
	g.stripW()
	for _, k := range []kind{{}, {name: "Minima", minima: true}, {name: "Ones", ones: true}} {
		g.strips(k)
	}
}

// stripX makes the kernel that brings rows of x into columns.
func (g *gen) stripX() {
	g.kernel("stripX", avx512, stripSource, "stripXGo", args)
	a := g.Dereference(g.Param("a"))
	to, row, groups := g.field(a, "dst"), g.field(a, "srcRow"), g.field(a, "groups")
	of, at := bases(g, g.field(a, "src"), row, stepRows)
	rows, all := g.ZMM(), g.K()
	g.VPBROADCASTD(row.As32(), rows)
	g.VPMULLD(g.words("count", 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), rows, rows)
	g.Label("group")
	for half := range 2 {
		g.columns16(
			func(r int) Mem { return at(r).Offset(64 * half) },
			func(i int) Mem { return Mem{Base: to, Disp: i/4*stripBlock + (4*half+i%4)*64} })
	}
	for i := range 8 { // scales, and sums behind them
		v := g.ZMM()
		g.KXNORW(all, all, all)
		g.VGATHERDPS(Mem{Base: of[0], Index: rows, Scale: 1, Disp: xScales + 4*i}, all, v)
		g.VMOVUPS(v, Mem{Base: to, Disp: stripScales + 64*i})
	}
	for _, base := range of {
		g.ADDQ(U32(xSize), base)
	}
	g.ADDQ(U32(stripSize), to)
	g.DECQ(groups)
	g.JNZ(LabelRef("group"))
	g.ret()
}

// stripW makes the kernel that brings the halves of blocks of rows of weights together.
func (g *gen) stripW() {
	g.kernel("stripW", avx512, stripSource, "stripWGo", args)
	a := g.Dereference(g.Param("a"))
	to, factors, src, second := g.field(a, "dst"), g.field(a, "dst"), g.field(a, "src"), g.field(a, "second")
	flip, order := g.ZMM(), []reg.VecVirtual{g.ZMM(), g.ZMM()}
	g.VPBROADCASTQ(g.fieldAt(a, "flip"), flip)
	for i, v := range order { // of quarters: a first half, a second half, and those of the next block
		var words []uint32
		for _, q := range []uint32{0, 4, 1, 5} {
			words = append(words, 2*q+4*uint32(i), 0, 2*q+4*uint32(i)+1, 0)
		}
		g.VMOVDQU32(g.words([]string{"low", "high"}[i], words...), v)
	}
	rows := g.GP64()
	g.MOVQ(U32(stepRows), rows)
	g.Label("row")
	from, q, f, left := g.GP64(), g.GP64(), g.GP64(), g.field(a, "groups")
	g.MOVQ(src, from)
	g.MOVQ(to, q)
	g.MOVQ(factors, f)
	g.Label("group")
	halves := []reg.VecVirtual{g.ZMM(), g.ZMM()}
	for i, v := range halves {
		g.VPXORD(Mem{Base: from, Disp: 64 * i}, flip, v)
	}
	for i, order := range order {
		v := g.ZMM()
		g.VMOVDQA32(order, v)
		g.VPERMI2Q(halves[1], halves[0], v)
		g.VMOVDQU32(v, Mem{Base: q, Disp: 2 * i * stripBlock})
	}
	for b := range groupBlocks {
		for i, m := range []Mem{{Base: from, Disp: wScales + 4*b}, {Base: from, Index: second, Scale: 1, Disp: 4 * b}} {
			v := g.GP32()
			g.MOVL(m, v)
			g.MOVL(v, Mem{Base: f, Disp: stripScales + 256*i + 64*b})
		}
	}
	g.ADDQ(U32(wSize), from)
	g.ADDQ(U32(stripSize), q)
	g.ADDQ(U32(stripSize), f)
	g.DECQ(left)
	g.JNZ(LabelRef("group"))
	g.ADDQ(g.fieldAt(a, "srcRow"), src)
	g.ADDQ(Imm(64), to)
	g.ADDQ(Imm(4), factors)
	g.DECQ(rows)
	g.JNZ(LabelRef("row"))
	g.ret()
}

// groupBlocks is the number of blocks of a group.
const groupBlocks = 4

// Tile registers: sums, 16 rows of weights, and as many of x.
const tileInts, tileRows, tileColumns = 0, 4, 6

// strips makes the kernel that multiplies strips by a panel.
func (g *gen) strips(k kind) {
	g.kernel("strips"+k.name, amxTiles, stripSource, "strips"+k.name+"Go", args)
	a := g.Dereference(g.Param("a"))
	var shape [8][2]int
	for t := range shape {
		switch shape[t] = [2]int{16, 64}; {
		case t >= tileColumns:
			shape[t] = [2]int{8, 64}
		case t >= tileRows:
			shape[t] = [2]int{16, 32}
		}
	}
	config := g.StaticGlobal("config" + g.fn)
	g.DataAttributes(attr.RODATA | attr.NOPTR)
	for _, x := range amx.Shapes(shape) {
		g.AppendDatum(U64(x))
	}
	at := g.GP64()
	g.LEAQ(config, at)
	g.Instruction(amx.LoadConfig(at))
	rows, x, y, w, partial := g.field(a, "rows"), g.field(a, "x"), g.field(a, "y"), g.field(a, "w"), g.field(a, "partial")

	g.Label("strip")
	sums, xt, wt, left := g.field(a, "sums"), g.GP64(), g.GP64(), g.field(a, "groups")
	begin := func() {
		g.MOVQ(x, xt)
		g.MOVQ(w, wt)
	}
	advance := func(label string, sums reg.GPVirtual) {
		g.ADDQ(U32(stripSize), xt)
		g.ADDQ(U32(stripSize), wt)
		g.ADDQ(U32(groupBlocks*stripSums), sums)
		g.DECQ(left)
		g.JNZ(LabelRef(label))
	}
	begin()
	g.Label("products")
	g.stripProducts(xt, wt, sums)
	advance("products", sums)

	// Four output features at a time: their sums over a call's groups stay in registers.
	quad := g.GP64() // the offset of a quad in the sums of a product
	g.MOVQ(U32(0), quad)
	g.Label("quad")
	acc := g.vecs(16)
	kept := func(i int) Mem { return Mem{Base: partial, Disp: 64 * i} }
	flag := g.GP64()
	g.zero(acc...)
	g.MOVQ(g.fieldAt(a, "more"), flag)
	g.TESTQ(flag, flag)
	g.JZ(LabelRef("begin"))
	for i, v := range acc {
		g.VMOVUPS(kept(i), v)
	}
	g.Label("begin")
	from, factors := g.field(a, "sums"), g.GP64()
	g.ADDQ(quad, from)
	g.MOVQ(quad, factors)
	g.SHRQ(Imm(4), factors)
	begin()
	left = g.field(a, "groups")
	g.Label("group")
	at = g.GP64()
	g.LEAQ(Mem{Base: wt, Index: factors, Scale: 1}, at)
	g.stripSums(k, xt, at, from, acc)
	advance("group", from)

	flag = g.GP64()
	g.MOVQ(g.fieldAt(a, "unfinished"), flag)
	g.TESTQ(flag, flag)
	g.JZ(LabelRef("finish"))
	for i, v := range acc {
		g.VMOVUPS(v, kept(i))
	}
	g.JMP(LabelRef("next"))
	g.Label("finish")
	out := g.GP64()
	g.MOVQ(quad, out)
	g.SHRQ(Imm(4), out)
	g.ADDQ(y, out)
	g.stripResults(acc, out, g.field(a, "yRow"), rows)
	g.Label("next")
	g.ADDQ(U32(1024), partial)
	g.ADDQ(U32(256), quad)
	g.CMPQ(quad, U32(1024))
	g.JNE(LabelRef("quad"))

	g.ADDQ(g.fieldAt(a, "xStep"), x)
	strip := g.field(a, "yRow")
	g.SHLQ(Imm(4), strip)
	g.ADDQ(strip, y)
	g.SUBQ(Imm(16), rows)
	g.JG(LabelRef("strip"))
	g.Instruction(amx.Release())
	g.ret()
}

// stripProducts multiplies the blocks of a group.
func (g *gen) stripProducts(x, w, sums reg.GPVirtual) {
	line := g.GP64()
	g.MOVQ(U32(64), line)
	load := func(m Mem, t int) {
		at := g.GP64()
		g.LEAQ(m, at)
		g.Instruction(amx.Load(at, line, t))
	}
	store := func(i int) {
		at := g.GP64()
		g.LEAQ(Mem{Base: sums, Disp: stripSums * i}, at)
		g.Instruction(amx.Store(tileInts+i%4, at, line))
	}
	const late = 2 // a store waits for so many later products
	for i := range groupBlocks {
		to, rows, columns := tileInts+i, tileRows+i%2, tileColumns+i%2
		g.Instruction(amx.Zero(to))
		load(Mem{Base: w, Disp: i/2*2*stripBlock + i%2*32}, rows)
		load(Mem{Base: x, Disp: i * stripBlock}, columns)
		g.Instruction(amx.MultiplyBytes(rows, columns, to))
		if i >= late {
			store(i - late)
		}
	}
	for i := groupBlocks - late; i < groupBlocks; i++ {
		store(i)
	}
}

// stripSums scales and adds the products of a group for four output features.
func (g *gen) stripSums(k kind, x, factors, products reg.GPVirtual, acc []reg.VecVirtual) {
	v, scale := g.vecs(4), g.vec()
	for b := range groupBlocks {
		factor := func(disp, o int) Mem { return Mem{Base: factors, Disp: disp + 64*b + 4*o} }
		g.VMOVUPS(Mem{Base: x, Disp: stripScales + 64*b}, scale)
		for o, v := range v {
			g.VCVTDQ2PS(Mem{Base: products, Disp: stripSums*b + 64*o}, v)
			if !k.ones {
				g.VMULPS_BCST(factor(stripScales, o), v, v)
			}
			g.VFMADD231PS(scale, v, acc[4*o+b])
		}
		if k.minima {
			g.VMOVUPS(Mem{Base: x, Disp: stripSecond + 64*b}, scale)
			for o := range v {
				g.VFMADD231PS_BCST(factor(stripSecond, o), scale, acc[4*o+b])
			}
		}
	}
}

// stripResults writes the results of four output features and of rows rows, at most 16, yRow bytes apart.
func (g *gen) stripResults(acc []reg.VecVirtual, y, yRow, rows reg.GPVirtual) {
	var v []reg.VecVirtual
	for o := range 4 {
		s := acc[4*o:]
		g.VADDPS(s[2], s[0], s[0])
		g.VADDPS(s[3], s[1], s[1])
		g.VADDPS(s[1], s[0], s[0])
		v = append(v, s[0])
	}
	v = g.exchange(v)
	for r := range 16 {
		if r > 0 {
			g.CMPQ(rows, Imm(uint64(r)))
			g.JLE(LabelRef("next"))
			g.ADDQ(yRow, y)
		}
		g.VEXTRACTF32X4(Imm(uint64(r/4)), v[r%4], Mem{Base: y})
	}
}

// columns16 writes the columns of 16 rows of 16 words.
func (g *gen) columns16(row, column func(i int) Mem) {
	v := g.vecs(16)
	for r := range v {
		g.VMOVDQU32(row(r), v[r])
	}
	// Of four rows: c[j] has columns j, 4+j, 8+j and 12+j.
	var c [4][]reg.VecVirtual
	for q := range c {
		t, four := g.vecs(4), v[4*q:]
		for i := range 2 {
			g.VPUNPCKLDQ(four[2*i+1], four[2*i], t[2*i])
			g.VPUNPCKHDQ(four[2*i+1], four[2*i], t[2*i+1])
		}
		c[q] = g.vecs(4)
		for i := range 2 {
			g.VPUNPCKLQDQ(t[2+i], t[i], c[q][2*i])
			g.VPUNPCKHQDQ(t[2+i], t[i], c[q][2*i+1])
		}
	}
	const even, odd = 0x88, 0xdd // of the quarters
	for j := range 4 {
		for i, first := range []uint64{even, odd} {
			upper, lower := g.ZMM(), g.ZMM()
			g.VSHUFI32X4(Imm(first), c[1][j], c[0][j], upper)
			g.VSHUFI32X4(Imm(first), c[3][j], c[2][j], lower)
			for h, second := range []uint64{even, odd} {
				v := g.ZMM()
				g.VSHUFI32X4(Imm(second), lower, upper, v)
				g.VMOVDQU32(v, column(4*(i+2*h)+j))
			}
		}
	}
}
