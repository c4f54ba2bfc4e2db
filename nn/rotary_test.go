package nn

import (
	"math"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestRotaryLast: the last elements of heads are rotated as heads of their own, and the first ones stay; rotated back, all are as
// before.
func TestRotaryLast(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 20 {
		rows, heads, first, n := 1+rng.IntN(4), 1+rng.IntN(3), rng.IntN(7), 2+2*rng.IntN(5)
		config := rope.Config{HeadDim: first + n, Dim: n, Last: true, Interleaved: i%2 == 0}
		shape := tensor.Shape{rows, heads, config.HeadDim}
		data := make([]float64, shape.TotalSize())
		for j := range data {
			data[j] = rng.NormFloat64()
		}
		positions := make([]int, rows)
		for j := range positions {
			positions[j] = rng.IntN(5000)
		}
		part := func(x []float64, from, to int) (y []float64) {
			for at := 0; at < len(x); at += config.HeadDim {
				y = append(y, x[at+from:at+to]...)
			}
			return y
		}
		run := func(x []float64, c rope.Config) []float64 {
			g := G.NewGraph()
			shape := tensor.Shape{rows, heads, c.HeadDim}
			in := G.NewTensor(g, tensor.Float64, 3, G.WithShape(shape...), G.WithName("x"), G.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))))
			at := G.NewVector(g, tensor.Int, G.WithShape(rows), G.WithName("positions"), G.WithValue(tensor.New(tensor.WithShape(rows), tensor.WithBacking(positions))))
			y, err := Rotary(in, at, c)
			if err != nil {
				t.Fatal(err)
			}
			vm := G.NewTapeMachine(g)
			defer vm.Close()
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			return y.Value().Data().([]float64)
		}
		y := run(data, config)
		want := run(part(data, first, config.HeadDim), rope.Config{HeadDim: n, Interleaved: config.Interleaved})
		if !slices.Equal(part(y, first, config.HeadDim), want) || !slices.Equal(part(y, 0, first), part(data, 0, first)) {
			t.Fatalf("%+v of %v is %v", config, data, y)
		}
		w, m, err := config.Frequencies()
		if err != nil {
			t.Fatal(err)
		}
		r := rotary{rank: 3, dtype: tensor.Float64, positions: tensor.Int, config: config, how: attn.RotaryOf(config.HeadDim, w, m, config.Interleaved, true)}
		back, err := r.gradient(0, []G.Value{nil, tensor.New(tensor.WithShape(rows), tensor.WithBacking(positions))}, tensor.New(tensor.WithShape(shape...), tensor.WithBacking(y)))
		if err != nil {
			t.Fatal(err)
		}
		for j, x := range back.Data().([]float64) {
			if math.Abs(x-data[j]) > 1e-12 {
				t.Fatalf("element %d is %v, was %v", j, x, data[j])
			}
		}
	}
}
