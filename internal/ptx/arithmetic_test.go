package ptx

import (
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// operation is an instruction, or some, of registers %a32, %b64 and so on, which have
// 16, 32 or 64 bits, or are a predicate with 1; the result is %d32, or a predicate.
// want computes it of operands that may have more bits than the registers.
type operation struct {
	text string
	want func(a, b, c, e uint64) uint64
}

var edges = map[string][]uint64{
	"int": {0, 1, 2, 3, 7, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 255, 256, 0x7fff, 0x8000, 0xffff, math.MaxInt32, 1 << 31, math.MaxUint32, math.MaxInt64, 1 << 63, math.MaxUint64,
		^uint64(1), ^uint64(6), 1 << 32},
	"f32": singles(0, math.Copysign(0, -1), 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3.49999, 0x1p31, -0x1p31, 0x1p32, 0x1p63, -0x1p63, 0x1p64, 2147483520, 0x1p-126, 0x1p-127, -0x1p-149, 0x1p-149,
		math.MaxFloat32, -math.MaxFloat32, 1e-30, 3e20, 65520, 65519, 0x1p-25, math.Inf(1), math.Inf(-1), math.NaN()),
	"f64": doublesOf(0, math.Copysign(0, -1), 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 0x1p31, 0x1p31-0.5, -0x1p31-0.5, 0x1p32, 0x1p32-0.75, 0x1p63, -0x1p63, 0x1p64, 0x1p-1074, 0x1p-1023,
		math.MaxFloat64, 0x1p128, 0x1.fffffefp127, 0x1.ffffffp127, 0x1p-149, 0x1.8p-150, 0x1p-150, 65519.999, 65520, 1+0x1p-11+0x1p-40, math.Inf(1), math.Inf(-1), math.NaN()),
	"f16": {0, 0x8000, 0x3c00, 0xbc00, 0x3800, 0x4100, 0x7bff, 1, 0x83ff, 0x7c00, 0xfc00, 0x7e00},
}

func singles(all ...float64) (x []uint64) {
	for _, f := range all {
		x = append(x, uint64(math.Float32bits(float32(f))))
	}
	return x
}

func doublesOf(all ...float64) (x []uint64) {
	for _, f := range all {
		x = append(x, math.Float64bits(f))
	}
	return x
}

func f32Of(x uint64) float32  { return math.Float32frombits(uint32(x)) }
func f64Of(x uint64) float64  { return math.Float64frombits(x) }
func bits32(x float32) uint64 { return uint64(math.Float32bits(x)) }
func bits64(x float64) uint64 { return math.Float64bits(x) }
func truth(is bool) uint64    { return map[bool]uint64{true: 1}[is] }
func draw(rng *rand.Rand, kind string) uint64 {
	pool := edges[kind]
	if rng.IntN(2) == 0 {
		return pool[rng.IntN(len(pool))]
	}
	switch kind {
	case "f32":
		return bits32(float32(rng.NormFloat64() * math.Exp2(float64(rng.IntN(120)-60))))
	case "f64":
		return bits64(rng.NormFloat64() * math.Exp2(float64(rng.IntN(200)-100)))
	}
	return rng.Uint64() >> rng.IntN(64)
}

var operandName = regexp.MustCompile(`%([abced])(1|16|32|64)\b`)

// sources names the kind of an operation's operands: that of its last type.
func sources(text string) string {
	op := strings.Split(strings.Fields(text)[0], ".")
	if k := op[len(op)-1]; edges[k] != nil {
		return k
	}
	return "int"
}

// try runs an operation on edges and random operands, in some threads of a warp only,
// and compares: floats that are no numbers are the same.
func try(t *testing.T, rng *rand.Rand, o operation, kind string, same func(got, want uint64) bool) {
	t.Helper()
	widths, negated := map[string]string{}, rng.IntN(2) == 0
	for _, m := range operandName.FindAllStringSubmatch(o.text, -1) {
		widths[m[1]] = m[2]
	}
	load := func(letter, width string, at string) string {
		if width == "1" {
			return fmt.Sprintf("ld.global.b32 %%r20, [%s];\nand.b32 %%r20, %%r20, 1;\nsetp.ne.s32 %%%s1, %%r20, 0;\n", at, letter)
		}
		return fmt.Sprintf("ld.global.b%s %%%s%s, [%s];\n", width, letter, width, at)
	}
	body := ".reg .b64 %a64, %b64, %c64, %e64, %d64, %x64, %pa, %pb, %pc, %pe;\n.reg .b32 %a32, %b32, %c32, %e32, %d32, %x32, %y32, %z32, %v32;\n" +
		".reg .b16 %a16, %b16, %c16, %e16, %d16, %x16, %y16, %z16, %v16;\n.reg .pred %a1, %b1, %c1, %e1, %d1, %q;\n"
	for i, letter := range []string{"a", "b", "c", "e"} {
		body += fmt.Sprintf("add.s64 %%p%s, %%g%d, %%i8;\n", letter, i)
		if w := widths[letter]; w != "" {
			body += load(letter, w, "%p"+letter)
		}
	}
	guard := map[bool]string{false: "@%q ", true: "@!%q "}[negated]
	body += "add.s64 %rd0, %g4, %i8;\nld.global.b32 %r0, [%rd0];\nsetp.ne.s32 %q, %r0, 0;\nadd.s64 %rd0, %g5, %i8;\n" + load("d", widths["d"], "%rd0")
	for line := range strings.SplitSeq(o.text, "; ") {
		body += guard + line + ";\n"
	}
	if widths["d"] == "1" {
		body += "selp.b32 %r0, 1, 0, %d1;\nst.global.b32 [%rd0], %r0;"
	} else {
		body += fmt.Sprintf("st.global.b%s [%%rd0], %%d%s;", widths["d"], widths["d"])
	}
	const threads = 1024
	var x [6][]uint64
	for i := range x {
		x[i] = memory[uint64](threads)
	}
	pool := edges[kind]
	for i := range threads {
		for j := range 4 {
			x[j][i] = draw(rng, kind)
			if sizes[kind] < 8 && kind != "int" { // more bits than the type
				x[j][i] |= rng.Uint64() << (8 * sizes[kind])
			}
		}
		if i < len(pool)*len(pool) {
			x[0][i], x[1][i] = pool[i%len(pool)], pool[i/len(pool)]
		}
		x[4][i], x[5][i] = uint64(rng.IntN(2)), rng.Uint64()
		if widths["d"] == "1" {
			x[5][i] &= 1
		}
	}
	given := slices.Clone(x[5])
	var all []Range
	for i := range x {
		all = append(all, rangeOf(x[i]))
	}
	if err := launch(compile(t, program(6, body)), Launch{Grid: threads / 128, Block: 128, Seed: rng.Uint64()}, all...); err != nil {
		t.Fatalf("%s: %v", o.text, err)
	}
	mask := ^uint64(0)
	if w := widths["d"]; w != "64" {
		mask = map[string]uint64{"1": 1, "16": 1<<16 - 1, "32": 1<<32 - 1}[w]
	}
	for i := range threads {
		want := given[i]
		if (x[4][i] != 0) != negated {
			want = want&^mask | o.want(x[0][i], x[1][i], x[2][i], x[3][i])&mask
		}
		if got := x[5][i]; got != want && (got&^mask != want&^mask || same == nil || !same(got&mask, want&mask)) {
			t.Fatalf("%s of %#x, %#x, %#x, %#x: %#x, want %#x", o.text, x[0][i], x[1][i], x[2][i], x[3][i], got, want)
		}
	}
}

func same32s(got, want uint64) bool { return f32Of(got) != f32Of(got) && f32Of(want) != f32Of(want) }
func same64s(got, want uint64) bool { return f64Of(got) != f64Of(got) && f64Of(want) != f64Of(want) }

// near allows for the last bits of what is computed in another way.
func near(got, want uint64) bool {
	g, w := float64(f32Of(got)), float64(f32Of(want))
	return same32s(got, want) || math.Abs(g-w) <= 1e-6*math.Abs(w)
}

// wide128 is a product of 64-bit integers, shifted.
func wide128(a, b *big.Int, shift uint) uint64 {
	p := new(big.Int).Rsh(new(big.Int).Mul(a, b), shift) // rounds down
	return new(big.Int).And(p, new(big.Int).SetUint64(math.MaxUint64)).Uint64()
}

func signed(x uint64, n int) *big.Int { return big.NewInt(int64(x) << (64 - n) >> (64 - n)) }
func unsigned(x uint64, n int) *big.Int {
	return new(big.Int).SetUint64(x << (64 - n) >> (64 - n))
}

// insert is the PTX ISA's bfi, bit by bit.
func insert(a, b, c, e uint64, n uint64) uint64 {
	for i := uint64(0); i < e&255 && c&255+i < n; i++ {
		at := c&255 + i
		b = b&^(1<<at) | a>>i&1<<at
	}
	return b
}

func shift(n uint64, f func(a, by uint64) uint64) func(a, b, c, e uint64) uint64 {
	return func(a, b, _, _ uint64) uint64 { return f(a, min(b&math.MaxUint32, n)) }
}

func TestIntegers(t *testing.T) {
	two := func(f func(a, b uint64) uint64) func(a, b, c, e uint64) uint64 {
		return func(a, b, _, _ uint64) uint64 { return f(a, b) }
	}
	and, or, xor := two(func(a, b uint64) uint64 { return a & b }), two(func(a, b uint64) uint64 { return a | b }), two(func(a, b uint64) uint64 { return a ^ b })
	add, sub, mul := two(func(a, b uint64) uint64 { return a + b }), two(func(a, b uint64) uint64 { return a - b }), two(func(a, b uint64) uint64 { return a * b })
	mad := func(a, b, c, _ uint64) uint64 { return a*b + c }
	less := func(n int, s, largest bool) func(a, b, c, e uint64) uint64 {
		return two(func(a, b uint64) uint64 {
			x, y := unsigned(a, n), unsigned(b, n)
			if s {
				x, y = signed(a, n), signed(b, n)
			}
			if (x.Cmp(y) < 0) != largest {
				return a
			}
			return b
		})
	}
	not := func(a, _, _, _ uint64) uint64 { return ^a }
	neg := func(a, _, _, _ uint64) uint64 { return -a }
	var all []operation
	for _, w := range []string{"16", "32", "64"} {
		all = append(all, operation{"and.b" + w + " %dW, %aW, %bW", and}, operation{"or.b" + w + " %dW, %aW, %bW", or}, operation{"xor.b" + w + " %dW, %aW, %bW", xor}, operation{"not.b" + w + " %dW, %aW", not})
		for _, s := range []string{"s", "u"} {
			all = append(all, operation{"add." + s + w + " %dW, %aW, %bW", add})
			if w == "16" {
				continue
			}
			n := map[string]int{"32": 32, "64": 64}[w]
			all = append(all, operation{"sub." + s + w + " %dW, %aW, %bW", sub}, operation{"mul.lo." + s + w + " %dW, %aW, %bW", mul}, operation{"mad.lo." + s + w + " %dW, %aW, %bW, %cW", mad},
				operation{"min." + s + w + " %dW, %aW, %bW", less(n, s == "s", false)}, operation{"max." + s + w + " %dW, %aW, %bW", less(n, s == "s", true)})
		}
		for i := range all {
			all[i].text = strings.NewReplacer("%dW", "%d"+w, "%aW", "%a"+w, "%bW", "%b"+w, "%cW", "%c"+w).Replace(all[i].text)
		}
	}
	all = append(all,
		operation{"abs.s32 %d32, %a32", func(a, _, _, _ uint64) uint64 {
			if int32(a) < 0 {
				return -a
			}
			return a
		}}, operation{"neg.s32 %d32, %a32", neg}, operation{"neg.s64 %d64, %a64", neg},
		operation{"mul.hi.s32 %d32, %a32, %b32", two(func(a, b uint64) uint64 { return wide128(signed(a, 32), signed(b, 32), 32) })},
		operation{"mul.hi.u32 %d32, %a32, %b32", two(func(a, b uint64) uint64 { return wide128(unsigned(a, 32), unsigned(b, 32), 32) })},
		operation{"mul.hi.u64 %d64, %a64, %b64", two(func(a, b uint64) uint64 { return wide128(unsigned(a, 64), unsigned(b, 64), 64) })},
		operation{"mul.wide.s32 %d64, %a32, %b32", two(func(a, b uint64) uint64 { return wide128(signed(a, 32), signed(b, 32), 0) })},
		operation{"mul.wide.u32 %d64, %a32, %b32", two(func(a, b uint64) uint64 { return wide128(unsigned(a, 32), unsigned(b, 32), 0) })},
		operation{"mad.wide.s32 %d64, %a32, %b32, %c64", func(a, b, c, _ uint64) uint64 { return wide128(signed(a, 32), signed(b, 32), 0) + c }},
		operation{"mad.wide.u32 %d64, %a32, %b32, %c64", func(a, b, c, _ uint64) uint64 { return wide128(unsigned(a, 32), unsigned(b, 32), 0) + c }},
		operation{"shl.b32 %d32, %a32, %b32", shift(32, func(a, by uint64) uint64 { return a << by })},
		operation{"shl.b64 %d64, %a64, %b32", shift(64, func(a, by uint64) uint64 { return a << by })},
		operation{"shl.b16 %d16, %a16, %b32", shift(16, func(a, by uint64) uint64 { return a << by })},
		operation{"shr.u32 %d32, %a32, %b32", shift(32, func(a, by uint64) uint64 { return a & math.MaxUint32 >> by })},
		operation{"shr.b32 %d32, %a32, %b32", shift(32, func(a, by uint64) uint64 { return a & math.MaxUint32 >> by })},
		operation{"shr.s32 %d32, %a32, %b32", shift(32, func(a, by uint64) uint64 { return uint64(int64(int32(a)) >> by) })},
		operation{"shr.u16 %d16, %a16, %b32", shift(16, func(a, by uint64) uint64 { return a & math.MaxUint16 >> by })},
		operation{"shr.u64 %d64, %a64, %b32", shift(64, func(a, by uint64) uint64 { return a >> by })},
		operation{"shr.b64 %d64, %a64, %b32", shift(64, func(a, by uint64) uint64 { return a >> by })},
		operation{"shr.s64 %d64, %a64, %b32", shift(64, func(a, by uint64) uint64 { return uint64(int64(a) >> by) })},
		operation{"clz.b32 %d32, %a32", func(a, _, _, _ uint64) uint64 { return uint64(32 - unsigned(a, 32).BitLen()) }},
		operation{"popc.b32 %d32, %a32", func(a, _, _, _ uint64) uint64 { return uint64(strings.Count(fmt.Sprintf("%b", uint32(a)), "1")) }},
		operation{"brev.b32 %d32, %a32", func(a, _, _, _ uint64) (x uint64) {
			for i := range 32 {
				x |= a >> i & 1 << (31 - i)
			}
			return x
		}},
		operation{"sub.rn.f16x2 %d32, %a32, %b32", func(a, b, _, _ uint64) (x uint64) {
			for i := range 2 {
				difference := float64(half.Float16(a>>(16*i)).Float32()) - float64(half.Float16(b>>(16*i)).Float32())
				x |= uint64(half.FromFloat64(difference)) << (16 * i)
			}
			return x
		}},
		operation{"prmt.b32 %d32, %a32, %b32, %c32", func(a, b, c, _ uint64) (x uint64) {
			digits := fmt.Sprintf("%08x", uint32(c))
			for _, digit := range digits[4:] {
				n := strings.IndexRune("0123456789abcdef", digit)
				part := fmt.Sprintf("%08x%08x", uint32(b), uint32(a))[14-n%8*2:][:2]
				if n >= 8 {
					part = map[bool]string{false: "00", true: "ff"}[part >= "80"]
				}
				var of uint64
				fmt.Sscanf(part, "%x", &of)
				x = x<<8 | of
			}
			return x
		}},
		operation{"dp4a.s32.s32 %d32, %a32, %b32, %c32", func(a, b, c, _ uint64) uint64 {
			sum := int64(int32(c))
			for range 4 {
				sum += int64(int8(a)) * int64(int8(b))
				a, b = a>>8, b>>8
			}
			return uint64(uint32(sum))
		}},
		operation{"shf.l.wrap.b32 %d32, %a32, %b32, %c32", func(a, b, c, _ uint64) uint64 {
			if c %= 32; c > 0 {
				return uint64(uint32(b)<<c | uint32(a)>>(32-c))
			}
			return uint64(uint32(b))
		}},
		operation{"bfi.b32 %d32, %a32, %b32, %c32, %e32", func(a, b, c, e uint64) uint64 { return insert(a, b, c, e, 32) }},
		operation{"bfi.b64 %d64, %a64, %b64, %c32, %e32", func(a, b, c, e uint64) uint64 { return insert(a, b, c, e, 64) }},
		operation{"and.b32 %x32, %c32, 63; and.b32 %y32, %e32, 63; bfi.b64 %d64, %a64, %b64, %x32, %y32", func(a, b, c, e uint64) uint64 { return insert(a, b, c&63, e&63, 64) }},
		operation{"selp.b32 %d32, %a32, %b32, %c1", choose}, operation{"selp.f32 %d32, %a32, %b32, %c1", choose}, operation{"selp.u16 %d16, %a16, %b16, %c1", choose},
		operation{"selp.b64 %d64, %a64, %b64, %c1", choose}, operation{"selp.u64 %d64, %a64, %b64, %c1", choose}, operation{"selp.s32 %d32, -7, %b32, %c1", func(a, b, c, e uint64) uint64 { return choose(^uint64(6), b, c, e) }},
		operation{"and.pred %d1, %a1, %b1", and}, operation{"or.pred %d1, %a1, %b1", or}, operation{"xor.pred %d1, %a1, %b1", xor}, operation{"not.pred %d1, %a1", not},
		operation{"mov.pred %d1, %a1", func(a, _, _, _ uint64) uint64 { return a }}, operation{"mov.pred %d1, 1", constantly(1)}, operation{"mov.pred %d1, 0", constantly(0)}, operation{"mov.pred %d1, -1", constantly(1)},
		// Where an operand is the result's register, too.
		operation{"mov.b32 %d32, %a32; mad.lo.s32 %d32, %d32, %d32, %d32", func(a, _, _, _ uint64) uint64 { return a*a + a }},
	)
	rng := reftest.Rand(t)
	for _, o := range all {
		try(t, rng, o, "int", nil)
	}
	named(t, all, binary32, func(key string) bool { return !strings.HasSuffix(key, "f32") && !division(key) })
	named(t, all, binary64, func(key string) bool { return !strings.HasSuffix(key, "f64") && !division(key) })
	named(t, all, unary32, func(key string) bool { return !strings.HasSuffix(key, "f32") })
}

func choose(a, b, c, _ uint64) uint64 {
	if c&1 != 0 {
		return a
	}
	return b
}

func constantly(x uint64) func(a, b, c, e uint64) uint64 {
	return func(_, _, _, _ uint64) uint64 { return x }
}

func division(key string) bool {
	return strings.HasPrefix(key, "div.") || strings.HasPrefix(key, "rem.")
}

// named checks that a table's keys are all tested.
func named[F any](t *testing.T, all []operation, table map[string]F, which func(key string) bool) {
	t.Helper()
	for key := range table {
		if which(key) && !slices.ContainsFunc(all, func(o operation) bool {
			op := strings.Fields(o.text)[0]
			return op == key || strings.HasPrefix(op, key+".") || without(strings.Split(op, "."), "rn", "approx", "full", "ftz") == key
		}) {
			t.Errorf("there is no test of %s", key)
		}
	}
}

// Divisors are not 0: that is an error.
func TestDivisions(t *testing.T) {
	rng := reftest.Rand(t)
	for _, n := range []int{32, 64} {
		for _, s := range []bool{false, true} {
			of, name := unsigned, fmt.Sprintf("u%d", n)
			if s {
				of, name = signed, fmt.Sprintf("s%d", n)
			}
			divisor := fmt.Sprintf("setp.eq.b%d %%c1, %%bW, 0; selp.b%d %%bW, 1, %%bW, %%c1; ", n, n)
			one := func(f func(z, a, b *big.Int) *big.Int) func(a, b, c, e uint64) uint64 {
				return func(a, b, _, _ uint64) uint64 {
					y := of(b, n)
					if y.Sign() == 0 {
						y.SetInt64(1)
					}
					z := f(new(big.Int), of(a, n), y)
					return wide128(z, big.NewInt(1), 0)
				}
			}
			for op, f := range map[string]func(z, a, b *big.Int) *big.Int{"div": (*big.Int).Quo, "rem": (*big.Int).Rem} {
				text := strings.ReplaceAll(divisor+op+"."+name+" %dW, %aW, %bW", "W", fmt.Sprint(n))
				try(t, rng, operation{text, one(f)}, "int", nil)
				register := map[int]string{32: "%r", 64: "%rd"}[n]
				bodyFails(t, Launch{}, fmt.Sprintf("mov.b%d %s1, 1;\n%s.%s %s0, %s1, 0;", n, register, op, name, register, register), "a division by 0", op+"."+name)
			}
		}
	}
}

// exactly is a*b+c, rounded once.
func exactly(a, b, c float64) *big.Float {
	z := new(big.Float).SetPrec(6000).SetFloat64(a)
	z.Mul(z, new(big.Float).SetFloat64(b))
	return z.Add(z, new(big.Float).SetFloat64(c))
}

func finite(x ...float64) bool {
	for _, f := range x {
		if f-f != 0 {
			return false
		}
	}
	return true
}

func TestFloats(t *testing.T) {
	one := func(f func(x float64) float64) func(a, b, c, e uint64) uint64 {
		return func(a, _, _, _ uint64) uint64 { return bits32(float32(f(float64(f32Of(a))))) }
	}
	two := func(f func(x, y float32) float32) func(a, b, c, e uint64) uint64 {
		return func(a, b, _, _ uint64) uint64 { return bits32(f(f32Of(a), f32Of(b))) }
	}
	flush := func(x float32) float32 {
		if math.Abs(float64(x)) < 0x1p-126 {
			return float32(math.Copysign(0, float64(x)))
		}
		return x
	}
	two64 := func(f func(x, y float64) float64) func(a, b, c, e uint64) uint64 {
		return func(a, b, _, _ uint64) uint64 { return bits64(f(f64Of(a), f64Of(b))) }
	}
	// math's Min and Max have a NaN where an operand is one.
	other := func(f func(x, y float64) float64) func(x, y float64) float64 {
		return func(x, y float64) float64 {
			switch {
			case math.IsNaN(x):
				return y
			case math.IsNaN(y):
				return x
			}
			return f(x, y)
		}
	}
	narrow := func(f func(x, y float64) float64) func(x, y float32) float32 {
		return func(x, y float32) float32 { return float32(other(f)(float64(x), float64(y))) }
	}
	quotient := two(func(x, y float32) float32 { return float32(float64(x) / float64(y)) }) // twice the bits and two more: rounding twice is rounding once
	f32s := []operation{
		{"add.f32 %d32, %a32, %b32", two(func(x, y float32) float32 { return float32(float64(x) + float64(y)) })},
		{"add.rn.f32 %d32, %a32, %b32", two(func(x, y float32) float32 { return float32(float64(x) + float64(y)) })},
		{"sub.f32 %d32, %a32, %b32", two(func(x, y float32) float32 { return float32(float64(x) - float64(y)) })},
		{"mul.f32 %d32, %a32, %b32", two(func(x, y float32) float32 { return float32(float64(x) * float64(y)) })},
		{"fma.rn.f32 %d32, %a32, %b32, %c32", func(a, b, c, _ uint64) uint64 {
			x, y, z := float64(f32Of(a)), float64(f32Of(b)), float64(f32Of(c))
			if s := x*y + z; !finite(x, y, z) || s == 0 {
				return bits32(float32(s))
			}
			f, _ := exactly(x, y, z).Float32()
			return bits32(f)
		}},
		{"div.rn.f32 %d32, %a32, %b32", quotient}, {"div.approx.f32 %d32, %a32, %b32", quotient}, {"div.full.f32 %d32, %a32, %b32", quotient},
		{"min.NaN.f32 %d32, %a32, %b32", two(func(x, y float32) float32 {
			if x != x || y != y {
				return float32(math.NaN())
			}
			return narrow(math.Min)(x, y)
		})},
		{"max.NaN.f32 %d32, %a32, %b32", two(func(x, y float32) float32 {
			if x != x || y != y {
				return float32(math.NaN())
			}
			return narrow(math.Max)(x, y)
		})},
		{"min.f32 %d32, %a32, %b32", two(narrow(math.Min))}, {"max.f32 %d32, %a32, %b32", two(narrow(math.Max))},
		{"max.ftz.f32 %d32, %a32, %b32", two(func(x, y float32) float32 { return flush(narrow(math.Max)(flush(x), flush(y))) })},
		{"neg.f32 %d32, %a32", func(a, _, _, _ uint64) uint64 { return a ^ 1<<31 }},
		{"abs.f32 %d32, %a32", func(a, _, _, _ uint64) uint64 { return a &^ (1 << 31) }},
		{"ex2.approx.f32 %d32, %a32", one(func(x float64) float64 { return math.Pow(2, x) })},
		{"ex2.approx.ftz.f32 %d32, %a32", func(a, _, _, _ uint64) uint64 { return bits32(flush(float32(math.Pow(2, float64(flush(f32Of(a))))))) }},
		{"lg2.approx.f32 %d32, %a32", one(func(x float64) float64 { return math.Log(x) / math.Ln2 })},
		{"sqrt.rn.f32 %d32, %a32", one(math.Sqrt)}, {"sqrt.approx.f32 %d32, %a32", one(math.Sqrt)},
		{"rsqrt.approx.f32 %d32, %a32", one(func(x float64) float64 { return 1 / math.Sqrt(x) })},
		{"rcp.rn.f32 %d32, %a32", one(func(x float64) float64 { return 1 / x })}, {"rcp.approx.f32 %d32, %a32", one(func(x float64) float64 { return 1 / x })},
	}
	rng := reftest.Rand(t)
	for _, o := range f32s {
		same := same32s
		if strings.Contains(o.text, "approx") {
			same = near
		}
		try(t, rng, o, "f32", same)
	}
	f64s := []operation{
		{"add.f64 %d64, %a64, %b64", two64(func(x, y float64) float64 { return x + y })}, {"add.rn.f64 %d64, %a64, %b64", two64(func(x, y float64) float64 { return x + y })},
		{"sub.f64 %d64, %a64, %b64", two64(func(x, y float64) float64 { return x - y })}, {"mul.f64 %d64, %a64, %b64", two64(func(x, y float64) float64 { return x * y })},
		{"div.rn.f64 %d64, %a64, %b64", two64(func(x, y float64) float64 { return x / y })},
		{"min.f64 %d64, %a64, %b64", two64(other(math.Min))}, {"max.f64 %d64, %a64, %b64", two64(other(math.Max))},
		{"fma.rn.f64 %d64, %a64, %b64, %c64", func(a, b, c, _ uint64) uint64 {
			x, y, z := f64Of(a), f64Of(b), f64Of(c)
			if finite(x, y) && !finite(z) { // the product of the two may be too large
				return bits64(z)
			}
			if s := x*y + z; !finite(x, y) || s == 0 && (x == 0 || y == 0) {
				return bits64(s)
			}
			f, _ := exactly(x, y, z).Float64()
			return bits64(f)
		}},
	}
	for _, o := range f64s {
		try(t, rng, o, "f64", same64s)
	}
	named(t, f32s, binary32, func(key string) bool { return strings.HasSuffix(key, "f32") })
	named(t, f32s, unary32, func(key string) bool { return strings.HasSuffix(key, "f32") })
	named(t, f64s, binary64, func(key string) bool { return strings.HasSuffix(key, "f64") })
}

// A product's sum that lies so near to the middle between two numbers that 53 bits
// do not tell on which side.
func TestFusedOnce(t *testing.T) {
	rng := reftest.Rand(t)
	text := program(2, `ld.global.v2.f32 {%f0, %f1}, [%g1];
ld.global.f32 %f2, [%g1+8];
fma.rn.f32 %f3, %f0, %f1, %f2;
`+result("%f3"))
	k := compile(t, text)
	out, in := memory[uint32](32), memory[float32](4)
	twice := 0
	for range 300 {
		// x*y is a little less than half a unit of z's last place.
		j := float32(1+rng.IntN(1<<7)) * 0x1p-23
		x, y, z := (1+j)*0x1p-12, (1-j)*0x1p-12, 1+0x1p-23*float32(rng.IntN(1<<23))
		if rng.IntN(2) == 0 { // z has no exponent
			x, y, z = (1+j)*0x1p-75, (1-j)*0x1p-75, 0x1p-149*float32(rng.IntN(1<<23))
		}
		in[0], in[1], in[2] = x*float32(1-2*rng.IntN(2)), y, z*float32(1-2*rng.IntN(2))
		if err := launch(k, Launch{Grid: 1, Block: 32}, rangeOf(out), rangeOf(in)); err != nil {
			t.Fatal(err)
		}
		a, b, c := float64(in[0]), float64(in[1]), float64(in[2])
		want, _ := exactly(a, b, c).Float32()
		if got := math.Float32frombits(out[0]); got != want {
			t.Fatalf("%g*%g+%g: %g, want %g", a, b, c, got, want)
		}
		if float32(a*b+c) != want {
			twice++
		}
	}
	if twice == 0 {
		t.Error("rounding twice would do")
	}
}

// compileFails wants an error with the line of an instruction, which is the body's first.
func compileFails(t testing.TB, body string, says string) {
	t.Helper()
	text := program(1, body)
	m, err := Parse(text)
	if err == nil {
		_, err = m.Kernel("k")
	}
	line := 1 + strings.Count(text[:strings.Index(text, body)], "\n")
	fails(t, body, err, fmt.Sprintf("line %d: ", line), says)
}

func TestMoves(t *testing.T) {
	rng := reftest.Rand(t)
	part := func(from, n int) func(a, b, c, e uint64) uint64 {
		return func(a, _, _, _ uint64) uint64 { return a >> from & (1<<n - 1) }
	}
	self := func(a, _, _, _ uint64) uint64 { return a }
	for _, o := range []operation{
		{"mov.b32 %d32, %a32", self}, {"mov.u32 %d32, %a32", self}, {"mov.f32 %d32, %a32", self}, {"mov.u16 %d16, %a16", self}, {"mov.b64 %d64, %a64", self}, {"mov.f64 %d64, %a64", self},
		{"mov.b64 {%d32, %x32}, %a64", part(0, 32)}, {"mov.b64 {%x32, %d32}, %a64", part(32, 32)}, {"mov.b64 {%x16, %y16, %d16, %z16}, %a64", part(32, 16)},
		{"mov.b32 {%d16, %x16}, %a32", part(0, 16)}, {"mov.b32 {%x16, %d16}, %a32", part(16, 16)}, {"mov.b32 {%d32, %x16}, %a32", part(0, 16)},
		{"mov.b16 {%x16, %d16}, %a16", part(8, 8)},
		{"mov.b64 %d64, {%a32, %b32}", func(a, b, _, _ uint64) uint64 { return a&math.MaxUint32 | b<<32 }},
		{"mov.b32 %d32, {%a16, %b16}", func(a, b, _, _ uint64) uint64 { return a&0xffff | b&0xffff<<16 }},
		{"mov.b64 %d64, {%a16, %b16, %c16, %e16}", func(a, b, c, e uint64) uint64 { return a&0xffff | b&0xffff<<16 | c&0xffff<<32 | e<<48 }},
		{"mov.b32 %d32, {%a16, 1}", func(a, _, _, _ uint64) uint64 { return a&0xffff | 1<<16 }},
		{"mov.b64 %d64, %a64; mov.b64 {%x32, %y32}, %d64; mov.b64 %d64, {%y32, %x32}", func(a, _, _, _ uint64) uint64 { return bits.RotateLeft64(a, 32) }},
		// 16-bit results that have been extended are used again.
		{"ld.global.s8 %x16, [%pa]; mov.b32 %d32, {%x16, %x16}", func(a, _, _, _ uint64) uint64 { x := uint64(uint16(int8(a))); return x<<16 | x }},
		{"ld.global.s8 %x16, [%pa]; cvt.u32.u16 %d32, %x16", func(a, _, _, _ uint64) uint64 { return uint64(uint16(int8(a))) }},
		{"ld.global.s8 %x16, [%pa]; shr.u16 %x16, %x16, 3; setp.gt.u16 %d1, %x16, 100", func(a, _, _, _ uint64) uint64 { return truth(uint16(int8(a))>>3 > 100) }},
		{"not.b16 %x16, %a16; cvt.u64.u16 %d64, %x16", func(a, _, _, _ uint64) uint64 { return uint64(^uint16(a)) }},
		{"add.s16 %x16, %a16, %b16; setp.lt.s16 %d1, %x16, -5", func(a, b, _, _ uint64) uint64 { return truth(int16(a+b) < -5) }},
		{"mov.u16 %x16, -1; cvt.u32.u16 %d32, %x16", constantly(0xffff)},
		// Immediate operands.
		{"mov.f32 %d32, 0f3f800001", constantly(0x3f800001)}, {"mov.f32 %d32, 0FBf800000", constantly(0xbf800000)}, {"mov.f32 %d32, 1.5", constantly(bits32(1.5))}, {"mov.f32 %d32, -0.1", constantly(bits32(-0.1))},
		{"mov.f64 %d64, 0d3ff0000000000001", constantly(0x3ff0000000000001)}, {"mov.f64 %d64, 0.1", constantly(bits64(0.1))}, {"mov.f64 %d64, -2.5", constantly(bits64(-2.5))},
		{"mov.u32 %d32, 0xfFfffffe", constantly(0xfffffffe)}, {"mov.u32 %d32, -2", constantly(0xfffffffe)}, {"mov.u32 %d32, 4294967295U", constantly(math.MaxUint32)}, {"mov.s64 %d64, -9223372036854775808", constantly(1 << 63)},
		{"mov.u64 %d64, 18446744073709551615", constantly(math.MaxUint64)}, {"mov.b32 %d32, 0b101", constantly(5)}, {"mov.b32 %d32, 010", constantly(8)},
		{"add.f64 %d64, %a64, 1.1", func(a, _, _, _ uint64) uint64 { return bits64(f64Of(a) + 1.1) }},
		{"add.f32 %d32, %a32, 0fC0200000", func(a, _, _, _ uint64) uint64 { return bits32(f32Of(a) - 2.5) }},
		{"and.b32 %d32, %a32, -8", func(a, _, _, _ uint64) uint64 { return a &^ 7 }},
		{"and.b64 %d64, -8, %a64", func(a, _, _, _ uint64) uint64 { return a &^ 7 }},
	} {
		same := same32s
		if strings.Contains(o.text, "f64") {
			same = same64s
		}
		try(t, rng, o, "int", same)
	}
	for _, text := range []string{
		"mov.b32 {%h0, %h1}, {%h2, %h3};", "mov.b32 {%h0}, %r0;", "mov.b64 {%h0, %h1, %h2}, %rd0;", "mov.u32 %r0, %clock;", "mov.u32 %r0, %tid.y;", "mov.b128 %rd0, %rd1;", "mov.u64 %rd0, %tid.x;",
		"mov.u32 %r0, %rd0;", "mov.u64 %rd0, %r0;", "mov.u32 %r0, nothing;", "mov.f32 %f0, 0fxyz;", "mov.f64 %rd0, 0dxyz;", "mov.f32 %f0, 1.2.3;", "mov.u32 %r0, 08;", "mov.u32 %r0;", "mov %r0, %r1;", "mov.u32 %p0, %r1;", "mov.u32 7, %r1;",
		"add.s32 %r0, %r1;", "add.s32 %r0, %r1, %r2, %r3;", "add.s32 ;", "add;", "add.sat.s32 %r0, %r1, %r2;", "add.rz.f32 %f0, %f1, %f2;", "add.ftz.f32 %f0, %f1, %f2;", "fma.rn.ftz.f32 %f0, %f1, %f2, %f3;",
		"mul.lo.s16 %h0, %h1, %h2;", "mul.hi.s64 %rd0, %rd1, %rd2;", "clz.b64 %r0, %rd0;", "selp.b32 %r0, %r1, %r2, %r3;", "setp.lt.s32 %p0|%p1, %r1, %r2;", "setp.lt.and.s32 %p0, %r1, %r2, %p1;", "setp %p0, %r1, %r2;",
		"nothing.s32 %r0, %r1;", "and.pred %p0, %p1, 1;", "cvta.local.u64 %rd0, %rd1;", "cvta %rd0, %rd1;", "cvta.to %rd0, %rd1;", "mapa.u64 %rd0, %rd1, %r0;", "@%r0 mov.u32 %r0, 1;", "@%p99 mov.u32 %r0, 1;", "bra nowhere;", "bra %r0;", "bra;",
		"and.ftz.b32 %r0, %r1, %r2;", "ret 1;",
	} {
		compileFails(t, text, "")
	}
}

// TestFusedHalves: each half of fma.rn.f16x2 is the number that is nearest to the exact sum, of two the even one.
func TestFusedHalves(t *testing.T) {
	one := func(a, b, c uint64) uint64 {
		x, y, z := float64(half.Float16(a).Float32()), float64(half.Float16(b).Float32()), float64(half.Float16(c).Float32())
		s := x*y + z
		if s-s != 0 || s == 0 || math.Abs(s) >= 65520 { // no number, a zero with the sign of float64's, or infinite
			return uint64(half.FromFloat32(float32(s)))
		}
		best, off := half.Float16(0), big.NewFloat(math.Inf(1))
		near := half.FromFloat32(float32(s))
		for h := near - 1; h != near+2; h++ {
			v := float64(h.Float32())
			if v-v != 0 || v == 0 && h>>15 != 0 != math.Signbit(s) {
				continue
			}
			d := new(big.Float).Abs(exactly(x, y, z).Sub(exactly(x, y, z), big.NewFloat(v)))
			if by := d.Cmp(off); by < 0 || by == 0 && h&1 == 0 {
				best, off = h, d
			}
		}
		return uint64(best)
	}
	same := func(got, want uint64) bool {
		alike := func(got, want uint64) bool {
			return got == want || half.Float16(got).IsNaN() && half.Float16(want).IsNaN()
		}
		return alike(got&0xffff, want&0xffff) && alike(got>>16&0xffff, want>>16&0xffff)
	}
	rng := reftest.Rand(t)
	for range 4 {
		try(t, rng, operation{"fma.rn.f16x2 %d32, %a32, %b32, %c32", func(a, b, c, _ uint64) uint64 {
			return one(a>>16&0xffff, b>>16&0xffff, c>>16&0xffff)<<16 | one(a&0xffff, b&0xffff, c&0xffff)
		}}, "int", same)
	}
}
