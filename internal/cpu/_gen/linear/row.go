package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// linearRow makes the kernels of linear layers of one row.
func linearRow(g *gen) {
	for _, set := range []isa{avx2, avx512} {
		streams := 4
		if set == avx512 {
			streams = 8
		}
		for _, t := range []dtype{f32, f16, bf16} {
			oneRow(g, set, t, streams)
		}
	}
	prefetch(g, avx512) // what waits with AVX2 asks for nothing
}

// prefetch asks for memory and waits for none of it.
func prefetch(g *gen, set isa) {
	g.kernel("prefetch", set, dotSource, "prefetchGo", "")
	p, n := g.arg("p"), g.arg("n")
	g.ADDQ(p, n)
	g.JMP(LabelRef("more"))
	g.Label("line")
	g.PREFETCHT1(Mem{Base: p})
	g.ADDQ(Imm(64), p)
	g.Label("more")
	g.CMPQ(p, n)
	g.JLT(LabelRef("line"))
	g.ret()
}

// oneRow is dot for a row of x and more streams, of which it reads some rows before it returns: what it asks for ahead goes on with
// the next row, so memory does not wait at a row's end.
func oneRow(g *gen, set isa, t dtype, streams int) {
	g.kernel("row"+t.name, set, dotSource, "row"+t.name+"Go", args)
	a := g.Dereference(g.Param("a"))
	step, step3 := g.field(a, "wStep"), g.GP64()
	g.LEAQ(Mem{Base: step, Index: step, Scale: 2}, step3)
	// Four streams have a register for where they are, and one for what is asked for.
	w, ahead := make([]reg.GPVirtual, streams/4), make([]reg.GPVirtual, streams/4)
	for i := range w {
		w[i], ahead[i] = g.GP64(), g.GP64()
	}
	of := func(base []reg.GPVirtual, s, disp int) Mem {
		m := Mem{Base: base[s/4], Disp: disp}
		switch s % 4 {
		case 1:
			m.Index, m.Scale = step, 1
		case 2:
			m.Index, m.Scale = step, 2
		case 3:
			m.Index, m.Scale = step3, 1
		}
		return m
	}
	rows, y, x, lines, beyond := g.field(a, "rows"), g.field(a, "y"), g.GP64(), g.GP64(), g.GP64()
	sums := g.vecs(streams)
	xv, wv := g.vec(), g.vec()
	products := func(v int, loadX, loadW func(from Mem, to reg.VecVirtual)) {
		loadX(Mem{Base: x, Disp: 4 * set.lanes * v}, xv)
		for s, sum := range sums {
			from := of(w, s, t.size*set.lanes*v)
			if loadW == nil { // weights can be operands in memory
				g.VFMADD231PS(from, xv, sum)
				continue
			}
			loadW(from, wv)
			g.VFMADD231PS(xv, wv, sum)
		}
	}
	vector := func(v int) {
		loadW := func(m Mem, v reg.VecVirtual) { g.widen(t, m, v) }
		if t == f32 {
			loadW = nil
		}
		products(v, func(m Mem, v reg.VecVirtual) { g.VMOVUPS(m, v) }, loadW)
	}
	// forward takes x and the streams n elements on.
	forward := func(n int) {
		g.ADDQ(U32(4*n), x)
		for i := range w {
			g.ADDQ(Imm(uint64(t.size*n)), w[i])
		}
	}

	g.MOVQ(g.fieldAt(a, "w"), w[0])
	g.Label("row")
	g.zero(sums...)
	g.MOVQ(g.fieldAt(a, "x"), x)
	g.MOVQ(g.fieldAt(a, "beyond"), beyond)
	g.MOVQ(beyond, ahead[0])
	g.SHLQ(Imm(6), ahead[0])
	g.ADDQ(w[0], ahead[0])
	for i := 1; i < len(w); i++ {
		g.LEAQ(Mem{Base: w[i-1], Index: step, Scale: 4}, w[i])
		g.LEAQ(Mem{Base: ahead[i-1], Index: step, Scale: 4}, ahead[i])
	}
	g.MOVQ(g.fieldAt(a, "within"), lines)
	g.TESTQ(lines, lines)
	g.JZ(LabelRef("end"))
	g.Label("lines")
	line := 64 / t.size // elements of a cache line
	for v := range line / set.lanes {
		vector(v)
	}
	for s := range sums {
		g.PREFETCHT0(of(ahead, s, 0))
	}
	for i := range ahead {
		g.ADDQ(Imm(64), ahead[i])
	}
	forward(line)
	g.DECQ(lines)
	g.JNZ(LabelRef("lines"))
	g.Label("end")
	g.TESTQ(beyond, beyond)
	g.JZ(LabelRef("short"))
	jump := g.field(a, "next")
	g.CMPQ(rows, Imm(1))
	g.JNE(LabelRef("jump"))
	g.MOVQ(g.fieldAt(a, "behind"), jump)
	g.Label("jump")
	for i := range ahead {
		g.ADDQ(jump, ahead[i])
	}
	g.MOVQ(beyond, lines)
	g.XORQ(beyond, beyond)
	g.JMP(LabelRef("lines"))

	g.Label("short")
	rest := g.field(a, "n")
	g.ANDQ(U32(uint32(line-1)), rest)
	if line > set.lanes {
		g.Label("vectors")
		g.CMPQ(rest, Imm(uint64(set.lanes)))
		g.JLT(LabelRef("rest"))
		vector(0)
		forward(set.lanes)
		g.SUBQ(Imm(uint64(set.lanes)), rest)
		g.JMP(LabelRef("vectors"))
	}
	g.Label("rest")
	g.TESTQ(rest, rest)
	g.JZ(LabelRef("sum"))
	if set == avx512 {
		mask := g.mask(rest)
		products(0, func(m Mem, v reg.VecVirtual) { g.VMOVUPS_Z(m, mask, v) },
			func(m Mem, v reg.VecVirtual) { g.widenMasked(t, m, mask, v) })
		g.LEAQ(Mem{Base: w[0], Index: rest, Scale: uint8(t.size)}, w[0])
	} else {
		products(0, func(m Mem, v reg.VecVirtual) { g.VMOVSS(m, v.AsX()) },
			func(m Mem, v reg.VecVirtual) { g.widenOne(t, m, v) })
		forward(1)
		g.DECQ(rest)
		g.JMP(LabelRef("rest"))
	}

	g.Label("sum")
	yStep, at := g.field(a, "yStep"), g.GP64()
	g.MOVQ(y, at)
	for i := range w {
		four := g.sum4(sums[4*i : 4*i+4])
		g.VMOVSS(four, Mem{Base: at})
		g.VEXTRACTPS(Imm(1), four, Mem{Base: at, Index: yStep, Scale: 1})
		g.LEAQ(Mem{Base: at, Index: yStep, Scale: 2}, at)
		g.VEXTRACTPS(Imm(2), four, Mem{Base: at})
		g.VEXTRACTPS(Imm(3), four, Mem{Base: at, Index: yStep, Scale: 1})
		g.LEAQ(Mem{Base: at, Index: yStep, Scale: 2}, at)
	}
	// Pointers behind an end stay in registers: a collector that saw them would take them for what lies there.
	g.ADDQ(g.fieldAt(a, "yRow"), y)
	g.ADDQ(g.fieldAt(a, "wSkip"), w[0])
	g.DECQ(rows)
	g.JNZ(LabelRef("row"))
	g.ret()
}
