package main

import (
	"fmt"
	"math"
	"math/big"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// softCap makes the soft cap of scores.
func softCap(g *gen) {
	c := constants{}
	for _, set := range []isa{avx2, avx512} {
		g.kernel("softCap", set, "softcap.go", "softCapGo", "")
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
		softCap64(g, set)
	}
}

// softCap64 is softCap for float64.
func softCap64(g *gen, set isa) {
	g.kernel("softCap64", set, "softcap.go", "softCap64Go", "")
	dst, n := g.arg("dst"), g.arg("n")
	by, twice, numbers := g.vec(), g.vec(), map[float64]Mem{}
	g.VBROADCASTSD(g.paramAt("by"), by)
	g.VBROADCASTSD(g.double(numbers, 2), twice)
	g.VDIVPD(by, twice, twice)
	element := func(base, k reg.GPVirtual, i int) Mem {
		return Mem{Base: base, Index: k, Scale: 8, Disp: 4 * set.lanes * i}
	}
	g.pairs(n, func(k reg.GPVirtual) {
		for i := range 2 {
			v := g.vec()
			g.VMOVUPD(element(dst, k, i), v)
			g.capped64(v, by, twice, numbers)
			g.VMOVUPD(v, element(dst, k, i))
		}
	}, func(k reg.GPVirtual) { // one element of a vector: the same instructions
		v := g.vec()
		g.VMOVSD(element(dst, k, 0), v.AsX())
		g.capped64(v, by, twice, numbers)
		g.VMOVSD(v.AsX(), element(dst, k, 0))
	})
	g.ret()
}

// double returns where a float64 of the function at hand lies, of those that it has so far.
func (g *gen) double(numbers map[float64]Mem, x float64) Mem {
	if _, ok := numbers[x]; !ok {
		numbers[x] = g.constant(fmt.Sprintf("c%d", len(numbers)), x)
	}
	return numbers[x]
}

// capped64 is capped for float64. The polynomial of e^r - 1 has the terms up to r^13/13!: what follows is less than
// 2^-56 of it.
func (g *gen) capped64(v, by, twice reg.VecVirtual, numbers map[float64]Mem) {
	t, sign := g.vec(), g.vec()
	constant := func(x float64) reg.VecVirtual {
		g.VBROADCASTSD(g.double(numbers, x), t)
		return t
	}
	const least = -40 // tanh is 1 from 20 on
	x, n, e := g.vec(), g.vec(), g.vec()
	g.VBROADCASTSD(g.double(numbers, math.Copysign(0, -1)), sign)
	g.VMULPD(v, twice, x)
	g.or(x, sign, x)
	g.VMAXPD(x, constant(least), x) // NaN stays
	g.VMULPD(constant(1/math.Ln2), x, n)
	if g.isa == avx512 {
		g.VRNDSCALEPD(Imm(8), n, n)
	} else {
		g.VROUNDPD(Imm(8), n, n)
	}
	const high = 0x1.62e42fee00000p-1 // n times it is exact
	g.VFNMADD231PD(constant(high), n, x)
	low, _ := new(big.Float).SetPrec(200).Sub(ln2(), big.NewFloat(high)).Float64()
	g.VFNMADD231PD(constant(low), n, x)
	factorial := 1.0
	for i := range 13 {
		factorial *= float64(i + 1)
	}
	g.VBROADCASTSD(g.double(numbers, 1/factorial), e)
	for i := 13; i > 1; i-- {
		factorial /= float64(i)
		g.VFMADD213PD(constant(1/factorial), x, e)
	}
	g.VMULPD(x, e, e) // e^r - 1
	if g.isa == avx512 {
		g.VCVTPD2DQ(n, n.AsY())
		g.VPMOVSXDQ(n.AsY(), n)
	} else {
		g.VCVTPD2DQY(n, n.AsX())
		g.VPMOVSXDQ(n.AsX(), n)
	}
	g.VPSLLQ(Imm(52), n, n)
	g.VPADDQ(constant(1), n, n) // 2^n, or anything for NaN
	g.VSUBPD(constant(1), n, x)
	g.VFMADD231PD(n, e, x) // exp(-2|t|) - 1
	g.VADDPD(constant(2), x, e)
	g.VDIVPD(e, x, e) // -tanh(|t|)
	g.VMULPD(by, e, e)
	g.keepSign(v, sign, e, x)
}

// ln2 is the natural logarithm of 2.
func ln2() *big.Float {
	x, _, err := big.ParseFloat("0.69314718055994530941723212145817656807550013436025525", 10, 200, big.ToNearestEven)
	if err != nil {
		panic(err)
	}
	return x
}

// keepSign makes v, apart from its sign, what e is.
func (g *gen) keepSign(v, sign, e, scratch reg.VecVirtual) {
	if g.isa == avx512 {
		g.VPANDD(v, sign, scratch)
		g.VPANDND(e, sign, e)
	} else {
		g.VPAND(v, sign, scratch)
		g.VPANDN(e, sign, e)
	}
	g.or(scratch, e, v)
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
	g.keepSign(v, sign, e, x)
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
