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

// inMemory returns where 32 bytes of x lie in memory.
func (s isa) inMemory(x float64) Mem {
	b := math.Float64bits(x)
	if s.elem == f32 {
		b = uint64(math.Float32bits(float32(x)))
	}
	if _, ok := tables.numbers[b]; !ok {
		tables.numbers[b] = GLOBL(fmt.Sprintf("c%0*x", 2*s.elem.size, b), RODATA|NOPTR)
		for i := 0; i < 32; i += s.elem.size {
			if s.elem == f32 {
				DATA(i, U32(b))
			} else {
				DATA(i, U64(b))
			}
		}
	}
	return tables.numbers[b]
}

// constant returns a vector of x: a register, if there are enough of these.
func (s isa) constant(x float64) Op {
	if !s.masked() {
		return s.inMemory(x)
	}
	v := s.vec()
	s.broadcast(s.inMemory(x), v)
	return v
}

// exp4F64 has the coefficients of 4^f in float64, of f^11 down to 1: of the polynomial whose greatest relative error for
// -1/4 <= f <= 1/4, 3.4e-18, is the least among those that are exact at f = 0.
var exp4F64 = []float64{
	9.082411618714372e-07, 7.243554046467209e-06, 5.211238180783175e-05, 0.0003383151432270973, 0.0019523498871203185,
	0.009858259492551738, 0.042667386069678785, 0.15389006572150593, 0.4440328693185607, 0.9609060278364052, 1.3862943611198906,
}

// exp4 has the constants of 4^x; what they are is told at exp4 in exp4.go.
type exp4 struct {
	s                 isa
	least, shift, one Op
	c0                VecVirtual
	c                 []Op // of f^5, or f^10, down to 1
}

func newExp4(s isa) *exp4 {
	// The coefficients in exp4.go, times powers of 2.
	least, shift, c0, c := -63.0, float64(3<<21), 0.00015594677582896996*64, []float64{
		0.0013406643905945253 * 32, 0.009617692974769792 * 16, 0.055503105509929686 * 8, 0.24022652782877088 * 4, 0.6931472149680414 * 2,
	}
	if s.elem == f64 {
		least, shift, c0, c = -511, 3<<50, exp4F64[0], exp4F64[1:]
	}
	e := &exp4{s: s, least: s.constant(least), shift: s.constant(shift), one: s.constant(1), c0: s.vec()}
	s.broadcast(s.inMemory(c0), e.c0)
	for _, c := range c {
		e.c = append(e.c, s.constant(c))
	}
	e.c = append(e.c, e.one)
	return e
}

// of replaces x by 4^x.
func (e *exp4) of(x VecVirtual) {
	s := e.s
	t, f, y := s.vec(), s.vec(), s.vec()
	s.add(e.shift, x, t)
	s.sub(e.shift, t, f)
	s.sub(f, x, f)
	if s.elem == f64 {
		e.polynomial(f, y)
	} else {
		VMOVAPS(e.c0, y)
		for _, c := range e.c {
			s.fma213(c, f, y)
		}
	}
	if s.elem == f64 {
		VPSLLQ(U8(52), t, t)
		VPADDQ(e.one, t, t)
	} else {
		VPSLLD(U8(23), t, t)
		VPADDD(e.one, t, t)
	}
	if s.masked() {
		k := K()
		s.compare(U8(cmpNotLess), e.least, x, k)
		s.mulZero(t, y, k, x)
		return
	}
	s.mul(t, y, y)
	s.compare(U8(cmpNotLess), e.least, x, x)
	VANDPS(y, x, x)
}

// polynomial makes y that of f in float64. One coefficient after the other would leave multipliers waiting: more terms
// in a row than processors look ahead. So there are pairs of them, and pairs of pairs.
func (e *exp4) polynomial(f, y VecVirtual) {
	s := e.s
	c := append([]Op{e.c0}, e.c...) // c[11-i] is that of f^i
	of := func(i int, v VecVirtual) VecVirtual {
		VMOVUPD(c[11-i], v)
		return v
	}
	f2, f4 := s.vec(), s.vec()
	VMULPD(f, f, f2)
	pair := func(i int, v VecVirtual) VecVirtual { // c_i + c_(i+1) f
		of(i+1, v)
		s.fma213(c[11-i], f, v)
		return v
	}
	pair(1, y)
	a := pair(3, s.vec())
	s.fma231(f2, a, y)
	b, c5 := pair(7, s.vec()), pair(5, s.vec())
	s.fma231(f2, b, c5)
	VMULPD(f2, f2, f4)
	d := pair(9, s.vec())
	s.fma231(f2, e.c0, d)
	s.fma213(c5, f4, d)
	s.fma231(f4, d, y)
	s.fma213(e.one, f, y)
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
	if s.masked() {
		p.k = K()
		s.tailMask(n, p.k)
		return p
	}
	i, t := GP64(), GP64()
	LEAQ(prefixes(), t)
	MOVQ(p.rest, i)
	NEGQ(i)
	p.v = s.vec()
	VMOVUPS(Mem{Base: t, Index: i, Scale: uint8(s.elem.size), Disp: 32}, p.v)
	return p
}

// load loads the elements of the mask, and elements of fill beside them.
func (p *prefix) load(m Mem, fill, v VecVirtual) {
	if p.k != nil {
		VMOVAPS(fill, v)
		p.s.move(m, p.k, v)
		return
	}
	p.s.maskMove(m, p.v, v)
	VBLENDVPS(p.v, v, fill, v)
}

func (p *prefix) store(v VecVirtual, m Mem) {
	if p.k != nil {
		p.s.move(v, p.k, m)
		return
	}
	p.s.maskMove(v, p.v, m)
}

// prefixes returns a table of 32 bytes of ones and 32 of zeros.
func prefixes() Mem {
	if tables.prefixes == nil {
		m := GLOBL("prefixes"+tables.of, RODATA|NOPTR)
		for i := range 16 {
			x := uint32(0)
			if i < 8 {
				x = 1<<32 - 1
			}
			DATA(4*i, U32(x))
		}
		tables.prefixes = &m
	}
	return *tables.prefixes
}

// across reduces v by op to its first element.
func (s isa) across(v VecVirtual, op func(...Op)) VecVirtual {
	if s.masked() {
		hi := YMM()
		VEXTRACTF64X4(U8(1), v, hi)
		op(hi, v.AsY(), hi)
		v = hi
	}
	x := XMM()
	if s.masked() {
		VEXTRACTF64X2(U8(1), v.AsY(), x) // of any register
	} else {
		VEXTRACTF128(U8(1), v.AsY(), x)
	}
	op(x, v.AsX(), x)
	if s.elem == f64 {
		y := XMM()
		VPERMILPD(U8(1), x, y)
		op(y, x, x)
		return x
	}
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
	if s.masked() {
		n.k = K()
		s.compare(U8(cmpUnordered), x, x, n.k)
	} else {
		n.v = s.vec()
		s.compare(U8(cmpUnordered), x, x, n.v)
	}
	return n
}

func (n *nans) see(x VecVirtual) {
	if n.k != nil {
		k := K()
		n.s.compare(U8(cmpUnordered), x, x, k)
		KORW(k, n.k, n.k)
		return
	}
	v := n.s.vec()
	n.s.compare(U8(cmpUnordered), x, x, v)
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

// weigh makes the kernel that turns scores into weights. Values of float64 are so many that those which could be asked for
// here would make no difference.
func weigh(s isa) { weighing(s, "weigh"+s.suffix(), s.elem == f32) }

// weighing is weigh, which asks for what lies ahead or not.
func weighing(s isa, name string, asks bool) {
	aheadOfWeights := "Nothing is asked for."
	if asks {
		aheadOfWeights = fmt.Sprintf("With each %d weights a cache line is asked for, of ahead[0..3] + aheadAt in turn, aheadStep further with each row.", s.lanes)
	}
	function(name, "func(s, o, m, l "+s.pointer()+", rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) (empty int)",
		"for r < rows, c < n, i < dim, with top = max(m[r], max_c s[r*stride+c]):",
		"",
		"	s[r*stride+c] = 4^(s[r*stride+c]-top)",
		"	o[r*dim+i] *= 4^(m[r]-top)",
		"	l[r] = 4^(m[r]-top) l[r] + sum_c s[r*stride+c]",
		"	m[r] = top",
		"",
		"A row whose top is -Inf is left as it is; how many these are is returned. n is at least 1.",
		aheadOfWeights)
	size := uint8(s.elem.size)
	scores, o, m, l := param("s"), param("o"), param("m"), param("l")
	left, n := local(param("rows")), param("n")
	ldo := param("dim")
	tail := s.prefix(n)
	var mask Op
	if s.masked() {
		k := K()
		s.tailMask(ldo, k)
		mask = k
	}
	e := newExp4(s)
	inf := s.vec()
	s.broadcast(s.inMemory(math.Inf(-1)), inf)
	zeroQ := GP64()
	XORQ(zeroQ, zeroQ)
	empty, aheadAt := local(zeroQ), local(param("aheadAt"))
	j := GP64()

	again, next, isEmpty, some, number, rescale, same := label(), label(), label(), label(), label(), label(), label()
	Label(again)
	max := s.vec()
	s.broadcast(at(m, 0), max)
	bad := s.nans(max)
	element := Mem{Base: scores, Index: j, Scale: size}
	s.prefixed(n, j, tail, func(rest bool) {
		x := s.vec()
		if rest {
			tail.load(element, inf, x)
		} else {
			s.move(element, x)
		}
		bad.see(x)
		s.max(x, max, max)
	})
	top := s.across(max, s.max)
	bad.none(number)
	s.moveFirst(s.inMemory(math.NaN()), top)
	Label(number)
	s.compareFirst(s.inMemory(math.Inf(-1)), top)
	JP(LabelRef(some))
	JE(LabelRef(isEmpty))
	Label(some)
	s.broadcast(top, max)

	s.compareFirst(at(m, 0), top)
	JP(LabelRef(rescale))
	JE(LabelRef(same))
	Label(rescale)
	old := XMM()
	s.moveFirst(at(m, 0), old)
	s.compareFirst(s.inMemory(math.Inf(-1)), old)
	factor := label()
	JP(LabelRef(factor))
	JE(LabelRef(same))
	Label(factor)
	f := s.vec()
	s.broadcast(old, f)
	s.sub(max, f, f)
	e.of(f)
	sum := XMM()
	s.mulFirst(at(l, 0), f.AsX(), sum)
	s.moveFirst(sum, at(l, 0))
	s.vectors(ldo, j, mask, func(mask Op) {
		x, out := s.vec(), Mem{Base: o, Index: j, Scale: size}
		s.load(s.elem, out, mask, x)
		s.mul(f, x, x)
		s.store(x, mask, out)
	})
	Label(same)
	s.moveFirst(top, at(m, 0))
	total := s.vec()
	zero(total)
	s.prefixed(n, j, tail, func(rest bool) {
		x := s.vec()
		if rest {
			tail.load(element, inf, x)
		} else {
			s.move(element, x)
		}
		s.sub(max, x, x)
		e.of(x)
		if !rest && asks {
			stream, line := GP64(), GP64() // the quarter of a turn, and the turn
			MOVQ(j, line)
			MOVQ(j, stream)
			if s.masked() {
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
			s.move(x, element)
		}
		s.add(x, total, total)
	})
	sum = s.across(total, s.add)
	s.addFirst(at(l, 0), sum, sum)
	s.moveFirst(sum, at(l, 0))

	Label(next)
	further := param("aheadStep")
	ADDQ(further, aheadAt)
	stride := param("stride")
	LEAQ(Mem{Base: scores, Index: stride, Scale: size}, scores)
	LEAQ(Mem{Base: o, Index: ldo, Scale: size}, o)
	ADDQ(U8(size), m)
	ADDQ(U8(size), l)
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
