package half

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// eight describes a type of 8 bits to the tests.
type eight struct {
	name     string
	value    func(b uint8) float64 // the definition
	decode   func(b uint8) float32
	bulk     func(dst []float32, src []uint8)
	isNaN    func(b uint8) bool
	encode   func(f float32) uint8
	encode64 func(f float64) uint8
	most     float64
}

var eights = []eight{
	{"e4m3", func(b uint8) float64 {
		sign, e, f := 1.0, int(b>>3&15), float64(b&7)/8
		if b >= 128 {
			sign = -1
		}
		switch {
		case b&0x7f == 0x7f:
			return math.NaN()
		case e == 0:
			return math.Copysign(math.Ldexp(f, 1-7), sign)
		}
		return sign * math.Ldexp(1+f, e-7)
	}, func(b uint8) float32 { return E4M3(b).Float32() }, DecodeE4M3, func(b uint8) bool { return E4M3(b).IsNaN() },
		func(f float32) uint8 { return uint8(E4M3FromFloat32(f)) }, func(f float64) uint8 { return uint8(E4M3FromFloat64(f)) }, MaxE4M3},
	{"int8", func(b uint8) float64 {
		if b == 128 {
			return math.NaN()
		}
		return float64(int8(b))
	}, func(b uint8) float32 { return Int8(b).Float32() }, DecodeInt8, func(b uint8) bool { return Int8(b).IsNaN() },
		func(f float32) uint8 { return uint8(Int8FromFloat32(f)) }, func(f float64) uint8 { return uint8(Int8FromFloat64(f)) }, MaxInt8},
}

// nearest returns the pattern of f by search: the nearest of all numbers, of two equally near ones that with an even pattern (as
// magnitudes), with saturation.
func (m *eight) nearest(numbers []float64, f float64) float64 {
	x := math.Min(math.Abs(f), m.most)
	i, _ := slices.BinarySearch(numbers, x)
	if i > 0 && numbers[i] != x {
		if down, up := x-numbers[i-1], numbers[i]-x; down < up || down == up && i%2 == 1 {
			i--
		}
	}
	return math.Copysign(numbers[i], f)
}

// TestEightDecode: every pattern has the number of the definition, and rounds to itself.
func TestEightDecode(t *testing.T) {
	for _, m := range eights {
		all, bulk := make([]uint8, 256), make([]float32, 257)
		for b := range all {
			all[b] = uint8(b)
		}
		bulk[256] = 7
		m.bulk(bulk, all)
		for _, b := range all {
			want := float32(m.value(b))
			if got := m.decode(b); !same32(got, want) || !same32(bulk[b], want) || m.isNaN(b) != (want != want) {
				t.Errorf("%s %#02x: %v, in bulk %v, want %v; NaN %v", m.name, b, got, bulk[b], want, m.isNaN(b))
			}
			if want == want && (m.encode(want) != b || m.encode64(float64(want)) != b) {
				t.Errorf("%s %#02x comes back as %#02x and %#02x", m.name, b, m.encode(want), m.encode64(float64(want)))
			}
		}
		if bulk[256] != 7 {
			t.Errorf("%s: wrote beyond len(src)", m.name)
		}
	}
}

// TestEightEncode: numbers, midpoints and their neighbours, random numbers of all sizes, infinities and NaN round as the definition says.
// So does every float32 whose low 13 bits are zeros, ones or a single bit.
func TestEightEncode(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for _, m := range eights {
		var numbers []float64
		for b := range 256 {
			if x := m.value(uint8(b)); x >= 0 && !math.Signbit(x) {
				numbers = append(numbers, x)
			}
		}
		check := func(f float64) {
			if f != f {
				if !m.isNaN(m.encode64(f)) || !m.isNaN(m.encode(float32(f))) {
					t.Fatalf("%s: NaN was lost", m.name)
				}
				return
			}
			if got, want := m.value(m.encode64(f)), m.nearest(numbers, f); got != want {
				t.Fatalf("%s: %v (float64) becomes %v, want %v", m.name, f, got, want)
			}
			f = float64(float32(f))
			if got, want := m.value(m.encode(float32(f))), m.nearest(numbers, f); got != want {
				t.Fatalf("%s: %v becomes %v, want %v", m.name, f, got, want)
			}
		}
		for i, x := range numbers {
			middle := x + 1
			if i+1 < len(numbers) {
				middle = (x + numbers[i+1]) / 2
			}
			for _, y := range []float64{x, middle} {
				for _, sign := range []float64{1, -1} {
					check(sign * y)
					for _, to := range []float64{0, 1000} {
						check(sign * math.Nextafter(y, to))
						check(sign * float64(math.Nextafter32(float32(y), float32(to))))
					}
				}
			}
		}
		for _, f := range []float64{0, math.Inf(1), math.Inf(-1), math.NaN(), -math.NaN(), math.MaxFloat64, math.MaxFloat32, math.SmallestNonzeroFloat32, -math.SmallestNonzeroFloat64} {
			check(f)
		}
		for range 200_000 {
			check(rng.NormFloat64() * math.Exp2(float64(rng.IntN(30)-18)))
			check(math.Float64frombits(rng.Uint64()))
		}
		for high := range uint32(1 << 19) {
			for _, low := range []uint32{0, 1, 0x1000, 0x1fff} {
				check(float64(math.Float32frombits(high<<13 | low)))
			}
		}
		if e := E4M3FromFloat32(float32(math.Copysign(0, -1))); e != 0x80 {
			t.Errorf("-0 becomes %#02x", e)
		}
	}
}
