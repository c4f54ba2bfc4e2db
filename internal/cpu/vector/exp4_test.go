package vector

import (
	"math"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// ulps returns how many units in the last place of want's float32 got is off.
func ulps(got float32, want float64) float64 {
	_, e := math.Frexp(want)
	return math.Abs(float64(got)-want) / math.Ldexp(1, max(e, -125)-24)
}

func TestExp4(t *testing.T) {
	rng := reftest.Rand(t)
	check := func(x float32) {
		got, want := exp4(x), math.Exp2(2*float64(x))
		if x < -63 {
			if got != 0 || math.Signbit(float64(got)) {
				t.Fatalf("4^%v: got %v, want 0", x, got)
			}
			return
		}
		if d := ulps(got, want); !(d <= 2) {
			t.Fatalf("4^%v: got %v, want %v: %v ulp", x, got, want, d)
		}
	}
	for n := 0; n <= 128; n++ { // halves and quarters, where the polynomial's pieces meet
		for _, x := range []float64{float64(-n) / 2, float64(-n)/2 - 0.25} {
			x := float32(x)
			check(x)
			check(math.Nextafter32(x, -200))
			if x < 0 {
				check(math.Nextafter32(x, 0))
			}
		}
	}
	for range 1_000_000 {
		check(-float32(rng.Float64() * 65))
		check(-math.Float32frombits(rng.Uint32N(math.Float32bits(65))))
	}
	for x, want := range map[float32]float32{0: 1, float32(math.Copysign(0, -1)): 1, -0.5: 0.5, -1: 0.25, -63: 0x1p-126,
		float32(math.Inf(-1)): 0, -math.MaxFloat32: 0} {
		if got := exp4(x); got != want {
			t.Errorf("4^%v: got %v, want %v", x, got, want)
		}
	}
	for _, bits := range []uint32{0x7fc00000, 0xffc00000, 0x7f800001, 0x7fc00001, 0x7fffffff, 0xffffffff, 0x7fc001ff} {
		if got := exp4(math.Float32frombits(bits)); got == got {
			t.Errorf("4^NaN (%#x): got %v", bits, got)
		}
	}
}

func TestMaximum(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		s    []float64
		want float64
	}{
		{nil, -inf}, {[]float64{-inf, -inf}, -inf}, {[]float64{-3, -1, -2}, -1}, {[]float64{1, 2, 3, 4, 5, 6, 7}, 7},
		{[]float64{9, 2, 3, 4, 5, 6, 7}, 9}, {[]float64{1, nan, 3}, nan}, {[]float64{nan, 1}, nan}, {[]float64{1, inf}, inf},
	} {
		if got := Maximum(c.s); got != c.want && !(got != got && c.want != c.want) {
			t.Errorf("maximum(%v) = %v", c.s, got)
		}
	}
}
