package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// What only backward passes do. A block of scores is some rows of queries by some keys.

// gradient makes the kernel that turns scores into weights, and the gradients in these into those in the scores.
func gradient(s isa) {
	function("gradient"+s.suffix(), "func(p, ds, m, factor, off "+s.pointer()+", rows, n, stride int)",
		"for r < rows, c < n, with i = r*stride + c:",
		"",
		"	p[i] = 4^min(p[i]-m[r], 0) factor[r]",
		"	ds[i] = p[i] (ds[i] - off[r])",
		"",
		"n is at least 1.")
	size := s.elem.size
	p, ds, n, stride := param("p"), param("ds"), param("n"), param("stride")
	m, factor, off := param("m"), param("factor"), param("off")
	SHLQ(U8(s.elem.shift()), stride)
	ld, left := local(stride), local(param("rows"))
	tail := s.prefix(n)
	e := newExp4(s)
	top, scale, sub, none := s.vec(), s.vec(), s.vec(), s.vec()
	zero(none)
	j := GP64()
	again := label()
	Label(again)
	s.broadcast(at(m, 0), top)
	s.broadcast(at(factor, 0), scale)
	s.broadcast(at(off, 0), sub)
	score, grad := Mem{Base: p, Index: j, Scale: uint8(size)}, Mem{Base: ds, Index: j, Scale: uint8(size)}
	s.prefixed(n, j, tail, func(rest bool) {
		x, y := s.vec(), s.vec()
		if rest {
			tail.load(score, none, x)
			tail.load(grad, none, y)
		} else {
			s.move(score, x)
			s.move(grad, y)
		}
		s.sub(top, x, x)
		s.min(x, none, x) // NaN, if x is
		e.of(x)
		s.mul(scale, x, x)
		s.sub(sub, y, y)
		s.mul(x, y, y)
		if rest {
			tail.store(x, score)
			tail.store(y, grad)
		} else {
			s.move(x, score)
			s.move(y, grad)
		}
	})
	ADDQ(ld, p)
	ADDQ(ld, ds)
	for _, r := range []Register{m, factor, off} {
		ADDQ(U8(size), r)
	}
	SUBQ(U8(1), left)
	JG(LabelRef(again))
	VZEROUPPER()
	RET()
}

// addProduct makes the kernel of sums that a block weighs, by its rows or, transposed, by its columns: each panel of columns
// of the result goes through all that is added up, with its sums in registers.
func addProduct(s isa, transposed bool, sizes []int) {
	const together = 4 // terms in a turn of the loop
	if transposed {
		function("weightedColumns"+s.suffix(), "func(o, p, v "+s.pointer()+", terms, count, dim, stride int)",
			"for c < count, i < dim:",
			"",
			"	o[c*dim+i] += sum_r p[r*stride+c] v[r*dim+i]   (r < terms)",
			"",
			"terms is a multiple of 4.")
	} else {
		function("weightedRows"+s.suffix(), "func(o, p, v "+s.pointer()+", terms, count, dim, stride int)",
			"for r < count, i < dim:",
			"",
			"	o[r*dim+i] += sum_c p[r*stride+c] v[c*dim+i]   (c < terms)",
			"",
			"terms is a multiple of 4.")
	}
	size := s.elem.size
	var mask Op
	if s.masked() {
		mask = K()
		s.tailMask(param("dim"), mask)
	}
	// Where a panel of columns begins, in o and in v.
	column, values, columns := local(param("o")), local(param("v")), local(param("dim"))
	columnsOf := func(vectors int, mask Op) {
		t := GP64()
		MOVQ(column, t)
		o, weights, left := local(t), local(param("p")), local(param("count"))
		blocks(left, sizes, func(n int) {
			acc := make([][]VecVirtual, vectors)
			for i := range acc {
				acc[i] = s.vecs(n)
				zero(acc[i]...)
			}
			ld, stride := param("dim"), param("stride")
			SHLQ(U8(s.elem.shift()), ld)
			SHLQ(U8(s.elem.shift()), stride)
			ld3, stride3 := triple(ld), triple(stride)
			p, v, terms := GP64(), GP64(), param("terms")
			MOVQ(weights, p)
			MOVQ(values, v)
			bases, address := []Register{p}, func(int, int) Mem { return Mem{} }
			if !transposed {
				bases, address = rowsOf(n, stride, stride3)
				start(bases, p, stride)
			}
			again := label()
			Label(again)
			for k := range together {
				value := func(i int, to VecVirtual) {
					m := row(v, ld, ld3, k)
					m.Disp = i * s.bytes()
					s.load(s.elem, m, mask, to)
				}
				weight := address
				if transposed {
					weight = func(c, _ int) Mem {
						m := row(p, stride, stride3, k)
						m.Disp = c * size
						return m
					}
				}
				s.outer(acc, value, weight, k*size)
			}
			LEAQ(Mem{Base: v, Index: ld, Scale: together}, v)
			for _, b := range bases {
				if transposed {
					LEAQ(Mem{Base: b, Index: stride, Scale: together}, b)
				} else {
					ADDQ(U8(together*size), b)
				}
			}
			SUBQ(U8(together), terms)
			JG(LabelRef(again))

			to := GP64()
			MOVQ(o, to)
			for c := range n {
				for i := range vectors {
					m, y := at(to, i*s.bytes()), s.vec()
					s.load(s.elem, m, mask, y)
					s.add(y, acc[i][c], y)
					s.store(y, mask, m)
				}
				ADDQ(ld, to)
			}
			MOVQ(to, o)
			if transposed {
				ADDQ(U8(n*size), weights)
				return
			}
			for range n {
				ADDQ(stride, weights)
			}
		})
		ADDQ(U32(vectors*s.bytes()), column)
		ADDQ(U32(vectors*s.bytes()), values)
	}
	s.panels(columns, mask, columnsOf)
	VZEROUPPER()
	RET()
}

// panels runs body for panels of two vectors of columns, then of one, then of what a mask leaves of one. columns is
// their number.
func (s isa) panels(columns Mem, mask Op, body func(vectors int, mask Op)) {
	done := label()
	s.panelsOf(columns, 2, body)
	s.panelsOf(columns, 1, body)
	if mask != nil {
		CMPQ(columns, U8(0))
		JE(LabelRef(done))
		body(1, mask)
	}
	Label(done)
}

// panelsOf runs body for panels of some vectors, as long as there are so many columns.
func (s isa) panelsOf(columns Mem, vectors int, body func(vectors int, mask Op)) {
	again, fewer := label(), label()
	Label(again)
	CMPQ(columns, U8(vectors*s.lanes))
	JL(LabelRef(fewer))
	body(vectors, nil)
	SUBQ(U8(vectors*s.lanes), columns)
	JMP(LabelRef(again))
	Label(fewer)
}
