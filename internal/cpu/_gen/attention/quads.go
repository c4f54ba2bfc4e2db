package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// streams are the registers that hold where a quad of rows lies, one row a stream.
type streams [4]Register

// open points x at the rows of the quad off bytes behind the streams of a parameter.
func open(name string, off Op) (x streams) {
	array, o := param(name), GP64()
	MOVQ(off, o)
	for i := range x {
		x[i] = GP64()
		MOVQ(at(array, 8*i), x[i])
		ADDQ(o, x[i])
	}
	return x
}

// quads is what the kernels that walk along four streams have in common. What inner loops do not need
// lies on the stack.
type quads struct {
	s        isa
	d        dtype
	mask     Op // AVX-512: of dim%16 elements
	x        streams
	ahead    streams
	stride   Op // bytes between rows of scores
	ld       Register
	off      Mem // of the quad in its streams
	aheadOff Mem
	scores   Mem // of the quad
	left     Mem // keys
}

// aheadDoc says what the last parameters of such kernels are.
const aheadDoc = "With each quad the one at ahead[0..3] + aheadAt is asked for, aheadStep further each time."

const quadsArgs = ", at, rows, count, dim, stride, step int, ahead **byte, aheadAt, aheadStep int)"

func newQuads(s isa, d dtype, scores string) *quads {
	q := &quads{s: s, d: d, ld: GP64()}
	dim := param("dim")
	if s.masked() {
		q.mask = K()
		s.tailMask(dim, q.mask)
	}
	MOVQ(dim, q.ld)
	SHLQ(U8(s.elem.shift()), q.ld)
	t := param("stride")
	SHLQ(U8(s.elem.shift()), t)
	q.stride = local(t)
	q.off, q.aheadOff = local(param("at")), local(param("aheadAt"))
	q.scores, q.left = local(param(scores)), local(param("count"))
	return q
}

func (q *quads) next() {
	t := param("step")
	ADDQ(t, q.off)
	t = param("aheadStep")
	ADDQ(t, q.aheadOff)
	ADDQ(U8(4*q.s.elem.size), q.scores)
}

// prefetch asks for what lies as far in the rows ahead as j is in those at hand.
func (q *quads) prefetch(j Register) {
	for _, a := range q.ahead {
		PREFETCHT0(Mem{Base: a, Index: j, Scale: uint8(q.d.size)})
	}
}

// score makes the kernel of scores for few rows. Each quad of keys is loaded once from memory, and for
// every block of rows from the first-level cache.
func score(s isa, d dtype, sizes []int) {
	function("score"+s.of(d)+s.name, "func(s, q "+s.pointer()+", k **byte"+quadsArgs,
		"for r < rows, c < count:",
		"",
		"	s[r*stride+c] = sum_i q[r*dim+i] k_c[i]",
		"",
		"where k_c lies at k[c%4] + at + c/4*step. s is written up to c = ceil(count/4)*4.", aheadDoc)
	q := newQuads(s, d, "s")
	again := label()
	Label(again)
	q.x = open("k", q.off)
	t := GP64()
	MOVQ(q.left, t)
	for i := 1; i < 4; i++ { // streams beyond the last key: the first again
		CMPQ(t, U8(i))
		CMOVQLE(q.x[0], q.x[i])
	}
	q.ahead = open("ahead", q.aheadOff)
	q.scoreRows(sizes)
	q.next()
	SUBQ(U8(4), q.left)
	JG(LabelRef(again))
	VZEROUPPER()
	RET()
}

// scoreRows computes the scores of all rows with one quad of keys.
func (q *quads) scoreRows(sizes []int) {
	s, d := q.s, q.d
	left, query := local(param("rows")), local(param("q"))
	t := GP64()
	MOVQ(q.scores, t)
	out := local(t)
	blocks(left, sizes, func(n int) {
		acc := make([][]VecVirtual, n)
		for r := range acc {
			acc[r] = s.vecs(4)
			zero(acc[r]...)
		}
		qx, j := GP64(), GP64()
		MOVQ(query, qx)
		ld3 := q.ld
		if n > 3 {
			ld3 = triple(q.ld)
		}
		dim := param("dim")
		s.eachColumns(d, dim, j, q.mask, func(c columns) {
			q.prefetch(j)
			if n == 1 && d == s.elem && c.mask == nil {
				y := s.vec()
				s.move(at(qx, 0), y)
				for i, x := range q.x {
					s.fma231(Mem{Base: x, Index: j, Scale: uint8(d.size)}, y, acc[0][i])
				}
			} else if s.inOrder(d) {
				for i, x := range q.x {
					for part := range c.vectors {
						k := s.vec()
						c.load(part, x, k)
						for r := range n {
							m := row(qx, q.ld, ld3, r)
							m.Disp = part * s.bytes()
							s.fma231(m, k, acc[r][i])
						}
					}
				}
			} else {
				for v := range c.vectors {
					k := s.vecs(4)
					for i := range k {
						c.load(v, q.x[i], k[i])
					}
					for r := range n {
						m, y := row(qx, q.ld, ld3, r), s.vec()
						m.Disp = v * s.bytes()
						s.load(s.elem, m, c.mask, y)
						for i := range k {
							s.fma231(k[i], y, acc[r][i])
						}
					}
				}
			}
			ADDQ(Imm(uint64(c.vectors*s.bytes())), qx)
		})
		to, stride := GP64(), GP64()
		MOVQ(out, to)
		MOVQ(q.stride, stride)
		s.reduce(acc, to, stride)
		if n == 1 && sizes[0] > 1 {
			return // the last
		}
		for range n {
			ADDQ(q.ld, query)
			ADDQ(stride, out)
		}
	})
}

// inLanes adds up four vectors of float32 within lanes of 128 bits: [sum a0, sum a1, sum a2, sum a3] in each.
func (s isa) inLanes(a []VecVirtual) VecVirtual {
	lo, hi := s.vecs(2), s.vecs(2)
	for i := range 2 {
		VUNPCKLPS(a[2*i+1], a[2*i], lo[i])
		VUNPCKHPS(a[2*i+1], a[2*i], hi[i])
		VADDPS(hi[i], lo[i], lo[i])
	}
	x, y := s.vec(), s.vec()
	VUNPCKLPD(lo[1], lo[0], x)
	VUNPCKHPD(lo[1], lo[0], y)
	VADDPS(y, x, x)
	return x
}

// reduce stores the sums of acc[r][i]'s elements at out + r*stride, i = 0..3.
func (s isa) reduce(acc [][]VecVirtual, out, stride Register) {
	if s.elem == f64 {
		s.reduceDoubles(acc, out, stride)
		return
	}
	var u []VecVirtual
	for _, a := range acc {
		u = append(u, s.inLanes(a))
	}
	if !s.masked() {
		for r, x := range u {
			hi := XMM()
			VEXTRACTF128(U8(1), x, hi)
			VADDPS(hi, x.AsX(), hi)
			VMOVUPS(hi, row(out, stride, nil, r))
		}
		return
	}
	// Then the lanes: those of two rows at a time become sums of pairs of lanes.
	pair := func(a, b VecVirtual) VecVirtual {
		x, y := s.vec(), s.vec()
		VSHUFF32X4(U8(0x88), b, a, x)
		VSHUFF32X4(U8(0xdd), b, a, y)
		VADDPS(y, x, x)
		return x
	}
	var sum VecVirtual
	switch len(u) {
	case 1:
		sum = pair(u[0], u[0])
		sum = pair(sum, sum)
	case 2:
		sum = pair(u[0], u[1])
		sum = pair(sum, sum)
	case 4:
		sum = pair(pair(u[0], u[1]), pair(u[2], u[3]))
	}
	VMOVUPS(sum.AsX(), at(out, 0))
	stride3 := stride
	if len(u) > 2 {
		stride3 = triple(stride)
	}
	for r := 1; r < len(u); r++ {
		VEXTRACTF32X4(U8(r), sum, row(out, stride, stride3, r))
	}
}

// reduceDoubles is reduce for float64.
func (s isa) reduceDoubles(acc [][]VecVirtual, out, stride Register) {
	// Within lanes of 128 bits, [sum a0, sum a1] and [sum a2, sum a3]; then the lanes.
	pairs := func(a, b VecVirtual) VecVirtual {
		lo, hi := s.vec(), s.vec()
		VUNPCKLPD(b, a, lo)
		VUNPCKHPD(b, a, hi)
		VADDPD(hi, lo, lo)
		return lo
	}
	halve := func(a, b VecVirtual) VecVirtual {
		lo, hi := s.vec(), s.vec()
		if s.masked() {
			VSHUFF64X2(U8(0x88), b, a, lo)
			VSHUFF64X2(U8(0xdd), b, a, hi)
		} else {
			VPERM2F128(U8(0x20), b, a, lo)
			VPERM2F128(U8(0x31), b, a, hi)
		}
		VADDPD(hi, lo, lo)
		return lo
	}
	stride3 := stride
	if len(acc) > 3 {
		stride3 = triple(stride)
	}
	var sums []VecVirtual
	for _, a := range acc {
		sums = append(sums, halve(pairs(a[0], a[1]), pairs(a[2], a[3])))
	}
	for r := range sums {
		m := row(out, stride, stride3, r)
		switch {
		case !s.masked():
			VMOVUPD(sums[r], m)
		case r%2 == 0: // those of two rows, or of one twice
			sums[r] = halve(sums[r], sums[min(r+1, len(sums)-1)])
			VMOVUPD(sums[r].AsY(), m)
		default:
			VEXTRACTF64X4(U8(1), sums[r-1], m)
		}
	}
}

// weighted makes the kernel of weighted sums for few rows.
func weighted(s isa, d dtype, sizes []int) {
	function("weighted"+s.of(d)+s.name, "func(o, p "+s.pointer()+", v **byte"+quadsArgs,
		"for r < rows, i < dim:",
		"",
		"	o[r*dim+i] += sum_c p[r*stride+c] v_c[i]   (c < count)",
		"",
		"where v_c lies at v[c%4] + at + c/4*step.", aheadDoc)
	q := newQuads(s, d, "p")
	again, rest, done := label(), label(), label()
	Label(again)
	CMPQ(q.left, U8(4))
	JL(LabelRef(rest))
	q.x = open("v", q.off)
	q.ahead = open("ahead", q.aheadOff)
	q.weightedRows(q.x[:], sizes)
	q.next()
	SUBQ(U8(4), q.left)
	JMP(LabelRef(again))

	// Up to three keys are left, which have one row of values each.
	Label(rest)
	v := local(param("v"))
	key := label()
	Label(key)
	SUBQ(U8(1), q.left)
	JL(LabelRef(done))
	y := GP64()
	MOVQ(v, y)
	MOVQ(at(y, 0), y)
	ADDQ(q.off, y)
	q.weightedRows([]Register{y}, []int{1})
	ADDQ(U8(8), v)
	ADDQ(U8(s.elem.size), q.scores)
	JMP(LabelRef(key))
	Label(done)
	VZEROUPPER()
	RET()
}

// weightedRows adds the weighted rows x of values to all rows of o.
func (q *quads) weightedRows(x []Register, sizes []int) {
	s, d := q.s, q.d
	t := GP64()
	MOVQ(q.scores, t)
	left, o, p := local(param("rows")), local(param("o")), local(t)
	blocks(left, sizes, func(n int) {
		weight := make([][]VecVirtual, n)
		w, stride := GP64(), GP64()
		MOVQ(p, w)
		MOVQ(q.stride, stride)
		inOrder := s.inOrder(d) && len(x) > 1
		for r := range weight {
			if inOrder { // there is no register for each weight
				ADDQ(stride, p)
				continue
			}
			weight[r] = s.vecs(len(x))
			for i, v := range weight[r] {
				s.broadcast(at(w, s.elem.size*i), v)
			}
			ADDQ(stride, w)
		}
		if !inOrder {
			MOVQ(w, p)
		}
		ox, j := GP64(), GP64()
		MOVQ(o, ox)
		ld3 := q.ld
		if n > 3 {
			ld3 = triple(q.ld)
		}
		dim := param("dim")
		s.eachColumns(d, dim, j, q.mask, func(c columns) {
			value := func(i int) Mem { return Mem{Base: x[i], Index: j, Scale: uint8(d.size)} }
			if len(x) == 4 {
				q.prefetch(j)
			}
			if inOrder {
				s.addInOrder(c, x, n, func(r, i int, v VecVirtual) {
					m := row(w, stride, nil, r)
					m.Disp = s.elem.size * i
					s.broadcast(m, v)
				}, func(r, part int) Mem {
					m := row(ox, q.ld, ld3, r)
					m.Disp = part * s.bytes()
					return m
				})
				ADDQ(Imm(uint64(c.vectors*s.bytes())), ox)
				return
			}
			direct := n == 1 && d == s.elem && c.mask == nil
			for part := range c.vectors {
				v := s.vecs(len(x))
				if !direct {
					for i := range v {
						c.load(part, x[i], v[i])
					}
				}
				for r := range n {
					// The sum of the quad first: one addition for each in o, where errors add up.
					t := s.vec()
					for i := range x {
						switch {
						case direct && i == 0:
							s.mul(value(i), weight[r][i], t)
						case direct:
							s.fma231(value(i), weight[r][i], t)
						case i == 0:
							s.mul(v[i], weight[r][i], t)
						default:
							s.fma231(v[i], weight[r][i], t)
						}
					}
					m := row(ox, q.ld, ld3, r)
					m.Disp = part * s.bytes()
					if c.mask == nil {
						s.add(m, t, t)
					} else {
						y := s.vec()
						s.load(s.elem, m, c.mask, y)
						s.add(y, t, t)
					}
					s.store(t, c.mask, m)
				}
			}
			ADDQ(Imm(uint64(c.vectors*s.bytes())), ox)
		})
		for range n {
			ADDQ(q.ld, o)
		}
	})
}
