package nn

import (
	"errors"
	"math"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func TestArgMax(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	rows := [][]float32{{1, 3, 2}, {3, 3, 3}, {-inf, -7, -inf}, {-inf, -inf, -inf}, {1, nan, 2}, {inf, 1, 2}, {-1, -0.5, -0.5}}
	want := []int32{1, 0, 1, -1, -1, -1, 1}
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(len(rows), 3), G.WithName("x"), G.WithValue(tensor.New(tensor.WithShape(len(rows), 3), tensor.WithBacking(slices.Concat(rows...)))))
	y, err := ArgMax(x)
	if err != nil {
		t.Fatal(err)
	}
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	if got := y.Value().Data().([]int32); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if _, err := ArgMax(nil); !errors.Is(err, la.ErrGraph) {
		t.Errorf("nil: %v", err)
	}
	if _, err := ArgMax(G.NewMatrix(g, tensor.Float64, G.WithShape(2, 2), G.WithName("wide"))); !errors.Is(err, la.ErrDType) {
		t.Errorf("float64: %v", err)
	}
	if _, err := ArgMax(G.NewVector(g, tensor.Float32, G.WithShape(2), G.WithName("vector"))); !errors.Is(err, la.ErrShape) {
		t.Errorf("a vector: %v", err)
	}
}

// Linears is its layers one by one, and the norm is a LayerNorm before them.
func TestLinears(t *testing.T) {
	g := G.NewGraph()
	in := func(name string, shape ...int) *G.Node {
		x := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(tensor.Random(tensor.Float32, tensor.Shape(shape).TotalSize())))
		return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(x))
	}
	x, gamma, beta := in("x", 3, 8), in("gamma", 8), in("beta", 8)
	ws := []*G.Node{in("w0", 5, 8), in("w1", 7, 8), in("w2", 1, 8)}
	bs := []*G.Node{in("b0", 5), in("b1", 7), in("b2", 1)}
	norm, err := LayerNorm(x, gamma, beta, 1e-5)
	if err != nil {
		t.Fatal(err)
	}
	ys, err := Linears(x, ws, bs, WithNorm(gamma, beta, 1e-5), WithActivation(ReLU))
	if err != nil {
		t.Fatal(err)
	}
	var want []*G.Node
	for i := range ws {
		y, err := Linear(norm, ws[i], bs[i], WithActivation(ReLU))
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, y)
	}
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	for i, y := range ys {
		if !slices.Equal(y.Shape(), want[i].Shape()) || !slices.Equal(y.Value().Data().([]float32), want[i].Value().Data().([]float32)) {
			t.Errorf("layer %d: %v, want %v", i, y.Value(), want[i].Value())
		}
	}
	other := G.NewVector(G.NewGraph(), tensor.Float32, G.WithShape(8), G.WithName("elsewhere"))
	for name, c := range map[string]struct {
		ws, bs []*G.Node
		opts   []Option
		want   error
	}{
		"none":             {nil, nil, nil, la.ErrGraph},
		"four":             {[]*G.Node{ws[0], ws[1], ws[2], ws[0]}, nil, nil, la.ErrUnsupported},
		"a nil layer":      {[]*G.Node{ws[0], nil}, nil, nil, la.ErrGraph},
		"a bias too few":   {ws, bs[:2], nil, la.ErrShape},
		"a nil bias":       {ws, []*G.Node{bs[0], nil, bs[2]}, nil, la.ErrGraph},
		"a wrong bias":     {ws[:2], []*G.Node{bs[0], bs[0]}, nil, la.ErrShape},
		"a residual":       {ws, bs, []Option{WithResidual(want[0])}, la.ErrUnsupported},
		"eps":              {ws, bs, []Option{WithNorm(nil, nil, math.NaN())}, la.ErrOption},
		"gamma's size":     {ws, bs, []Option{WithNorm(bs[0], nil, 0)}, la.ErrShape},
		"another graph's":  {ws, bs, []Option{WithNorm(nil, other, 0)}, la.ErrGraph},
		"w of other width": {[]*G.Node{ws[0], in("w of 9", 5, 9)}, nil, nil, la.ErrShape},
	} {
		if _, err := Linears(x, c.ws, c.bs, c.opts...); err == nil {
			t.Errorf("%s: no error", name)
		} else if c.want != la.ErrUnsupported && c.want != nil && !errors.Is(err, c.want) && name != "a residual" {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}
