package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// rowAVX512 makes the kernel of one row of x, whose groups of weights stay in registers.
func (f blockFormat) rowAVX512(g *gen) {
	g.kernel("row"+f.name, avx512, blockSource, "row"+f.name+"Go", args)
	u := &unpacker{gen: g, blockFormat: f, constants: map[string]reg.VecVirtual{}}
	a := g.Dereference(g.Param("a"))
	n := g.field(a, "n")
	groups, rest := g.GP64(), g.GP64()
	g.MOVQ(n, groups)
	g.MOVQ(n, rest)
	g.SHRQ(Imm(7), groups)
	g.ANDQ(Imm(127), rest)
	u.prepareRest(rest)
	u.groupConstants()
	u.laneConstants()
	y, sets, fetch := g.field(a, "y"), g.field(a, "sets"), g.field(a, "fetch")
	w := []reg.GPVirtual{g.field(a, "w"), g.GP64(), g.GP64(), g.GP64()}
	sum := g.ZMM()
	x, left := g.GP64(), g.GP64()
	size := f.groupBytes()
	group := func(rest bool) {
		low, high := g.ZMM(), g.ZMM()
		g.VMOVDQU32(Mem{Base: x}, low)
		g.VMOVDQU32(Mem{Base: x, Disp: 64}, high)
		var factors []reg.VecVirtual
		v := g.vecs(4)
		for s := range v {
			u.suffix = fmt.Sprint(s)
			q := f.group(u, w[s], rest)
			if q.packed != nil {
				q.low, q.high = u.split(q.packed)
			}
			g.zero(v[s])
			g.VPDPBUSD(low, q.low, v[s])
			g.VPDPBUSD(high, q.high, v[s])
			if q.factors != nil {
				factors = append(factors, q.factors)
			}
			if !rest {
				g.ADDQ(U32(uint32(size)), w[s])
			}
		}
		all := g.across(v)
		if !f.minima {
			g.VPADDD(Mem{Base: x, Disp: xOffsets}, all, all)
		}
		g.VCVTDQ2PS(all, all)
		scales, minima := u.lanes(factors)
		if scales != nil {
			g.VMULPS(scales, all, all)
		}
		g.VFMADD231PS(Mem{Base: x, Disp: xWideScales}, all, sum)
		if minima != nil {
			g.VFMADD231PS(Mem{Base: x, Disp: xWideSums}, minima, sum)
		}
	}
	g.Label("set")
	wRow := g.field(a, "wRow")
	for s := 1; s < 4; s++ {
		g.LEAQ(Mem{Base: w[s-1], Index: wRow, Scale: 1}, w[s])
	}
	next := g.GP64()
	g.LEAQ(Mem{Base: w[3], Index: wRow, Scale: 1}, next)
	g.zero(sum)
	g.MOVQ(g.fieldAt(a, "x"), x)
	g.MOVQ(groups, left)
	u.left = rest
	g.eachGroup(left, rest, func(part bool) {
		g.prefetchLines(fetch, g.fieldAt(a, "fetchStep"), 4*size)
		if group(part); !part {
			g.ADDQ(U32(xSize), x)
		}
	})
	yStep := g.field(a, "yStep")
	g.put4(g.overBlocks(sum), yStep, y)
	g.LEAQ(Mem{Base: y, Index: yStep, Scale: 4}, y)
	g.MOVQ(next, w[0])
	g.DECQ(sets)
	g.JNZ(LabelRef("set"))
	g.ret()
}
