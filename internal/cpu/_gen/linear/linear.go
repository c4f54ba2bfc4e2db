package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

const (
	dotSource = "dot.go"
	args      = "kernel.go"
)

// linear makes the kernels of linear layers.
func linear(g *gen) {
	for _, set := range []isa{avx2, avx512} {
		rows := 3 // four streams by three rows of x fill the sixteen registers of AVX2
		if set == avx512 {
			rows = 4
		}
		for _, t := range []dtype{f32, f16, bf16} {
			for nx := 1; nx <= rows; nx++ {
				dot(g, set, t, nx)
			}
		}
	}
}

// streams is the number of weight rows that dot reads at once.
const streams = 4

// dot holds the sums of nx rows of x and four streams in registers, a vector each, and reads a cache line of
// every stream at a time.
func dot(g *gen, set isa, t dtype, nx int) {
	g.kernel(fmt.Sprintf("dot%sx%d", t.name, nx), set, dotSource, "dot"+t.name+"Go", args)
	a := g.Dereference(g.Param("a"))

	var w [streams]reg.GPVirtual
	w[0] = g.field(a, "w")
	step := g.field(a, "wStep")
	for s := 1; s < streams; s++ {
		w[s] = g.GP64()
		g.LEAQ(Mem{Base: w[s-1], Index: step, Scale: 1}, w[s])
	}
	x := make([]reg.GPVirtual, nx)
	x[0] = g.field(a, "x")
	if nx > 1 {
		row := g.field(a, "xRow")
		for r := 1; r < nx; r++ {
			x[r] = g.GP64()
			g.LEAQ(Mem{Base: x[r-1], Index: row, Scale: 1}, x[r])
		}
	}
	n, k, end := g.field(a, "n"), g.GP64(), g.GP64()
	ahead, aheadStep := g.field(a, "ahead"), g.field(a, "aheadStep")

	sums := make([][]reg.VecVirtual, nx)
	for r := range sums {
		sums[r] = g.vecs(streams)
	}
	// kept returns where the sums of row r and stream s wait for more.
	kept := func(partial reg.GPVirtual, r, s int) Mem {
		return Mem{Base: partial, Disp: (r*streams + s) * 4 * set.lanes}
	}
	more := g.field(a, "more")
	g.TESTQ(more, more)
	g.JNZ(LabelRef("more"))
	for r := range sums {
		g.zero(sums[r]...)
	}
	g.JMP(LabelRef("begin"))
	g.Label("more")
	partial := g.field(a, "partial")
	for r := range sums {
		for s, v := range sums[r] {
			g.VMOVUPS(kept(partial, r, s), v)
		}
	}
	g.Label("begin")
	xv, wv := g.vecs(nx), g.vec()
	// products adds the products of one vector, i elements behind k.
	products := func(i int, loadX, loadW func(from Mem, to reg.VecVirtual)) {
		for r := range xv {
			loadX(Mem{Base: x[r], Index: k, Scale: 4, Disp: 4 * i}, xv[r])
		}
		for s := range w {
			if loadW == nil {
				g.VFMADD231PS(Mem{Base: w[s], Index: k, Scale: 4, Disp: 4 * i}, xv[0], sums[0][s])
				continue
			}
			loadW(Mem{Base: w[s], Index: k, Scale: uint8(t.size), Disp: t.size * i}, wv)
			for r := range xv {
				g.VFMADD231PS(xv[r], wv, sums[r][s])
			}
		}
	}
	vector := func(i int) {
		loadW := func(m Mem, v reg.VecVirtual) { g.widen(t, m, v) }
		if t == f32 && nx == 1 {
			loadW = nil // weights can be operands in memory
		}
		products(i, func(m Mem, v reg.VecVirtual) { g.VMOVUPS(m, v) }, loadW)
	}

	g.XORQ(k, k)
	line := 64 / t.size // elements of a cache line
	g.MOVQ(n, end)
	g.ANDQ(I32(-int32(line)), end)
	g.JZ(LabelRef("short"))
	g.Label("lines")
	for i := 0; i < line; i += set.lanes {
		vector(i)
	}
	for s := range w {
		g.PREFETCHT0(Mem{Base: w[s], Index: ahead, Scale: 1})
	}
	g.ADDQ(aheadStep, ahead)
	g.ADDQ(Imm(uint64(line)), k)
	g.CMPQ(k, end)
	g.JLT(LabelRef("lines"))

	g.Label("short")
	if line > set.lanes {
		g.MOVQ(n, end)
		g.ANDQ(I32(-int32(set.lanes)), end)
		g.CMPQ(k, end)
		g.JGE(LabelRef("rest"))
		g.Label("vectors")
		vector(0)
		g.ADDQ(Imm(uint64(set.lanes)), k)
		g.CMPQ(k, end)
		g.JLT(LabelRef("vectors"))
	}
	g.Label("rest")
	if set == avx512 {
		g.SUBQ(k, n)
		g.JZ(LabelRef("sum"))
		mask := g.mask(n)
		products(0, func(m Mem, v reg.VecVirtual) { g.VMOVUPS_Z(m, mask, v) },
			func(m Mem, v reg.VecVirtual) { g.widenMasked(t, m, mask, v) })
	} else {
		g.CMPQ(k, n)
		g.JGE(LabelRef("sum"))
		g.Label("ones")
		products(0, func(m Mem, v reg.VecVirtual) { g.VMOVSS(m, v.AsX()) },
			func(m Mem, v reg.VecVirtual) { g.widenOne(t, m, v) })
		g.INCQ(k)
		g.CMPQ(k, n)
		g.JLT(LabelRef("ones"))
	}

	g.Label("sum")
	unfinished := g.field(a, "unfinished")
	g.TESTQ(unfinished, unfinished)
	g.JNZ(LabelRef("keep"))
	y, yStep, y2 := g.field(a, "y"), g.field(a, "yStep"), g.GP64()
	g.LEAQ(Mem{Base: y, Index: yStep, Scale: 2}, y2)
	for r := range sums {
		if r > 0 {
			row := g.field(a, "yRow")
			g.ADDQ(row, y)
			g.ADDQ(row, y2)
		}
		four := g.sum4(sums[r])
		g.VMOVSS(four, Mem{Base: y})
		g.VEXTRACTPS(Imm(1), four, Mem{Base: y, Index: yStep, Scale: 1})
		g.VEXTRACTPS(Imm(2), four, Mem{Base: y2})
		g.VEXTRACTPS(Imm(3), four, Mem{Base: y2, Index: yStep, Scale: 1})
	}
	g.ret()
	g.Label("keep")
	partial = g.field(a, "partial")
	for r := range sums {
		for s, v := range sums[r] {
			g.VMOVUPS(v, kept(partial, r, s))
		}
	}
	g.ret()
}

// fold returns, in each 128 bits, the sums of the four lanes of each of four vectors. unpack interleaves the low and the high lanes of 32
// bits, and then those of 64 bits.
func (g *gen) fold(v []reg.VecVirtual, add func(...Op), unpack [4]func(...Op)) reg.VecVirtual {
	pair := func(a, b reg.VecVirtual, low, high func(...Op)) reg.VecVirtual {
		x, y := g.vec(), g.vec()
		low(b, a, x)
		high(b, a, y)
		add(y, x, x)
		return x
	}
	return pair(pair(v[0], v[1], unpack[0], unpack[1]), pair(v[2], v[3], unpack[0], unpack[1]), unpack[2], unpack[3])
}

// sum4 returns the sums of the lanes of four vectors as the four lanes of one. (VHADDPS would be shorter,
// but knows the first sixteen registers only.)
func (g *gen) sum4(v []reg.VecVirtual) reg.VecVirtual {
	sums := g.fold(v, g.VADDPS, [4]func(...Op){g.VUNPCKLPS, g.VUNPCKHPS, g.VUNPCKLPD, g.VUNPCKHPD})
	if g.isa.lanes == 16 {
		half := g.YMM()
		g.VEXTRACTF64X4(Imm(1), sums, half)
		g.VADDPS(sums.AsY(), half, half)
		sums = half
	}
	four := g.XMM()
	if g.isa.lanes == 16 {
		g.VEXTRACTF32X4(Imm(1), sums, four)
	} else {
		g.VEXTRACTF128(Imm(1), sums, four)
	}
	g.VADDPS(sums.AsX(), four, four)
	return four
}

// each makes a loop over n elements: of vectors, then of what is left.
func (g *gen) each(n reg.GPVirtual, vector func(k reg.GPVirtual), masked func(k reg.GPVirtual, m reg.OpmaskVirtual), one func(k reg.GPVirtual)) {
	k, end := g.GP64(), g.GP64()
	g.XORQ(k, k)
	g.MOVQ(n, end)
	g.ANDQ(I32(-int32(g.isa.lanes)), end)
	g.JZ(LabelRef("rest"))
	g.Label("loop")
	vector(k)
	g.ADDQ(Imm(uint64(g.isa.lanes)), k)
	g.CMPQ(k, end)
	g.JLT(LabelRef("loop"))
	g.Label("rest")
	if g.isa == avx512 {
		g.SUBQ(k, n)
		g.JZ(LabelRef("done"))
		masked(k, g.mask(n))
	} else {
		g.CMPQ(k, n)
		g.JGE(LabelRef("done"))
		g.Label("one")
		one(k)
		g.INCQ(k)
		g.CMPQ(k, n)
		g.JLT(LabelRef("one"))
	}
	g.Label("done")
	g.ret()
}

// replace is each where what replaces the elements of a vector, f, is all that there is to do with them.
func (g *gen) replace(dst, n reg.GPVirtual, f func(v reg.VecVirtual)) {
	v := g.vec()
	g.each(n, func(k reg.GPVirtual) {
		g.VMOVUPS(at(dst, k), v)
		f(v)
		g.VMOVUPS(v, at(dst, k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		g.VMOVUPS_Z(at(dst, k), m, v)
		f(v)
		g.VMOVUPS(v, m, at(dst, k))
	}, func(k reg.GPVirtual) { // one lane of a vector: the same instructions
		g.VMOVSS(at(dst, k), v.AsX())
		f(v)
		g.VMOVSS(v.AsX(), at(dst, k))
	})
}
