package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Predicates of comparisons: those that are quiet, and true for NaN.
const (
	cmpUnordered = 0x03
	cmpNotLess   = 0x15
)

var constants = map[uint32]Mem{}

// constant returns where eight times x lie in memory.
func constant(x float32) Mem {
	b := math.Float32bits(x)
	if _, ok := constants[b]; !ok {
		constants[b] = GLOBL(fmt.Sprintf("c%08x", b), RODATA|NOPTR)
		for i := range 8 {
			DATA(4*i, U32(b))
		}
	}
	return constants[b]
}

// constant returns a vector of x: a register, if there are enough of these.
func (s isa) constant(x float32) Op {
	if s.lanes == 8 {
		return constant(x)
	}
	v := s.vec()
	VBROADCASTSS(constant(x), v)
	return v
}

// exp4 has the constants of 4^x; what they are is told at exp4 in exp4.go.
type exp4 struct {
	s                 isa
	least, shift, one Op
	c0                VecVirtual
	c                 []Op // of f^5 down to 1
}

func newExp4(s isa) *exp4 {
	e := &exp4{s: s, least: s.constant(-63), shift: s.constant(3 << 21), one: s.constant(1), c0: s.vec()}
	VBROADCASTSS(constant(0.00015594677582896996*64), e.c0)
	for _, c := range []float32{
		0.0013406643905945253 * 32, 0.009617692974769792 * 16, 0.055503105509929686 * 8, 0.24022652782877088 * 4, 0.6931472149680414 * 2,
	} {
		e.c = append(e.c, s.constant(c))
	}
	e.c = append(e.c, e.one)
	return e
}

// of replaces x by 4^x.
func (e *exp4) of(x VecVirtual) {
	s := e.s
	t, f, y := s.vec(), s.vec(), s.vec()
	VADDPS(e.shift, x, t)
	VSUBPS(e.shift, t, f)
	VSUBPS(f, x, f)
	VMOVAPS(e.c0, y)
	for _, c := range e.c {
		VFMADD213PS(c, f, y)
	}
	VPSLLD(U8(23), t, t)
	VPADDD(e.one, t, t)
	if s.lanes == 16 {
		k := K()
		VCMPPS(U8(cmpNotLess), e.least, x, k)
		VMULPS_Z(t, y, k, x)
		return
	}
	VMULPS(t, y, y)
	VCMPPS(U8(cmpNotLess), e.least, x, x)
	VANDPS(y, x, x)
}

// prefix is a mask of the first n%lanes elements, and whether there are any.
type prefix struct {
	s    isa
	k    Op         // AVX-512
	v    VecVirtual // AVX2: all bits of an element
	rest Register   // n%lanes
}

func (s isa) prefix(n Register) *prefix {
	p := &prefix{s: s, rest: GP64()}
	MOVQ(n, p.rest)
	ANDQ(U8(s.lanes-1), p.rest)
	if s.lanes == 16 {
		p.k = K()
		tailMask(n, p.k)
		return p
	}
	i, t := GP64(), GP64()
	LEAQ(prefixes(), t)
	MOVQ(p.rest, i)
	NEGQ(i)
	p.v = s.vec()
	VMOVUPS(Mem{Base: t, Index: i, Scale: 4, Disp: 32}, p.v)
	return p
}

// load loads the elements of the mask, and elements of fill beside them.
func (p *prefix) load(m Mem, fill, v VecVirtual) {
	if p.k != nil {
		VMOVAPS(fill, v)
		VMOVUPS(m, p.k, v)
		return
	}
	VMASKMOVPS(m, p.v, v)
	VBLENDVPS(p.v, v, fill, v)
}

func (p *prefix) store(v VecVirtual, m Mem) {
	if p.k != nil {
		VMOVUPS(v, p.k, m)
		return
	}
	VMASKMOVPS(v, p.v, m)
}

var prefixTable *Mem

// prefixes returns a table of eight words of ones and eight of zeros.
func prefixes() Mem {
	if prefixTable == nil {
		m := GLOBL("prefixes", RODATA|NOPTR)
		for i := range 16 {
			x := uint32(0)
			if i < 8 {
				x = 1<<32 - 1
			}
			DATA(4*i, U32(x))
		}
		prefixTable = &m
	}
	return *prefixTable
}

// across reduces v by op to its first element.
func (s isa) across(v VecVirtual, op func(...Op)) VecVirtual {
	if s.lanes == 16 {
		hi := YMM()
		VEXTRACTF64X4(U8(1), v, hi)
		op(hi, v.AsY(), hi)
		v = hi
	}
	x := XMM()
	VEXTRACTF128(U8(1), v.AsY(), x)
	op(x, v.AsX(), x)
	for _, order := range []uint8{0x4e, 0xb1} {
		y := XMM()
		VPERMILPS(U8(order), x, y)
		op(y, x, x)
	}
	return x
}

// nans collects whether there was a NaN.
type nans struct {
	s isa
	k Op
	v VecVirtual
}

func (s isa) nans(x VecVirtual) *nans {
	n := &nans{s: s}
	if s.lanes == 16 {
		n.k = K()
		VCMPPS(U8(cmpUnordered), x, x, n.k)
	} else {
		n.v = s.vec()
		VCMPPS(U8(cmpUnordered), x, x, n.v)
	}
	return n
}

func (n *nans) see(x VecVirtual) {
	if n.k != nil {
		k := K()
		VCMPPS(U8(cmpUnordered), x, x, k)
		KORW(k, n.k, n.k)
		return
	}
	v := n.s.vec()
	VCMPPS(U8(cmpUnordered), x, x, v)
	VORPS(v, n.v, n.v)
}

// none jumps to where if there was no NaN.
func (n *nans) none(where string) {
	if n.k != nil {
		KORTESTW(n.k, n.k)
	} else {
		t := GP32()
		VMOVMSKPS(n.v, t)
		TESTL(t, t)
	}
	JZ(LabelRef(where))
}

// weigh makes the kernel that turns scores into weights.
func weigh(s isa) {
	function("weigh"+s.name, "func(s, o, m, l *float32, rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) (empty int)",
		"for r < rows, c < n, i < dim, with top = max(m[r], max_c s[r*stride+c]):",
		"",
		"	s[r*stride+c] = 4^(s[r*stride+c]-top)",
		"	o[r*dim+i] *= 4^(m[r]-top)",
		"	l[r] = 4^(m[r]-top) l[r] + sum_c s[r*stride+c]",
		"	m[r] = top",
		"",
		"A row whose top is -Inf is left as it is; how many these are is returned. n is at least 1.",
		fmt.Sprintf("With each %d weights a cache line is asked for, of ahead[0..3] + aheadAt in turn, aheadStep further with each row.", s.lanes))
	scores, o, m, l := param("s"), param("o"), param("m"), param("l")
	left, n := local(param("rows")), param("n")
	ldo := param("dim")
	tail := s.prefix(n)
	var mask Op
	if s.lanes == 16 {
		k := K()
		tailMask(ldo, k)
		mask = k
	}
	e := newExp4(s)
	inf := s.vec()
	VBROADCASTSS(constant(float32(math.Inf(-1))), inf)
	zeroQ := GP64()
	XORQ(zeroQ, zeroQ)
	empty, aheadAt := local(zeroQ), local(param("aheadAt"))
	j := GP64()

	again, next, isEmpty, some, number, rescale, same := label(), label(), label(), label(), label(), label(), label()
	Label(again)
	max := s.vec()
	VBROADCASTSS(at(m, 0), max)
	bad := s.nans(max)
	element := Mem{Base: scores, Index: j, Scale: 4}
	s.prefixed(n, j, tail, func(rest bool) {
		x := s.vec()
		if rest {
			tail.load(element, inf, x)
		} else {
			VMOVUPS(element, x)
		}
		bad.see(x)
		VMAXPS(x, max, max)
	})
	top := s.across(max, VMAXPS)
	bad.none(number)
	VBROADCASTSS(constant(float32(math.NaN())), top)
	Label(number)
	VUCOMISS(constant(float32(math.Inf(-1))), top)
	JP(LabelRef(some))
	JE(LabelRef(isEmpty))
	Label(some)
	VBROADCASTSS(top, max)

	VUCOMISS(at(m, 0), top)
	JP(LabelRef(rescale))
	JE(LabelRef(same))
	Label(rescale)
	old := XMM()
	VMOVSS(at(m, 0), old)
	VUCOMISS(constant(float32(math.Inf(-1))), old)
	factor := label()
	JP(LabelRef(factor))
	JE(LabelRef(same))
	Label(factor)
	f := s.vec()
	VBROADCASTSS(old, f)
	VSUBPS(max, f, f)
	e.of(f)
	sum := XMM()
	VMULSS(at(l, 0), f.AsX(), sum)
	VMOVSS(sum, at(l, 0))
	s.vectors(ldo, j, mask, func(mask Op) {
		x, out := s.vec(), Mem{Base: o, Index: j, Scale: 4}
		f32.load(out, mask, x)
		VMULPS(f, x, x)
		if mask == nil {
			VMOVUPS(x, out)
		} else {
			VMOVUPS(x, mask, out)
		}
	})
	Label(same)
	VMOVSS(top, at(m, 0))
	total := s.vec()
	zero(total)
	s.prefixed(n, j, tail, func(rest bool) {
		x := s.vec()
		if rest {
			tail.load(element, inf, x)
		} else {
			VMOVUPS(element, x)
		}
		VSUBPS(max, x, x)
		e.of(x)
		if !rest {
			stream, line := GP64(), GP64() // the quarter of a turn, and the turn
			MOVQ(j, line)
			MOVQ(j, stream)
			if s.lanes == 16 {
				SHRQ(U8(1), stream)
			} else {
				SHLQ(U8(1), line)
			}
			ANDQ(U8(24), stream)
			ADDQ(param("ahead"), stream)
			MOVQ(at(stream, 0), stream)
			ANDQ(I8(-64), line)
			ADDQ(aheadAt, line)
			PREFETCHT0(Mem{Base: stream, Index: line, Scale: 1})
		}
		if rest {
			tail.store(x, element)
		} else {
			VMOVUPS(x, element)
		}
		VADDPS(x, total, total)
	})
	sum = s.across(total, VADDPS)
	VADDSS(at(l, 0), sum, sum)
	VMOVSS(sum, at(l, 0))

	Label(next)
	further := param("aheadStep")
	ADDQ(further, aheadAt)
	stride := param("stride")
	LEAQ(Mem{Base: scores, Index: stride, Scale: 4}, scores)
	LEAQ(Mem{Base: o, Index: ldo, Scale: 4}, o)
	ADDQ(U8(4), m)
	ADDQ(U8(4), l)
	SUBQ(U8(1), left)
	JG(LabelRef(again))
	VZEROUPPER()
	count := GP64()
	MOVQ(empty, count)
	Store(count, Return("empty"))
	RET()
	Label(isEmpty)
	ADDQ(U8(1), empty)
	JMP(LabelRef(next))
}

// prefixed runs body for the vectors of n elements, the last, shorter one with rest set.
func (s isa) prefixed(n, j Register, p *prefix, body func(rest bool)) {
	full := GP64()
	MOVQ(n, full)
	SUBQ(p.rest, full)
	again, rest, done := label(), label(), label()
	XORQ(j, j)
	TESTQ(full, full)
	JZ(LabelRef(rest))
	Label(again)
	body(false)
	ADDQ(U8(s.lanes), j)
	CMPQ(j, full)
	JL(LabelRef(again))
	Label(rest)
	TESTQ(p.rest, p.rest)
	JZ(LabelRef(done))
	body(true)
	Label(done)
}
