package main

import (
	"math"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vector makes the loops over the elements of queries, outputs and scores.
func vector(g *gen) {
	for _, set := range []isa{avx2, avx512} {
		scale(g, set)
		divide(g, set)
		bias(g, set)
		slope(g, set)
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
	both := func() {
		wide := g.float64Halves(v)
		for _, x := range wide {
			g.VMULPD(by, x, x)
		}
		g.narrow(wide, v)
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

// float64Halves returns the halves of v as float64.
func (g *gen) float64Halves(v reg.VecVirtual) (wide [2]reg.VecVirtual) {
	var upper, lower reg.VecVirtual
	if g.isa == avx512 {
		lower, upper = v.AsY().(reg.VecVirtual), g.YMM()
		g.VEXTRACTF64X4(Imm(1), v, upper)
	} else {
		lower, upper = v.AsX().(reg.VecVirtual), g.XMM()
		g.VEXTRACTF128(Imm(1), v, upper)
	}
	for i, half := range []reg.VecVirtual{lower, upper} {
		wide[i] = g.vec()
		g.VCVTPS2PD(half, wide[i])
	}
	return wide
}

// narrow rounds what float64Halves returned into v.
func (g *gen) narrow(wide [2]reg.VecVirtual, v reg.VecVirtual) {
	upper := g.vec()
	if g.isa == avx512 {
		g.VCVTPD2PS(wide[0], v.AsY())
		g.VCVTPD2PS(wide[1], upper.AsY())
		g.VINSERTF64X4(Imm(1), upper.AsY(), v, v)
	} else {
		g.VCVTPD2PSY(wide[0], v.AsX())
		g.VCVTPD2PSY(wide[1], upper.AsX())
		g.VINSERTF128(Imm(1), upper.AsX(), v, v)
	}
}

// float64s returns where numbers lie as float64.
func (g *gen) float64s(name string, numbers ...float64) Mem {
	m := g.StaticGlobal(name + g.isa.name)
	g.DataAttributes(attr.RODATA | attr.NOPTR)
	for _, x := range numbers {
		g.AppendDatum(U64(math.Float64bits(x)))
	}
	return m
}

func bias(g *gen, set isa) {
	g.kernel("bias", set, "vector_go.go", "biasGo", "")
	dst, src, n := g.arg("dst"), g.arg("src"), g.arg("n")
	by, lowest, inf := g.vec(), g.vec(), g.vec()
	g.VBROADCASTSD(g.paramAt("by"), by)
	g.VBROADCASTSD(g.float64s("lowest", -math.MaxFloat32), lowest)
	g.VBROADCASTSD(g.float64s("infinite", math.Inf(-1)), inf)
	// product makes x the product, as float64.
	product := func(x reg.VecVirtual) {
		const equal = 0
		least := g.vec()
		g.VMULPD(by, x, x)
		g.VMAXPD(x, lowest, least) // NaN stays
		if set == avx512 {
			m := g.K()
			g.VCMPPD(Imm(equal), inf, x, m)
			g.VBLENDMPD(x, least, m, x)
			return
		}
		is := g.vec()
		g.VCMPPD(Imm(equal), inf, x, is)
		g.VBLENDVPD(is, x, least, x)
	}
	add := func(x, y reg.VecVirtual) {
		scores, products := g.float64Halves(x), g.float64Halves(y)
		for i, p := range products {
			product(p)
			g.VADDPD(p, scores[i], scores[i])
		}
		g.narrow(scores, x)
	}
	g.each(n, func(k reg.GPVirtual) {
		x, y := g.vec(), g.vec()
		g.VMOVUPS(at(dst, k), x)
		g.VMOVUPS(at(src, k), y)
		add(x, y)
		g.VMOVUPS(x, at(dst, k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		x, y := g.vec(), g.vec()
		g.VMOVUPS_Z(at(dst, k), m, x)
		g.VMOVUPS_Z(at(src, k), m, y)
		add(x, y)
		g.VMOVUPS(x, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x, y := g.vec(), g.vec()
		g.VMOVSS(at(dst, k), x.AsX())
		g.VMOVSS(at(src, k), y.AsX())
		add(x, y)
		g.VMOVSS(x.AsX(), at(dst, k))
	})
}

func slope(g *gen, set isa) {
	g.kernel("slope", set, "vector_go.go", "slopeGo", "")
	dst, n := g.arg("dst"), g.arg("n")
	by, from, on := g.vec(), g.vec(), g.vec()
	g.VBROADCASTSD(g.paramAt("by"), by)
	g.VBROADCASTSD(g.paramAt("from"), from)
	g.VBROADCASTSD(g.float64s("lanes", float64(set.lanes)), on)
	one := g.float64s("one", 1)
	numbers := make([]float64, set.lanes)
	for i := range numbers {
		numbers[i] = float64(i)
	}
	indexes := g.float64s("indexes", numbers...)
	var index [2]reg.VecVirtual
	for i := range index {
		index[i] = g.vec()
		g.VMOVUPD(indexes.Offset(8*set.lanes/2*i), index[i])
	}
	add := func(x reg.VecVirtual) {
		scores := g.float64Halves(x)
		for i, s := range scores {
			p := g.vec()
			g.VADDPD(index[i], from, p)
			g.VMULPD(by, p, p)
			g.VADDPD(p, s, s)
		}
		g.narrow(scores, x)
	}
	g.each(n, func(k reg.GPVirtual) {
		x := g.vec()
		g.VMOVUPS(at(dst, k), x)
		add(x)
		g.VMOVUPS(x, at(dst, k))
		for _, i := range index {
			g.VADDPD(on, i, i)
		}
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		x := g.vec()
		g.VMOVUPS_Z(at(dst, k), m, x)
		add(x)
		g.VMOVUPS(x, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x := g.vec()
		g.VMOVSS(at(dst, k), x.AsX())
		add(x)
		g.VMOVSS(x.AsX(), at(dst, k))
		g.VADDSD(one, index[0].AsX(), index[0].AsX())
	})
}
