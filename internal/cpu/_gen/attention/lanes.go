package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Scores for some rows: too many for a sum across a register for each row and key, too few for transposing
// keys to pay. Rows lie in the lanes of registers, four in each, with some neighbouring elements; then those
// elements of a key are loaded once for all rows, and little is left to be summed across.

const (
	laneRows = 8 // of a block: two registers
	steps    = 4 // neighbours that the inner loop takes in a turn: those of a vector
)

// scoreLanes makes the kernel of scores for blocks of rows in lanes.
func scoreLanes(s isa, d dtype) {
	l := &inLanes{s: s, d: d, each: s.lanes / 4, keys: s.lanes / 2}
	function("scoreLanes"+s.of(d)+s.name, "func(s, q *float32, k **byte"+
		", at, rows, count, dim, stride, step int, ahead **byte, aheadAt, aheadStep int, wide *float32)",
		"for r < rows, c < count, with wdim = dim rounded up to a multiple of "+fmt.Sprint(s.lanes)+":",
		"",
		"	s[r*stride+c] = sum_i q_r[i] k_c[i]",
		fmt.Sprintf("	q_r[i] = q[%d*(r/%d*wdim+i/%d*%d)+r%%%d*%d+i%%%d]   (0 for dim <= i < wdim)",
			laneRows, laneRows, l.each, l.each, laneRows, l.each, l.each),
		"",
		fmt.Sprintf("where k_c lies at k[c%%4] + at + c/4*step. s is written up to c = ceil(count/%d)*%d. wide is scratch", l.keys, l.keys),
		fmt.Sprintf("of %d*wdim elements.", 2*l.keys), aheadDoc)
	l.begin()
	again := label()
	Label(again)
	l.widen()
	l.blocks()
	ADDQ(U8(4*l.keys), l.scores)
	SUBQ(U8(l.keys), l.left)
	JG(LabelRef(again))
	VZEROUPPER()
	RET()
}

// inLanes is what the parts of a scoreLanes kernel share; what lies in memory does so on the stack.
type inLanes struct {
	s        isa
	d        dtype
	each     int // elements of a row that are neighbours in a register
	keys     int // at a time
	mask     Op  // AVX-512: of dim%16 elements
	ld       Mem // bytes of a widened row
	off      Mem // of the quad in its streams
	aheadOff Mem
	scores   Mem
	left     Mem // keys
	list     Mem // where the addresses lie that are to be asked for
}

func (l *inLanes) begin() {
	dim := param("dim")
	if l.s.masked() {
		l.mask = K()
		l.s.tailMask(dim, l.mask)
	}
	ADDQ(U8(l.s.lanes-1), dim)
	ANDQ(I8(-l.s.lanes), dim)
	SHLQ(U8(2), dim)
	l.ld = local(dim)
	list := param("wide")
	IMUL3Q(U8(l.keys), dim, dim)
	ADDQ(dim, list)
	l.list = local(list)
	l.off, l.aheadOff = local(param("at")), local(param("aheadAt"))
	l.scores, l.left = local(param("s")), local(param("count"))
}

// widen widens the next keys, or those that are left, and notes what lies ahead of each cache line: asking
// for all of it here would be more at a time than memory takes.
func (l *inLanes) widen() {
	s, d := l.s, l.d
	to, list, ld, left, quads := param("wide"), GP64(), GP64(), GP64(), GP64()
	MOVQ(l.list, list)
	MOVQ(l.left, left)
	MOVQ(U32(l.keys/4), quads)
	again, done := label(), label()
	Label(again)
	x := open("k", l.off)
	for i := 1; i < 4; i++ { // streams beyond the last key: the first again
		CMPQ(left, U8(i))
		CMOVQLE(x[0], x[i])
	}
	dim, j := param("dim"), GP64()
	MOVQ(l.ld, ld)
	ld3 := triple(ld)
	s.eachColumns(d, dim, j, l.mask, func(c columns) {
		for p := range c.vectors {
			for i := range x {
				v := s.vec()
				c.load(p, x[i], v)
				m := row(to, ld, ld3, i)
				m.Disp = p * s.bytes()
				VMOVUPS(v, m)
			}
		}
		ADDQ(U32(c.vectors*s.bytes()), to)
	})
	LEAQ(Mem{Base: to, Index: ld3, Scale: 1}, to) // the next quad

	ahead := open("ahead", l.aheadOff)
	bytes := param("dim")
	SHLQ(U8(d.shift()), bytes)
	line := label()
	Label(line)
	for i, a := range ahead {
		MOVQ(a, at(list, 8*i))
		ADDQ(U8(64), a)
	}
	ADDQ(U8(32), list)
	SUBQ(U8(64), bytes)
	JG(LabelRef(line))

	t := param("step")
	ADDQ(t, l.off)
	t = param("aheadStep")
	ADDQ(t, l.aheadOff)
	SUBQ(U8(4), left)
	JLE(LabelRef(done))
	SUBQ(U8(1), quads)
	JG(LabelRef(again))
	Label(done)
}

// blocks computes the scores of the widened keys with all rows.
func (l *inLanes) blocks() {
	query, left, out := local(param("q")), local(param("rows")), GP64()
	MOVQ(l.scores, out)
	again, done := label(), label()
	Label(again)
	var acc [laneRows / 4][]VecVirtual
	for i := range acc {
		acc[i] = l.s.vecs(l.keys)
		zero(acc[i]...)
	}
	l.products(acc, query)
	// The rows' scores, as far as there are such rows.
	n, stride := GP64(), param("stride")
	MOVQ(left, n)
	SHLQ(U8(2), stride)
	for r, quads := range l.gather(acc) {
		if r > 0 {
			CMPQ(n, U8(r))
			JLE(LabelRef(done))
			ADDQ(stride, out)
		}
		for g, quad := range quads {
			l.s.storeLane(quad, at(out, 16*g))
		}
	}
	ADDQ(stride, out)
	SUBQ(U8(laneRows), left)
	JG(LabelRef(again))
	Label(done)
}

// products adds to acc[i][c] the products of key c and rows 4i.. of a block, whose address it moves to the
// next.
func (l *inLanes) products(acc [laneRows / 4][]VecVirtual, query Mem) {
	s := l.s
	q, ld := GP64(), GP64()
	MOVQ(query, q)
	MOVQ(l.ld, ld)
	left := local(ld)
	bases, key := rowsOf(l.keys, ld, triple(ld))
	start(bases, param("wide"), ld)
	list := GP64()
	MOVQ(l.list, list)
	lines := l.keys * l.each * steps * l.d.size / 64 // of memory in a turn of the loop
	again := label()
	Label(again)
	for i := range steps {
		x := s.vecs(len(acc))
		for j := range x {
			VMOVUPS(at(q, (i*len(x)+j)*s.bytes()), x[j])
		}
		for c := range l.keys {
			y := s.vec()
			if l.each == 2 {
				VBROADCASTSD(key(c, 4*l.each*i), y)
			} else {
				VBROADCASTF32X4(key(c, 4*l.each*i), y)
			}
			for j := range x {
				VFMADD231PS(y, x[j], acc[j][c])
			}
			if turn, every := i*l.keys+c, steps*l.keys/lines; turn%every == 0 {
				t := GP64()
				MOVQ(at(list, 8*turn/every), t)
				PREFETCHT0(at(t, 0))
			}
		}
	}
	for _, b := range bases {
		ADDQ(U8(4*l.each*steps), b)
	}
	ADDQ(U32(steps*len(acc)*s.bytes()), q)
	ADDQ(U32(8*lines), list)
	SUBQ(U8(4*l.each*steps), left)
	JG(LabelRef(again))
	MOVQ(q, query)
}

// lane is 128 bits of a register.
type lane struct {
	v VecVirtual
	n int
}

func (s isa) storeLane(l lane, m Mem) {
	switch {
	case l.n == 0:
		VMOVUPS(l.v.AsX(), m)
	case !s.masked():
		VEXTRACTF128(U8(l.n), l.v, m)
	default:
		VEXTRACTF32X4(U8(l.n), l.v, m)
	}
}

// gather returns the scores of each row, four keys in a lane.
func (l *inLanes) gather(acc [laneRows / 4][]VecVirtual) (rows [laneRows][]lane) {
	s := l.s
	for i := range acc {
		for c := 0; c < l.keys; c += 4 {
			a := acc[i][c : c+4]
			if l.each == 4 { // a row fills a lane
				v := s.inLanes(a)
				for n := range 4 {
					rows[4*i+n] = append(rows[4*i+n], lane{v, n})
				}
				continue
			}
			// A lane has two rows, each with two sums.
			x, y := s.pairs(a[0], a[1]), s.pairs(a[2], a[3])
			for r, order := range []uint8{0x88, 0xdd} {
				v := s.vec()
				VSHUFPS(U8(order), y, x, v)
				for n := range 2 {
					rows[4*i+2*n+r] = append(rows[4*i+2*n+r], lane{v, n})
				}
			}
		}
	}
	return rows
}

// pairs returns, in each lane of 128 bits, the sums of the two pairs of a and of those of b.
func (s isa) pairs(a, b VecVirtual) VecVirtual {
	even, odd := s.vec(), s.vec()
	VSHUFPS(U8(0x88), b, a, even)
	VSHUFPS(U8(0xdd), b, a, odd)
	VADDPS(odd, even, even)
	return even
}
