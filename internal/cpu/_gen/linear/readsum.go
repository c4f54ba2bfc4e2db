package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// readSum reads eight streams, one cache line of each at a time. On some processors it takes many streams to
// reach the memory's speed, on others a hint of what comes next is worth a tenth: it has both.
func readSum(g *gen) {
	for _, set := range []isa{avx2, avx512} {
		g.kernel("readSum", set, "readsum_go.go", "readSumGo", "")
		p, step, n := g.arg("p"), g.arg("step"), g.arg("n")
		var at [8]reg.GPVirtual
		at[0] = p
		for s := 1; s < 8; s++ {
			at[s] = g.GP64()
			g.LEAQ(Mem{Base: at[s-1], Index: step, Scale: 1}, at[s])
		}
		sums := g.vecs(8)
		g.zero(sums...)
		bytes := 4 * set.lanes
		k := g.GP64()
		g.XORQ(k, k)
		g.TESTQ(n, n)
		g.JZ(LabelRef("done"))
		g.Label("loop")
		const ahead = 1024
		for s, v := range sums {
			g.PREFETCHT0(Mem{Base: at[s], Index: k, Scale: 1, Disp: ahead})
			for part := 0; part < 64; part += bytes {
				g.VPADDQ(Mem{Base: at[s], Index: k, Scale: 1, Disp: part}, v, v)
			}
		}
		g.ADDQ(Imm(64), k)
		g.CMPQ(k, n)
		g.JLT(LabelRef("loop"))
		g.Label("done")
		for d := 4; d >= 1; d /= 2 {
			for i := range d {
				g.VPADDQ(sums[i+d], sums[i], sums[i])
			}
		}
		y := sums[0].AsY().(reg.VecVirtual)
		if set == avx512 {
			high := g.YMM()
			g.VEXTRACTI64X4(Imm(1), sums[0], high)
			g.VPADDQ(high, y, y)
		}
		x, high := y.AsX(), g.XMM()
		g.VEXTRACTI128(Imm(1), y, high)
		g.VPADDQ(high, x, x)
		g.VPSHUFD(Imm(0xee), x, high)
		g.VPADDQ(high, x, x)
		sum := g.GP64()
		g.VMOVQ(x, sum)
		g.Store(sum, g.Return("sum"))
		g.ret()
	}
}
