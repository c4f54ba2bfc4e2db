package main

import (
	"fmt"
	"math"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The coefficients of the error function, the highest power first; what they are is told at erf32 in
// activation.go.
var (
	erfA = []float32{-7.5729686e-06, 0.00010393879, -0.00083395705, 0.0052090166, -0.026860248, 0.11283675, -0.3761263, 0.12837917}
	erfB = []float32{0.0030652343, -0.021089798, 0.083998404, -0.13514522, 0.27036622, 0.030905148, 1.0280553}
)

// constants are float32s in memory, by their bits.
type constants map[uint32]Mem

// of returns where x lies.
func (c constants) of(g *gen, x float32) Mem { return c.bits(g, math.Float32bits(x)) }

func (c constants) bits(g *gen, b uint32) Mem {
	if _, ok := c[b]; !ok {
		c[b] = g.StaticGlobal(fmt.Sprintf("erf%08x", b))
		g.DataAttributes(attr.RODATA | attr.NOPTR)
		g.AddDatum(0, U32(b))
	}
	return c[b]
}

// activation makes the activations that are no sigmoid.
func activation(g *gen) {
	erf := constants{}
	for _, set := range []isa{avx2, avx512} {
		relu(g, set)
		gelu(g, set, erf)
	}
}

func relu(g *gen, set isa) {
	g.kernel("relu", set, "activation.go", "reluGo", "")
	dst, n := g.arg("dst"), g.arg("n")
	v, zero := g.vec(), g.vec()
	g.zero(zero)
	at := func(k reg.GPVirtual) Mem { return Mem{Base: dst, Index: k, Scale: 4} }
	// Of a NaN and a number, VMAXPS gives its last source, which Go names first: NaN stays NaN.
	g.each(n, func(k reg.GPVirtual) {
		g.VMAXPS(at(k), zero, v)
		g.VMOVUPS(v, at(k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		g.VMAXPS_Z(at(k), zero, m, v)
		g.VMOVUPS(v, m, at(k))
	}, func(k reg.GPVirtual) {
		g.VMAXSS(at(k), zero.AsX(), v.AsX())
		g.VMOVSS(v.AsX(), at(k))
	})
}

func gelu(g *gen, set isa, c constants) {
	g.kernel("gelu", set, "activation.go", "geluGo", "")
	dst, n := g.arg("dst"), g.arg("n")
	g.replace(dst, n, func(v reg.VecVirtual) { g.gelu(v, c) })
}

// gelu replaces the elements of v.
func (g *gen) gelu(v reg.VecVirtual, c constants) {
	t := g.vec()
	constant := func(x float32) reg.VecVirtual {
		g.VBROADCASTSS(c.of(g, x), t)
		return t
	}
	and := func(a, b, to Op) { g.VPAND(a, b, to) }
	or := func(a, b, to Op) { g.VPOR(a, b, to) }
	if g.isa == avx512 {
		and, or = func(a, b, to Op) { g.VPANDD(a, b, to) }, func(a, b, to Op) { g.VPORD(a, b, to) }
	}
	// polynomial returns the value of the one with such coefficients at x.
	polynomial := func(x reg.VecVirtual, of []float32) reg.VecVirtual {
		y := g.vec()
		g.VBROADCASTSS(c.of(g, of[0]), y)
		for _, k := range of[1:] {
			g.VFMADD213PS(constant(k), x, y)
		}
		return y
	}
	sign, z, u, one := g.vec(), g.vec(), g.vec(), g.vec()
	g.VMULPS(constant(1/math.Sqrt2), v, z)
	g.VBROADCASTSS(c.bits(g, 1<<31), sign)
	and(z, sign, sign)
	g.VBROADCASTSS(c.bits(g, 1<<31-1), t)
	and(t, z, z)
	g.VMULPS(z, z, u)
	near := polynomial(u, erfA)
	g.VFMADD213PS(z, z, near)
	far := polynomial(z, erfB)
	for range 3 {
		g.VMULPS(far, far, far)
	}
	g.VBROADCASTSS(c.of(g, 1), one)
	g.VDIVPS(far, one, far)
	g.VSUBPS(far, one, far)
	const less = 17 // and not NaN
	if g.isa == avx512 {
		m := g.K()
		g.VCMPPS(Imm(less), constant(erfNear), z, m)
		g.VBLENDMPS(near, far, m, far)
	} else {
		m := g.vec()
		g.VCMPPS(Imm(less), constant(erfNear), z, m)
		g.VBLENDVPS(m, near, far, far)
	}
	or(sign, far, far)
	g.VMULPS(constant(0.5), v, v)
	g.VFMADD213PS(v, far, v) // v/2 + v/2 erf
}

// erfNear is where the one polynomial ends.
const erfNear = 1.25
