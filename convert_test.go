package leanattention_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestConvert: numbers of every type are rounded to the nearest of every other, at any place in memory, and a finite number that
// the type does not have is an error that names it.
func TestConvert(t *testing.T) {
	rng := reftest.Rand(t)
	for range reftest.Cases(t, 300, 3000) {
		n, off := rng.IntN(70)+rng.IntN(2)*rng.IntN(900), rng.IntN(5)
		wide := make([]float32, off+n)[off:]
		for i := range wide {
			wide[i] = float32(math.Ldexp(rng.NormFloat64(), rng.IntN(40)-26))
			if rng.IntN(20) == 0 {
				wide[i] = float32(math.Inf(1 - 2*rng.IntN(2)))
			} else if rng.IntN(20) == 0 {
				wide[i] = float32(math.NaN())
			}
		}
		halves, brains := make([]la.F16, off+n)[off:], make([]la.BF16, off+n)[off:]
		if err := errors.Join(la.Convert(halves, wide), la.Convert(brains, wide)); err != nil {
			t.Fatal(err)
		}
		for i, x := range wide {
			if want := half.FromFloat32(x); halves[i] != want && x == x {
				t.Fatalf("%v as float16 is %v, want %v", x, halves[i], want)
			}
			if want := half.BFromFloat32(x); brains[i] != want && x == x {
				t.Fatalf("%v as bfloat16 is %v, want %v", x, brains[i], want)
			}
			if x != x && (!math.IsNaN(float64(halves[i].Float32())) || !math.IsNaN(float64(brains[i].Float32()))) {
				t.Fatalf("NaN is %v, %v", halves[i], brains[i])
			}
		}
		back := make([]float32, n)
		if err := la.Convert(back, halves); err != nil {
			t.Fatal(err)
		}
		for i, x := range halves {
			if back[i] != x.Float32() && back[i] == back[i] {
				t.Fatalf("%v is %v", x, back[i])
			}
		}
		if n == 0 {
			continue
		}
		at := rng.IntN(n)
		for _, c := range []struct {
			dst, src any
			text     string
		}{
			{halves, wide, "65520"}, {brains, wide, "3.4"}, {halves, brains, "65536"},
		} {
			wide[at] = 65520
			if c.text == "3.4" {
				wide[at] = math.MaxFloat32
			}
			brains[at] = half.BFromFloat32(65520)
			if err := la.Convert(c.dst, c.src); !errors.Is(err, la.ErrDType) || !strings.Contains(err.Error(), c.text) {
				t.Fatalf("%T of %T: %v", c.dst, c.src, err)
			}
		}
	}
	for _, x := range []struct {
		dst, src any
		kind     error
	}{{[]float32{1}, []float32{1, 2}, la.ErrShape}, {[]float64{1}, []float32{1}, la.ErrDType}, {[]float32{1}, nil, la.ErrDType}, {nil, []la.F16{1}, la.ErrDType}} {
		if err := la.Convert(x.dst, x.src); !errors.Is(err, x.kind) {
			t.Errorf("%T of %T: %v", x.dst, x.src, err)
		}
	}
}
