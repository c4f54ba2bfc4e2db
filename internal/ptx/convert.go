package ptx

import (
	"math"
	"math/bits"
	"slices"
	"strings"

	"gorgonia.org/leanattention/internal/half"
)

// value holds a register's bits in a type, for a comparison or a conversion.
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
	if v := c.find(o.word); v != nil && v.width == 64 && kind[0] != 'f' && sizes[kind] > 0 { // the register is wider than the type
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
	if kind == "s32" || kind == "u32" || kind == "b32" { // the most common types
		return compareWords(d, c.src32(&s.args[1]), c.src32(&s.args[2]), op, signed)
	}
	if kind == "f32" {
		return compareFloats(d, c.src32(&s.args[1]), c.src32(&s.args[2]), op)
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
			case float && len(op) == 3: // ltu, for example: also true for unordered operands
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

// compareWords compiles a comparison of 32-bit integers.
func compareWords(d, a, b register, op string, signed bool) func(w *warp, m uint32) {
	equal, flip, sign := op == "eq" || op == "ne", uint32(0), uint32(0)
	switch op {
	case "gt", "hi", "le", "ls":
		a, b = b, a
	}
	switch op {
	case "ne", "ge", "hs", "le", "ls":
		flip = all
	}
	if signed {
		sign = 1 << 31
	}
	return func(w *warp, m uint32) {
		a, b, p := w.d(a), w.d(b), uint32(0)
		if equal {
			for l := range lanes {
				_, is := bits.Sub32(a[l]^b[l], 1, 0)
				p = p>>1 | is<<31
			}
		} else {
			for l := range lanes {
				_, is := bits.Sub32(a[l]^sign, b[l]^sign, 0)
				p = p>>1 | is<<31
			}
		}
		w.p[d] = w.p[d]&^m | (p^flip)&m
	}
}

// compareFloats compiles a comparison of 32-bit floats, which may be unordered.
func compareFloats(d, a, b register, op string) func(w *warp, m uint32) {
	var less, same, more, none bool // the orders for which the comparison is true
	switch op {
	case "num":
		less, same, more = true, true, true
	case "nan":
		none = true
	default:
		none = len(op) == 3 // ltu, for example: also true for unordered operands
		less, same, more = holds(op[:2], -1), holds(op[:2], 0), holds(op[:2], 1)
	}
	pick := func(is bool, p uint32) uint32 {
		if is {
			return p
		}
		return 0
	}
	return func(w *warp, m uint32) {
		a, b := w.d(a), w.d(b)
		var lt, eq, gt uint32
		for l := range lanes {
			switch x, y := math.Float32frombits(a[l]), math.Float32frombits(b[l]); {
			case x < y:
				lt |= 1 << l
			case x > y:
				gt |= 1 << l
			case x == y:
				eq |= 1 << l
			}
		}
		p := pick(less, lt) | pick(same, eq) | pick(more, gt) | pick(none, ^(lt|eq|gt))
		w.p[d] = w.p[d]&^m | p&m
	}
}

// comparable reports whether a type has a comparison.
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

// roundings returns the rounding modes that a conversion may name. "" means no mode.
func roundings(to, from string) (names []string, ok bool) {
	const types = " u8 u16 u32 u64 s8 s16 s32 s64 f16 f32 f64 "
	if !strings.Contains(types, " "+to+" ") || !strings.Contains(types, " "+from+" ") {
		return nil, false
	}
	switch {
	case to[0] != 'f' && from[0] != 'f':
		return []string{""}, true
	case to[0] != 'f': // integer rounding exists for types of at least 32 bits
		return []string{"rni", "rzi", "rmi", "rpi"}, sizes[to] >= 4
	case from[0] != 'f' || sizes[from] > sizes[to]:
		return []string{"rn"}, true
	}
	return []string{""}, true
}

func (c *compiler) convert(s *statement) func(w *warp, m uint32) {
	if strings.Join(s.op, ".") == "cvt.rn.satfinite.e4m3x2.f32" {
		return map2(c.dst(&s.args[0], 32), c.src32(&s.args[1]), c.src32(&s.args[2]), func(high, low uint32) uint32 {
			e := func(x uint32) uint32 { return uint32(half.E4M3FromFloat32(math.Float32frombits(x))) }
			return e(high)<<8 | e(low)
		})
	}
	if len(s.op) < 3 || len(s.op) > 4 {
		return nil
	}
	to, from, rounding := s.op[len(s.op)-2], s.kind(), ""
	if len(s.op) == 4 {
		rounding = s.op[1]
	}
	if to == "f16x2" && from == "e4m3x2" && rounding == "rn" {
		return map1(c.dst(&s.args[0], 32), c.src32(&s.args[1]), func(a uint32) (x uint32) {
			for i := range 2 {
				h := uint32(0x7fff) // NaN
				if e := half.E4M3(a >> (8 * i)); !e.IsNaN() {
					h = uint32(half.FromFloat32(e.Float32()))
				}
				x |= h << (16 * i)
			}
			return x
		})
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
	integer := func(x value) uint64 { return uint64(x.i) } // a narrower type takes the low bits
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
		none := uint64(0) // result for NaN
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
			if !float && from[0] == 's' { // avoids double rounding
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
