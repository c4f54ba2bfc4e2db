package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// widened makes what widens numbers of 8 bits to float32, and multiplies them by the scales of their rows.
func widened(g *gen) {
	c := constants{}
	for _, set := range []isa{avx2, avx512} {
		g.kernel("fromE4M3", set, "widened.go", "fromE4M3Go", "")
		e4m3(g, c)
		g.kernel("fromInt8", set, "widened.go", "fromInt8Go", "")
		fromInt8(g, c)
	}
}

// e4m3 widens by way of float16, whose fraction begins with the same bits. A byte with its sign in all higher bits,
// shifted up by 7, is
//
//	S S EEEE MMM 0000000
//
// in a 16-bit lane. Without the second bit that is a float16, times 2^-8. Shifted up by one more, 0x7f00 is NaN.
func e4m3(g *gen, c constants) {
	narrow := func() reg.VecVirtual { // 16 bits for each lane of a vector
		if g.isa == avx512 {
			return g.YMM()
		}
		return g.XMM()
	}
	exponents, w, t := g.vec(), narrow(), narrow()
	g.VBROADCASTSS(c.of(g, 256), exponents)
	bits, nan := narrow(), narrow()
	g.VPBROADCASTD(c.bits(g, 0xbfffbfff), bits)
	g.VPBROADCASTD(c.bits(g, 0x7f007f00), nan)
	g.widenRows(c, func(v reg.VecVirtual, missing func() Op) {
		g.VPSLLW(Imm(7), w, w)
		g.VPAND(bits, w, w)
		g.VPADDW(w, w, t)
		if g.isa == avx512 {
			g.VPCMPEQW(nan, t, missing())
		} else {
			g.VPCMPEQW(nan, t, t)
			g.VPMOVSXWD(t, missing())
		}
		g.VCVTPH2PS(w, v)
		g.VMULPS(exponents, v, v)
	}, func(from Mem, v reg.VecVirtual, mask ...Op) {
		if mask != nil {
			g.VPMOVSXBW_Z(from, mask[0], w)
		} else {
			g.VPMOVSXBW(from, w)
		}
	}, func(from Mem, v reg.VecVirtual, one reg.Register) {
		g.MOVBLSX(from, one)
		g.VMOVD(one, w)
	})
}

// fromInt8 widens integers. -128 is NaN.
func fromInt8(g *gen, c constants) {
	nan := g.vec()
	g.VPBROADCASTD(c.bits(g, 0xffffff80), nan)
	g.widenRows(c, func(v reg.VecVirtual, missing func() Op) {
		g.VPCMPEQD(nan, v, missing())
		g.VCVTDQ2PS(v, v)
	}, func(from Mem, v reg.VecVirtual, mask ...Op) {
		if mask != nil {
			g.VPMOVSXBD_Z(from, mask[0], v)
		} else {
			g.VPMOVSXBD(from, v)
		}
	}, func(from Mem, v reg.VecVirtual, one reg.Register) {
		g.MOVBLSX(from, one)
		g.VMOVD(one, v.AsX())
	})
}

// widenRows makes the loops over rows and their elements. load loads a vector, under a mask if there is one; single loads an
// element; convert makes float32 of v, and notes which lanes are NaN.
func (g *gen) widenRows(c constants, convert func(v reg.VecVirtual, missing func() Op), load func(from Mem, v reg.VecVirtual, mask ...Op), single func(from Mem, v reg.VecVirtual, one reg.Register)) {
	dst, src, scales, rows, n, step := g.arg("dst"), g.arg("src"), g.arg("scales"), g.arg("rows"), g.arg("n"), g.arg("step")
	k, end, one := g.GP64(), g.GP64(), g.GP32()
	scale, v := g.vec(), g.vec()
	var none reg.VecVirtual
	var mask reg.OpmaskVirtual
	g.MOVQ(n, end)
	g.ANDQ(I32(-int32(g.isa.lanes)), end)
	if g.isa == avx512 {
		none = g.vec()
		g.VPBROADCASTD(c.bits(g, 0x7fc00000), none)
		left := g.GP64()
		g.MOVQ(n, left)
		g.SUBQ(end, left)
		mask = g.mask(left)
	}
	element := func(b reg.GPVirtual) Mem { return Mem{Base: src, Index: b, Scale: 1} }
	widened := func(v reg.VecVirtual) {
		var lanes reg.OpmaskVirtual
		var filled reg.VecVirtual
		convert(v, func() Op {
			if g.isa == avx512 {
				lanes = g.K()
				return lanes
			}
			filled = g.vec()
			return filled
		})
		if g.isa == avx512 {
			g.VMOVAPS(none, lanes, v)
		} else {
			g.VORPS(filled, v, v) // all ones are NaN
		}
		g.VMULPS(scale, v, v)
	}
	g.SHLQ(Imm(2), step)
	g.Label("row")
	g.VBROADCASTSS(Mem{Base: scales}, scale)
	g.ADDQ(step, scales)
	g.XORQ(k, k)
	g.TESTQ(end, end)
	g.JZ(LabelRef("rest"))
	g.Label("loop")
	load(element(k), v)
	widened(v)
	g.VMOVUPS(v, at(dst, k))
	g.ADDQ(Imm(uint64(g.isa.lanes)), k)
	g.CMPQ(k, end)
	g.JLT(LabelRef("loop"))
	g.Label("rest")
	g.CMPQ(k, n)
	g.JGE(LabelRef("next"))
	if g.isa == avx512 {
		load(element(k), v, mask)
		widened(v)
		g.VMOVUPS(v, mask, at(dst, k))
	} else {
		g.Label("one")
		single(element(k), v, one)
		widened(v)
		g.VMOVSS(v.AsX(), at(dst, k))
		g.INCQ(k)
		g.CMPQ(k, n)
		g.JLT(LabelRef("one"))
	}
	g.Label("next")
	g.ADDQ(n, src)
	g.LEAQ(Mem{Base: dst, Index: n, Scale: 4}, dst)
	g.DECQ(rows)
	g.JNZ(LabelRef("row"))
	g.ret()
}
