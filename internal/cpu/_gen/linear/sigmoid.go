package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The polynomial of exp32 in sigmoid.go of the package, the highest power first.
var expOf = []float32{
	float32(0.00015594677582896996 / math.Pow(math.Ln2, 6)), float32(0.0013406643905945253 / math.Pow(math.Ln2, 5)),
	float32(0.009617692974769792 / math.Pow(math.Ln2, 4)), float32(0.055503105509929686 / math.Pow(math.Ln2, 3)),
	float32(0.24022652782877088 / math.Pow(math.Ln2, 2)), float32(0.6931472149680414 / math.Ln2), 1,
}

// sigmoid makes the activations that are a product with a sigmoid.
func sigmoid(g *gen) {
	c := constants{}
	for _, set := range []isa{avx2, avx512} {
		g.kernel("bySigmoid", set, "sigmoid.go", "bySigmoidGo", "")
		dst, n := g.arg("dst"), g.arg("n")
		linear, cubic := g.vec(), g.vec()
		g.VBROADCASTSS(g.paramAt("linear"), linear)
		g.VBROADCASTSS(g.paramAt("cubic"), cubic)
		g.replace(dst, n, func(v reg.VecVirtual) { g.bySigmoid(v, linear, cubic, c) })
	}
}

// bySigmoid replaces the elements of v.
func (g *gen) bySigmoid(v, linear, cubic reg.VecVirtual, c constants) {
	t := g.vec()
	constant := func(x float32) reg.VecVirtual {
		g.VBROADCASTSS(c.of(g, x), t)
		return t
	}
	const most, least = 88.3, -87
	x, n, r, e := g.vec(), g.vec(), g.vec(), g.vec()
	g.VMULPS(v, v, x)
	g.VMINPS(constant(1e30), x, x) // mostSquare
	g.VFMADD213PS(linear, cubic, x)
	g.VMULPS(v, x, x)
	g.VMAXPS(x, constant(least), r) // NaN stays
	g.VMINPS(r, constant(most), r)
	g.VMULPS(constant(1/math.Ln2), r, n)
	g.nearest(n)
	const high = 0.693359375
	g.VFNMADD231PS(constant(high), n, r)
	low := math.Ln2 - high
	g.VFNMADD231PS(constant(float32(low)), n, r)
	g.VBROADCASTSS(c.of(g, expOf[0]), e)
	for _, k := range expOf[1:] {
		g.VFMADD213PS(constant(k), r, e)
	}
	g.VCVTPS2DQ(n, n)
	g.VPSLLD(Imm(23), n, n)
	g.VPADDD(e, n, r) // 2^n e, or anything for NaN
	infinite := g.vec()
	g.VBROADCASTSS(c.bits(g, 0x7f800000), infinite)
	const greater = 30 // and not NaN
	if g.isa == avx512 {
		m := g.K()
		g.VCMPPS(Imm(greater), constant(most), x, m)
		g.VBLENDMPS(infinite, r, m, r)
	} else {
		m := g.vec()
		g.VCMPPS(Imm(greater), constant(most), x, m)
		g.VBLENDVPS(m, infinite, r, r)
	}
	g.VADDPS(constant(1), r, r)
	g.VDIVPS(r, v, v)
}
