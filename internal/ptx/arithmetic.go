package ptx

import (
	"math"
	"math/bits"
	"slices"
	"strings"

	"gorgonia.org/leanattention/internal/half"
)

// integers and floats of two and three operands, 32 bits each.
var binary32 = map[string]func(a, b uint32) uint32{
	"and":        func(a, b uint32) uint32 { return a & b },
	"or":         func(a, b uint32) uint32 { return a | b },
	"xor":        func(a, b uint32) uint32 { return a ^ b },
	"mul.hi.s32": func(a, b uint32) uint32 { return uint32(uint64(int64(int32(a))*int64(int32(b))) >> 32) },
	"mul.hi.u32": func(a, b uint32) uint32 { return uint32(uint64(a) * uint64(b) >> 32) },
	"div.s32":    func(a, b uint32) uint32 { return uint32(divide(int64(int32(a)), int64(int32(b)))) },
	"div.u32":    func(a, b uint32) uint32 { return uint32(divide(int64(a), int64(b))) },
	"rem.s32":    func(a, b uint32) uint32 { return uint32(remainder(int64(int32(a)), int64(int32(b)))) },
	"rem.u32":    func(a, b uint32) uint32 { return uint32(remainder(int64(a), int64(b))) },
	"min.s32":    func(a, b uint32) uint32 { return uint32(min(int32(a), int32(b))) },
	"max.s32":    func(a, b uint32) uint32 { return uint32(max(int32(a), int32(b))) },
	"min.u32":    func(a, b uint32) uint32 { return min(a, b) },
	"max.u32":    func(a, b uint32) uint32 { return max(a, b) },
	"shl.b32":    func(a, b uint32) uint32 { return a << min(b, 32) },
	"shr.u32":    func(a, b uint32) uint32 { return a >> min(b, 32) },
	"shr.b32":    func(a, b uint32) uint32 { return a >> min(b, 32) },
	"shr.s32":    func(a, b uint32) uint32 { return uint32(int32(a) >> min(b, 31)) },
	"shl.b16":    func(a, b uint32) uint32 { return uint32(uint16(a) << min(b, 16)) },
	"shr.u16":    func(a, b uint32) uint32 { return uint32(uint16(a) >> min(b, 16)) },
	"min.f32":    floats(func(a, b float32) float32 { return smaller(a, b) }),
	"max.f32":    floats(func(a, b float32) float32 { return -smaller(-a, -b) }),
	"div.f32":    floats(func(a, b float32) float32 { return a / b }),
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

// smaller is the other one where one is no number; -0 is smaller than 0.
func smaller[F float32 | float64](a, b F) F {
	if a != a {
		return b
	}
	if b != b || a < b || a == b && math.Signbit(float64(a)) {
		return a
	}
	return b
}

// fma32 rounds once: where the sum of 53 bits lies between two of 24, what it has
// been rounded by decides.
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

// flushed is 0, of the same sign, instead of a number that is too small for its exponent.
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

// without leaves parts of a name out.
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

// operands is how many there are of an instruction that computes.
var operands = map[string]int{
	"abs": 2, "add": 3, "and": 3, "bfi": 5, "brev": 2, "clz": 2, "cvt": 2, "cvta": 2, "div": 3, "ex2": 2, "fma": 4,
	"lg2": 2, "mad": 4, "mapa": 3, "max": 3, "min": 3, "mov": 2, "mul": 3, "neg": 2, "not": 2, "or": 3, "popc": 2,
	"rcp": 2, "rem": 3, "rsqrt": 2, "selp": 4, "setp": 3, "shl": 3, "shr": 3, "sqrt": 2, "sub": 3, "xor": 3,
}

// arithmetic is what computes registers of registers; nil if it is something else.
func (c *compiler) arithmetic(s *statement) func(w *warp, m uint32) {
	n := operands[s.op[0]]
	if s.op[0] == "cvt" && (s.has("f16x2") || s.has("bf16x2")) {
		n++
	}
	if n == 0 || len(s.op) < 2 {
		return nil
	}
	c.need(n)
	width := widths[s.kind()]
	args := s.args
	name := without(s.op, "rn", "approx", "full")
	switch name {
	case "add.s32", "add.u32", "add.s16", "add.u16":
		d, a, b := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2])
		short := width == 32 && strings.HasSuffix(name, "16")
		return func(w *warp, m uint32) {
			d, a, b := w.d(d), w.d(a), w.d(b)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = a[l] + b[l]
					if short {
						d[l] = uint32(uint16(d[l]))
					}
				}
			}
		}
	case "sub.s32", "sub.u32":
		d, a, b := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2])
		return func(w *warp, m uint32) {
			d, a, b := w.d(d), w.d(a), w.d(b)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = a[l] - b[l]
				}
			}
		}
	case "add.s64", "add.u64", "sub.s64", "sub.u64":
		d, a, b := c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2])
		minus := s.op[0] == "sub"
		return func(w *warp, m uint32) {
			d, a, b := w.q(d), w.q(a), w.q(b)
			for l := range lanes {
				if m>>l&1 != 0 {
					if minus {
						d[l] = a[l] - b[l]
					} else {
						d[l] = a[l] + b[l]
					}
				}
			}
		}
	case "mul.lo.s32", "mul.lo.u32":
		d, a, b := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2])
		return func(w *warp, m uint32) {
			d, a, b := w.d(d), w.d(a), w.d(b)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = a[l] * b[l]
				}
			}
		}
	case "mad.lo.s32", "mad.lo.u32":
		d, a, b, e := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3])
		return func(w *warp, m uint32) {
			d, a, b, e := w.d(d), w.d(a), w.d(b), w.d(e)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = a[l]*b[l] + e[l]
				}
			}
		}
	case "mul.wide.s32", "mul.wide.u32", "mad.wide.s32", "mad.wide.u32":
		d, a, b, e := c.dst(&args[0], 64), c.src32(&args[1]), c.src32(&args[2]), c.constant64(0)
		if s.op[0] == "mad" {
			e = c.src64(&args[3])
		}
		signed := s.kind() == "s32"
		return func(w *warp, m uint32) {
			d, a, b, e := w.q(d), w.d(a), w.d(b), w.q(e)
			for l := range lanes {
				if m>>l&1 == 0 {
					continue
				}
				if signed {
					d[l] = uint64(int64(int32(a[l]))*int64(int32(b[l]))) + e[l]
				} else {
					d[l] = uint64(a[l])*uint64(b[l]) + e[l]
				}
			}
		}
	case "mad.lo.s64", "mad.lo.u64":
		d, a, b, e := c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2]), c.src64(&args[3])
		return func(w *warp, m uint32) {
			d, a, b, e := w.q(d), w.q(a), w.q(b), w.q(e)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = a[l]*b[l] + e[l]
				}
			}
		}
	case "add.f32", "sub.f32", "mul.f32":
		d, a, b := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2])
		op := s.op[0]
		return func(w *warp, m uint32) {
			d, a, b := w.d(d), w.d(a), w.d(b)
			for l := range lanes {
				if m>>l&1 == 0 {
					continue
				}
				x, y := math.Float32frombits(a[l]), math.Float32frombits(b[l])
				switch op {
				case "add":
					x += y
				case "sub":
					x -= y
				default:
					x *= y
				}
				d[l] = math.Float32bits(x)
			}
		}
	case "fma.f32":
		d, a, b, e := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3])
		return func(w *warp, m uint32) {
			d, a, b, e := w.d(d), w.d(a), w.d(b), w.d(e)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = math.Float32bits(fma32(math.Float32frombits(a[l]), math.Float32frombits(b[l]), math.Float32frombits(e[l])))
				}
			}
		}
	case "fma.f64":
		d, a, b, e := c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2]), c.src64(&args[3])
		return func(w *warp, m uint32) {
			d, a, b, e := w.q(d), w.q(a), w.q(b), w.q(e)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = math.Float64bits(math.FMA(math.Float64frombits(a[l]), math.Float64frombits(b[l]), math.Float64frombits(e[l])))
				}
			}
		}
	case "bfi.b32":
		d, a, b, pos, n := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3]), c.src32(&args[4])
		return func(w *warp, m uint32) {
			d, a, b, pos, n := w.d(d), w.d(a), w.d(b), w.d(pos), w.d(n)
			for l := range lanes {
				if m>>l&1 != 0 {
					field := (uint32(1)<<min(n[l]&255, 32) - 1) << min(pos[l]&255, 32)
					d[l] = b[l]&^field | a[l]<<min(pos[l]&255, 32)&field
				}
			}
		}
	case "bfi.b64":
		d, a, b, pos, n := c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2]), c.src32(&args[3]), c.src32(&args[4])
		return func(w *warp, m uint32) {
			d, a, b, pos, n := w.q(d), w.q(a), w.q(b), w.d(pos), w.d(n)
			for l := range lanes {
				if m>>l&1 != 0 {
					field := (uint64(1)<<min(n[l]&255, 64) - 1) << min(pos[l]&255, 64)
					d[l] = b[l]&^field | a[l]<<min(pos[l]&255, 64)&field
				}
			}
		}
	case "neg.s64", "not.b64":
		d, a := c.dst(&args[0], 64), c.src64(&args[1])
		negate := s.op[0] == "neg"
		return func(w *warp, m uint32) {
			d, a := w.q(d), w.q(a)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = ^a[l]
					if negate {
						d[l]++
					}
				}
			}
		}
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
	case "cvta": // global addresses are what they are
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
		to := s.op[1] == "to"
		return func(w *warp, m uint32) {
			d, a := w.q(d), w.q(a)
			for l := range lanes {
				if m>>l&1 != 0 {
					if to {
						d[l] = a[l] &^ add
					} else {
						d[l] = a[l] | add
					}
				}
			}
		}
	case "mapa": // the address of this place in another block
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
			d, a, b := c.dst(&args[0], 64), c.src64(&args[1]), c.src64(&args[2])
			return func(w *warp, m uint32) {
				d, a, b, p := w.q(d), w.q(a), w.q(b), w.p[p]
				for l := range lanes {
					if m>>l&1 == 0 {
						continue
					}
					if p>>l&1 != 0 {
						d[l] = a[l]
					} else {
						d[l] = b[l]
					}
				}
			}
		}
		d, a, b := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2])
		return func(w *warp, m uint32) {
			d, a, b, p := w.d(d), w.d(a), w.d(b), w.p[p]
			for l := range lanes {
				if m>>l&1 == 0 {
					continue
				}
				if p>>l&1 != 0 {
					d[l] = a[l]
				} else {
					d[l] = b[l]
				}
			}
		}
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
		d, a, b := c.dst(&args[0], 32), c.src32(&args[1]), c.src32(&args[2])
		return func(w *warp, m uint32) {
			d, a, b := w.d(d), w.d(a), w.d(b)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = f(a[l], b[l])
				}
			}
		}
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
			b := c.src32(&args[2])
			return func(w *warp, m uint32) {
				d, a, b := w.q(d), w.q(a), w.d(b)
				for l := range lanes {
					if m>>l&1 != 0 {
						d[l] = f(a[l], uint64(b[l]))
					}
				}
			}
		}
		b := c.src64(&args[2])
		return func(w *warp, m uint32) {
			d, a, b := w.q(d), w.q(a), w.q(b)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = f(a[l], b[l])
				}
			}
		}
	}
	if f := unary32[without(s.op, "ftz")]; f != nil && len(args) == 2 {
		if g := f; ftz {
			f = func(a uint32) uint32 { return flushed(g(flushed(a))) }
		}
		d, a := c.dst(&args[0], 32), c.src32(&args[1])
		return func(w *warp, m uint32) {
			d, a := w.d(d), w.d(a)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = f(a[l])
				}
			}
		}
	}
	return nil
}

// value is a register's bits as a type has them: for a comparison or conversion.
type value struct {
	f float64
	i int64
	u uint64
}

func (c *compiler) reader(o *operand, kind string) func(w *warp, l int) value {
	if widths[kind] == 64 {
		r := c.src64(o)
		if kind == "f64" {
			return func(w *warp, l int) value { return value{f: math.Float64frombits(w.q(r)[l])} }
		}
		return func(w *warp, l int) value { x := w.q(r)[l]; return value{i: int64(x), u: x} }
	}
	if v := c.find(o.word); v != nil && v.width == 64 && kind[0] != 'f' && sizes[kind] > 0 { // more bits than the type
		r := c.src64(o)
		size := 8 * sizes[kind]
		if kind[0] == 's' {
			return func(w *warp, l int) value {
				x := int64(w.q(r)[l]) << (64 - size) >> (64 - size)
				return value{i: x, u: uint64(x)}
			}
		}
		return func(w *warp, l int) value {
			x := w.q(r)[l] << (64 - size) >> (64 - size)
			return value{i: int64(x), u: x}
		}
	}
	r := c.src32(o)
	switch kind {
	case "f32":
		return func(w *warp, l int) value { return value{f: float64(math.Float32frombits(w.d(r)[l]))} }
	case "f16":
		return func(w *warp, l int) value { return value{f: float64(half.Float16(w.d(r)[l]).Float32())} }
	case "u8":
		return func(w *warp, l int) value { x := uint8(w.d(r)[l]); return value{i: int64(x), u: uint64(x)} }
	case "s8":
		return func(w *warp, l int) value { x := int8(w.d(r)[l]); return value{i: int64(x), u: uint64(x)} }
	case "u16", "b16":
		return func(w *warp, l int) value { x := uint16(w.d(r)[l]); return value{i: int64(x), u: uint64(x)} }
	case "s16":
		return func(w *warp, l int) value { x := int16(w.d(r)[l]); return value{i: int64(x), u: uint64(x)} }
	case "u32", "b32":
		return func(w *warp, l int) value { x := w.d(r)[l]; return value{i: int64(x), u: uint64(x)} }
	case "s32":
		return func(w *warp, l int) value { x := int32(w.d(r)[l]); return value{i: int64(x), u: uint64(x)} }
	}
	c.fail("values of type %s", kind)
	return nil
}

func (c *compiler) compare(s *statement) func(w *warp, m uint32) {
	if len(s.op) != 3 {
		c.fail("a comparison with more")
	}
	d, op, kind := c.predicate(&s.args[0]), s.op[1], s.kind()
	if s.args[0].pipe != "" {
		c.fail("two predicates")
	}
	float, signed := kind[0] == 'f', kind[0] == 's'
	if !comparable(op, kind) {
		c.fail("a comparison %s of %s", op, kind)
	}
	if kind == "s32" || kind == "u32" || kind == "b32" { // most are
		a, b := c.src32(&s.args[1]), c.src32(&s.args[2])
		return func(w *warp, m uint32) {
			a, b, p := w.d(a), w.d(b), uint32(0)
			for l := range lanes {
				order := 0
				switch {
				case a[l] == b[l]:
				case signed && int32(a[l]) < int32(b[l]) || !signed && a[l] < b[l]:
					order = -1
				default:
					order = 1
				}
				if holds(op, order) {
					p |= 1 << l
				}
			}
			w.p[d] = w.p[d]&^m | p&m
		}
	}
	a, b := c.reader(&s.args[1], kind), c.reader(&s.args[2], kind)
	return func(w *warp, m uint32) {
		p := uint32(0)
		for l := range lanes {
			x, y := a(w, l), b(w, l)
			order, none := 0, false
			switch {
			case float && (x.f != x.f || y.f != y.f):
				none = true
			case float && x.f < y.f, signed && x.i < y.i, !float && !signed && x.u < y.u:
				order = -1
			case x != y && !(float && x.f == y.f):
				order = 1
			}
			var is bool
			switch {
			case op == "nan":
				is = none
			case op == "num":
				is = !none
			case float && len(op) == 3: // ltu: true where there is no order, too
				is = none || holds(op[:2], order)
			default:
				is = !none && holds(op, order)
			}
			if is {
				p |= 1 << l
			}
		}
		w.p[d] = w.p[d]&^m | p&m
	}
}

// comparable says whether a type has a comparison.
func comparable(op, kind string) bool {
	switch {
	case op == "eq" || op == "ne":
		return true
	case op == "lt" || op == "le" || op == "gt" || op == "ge":
		return kind[0] != 'b'
	case op == "lo" || op == "ls" || op == "hi" || op == "hs":
		return kind[0] == 'u'
	case op == "equ" || op == "neu" || op == "ltu" || op == "leu" || op == "gtu" || op == "geu" || op == "num" || op == "nan":
		return kind[0] == 'f'
	}
	return false
}

func holds(op string, order int) bool {
	switch op {
	case "eq":
		return order == 0
	case "ne":
		return order != 0
	case "lt", "lo":
		return order < 0
	case "le", "ls":
		return order <= 0
	case "gt", "hi":
		return order > 0
	case "ge", "hs":
		return order >= 0
	}
	return false
}

// roundings are those that a conversion may name: "" is none.
func roundings(to, from string) (names []string, ok bool) {
	const types = " u8 u16 u32 u64 s8 s16 s32 s64 f16 f32 f64 "
	if !strings.Contains(types, " "+to+" ") || !strings.Contains(types, " "+from+" ") {
		return nil, false
	}
	switch {
	case to[0] != 'f' && from[0] != 'f':
		return []string{""}, true
	case to[0] != 'f': // of no fewer bits than an int
		return []string{"rni", "rzi", "rmi", "rpi"}, sizes[to] >= 4
	case from[0] != 'f' || sizes[from] > sizes[to]:
		return []string{"rn"}, true
	}
	return []string{""}, true
}

func (c *compiler) convert(s *statement) func(w *warp, m uint32) {
	if len(s.op) < 3 || len(s.op) > 4 {
		return nil
	}
	to, from, rounding := s.op[len(s.op)-2], s.kind(), ""
	if len(s.op) == 4 {
		rounding = s.op[1]
	}
	if to == "f16x2" || to == "bf16x2" {
		if rounding != "rn" || from != "f32" {
			return nil
		}
	} else if want, ok := roundings(to, from); !ok || !slices.Contains(want, rounding) {
		c.fail("no such conversion")
	}
	if to == "f16x2" || to == "bf16x2" {
		d, hi, lo := c.dst(&s.args[0], 32), c.src32(&s.args[1]), c.src32(&s.args[2])
		return func(w *warp, m uint32) {
			d, hi, lo := w.d(d), w.d(hi), w.d(lo)
			for l := range lanes {
				if m>>l&1 == 0 {
					continue
				}
				h, g := math.Float32frombits(hi[l]), math.Float32frombits(lo[l])
				if to == "f16x2" {
					d[l] = uint32(half.FromFloat32(h))<<16 | uint32(half.FromFloat32(g))
				} else {
					d[l] = uint32(half.BFromFloat32(h))<<16 | uint32(half.BFromFloat32(g))
				}
			}
		}
	}
	read := c.reader(&s.args[1], from)
	float := from[0] == 'f'
	integer := func(x value) uint64 { return uint64(x.i) } // a type that is no wider has the low bits
	if float && to[0] != 'f' {
		var round func(float64) float64
		switch rounding {
		case "rzi":
			round = math.Trunc
		case "rni":
			round = math.RoundToEven
		case "rmi":
			round = math.Floor
		case "rpi":
			round = math.Ceil
		}
		low, high := map[string]float64{"s32": math.MinInt32, "u32": 0, "s64": -0x1p63, "u64": 0}[to], map[string]float64{"s32": math.MaxInt32, "u32": math.MaxUint32, "s64": 0x1p63, "u64": 0x1p64}[to]
		none := uint64(0) // what becomes of NaN
		switch {
		case widths[to] == 64:
			none = 1 << 63
		case from == "f64":
			none = 1 << 31
		}
		integer = func(x value) uint64 {
			f := round(x.f)
			switch {
			case f != f:
				return none
			case f <= low:
				if to == "s64" {
					return 1 << 63
				}
				return uint64(int64(low))
			case f >= high:
				switch to {
				case "s64":
					return math.MaxInt64
				case "u64":
					return math.MaxUint64
				}
				return uint64(high)
			case to[0] == 'u':
				return uint64(f)
			}
			return uint64(int64(f))
		}
	}
	number := func(x value) float64 {
		switch {
		case float:
			return x.f
		case from[0] == 's':
			return float64(x.i)
		}
		return float64(x.u)
	}
	var bits func(x value) uint64
	switch to {
	case "f64":
		bits = func(x value) uint64 { return math.Float64bits(number(x)) }
	case "f32":
		bits = func(x value) uint64 {
			if !float && from[0] == 's' { // once rounded, not twice
				return uint64(math.Float32bits(float32(x.i)))
			} else if !float {
				return uint64(math.Float32bits(float32(x.u)))
			}
			return uint64(math.Float32bits(float32(x.f)))
		}
	case "f16":
		bits = func(x value) uint64 { return uint64(half.FromFloat64(number(x))) }
	case "u8":
		bits = func(x value) uint64 { return uint64(uint8(integer(x))) }
	case "u16":
		bits = func(x value) uint64 { return uint64(uint16(integer(x))) }
	case "s8":
		bits = func(x value) uint64 { return uint64(int64(int8(integer(x)))) }
	case "s16":
		bits = func(x value) uint64 { return uint64(int64(int16(integer(x)))) }
	default:
		bits = integer
	}
	if widths[to] == 64 {
		d := c.dst(&s.args[0], 64)
		return func(w *warp, m uint32) {
			d := w.q(d)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = bits(read(w, l))
				}
			}
		}
	}
	d := c.dst(&s.args[0], 32)
	return func(w *warp, m uint32) {
		d := w.d(d)
		for l := range lanes {
			if m>>l&1 != 0 {
				d[l] = uint32(bits(read(w, l)))
			}
		}
	}
}

func (c *compiler) move(s *statement) func(w *warp, m uint32) {
	if len(s.op) != 2 || sizes[s.kind()] == 0 {
		return nil
	}
	to, from := &s.args[0], &s.args[1]
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
	case len(to.list) > 0: // the parts of a register, the lowest first
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
		d, a := c.dst(to, 64), c.src64(from)
		return func(w *warp, m uint32) {
			d, a := w.q(d), w.q(a)
			for l := range lanes {
				if m>>l&1 != 0 {
					d[l] = a[l]
				}
			}
		}
	}
	d, a := c.dst(to, 32), c.src32(from)
	return func(w *warp, m uint32) {
		d, a := w.d(d), w.d(a)
		for l := range lanes {
			if m>>l&1 != 0 {
				d[l] = a[l]
			}
		}
	}
}

// special are the registers that the machine has.
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
