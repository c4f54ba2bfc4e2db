package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// rowE4M3 makes the kernel of one row of x, whose weights become float32 in registers: see e4m3. The power of two that float16 lacks is
// in the scales.
func rowE4M3(g *gen, set isa) {
	g.kernel("rowE4M3", set, blockSource, "rowE4M3Go", args)
	a := g.Dereference(g.Param("a"))
	wv, power := g.vec(), g.vec()
	y, sets, fetch, x := g.field(a, "y"), g.field(a, "sets"), g.field(a, "fetch"), g.field(a, "x")
	w := []reg.GPVirtual{g.field(a, "w"), g.GP64(), g.GP64(), g.GP64()}
	first := g.field(a, "scales") // of the first stream
	k, end, next, scale := g.GP64(), g.GP64(), g.GP64(), g.GP64()
	sums, scales := g.vecs(4), g.vecs(4)
	xv := g.vec()
	half := func() reg.Register { // of wv: 16 bits for each lane
		if set == avx512 {
			return wv.AsY()
		}
		return wv.AsX()
	}
	bits := g.XMM()
	if set == avx512 {
		bits = g.YMM()
	}
	g.VPBROADCASTD(g.words("bits", 0xbfffbfff), bits)
	g.VBROADCASTSS(g.words("power", 0x43800000), power) // 256
	// products adds the products of a vector, i elements behind k.
	products := func(i int, loadX, loadW func(from Mem)) {
		loadX(Mem{Base: x, Index: k, Scale: 4, Disp: 4 * i})
		for s, sum := range sums {
			n := half()
			loadW(Mem{Base: w[s], Index: k, Scale: 1, Disp: i})
			g.VPSLLW(Imm(7), n, n)
			g.VPAND(bits, n, n)
			g.VCVTPH2PS(n, wv)
			g.VMULPS(scales[s], wv, wv)
			g.VFMADD231PS(xv, wv, sum)
		}
	}
	vector := func(i int) {
		products(i, func(m Mem) { g.VMOVUPS(m, xv) }, func(m Mem) { g.VPMOVSXBW(m, half()) })
	}

	g.Label("set")
	wRow := g.field(a, "wRow")
	for s := 1; s < 4; s++ {
		g.LEAQ(Mem{Base: w[s-1], Index: wRow, Scale: 1}, w[s])
	}
	g.zero(sums...)
	g.XORQ(k, k)
	g.MOVQ(first, scale)
	g.Label("group")
	at, step := g.GP64(), g.field(a, "scaleRow")
	g.MOVQ(scale, at)
	for s, v := range scales {
		g.VBROADCASTSS(Mem{Base: at}, v)
		g.VMULPS(power, v, v)
		if s < 3 {
			g.ADDQ(step, at)
		}
	}
	g.ADDQ(Imm(4), scale)
	n := g.field(a, "n")
	g.MOVQ(k, next)
	g.ADDQ(g.fieldAt(a, "group"), next)
	g.CMPQ(next, n)
	g.CMOVQGT(n, next)
	g.MOVQ(next, end) // of whole vectors: k is at the beginning of one
	g.ANDQ(I32(-int32(set.lanes)), end)
	g.SUBQ(Imm(64), end)
	g.Label("lines")
	g.CMPQ(k, end)
	g.JGT(LabelRef("short"))
	g.prefetchLines(fetch, U32(256), 256)
	for i := 0; i < 64; i += set.lanes {
		vector(i)
	}
	g.ADDQ(Imm(64), k)
	g.JMP(LabelRef("lines"))
	g.Label("short")
	g.ADDQ(Imm(64), end)
	g.Label("vectors")
	g.CMPQ(k, end)
	g.JGE(LabelRef("rest"))
	vector(0)
	g.ADDQ(Imm(uint64(set.lanes)), k)
	g.JMP(LabelRef("vectors"))
	g.Label("rest")
	g.CMPQ(k, next)
	g.JGE(LabelRef("whole"))
	if set == avx512 {
		left := g.GP64()
		g.MOVQ(next, left)
		g.SUBQ(k, left)
		mask := g.mask(left)
		products(0, func(m Mem) { g.VMOVUPS_Z(m, mask, xv) }, func(m Mem) { g.VPMOVSXBW_Z(m, mask, half()) })
		g.JMP(LabelRef("end"))
	} else {
		g.Label("ones")
		one := g.GP32()
		products(0, func(m Mem) { g.VMOVSS(m, xv.AsX()) }, func(m Mem) {
			g.MOVBLSX(m, one)
			g.VMOVD(one, wv.AsX())
		})
		g.INCQ(k)
		g.CMPQ(k, next)
		g.JLT(LabelRef("ones"))
	}
	g.Label("whole")
	g.CMPQ(k, g.fieldAt(a, "n"))
	g.JLT(LabelRef("group"))
	g.Label("end")
	yStep := g.field(a, "yStep")
	g.put4(sums, yStep, y)
	g.LEAQ(Mem{Base: y, Index: yStep, Scale: 4}, y)
	row := g.field(a, "wRow")
	g.LEAQ(Mem{Base: w[3], Index: row, Scale: 1}, w[0])
	step4 := g.field(a, "scaleRow")
	g.LEAQ(Mem{Base: first, Index: step4, Scale: 4}, first)
	g.DECQ(sets)
	g.JNZ(LabelRef("set"))
	g.ret()
}
