package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Elements of 32 columns in 4 bits: 16 bytes of indices, those of columns 0 to 15 in the lower bits, and a scale, which is a bfloat16.

// q4 is the type. Its size is 1, since loops count the bytes of rows.
var q4 = dtype{"Q4", 1}

const (
	q4Columns = 32
	q4Bytes   = 18
)

// q4Integers are those of package half.
var q4Integers = [16]int8{-127, -102, -82, -66, -51, -37, -25, -12, 0, 13, 26, 39, 54, 70, 88, 111}

// columns are some neighbouring columns of rows, as a turn of a loop takes them: vectors of registers.
type columns struct {
	vectors int
	mask    Op                                      // of elements in memory that the columns have; nil: all
	load    func(i int, row Register, v VecVirtual) // loads vector i of a row
}

// eachColumns runs body for all columns of rows of n elements: j, which body adds to addresses, counts elements, or bytes of q4. What a
// mask leaves of a vector comes last.
func (s isa) eachColumns(d dtype, n, j Register, mask Op, body func(c columns)) {
	if d != q4 {
		s.vectors(n, j, mask, func(mask Op) {
			body(columns{1, mask, func(_ int, row Register, v VecVirtual) {
				s.load(d, Mem{Base: row, Index: j, Scale: uint8(d.size)}, mask, v)
			}})
		})
		return
	}
	end, again := GP64(), label()
	MOVQ(n, end)
	SHRQ(U8(5), end)
	IMUL3Q(U8(q4Bytes), end, end)
	XORQ(j, j)
	Label(again)
	body(s.q4At(func(row Register, disp int) Mem { return Mem{Base: row, Index: j, Scale: 1, Disp: disp} }))
	ADDQ(U8(q4Bytes), j)
	CMPQ(j, end)
	JL(LabelRef(again))
}

// q4Scale returns the scale of an element in all lanes: the upper half of the four bytes at the element's end.
func (s isa) q4Scale(at func(row Register, disp int) Mem, row Register) VecVirtual {
	v := s.vec()
	VPBROADCASTD(at(row, q4Bytes-4), v)
	if s.masked() {
		VPANDD_BCST(s.words(0xffff0000), v, v)
	} else {
		VPAND(s.words(0xffff0000), v, v)
	}
	return v
}

// q4At returns the columns of an element, whose bytes at names. With AVX2 each row's vectors are loaded in order, before the next row's.
func (s isa) q4At(at func(row Register, disp int) Mem) columns {
	c := columns{vectors: q4Columns / s.lanes}
	if !s.masked() {
		c.load = s.q4Bytewise(at)
		return c
	}
	type held struct{ indices, scale VecVirtual }
	rows := map[Register]held{}
	c.load = func(i int, row Register, v VecVirtual) {
		if i == 0 {
			h := held{s.vec(), s.q4Scale(at, row)}
			VPMOVZXBD(at(row, 0), h.indices)
			rows[row] = h
		}
		h := rows[row]
		if i == 1 {
			VPSRLD(U8(4), h.indices, h.indices)
		}
		VPERMPS(q4Table(), h.indices, v) // by the last four bits
		VMULPS(h.scale, v, v)
	}
	return c
}

// q4Bytewise returns the loads of an element with AVX2, where a register has too few floats for a table: integers are bytes first.
func (s isa) q4Bytewise(at func(row Register, disp int) Mem) func(i int, row Register, v VecVirtual) {
	var x, scale VecVirtual
	return func(i int, row Register, v VecVirtual) {
		switch i {
		case 0, 2:
			table := XMM()
			if x = XMM(); i == 0 {
				scale = s.q4Scale(at, row)
			}
			VMOVDQU(at(row, 0), x)
			if i == 2 {
				VPSRLW(U8(4), x, x)
			}
			VPAND(s.words(0x0f0f0f0f), x, x)
			VMOVDQU(q4Bytewise(), table)
			VPSHUFB(x, table, x)
		default:
			VPSRLDQ(U8(8), x, x)
		}
		VPMOVSXBD(x, v)
		VCVTDQ2PS(v, v)
		VMULPS(scale, v, v)
	}
}

// inOrder reports whether the vectors of a row are loaded in order, before those of the next row.
func (s isa) inOrder(d dtype) bool { return d == q4 && !s.masked() }

// addInOrder adds the weighted columns of rows x to n rows of sums, whose vectors out names. weight loads the weight of row i of x.
func (s isa) addInOrder(c columns, x []Register, n int, weight func(r, i int, v VecVirtual), out func(r, part int) Mem) {
	sums := make([][]VecVirtual, n)
	for r := range sums {
		sums[r] = s.vecs(c.vectors)
	}
	for i := range x {
		w := s.vecs(n)
		for r := range w {
			weight(r, i, w[r])
		}
		for part := range c.vectors {
			v := s.vec()
			c.load(part, x[i], v)
			for r := range n {
				if i == 0 {
					s.mul(v, w[r], sums[r][part])
				} else {
					s.fma231(v, w[r], sums[r][part])
				}
			}
		}
	}
	for r := range sums {
		for part, v := range sums[r] {
			s.add(out(r, part), v, v)
			s.move(v, out(r, part))
		}
	}
}

// words returns where 32 bytes of a word lie in memory.
func (s isa) words(x uint32) Mem { return s.inMemory(float64(math.Float32frombits(x))) }

// q4Table returns where the integers lie as float32.
func q4Table() Mem {
	if tables.q4 == nil {
		m := GLOBL("q4Floats", RODATA|NOPTR)
		for i, x := range q4Integers {
			DATA(4*i, F32(x))
		}
		tables.q4 = &m
	}
	return *tables.q4
}

// q4Bytewise returns where the integers lie as bytes.
func q4Bytewise() Mem {
	if tables.q4Bytes == nil {
		m := GLOBL("q4Bytes", RODATA|NOPTR)
		for i, x := range q4Integers {
			DATA(i, I8(x))
		}
		tables.q4Bytes = &m
	}
	return *tables.q4Bytes
}

// widened makes the kernel that decodes rows.
func widened(s isa) {
	function("widened"+q4.name+s.name, "func(dst *float32, x **byte, at, count, dim, step int)",
		"for c < count, i < dim:",
		"",
		"	dst[c*dim+i] = x_c[i]",
		"",
		"where x_c lies at x[c%4] + at + c/4*step. dim is a multiple of 32, and count at least 1.")
	to, off, left, dim := param("dst"), local(param("at")), local(param("count")), param("dim")
	again, done := label(), label()
	Label(again)
	x := open("x", off)
	for i := range x {
		j := GP64()
		s.eachColumns(q4, dim, j, nil, func(c columns) {
			for p := range c.vectors {
				v := s.vec()
				c.load(p, x[i], v)
				VMOVUPS(v, at(to, p*s.bytes()))
			}
			ADDQ(U32(c.vectors*s.bytes()), to)
		})
		SUBQ(U8(1), left)
		JLE(LabelRef(done))
	}
	step := param("step")
	ADDQ(step, off)
	JMP(LabelRef(again))
	Label(done)
	VZEROUPPER()
	RET()
}
