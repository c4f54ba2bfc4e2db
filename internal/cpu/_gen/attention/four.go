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

// q4At returns the columns of an element, whose bytes at names.
func (s isa) q4At(at func(row Register, disp int) Mem) columns {
	scale := func(row Register) VecVirtual {
		// The scale is the upper half of the four bytes at the element's end.
		v := s.vec()
		VPBROADCASTD(at(row, q4Bytes-4), v)
		if s.masked() {
			VPANDD_BCST(s.words(0xffff0000), v, v)
		} else {
			VPAND(s.words(0xffff0000), v, v)
		}
		return v
	}
	c := columns{vectors: q4Columns / s.lanes}
	if s.masked() {
		type held struct{ indices, scale VecVirtual }
		rows := map[Register]held{}
		c.load = func(i int, row Register, v VecVirtual) {
			if i == 0 {
				h := held{s.vec(), scale(row)}
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
	c.load = func(i int, row Register, v VecVirtual) {
		x, table := XMM(), XMM()
		VMOVQ(at(row, i%2*8), x)
		if i > 1 {
			VPSRLW(U8(4), x, x)
		}
		VPAND(s.words(0x0f0f0f0f), x, x)
		VMOVDQU(q4Bytewise(), table)
		VPSHUFB(x, table, x)
		VPMOVSXBD(x, v)
		VCVTDQ2PS(v, v)
		VMULPS(scale(row), v, v)
	}
	return c
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
