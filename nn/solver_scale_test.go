package nn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Gradients that are accumulated are one gradient, of the sum over all rows, and Rows makes it that of the mean.
func TestSolverAccumulates(t *testing.T) {
	rng := seeded(t)
	for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		solvers := map[string]func(rows int, scale float64) trainer{
			"AdamW": func(rows int, scale float64) trainer {
				return &AdamW{Rate: 0.01, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-3, Clip: 0.5, Rows: rows, Scale: scale}
			},
			"SGD": func(rows int, scale float64) trainer { return &SGD{Rate: 0.01, Rows: rows, Scale: scale} },
		}
		for _, name := range trainerNames {
			solver := solvers[name]
			several, whole := solver(12, 1<<10), solver(0, 0)
			var a, b []G.ValueGrad
			for i, shape := range solverSizes(rng) {
				w := randomInput(rng, fmt.Sprint(i), shape...)
				a = append(a, trainedPair{value: values(t, w, dtype, false)})
				b = append(b, trainedPair{value: values(t, w, dtype, false)})
			}
			for step := range 3 {
				const runs = 3
				sums := make([]opInput, len(a))
				for run := range runs {
					for i := range a {
						g := randomInput(rng, "g", a[i].Value().Shape()...)
						if run == 0 {
							sums[i] = opInput{shape: g.shape, x: make([]float64, len(g.x))}
						}
						for k, x := range g.x {
							sums[i].x[k] += x / 12
							g.x[k] = x * (1 << 10)
						}
						a[i] = trainedPair{a[i].Value(), values(t, g, dtype, true)}
					}
					do := several.Accumulate
					if run == runs-1 {
						do = several.Step
					}
					if err := do(a); err != nil {
						t.Fatal(err)
					}
					for i := range a {
						if g, _ := a[i].Grad(); slices.ContainsFunc(floatsOf(t, g), func(x float64) bool { return x != 0 }) {
							t.Fatalf("%s: the gradient of weight %d is not 0 after run %d", name, i, run)
						}
					}
				}
				for i := range b {
					b[i] = trainedPair{b[i].Value(), values(t, sums[i], dtype, false)}
				}
				if err := whole.Step(b); err != nil {
					t.Fatal(err)
				}
				unit := 1e-12
				if dtype == tensor.Float32 {
					unit = 1e-5
				}
				for i := range a {
					got, want := floatsOf(t, a[i].Value()), floatsOf(t, b[i].Value())
					for k := range got {
						if !(math.Abs(got[k]-want[k]) <= unit*(1+math.Abs(want[k]))) {
							t.Fatalf("%s, %v, step %d: weight %d, element %d is %v, in one run %v", name, dtype, step, i, k, got[k], want[k])
						}
					}
				}
			}
		}
	}
}

// testGrows: a step whose gradient is not finite changes the scale alone, and good steps double the scale.
func testGrows(t *testing.T, place func(*tensor.Dense) G.Value) {
	rng := seeded(t)
	pairs := map[string][2]trainer{
		"AdamW": {&AdamW{Rate: 0.1, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, Scale: 4, Grow: 2}, &AdamW{Rate: 0.1, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8}},
		"SGD":   {&SGD{Rate: 0.1, Scale: 4, Grow: 2}, &SGD{Rate: 0.1}},
	}
	for _, name := range trainerNames {
		pair := pairs[name]
		first := [2]*tensor.Dense{values(t, randomInput(rng, "w", 2, 3), tensor.Float32, false), values(t, randomInput(rng, "v", 7), tensor.Float32, false)}
		var w [2][2]G.Value
		for i := range w {
			for j := range first {
				w[i][j] = place(first[j].Clone().(*tensor.Dense))
			}
		}
		scale, steps := 4.0, 0
		for i, c := range []struct {
			bad   float64 // 0: none
			early bool    // bad is in the first of two runs
			then  float64
		}{{math.Inf(1), false, 2}, {0, false, 2}, {0, false, 4}, {0, false, 4}, {math.NaN(), true, 2}, {math.Inf(-1), true, 1}, {0, false, 1}, {math.NaN(), false, 0.5}, {0, false, 0.5}, {0, false, 1}} {
			var model [2][]G.ValueGrad
			var sums [2][]float32
			for run := range 2 {
				model[0], model[1] = nil, nil
				for j := range first {
					g := values(t, randomInput(rng, "g", first[j].Shape()...), tensor.Float32, false)
					x := g.Data().([]float32)
					if run == 0 {
						sums[j] = make([]float32, len(x))
					}
					for k := range x {
						sums[j][k] += x[k]
						x[k] *= float32(scale)
					}
					if j == 1 && c.bad != 0 && (run == 0) == c.early {
						x[3] = float32(c.bad)
					}
					model[0] = append(model[0], trainedPair{w[0][j], place(g)})
					model[1] = append(model[1], trainedPair{w[1][j], place(tensor.New(tensor.WithShape(first[j].Shape()...), tensor.WithBacking(sums[j])))})
				}
				do := pair[0].Accumulate
				if run == 1 {
					do = pair[0].Step
				}
				if err := do(model[0]); err != nil {
					t.Fatal(err)
				}
			}
			if c.bad == 0 { // Scale is a power of 2: the bits are those without it
				steps++
				if err := pair[1].Step(model[1]); err != nil {
					t.Fatal(err)
				}
			}
			if scale = scaleOf(pair[0]); scale != c.then {
				t.Errorf("%s, step %d: the scale is %v, want %v", name, i, scale, c.then)
			}
			for j := range first {
				got, want := floatsOf(t, inHostMemory(t, w[0][j])), floatsOf(t, inHostMemory(t, w[1][j]))
				if !slices.Equal(got, want) {
					t.Errorf("%s, step %d: weight %d is %v, want %v", name, i, j, got, want)
				}
			}
		}
		if got := binary.LittleEndian.Uint64(checkpoint(t, pair[0], []G.ValueGrad{trainedPair{value: w[0][0]}, trainedPair{value: w[0][1]}})[24:]); got != uint64(steps) {
			t.Errorf("%s: %d steps are saved, want %d", name, got, steps)
		}
	}
	// A gradient that no scale makes finite, and the largest scale.
	s := &SGD{Grow: 1}
	w := place(values(t, randomInput(rng, "w", 3), tensor.Float32, false))
	step := func(x float32) error {
		g := tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{0, x, 0}))
		return s.Step([]G.ValueGrad{trainedPair{w, place(g)}})
	}
	for i := range 33 {
		err := step(float32(math.Inf(1)))
		if want := math.Ldexp(1, -min(i+1, 32)); s.Scale != want || (i < 32) != (err == nil) || i == 32 && !errors.Is(err, la.ErrLength) {
			t.Fatalf("step %d: the scale is %v, want %v; %v", i, s.Scale, want, err)
		}
	}
	for range 70 {
		if err := step(0); err != nil {
			t.Fatal(err)
		}
	}
	if s.Scale != 1<<32 {
		t.Errorf("the scale grows to %v", s.Scale)
	}
	if s.Scale = 1 << 40; step(0) != nil || s.Scale != 1<<40 {
		t.Errorf("a larger scale becomes %v", s.Scale)
	}
}

func TestSolverGrows(t *testing.T) {
	testGrows(t, func(v *tensor.Dense) G.Value { return v })
}

func TestGPUOpsSolverGrows(t *testing.T) { testGrows(t, uploads(t, devicetest.Open(t))) }

// testHalf: a model with 16 bits, whose gradients are too large for float16 at first, learns.
func testHalf(t *testing.T, gpu *device.GPU) {
	rng := seeded(t)
	seed := rng.Uint64()
	m := newTrainee(t, rng, gpu, tensor.Float32, true)
	s := &AdamW{Rate: 0.03, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, Rows: 8, Scale: 1 << 26, Grow: 50}
	skipped, from := 0, m.bits(t)
	first, last := 0.0, 0.0
	steps, part := 60, 0.5
	if gpu != nil {
		steps, part = 22, 0.9
	}
	for i := range steps {
		scale := s.Scale
		loss := m.steps(t, rand.New(rand.NewPCG(seed, 1)), s, 1) // the same batch
		if i == 0 {
			first = loss
		}
		if s.Scale < scale {
			skipped++
			if to := m.bits(t); i < skipped && !slices.Equal(to, from) {
				t.Fatalf("step %d, which is skipped, changes weights", i)
			}
		}
		last = loss
	}
	t.Logf("a loss of %.3f is %.3f after %d skipped steps, the scale %v", first, last, skipped, s.Scale)
	if skipped < 5 || s.Scale > 1<<21 || !(last < first*part) {
		t.Errorf("a loss of %v is %v after %d skipped steps, the scale %v", first, last, skipped, s.Scale)
	}
}

func TestSolverHalf(t *testing.T) { testHalf(t, nil) }

func TestGPUOpsSolverHalf(t *testing.T) { testHalf(t, devicetest.Open(t)) }
