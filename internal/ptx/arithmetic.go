package ptx

import (
	"math"
	"math/bits"
	"strings"
	"unsafe"

	"gorgonia.org/leanattention/internal/half"
)

// Operations on 32-bit integers and floats with two and three operands.
var binary32 = map[string]func(a, b uint32) uint32{
	"and":         func(a, b uint32) uint32 { return a & b },
	"or":          func(a, b uint32) uint32 { return a | b },
	"xor":         func(a, b uint32) uint32 { return a ^ b },
	"mul.hi.s32":  func(a, b uint32) uint32 { return uint32(uint64(int64(int32(a))*int64(int32(b))) >> 32) },
	"mul.hi.u32":  func(a, b uint32) uint32 { return uint32(uint64(a) * uint64(b) >> 32) },
	"div.s32":     func(a, b uint32) uint32 { return uint32(divide(int64(int32(a)), int64(int32(b)))) },
	"div.u32":     func(a, b uint32) uint32 { return uint32(divide(int64(a), int64(b))) },
	"rem.s32":     func(a, b uint32) uint32 { return uint32(remainder(int64(int32(a)), int64(int32(b)))) },
	"rem.u32":     func(a, b uint32) uint32 { return uint32(remainder(int64(a), int64(b))) },
	"min.s32":     func(a, b uint32) uint32 { return uint32(min(int32(a), int32(b))) },
	"max.s32":     func(a, b uint32) uint32 { return uint32(max(int32(a), int32(b))) },
	"min.u32":     func(a, b uint32) uint32 { return min(a, b) },
	"max.u32":     func(a, b uint32) uint32 { return max(a, b) },
	"shl.b32":     func(a, b uint32) uint32 { return a << min(b, 32) },
	"shr.u32":     func(a, b uint32) uint32 { return a >> min(b, 32) },
	"shr.b32":     func(a, b uint32) uint32 { return a >> min(b, 32) },
	"shr.s32":     func(a, b uint32) uint32 { return uint32(int32(a) >> min(b, 31)) },
	"shl.b16":     func(a, b uint32) uint32 { return uint32(uint16(a) << min(b, 16)) },
	"shr.u16":     func(a, b uint32) uint32 { return uint32(uint16(a) >> min(b, 16)) },
	"min.f32":     floats(func(a, b float32) float32 { return smaller(a, b) }),
	"max.f32":     floats(func(a, b float32) float32 { return -smaller(-a, -b) }),
	"min.NaN.f32": floats(func(a, b float32) float32 { return min(a, b) }),
	"max.NaN.f32": floats(func(a, b float32) float32 { return max(a, b) }),
	"div.f32":     floats(func(a, b float32) float32 { return a / b }),
	"sub.f16x2":   func(a, b uint32) uint32 { return less16(a>>16, b>>16)<<16 | less16(a, b) },
}

var binary64 = map[string]func(a, b uint64) uint64{
	"and":        func(a, b uint64) uint64 { return a & b },
	"or":         func(a, b uint64) uint64 { return a | b },
	"xor":        func(a, b uint64) uint64 { return a ^ b },
	"mul.lo.s64": func(a, b uint64) uint64 { return a * b },
	"mul.lo.u64": func(a, b uint64) uint64 { return a * b },
	"mul.hi.u64": func(a, b uint64) uint64 { h, _ := bits.Mul64(a, b); return h },
	"div.s64":    func(a, b uint64) uint64 { return uint64(divide(int64(a), int64(b))) },
	"div.u64":    func(a, b uint64) uint64 { return divide(a, b) },
	"rem.s64":    func(a, b uint64) uint64 { return uint64(remainder(int64(a), int64(b))) },
	"rem.u64":    func(a, b uint64) uint64 { return remainder(a, b) },
	"min.s64":    func(a, b uint64) uint64 { return uint64(min(int64(a), int64(b))) },
	"max.s64":    func(a, b uint64) uint64 { return uint64(max(int64(a), int64(b))) },
	"min.u64":    func(a, b uint64) uint64 { return min(a, b) },
	"max.u64":    func(a, b uint64) uint64 { return max(a, b) },
	"shl.b64":    func(a, b uint64) uint64 { return a << min(b, 64) }, // b has 32 bits
	"shr.u64":    func(a, b uint64) uint64 { return a >> min(b, 64) },
	"shr.b64":    func(a, b uint64) uint64 { return a >> min(b, 64) },
	"shr.s64":    func(a, b uint64) uint64 { return uint64(int64(a) >> min(b, 63)) },
	"add.f64":    doubles(func(a, b float64) float64 { return a + b }),
	"sub.f64":    doubles(func(a, b float64) float64 { return a - b }),
	"mul.f64":    doubles(func(a, b float64) float64 { return a * b }),
	"div.f64":    doubles(func(a, b float64) float64 { return a / b }),
	"min.f64":    doubles(func(a, b float64) float64 { return smaller(a, b) }),
	"max.f64":    doubles(func(a, b float64) float64 { return -smaller(-a, -b) }),
}

var unary32 = map[string]func(a uint32) uint32{
	"not.b32":          func(a uint32) uint32 { return ^a },
	"not.b16":          func(a uint32) uint32 { return uint32(^uint16(a)) },
	"neg.s32":          func(a uint32) uint32 { return -a },
	"neg.f32":          func(a uint32) uint32 { return a ^ 1<<31 },
	"abs.s32":          func(a uint32) uint32 { return uint32(max(int32(a), -int32(a))) },
	"abs.f32":          func(a uint32) uint32 { return a &^ (1 << 31) },
	"ex2.approx.f32":   float1(math.Exp2),
	"lg2.approx.f32":   float1(math.Log2),
	"sqrt.rn.f32":      float1(math.Sqrt),
	"sqrt.approx.f32":  float1(math.Sqrt),
	"rsqrt.approx.f32": float1(func(x float64) float64 { return 1 / math.Sqrt(x) }),
	"rcp.rn.f32":       float1(func(x float64) float64 { return 1 / x }),
	"rcp.approx.f32":   float1(func(x float64) float64 { return 1 / x }),
	"clz.b32":          func(a uint32) uint32 { return uint32(bits.LeadingZeros32(a)) },
	"popc.b32":         func(a uint32) uint32 { return uint32(bits.OnesCount32(a)) },
	"brev.b32":         bits.Reverse32,
}

func float1(f func(x float64) float64) func(a uint32) uint32 {
	return func(a uint32) uint32 { return math.Float32bits(float32(f(float64(math.Float32frombits(a))))) }
}

func floats(f func(a, b float32) float32) func(a, b uint32) uint32 {
	return func(a, b uint32) uint32 {
		return math.Float32bits(f(math.Float32frombits(a), math.Float32frombits(b)))
	}
}

func doubles(f func(a, b float64) float64) func(a, b uint64) uint64 {
	return func(a, b uint64) uint64 {
		return math.Float64bits(f(math.Float64frombits(a), math.Float64frombits(b)))
	}
}

// smaller returns the smaller of a and b. If one is NaN, it returns the other. -0 is smaller than 0.
func smaller[F float32 | float64](a, b F) F {
	if a != a {
		return b
	}
	if b != b || a < b || a == b && math.Signbit(float64(a)) {
		return a
	}
	return b
}

// less16 returns a-b of float16, which float32 has exactly.
func less16(a, b uint32) uint32 {
	return uint32(half.FromFloat32(half.Float16(a).Float32() - half.Float16(b).Float32()))
}

// permuted returns the four bytes of a and b, whose bytes are numbers 0 to 3 and 4 to 7, that the lowest hexadecimal digits of
// choice name. A digit from 8 on fills its byte with the sign of byte digit-8.
func permuted(a, b, choice uint32) (x uint32) {
	all := uint64(b)<<32 | uint64(a)
	for i := range 4 {
		digit := choice >> (4 * i)
		part := uint32(all>>(digit&7*8)) & 0xff
		if digit&8 != 0 {
			part = part >> 7 * 0xff
		}
		x |= part << (8 * i)
	}
	return x
}

// fma32 returns x*y+z with one rounding. If the float64 sum lies halfway between two float32 numbers, the
// rounding error of the sum decides.
func fma32(x, y, z float32) float32 {
	p, c := float64(x)*float64(y), float64(z) // the product is exact
	s := p + c
	if b := math.Float64bits(s); (b&(1<<29-1) == 1<<28 || math.Abs(s) < 0x1p-126) && b&1 == 0 && s != 0 {
		t := s - p
		switch e := (p - (s - t)) + (c - t); {
		case e == 0:
		case e > 0 == (s > 0):
			s = math.Float64frombits(b + 1)
		default:
			s = math.Float64frombits(b - 1)
		}
	}
	return float32(s)
}

// fma16 returns x*y+z with one rounding: the product is exact in float64, and a sum that is not exact there is near no tie of float16.
func fma16(x, y, z half.Float16) half.Float16 {
	return half.FromFloat64(float64(x.Float32())*float64(y.Float32()) + float64(z.Float32()))
}

// flushed replaces a subnormal number by a zero of the same sign.
func flushed(a uint32) uint32 {
	if a&0x7f800000 == 0 {
		return a & (1 << 31)
	}
	return a
}

func divide[I int64 | uint64](a, b I) I {
	if b == 0 {
		panic(fault{"a division by 0"})
	}
	return a / b
}

func remainder[I int64 | uint64](a, b I) I {
	if b == 0 {
		panic(fault{"a division by 0"})
	}
	return a % b
}

// without returns the parts of a name except the given parts.
func without(op []string, parts ...string) string {
	var kept []string
next:
	for _, p := range op {
		for _, q := range parts {
			if p == q {
				continue next
			}
		}
		kept = append(kept, p)
	}
	return strings.Join(kept, ".")
}

// operands is the number of operands of each arithmetic instruction.
var operands = map[string]int{
	"abs": 2, "add": 3, "and": 3, "bfi": 5, "brev": 2, "clz": 2, "cvt": 2, "cvta": 2, "div": 3, "dp4a": 4, "ex2": 2, "fma": 4,
	"lg2": 2, "mad": 4, "mapa": 3, "max": 3, "min": 3, "mov": 2, "mul": 3, "neg": 2, "not": 2, "or": 3, "popc": 2, "prmt": 4,
	"rcp": 2, "rem": 3, "rsqrt": 2, "selp": 4, "setp": 3, "shf": 4, "shl": 3, "shr": 3, "sqrt": 2, "sub": 3, "xor": 3,
}

// word is the type of a register's bits.
type word interface{ uint32 | uint64 }

// of returns a register of all threads.
func of[T word](w *warp, r register) *[lanes]T {
	var x T
	if unsafe.Sizeof(x) == 4 {
		return (*[lanes]T)(unsafe.Pointer(w.d(r)))
	}
	return (*[lanes]T)(unsafe.Pointer(w.q(r)))
}

func map1[D, A word](d, a register, f func(a A) D) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		d, a := of[D](w, d), of[A](w, a)
		for rest := m; rest != 0; rest &= rest - 1 {
			l := bits.TrailingZeros32(rest) & (lanes - 1)
			d[l] = f(a[l])
		}
	}
}

func map2[D, A, B word](d, a, b register, f func(a A, b B) D) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		d, a, b := of[D](w, d), of[A](w, a), of[B](w, b)
		for rest := m; rest != 0; rest &= rest - 1 {
			l := bits.TrailingZeros32(rest) & (lanes - 1)
			d[l] = f(a[l], b[l])
		}
	}
}

func map3[D, A, B, E word](d, a, b, e register, f func(a A, b B, e E) D) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		d, a, b, e := of[D](w, d), of[A](w, a), of[B](w, b), of[E](w, e)
		for rest := m; rest != 0; rest &= rest - 1 {
			l := bits.TrailingZeros32(rest) & (lanes - 1)
			d[l] = f(a[l], b[l], e[l])
		}
	}
}

// warps32 holds the most common operations, on all threads of a warp at once.
var warps32 = map[string]func(d, a, b *[lanes]uint32){
	"add.s32":    add32,
	"add.u32":    add32,
	"sub.s32":    sub32,
	"sub.u32":    sub32,
	"mul.lo.s32": mul32,
	"mul.lo.u32": mul32,
	"and.b32": func(d, a, b *[lanes]uint32) {
		for l := range d {
			d[l] = a[l] & b[l]
		}
	},
	"or.b32": func(d, a, b *[lanes]uint32) {
		for l := range d {
			d[l] = a[l] | b[l]
		}
	},
	"xor.b32": func(d, a, b *[lanes]uint32) {
		for l := range d {
			d[l] = a[l] ^ b[l]
		}
	},
	"shl.b32": func(d, a, b *[lanes]uint32) {
		for l := range d {
			d[l] = a[l] << b[l]
		}
	},
	"shr.u32": shr32,
	"shr.b32": shr32,
	"add.f32": func(d, a, b *[lanes]uint32) {
		for l := range d {
			d[l] = math.Float32bits(math.Float32frombits(a[l]) + math.Float32frombits(b[l]))
		}
	},
	"sub.f32": func(d, a, b *[lanes]uint32) {
		for l := range d {
			d[l] = math.Float32bits(math.Float32frombits(a[l]) - math.Float32frombits(b[l]))
		}
	},
	"mul.f32": func(d, a, b *[lanes]uint32) {
		for l := range d {
			d[l] = math.Float32bits(math.Float32frombits(a[l]) * math.Float32frombits(b[l]))
		}
	},
}

func add32(d, a, b *[lanes]uint32) {
	for l := range d {
		d[l] = a[l] + b[l]
	}
}

func sub32(d, a, b *[lanes]uint32) {
	for l := range d {
		d[l] = a[l] - b[l]
	}
}

func mul32(d, a, b *[lanes]uint32) {
	for l := range d {
		d[l] = a[l] * b[l]
	}
}

func shr32(d, a, b *[lanes]uint32) {
	for l := range d {
		d[l] = a[l] >> b[l]
	}
}

// whole32 returns an operation that computes for the whole warp and keeps the results of the active threads.
func whole32(d, a, b register, f func(d, a, b *[lanes]uint32)) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		if m == all {
			f(w.d(d), w.d(a), w.d(b))
			return
		}
		f(&w.some32, w.d(a), w.d(b))
		keep(w.d(d), &w.some32, m)
	}
}

// whole64 is whole32 for 64 bits.
func whole64(d, a, b register, f func(d, a, b *[lanes]uint64)) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		if m == all {
			f(w.q(d), w.q(a), w.q(b))
			return
		}
		f(&w.some64, w.q(a), w.q(b))
		keep(w.q(d), &w.some64, m)
	}
}

// keep copies the elements of the active threads.
func keep[T word](d, a *[lanes]T, m uint32) {
	for ; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & (lanes - 1)
		d[l] = a[l]
	}
}

// moved returns an operation that copies a to d.
func moved[T word](d, a register) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		d, a := of[T](w, d), of[T](w, a)
		if m == all {
			*d = *a
			return
		}
		keep(d, a, m)
	}
}

// selected returns an operation that selects a where the predicate holds, and otherwise b.
func selected[T word](d, a, b, p register) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		p := w.p[p]
		keep(of[T](w, d), of[T](w, a), m&p)
		keep(of[T](w, d), of[T](w, b), m&^p)
	}
}

// insertField returns an operation that inserts the low n bits of a into b at a bit position.
func insertField[T word](d, a, b, position, n register) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		d, a, b, position, n := of[T](w, d), of[T](w, a), of[T](w, b), w.d(position), w.d(n)
		for l := range lanes {
			if m>>l&1 != 0 {
				field := (T(1)<<(n[l]&255) - 1) << (position[l] & 255)
				d[l] = b[l]&^field | a[l]<<(position[l]&255)&field
			}
		}
	}
}

// arithmetic compiles an instruction that computes registers from registers. It returns nil for other
// instructions.
func (c *compiler) arithmetic(s *statement) func(w *warp, m uint32) {
	n := operands[s.op[0]]
	if s.op[0] == "cvt" && ((s.has("f16x2") || s.has("bf16x2")) && !s.has("e4m3x2") || s.kind() == "f32" && s.has("e4m3x2")) {
		n++
	}
	if n == 0 || len(s.op) < 2 {
		return nil
	}
	c.need(n)
	width := widths[s.kind()]
	args := s.args
	name := without(s.op, "rn", "approx", "full")
	if f := warps32[name]; f != nil {
		return whole32(c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), f)
	}
	switch name {
	case "add.s16", "add.u16":
		return map2(c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), func(a, b uint32) uint32 { return uint32(uint16(a + b)) })
	case "add.s64", "add.u64", "sub.s64", "sub.u64":
		d, a, b := c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2])
		if s.op[0] == "sub" {
			return whole64(d, a, b, func(d, a, b *[lanes]uint64) {
				for l := range d {
					d[l] = a[l] - b[l]
				}
			})
		}
		return whole64(d, a, b, func(d, a, b *[lanes]uint64) {
			for l := range d {
				d[l] = a[l] + b[l]
			}
		})
	case "mad.lo.s32", "mad.lo.u32":
		return map3(c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3]), func(a, b, e uint32) uint32 { return a*b + e })
	case "mad.lo.s64", "mad.lo.u64":
		return map3(c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2]), c.src64(&args[3]), func(a, b, e uint64) uint64 { return a*b + e })
	case "mul.wide.s32", "mul.wide.u32", "mad.wide.s32", "mad.wide.u32":
		d, a, b, e := c.dst(&args[0], 64), c.src32(&args[1]), c.src32(&args[2]), c.constant64(0)
		if s.op[0] == "mad" {
			e = c.src64(&args[3])
		}
		if s.kind() == "s32" {
			return map3(d, a, b, e, func(a, b uint32, e uint64) uint64 { return uint64(int64(int32(a))*int64(int32(b))) + e })
		}
		return map3(d, a, b, e, func(a, b uint32, e uint64) uint64 { return uint64(a)*uint64(b) + e })
	case "fma.f32":
		d, a, b, e := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3])
		return func(w *warp, m uint32) {
			d, a, b, e := w.d(d), w.d(a), w.d(b), w.d(e)
			for rest := m; rest != 0; rest &= rest - 1 {
				l := bits.TrailingZeros32(rest) & (lanes - 1)
				d[l] = math.Float32bits(fma32(math.Float32frombits(a[l]), math.Float32frombits(b[l]), math.Float32frombits(e[l])))
			}
		}
	case "fma.f16x2":
		return map3(c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3]), func(a, b, e uint32) uint32 {
			return uint32(fma16(half.Float16(a>>16), half.Float16(b>>16), half.Float16(e>>16)))<<16 | uint32(fma16(half.Float16(a), half.Float16(b), half.Float16(e)))
		})
	case "fma.f64":
		return map3(c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2]), c.src64(&args[3]), func(a, b, e uint64) uint64 {
			return math.Float64bits(math.FMA(math.Float64frombits(a), math.Float64frombits(b), math.Float64frombits(e)))
		})
	case "dp4a.s32.s32":
		return map3(c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3]), func(a, b, e uint32) uint32 {
			for i := range 4 {
				e += uint32(int32(int8(a>>(8*i))) * int32(int8(b>>(8*i))))
			}
			return e
		})
	case "prmt.b32":
		return map3(c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3]), permuted)
	case "shf.l.wrap.b32": // the upper half of b:a, moved to the left
		return map3(c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3]), func(a, b, n uint32) uint32 {
			return uint32((uint64(b)<<32 | uint64(a)) << (n & 31) >> 32)
		})
	case "bfi.b32":
		return insertField[uint32](c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3]), c.src32(&args[4]))
	case "bfi.b64":
		return insertField[uint64](c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2]), c.src32(&args[3]), c.src32(&args[4]))
	case "neg.s64":
		return map1(c.dst(&args[0], 64), c.src64(&args[1]), func(a uint64) uint64 { return -a })
	case "not.b64":
		return map1(c.dst(&args[0], 64), c.src64(&args[1]), func(a uint64) uint64 { return ^a })
	case "and.pred", "or.pred", "xor.pred":
		d, a, b := c.predicate(&args[0]), c.predicate(&args[1]), c.predicate(&args[2])
		op := s.op[0]
		return func(w *warp, m uint32) {
			x := w.p[a]
			switch op {
			case "and":
				x &= w.p[b]
			case "or":
				x |= w.p[b]
			default:
				x ^= w.p[b]
			}
			w.p[d] = w.p[d]&^m | x&m
		}
	case "not.pred", "mov.pred":
		d, flip := c.predicate(&args[0]), uint32(0)
		if s.op[0] == "not" {
			flip = all
		}
		if n, ok := c.number(args[1].word, 64); ok {
			x := flip
			if n != 0 {
				x = ^flip
			}
			return func(w *warp, m uint32) { w.p[d] = w.p[d]&^m | x&m }
		}
		a := c.predicate(&args[1])
		return func(w *warp, m uint32) { w.p[d] = w.p[d]&^m | (w.p[a]^flip)&m }
	}
	switch s.op[0] {
	case "cvta": // global addresses do not change
		d, a := c.dst(&args[0], 64), c.src64(&args[1])
		window := map[string]uint64{"shared": sharedIn, "param": paramsIn, "global": 0}
		of := s.part(1)
		if of == "to" {
			of = s.part(2)
		}
		add, ok := window[of]
		if !ok {
			c.fail("addresses of this space")
		}
		if s.op[1] == "to" {
			return map1(d, a, func(a uint64) uint64 { return a &^ add })
		}
		return map1(d, a, func(a uint64) uint64 { return a | add })
	case "mapa": // address of the same offset in another block's shared memory
		if name != "mapa.shared::cluster.u32" {
			return nil
		}
		d, a, b := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2])
		return func(w *warp, m uint32) {
			d, a, b := w.d(d), w.d(a), w.d(b)
			for l := range lanes {
				if m>>l&1 != 0 {
					if b[l] >= uint32(w.m.Cluster) {
						w.fail("block %d of a cluster of %d", b[l], w.m.Cluster)
					}
					if a[l]>>rankShift != 0 {
						w.fail("%#x is no address in this block", a[l])
					}
					d[l] = (b[l]+1)<<rankShift | a[l]
				}
			}
		}
	case "setp":
		return c.compare(s)
	case "selp":
		p := c.predicate(&args[3])
		if width == 64 {
			return selected[uint64](c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2]), p)
		}
		return selected[uint32](c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), p)
	case "cvt":
		return c.convert(s)
	case "mov":
		return c.move(s)
	}
	ftz := s.has("ftz") // of floats
	if ftz && s.kind() != "f32" {
		return nil
	}
	if name := without(s.op, "b16", "b32", "b64"); width != 64 && len(args) == 3 {
		f := binary32[without(s.op, "ftz", "rn", "approx", "full")]
		if f == nil {
			f = binary32[name]
		}
		if f == nil {
			return nil
		}
		if g := f; ftz {
			f = func(a, b uint32) uint32 { return flushed(g(flushed(a), flushed(b))) }
		}
		return map2(c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), f)
	} else if len(args) == 3 {
		f := binary64[without(s.op, "rn")]
		if f == nil {
			f = binary64[name]
		}
		if f == nil {
			return nil
		}
		d, a := c.dst(&args[0], 64), c.src64(&args[1])
		if s.op[0] == "shl" || s.op[0] == "shr" {
			return map2(d, a, c.src32(&args[2]), func(a uint64, b uint32) uint64 { return f(a, uint64(b)) })
		}
		return map2(d, a, c.src64(&args[2]), f)
	}
	if f := unary32[without(s.op, "ftz")]; f != nil && len(args) == 2 {
		if g := f; ftz {
			f = func(a uint32) uint32 { return flushed(g(flushed(a))) }
		}
		return map1(c.dst(&args[0], 32), c.src32(&args[1]), f)
	}
	return nil
}

func (c *compiler) move(s *statement) func(w *warp, m uint32) {
	if len(s.op) != 2 || sizes[s.kind()] == 0 {
		return nil
	}
	to, from := &s.args[0], &s.args[1]
	if from.word == "%globaltimer" {
		d := c.dst(to, 64)
		return func(w *warp, m uint32) {
			d, now := w.q(d), uint64(*w.m.Clock)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = now
				}
			}
		}
	}
	if of := special[from.word]; of != nil {
		d := c.dst(to, 32)
		return func(w *warp, m uint32) {
			d := w.d(d)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = of(w, l)
				}
			}
		}
	}
	if strings.HasPrefix(from.word, "%") && c.find(from.word) == nil {
		c.fail("there is no %s here", from.word)
	}
	n := len(to.list) + len(from.list)
	if n != 0 && n != 2 && n != 4 || len(to.list) > 0 && len(from.list) > 0 {
		c.fail("%d parts", n)
	}
	switch part := 8 * sizes[s.kind()] / max(n, 1); {
	case len(to.list) > 0: // the parts of a register, the lowest part first
		var d []register
		for i := range to.list {
			d = append(d, c.dst(&to.list[i], 32))
		}
		wide := widths[s.kind()] == 64
		var a register
		if wide {
			a = c.src64(from)
		} else {
			a = c.src32(from)
		}
		return func(w *warp, m uint32) {
			for l := range lanes {
				if m>>l&1 == 0 {
					continue
				}
				var x uint64
				if wide {
					x = w.q(a)[l]
				} else {
					x = uint64(w.d(a)[l])
				}
				for i, r := range d {
					w.d(r)[l] = uint32(x >> (i * part) & (1<<part - 1))
				}
			}
		}
	case len(from.list) > 0:
		var a []register
		for i := range from.list {
			a = append(a, c.src32(&from.list[i]))
		}
		wide := widths[s.kind()] == 64
		var d register
		if wide {
			d = c.dst(to, 64)
		} else {
			d = c.dst(to, 32)
		}
		return func(w *warp, m uint32) {
			for l := range lanes {
				if m>>l&1 == 0 {
					continue
				}
				var x uint64
				for i, r := range a {
					x |= uint64(w.d(r)[l]) & (1<<part - 1) << (i * part)
				}
				if wide {
					w.q(d)[l] = x
				} else {
					w.d(d)[l] = uint32(x)
				}
			}
		}
	}
	if widths[s.kind()] == 64 {
		return moved[uint64](c.dst(to, 64), c.src64(from))
	}
	return moved[uint32](c.dst(to, 32), c.src32(from))
}

// special holds the special registers.
var special = map[string]func(w *warp, l int) uint32{
	"%tid.x":             func(w *warp, l int) uint32 { return uint32(w.id*lanes + l) },
	"%ntid.x":            func(w *warp, l int) uint32 { return uint32(w.threads) },
	"%ctaid.x":           func(w *warp, l int) uint32 { return uint32(w.index) },
	"%nctaid.x":          func(w *warp, l int) uint32 { return uint32(w.m.Grid) },
	"%laneid":            func(w *warp, l int) uint32 { return uint32(l) },
	"%warpid":            func(w *warp, l int) uint32 { return uint32(w.id) },
	"%cluster_ctarank":   func(w *warp, l int) uint32 { return uint32(w.rank) },
	"%cluster_nctarank":  func(w *warp, l int) uint32 { return uint32(w.m.Cluster) },
	"%cluster_ctaid.x":   func(w *warp, l int) uint32 { return uint32(w.rank) },
	"%cluster_nctaid.x":  func(w *warp, l int) uint32 { return uint32(w.m.Cluster) },
	"%clusterid.x":       func(w *warp, l int) uint32 { return uint32(w.index / w.m.Cluster) },
	"%nclusterid.x":      func(w *warp, l int) uint32 { return uint32(w.m.Grid / w.m.Cluster) },
	"%dynamic_smem_size": func(w *warp, l int) uint32 { return uint32(w.m.Shared) },
}
