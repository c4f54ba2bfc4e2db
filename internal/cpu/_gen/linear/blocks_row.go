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
	stride := 1
	if f.minima {
		stride = 2
	}
	var scales, minima []int
	for b := range 4 {
		for range 4 {
			scales = append(scales, stride*b)
		}
		minima = append(minima, 2*b+1)
	}
	lanes := u.indices("lanes", 32, scales)
	xLanes := lanes
	var minimaLanes reg.VecVirtual
	var four reg.OpmaskVirtual
	if f.minima {
		xLanes = u.indices("xlanes", 32, []int{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3})
		minimaLanes = u.indices("minima", 32, minima)
		bits := g.GP32()
		four = g.K()
		g.MOVL(U32(15), bits)
		g.KMOVW(bits, four)
	}
	y, sets, fetch := g.field(a, "y"), g.field(a, "sets"), g.field(a, "fetch")
	w := []reg.GPVirtual{g.field(a, "w"), g.GP64(), g.GP64(), g.GP64()}
	sums := g.vecs(4)
	x, left := g.GP64(), g.GP64()
	size := f.groupBytes()
	group := func(rest bool) {
		low, high, xScale := g.ZMM(), g.ZMM(), g.ZMM()
		g.VMOVDQU32(Mem{Base: x}, low)
		g.VMOVDQU32(Mem{Base: x, Disp: 64}, high)
		g.VMOVUPS(Mem{Base: x, Disp: xScales}, xScale.AsY())
		g.VPERMPS(xScale, xLanes, xScale)
		var offsets, xSum reg.VecVirtual
		if f.minima {
			xSum = g.ZMM()
			g.VMOVUPS_Z(Mem{Base: x, Disp: xSums}, four, xSum)
		} else {
			offsets = g.ZMM()
			g.VMOVDQU32(Mem{Base: x, Disp: xOffsets}, offsets)
		}
		for s, sum := range sums {
			u.suffix = fmt.Sprint(s)
			q, v := f.group(u, w[s], rest), g.ZMM()
			if f.minima {
				g.VPXORD(v, v, v)
			} else {
				g.VMOVDQA32(offsets, v)
			}
			g.VPDPBUSD(low, q.low, v)
			g.VPDPBUSD(high, q.high, v)
			g.VCVTDQ2PS(v, v)
			scale := xScale
			if q.factors != nil {
				scale = g.ZMM()
				g.VPERMPS(q.factors, lanes, scale)
				g.VMULPS(xScale, scale, scale)
			}
			g.VFMADD231PS(scale, v, sum)
			if f.minima {
				g.VPERMPS_Z(q.factors, minimaLanes, four, q.factors)
				g.VFMADD231PS(xSum, q.factors, sum)
			}
			if !rest {
				g.ADDQ(U32(uint32(size)), w[s])
			}
		}
	}
	g.Label("set")
	wRow := g.field(a, "wRow")
	for s := 1; s < 4; s++ {
		g.LEAQ(Mem{Base: w[s-1], Index: wRow, Scale: 1}, w[s])
	}
	next := g.GP64()
	g.LEAQ(Mem{Base: w[3], Index: wRow, Scale: 1}, next)
	g.zero(sums...)
	g.MOVQ(g.fieldAt(a, "x"), x)
	g.MOVQ(groups, left)
	g.TESTQ(left, left)
	g.JZ(LabelRef("rest"))
	g.Label("group")
	g.prefetchLines(fetch, g.fieldAt(a, "fetchStep"), 4*size)
	group(false)
	g.ADDQ(U32(xSize), x)
	g.DECQ(left)
	g.JNZ(LabelRef("group"))
	g.Label("rest")
	g.TESTQ(rest, rest)
	g.JZ(LabelRef("end"))
	u.left = rest
	g.prefetchLines(fetch, g.fieldAt(a, "fetchStep"), 4*size)
	group(true)
	g.Label("end")
	yStep := g.field(a, "yStep")
	g.put4(sums, yStep, y)
	g.LEAQ(Mem{Base: y, Index: yStep, Scale: 4}, y)
	g.MOVQ(next, w[0])
	g.DECQ(sets)
	g.JNZ(LabelRef("set"))
	g.ret()
}
