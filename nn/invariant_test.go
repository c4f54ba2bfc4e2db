package nn

import (
	"slices"
	"testing"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestBatchInvariance: with the option, rows of each kind of linear layer have the bits that they have among fewer rows.
func TestBatchInvariance(t *testing.T) {
	rng := seeded(t)
	const in, out, most = 128, 96, 260
	random := func(dt tensor.Dtype, shape ...int) *tensor.Dense {
		f := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range f {
			f[i] = float32(rng.NormFloat64())
		}
		x := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(f))
		if dt == tensor.Float32 {
			return x
		}
		y := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
		if err := la.Convert(y.Data(), f); err != nil {
			t.Fatal(err)
		}
		return y
	}
	x := random(tensor.Float32, most, in)
	for _, dt := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16} {
		weights := []*tensor.Dense{random(dt, out, in), random(dt, out, in)}
		heads := random(dt, 2*out, in/2)
		// run returns the results of the first rows.
		run := func(rows int, opts ...Option) (all [][]float32) {
			t.Helper()
			g := G.NewGraph()
			part := tensor.New(tensor.WithShape(rows, in), tensor.WithBacking(x.Data().([]float32)[:rows*in]))
			input := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, in), G.WithName("x"), G.WithValue(part))
			var ws []*G.Node
			for i, w := range append(slices.Clone(weights), heads) {
				ws = append(ws, G.NewMatrix(g, w.Dtype(), G.WithShape(w.Shape()...), G.WithName(string(rune('a'+i))), G.WithValue(w)))
			}
			ys, err := Linears(input, ws[:2], nil, opts...)
			if err != nil {
				t.Fatal(err)
			}
			ys = append(ys, G.Must(Linear(input, ws[0], nil, opts...)), G.Must(GatedLinear(input, ws[:2], nil, SiLU, opts...)), G.Must(HeadLinear(input, ws[2], 2, opts...)))
			values := make([]G.Value, len(ys))
			for i, y := range ys {
				G.Read(y, &values[i])
			}
			vm := G.NewTapeMachine(g)
			defer vm.Close()
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			for _, v := range values {
				all = append(all, slices.Clone(v.Data().([]float32)))
			}
			return all
		}
		opts := []Option{WithMixedPrecision(), WithBatchInvariance()}[rng.IntN(2):]
		many := run(most, opts...)
		for _, rows := range []int{1, 3, 40} {
			for i, y := range run(rows, opts...) {
				if !slices.Equal(y, many[i][:len(y)]) {
					t.Errorf("%v: layer %d among %d rows and among %d", dt, i, rows, most)
				}
			}
		}
	}
}
