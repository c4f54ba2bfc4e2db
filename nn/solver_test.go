package nn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// values returns a tensor of its own with the numbers of in, whose memory is transposed if in is a matrix and turned is set.
func values(t testing.TB, in opInput, dtype tensor.Dtype, turned bool) *tensor.Dense {
	in.x, in.shape = slices.Clone(in.x), in.shape.Clone()
	if !turned || len(in.shape) != 2 {
		return in.tensor(dtype, false)
	}
	in.x = transposed(in.x, in.shape[0], in.shape[1], in.shape[1])
	in.shape[0], in.shape[1] = in.shape[1], in.shape[0]
	v := in.tensor(dtype, false)
	if err := v.T(); err != nil {
		t.Fatal(err)
	}
	return v
}

// trainedPair is a weight with its gradient.
type trainedPair struct{ value, grad G.Value }

func (p trainedPair) Value() G.Value         { return p.value }
func (p trainedPair) Grad() (G.Value, error) { return p.grad, nil }

// solverCase is a solver, and the same steps in float64.
type solverCase struct {
	name   string
	solver func() G.Solver
	step   func(t int, w, g, m, v []float64)
	clip   float64
}

func solverCases(rng *rand.Rand) (cases []solverCase) {
	for i := range 4 {
		rate, decay, clip := 0.01+rng.Float64()/10, rng.Float64()/10, 0.0
		if i%2 == 0 {
			decay, clip = 0, 0.5+rng.Float64()
		}
		cases = append(cases, solverCase{
			name: fmt.Sprintf("SGD %d", i), clip: clip, solver: func() G.Solver { return &SGD{Rate: rate, Decay: decay, Clip: clip} },
			step: func(_ int, w, g, _, _ []float64) {
				for i := range w {
					w[i] -= rate * (g[i] + decay*w[i])
				}
			},
		})
		beta1, beta2, epsilon := rng.Float64(), 0.9+rng.Float64()/10, 1e-6
		cases = append(cases, solverCase{
			name: fmt.Sprintf("AdamW %d", i), clip: clip, solver: func() G.Solver {
				return &AdamW{Rate: rate, Beta1: beta1, Beta2: beta2, Epsilon: epsilon, Decay: decay, Clip: clip}
			},
			step: func(t int, w, g, m, v []float64) {
				for i := range w {
					m[i] = beta1*m[i] + (1-beta1)*g[i]
					v[i] = beta2*v[i] + (1-beta2)*g[i]*g[i]
					mean, variance := m[i]/(1-math.Pow(beta1, float64(t))), v[i]/(1-math.Pow(beta2, float64(t)))
					w[i] -= rate * (mean/(math.Sqrt(variance)+epsilon) + decay*w[i])
				}
			},
		})
	}
	return cases
}

// solverSizes are weights of one element, of several pieces, and of whatever lies between.
func solverSizes(rng *rand.Rand) [][]int { return [][]int{{1}, {3, 5}, {1 + rng.IntN(300)}, {2, 8200}} }

// TestSolvers: some steps with fresh gradients are those of the formulas in float64, and gradients are 0 afterwards, in any layout.
func TestSolvers(t *testing.T) {
	rng := seeded(t)
	for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for _, c := range solverCases(rng) {
			s := c.solver()
			var ws []opInput
			var model []G.ValueGrad
			var m, v [][]float64
			for i, shape := range solverSizes(rng) {
				w := randomInput(rng, fmt.Sprint(i), shape...)
				ws, m, v = append(ws, w), append(m, make([]float64, len(w.x))), append(v, make([]float64, len(w.x)))
				model = append(model, trainedPair{value: values(t, w, dtype, false)})
			}
			for step := 1; step <= 3; step++ {
				sum, gs := 0.0, make([][]float64, len(ws))
				for i := range ws {
					g := randomInput(rng, "g", ws[i].shape...)
					gs[i] = g.x
					for _, x := range g.x {
						sum += x * x
					}
					p := model[i].(trainedPair)
					p.grad = values(t, g, dtype, i == 1)
					model[i] = p
				}
				scale := 1.0
				if norm := math.Sqrt(sum); c.clip > 0 {
					scale = min(1, c.clip/norm)
				}
				if err := s.Step(model); err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				for i := range ws {
					for j := range gs[i] {
						gs[i][j] *= scale
					}
					c.step(step, ws[i].x, gs[i], m[i], v[i])
					unit := 1e-12
					if dtype == tensor.Float32 {
						unit = 1e-5
					}
					for j, got := range floatsOf(t, model[i].Value()) {
						if want := ws[i].x[j]; !(math.Abs(got-want) <= unit*(1+math.Abs(want))) {
							t.Fatalf("%s, %v, step %d: weight %d, element %d is %v, want %v", c.name, dtype, step, i, j, got, want)
						}
					}
					if g, _ := model[i].Grad(); slices.ContainsFunc(floatsOf(t, g), func(x float64) bool { return x != 0 }) {
						t.Fatalf("%s: the gradient of weight %d is not 0 after the step", c.name, i)
					}
				}
			}
		}
	}
}

// TestSolverOfGraph: in Gorgonia's own loop, with gradients that the machine adds, AdamW without decay is Gorgonia's Adam.
func TestSolverOfGraph(t *testing.T) {
	rng := seeded(t)
	x, w := randomInput(rng, "x", 6, 5), randomInput(rng, "w", 4, 5)
	train := func(s G.Solver) []float64 {
		g := G.NewGraph()
		in := func(o opInput) *G.Node {
			return G.NewTensor(g, tensor.Float64, 2, G.WithShape(o.shape...), G.WithName(o.name), G.WithValue(values(t, o, tensor.Float64, false)))
		}
		weights := in(w)
		y := G.Must(Linear(in(x), weights, nil))
		if _, err := G.Grad(G.Must(G.Sum(G.Must(G.HadamardProd(y, y)))), weights); err != nil {
			t.Fatal(err)
		}
		m := G.NewTapeMachine(g, G.BindDualValues(weights))
		defer m.Close()
		for range 5 {
			if err := errors.Join(m.RunAll(), s.Step(G.NodesToValueGrads(G.Nodes{weights}))); err != nil {
				t.Fatal(err)
			}
			m.Reset()
		}
		return floatsOf(t, weights.Value())
	}
	want := train(G.NewAdamSolver(G.WithLearnRate(0.01), G.WithBeta1(0.9), G.WithBeta2(0.99), G.WithEps(1e-8)))
	got := train(&AdamW{Rate: 0.01, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8})
	for i := range want {
		if !(math.Abs(got[i]-want[i]) < 1e-10) {
			t.Errorf("weight %d is %v, with Gorgonia's solver %v", i, got[i], want[i])
		}
	}
}

// Weights on a GPU get the bits of host memory, in each of some steps.
func TestGPUOpsSolvers(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	upload := func(v *tensor.Dense) *device.Tensor {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	for _, c := range solverCases(rng) {
		here, there := c.solver(), c.solver()
		var hs, ts []G.ValueGrad
		for i, shape := range solverSizes(rng) {
			w := randomInput(rng, fmt.Sprint(i), shape...)
			d := upload(values(t, randomInput(rng, "all", append([]int{3}, shape...)...), tensor.Float32, false))
			d, err := d.Rows(1, 2) // begins anywhere
			if err != nil {
				t.Fatal(err)
			}
			w.shape = append([]int{1}, shape...)
			if err := d.CopyFrom(w.tensor(tensor.Float32, false)); err != nil {
				t.Fatal(err)
			}
			hs, ts = append(hs, trainedPair{value: w.tensor(tensor.Float32, false)}), append(ts, trainedPair{value: d})
		}
		for step := range 3 {
			for i := range hs {
				h, d := hs[i].(trainedPair), ts[i].(trainedPair)
				g := values(t, randomInput(rng, "g", h.value.Shape()...), tensor.Float32, false)
				d.grad = upload(g)
				h.grad = g
				hs[i], ts[i] = h, d
			}
			if err := errors.Join(here.Step(hs), there.Step(ts)); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			for i := range hs {
				got, err := ts[i].Value().(*device.Tensor).Download()
				if err != nil {
					t.Fatal(err)
				}
				if g, w := got.Data().([]float32), hs[i].Value().Data().([]float32); !slices.Equal(g, w) {
					for j := range g {
						if g[j] != w[j] {
							t.Fatalf("%s, step %d: weight %d, element %d is %v on the GPU, %v in host memory", c.name, step, i, j, g[j], w[j])
						}
					}
				}
			}
		}
	}
}

// A step that fails changes neither weights nor moments: the steps after are those of a solver that has not failed.
func TestGPUOpsSolverFails(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	value := func(dtype tensor.Dtype, shape ...int) *tensor.Dense {
		return values(t, randomInput(rng, "", shape...), dtype, false)
	}
	upload := func(v *tensor.Dense) *device.Tensor {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	download := func(v G.Value) *tensor.Dense {
		if d, ok := v.(*device.Tensor); ok {
			h, err := d.Download()
			if err != nil {
				t.Fatal(err)
			}
			return h
		}
		return v.(*tensor.Dense).Clone().(*tensor.Dense)
	}
	freed := upload(value(tensor.Float32, 2, 3))
	if err := freed.Free(); err != nil {
		t.Fatal(err)
	}
	for _, on := range []bool{false, true} {
		place := func(v *tensor.Dense) G.Value {
			if on {
				return upload(v)
			}
			return v
		}
		other := func(v *tensor.Dense) G.Value {
			if on {
				return v
			}
			return upload(v)
		}
		pair := func(v, g G.Value) G.ValueGrad { return trainedPair{v, g} }
		f := func(shape ...int) G.Value { return place(value(tensor.Float32, shape...)) }
		bad := func(x float32) G.Value {
			v := value(tensor.Float32, 2, 3)
			v.Data().([]float32)[4] = x
			return place(v)
		}
		w, v := f(2, 3), f(7)
		good := func() []G.ValueGrad { return []G.ValueGrad{pair(w, f(2, 3)), pair(v, f(7))} }
		usual := AdamW{Rate: 0.1, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, Clip: 1}
		s := &AdamW{Rate: 0.1, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, Clip: 1}
		fails := []struct {
			what   string
			change func()
			model  []G.ValueGrad
			is     error
			says   string
		}{
			{"NaN", nil, []G.ValueGrad{pair(w, bad(float32(math.NaN()))), pair(v, f(7))}, la.ErrLength, "the norm of the gradient is NaN"},
			{"infinity", nil, []G.ValueGrad{pair(w, bad(float32(math.Inf(-1)))), pair(v, f(7))}, la.ErrLength, "the norm of the gradient is +Inf"},
			{"no weights", nil, nil, la.ErrGraph, "no weights"},
			{"no gradient", nil, []G.ValueGrad{pair(w, nil)}, la.ErrGraph, "weight 0 has no value or no gradient"},
			{"a nil node", nil, []G.ValueGrad{(*G.Node)(nil)}, la.ErrGraph, "weight 0 is nil"},
			{"shapes", nil, []G.ValueGrad{pair(w, f(3, 2)), pair(v, f(7))}, la.ErrShape, "weight 0 has shape (2, 3), and its gradient (3, 2)"},
			{"the same weight", nil, []G.ValueGrad{pair(w, f(2, 3)), pair(w, f(2, 3))}, la.ErrGraph, "weight 0 and weight 1 are in the same memory"},
			{"two places", nil, []G.ValueGrad{pair(w, other(value(tensor.Float32, 2, 3))), pair(v, f(7))}, la.ErrUnsupported, "must be in one place"},
			{"weights in two places", nil, []G.ValueGrad{pair(w, f(2, 3)), pair(other(value(tensor.Float32, 7)), other(value(tensor.Float32, 7)))}, la.ErrUnsupported, "must be in one place"},
			{"16 bits", nil, []G.ValueGrad{pair(place(stored(make([]float32, 6), la.Float16, 2, 3)), f(2, 3))}, la.ErrDType, "weight 0 is of Float16, want float32"},
			{"integers", nil, []G.ValueGrad{pair(w, place(tensor.New(tensor.WithShape(2, 3), tensor.Of(tensor.Int32))))}, la.ErrDType, "its gradient of int32"},
			{"a negative rate", func() { s.Rate = -1 }, good(), la.ErrOption, "Rate is -1"},
			{"decay that is NaN", func() { s.Decay = math.NaN() }, good(), la.ErrOption, "Decay is NaN"},
			{"an infinite norm", func() { s.Clip = math.Inf(1) }, good(), la.ErrOption, "Clip is +Inf"},
			{"a beta of 1", func() { s.Beta2 = 1 }, good(), la.ErrOption, "Beta1 is 0.9 and Beta2 1"},
			{"no epsilon", func() { s.Epsilon = 0 }, good(), la.ErrOption, "Epsilon is 0"},
		}
		if on {
			fails = append(fails, struct {
				what   string
				change func()
				model  []G.ValueGrad
				is     error
				says   string
			}{"a freed gradient", nil, []G.ValueGrad{pair(w, freed), pair(v, f(7))}, la.ErrClosed, "the gradient of weight 0 was freed"})
		} else {
			turned := value(tensor.Float32, 3, 2)
			if err := turned.T(); err != nil {
				t.Fatal(err)
			}
			fails = append(fails, struct {
				what   string
				change func()
				model  []G.ValueGrad
				is     error
				says   string
			}{"a transposed weight", nil, []G.ValueGrad{pair(turned, f(2, 3))}, la.ErrUnsupported, "not in row-major order"})
		}
		for round := range 2 { // before the first step, and after
			for _, c := range fails {
				before := []*tensor.Dense{download(w), download(v)}
				if c.change != nil {
					c.change()
				}
				err := s.Step(c.model)
				s.Rate, s.Beta1, s.Beta2, s.Epsilon, s.Decay, s.Clip = usual.Rate, usual.Beta1, usual.Beta2, usual.Epsilon, usual.Decay, usual.Clip
				// Afterwards, the weights themselves may be refused as others than before.
				if !errors.Is(err, c.is) && !(round > 0 && errors.Is(err, la.ErrState)) || round == 0 && !strings.Contains(fmt.Sprint(err), c.says) {
					t.Errorf("on a GPU %v, round %d, %s: %v, want %v, %s", on, round, c.what, err, c.is, c.says)
				}
				for i, x := range []G.Value{w, v} {
					if !slices.Equal(download(x).Data().([]float32), before[i].Data().([]float32)) {
						t.Errorf("on a GPU %v, %s: weight %d has changed", on, c.what, i)
					}
				}
			}
			// The next step is that of a solver that has not failed.
			model := good()
			fresh := &AdamW{Rate: 0.1, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, Clip: 1}
			copies := make([]G.ValueGrad, len(model))
			for i, p := range model {
				p := p.(trainedPair)
				copies[i] = pair(download(p.value), download(p.grad))
			}
			if round == 0 {
				if err := errors.Join(s.Step(model), fresh.Step(copies)); err != nil {
					t.Fatal(err)
				}
				for i := range model {
					if !slices.Equal(download(model[i].Value()).Data().([]float32), copies[i].Value().Data().([]float32)) {
						t.Errorf("on a GPU %v: the step after failures differs", on)
					}
				}
			}
		}
		if err := s.Step(good()[:1]); !errors.Is(err, la.ErrState) || !strings.Contains(fmt.Sprint(err), "the number of weights is 1, and was 2 in the first step") {
			t.Errorf("fewer weights: %v", err)
		}
		if err := s.Step([]G.ValueGrad{pair(v, f(7)), pair(w, f(2, 3))}); !errors.Is(err, la.ErrState) || !strings.Contains(fmt.Sprint(err), "in the first step") {
			t.Errorf("weights in another order: %v", err)
		}
		second := reflect.New(reflect.TypeFor[AdamW]())
		second.Elem().Set(reflect.ValueOf(s).Elem())
		if err := second.Interface().(*AdamW).Step(good()); !errors.Is(err, la.ErrState) || !strings.Contains(fmt.Sprint(err), "is a copy") {
			t.Errorf("a copied solver: %v", err)
		}
		if on {
			model := good()
			recording, err := gpu.Record(func() error { return s.Step(model) })
			if !errors.Is(err, la.ErrState) || recording != nil {
				t.Errorf("within a recording: %v", err)
			}
		}
	}
}

// Each call of the driver fails once in a step: then no weight has changed, or all have and the step has no error.
func TestGPUOpsSolverFaults(t *testing.T) {
	lib := system.Failing(t)
	gpu, rng := devicetest.Open(t), seeded(t)
	upload := func(v *tensor.Dense) *device.Tensor {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	s, here := &AdamW{Rate: 0.1, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8}, &AdamW{Rate: 0.1, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8}
	var hs, ts []G.ValueGrad
	for i, shape := range [][]int{{2, 3}, {7}} {
		w := randomInput(rng, fmt.Sprint(i), shape...)
		g := randomInput(rng, "g", shape...)
		hs = append(hs, trainedPair{value: w.tensor(tensor.Float32, false)})
		ts = append(ts, trainedPair{upload(w.tensor(tensor.Float32, false)), upload(g.tensor(tensor.Float32, false))})
	}
	failed, succeeded := 0, 0
	for call := int64(1); ; call++ {
		for i := range hs {
			g, err := ts[i].(trainedPair).grad.(*device.Tensor).Download()
			if err != nil {
				t.Fatal(err)
			}
			hs[i] = trainedPair{hs[i].Value(), g}
		}
		at := lib.State().Calls + call
		lib.State().FailAt, lib.State().FailWith = at, 2
		err := s.Step(ts)
		lib.State().FailAt = 0
		if err == nil {
			succeeded++
			if err := here.Step(hs); err != nil {
				t.Fatal(err)
			}
		} else if failed++; !errors.Is(err, la.ErrOutOfMemory) {
			t.Errorf("call %d, %s, failed: %v", call, lib.State().Failed(), err)
		}
		for i := range hs {
			got, err := ts[i].Value().(*device.Tensor).Download()
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got.Data().([]float32), hs[i].Value().Data().([]float32)) {
				t.Fatalf("behind call %d, %s, weight %d is %v, want %v", call, lib.State().Failed(), i, got, hs[i].Value())
			}
		}
		if err == nil && lib.State().Calls < at {
			break
		}
	}
	if failed < 5 || succeeded < 1 {
		t.Errorf("%d steps failed, %d did not", failed, succeeded)
	}
}

// Concurrent steps of one solver wait for each other.
func TestSolverConcurrent(t *testing.T) {
	rng := seeded(t)
	s, first := &SGD{Rate: 1}, randomInput(rng, "w", 100)
	w := values(t, first, tensor.Float64, false)
	var all sync.WaitGroup
	for range 4 {
		g := tensor.Ones(tensor.Float64, 100)
		all.Go(func() {
			if err := s.Step([]G.ValueGrad{trainedPair{w, g}}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for i, x := range floatsOf(t, w) {
		if !(math.Abs(x-(first.x[i]-4)) < 1e-12) {
			t.Errorf("element %d is %v, want %v - 4", i, x, first.x[i])
		}
	}
}
