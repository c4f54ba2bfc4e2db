package vector

import (
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestErf: within 2.5 ulp of the float64 one, over the range where float32 has values other than 1, next to the
// place where its two forms meet, and beyond.
func TestErf(t *testing.T) {
	rng := reftest.Rand(t)
	worst := 0.0
	for i := range 1_000_000 {
		x := float32(rng.Float64()*20 - 10)
		switch i % 4 {
		case 1:
			x = float32(rng.NormFloat64())
		case 2:
			x = float32(math.Ldexp(rng.Float64(), -rng.IntN(126)))
		case 3:
			x = float32(erfNear + (rng.Float64()-0.5)/100)
		}
		got, want := float64(erf32(x)), math.Erf(float64(x))
		ulp := float64(math.Nextafter32(float32(math.Abs(want)), 2)) - math.Abs(float64(float32(want)))
		off := math.Abs(got-want) / ulp
		if worst = max(worst, off); !(off <= 2.5) {
			t.Fatalf("erf(%v) is %v, want %v, off by %.2f ulp", x, got, want, off)
		}
	}
	t.Logf("at most %.2f ulp off", worst)
	inf := float32(math.Inf(1))
	for x, want := range map[float32]float32{0: 0, inf: 1, -inf: -1, math.MaxFloat32: 1, -1e20: -1, math.SmallestNonzeroFloat32: math.SmallestNonzeroFloat32} {
		if got := erf32(x); got != want {
			t.Errorf("erf(%v) is %v, want %v", x, got, want)
		}
	}
	if got := erf32(float32(math.NaN())); got == got {
		t.Errorf("erf(NaN) is %v", got)
	}
}

// TestActivate: of each tier in use, for all lengths around a vector's, in guarded memory.
func TestActivate(t *testing.T) {
	rng := reftest.Rand(t)
	for round := range 40 {
		for n := range 70 {
			mem, free := cputest.Guarded(t, 4*n)
			x := unsafe.Slice((*float32)(mem), n)
			for i := range x {
				x[i] = float32(rng.Float64()*20 - 10)
				switch rng.IntN(16) {
				case 0:
					x[i] = []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), 0, 1e30, -1e30, math.MaxFloat32, 1e-40}[rng.IntN(8)]
				case 1:
					x[i] = float32(math.Sqrt2*erfNear + (rng.Float64()-0.5)/100)
				}
			}
			f := attn.Activation(round % attn.Activations)
			was := append([]float32(nil), x...)
			Activate(f, x)
			wide := make([]float64, n)
			for i, v := range was {
				wide[i] = float64(v)
			}
			Activate(f, wide)
			for i, v := range was {
				want := reftest.Activated(f, float64(v))
				for at, got := range [...]float64{float64(x[i]), wide[i]} {
					unit := [...]float64{0x1p-22, 0x1p-50}[at]
					off := math.Abs(got - want)
					if math.IsInf(want, 0) && got == want {
						off = 0
					}
					if math.IsNaN(want) != math.IsNaN(got) || off > unit*math.Abs(float64(v)) {
						t.Fatalf("%v, %v of %v, number %d of %d, in %d bytes: %v, want %v", cpu.InUse(), f, v, i, n, 4+4*at, got, want)
					}
				}
			}
			// A number's bits do not depend on where it stands.
			for i := range was {
				alone := was[i : i+1]
				Activate(f, alone)
				if math.Float32bits(alone[0]) != math.Float32bits(x[i]) {
					t.Fatalf("%v, %v: number %d of %d is %v, alone %v", cpu.InUse(), f, i, n, x[i], alone[0])
				}
			}
			free()
		}
	}
}

// BenchmarkActivate is a row of OPT-125m's feed-forward network.
func BenchmarkActivate(b *testing.B) {
	x, from := make([]float32, 3072), make([]float32, 3072)
	for i := range from {
		from[i] = float32(i%13) - 6
	}
	for f := attn.ReLU; f < attn.Activations; f++ {
		b.Run(f.String(), func(b *testing.B) {
			for b.Loop() {
				copy(x, from)
				Activate(f, x)
			}
		})
	}
}
