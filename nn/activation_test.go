package nn

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// geluGraph is a graph with one GELU of x.
func geluGraph[F float](t *testing.T, x []F, shape ...int) (g *G.ExprGraph, in, y *G.Node) {
	t.Helper()
	g = G.NewGraph()
	v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	in = G.NewTensor(g, v.Dtype(), len(shape), G.WithShape(shape...), G.WithName("x"), G.WithValue(v))
	y, err := Activate(in, GELU)
	if err != nil {
		t.Fatal(err)
	}
	if !y.Shape().Eq(tensor.Shape(shape)) || y.Dtype() != v.Dtype() {
		t.Fatalf("node of shape %v and type %v", y.Shape(), y.Dtype())
	}
	return g, in, y
}

func testGELU[F float](t *testing.T, unit float64) {
	rng := seeded(t)
	for _, shape := range [][]int{{1}, {7}, {3, 5}, {2, 3, 4}, {1, 1, 2, 9}, {5, 20000}} {
		x := make([]F, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = F(rng.Float64()*20 - 10)
		}
		x[len(x)/2] = F(math.NaN())
		g, _, y := geluGraph(t, x, shape...)
		var got G.Value
		G.Read(y, &got)
		vm := G.NewTapeMachine(g)
		for range 2 {
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			for i, v := range got.Data().([]F) {
				want := reftest.GELU(float64(x[i]))
				if math.IsNaN(want) != (v != v) || math.Abs(float64(v)-want) > unit*math.Abs(float64(x[i])) {
					t.Fatalf("shape %v: GELU of %v is %v, want %v", shape, x[i], v, want)
				}
			}
			vm.Reset()
			for i := range x {
				x[i] = F(rng.NormFloat64() * 2)
			}
		}
		vm.Close()
	}
}

func TestGELU(t *testing.T) {
	testGELU[float32](t, 0x1p-22)
	testGELU[float64](t, 0x1p-50)
}

// TestGELUGradient: both machines' gradients are the derivative, and central differences agree with it.
func TestGELUGradient(t *testing.T) {
	rng := seeded(t)
	for _, shape := range [][]int{{6}, {3, 5}, {2, 3, 2}} {
		n := tensor.Shape(shape).TotalSize()
		x, w := make([]float64, n), make([]float64, n)
		fill(rng, x, 0, 2)
		fill(rng, w, 0, 1)
		check := func(machine string, got []float64) {
			t.Helper()
			for i, v := range got {
				const h = 1e-6
				slope := (reftest.GELU(x[i]+h) - reftest.GELU(x[i]-h)) / (2 * h)
				if want := w[i] * reftest.GELUSlope(x[i]); math.Abs(v-want) > 1e-14 || math.Abs(v-w[i]*slope) > 1e-8 {
					t.Fatalf("%s machine, shape %v: the gradient at %v is %v, want %v, by differences %v", machine, shape, x[i], v, want, w[i]*slope)
				}
			}
		}
		cost := func(y *G.Node) *G.Node {
			v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(w))
			return G.Must(G.Sum(G.Must(G.HadamardProd(y, G.NewTensor(y.Graph(), G.Float64, len(shape), G.WithShape(shape...), G.WithName("w"), G.WithValue(v))))))
		}
		g, in, y := geluGraph(t, x, shape...)
		grads, err := G.Grad(cost(y), in)
		if err != nil {
			t.Fatal(err)
		}
		var d G.Value
		G.Read(grads[0], &d)
		vm := G.NewTapeMachine(g)
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		check("tape", d.Data().([]float64))
		vm.Close()

		g, in, y = geluGraph(t, x, shape...)
		cost(y)
		lisp := G.NewLispMachine(g)
		if err := lisp.RunAll(); err != nil {
			t.Fatal(err)
		}
		v, err := in.Grad()
		if err != nil {
			t.Fatal(err)
		}
		check("lisp", v.Data().([]float64))
		lisp.Close()
	}
}

// TestGELUGradientEnds: in float32, and where x is large, infinite or NaN.
func TestGELUGradientEnds(t *testing.T) {
	x := []float32{-1e30, -40, 0, 40, 1e30, float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())}
	dx, ones := make([]float32, len(x)), []float32{1, 1, 1, 1, 1, 1, 1, 1}
	for i, v := range x {
		dx[i] = ones[i] * float32(slope(attn.GELU, float64(v)))
	}
	for i, want := range []float32{0, 0, 0.5, 1, 1, 1, 0} {
		if dx[i] != want {
			t.Errorf("the gradient at %v is %v, want %v", x[i], dx[i], want)
		}
	}
	if last := dx[len(dx)-1]; last == last {
		t.Errorf("the gradient at NaN is %v", last)
	}
}

func TestGELUWrongUse(t *testing.T) {
	g := G.NewGraph()
	for name, c := range map[string]struct {
		x    *G.Node
		want error
	}{
		"nil":    {nil, la.ErrGraph},
		"scalar": {G.NewScalar(g, G.Float32, G.WithName("s")), la.ErrShape},
		"type":   {G.NewVector(g, G.Int, G.WithShape(3), G.WithName("i")), la.ErrDType},
		"half":   {G.NewVector(g, la.Float16, G.WithShape(3), G.WithName("h")), la.ErrDType},
	} {
		if y, err := Activate(c.x, GELU); !errors.Is(err, c.want) || y != nil {
			t.Errorf("%s: %v, error %v, want %v", name, y, err, c.want)
		}
	}
	op := opOf(activation{rank: 1, dtype: tensor.Float32, f: attn.GELU})
	for name, in := range map[string][]G.Value{
		"none": nil,
		"rank": {tensor.New(tensor.WithShape(2, 2), tensor.Of(tensor.Float32))},
		"type": {tensor.New(tensor.WithShape(2), tensor.Of(tensor.Int))},
	} {
		if y, err := op.Do(in...); err == nil {
			t.Errorf("%s: %v", name, y)
		}
	}
	_, in, y := geluGraph(t, make([]float64, 3), 3)
	grads, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(y)))), in)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = G.Grad(G.Must(G.Sum(grads[0])), in); err == nil || !strings.Contains(err.Error(), "second derivative") {
		t.Errorf("second derivative: %v", err)
	}
}

func ExampleGELU() {
	g := G.NewGraph()
	x := G.NewVector(g, G.Float32, G.WithName("x"), G.WithShape(4),
		G.WithValue(tensor.New(tensor.WithShape(4), tensor.WithBacking([]float32{-3, -1, 0, 2}))))
	y, err := Activate(x, GELU)
	if err != nil {
		panic(err)
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		panic(err)
	}
	fmt.Printf("%.4f\n", y.Value().Data())
	// Output: [-0.0040 -0.1587 0.0000 1.9545]
}
