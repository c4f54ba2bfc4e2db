package half

import (
	"math"
	"math/big"
	"math/rand/v2"
	"sort"
	"testing"
	"time"
)

// format describes one of the two formats to the reference, which knows them only by their widths.
type format struct {
	name           string
	exponent, frac int
	decode         func(uint16) float32
	encode         func(float32) uint16
	encode64       func(float64) uint16
}

var formats = []format{
	{"float16", 5, 10,
		func(h uint16) float32 { return Float16(h).Float32() },
		func(f float32) uint16 { return uint16(FromFloat32(f)) },
		func(f float64) uint16 { return uint16(FromFloat64(f)) }},
	{"bfloat16", 8, 7,
		func(h uint16) float32 { return BFloat16(h).Float32() },
		func(f float32) uint16 { return uint16(BFromFloat32(f)) },
		func(f float64) uint16 { return uint16(BFromFloat64(f)) }},
}

// value is the definition: (-1)^s * 1.f * 2^(e-bias), subnormals 0.f * 2^(1-bias).
func (m format) value(h uint16) float64 {
	e := int(h>>m.frac) & (1<<m.exponent - 1)
	f := float64(int(h)&(1<<m.frac-1)) / float64(int(1)<<m.frac)
	bias := 1<<(m.exponent-1) - 1
	sign := 1.0
	if h>>15 == 1 {
		sign = -1
	}
	switch e {
	case 0:
		return math.Copysign(math.Ldexp(f, 1-bias), sign)
	case 1<<m.exponent - 1:
		if f != 0 {
			return math.NaN()
		}
		return math.Inf(int(sign))
	}
	return sign * math.Ldexp(1+f, e-bias)
}

// nearest rounds by search: the positive finite numbers of the format in order, compared exactly.
type nearest struct {
	format
	values []*big.Float
}

func newNearest(m format) *nearest {
	n := &nearest{format: m}
	for h := uint16(0); !math.IsInf(m.value(h), 0); h++ {
		n.values = append(n.values, big.NewFloat(m.value(h)))
	}
	// What would come next if the exponent went on: the threshold of overflow is half-way to it.
	last := m.value(uint16(len(n.values) - 1))
	step := last - m.value(uint16(len(n.values)-2))
	n.values = append(n.values, big.NewFloat(last+step))
	return n
}

func (n *nearest) round(f float64) uint16 {
	sign := uint16(0)
	if math.Signbit(f) {
		sign = 0x8000
	}
	inf := uint16(len(n.values) - 1)
	if math.IsInf(f, 0) {
		return sign | inf
	}
	x := big.NewFloat(math.Abs(f))
	above := sort.Search(len(n.values), func(i int) bool { return n.values[i].Cmp(x) >= 0 })
	switch above {
	case len(n.values):
		return sign | inf
	case 0:
		return sign
	}
	down := new(big.Float).SetPrec(200).Sub(x, n.values[above-1])
	up := new(big.Float).SetPrec(200).Sub(n.values[above], x)
	c := down.Cmp(up)
	if c < 0 || c == 0 && above%2 == 1 {
		above--
	}
	return sign | uint16(above)
}

func same32(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

func TestDecodeEveryPattern(t *testing.T) {
	for _, m := range formats {
		for i := 0; i < 1<<16; i++ {
			h := uint16(i)
			if got, want := m.decode(h), float32(m.value(h)); !same32(got, want) {
				t.Fatalf("%s %#04x: got %v, want %v", m.name, h, got, want)
			}
		}
	}
}

func TestRoundTripEveryPattern(t *testing.T) {
	for _, m := range formats {
		for i := 0; i < 1<<16; i++ {
			h := uint16(i)
			f := m.decode(h)
			for _, got := range []uint16{m.encode(f), m.encode64(float64(f))} {
				if f != f {
					if g := m.decode(got); g == g {
						t.Fatalf("%s %#04x: NaN became %v", m.name, h, g)
					}
				} else if got != h {
					t.Fatalf("%s %#04x: came back as %#04x", m.name, h, got)
				}
			}
		}
	}
}

func TestIsNaN(t *testing.T) {
	for i := 0; i < 1<<16; i++ {
		f, b := Float16(i), BFloat16(i)
		if f.IsNaN() != (f.Float32() != f.Float32()) || b.IsNaN() != (b.Float32() != b.Float32()) {
			t.Fatalf("%#04x: IsNaN is wrong", i)
		}
	}
}

// boundaries are the places where rounding changes its mind: every value of the format and every
// midpoint between two, with their neighbours in the wider format.
func boundaries(m format, visit func(float64)) {
	for h := uint16(0); ; h++ {
		v := m.value(h)
		if math.IsInf(v, 0) {
			visit(v)
			break
		}
		next := m.value(h + 1)
		if math.IsInf(next, 0) {
			next = v + (v - m.value(h-1))
		}
		visit(v)
		visit(-v)
		visit(v + (next-v)/2)
		visit(-v - (next-v)/2)
	}
}

func TestEncodeFloat32(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for _, m := range formats {
		ref := newNearest(m)
		check := func(f float32) {
			if f != f {
				return // TestNaNStaysNaN
			}
			if got, want := m.encode(f), ref.round(float64(f)); got != want {
				t.Fatalf("%s: %v (%#08x): got %#04x, want %#04x", m.name, f, math.Float32bits(f), got, want)
			}
		}
		boundaries(m, func(f float64) {
			n := float32(f)
			check(n)
			check(math.Nextafter32(n, float32(math.Inf(1))))
			check(math.Nextafter32(n, float32(math.Inf(-1))))
		})
		for range 200_000 {
			check(math.Float32frombits(rng.Uint32()))
		}
		for range 200_000 { // the range in which float16 has values
			check(float32(rng.NormFloat64() * math.Exp2(float64(rng.IntN(44)-26))))
		}
	}
}

func TestEncodeFloat64RoundsOnce(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for _, m := range formats {
		ref := newNearest(m)
		check := func(f float64) {
			if f != f {
				return
			}
			if got, want := m.encode64(f), ref.round(f); got != want {
				t.Fatalf("%s: %v (%#016x): got %#04x, want %#04x", m.name, f, math.Float64bits(f), got, want)
			}
		}
		boundaries(m, func(f float64) {
			check(f)
			check(math.Nextafter(f, math.Inf(1)))
			check(math.Nextafter(f, math.Inf(-1)))
		})
		for range 200_000 {
			check(math.Float64frombits(rng.Uint64()))
			check(rng.NormFloat64() * math.Exp2(float64(rng.IntN(44)-26)))
		}
	}
}

func TestNaNStaysNaN(t *testing.T) {
	for shift := 0; shift < 23; shift++ { // payloads that narrowing could truncate to nothing
		for _, sign := range []uint32{0, 1 << 31} {
			f := math.Float32frombits(sign | 0x7f800000 | 1<<shift)
			if !FromFloat32(f).IsNaN() || !BFromFloat32(f).IsNaN() {
				t.Fatalf("payload bit %d: NaN was lost", shift)
			}
		}
	}
	if !FromFloat64(math.NaN()).IsNaN() || !BFromFloat64(math.NaN()).IsNaN() {
		t.Fatal("NaN was lost")
	}
}

func TestBulk(t *testing.T) {
	all := make([]uint16, 1<<16)
	for i := range all {
		all[i] = uint16(i)
	}
	dst := make([]float32, len(all)+1)
	DecodeFloat16(dst, all)
	for i, f := range dst[:len(all)] {
		if !same32(f, Float16(i).Float32()) {
			t.Fatalf("DecodeFloat16 %#04x: %v", i, f)
		}
	}
	back := make([]Float16, len(all))
	EncodeFloat16(back, dst[:len(all)])
	for i, h := range back {
		if h != FromFloat32(dst[i]) {
			t.Fatalf("EncodeFloat16 %v: %#04x", dst[i], h)
		}
	}
	DecodeBFloat16(dst, all)
	for i, f := range dst[:len(all)] {
		if !same32(f, BFloat16(i).Float32()) {
			t.Fatalf("DecodeBFloat16 %#04x: %v", i, f)
		}
	}
	bback := make([]BFloat16, len(all))
	EncodeBFloat16(bback, dst[:len(all)])
	for i, h := range bback {
		if h != BFromFloat32(dst[i]) {
			t.Fatalf("EncodeBFloat16 %v: %#04x", dst[i], h)
		}
	}
	if dst[len(all)] != 0 {
		t.Fatal("wrote beyond len(src)")
	}
}

func BenchmarkBulk(b *testing.B) {
	src := make([]uint16, 4096)
	f := make([]float32, len(src))
	for i := range f {
		f[i] = rand.Float32()*2 - 1
	}
	for _, c := range []struct {
		name string
		run  func()
	}{
		{"DecodeBFloat16", func() { DecodeBFloat16(f, src) }},
		{"EncodeBFloat16", func() { EncodeBFloat16(src, f) }},
		{"EncodeFloat16", func() { EncodeFloat16(src, f) }},
		{"DecodeFloat16", func() { DecodeFloat16(f, src) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(src)) * 2)
			for b.Loop() {
				c.run()
			}
		})
	}
}
