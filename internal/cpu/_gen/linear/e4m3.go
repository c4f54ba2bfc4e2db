package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// rowsE4M3 makes the kernel of nx rows of x, whose weights become float32 in registers: see e4m3. The power of two that float16 lacks is
// in the scales. What is needed once for four output features stays in the arguments:
// as offsets, since the collector sees the pointers of arguments.
func rowsE4M3(g *gen, set isa, nx int) {
	g.kernel(fmt.Sprintf("rowsE4M3x%d", nx), set, blockSource, "rowsE4M3Go", args)
	a := g.Dereference(g.Param("a"))
	wv, power, scales := g.vec(), g.vec(), g.vecs(4)
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
	fetch := g.field(a, "fetch")
	x := []reg.GPVirtual{g.field(a, "x")}
	for len(x) < nx {
		next := g.GP64()
		g.MOVQ(x[len(x)-1], next)
		g.ADDQ(g.fieldAt(a, "xRow"), next)
		x = append(x, next)
	}
	w := []reg.GPVirtual{g.field(a, "w"), g.GP64(), g.GP64(), g.GP64()}
	k, end, next, scale := g.GP64(), g.GP64(), g.GP64(), g.GP64()
	var sums [][]reg.VecVirtual
	for range nx {
		sums = append(sums, g.vecs(4))
	}
	xs := nx
	if set == avx2 { // rows are loaded in turn
		xs = 1
	}
	xv := g.vecs(xs)
	// products adds the products of a vector, i elements behind k.
	products := func(i int, loadX func(from Mem, to reg.VecVirtual), loadW func(from Mem)) {
		at := func(r int) Mem { return Mem{Base: x[r], Index: k, Scale: 4, Disp: 4 * i} }
		if xs == nx {
			for r := range xv {
				loadX(at(r), xv[r])
			}
		}
		for s := range w {
			loadW(Mem{Base: w[s], Index: k, Scale: 1, Disp: i})
			g.VPSLLW(Imm(7), half(), half())
			g.VPAND(bits, half(), half())
			g.VCVTPH2PS(half(), wv)
			g.VMULPS(scales[s], wv, wv)
			for r := range sums {
				if xs < nx {
					loadX(at(r), xv[0])
				}
				g.VFMADD231PS(xv[r%xs], wv, sums[r][s])
			}
		}
	}
	vector := func(i int) {
		products(i, func(m Mem, v reg.VecVirtual) { g.VMOVUPS(m, v) }, func(m Mem) { g.VPMOVSXBW(m, half()) })
	}

	g.Label("set")
	for s := 1; s < 4; s++ {
		g.MOVQ(w[s-1], w[s])
		g.ADDQ(g.fieldAt(a, "wRow"), w[s])
	}
	for _, v := range sums {
		g.zero(v...)
	}
	g.XORQ(k, k)
	g.MOVQ(g.fieldAt(a, "scales"), scale)
	g.ADDQ(g.fieldAt(a, "scalesAt"), scale)
	g.Label("group")
	g.MOVQ(scale, end)
	for s, v := range scales {
		g.VBROADCASTSS(Mem{Base: end}, v)
		g.VMULPS(power, v, v)
		if s < 3 {
			g.ADDQ(g.fieldAt(a, "scaleRow"), end)
		}
	}
	g.ADDQ(Imm(4), scale)
	g.MOVQ(k, next)
	g.ADDQ(g.fieldAt(a, "group"), next)
	g.CMPQ(next, g.fieldAt(a, "n"))
	g.CMOVQGT(g.fieldAt(a, "n"), next)
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
	if set == avx512 { // the row's end
		g.MOVQ(next, end)
		g.SUBQ(k, end)
		g.MOVL(U32(0xffffffff), scale.As32())
		g.BZHIL(end.As32(), scale.As32(), scale.As32())
		mask := g.K()
		g.KMOVW(scale.As32(), mask)
		products(0, func(m Mem, v reg.VecVirtual) { g.VMOVUPS_Z(m, mask, v) }, func(m Mem) { g.VPMOVSXBW_Z(m, mask, half()) })
		g.JMP(LabelRef("end"))
	} else {
		g.Label("ones")
		products(0, func(m Mem, v reg.VecVirtual) { g.VMOVSS(m, v.AsX()) }, func(m Mem) {
			g.MOVBLSX(m, end.As32())
			g.VMOVD(end.As32(), wv.AsX())
		})
		g.INCQ(k)
		g.CMPQ(k, next)
		g.JLT(LabelRef("ones"))
	}
	g.Label("whole")
	g.CMPQ(k, g.fieldAt(a, "n"))
	g.JLT(LabelRef("group"))
	g.Label("end")
	g.MOVQ(g.fieldAt(a, "y"), k)
	g.ADDQ(g.fieldAt(a, "yAt"), k)
	g.MOVQ(g.fieldAt(a, "yStep"), end)
	for r, v := range sums {
		if r > 0 {
			g.ADDQ(g.fieldAt(a, "yRow"), k)
		}
		g.LEAQ(Mem{Base: k, Index: end, Scale: 2}, next)
		four := g.sum4(v)
		g.VMOVSS(four, Mem{Base: k})
		g.VEXTRACTPS(Imm(1), four, Mem{Base: k, Index: end, Scale: 1})
		g.VEXTRACTPS(Imm(2), four, Mem{Base: next})
		g.VEXTRACTPS(Imm(3), four, Mem{Base: next, Index: end, Scale: 1})
	}
	g.SHLQ(Imm(2), end)
	g.ADDQ(end, g.fieldAt(a, "yAt"))
	g.MOVQ(g.fieldAt(a, "scaleRow"), end)
	g.SHLQ(Imm(2), end)
	g.ADDQ(end, g.fieldAt(a, "scalesAt"))
	g.MOVQ(w[3], w[0])
	g.ADDQ(g.fieldAt(a, "wRow"), w[0])
	g.DECQ(g.fieldAt(a, "sets"))
	g.JNZ(LabelRef("set"))
	g.ret()
}
