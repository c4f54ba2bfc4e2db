package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vector makes the loops over the elements of queries and outputs.
func vector(g *gen) {
	for _, set := range []isa{avx2, avx512} {
		scale(g, set)
		divide(g, set)
	}
}

func at(base, k reg.GPVirtual) Mem { return Mem{Base: base, Index: k, Scale: 4} }

// paramAt returns where a parameter lies.
func (g *gen) paramAt(name string) Mem {
	p, err := g.Param(name).Resolve()
	if err != nil {
		g.fail(err)
	}
	return p.Addr
}

func scale(g *gen, set isa) {
	g.kernel("scale", set, "vector_go.go", "scaleGo", "")
	dst, src, n := g.arg("dst"), g.arg("src"), g.arg("n")
	by, v := g.vec(), g.vec()
	g.VBROADCASTSD(g.paramAt("by"), by)
	// A vector becomes two of float64.
	half := func(x, to reg.VecVirtual) {
		wide := g.vec()
		g.VCVTPS2PD(x, wide)
		g.VMULPD(by, wide, wide)
		if set == avx512 {
			g.VCVTPD2PS(wide, to.AsY())
		} else {
			g.VCVTPD2PSY(wide, to.AsX())
		}
	}
	both := func() {
		lo, hi := g.vec(), g.vec()
		if set == avx512 {
			y := g.YMM()
			g.VEXTRACTF64X4(Imm(1), v, y)
			half(v.AsY().(reg.VecVirtual), lo)
			half(y, hi)
			g.VINSERTF64X4(Imm(1), hi.AsY(), lo, v)
		} else {
			x := g.XMM()
			g.VEXTRACTF128(Imm(1), v, x)
			half(v.AsX().(reg.VecVirtual), lo)
			half(x, hi)
			g.VINSERTF128(Imm(1), hi.AsX(), lo, v)
		}
	}
	g.each(n, func(k reg.GPVirtual) {
		g.VMOVUPS(at(src, k), v)
		both()
		g.VMOVUPS(v, at(dst, k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		g.VMOVUPS_Z(at(src, k), m, v)
		both()
		g.VMOVUPS(v, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x := g.XMM()
		g.VXORPS(x, x, x)
		g.VCVTSS2SD(at(src, k), x, x)
		g.VMULSD(by.AsX(), x, x)
		g.VCVTSD2SS(x, x, x)
		g.VMOVSS(x, at(dst, k))
	})
}

func divide(g *gen, set isa) {
	g.kernel("divide", set, "vector_go.go", "divideGo", "")
	dst, src, n := g.arg("dst"), g.arg("src"), g.arg("n")
	by, v := g.vec(), g.vec()
	g.VBROADCASTSS(g.paramAt("by"), by)
	g.each(n, func(k reg.GPVirtual) {
		g.VMOVUPS(at(src, k), v)
		g.VDIVPS(by, v, v)
		g.VMOVUPS(v, at(dst, k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		g.VMOVUPS_Z(at(src, k), m, v)
		g.VDIVPS_Z(by, v, m, v)
		g.VMOVUPS(v, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x := v.AsX()
		g.VMOVSS(at(src, k), x)
		g.VDIVSS(by.AsX(), x, x)
		g.VMOVSS(x, at(dst, k))
	})
}
