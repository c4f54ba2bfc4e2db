package nn

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// residualGraph is two residual connections around layers, whose gradients are of x, h, which is no input, and three weights.
func residualGraph(t *testing.T, inputs []opInput, dtype tensor.Dtype, place func(*tensor.Dense) G.Value) (y, dy *G.Node, wrt G.Nodes) {
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	g := G.NewGraph()
	var in G.Nodes
	for i := range inputs {
		v := values(t, inputs[i], dtype, false)
		in = append(in, G.NewTensor(g, dtype, v.Dims(), G.WithShape(v.Shape()...), G.WithName(inputs[i].name), G.WithValue(place(v))))
	}
	x, w0, w1, w2 := in[0], in[1], in[2], in[3]
	h := must(Linear(x, w0, nil, WithResidual(x)))
	both, err := Linears(h, []*G.Node{w1, w2}, nil)
	if err != nil {
		t.Fatal(err)
	}
	y = must(Add(must(Mul(both[0], both[1])), h))
	y = must(Add(y, must(Linear(h, w1, nil)))) // w1 has two readers
	return y, in[4], G.Nodes{x, h, w0, w1, w2}
}

// gradientsOfRun runs a graph and returns values of some nodes.
func gradientsOfRun(t *testing.T, nodes G.Nodes) []G.Value {
	t.Helper()
	values := make([]G.Value, len(nodes))
	for i, n := range nodes {
		G.Read(n, &values[i])
	}
	m := G.NewTapeMachine(nodes[0].Graph())
	defer m.Close()
	if err := la.Cause(m.RunAll()); err != nil {
		t.Fatal(err)
	}
	return values
}

func residualInputs(t *testing.T) []opInput {
	rng := seeded(t)
	const rows, width = 5, 12
	return []opInput{randomInput(rng, "x", rows, width), randomInput(rng, "w0", width, width), randomInput(rng, "w1", width, width), randomInput(rng, "w2", width, width), randomInput(rng, "dy", rows, width)}
}

// TestBackpropagate: gradients are those of Gorgonia's Backpropagate, of nn's ops and of Gorgonia's own, and inputs have them.
func TestBackpropagate(t *testing.T) {
	inputs := residualInputs(t)
	for _, graph := range []func() (y, dy *G.Node, wrt G.Nodes){
		func() (y, dy *G.Node, wrt G.Nodes) {
			return residualGraph(t, inputs, tensor.Float64, func(v *tensor.Dense) G.Value { return v })
		},
		func() (y, dy *G.Node, wrt G.Nodes) { // a scalar, with gradients of a scalar that are added
			g := G.NewGraph()
			x := G.NewMatrix(g, tensor.Float64, G.WithShape(5, 12), G.WithName("x"), G.WithValue(values(t, inputs[0], tensor.Float64, false)))
			w := G.NewMatrix(g, tensor.Float64, G.WithShape(12, 12), G.WithName("w"), G.WithValue(values(t, inputs[1], tensor.Float64, false)))
			h := G.Must(G.Mul(x, w))
			sum := G.Must(G.Sum(G.Must(G.HadamardProd(h, G.Must(G.Tanh(h))))))
			y = G.Must(G.Mul(sum, sum))
			return y, G.NewScalar(g, tensor.Float64, G.WithName("dy"), G.WithValue(2.0)), G.Nodes{x, w}
		},
	} {
		y, dy, wrt := graph()
		own, err := G.Backpropagate(G.Nodes{y}, G.Nodes{dy}, wrt)
		if err != nil {
			t.Fatal(err)
		}
		want := gradientsOfRun(t, own)
		y, dy, wrt = graph()
		grads, err := Backpropagate(G.Nodes{y}, G.Nodes{dy}, wrt)
		if err != nil {
			t.Fatal(err)
		}
		c := opCase{name: "gradients", size: 1000}
		for i, got := range gradientsOfRun(t, grads) {
			c.compare(t, fmt.Sprint("gradient ", i), floatsOf(t, got), floatsOf(t, want[i]), 1e-15)
			if wrt[i].Op() != nil {
				continue
			}
			if v, err := wrt[i].Grad(); err != nil || v == nil {
				t.Errorf("the gradient of input %d: %v, %v", i, v, err)
			}
		}
	}
}

// Gradients of nodes with several readers are added on a GPU.
func TestGPUOpsBackpropagate(t *testing.T) {
	gpu, inputs := devicetest.Open(t), residualInputs(t)
	run := func(dtype tensor.Dtype, place func(*tensor.Dense) G.Value) []G.Value {
		y, dy, wrt := residualGraph(t, inputs, dtype, place)
		grads, err := Backpropagate(G.Nodes{y}, G.Nodes{dy}, wrt)
		if err != nil {
			t.Fatal(err)
		}
		return gradientsOfRun(t, grads)
	}
	want := run(tensor.Float64, func(v *tensor.Dense) G.Value { return v })
	c := opCase{name: "gradients", size: 1000}
	for i, got := range run(tensor.Float32, uploads(t, gpu)) {
		c.compare(t, fmt.Sprint("gradient ", i), floatsOf(t, downloaded(t, got)), floatsOf(t, want[i]), 4e-6)
	}
}

func TestBackpropagateRefuses(t *testing.T) {
	inputs := residualInputs(t)
	graph := func() (y, dy *G.Node, wrt G.Nodes) {
		return residualGraph(t, inputs, tensor.Float32, func(v *tensor.Dense) G.Value { return v })
	}
	for _, c := range []struct {
		what string
		call func(y, dy *G.Node, wrt G.Nodes) (G.Nodes, error)
		is   error
		says string
	}{
		{"no outputs", func(_, _ *G.Node, wrt G.Nodes) (G.Nodes, error) { return Backpropagate(nil, nil, wrt) }, la.ErrGraph, "0 outputs, 0 gradients"},
		{"no gradient", func(y, _ *G.Node, wrt G.Nodes) (G.Nodes, error) { return Backpropagate(G.Nodes{y}, nil, wrt) }, la.ErrGraph, "0 gradients"},
		{"nothing to differentiate by", func(y, dy *G.Node, _ G.Nodes) (G.Nodes, error) {
			return Backpropagate(G.Nodes{y}, G.Nodes{dy}, nil)
		}, la.ErrGraph, "0 nodes of wrt"},
		{"a nil node", func(y, dy *G.Node, _ G.Nodes) (G.Nodes, error) {
			return Backpropagate(G.Nodes{y}, G.Nodes{dy}, G.Nodes{nil})
		}, la.ErrGraph, "is no node of the graph"},
		{"another graph", func(y, _ *G.Node, wrt G.Nodes) (G.Nodes, error) {
			_, dy, _ := graph()
			return Backpropagate(G.Nodes{y}, G.Nodes{dy}, wrt)
		}, la.ErrGraph, "is no node of the graph"},
		{"a shape", func(y, _ *G.Node, wrt G.Nodes) (G.Nodes, error) {
			return Backpropagate(G.Nodes{y}, G.Nodes{wrt[2]}, wrt)
		}, la.ErrShape, "the gradient of output 0 has shape (12, 12), want (5, 12)"},
		{"a type", func(y, _ *G.Node, wrt G.Nodes) (G.Nodes, error) {
			return Backpropagate(G.Nodes{y}, G.Nodes{G.NewMatrix(y.Graph(), tensor.Float64, G.WithShape(5, 12), G.WithName("64"))}, wrt)
		}, la.ErrDType, "the gradient of output 0 is of float64"},
		{"a node that does not matter", func(y, dy *G.Node, wrt G.Nodes) (G.Nodes, error) {
			return Backpropagate(G.Nodes{y}, G.Nodes{dy}, append(wrt, G.NewMatrix(y.Graph(), tensor.Float32, G.WithShape(2, 2), G.WithName("unused"))))
		}, la.ErrGraph, "no output depends on unused"},
		{"one node twice", func(y, dy *G.Node, wrt G.Nodes) (G.Nodes, error) {
			return Backpropagate(G.Nodes{y}, G.Nodes{dy}, append(wrt, wrt[0]))
		}, la.ErrGraph, "is twice in wrt"},
		{"twice", func(y, dy *G.Node, wrt G.Nodes) (G.Nodes, error) {
			if _, err := Backpropagate(G.Nodes{y}, G.Nodes{dy}, wrt); err != nil {
				return nil, err
			}
			return Backpropagate(G.Nodes{y}, G.Nodes{dy}, wrt)
		}, la.ErrGraph, "has a gradient already"},
		{"a copy without a gradient", func(y, dy *G.Node, wrt G.Nodes) (G.Nodes, error) {
			there, err := device.ToHost(y)
			if err != nil {
				return nil, err
			}
			return Backpropagate(G.Nodes{there}, G.Nodes{dy}, wrt)
		}, la.ErrUnsupported, "nn.Backpropagate: "},
		{"indices", func(y, dy *G.Node, wrt G.Nodes) (G.Nodes, error) {
			ids, err := ArgMax(y)
			if err != nil {
				return nil, err
			}
			e, err := Embedding(wrt[2], ids, nil)
			if err != nil {
				return nil, err
			}
			return Backpropagate(G.Nodes{e}, G.Nodes{dy}, G.Nodes{wrt[3]}) // only the ids depend on it
		}, la.ErrGraph, "no output depends on"},
	} {
		y, dy, wrt := graph()
		if grads, err := c.call(y, dy, wrt); grads != nil || !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.says) {
			t.Errorf("%s: %v, %v, want %s", c.what, grads, err, c.says)
		}
	}
}
