package main

import (
	"fmt"
	"math"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// An isa is an instruction set that kernels are made for, and what they compute in.
type isa struct {
	name  string
	lanes int   // elements of a vector
	elem  dtype // f32 or f64
	*instructions
}

var (
	avx2      = isa{"AVX2", 8, f32, &single}
	avx512    = isa{"AVX512", 16, f32, &single}
	avx2F64   = isa{"AVX2", 4, f64, &double}
	avx512F64 = isa{"AVX512", 8, f64, &double}
)

// instructions are those of one type of elements.
type instructions struct {
	move, add, sub, mul, max, min, fma231, fma213 func(...Op)
	broadcast, compare                            func(...Op)
	mulZero                                       func(mxyz, xyz, k, xyz1 Op) // 0 where the mask is not set
	maskMove                                      func(mxy, xy, mxy1 Op)

	// Of the first element alone.
	moveFirst, addFirst, mulFirst func(...Op)
	compareFirst                  func(mx, x Op)
}

var (
	single = instructions{
		VMOVUPS, VADDPS, VSUBPS, VMULPS, VMAXPS, VMINPS, VFMADD231PS, VFMADD213PS,
		VBROADCASTSS, VCMPPS, VMULPS_Z, VMASKMOVPS,
		VMOVSS, VADDSS, VMULSS, VUCOMISS,
	}
	double = instructions{
		VMOVUPD, VADDPD, VSUBPD, VMULPD, VMAXPD, VMINPD, VFMADD231PD, VFMADD213PD,
		VBROADCASTSD, VCMPPD, VMULPD_Z, VMASKMOVPD,
		VMOVSD, VADDSD, VMULSD, VUCOMISD,
	}
)

func (s isa) bytes() int { return s.elem.size * s.lanes }

// masked reports whether there are masks, as AVX-512 has them.
func (s isa) masked() bool { return s.bytes() == 64 }

// of is the part of a function's name that says what it is for: keys and values of type d, and if they are of another type
// than queries, what these are.
func (s isa) of(d dtype) string {
	if s.elem == f64 && d != f64 {
		return f64.name + d.name
	}
	return d.name
}

// suffix is the end of the name of a function for all types of keys and values.
func (s isa) suffix() string {
	if s.elem == f64 {
		return "64" + s.name
	}
	return s.name
}

// pointer is the Go type of a pointer to elements.
func (s isa) pointer() string {
	if s.elem == f64 {
		return "*float64"
	}
	return "*float32"
}

// vec returns a new vector register.
func (s isa) vec() VecVirtual {
	if s.masked() {
		return ZMM()
	}
	return YMM()
}

func (s isa) vecs(n int) (v []VecVirtual) {
	for range n {
		v = append(v, s.vec())
	}
	return v
}

func zero(v ...VecVirtual) {
	for _, x := range v {
		VXORPS(x, x, x)
	}
}

// A dtype is an element type of keys and values.
type dtype struct {
	name string
	size int
}

var (
	f64  = dtype{"F64", 8}
	f32  = dtype{"F32", 4}
	f16  = dtype{"F16", 2}
	bf16 = dtype{"BF16", 2}
	i8   = dtype{"Int8", 1}
	e4m3 = dtype{"E4M3", 1} // times 2^-8: NaN is 480
)

// shift is the binary logarithm of the size.
func (d dtype) shift() int { return bits.TrailingZeros(uint(d.size)) }

// load loads as many elements of type d as a vector of s has, and widens them. With a mask (AVX-512), elements that it leaves
// out are not read, and 0.
func (s isa) load(d dtype, m Mem, mask Op, v VecVirtual) {
	if s.elem == f64 && d != f64 {
		half := VecVirtual(XMM())
		if s.masked() {
			half = YMM()
		}
		if d == f32 && mask == nil {
			VCVTPS2PD(m, v)
			return
		}
		d.load(m, mask, half)
		VCVTPS2PD(half, v)
		return
	}
	d.load(m, mask, v)
}

// load loads elements of type d, which it widens to float32 if they are shorter.
func (d dtype) load(m Mem, mask Op, v VecVirtual) {
	switch {
	case d == f64 && mask == nil:
		VMOVUPD(m, v)
	case d == f64:
		VMOVUPD_Z(m, mask, v)
	case d == f32 && mask == nil:
		VMOVUPS(m, v)
	case d == f32:
		VMOVUPS_Z(m, mask, v)
	case d == f16 && mask == nil:
		VCVTPH2PS(m, v)
	case d == f16:
		VCVTPH2PS_Z(m, mask, v)
	case d == bf16 && mask == nil:
		VPMOVZXWD(m, v)
		VPSLLD(U8(16), v, v)
	case d == bf16:
		VPMOVZXWD_Z(m, mask, v)
		VPSLLD(U8(16), v, v)
	case d == i8 && mask == nil:
		VPMOVSXBD(m, v)
		VCVTDQ2PS(v, v)
	case d == i8:
		VPMOVSXBD_Z(m, mask, v)
		VCVTDQ2PS(v, v)
	case d == e4m3: // by way of float16, whose fraction begins with the same bits: see package vector
		w, and := v.AsX().(VecVirtual), func(m Mem, w VecVirtual) { VPAND(m, w, w) }
		if v.Size() == 64 {
			w, and = v.AsY().(VecVirtual), func(m Mem, w VecVirtual) { VPANDD(m, w, w) } // of any register
		}
		if mask == nil {
			VPMOVSXBW(m, w)
		} else {
			VPMOVSXBW_Z(m, mask, w)
		}
		VPSLLW(U8(7), w, w) // sign, sign, exponent, fraction
		and(avx2.inMemory(float64(math.Float32frombits(0xbfffbfff))), w)
		VCVTPH2PS(w, v)
	}
}

// store stores a vector, or what a mask leaves of it.
func (s isa) store(v VecVirtual, mask Op, m Mem) {
	if mask == nil {
		s.move(v, m)
	} else {
		s.move(v, mask, m)
	}
}

var labels int

// label returns a new label.
func label() string {
	labels++
	return fmt.Sprintf("l%d", labels)
}

// param loads a parameter.
func param(name string) GPVirtual {
	r := GP64()
	Load(Param(name), r)
	return r
}

// local is a variable on the stack, of 8 bytes.
func local(init Op) Mem {
	m := AllocLocal(8)
	MOVQ(init, m)
	return m
}

func at(base Register, disp int) Mem { return Mem{Base: base, Disp: disp} }

// row returns the address of row r < 4 behind base, rows ld bytes apart; ld3 is 3*ld.
func row(base, ld, ld3 Register, r int) Mem {
	switch r {
	case 0:
		return Mem{Base: base}
	case 3:
		return Mem{Base: base, Index: ld3, Scale: 1}
	}
	return Mem{Base: base, Index: ld, Scale: uint8(r)}
}

// triple returns 3*x.
func triple(x Register) GPVirtual {
	y := GP64()
	LEAQ(Mem{Base: x, Index: x, Scale: 2}, y)
	return y
}

// blocks runs body for blocks of rows, the largest first, but 8 rows as twice 4 rather than 6 and 2. left
// is the number of rows.
func blocks(left Op, sizes []int, body func(rows int)) {
	for i, n := range sizes {
		skip, again := label(), label()
		Label(again)
		CMPQ(left, U8(n))
		JL(LabelRef(skip))
		if n == 6 {
			CMPQ(left, U8(8))
			JE(LabelRef(skip))
		}
		body(n)
		SUBQ(U8(n), left)
		if i == 0 || sizes[i-1] != 2*n || sizes[0] == 6 && n == 4 {
			JMP(LabelRef(again))
		}
		Label(skip)
	}
}

// vectors runs body for the vectors of a row of n elements: j, which body adds to addresses, counts
// elements. The last, shorter one comes with a mask (AVX-512; with AVX2 there is none).
func (s isa) vectors(n, j Register, mask Op, body func(mask Op)) {
	full := GP64()
	MOVQ(n, full)
	ANDQ(I8(-s.lanes), full)
	again, rest, done := label(), label(), label()
	var rem Mem
	if mask != nil {
		rem = local(n)
	}
	XORQ(j, j)
	TESTQ(full, full)
	JZ(LabelRef(rest))
	Label(again)
	body(nil)
	ADDQ(U8(s.lanes), j)
	CMPQ(j, full)
	JL(LabelRef(again))
	Label(rest)
	if mask != nil {
		CMPQ(j, rem)
		JGE(LabelRef(done))
		body(mask)
		Label(done)
	}
}

// tailMask makes k a mask of the first n%lanes elements.
func (s isa) tailMask(n Register, k Op) {
	i, t := GP64(), GP64()
	MOVQ(n, i)
	ANDQ(U8(s.lanes-1), i)
	LEAQ(tailMasks(), t)
	KMOVW(Mem{Base: t, Index: i, Scale: 2}, k)
}

// constants are what the functions of a file share in memory.
type constants struct {
	of              string // the end of the names of tables
	masks, prefixes *Mem
	q4, q4Bytes     *Mem // the integers of q4, as float32 and as bytes
	numbers         map[uint64]Mem
}

// tables are those of the file at hand.
var tables = newTables("")

func newTables(of string) constants { return constants{of: of, numbers: map[uint64]Mem{}} }

func tailMasks() Mem {
	if tables.masks == nil {
		masks := GLOBL("tailMasks"+tables.of, RODATA|NOPTR)
		tables.masks = &masks
		for i := range 16 {
			DATA(2*i, U16(1<<i-1))
		}
	}
	return *tables.masks
}

// function begins a function, whose contract is doc.
func function(name, signature string, doc ...string) {
	TEXT(name, NOSPLIT, signature)
	Pragma("noescape")
	Doc(append([]string{name + " computes, " + doc[0]}, doc[1:]...)...)
}
