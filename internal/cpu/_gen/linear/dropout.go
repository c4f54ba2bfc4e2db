package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Philox4x32-7, as package dropout defines it. A test of package cpu compares the numbers.
const (
	philoxRounds = 7

	philoxMultiplier0, philoxMultiplier1 = 0xd2511f53, 0xcd9e8d57
	philoxWeyl0, philoxWeyl1             = 0x9e3779b9, 0xbb67ae85
)

// dropped makes the random numbers of dropout: Philox4x32, in the lower halves of lanes of 64 bits, which products
// fill. What is in the upper halves nothing reads.
func dropped(g *gen) {
	g.kernel("dropped", avx2, "dropout.go", "droppedGo", "")
	broadcast := func(from Mem) reg.VecVirtual {
		v := g.vec()
		g.VBROADCASTSS(from, v)
		return v
	}
	constant := func(name string, x ...uint64) Mem {
		m := g.StaticGlobal(name + g.isa.name)
		g.DataAttributes(attr.RODATA | attr.NOPTR)
		for _, x := range x {
			g.AppendDatum(U64(x))
		}
		return m
	}
	same := func(name string, x uint64) Mem { return constant(name, x, x, x, x) }
	multipliers := [2]Mem{same("philoxMultiplier0", philoxMultiplier0), same("philoxMultiplier1", philoxMultiplier1)}
	weyl := [2]Mem{same("philoxWeyl0", philoxWeyl0), same("philoxWeyl1", philoxWeyl1)}
	sign := same("dropoutSign", 0x8000800080008000) // there are comparisons of signed numbers alone
	counts := constant("dropoutCounts", 0, 1, 2, 3, 4, 5, 6, 7)
	var x [2][4]reg.VecVirtual
	for i := range x {
		x[i] = [4]reg.VecVirtual{broadcast(g.paramAt("octet")), broadcast(g.paramAt("query")), broadcast(g.paramAt("head")), broadcast(g.paramAt("sequence"))}
		g.VPADDD(counts.Offset(32*i), x[i][0], x[i][0])
	}
	key := [2]reg.VecVirtual{broadcast(g.paramAt("seed")), broadcast(g.paramAt("seedHigh"))}
	m := g.vecs(2)
	for i := range m {
		g.VMOVDQU(multipliers[i], m[i])
	}
	for round := range philoxRounds {
		for i := range key {
			if round > 0 {
				g.VPADDD(weyl[i], key[i], key[i])
			}
		}
		for i := range x {
			a, b, c, d := x[i][0], x[i][1], x[i][2], x[i][3]
			p, q := g.vec(), g.vec()
			g.VPMULUDQ(m[0], a, p)
			g.VPMULUDQ(m[1], c, q)
			g.VPSRLQ(Imm(32), q, a)
			g.VPSRLQ(Imm(32), p, c)
			g.VPXOR(b, a, a)
			g.VPXOR(d, c, c)
			g.VPXOR(key[0], a, a)
			g.VPXOR(key[1], c, c)
			x[i] = [4]reg.VecVirtual{a, q, c, p}
		}
	}
	below, upperHalf := broadcast(g.paramAt("below")), g.vec()
	g.VPSLLD(Imm(16), below, upperHalf)
	g.VPOR(upperHalf, below, below)
	g.VPXOR(sign, below, below)
	result, upper := g.GP64(), g.GP64()
	for i, to := range []reg.GPVirtual{result, upper} {
		// Two words of each counter side by side: four numbers, in words of 16 bits that are -1 or 0 below.
		pair := func(low, high reg.VecVirtual) reg.VecVirtual {
			v := g.vec()
			g.VPSLLQ(Imm(32), high, high)
			g.VPBLENDD(Imm(0b10101010), high, low, v)
			g.VPXOR(sign, v, v)
			g.VPCMPGTW(v, below, v)
			return v
		}
		ab, cd := pair(x[i][0], x[i][1]), pair(x[i][2], x[i][3])
		even, odd := g.vec(), g.vec() // counters
		g.VPUNPCKLQDQ(cd, ab, even)
		g.VPUNPCKHQDQ(cd, ab, odd)
		bytes := g.vec()
		g.VPACKSSWB(odd, even, bytes)
		g.VPMOVMSKB(bytes, to.As32())
	}
	g.SHLQ(Imm(32), upper)
	g.ORQ(upper, result)
	g.Store(result, g.ReturnIndex(0))
	g.ret()
}
