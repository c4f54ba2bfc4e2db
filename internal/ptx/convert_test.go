package ptx

import (
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestComparisons(t *testing.T) {
	rng := reftest.Rand(t)
	order := func(kind string, a, b uint64) (order int, none bool) {
		n := 8 * sizes[kind]
		switch kind[0] {
		case 'f':
			x, y := f64Of(a), f64Of(b)
			switch n {
			case 32:
				x, y = float64(f32Of(a)), float64(f32Of(b))
			case 16:
				x, y = float64(half.Float16(a).Float32()), float64(half.Float16(b).Float32())
			}
			if math.IsNaN(x) || math.IsNaN(y) {
				return 0, true
			}
			return big.NewFloat(x).Cmp(big.NewFloat(y)), false
		case 's':
			return signed(a, n).Cmp(signed(b, n)), false
		}
		return unsigned(a, n).Cmp(unsigned(b, n)), false
	}
	is := map[string]func(o int) bool{
		"eq": func(o int) bool { return o == 0 }, "ne": func(o int) bool { return o != 0 }, "lt": func(o int) bool { return o < 0 },
		"le": func(o int) bool { return o <= 0 }, "gt": func(o int) bool { return o > 0 }, "ge": func(o int) bool { return o >= 0 },
	}
	same := map[string]string{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
	for _, kind := range []string{"s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64", "f16", "f32", "f64"} {
		var ops []string
		switch kind[0] {
		case 'b':
			ops = []string{"eq", "ne"}
		case 's':
			ops = []string{"eq", "ne", "lt", "le", "gt", "ge"}
		case 'u':
			ops = []string{"eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"}
		default:
			ops = []string{"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"}
		}
		for _, op := range ops {
			want := func(a, b, _, _ uint64) uint64 {
				o, none := order(kind, a, b)
				switch {
				case op == "nan":
					return truth(none)
				case op == "num":
					return truth(!none)
				case kind[0] == 'f' && len(op) == 3:
					return truth(none || is[op[:2]](o))
				case same[op] != "":
					return truth(is[same[op]](o))
				}
				return truth(!none && is[op](o))
			}
			w := kind[1:]
			pool := kind
			if kind[0] != 'f' {
				pool = "int"
			}
			try(t, rng, operation{fmt.Sprintf("setp.%s.%s %%d1, %%a%s, %%b%s", op, kind, w, w), want}, pool, nil)
		}
		for _, op := range []string{"lo", "ltu", "nan", "xx", "lt"} {
			if slices.Contains(ops, op) {
				continue
			}
			m, _ := Parse(program(0, fmt.Sprintf(".reg .b%s x;\nsetp.%s.%s %%p0, x, x;", kind[1:], op, kind)))
			_, err := m.Kernel("k")
			fails(t, op+"."+kind, err, "a comparison "+op)
		}
	}
}

// converted is a value in another type, by the book.
func converted(to, from, rounding string, x uint64) uint64 {
	n, m := 8*sizes[from], 8*sizes[to]
	var f *big.Float // nil: no number, or infinite
	var special float64
	switch {
	case from[0] == 's':
		f = new(big.Float).SetPrec(2000).SetInt(signed(x, n))
	case from[0] == 'u':
		f = new(big.Float).SetPrec(2000).SetInt(unsigned(x, n))
	default:
		special = f64Of(x)
		switch n {
		case 32:
			special = float64(f32Of(x))
		case 16:
			special = float64(half.Float16(x).Float32())
		}
		if finite(special) {
			f = new(big.Float).SetPrec(2000).SetFloat64(special)
		}
	}
	if to[0] == 'f' {
		switch {
		case f == nil && m == 64:
			return bits64(special)
		case f == nil && m == 32:
			return bits32(float32(special))
		case f == nil:
			return uint64(half.FromFloat64(special))
		case m == 64:
			y, _ := f.Float64()
			return bits64(y)
		case m == 32:
			y, _ := f.Float32()
			return bits32(y)
		}
		y, _ := f.Float64() // exact, or too much
		return uint64(half.FromFloat64(y))
	}
	if from[0] != 'f' { // the low bits, as the new type extends them
		i, _ := f.Int(nil)
		v := wide128(i, big.NewInt(1), 0) << (64 - m)
		if to[0] == 's' {
			return uint64(int64(v) >> (64 - m))
		}
		return v >> (64 - m)
	}
	low, high := new(big.Int), new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), uint(m)), big.NewInt(1))
	if to[0] == 's' {
		low, high = new(big.Int).Neg(new(big.Int).Lsh(big.NewInt(1), uint(m-1))), new(big.Int).Rsh(high, 1)
	}
	var i *big.Int
	switch {
	case math.IsNaN(special) && (m == 64 || n == 64):
		return 1 << (m - 1)
	case math.IsNaN(special):
		return 0
	case f == nil && special > 0:
		i = high
	case f == nil:
		i = low
	default:
		i, _ = f.Int(nil) // towards 0
		rest := new(big.Float).Sub(f, new(big.Float).SetPrec(2000).SetInt(i))
		half := new(big.Float).Abs(rest).Cmp(big.NewFloat(0.5))
		up := false // away from 0
		switch rounding {
		case "rni":
			up = half > 0 || half == 0 && i.Bit(0) == 1
		case "rmi":
			up = rest.Sign() < 0
		case "rpi":
			up = rest.Sign() > 0
		}
		if up {
			i.Add(i, big.NewInt(int64(rest.Sign())))
		}
	}
	if i.Cmp(low) < 0 {
		i = low
	}
	if i.Cmp(high) > 0 {
		i = high
	}
	return wide128(i, big.NewInt(1), 0)
}

func TestConversions(t *testing.T) {
	rng := reftest.Rand(t)
	types := []string{"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "f32", "f64"}
	register := func(letter, kind string) string { return fmt.Sprintf("%%%s%d", letter, max(8*sizes[kind], 16)) }
	tried := 0
	for _, to := range types {
		for _, from := range types {
			all, _ := roundings(to, from)
			for _, rounding := range []string{"", "rn", "rz", "rni", "rzi", "rmi", "rpi"} {
				dot := rounding
				if dot != "" {
					dot = "." + dot
				}
				kind, same := from, map[string]func(got, want uint64) bool{"f32": same32s, "f64": same64s, "f16": func(got, want uint64) bool {
					return half.Float16(got).IsNaN() && half.Float16(want).IsNaN()
				}}[to]
				if kind[0] != 'f' {
					kind = "int"
				}
				want := func(a, _, _, _ uint64) uint64 { return converted(to, from, rounding, a) }
				text := fmt.Sprintf("cvt%s.%s.%s %s, %s", dot, to, from, register("d", to), register("a", from))
				ok := slices.Contains(all, rounding) && !(to[0] != 'f' && from[0] == 'f' && sizes[to] < 4)
				if !ok {
					m, _ := Parse(program(0, ".reg .b64 %d64, %a64;\n.reg .b32 %d32, %a32;\n.reg .b16 %d16, %a16;\n"+text+";"))
					_, err := m.Kernel("k")
					fails(t, text, err, "no such conversion", "cvt")
					continue
				}
				tried++
				try(t, rng, operation{text, want}, kind, same)
				if from[0] != 'f' && sizes[from] < 8 { // a register with more bits
					try(t, rng, operation{strings.Replace(text, register("a", from), "%a64", 1), want}, kind, same)
				}
				if to[0] != 'f' && sizes[to] < 4 { // extended to all of the register's
					try(t, rng, operation{strings.Replace(text, register("d", to), "%d32", 1), want}, kind, same)
				}
			}
		}
	}
	if tried != 64+3*4*4+8*3+3+6 { // integers, to integers with each rounding, to floats, between floats
		t.Errorf("%d conversions", tried)
	}
	pack := func(narrow func(x float32) uint16) func(a, b, c, e uint64) uint64 {
		return func(a, b, _, _ uint64) uint64 { return uint64(narrow(f32Of(a)))<<16 | uint64(narrow(f32Of(b))) }
	}
	f16 := func(x float32) uint16 { return uint16(half.FromFloat32(x)) }
	bf16 := func(x float32) uint16 { return uint16(half.BFromFloat32(x)) }
	try(t, rng, operation{"cvt.rn.f16x2.f32 %d32, %a32, %b32", pack(f16)}, "f32", nil)
	try(t, rng, operation{"cvt.rn.bf16x2.f32 %d32, %a32, %b32", pack(bf16)}, "f32", nil)
	try(t, rng, operation{"cvt.rn.f16x2.e4m3x2 %d32, %a16", func(a, _, _, _ uint64) (x uint64) {
		for i := range 2 {
			b := a >> (8 * i) & 0xff
			var h uint64
			switch e, fraction := b>>3&15, b&7; {
			case b&0x7f == 0x7f:
				h = 0x7fff
			case e > 0: // the exponents' biases are 7 and 15
				h = b&0x80<<8 | (e+8)<<10 | fraction<<7
			default: // fraction * 2^-9
				h = b&0x80<<8 | uint64(half.FromFloat32(float32(fraction)/512))
			}
			x |= h << (16 * i)
		}
		return x
	}}, "int", nil)
	for _, text := range []string{"cvt.rz.f16x2.f32 %r0, %f0, %f1;", "cvt.rn.relu.f16x2.f32 %r0, %f0, %f1;", "cvt.rn.f16x2.f32 %r0, %f0;", "cvt.sat.f32.f32 %f0, %f1;", "cvt.rn.ftz.f32.f64 %f0, %rd0;", "cvt.f32 %f0, %f1;", "cvt %f0, %f1;",
		"cvt.rn.bf16.f32 %h0, %f0;", "cvt.f64.f32 %rd0, %rd1;"} {
		compileFails(t, text, "")
	}
}
