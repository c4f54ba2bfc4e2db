package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Products with AVX-512 and VNNI.
//
// The first 64 integers of a group are the first halves of the four blocks, and those behind them the second halves: so four lanes of
// a vector are a block. Signed integers of weights have 128 added, since VPDPBUSD multiplies bytes without a sign by bytes with one,
// and an xGroup has what is to be subtracted.
//
// A vector of sums has the four blocks of a group for four output features: lane 4*b + o. So a result is the sum of four sums, of the
// blocks with one remainder by four, in each kernel. A kernel has those lanes
//
//   - since the weights have this order (panel): each VPDPBUSD multiplies four elements of each block, and x is the same for four lanes,
//   - or since the sums of products of an output feature change places with those of three others (across).

// Offsets in a set of a group of a panel, and sizes.
const (
	panelSets                = 4
	sScales, sSecond, sSize  = 512, 576, 640
	panelSize, panelPartials = panelSets * sSize, panelSets * 64
)

// across returns the vector whose lane 4*b + s is the sum of lanes 4*b to 4*b + 3 of vector s.
func (g *gen) across(v []reg.VecVirtual) reg.VecVirtual {
	return g.fold(v, g.VPADDD, [4]func(...Op){g.VPUNPCKLDQ, g.VPUNPCKHDQ, g.VPUNPCKLQDQ, g.VPUNPCKHQDQ})
}

// turned are the indices that make lane 4*b + s of lane 4*s + b.
func (g *gen) turned() reg.VecVirtual {
	v := g.ZMM()
	g.VMOVDQU32(g.words("turned", 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v)
	return v
}

// four returns the vector whose lane 4*b + s is word b of source s.
func (g *gen) four(source func(s int) Op, turned reg.VecVirtual) reg.VecVirtual {
	v := g.ZMM()
	g.VMOVUPS(source(0), v.AsX())
	for s := 1; s < 4; s++ {
		g.VINSERTF32X4(Imm(uint64(s)), source(s), v, v)
	}
	g.VPERMPS(v, turned, v)
	return v
}

// overBlocks returns the sums of lanes s, s + 4, s + 8 and s + 12 in lane s.
func (g *gen) overBlocks(v reg.VecVirtual) reg.VecVirtual {
	half, quarter := g.YMM(), g.XMM()
	g.VEXTRACTF64X4(Imm(1), v, half)
	g.VADDPS(v.AsY(), half, half)
	g.VEXTRACTF32X4(Imm(1), half, quarter)
	g.VADDPS(half.AsX(), quarter, quarter)
	return quarter
}

// oneQuads makes the kernel of one row of x and of groups of weights.
func (g *gen) oneQuads(k kind) {
	g.kernel("one"+k.name, avx512, blockSource, "one"+k.name+"Go", args)
	a := g.Dereference(g.Param("a"))
	y, sets := g.field(a, "y"), g.field(a, "sets")
	w := []reg.GPVirtual{g.field(a, "w"), g.GP64(), g.GP64(), g.GP64()}
	turned, sum := g.turned(), g.ZMM()
	x, at, left := g.GP64(), g.GP64(), g.GP64()
	g.Label("set")
	row := g.field(a, "wRow")
	for s := 1; s < 4; s++ {
		g.LEAQ(Mem{Base: w[s-1], Index: row, Scale: 1}, w[s])
	}
	g.zero(sum)
	g.MOVQ(g.fieldAt(a, "x"), x)
	g.MOVQ(g.fieldAt(a, "groups"), left)
	g.XORQ(at, at)
	g.Label("group")
	words := func(disp int) reg.VecVirtual {
		return g.four(func(s int) Op { return Mem{Base: w[s], Index: at, Scale: 1, Disp: disp} }, turned)
	}
	parts, scales := [][]int{{0, 64}}, []int{wScales}
	if k.halves {
		parts, scales = [][]int{{0}, {64}}, []int{wScales, wHigh}
	}
	for i, part := range parts {
		var v []reg.VecVirtual
		for s := range w {
			v = append(v, g.ZMM())
			g.zero(v[s])
			for _, disp := range part {
				q := g.ZMM()
				g.VMOVDQU32(Mem{Base: w[s], Index: at, Scale: 1, Disp: disp}, q)
				g.VPDPBUSD(Mem{Base: x, Disp: disp}, q, v[s])
			}
		}
		all := g.across(v)
		if !k.minima {
			g.VPADDD(Mem{Base: x, Disp: g.offset(k, i)}, all, all)
		}
		g.VCVTDQ2PS(all, all)
		g.VMULPS(words(scales[i]), all, all)
		g.VFMADD231PS(Mem{Base: x, Disp: xWideScales}, all, sum)
	}
	if k.minima {
		g.VFMADD231PS(Mem{Base: x, Disp: xWideSums}, words(wMinima), sum)
	}
	g.ADDQ(U32(wSize), at)
	g.ADDQ(U32(xSize), x)
	g.DECQ(left)
	g.JNZ(LabelRef("group"))
	yStep := g.field(a, "yStep")
	g.put4(g.overBlocks(sum), yStep, y)
	g.LEAQ(Mem{Base: y, Index: yStep, Scale: 4}, y)
	row = g.field(a, "wRow")
	g.LEAQ(Mem{Base: w[3], Index: row, Scale: 1}, w[0])
	g.DECQ(sets)
	g.JNZ(LabelRef("set"))
	g.ret()
}

// offset returns the offset in an xGroup of the initial sums of part i.
func (g *gen) offset(k kind, i int) int {
	if k.halves {
		return xOffsets + 64*(i+1)
	}
	return xOffsets
}

// interleave makes the kernel that brings groups of four rows of weights into a set of a panel.
func (g *gen) interleave() {
	g.kernel("interleave", avx512, blockSource, "interleaveGo", args)
	a := g.Dereference(g.Param("a"))
	to, second, groups := g.field(a, "dst"), g.field(a, "second"), g.field(a, "groups")
	w := []reg.GPVirtual{g.field(a, "src"), g.GP64(), g.GP64(), g.GP64()}
	turned := g.turned()
	row := g.field(a, "srcRow")
	for s := 1; s < 4; s++ {
		g.LEAQ(Mem{Base: w[s-1], Index: row, Scale: 1}, w[s])
	}
	g.Label("group")
	for half := range 2 {
		v := g.vecs(4)
		for s := range v {
			g.VMOVDQU32(Mem{Base: w[s], Disp: 64 * half}, v[s])
		}
		for i, q := range g.exchange(v) {
			g.VMOVDQU32(q, Mem{Base: to, Disp: 256*half + 64*i})
		}
	}
	g.VMOVUPS(g.four(func(s int) Op { return Mem{Base: w[s], Disp: wScales} }, turned), Mem{Base: to, Disp: sScales})
	g.VMOVUPS(g.four(func(s int) Op { return Mem{Base: w[s], Index: second, Scale: 1} }, turned), Mem{Base: to, Disp: sSecond})
	for _, w := range w {
		g.ADDQ(U32(wSize), w)
	}
	g.ADDQ(U32(panelSize), to)
	g.DECQ(groups)
	g.JNZ(LabelRef("group"))
	g.ret()
}

// laneConstants sets the registers that lanes needs.
func (u *unpacker) laneConstants() {
	if !u.minima {
		u.constants["turned"] = u.turned()
		return
	}
	var scales, minima []int // of the eight factors of two output features, and of two others
	for b := range 4 {
		for s := range 4 {
			scales = append(scales, 8*s+2*b)
			minima = append(minima, 8*s+2*b+1)
		}
	}
	u.indices("scaleLanes", 32, scales)
	u.indices("minimaLanes", 32, minima)
}

// lanes returns the scales and the minima of the blocks of four output features, of their factors, which it changes: nil is none.
func (u *unpacker) lanes(factors []reg.VecVirtual) (scales, minima reg.VecVirtual) {
	switch {
	case len(factors) == 0:
		return nil, nil
	case !u.minima:
		return u.four(func(s int) Op { return factors[s].AsX() }, u.constants["turned"]), nil
	}
	for s := 0; s < 4; s += 2 {
		u.VINSERTF64X4(Imm(1), factors[s+1].AsY(), factors[s], factors[s])
	}
	scales = u.ZMM()
	u.VMOVDQA32(u.constants["scaleLanes"], scales)
	u.VPERMI2PS(factors[2], factors[0], scales)
	u.VPERMT2PS(factors[2], u.constants["minimaLanes"], factors[0])
	return scales, factors[0]
}

// pack makes the kernel that makes a set of a panel of four rows.
func (f blockFormat) pack(g *gen) {
	g.kernel("pack"+f.name, avx512, blockSource, "pack"+f.name+"Go", args)
	u := &unpacker{gen: g, blockFormat: f, constants: map[string]reg.VecVirtual{}}
	a := g.Dereference(g.Param("a"))
	to, groups, rest := g.field(a, "dst"), g.field(a, "n"), g.GP64()
	g.MOVQ(groups, rest)
	g.SHRQ(Imm(7), groups)
	g.ANDQ(Imm(127), rest)
	u.prepareRest(rest)
	u.groupConstants()
	u.laneConstants()
	one := g.ZMM()
	if f.elements == 1 {
		g.VPBROADCASTD(g.words("one", 0x3f800000), one)
	}
	w := []reg.GPVirtual{g.field(a, "src"), g.GP64(), g.GP64(), g.GP64()}
	row := g.field(a, "srcRow")
	for s := 1; s < 4; s++ {
		g.LEAQ(Mem{Base: w[s-1], Index: row, Scale: 1}, w[s])
	}
	size := f.groupBytes()
	group := func(rest bool) {
		var packed, low, high, factors []reg.VecVirtual
		for s := range w {
			u.suffix = fmt.Sprint(s)
			q := f.group(u, w[s], rest)
			packed, low, high = append(packed, q.packed), append(low, q.low), append(high, q.high)
			if q.factors != nil {
				factors = append(factors, q.factors)
			}
			if !rest {
				g.ADDQ(U32(uint32(size)), w[s])
			}
		}
		if packed[0] != nil {
			for i, v := range g.exchange(packed) {
				low, high := u.split(v)
				g.VMOVDQU32(low, Mem{Base: to, Disp: 64 * i})
				g.VMOVDQU32(high, Mem{Base: to, Disp: 256 + 64*i})
			}
		} else {
			for i, v := range append(g.exchange(low), g.exchange(high)...) {
				g.VMOVDQU32(v, Mem{Base: to, Disp: 64 * i})
			}
		}
		scales, minima := u.lanes(factors)
		if scales == nil {
			scales = one
		}
		g.VMOVUPS(scales, Mem{Base: to, Disp: sScales})
		if minima != nil {
			g.VMOVUPS(minima, Mem{Base: to, Disp: sSecond})
		}
	}
	u.left = rest
	g.eachGroup(groups, rest, func(part bool) {
		if group(part); !part {
			g.ADDQ(U32(panelSize), to)
		}
	})
	g.ret()
}

// exchange returns the vectors whose word 4*b + s of vector i is word 4*b + i of vector s.
func (g *gen) exchange(v []reg.VecVirtual) []reg.VecVirtual {
	t, q := g.vecs(4), g.vecs(4)
	g.VPUNPCKLDQ(v[1], v[0], t[0])
	g.VPUNPCKLDQ(v[3], v[2], t[1])
	g.VPUNPCKHDQ(v[1], v[0], t[2])
	g.VPUNPCKHDQ(v[3], v[2], t[3])
	for i := range 2 {
		g.VPUNPCKLQDQ(t[2*i+1], t[2*i], q[2*i])
		g.VPUNPCKHQDQ(t[2*i+1], t[2*i], q[2*i+1])
	}
	return q
}

// panelTile is a kernel of rows of x and a panel.
type panelTile struct {
	*gen
	kind
	w      reg.GPVirtual
	x      []reg.GPVirtual    // rows
	sums   [][]reg.VecVirtual // of each row, by set
	v      []reg.VecVirtual   // of each row
	suffix string             // of labels
}

// panel makes the kernel of several rows of x and a panel. Two rows at a time, and then one, share the weights in registers.
func (g *gen) panel(k kind) {
	g.kernel("panel"+k.name, avx512, blockSource, "panel"+k.name+"Go", args)
	a := g.Dereference(g.Param("a"))
	x, y, partial, rows, fetch := g.field(a, "x"), g.field(a, "y"), g.field(a, "partial"), g.field(a, "rows"), g.field(a, "fetch")
	w, left, xRow, yRow, flag, lines := g.GP64(), g.GP64(), g.GP64(), g.GP64(), g.GP64(), g.GP64()
	at := []reg.GPVirtual{g.GP64(), g.GP64()}
	sums, v := [][]reg.VecVirtual{g.vecs(panelSets), g.vecs(panelSets)}, g.vecs(2)
	for nx := 2; nx > 0; nx-- {
		t := &panelTile{gen: g, kind: k, w: w, x: at[:nx], sums: sums[:nx], v: v[:nx], suffix: fmt.Sprint(nx)}
		label := func(name string) LabelRef { return LabelRef(name + t.suffix) }
		place := func(name string) { g.Label(name + t.suffix) }
		place("rows")
		g.CMPQ(rows, Imm(uint64(nx)))
		g.JLT(label("end"))
		for r := range t.sums {
			g.zero(t.sums[r]...)
		}
		kept := func(r, s int) Mem { return Mem{Base: partial, Disp: panelPartials*r + 64*s} }
		g.MOVQ(g.fieldAt(a, "more"), flag)
		g.TESTQ(flag, flag)
		g.JZ(label("begin"))
		for r := range t.sums {
			for s, v := range t.sums[r] {
				g.VMOVUPS(kept(r, s), v)
			}
		}
		place("begin")
		g.MOVQ(g.fieldAt(a, "xRow"), xRow)
		g.MOVQ(x, at[0])
		if nx == 2 {
			g.LEAQ(Mem{Base: x, Index: xRow, Scale: 1}, at[1])
		}
		g.MOVQ(g.fieldAt(a, "w"), w)
		g.MOVQ(g.fieldAt(a, "groups"), left)
		g.TESTQ(left, left)
		g.JZ(label("rest"))
		place("group")
		g.MOVQ(g.fieldAt(a, "lines"), lines)
		place("fetch")
		g.PREFETCHT1(Mem{Base: fetch})
		g.ADDQ(Imm(64), fetch)
		g.DECQ(lines)
		g.JNZ(label("fetch"))
		t.group(false)
		g.ADDQ(U32(panelSize), w)
		for _, x := range t.x {
			g.ADDQ(U32(xSize), x)
		}
		g.DECQ(left)
		g.JNZ(label("group"))
		place("rest")
		g.MOVQ(g.fieldAt(a, "half"), flag)
		g.TESTQ(flag, flag)
		g.JZ(label("finish"))
		t.group(true)
		place("finish")
		g.MOVQ(g.fieldAt(a, "unfinished"), flag)
		g.TESTQ(flag, flag)
		g.JNZ(label("keep"))
		g.MOVQ(g.fieldAt(a, "yRow"), yRow)
		for r := range t.sums {
			for s, v := range t.sums[r] {
				g.VMOVUPS(g.overBlocks(v), Mem{Base: y, Disp: 16 * s})
			}
			g.ADDQ(yRow, y)
		}
		g.JMP(label("next"))
		place("keep")
		for r := range t.sums {
			for s, v := range t.sums[r] {
				g.VMOVUPS(v, kept(r, s))
			}
		}
		place("next")
		g.ADDQ(U32(uint32(nx*panelPartials)), partial)
		g.MOVQ(g.fieldAt(a, "xRow"), xRow)
		for range nx {
			g.ADDQ(xRow, x)
		}
		g.SUBQ(Imm(uint64(nx)), rows)
		g.JMP(label("rows"))
		place("end")
	}
	g.ret()
}

// group adds the products of a group, or of the first two blocks of a group: then the upper halves of vectors of products are 0.
func (t *panelTile) group(half bool) {
	wide := func(v reg.VecVirtual) Op {
		if half {
			return v.AsY()
		}
		return v
	}
	nx := len(t.x)
	words := make([][]reg.VecVirtual, nx) // words i of the halves of a row's blocks, each four times
	scales, minima := t.vecs(nx), t.vecs(nx)
	for r, x := range t.x {
		words[r] = t.vecs(8)
		for i, v := range words[r] {
			t.VPSHUFD(Imm(uint64(i%4*0x55)), Mem{Base: x, Disp: i / 4 * 64}, wide(v))
		}
		t.VMOVUPS(Mem{Base: x, Disp: xWideScales}, scales[r])
		if t.minima {
			t.VMOVUPS(Mem{Base: x, Disp: xWideSums}, minima[r])
		}
	}
	parts := 1
	if t.halves {
		parts = 2
	}
	v, q := t.v, t.ZMM()
	for s := range panelSets {
		for part := range parts {
			for r, x := range t.x {
				if t.minima {
					t.zero(v[r])
				} else {
					t.VMOVDQU32(Mem{Base: x, Disp: t.offset(t.kind, part)}, v[r])
				}
			}
			for i := part * 4; i < 8/parts*(part+1); i++ {
				t.VMOVDQU32(Mem{Base: t.w, Disp: sSize*s + 64*i}, wide(q))
				for r := range t.x {
					t.VPDPBUSD(wide(words[r][i]), wide(q), wide(v[r]))
				}
			}
			for r := range t.x {
				t.VCVTDQ2PS(wide(v[r]), wide(v[r]))
				t.VMULPS(Mem{Base: t.w, Disp: sSize*s + sScales + 64*part}, wide(v[r]), wide(v[r]))
				t.VFMADD231PS(scales[r], v[r], t.sums[r][s])
			}
		}
		if t.minima {
			for r := range t.x {
				t.VFMADD231PS(Mem{Base: t.w, Disp: sSize*s + sSecond}, minima[r], t.sums[r][s])
			}
		}
	}
}
