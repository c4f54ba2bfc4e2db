package nn_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// places are where a graph's inputs are: in host memory, and on a GPU.
type places struct {
	t     *testing.T
	rng   *rand.Rand
	gpu   *device.GPU
	g     [2]*G.ExprGraph
	names int
}

func newPlaces(t *testing.T, rng *rand.Rand, gpu *device.GPU) *places {
	return &places{t: t, rng: rng, gpu: gpu, g: [2]*G.ExprGraph{G.NewGraph(), G.NewGraph()}}
}

// let makes the same input in both graphs.
func (p *places) let(x *tensor.Dense) (in [2]*G.Node) {
	p.t.Helper()
	there, err := p.gpu.Upload(x)
	if err != nil {
		p.t.Fatal(err)
	}
	return p.letThere(x, there)
}

func (p *places) letThere(x *tensor.Dense, there *device.Tensor) (in [2]*G.Node) {
	p.names++
	for i, v := range []G.Value{x, there} {
		in[i] = G.NewTensor(p.g[i], x.Dtype(), x.Dims(), G.WithShape(x.Shape()...), G.WithName(fmt.Sprint("input ", p.names)), G.WithValue(v))
	}
	return in
}

// random is normal numbers as a type has them.
func (p *places) random(dtype tensor.Dtype, scale float64, shape ...int) *tensor.Dense {
	n := tensor.Shape(shape).TotalSize()
	f := make([]float32, n)
	for i := range f {
		f[i] = float32(p.rng.NormFloat64() * scale)
	}
	var data any = f
	switch dtype {
	case la.Float16:
		s := make([]la.F16, n)
		half.EncodeFloat16(s, f)
		data = s
	case la.BFloat16:
		s := make([]la.BF16, n)
		half.EncodeBFloat16(s, f)
		data = s
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}

// compare runs both graphs twice and compares the values of the nodes, within
// atol of numbers of about 1.
func (p *places) compare(what string, atol float64, nodes ...[2]*G.Node) {
	p.t.Helper()
	for i, g := range p.g {
		m := G.NewTapeMachine(g)
		defer m.Close()
		for range 2 {
			m.Reset()
			if err := m.RunAll(); err != nil {
				p.t.Fatalf("%s, graph %d: %v", what, i, err)
			}
		}
	}
	p.check(what, atol, nodes...)
}

// check compares the values of the nodes as they are.
func (p *places) check(what string, atol float64, nodes ...[2]*G.Node) {
	p.t.Helper()
	for _, n := range nodes {
		d, ok := n[1].Value().(*device.Tensor)
		if !ok {
			p.t.Fatalf("%s: a %T on the GPU", what, n[1].Value())
		}
		got, err := d.Download()
		if err != nil {
			p.t.Fatal(err)
		}
		want := n[0].Value().(*tensor.Dense)
		if !slices.Equal(got.Shape(), want.Shape()) {
			p.t.Fatalf("%s: shape %v, want %v", what, got.Shape(), want.Shape())
		}
		if ids, ok := want.Data().([]int32); ok {
			if !slices.Equal(got.Data().([]int32), ids) {
				p.t.Fatalf("%s: %v, want %v", what, got, want)
			}
			continue
		}
		for i, w := range want.Data().([]float32) {
			if g := got.Data().([]float32)[i]; !(math.Abs(float64(g-w)) <= atol*(1+math.Abs(float64(w)))) {
				p.t.Fatalf("%s: element %d is %v, want %v", what, i, g, w)
			}
		}
	}
}

// Every node gives on a GPU what it gives on the CPU.
func TestGPUNodes(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	types := []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
	for i := range 60 {
		p := newPlaces(t, rng, gpu)
		w := types[i%3]
		atol := 2e-4
		if w == la.BFloat16 {
			atol = 2e-3
		}
		rows, width := 1+rng.IntN(40), 8*(1+rng.IntN(60))
		outs := []int{8 * (1 + rng.IntN(45)), 4 * (1 + rng.IntN(90)), 4 * (1 + rng.IntN(90))}[:1+rng.IntN(3)]
		affine, bias, activation := rng.IntN(2) == 0, rng.IntN(2) == 0, rng.IntN(3)
		scale := 1 / math.Sqrt(float64(width))

		table, ids := p.let(p.random(w, 1, 50, width)), make([]int32, rows)
		for j := range ids {
			ids[j] = int32(rng.IntN(50))
		}
		index := p.let(tensor.New(tensor.WithShape(rows), tensor.WithBacking(ids)))
		position := p.let(p.random(tensor.Float32, 1, rows, width))
		gamma, beta := p.let(p.random(tensor.Float32, 1, width)), p.let(p.random(tensor.Float32, 1, width))
		var ws, bs [][2]*G.Node
		for _, out := range outs {
			ws, bs = append(ws, p.let(p.random(w, scale, out, width))), append(bs, p.let(p.random(tensor.Float32, 1, out)))
		}
		back := p.let(p.random(w, 1/math.Sqrt(float64(outs[0])), width, outs[0]))

		choices, us := make([]nn.Choice, rows), make([]float64, rows)
		for j := range choices {
			choices[j] = nn.Choice{Temperature: rng.Float64()*2 - 0.2, TopK: rng.IntN(width), TopP: 0.3 + rng.Float64()}
			if rng.IntN(4) == 0 { // off
				choices[j].TopP = -float64(rng.IntN(2))
			}
			us[j] = rng.Float64()
		}
		choice, random := p.let(nn.Choices(choices)), p.let(nn.Randoms(us))

		var nodes [6][2]*G.Node
		var parts [][2]*G.Node
		for j := range p.g {
			h := must(nn.Embedding(table[j], index[j], position[j]))
			var g, b *G.Node
			if affine {
				g, b = gamma[j], beta[j]
			}
			var layers, biases []*G.Node
			for k := range ws {
				layers = append(layers, ws[k][j])
				if bias {
					biases = append(biases, bs[k][j])
				}
			}
			opts := []nn.Option{nn.WithNorm(g, b, 1e-5)}
			switch activation {
			case 1:
				opts = append(opts, nn.WithActivation(nn.ReLU))
			case 2:
				opts = append(opts, nn.WithActivation(nn.GELU))
			}
			ys, err := nn.Linears(h, layers, biases, opts...)
			if err != nil {
				t.Fatal(err)
			}
			for k, y := range ys {
				if len(parts) <= k {
					parts = append(parts, [2]*G.Node{})
				}
				parts[k][j] = y
			}
			nodes[0][j] = h
			var first *G.Node
			if bias {
				first = bs[0][j]
			}
			nodes[1][j] = must(nn.Linear(h, ws[0][j], first, opts...))
			nodes[2][j] = must(nn.Linear(ys[0], back[j], nil, nn.WithResidual(h)))
			nodes[3][j] = must(nn.LayerNorm(nodes[2][j], g, b, 1e-5))
			nodes[4][j] = must(nn.ArgMax(position[j]))
			nodes[5][j] = must(nn.Sample(position[j], choice[j], random[j]))
		}
		p.compare(fmt.Sprintf("case %d, w %v, %d x %d x %v", i, w, rows, width, outs), atol, append(nodes[:], parts...)...)
	}
}

// Inputs in different places, and what has no kernel, are errors.
func TestGPUNodesRefuse(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	run := func(y *G.Node) error {
		m := G.NewTapeMachine(y.Graph())
		defer m.Close()
		return m.RunAll()
	}
	p := newPlaces(t, rng, gpu)
	x, w := p.let(p.random(tensor.Float32, 1, 2, 16)), p.let(p.random(tensor.Float32, 1, 3, 16))
	w[0] = G.NewTensor(p.g[1], tensor.Float32, 2, G.WithShape(3, 16), G.WithName("host w"), G.WithValue(p.random(tensor.Float32, 1, 3, 16)))
	y, err := nn.Linear(x[1], w[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(y); err == nil {
		t.Error("x on the GPU and w in host memory")
	}
	p = newPlaces(t, rng, gpu)
	x, w = p.let(p.random(tensor.Float32, 1, 2, 18)), p.let(p.random(la.Float16, 1, 3, 18))
	if y, err = nn.Linear(x[1], w[1], nil); err != nil {
		t.Fatal(err)
	}
	if err := run(y); err == nil {
		t.Error("rows of 36 bytes")
	}
	p = newPlaces(t, rng, gpu)
	x = p.let(p.random(tensor.Float32, 1, 2, 16))
	at := p.let(tensor.New(tensor.WithShape(2), tensor.WithBacking([]int32{3, 4})))
	if y, err = nn.Rotary(x[1], at[1], rope.Config{HeadDim: 16, Dim: 8, Last: true}); err != nil {
		t.Fatal(err)
	}
	if err := la.Cause(run(y)); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "Last") {
		t.Errorf("a rotation of last elements: %v", err)
	}
	p = newPlaces(t, rng, gpu)
	random := func(shape ...int) *G.Node { return p.let(p.random(tensor.Float32, 1, shape...))[1] }
	m := nn.MLA{Heads: 2, Query: random(24, 16), Down: random(12, 16), Norm: random(8), Key: random(16, 8), Value: random(16, 8)}
	y, err = m.Expanded(random(2, 16), func(_, k, v, _ *G.Node) (*G.Node, error) {
		if k, err = nn.Slice(k, 1, 0, 16); err != nil {
			return nil, err
		}
		return nn.Add(k, v)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := la.Cause(run(y)); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "there are no kernels for the keys of all heads: use MLA.Absorbed") {
		t.Errorf("keys of all heads: %v", err)
	}
	for _, heads := range []bool{false, true} {
		p = newPlaces(t, rng, gpu)
		x := random(2, 16)
		if heads {
			y, err = nn.HeadLinear(x, random(16, 8), 2, nn.WithBatchInvariance())
		} else {
			y, err = nn.Linear(x, random(3, 16), nil, nn.WithBatchInvariance())
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := la.Cause(run(y)); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "WithBatchInvariance") {
			t.Errorf("batch invariance, heads %v: %v", heads, err)
		}
	}
}
