package nn

import (
	"errors"
	"math"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/half"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var convertNumbers = []float32{0, 1, -1.0009766, 3.1415927, 1e-7, -1e-9, 65504, 65519, 65520, 1e30, -3e38, float32(math.Inf(-1)), 1e-40}

// Convert rounds each number as package half does, in host memory and on a GPU, and so do its gradients.
func testConvert(t *testing.T, place func(*tensor.Dense) G.Value, back func(G.Value) *tensor.Dense) {
	for _, to := range []tensor.Dtype{la.Float16, la.BFloat16} {
		round := func(x []float32) (y []float32) {
			for _, v := range x {
				if to == la.Float16 {
					y = append(y, half.FromFloat32(v).Float32())
				} else {
					y = append(y, half.BFromFloat32(v).Float32())
				}
			}
			return y
		}
		g := G.NewGraph()
		n := len(convertNumbers)
		input := func(name string, x []float32) *G.Node {
			return G.NewVector(g, tensor.Float32, G.WithShape(n), G.WithName(name), G.WithValue(place(tensor.New(tensor.WithShape(n), tensor.WithBacking(slices.Clone(x))))))
		}
		reversed := slices.Clone(convertNumbers)
		slices.Reverse(reversed)
		x, dy := input("x", convertNumbers), input("dy", reversed)
		short, err := Convert(x, to)
		if err != nil {
			t.Fatal(err)
		}
		y, err := Convert(short, tensor.Float32)
		if err != nil {
			t.Fatal(err)
		}
		grads, err := G.Backpropagate(G.Nodes{y}, G.Nodes{dy}, G.Nodes{x})
		if err != nil {
			t.Fatal(err)
		}
		var dx G.Value
		G.Read(grads[0], &dx)
		m := G.NewTapeMachine(g)
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if short.Value().Dtype() != to {
			t.Errorf("%v: a value of %v", to, short.Value().Dtype())
		}
		for _, c := range []struct {
			got  G.Value
			want []float32
		}{{y.Value(), convertNumbers}, {dx, reversed}} {
			if got, want := back(c.got).Data().([]float32), round(c.want); !slices.Equal(got, want) {
				t.Errorf("%v: %v, want %v", to, got, want)
			}
		}
		m.Close()
	}
}

func TestConvert(t *testing.T) {
	testConvert(t, func(v *tensor.Dense) G.Value { return v }, func(v G.Value) *tensor.Dense { return v.(*tensor.Dense) })
	g := G.NewGraph()
	for _, c := range []struct {
		x    *G.Node
		to   tensor.Dtype
		want error
	}{
		{nil, la.Float16, la.ErrGraph},
		{G.NewScalar(g, tensor.Float32, G.WithName("scalar")), la.Float16, la.ErrShape},
		{G.NewVector(g, tensor.Float32, G.WithShape(3), G.WithName("float32")), tensor.Float64, la.ErrDType},
		{G.NewVector(g, tensor.Float64, G.WithShape(3), G.WithName("float64")), la.Float16, la.ErrDType},
		{G.NewVector(g, la.BFloat16, G.WithShape(3), G.WithName("bfloat16")), la.Float16, la.ErrDType},
	} {
		if y, err := Convert(c.x, c.to); y != nil || !errors.Is(err, c.want) {
			t.Errorf("Convert to %v: %v, %v", c.to, y, err)
		}
	}
}

func TestGPUOpsConvert(t *testing.T) {
	gpu := devicetest.Open(t)
	testConvert(t, uploads(t, gpu), func(v G.Value) *tensor.Dense { return downloaded(t, v) })
}

func uploads(t *testing.T, gpu *device.GPU) func(*tensor.Dense) G.Value {
	return func(v *tensor.Dense) G.Value {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

func downloaded(t *testing.T, v G.Value) *tensor.Dense {
	t.Helper()
	x, err := v.(*device.Tensor).Download()
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// A decoder's block has the gradients of all of its weights on a GPU: norm, layers, rotary embedding, attention in 16 bits, gate. In
// host memory attention is float32, so 16 bits are the difference.
func TestGPUOpsBlock(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	const rows, hidden, heads, dim, inner = 7, 16, 2, 64, 20
	inputs := []opInput{
		randomInput(rng, "x", rows, hidden), randomInput(rng, "dy", rows, hidden),
		randomInput(rng, "norm", hidden), randomInput(rng, "q", heads*dim, hidden), randomInput(rng, "k", dim, hidden), randomInput(rng, "v", dim, hidden),
		randomInput(rng, "o", hidden, heads*dim), randomInput(rng, "second norm", hidden), randomInput(rng, "gate and up", 2*inner, hidden), randomInput(rng, "down", hidden, inner),
	}
	for i := range inputs[2:] {
		for j := range inputs[2+i].x {
			inputs[2+i].x[j] *= 0.25
		}
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	grads := func(there bool, place func(*tensor.Dense) G.Value) (values []G.Value) {
		g := G.NewGraph()
		in := map[string]*G.Node{}
		var weights G.Nodes
		for i := range inputs {
			v := inputs[i].tensor(tensor.Float32, false)
			n := G.NewTensor(g, tensor.Float32, v.Dims(), G.WithShape(v.Shape()...), G.WithName(inputs[i].name), G.WithValue(place(v)))
			if in[inputs[i].name] = n; i >= 2 {
				weights = append(weights, n)
			}
		}
		x := must(Linear(in["x"], in["q"], nil, WithRMSNorm(in["norm"], 1e-5)))
		part := func(y *G.Node, n int) *G.Node {
			y = must(SplitHeads(must(Reshape(y, 1, rows, n*dim)), n))
			if there {
				y = must(Convert(y, la.BFloat16))
			}
			return y
		}
		a := must(la.Attention(part(x, heads), part(must(Linear(in["x"], in["k"], nil)), 1), part(must(Linear(in["x"], in["v"], nil)), 1), la.WithCausal()))
		if there {
			a = must(Convert(a, tensor.Float32))
		}
		h := must(Linear(must(Reshape(must(MergeHeads(a)), rows, heads*dim)), in["o"], nil))
		h = must(GatedLinear(h, []*G.Node{in["gate and up"]}, nil, SiLU, WithRMSNorm(in["second norm"], 1e-5)))
		y := must(Linear(h, in["down"], nil, WithActivation(GELU)))
		nodes, err := G.Backpropagate(G.Nodes{y}, G.Nodes{in["dy"]}, weights)
		if err != nil {
			t.Fatal(err)
		}
		values = make([]G.Value, len(nodes))
		for i, n := range nodes {
			G.Read(n, &values[i])
		}
		m := G.NewTapeMachine(g)
		defer m.Close()
		if err := la.Cause(m.RunAll()); err != nil {
			t.Fatal(err)
		}
		return values
	}
	want := grads(false, func(v *tensor.Dense) G.Value { return v })
	for i, v := range grads(true, uploads(t, gpu)) {
		got, want := floatsOf(t, downloaded(t, v)), floatsOf(t, want[i])
		most, off := 0.0, 0.0
		for j, w := range want {
			most, off = max(most, math.Abs(w)), max(off, math.Abs(got[j]-w))
		}
		if !(off <= 0.05*most) || most == 0 || slices.ContainsFunc(got, math.IsNaN) {
			t.Errorf("%s: a gradient of up to %v is off by %v", inputs[2+i].name, most, off)
		}
	}
}
