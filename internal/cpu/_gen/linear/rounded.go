package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// rounded makes what rounds float32 to 16 bits.
func rounded(g *gen) {
	c := constants{}
	for _, set := range []isa{avx2, avx512} {
		g.kernel("toFloat16", set, "rounded.go", "toFloat16Go", "")
		const nearest = 0
		g.to16(func(v reg.VecVirtual) { g.VCVTPS2PH(Imm(nearest), v, v) },
			func(v reg.VecVirtual, to ...Op) { g.VCVTPS2PH(append([]Op{Imm(nearest), v}, to...)...) })

		g.kernel("toBFloat16", set, "rounded.go", "toBFloat16Go", "")
		var one, half, quiet = g.vec(), g.vec(), g.vec()
		g.VPBROADCASTD(c.bits(g, 1), one)
		g.VPBROADCASTD(c.bits(g, 0x7fff), half)
		g.VPBROADCASTD(c.bits(g, 1<<22), quiet)
		round := func(v reg.VecVirtual) { g.upperHalves(v, one, half, quiet) }
		g.to16(round, func(v reg.VecVirtual, to ...Op) {
			round(v)
			if set == avx512 {
				g.VPMOVDW(append([]Op{v}, to...)...)
				return
			}
			g.VPACKUSDW(v, v, v)
			g.VPERMQ(Imm(0b10_00), v, v)
			g.VMOVUPS(v.AsX(), to[0])
		})
	}
}

// to16 makes the loop of a function that rounds: round does so with what the lowest lanes have, and stored with a vector,
// which it stores, under a mask if there is one.
func (g *gen) to16(round func(v reg.VecVirtual), stored func(v reg.VecVirtual, to ...Op)) {
	dst, src, n, v := g.arg("dst"), g.arg("src"), g.arg("n"), g.vec()
	to := func(k reg.GPVirtual) Mem { return Mem{Base: dst, Index: k, Scale: 2} }
	g.each(n, func(k reg.GPVirtual) {
		g.VMOVUPS(at(src, k), v)
		stored(v, to(k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		g.VMOVUPS_Z(at(src, k), m, v)
		stored(v, m, to(k))
	}, func(k reg.GPVirtual) {
		x := v.AsX().(reg.VecVirtual)
		g.VMOVSS(at(src, k), x)
		round(x)
		g.VPEXTRW(Imm(0), x, to(k))
	})
}

// upperHalves rounds the float32s of v to their upper halves, which are then the lower ones of the lanes. A NaN is cut
// off, and its quiet bit set.
func (g *gen) upperHalves(v, one, half, quiet reg.VecVirtual) {
	const unordered = 3
	up := g.vec()
	if g.isa == avx512 {
		nan, number := g.K(), g.K()
		g.VPSRLD(Imm(16), v, up)
		g.VPANDD(one, up, up)
		g.VPADDD(half, up, up)
		g.VCMPPS(Imm(unordered), v, v, nan)
		g.KNOTW(nan, number)
		g.VPORD(quiet, v, nan, v)
		g.VPADDD(up, v, number, v)
		g.VPSRLD(Imm(16), v, v)
		return
	}
	nan, w := g.vec(), v.AsY()
	g.VPSRLD(Imm(16), w, up)
	g.VPAND(one, up, up)
	g.VPADDD(half, up, up)
	g.VCMPPS(Imm(unordered), w, w, nan)
	g.VPANDN(up, nan, up)
	g.VPAND(quiet, nan, nan)
	g.VPOR(nan, w, w)
	g.VPADDD(up, w, w)
	g.VPSRLD(Imm(16), w, w)
}
