package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Matrix work, for many rows: of products of queries and keys, and of weights and values, a block of
// some rows and two vectors of columns stays in registers.

// panel makes the kernel that transposes a vector of keys: half a panel, which is two vectors wide.
func panel(s isa, d dtype) {
	function("panel"+s.of(d)+s.name, "func(panel "+s.pointer()+", k **byte, at, dim, step int)",
		fmt.Sprintf("for i < dim, c < %d:", s.lanes),
		"",
		fmt.Sprintf("	panel[i*%d+c] = k_c[i]", 2*s.lanes),
		"",
		fmt.Sprintf("where k_c lies at k[c%%4] + at + c/4*step. It writes up to i = ceil(dim/%d)*%d.", s.lanes, s.lanes))
	off, step := param("at"), param("step")
	step3 := triple(step)
	dim, j := param("dim"), GP64()
	var mask Op
	if s.masked() {
		k := K()
		s.tailMask(dim, k)
		mask = k
	}
	to := param("panel")
	x := open("k", off)
	s.vectors(dim, j, mask, func(mask Op) {
		v := s.vecs(s.lanes)
		for c := range v {
			s.load(d, row(x[c%4], step, step3, c/4), mask, v[c])
		}
		for i, y := range s.transpose(v) {
			s.move(y, at(to, i*2*s.bytes()))
		}
		for i := range x {
			ADDQ(U8(s.lanes*d.size), x[i])
		}
		ADDQ(U32(2*s.lanes*s.bytes()), to)
	})
	VZEROUPPER()
	RET()
}

// transpose returns the columns of the square matrix of rows v, which it destroys.
func (s isa) transpose(v []VecVirtual) []VecVirtual {
	w := s.transposeLanes(v)
	n := 16 / s.elem.size // elements of a lane
	// w[n*a+k] holds, in lane b, column n*b+k of rows n*a, n*a+1 ... Then the lanes.
	out := make([]VecVirtual, s.lanes)
	for k := range n {
		if !s.masked() {
			x, y := s.vec(), s.vec()
			VPERM2F128(U8(0x20), w[n+k], w[k], x)
			VPERM2F128(U8(0x31), w[n+k], w[k], y)
			out[k], out[n+k] = x, y
			continue
		}
		t := s.vecs(4)
		VSHUFF32X4(U8(0x88), w[n+k], w[k], t[0]) // lanes 0 2 of either
		VSHUFF32X4(U8(0xdd), w[n+k], w[k], t[1]) // lanes 1 3
		VSHUFF32X4(U8(0x88), w[3*n+k], w[2*n+k], t[2])
		VSHUFF32X4(U8(0xdd), w[3*n+k], w[2*n+k], t[3])
		y := s.vecs(4)
		VSHUFF32X4(U8(0x88), t[2], t[0], y[0])
		VSHUFF32X4(U8(0x88), t[3], t[1], y[1])
		VSHUFF32X4(U8(0xdd), t[2], t[0], y[2])
		VSHUFF32X4(U8(0xdd), t[3], t[1], y[3])
		for b := range y {
			out[n*b+k] = y[b]
		}
	}
	return out
}

// transposeLanes transposes, in lanes of 128 bits, each four of v, or each two: 4x4 or 2x2 elements.
func (s isa) transposeLanes(v []VecVirtual) (w []VecVirtual) {
	if s.elem == f64 {
		for i := 0; i < len(v); i += 2 {
			x := s.vecs(2)
			VUNPCKLPD(v[i+1], v[i], x[0])
			VUNPCKHPD(v[i+1], v[i], x[1])
			w = append(w, x...)
		}
		return w
	}
	for i := 0; i < len(v); i += 4 {
		t, x := s.vecs(4), s.vecs(4)
		VUNPCKLPS(v[i+1], v[i], t[0])
		VUNPCKHPS(v[i+1], v[i], t[1])
		VUNPCKLPS(v[i+3], v[i+2], t[2])
		VUNPCKHPS(v[i+3], v[i+2], t[3])
		VUNPCKLPD(t[2], t[0], x[0])
		VUNPCKHPD(t[2], t[0], x[1])
		VUNPCKLPD(t[3], t[1], x[2])
		VUNPCKHPD(t[3], t[1], x[3])
		w = append(w, x...)
	}
	return w
}

// rowsOf returns the addresses of n rows: three or four behind each of bases.
func rowsOf(n int, ld, ld3 Register) (bases []Register, address func(r, disp int) Mem) {
	for range (n + 3) / 4 {
		bases = append(bases, GP64())
	}
	return bases, func(r, disp int) Mem {
		m := row(bases[r/4], ld, ld3, r%4)
		m.Disp = disp
		return m
	}
}

// start points bases at row 0, 4, ... behind first.
func start(bases []Register, first, ld Register) {
	MOVQ(first, bases[0])
	for i := 1; i < len(bases); i++ {
		LEAQ(Mem{Base: bases[i-1], Index: ld, Scale: 4}, bases[i])
	}
}

// scorePanel makes the kernel of scores for many rows and a panel of keys.
func scorePanel(s isa, sizes []int) {
	function("scorePanel"+s.suffix(), "func(s, q, panel "+s.pointer()+", rows, dim, stride int)",
		fmt.Sprintf("for r < rows, c < %d:", 2*s.lanes),
		"",
		fmt.Sprintf("	s[r*stride+c] = sum_i q[r*dim+i] panel[i*%d+c]", 2*s.lanes))
	out, q, panel := param("s"), param("q"), param("panel")
	left, dim, stride := param("rows"), param("dim"), param("stride")
	SHLQ(U8(s.elem.shift()), stride)
	ld := GP64()
	MOVQ(dim, ld)
	SHLQ(U8(s.elem.shift()), ld)
	ld3 := triple(ld)
	blocks(left, sizes, func(n int) {
		acc := [][]VecVirtual{s.vecs(n), s.vecs(n)}
		zero(acc[0]...)
		zero(acc[1]...)
		bases, address := rowsOf(n, ld, ld3)
		start(bases, q, ld)
		p, i := GP64(), GP64()
		MOVQ(panel, p)
		MOVQ(dim, i)
		again := label()
		Label(again)
		s.outer(acc, func(i int, v VecVirtual) { s.move(at(p, i*s.bytes()), v) }, address, 0)
		ADDQ(U32(2*s.bytes()), p)
		for _, b := range bases {
			ADDQ(U8(s.elem.size), b)
		}
		SUBQ(U8(1), i)
		JG(LabelRef(again))
		for r := range n {
			for i := range acc {
				s.move(acc[i][r], at(out, i*s.bytes()))
			}
			ADDQ(stride, out)
		}
		for range n {
			ADDQ(ld, q)
		}
	})
	VZEROUPPER()
	RET()
}

// outer adds the product of a column, whose elements address names, and a row of vectors to acc.
func (s isa) outer(acc [][]VecVirtual, load func(i int, v VecVirtual), address func(r, disp int) Mem, disp int) {
	v := s.vecs(len(acc))
	for i := range v {
		load(i, v[i])
	}
	for r := range acc[0] {
		x := s.vec()
		s.broadcast(address(r, disp), x)
		for i := range v {
			s.fma231(v[i], x, acc[i][r])
		}
	}
}

// weightedBlock makes the kernel of weighted sums for many rows: each panel of columns goes through all
// keys, with its sums in registers.
func weightedBlock(s isa, d dtype, sizes []int) {
	function("weightedBlock"+s.of(d)+s.name, "func(o, p "+s.pointer()+", v **byte"+quadsArgs,
		"for r < rows, i < dim:",
		"",
		"	o[r*dim+i] += sum_c p[r*stride+c] v_c[i]   (c < count)",
		"",
		"where v_c lies at v[c%4] + at + c/4*step.", aheadDoc, "count is a multiple of 4, and so is rows, or 6.")
	var mask Op
	if s.masked() {
		mask = K()
		s.tailMask(param("dim"), mask)
	}
	// column is where a panel of columns begins, in o; off where it does in a row of values.
	column, off, columns := local(param("o")), local(param("at")), local(param("dim"))
	aheadOff := local(param("aheadAt"))
	// What lies ahead is asked for in the order of memory, if the rows there touch each other, whatever
	// columns are at hand: each panel then asks for some whole rows, not for its columns of all.
	apart := param("dim") // 0 if they touch
	SHLQ(U8(d.shift()), apart)
	SUBQ(param("aheadStep"), apart)
	gap := local(apart)

	columnsOf := func(vectors int, mask Op) {
		t := GP64()
		MOVQ(column, t)
		o, p, left := local(t), local(param("p")), local(param("rows"))
		width := vectors * s.lanes * d.size
		if d == q4 { // an element
			width = q4Bytes
		}
		step, w := param("aheadStep"), GP64()
		MOVQ(U32(width), w)
		CMPQ(gap, U8(0))
		CMOVQEQ(w, step)
		aheadStep := local(step)
		blocks(left, sizes, func(n int) {
			acc := make([][]VecVirtual, vectors)
			for i := range acc {
				acc[i] = s.vecs(n)
				zero(acc[i]...)
			}
			stride := param("stride")
			SHLQ(U8(s.elem.shift()), stride)
			stride3 := triple(stride)
			bases, address := rowsOf(n, stride, stride3)
			t := GP64()
			MOVQ(p, t)
			start(bases, t, stride)
			x, ahead := open("v", off), open("ahead", aheadOff)
			count := local(param("count"))
			again := label()
			Label(again)
			for k := range x {
				for i := 0; i < width; i += 64 {
					PREFETCHT0(at(ahead[k], i))
				}
				load := func(i int, v VecVirtual) { s.load(d, at(x[k], i*s.lanes*d.size), mask, v) }
				if d == q4 {
					c := s.q4At(func(row Register, disp int) Mem { return at(row, disp) })
					load = func(i int, v VecVirtual) { c.load(i, x[k], v) }
				}
				s.outer(acc, load, address, s.elem.size*k)
			}
			t = param("step")
			for k := range x {
				ADDQ(t, x[k])
			}
			t = GP64()
			MOVQ(aheadStep, t)
			for k := range x {
				ADDQ(t, ahead[k])
			}
			for _, b := range bases {
				ADDQ(U8(4*s.elem.size), b)
			}
			SUBQ(U8(4), count)
			JG(LabelRef(again))

			dim, to := param("dim"), GP64()
			MOVQ(o, to)
			for r := range n {
				for i := range vectors {
					m, y := at(to, i*s.bytes()), s.vec()
					s.load(s.elem, m, mask, y)
					s.add(y, acc[i][r], y)
					s.store(y, mask, m)
				}
				LEAQ(Mem{Base: to, Index: dim, Scale: uint8(s.elem.size)}, to)
			}
			MOVQ(to, o)
			for range n {
				ADDQ(stride, p)
			}
		})
		ADDQ(U32(vectors*s.bytes()), column)
		ADDQ(U32(width), off)
		t, w = param("count"), GP64()
		SHRQ(U8(2), t)
		IMUL3Q(U32(width), t, t)
		MOVQ(U32(width), w)
		CMPQ(gap, U8(0))
		CMOVQNE(w, t)
		ADDQ(t, aheadOff)
	}
	if d == q4 {
		s.panelsOf(columns, 2, columnsOf)
	} else {
		s.panels(columns, mask, columnsOf)
	}
	VZEROUPPER()
	RET()
}
