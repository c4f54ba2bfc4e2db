package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// softCap makes the soft cap of scores.
func softCap(g *gen) {
	c := constants{}
	for _, set := range []isa{avx2, avx512} {
		g.kernel("softCap", set, "vector_go.go", "softCapGo", "")
		dst, n := g.arg("dst"), g.arg("n")
		by, twice := g.vec(), g.vec()
		x, two := g.XMM(), g.XMM()
		g.VMOVSD(g.paramAt("by"), x)
		g.VCVTSD2SS(x, x, x)
		g.VMOVSS(c.of(g, 2), two)
		g.VDIVSS(x, two, two)
		g.VBROADCASTSS(x, by)
		g.VBROADCASTSS(two, twice)
		g.replace(dst, n, func(v reg.VecVirtual) { g.capped(v, by, twice, c) })
	}
}

// capped replaces the elements v by `by` times tanh(t), with 2t = `twice` times v. With e = exp(-2|t|) - 1, which is
// 2^n q + 2^n - 1 where q is that of what is less than 1/2 of ln(2), it is -e/(e+2): nothing is lost near 0.
func (g *gen) capped(v, by, twice reg.VecVirtual, c constants) {
	t, sign := g.vec(), g.vec()
	constant := func(x float32) reg.VecVirtual {
		g.VBROADCASTSS(c.of(g, x), t)
		return t
	}
	const least = -87
	x, n, e := g.vec(), g.vec(), g.vec()
	g.VBROADCASTSS(c.bits(g, 1<<31), sign)
	g.VMULPS(v, twice, x)
	g.or(x, sign, x)
	g.VMAXPS(x, constant(least), x) // NaN stays
	g.VMULPS(constant(1/math.Ln2), x, n)
	g.nearest(n)
	const high = 0.693359375
	g.VFNMADD231PS(constant(high), n, x)
	low := math.Ln2 - high
	g.VFNMADD231PS(constant(float32(low)), n, x)
	g.VBROADCASTSS(c.of(g, expOf[0]), e)
	for _, k := range expOf[1 : len(expOf)-1] {
		g.VFMADD213PS(constant(k), x, e)
	}
	g.VMULPS(x, e, e) // q
	g.VCVTPS2DQ(n, n)
	g.VPSLLD(Imm(23), n, n)
	g.VPADDD(constant(1), n, n) // 2^n, or anything for NaN
	g.VSUBPS(constant(1), n, x)
	g.VFMADD231PS(n, e, x) // exp(-2|t|) - 1
	g.VADDPS(constant(2), x, e)
	g.VDIVPS(e, x, e) // -tanh(|t|)
	g.VMULPS(by, e, e)
	if g.isa == avx512 {
		g.VPANDD(v, sign, x)
		g.VPANDND(e, sign, e)
	} else {
		g.VPAND(v, sign, x)
		g.VPANDN(e, sign, e)
	}
	g.or(x, e, v)
}

// or makes z the bits of x and y.
func (g *gen) or(x, y, z reg.VecVirtual) {
	if g.isa == avx512 {
		g.VPORD(x, y, z)
	} else {
		g.VPOR(x, y, z)
	}
}

// nearest rounds the elements of v to whole numbers.
func (g *gen) nearest(v reg.VecVirtual) {
	if g.isa == avx512 {
		g.VRNDSCALEPS(Imm(8), v, v)
	} else {
		g.VROUNDPS(Imm(8), v, v)
	}
}
