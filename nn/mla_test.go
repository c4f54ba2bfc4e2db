package nn_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// mlaCase is an MLA with random weights.
type mlaCase struct {
	rows, width, rank, heads, nope, rope, latent, value int

	bias, rotate, interleaved bool
	scale                     float64
	x                         map[string][]float64 // weights and x

	latents *nn.LatentWeights // in place of weights of x; nil: none
}

func newMLACase(rng *rand.Rand, i int) *mlaCase {
	c := &mlaCase{
		rows: 1 + rng.IntN(9), width: 1 + rng.IntN(12), rank: 1 + rng.IntN(6), heads: 1 + rng.IntN(4), nope: 1 + rng.IntN(6), rope: 2 * rng.IntN(4),
		latent: 1 + rng.IntN(7), value: 1 + rng.IntN(6), bias: i%4 < 2, interleaved: i%2 == 0, x: map[string][]float64{},
	}
	if i%3 == 0 {
		c.rank = 0
	}
	c.rotate = c.rope > 0 && i%5 > 0
	c.scale = 1 / math.Sqrt(float64(c.nope+c.rope)) * rope.YaRN{Factor: 4, MScaleAllDim: 0.7}.ScoreScale()
	for _, name := range slices.Sorted(func(yield func(string) bool) {
		for name := range c.shapes() {
			if !yield(name) {
				return
			}
		}
	}) {
		x := make([]float64, tensor.Shape(c.shapes()[name]).TotalSize())
		for j := range x {
			x[j] = float64(float32(rng.NormFloat64()))
		}
		c.x[name] = x
	}
	return c
}

// shapes are those of the inputs of a graph.
func (c *mlaCase) shapes() map[string][]int {
	q := c.width
	s := map[string][]int{"x": {c.rows, c.width}, "gamma": {c.width}, "down": {c.latent + c.rope, c.width}, "norm": {c.latent}, "up": {c.heads * (c.nope + c.value), c.latent}}
	if c.rank > 0 {
		s["query down"], s["query norm"], q = []int{c.rank, c.width}, []int{c.rank}, c.rank
	}
	s["query"] = []int{c.heads * (c.nope + c.rope), q}
	if c.bias {
		s["down bias"] = []int{c.latent + c.rope}
		if c.rank > 0 { // as in checkpoints
			s["query bias"] = []int{c.rank}
		}
	}
	return s
}

const mlaEps = 1e-3

// linear is x w^T + b.
func (c *mlaCase) linear(x, w, b []float64) []float64 {
	y := make([]float64, len(w)/len(x))
	for o := range y {
		for j, v := range x {
			y[o] += v * w[o*len(x)+j]
		}
		if b != nil {
			y[o] += b[o]
		}
	}
	return y
}

func (c *mlaCase) norm(x []float64, gamma string) []float64 {
	sum := 0.0
	for _, v := range x {
		sum += v * v
	}
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = v / math.Sqrt(sum/float64(len(x))+mlaEps) * c.x[gamma][i]
	}
	return y
}

// project returns the latent vector of a row before its norm, the rotated elements behind it, and the queries of all heads, rotated.
func (c *mlaCase) project(row int, down, bias []float64) (latents, turned, q []float64) {
	rotated := func(x []float64) []float64 {
		y := slices.Clone(x)
		for i := 0; i < len(x)/2 && c.rotate; i++ {
			a, b := i, i+len(x)/2
			if c.interleaved {
				a, b = 2*i, 2*i+1
			}
			s, cos := math.Sincos(float64(row) * math.Pow(10000, -2*float64(i)/float64(len(x))))
			y[a], y[b] = x[a]*cos-x[b]*s, x[b]*cos+x[a]*s
		}
		return y
	}
	x := c.norm(c.x["x"][row*c.width:][:c.width], "gamma")
	q = x
	if c.rank > 0 {
		q = c.norm(c.linear(x, c.x["query down"], c.x["query bias"]), "query norm")
	}
	q = c.linear(q, c.x["query"], nil)
	for h := range c.heads {
		of := q[h*(c.nope+c.rope):][:c.nope+c.rope]
		copy(of[c.nope:], rotated(of[c.nope:]))
	}
	latents = c.linear(x, down, bias)
	return latents[:c.latent], rotated(latents[c.latent:]), q
}

// want computes the attention of the rows, one text from position 0 on, by the formulas of MLA.
func (c *mlaCase) want() []float64 {
	var keys, values [][][]float64 // row, head
	var all []float64
	for row := range c.rows {
		latents, r, q := c.project(row, c.x["down"], c.x["down bias"])
		up := c.linear(c.norm(latents, "norm"), c.x["up"], nil)
		var k, v [][]float64
		for h := range c.heads {
			of := up[h*(c.nope+c.value):][:c.nope+c.value]
			k, v = append(k, slices.Concat(of[:c.nope], r)), append(v, of[c.nope:])
		}
		keys, values = append(keys, k), append(values, v)
		for h := range c.heads {
			qh := q[h*(c.nope+c.rope):][:c.nope+c.rope]
			y, total := make([]float64, c.value), 0.0
			for j := range row + 1 {
				score := 0.0
				for i, v := range qh {
					score += v * keys[j][h][i]
				}
				p := math.Exp(c.scale * score)
				total += p
				for i, v := range values[j][h] {
					y[i] += p * v
				}
			}
			for _, v := range y {
				all = append(all, v/total)
			}
		}
	}
	return all
}

// nodes makes the inputs and the MLA of rows [from, from+rows) in a graph.
func (c *mlaCase) nodes(t *testing.T, g *G.ExprGraph, dtype tensor.Dtype, from, rows int) (m *nn.MLA, in map[string]*G.Node) {
	t.Helper()
	in = map[string]*G.Node{}
	leaf := func(name string, v *tensor.Dense) {
		in[name] = G.NewTensor(g, v.Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(fmt.Sprintf("%s of %p", name, c)), G.WithValue(v))
	}
	if w := c.latents; w != nil {
		for name, v := range map[string]*tensor.Dense{"down": w.Down, "down bias": w.DownBias, "norm": w.Norm, "key": w.Key, "value": w.Value} {
			if v != nil {
				leaf(name, v)
			}
		}
	}
	for name, shape := range c.shapes() {
		if in[name] != nil || name == "up" && c.latents != nil {
			continue
		}
		x := c.x[name]
		if name == "x" {
			shape, x = []int{rows, c.width}, x[from*c.width:][:rows*c.width]
		}
		v := graphtest.TensorOf(dtype, x, shape...)
		if name != "up" {
			leaf(name, v)
			continue
		}
		key, value, err := nn.SplitKVUp(v, c.heads, c.nope)
		if err != nil {
			t.Fatal(err)
		}
		leaf("key", key)
		leaf("value", value)
	}
	return &nn.MLA{
		Heads: c.heads, Eps: mlaEps, QueryDown: in["query down"], QueryNorm: in["query norm"], QueryBias: in["query bias"], Query: in["query"],
		Down: in["down"], DownBias: in["down bias"], Norm: in["norm"], Key: in["key"], Value: in["value"],
	}, in
}

// graph makes the graph of one form. Key and Value are leaves, which have gradients.
func (c *mlaCase) graph(t *testing.T, dtype tensor.Dtype, expanded bool) (g *G.ExprGraph, in map[string]*G.Node, y *G.Node) {
	t.Helper()
	g = G.NewGraph()
	m, in := c.nodes(t, g, dtype, 0, c.rows)
	positions := make([]int, c.rows)
	for i := range positions {
		positions[i] = i
	}
	var at *G.Node
	if c.rotate {
		at = ids(g, "positions", positions...)
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		return n
	}
	rotated := func(x *G.Node, dim int) *G.Node {
		if !c.rotate {
			return x
		}
		return must(nn.Rotary(x, at, rope.Config{HeadDim: dim, Dim: c.rope, Last: true, Interleaved: c.interleaved}))
	}
	split := func(x *G.Node, heads int) *G.Node {
		return must(nn.SplitHeads(must(nn.Reshape(x, 1, c.rows, x.Shape()[1])), heads))
	}
	attend := func(q, k, v *G.Node) (*G.Node, error) {
		y := must(nn.MergeHeads(must(la.Attention(q, k, v, la.WithCausal(), la.WithScale(c.scale)))))
		return nn.Reshape(y, c.rows, y.Shape()[2])
	}
	before := nn.WithRMSNorm(in["gamma"], mlaEps)
	if expanded {
		return g, in, must(m.Expanded(in["x"], func(q, k, v, latents *G.Node) (*G.Node, error) {
			if s := latents.Shape(); !slices.Equal(s, tensor.Shape{c.rows, c.latent + c.rope}) {
				t.Errorf("latents have shape %v", s)
			}
			q, k = rotated(q, c.nope+c.rope), rotated(k, c.nope+c.rope)
			return attend(split(q, c.heads), split(k, c.heads), split(v, c.heads))
		}, before))
	}
	return g, in, must(m.Absorbed(in["x"], func(q, k *G.Node) (*G.Node, error) {
		q, k = rotated(q, c.latent+c.rope), rotated(k, c.latent+c.rope)
		return attend(split(q, c.heads), split(k, 1), split(must(nn.Slice(k, 1, 0, c.latent)), 1))
	}, before))
}

// TestMLA: both forms are the formulas in float64, with and without a low rank of queries, biases and rotation, and their gradients
// are equal.
func TestMLA(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 60 {
		c := newMLACase(rng, i)
		want := c.want()
		for dtype, atol := range map[tensor.Dtype]float64{tensor.Float64: 1e-11, tensor.Float32: 2e-4} {
			var gradients [2]map[string][]float64
			for form := range 2 {
				g, in, y := c.graph(t, dtype, form == 1)
				var result G.Value
				G.Read(y, &result)
				cost := G.Must(G.Sum(G.Must(G.Square(y))))
				var names []string
				var wrt G.Nodes
				for name, n := range in {
					names, wrt = append(names, name), append(wrt, n)
				}
				grads, err := G.Grad(cost, wrt...)
				if err != nil {
					t.Fatalf("%+v: %v", c, err)
				}
				values := make([]G.Value, len(grads))
				for j, n := range grads {
					G.Read(n, &values[j])
				}
				m := G.NewTapeMachine(g)
				if err := m.RunAll(); err != nil {
					t.Fatalf("%+v: %v", c, err)
				}
				got := mlaFloats(result)
				for j, w := range want {
					if !(math.Abs(got[j]-w) <= atol*(1+math.Abs(w))) {
						t.Fatalf("%+v, %v, form %d: element %d is %v, want %v", c, dtype, form, j, got[j], w)
					}
				}
				gradients[form] = map[string][]float64{}
				for j, v := range values {
					gradients[form][names[j]] = mlaFloats(v)
				}
				m.Close()
			}
			if dtype == tensor.Float32 {
				continue
			}
			for name, want := range gradients[0] {
				for j, w := range want {
					if got := gradients[1][name][j]; !(math.Abs(got-w) <= 1e-9*(1+math.Abs(w))) {
						t.Fatalf("%+v: d%s[%d] is %v expanded, and %v absorbed", c, name, j, got, w)
					}
				}
			}
		}
	}
}

func mlaFloats(v G.Value) (all []float64) {
	if x, ok := v.Data().([]float64); ok {
		return x
	}
	for _, x := range v.Data().([]float32) {
		all = append(all, float64(x))
	}
	return all
}

// TestMLARefused: what does not fit is an error that names the weight and its shape.
func TestMLARefused(t *testing.T) {
	g := G.NewGraph()
	in := func(name string, shape ...int) *G.Node {
		return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(fmt.Sprint(name, shape)))
	}
	x := in("x", 3, 10)
	good := func() *nn.MLA {
		return &nn.MLA{
			Heads: 2, Eps: 1e-6, QueryDown: in("query down", 6, 10), QueryNorm: in("query norm", 6), Query: in("query", 2*(3+4), 6),
			Down: in("down", 5+4, 10), Norm: in("norm", 5), Key: in("key", 2*5, 3), Value: in("value", 2*7, 5),
		}
	}
	attend := func(q, k *G.Node) (*G.Node, error) {
		if !slices.Equal(q.Shape(), tensor.Shape{3, 2 * 9}) || !slices.Equal(k.Shape(), tensor.Shape{3, 9}) {
			t.Errorf("queries of shape %v, keys of %v", q.Shape(), k.Shape())
		}
		return nn.Slice(q, 1, 0, 10)
	}
	if y, err := good().Absorbed(x, attend, nn.WithMixedPrecision(), nn.WithBatchInvariance(), nn.WithRMSNorm(in("gamma", 10), 1e-6)); err != nil || !slices.Equal(y.Shape(), tensor.Shape{3, 14}) {
		t.Fatal(y, err)
	}
	failing := errors.New("no attention")
	for _, c := range []struct {
		change func(m *nn.MLA)
		opts   []nn.Option
		kind   error
		text   string
	}{
		{func(m *nn.MLA) { m.Heads = 0 }, nil, la.ErrShape, "Heads is 0"},
		{func(m *nn.MLA) { m.Heads = 3 }, nil, la.ErrShape, "Key has shape (10, 3)"},
		{func(m *nn.MLA) { m.Key = nil }, nil, la.ErrGraph, "Key is nil"},
		{func(m *nn.MLA) { m.QueryNorm = nil }, nil, la.ErrGraph, "one of QueryDown and QueryNorm is nil"},
		{func(m *nn.MLA) { m.Norm = in("norm", 1, 5) }, nil, la.ErrShape, "Norm has shape (1, 5), want rank 1"},
		{func(m *nn.MLA) { m.Norm = in("norm", 10) }, nil, la.ErrShape, "Down has shape (9, 10)"},
		{func(m *nn.MLA) { m.Value = in("value", 14, 6) }, nil, la.ErrShape, "Value has shape (14, 6)"},
		{func(m *nn.MLA) { m.Value = in("value", 13, 5) }, nil, la.ErrShape, "Value has shape (13, 5)"},
		{func(m *nn.MLA) { m.Query = in("query", 13, 6) }, nil, la.ErrShape, "Query has shape (13, 6)"},
		{func(m *nn.MLA) { m.Query = in("query", 14, 7) }, nil, la.ErrShape, "(14, 7)"},
		{func(m *nn.MLA) { m.Down = in("down", 9, 11) }, nil, la.ErrShape, "(9, 11)"},
		{func(m *nn.MLA) { m.DownBias = in("bias", 8) }, nil, la.ErrShape, "(8)"},
		{func(m *nn.MLA) { m.Eps = -1 }, nil, la.ErrOption, "eps is -1"},
		{func(m *nn.MLA) {}, []nn.Option{nn.WithResidual(x)}, la.ErrUnsupported, "WithResidual"},
		{func(m *nn.MLA) {}, []nn.Option{nn.WithMixedPrecision(), nn.WithMixedPrecision()}, la.ErrOption, "given twice"},
		{func(m *nn.MLA) {}, []nn.Option{nn.WithBatchInvariance(), nn.WithBatchInvariance()}, la.ErrOption, "given twice"},
		{nil, nil, failing, "no attention"},
	} {
		m, attend := good(), attend
		if c.change == nil {
			attend = func(q, k *G.Node) (*G.Node, error) { return nil, failing }
		} else {
			c.change(m)
		}
		if _, err := m.Absorbed(x, attend, c.opts...); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%q: %v", c.text, err)
		}
		if c.change == nil {
			continue
		}
		if _, err := m.Expanded(x, func(q, k, v, latents *G.Node) (*G.Node, error) { return q, nil }, c.opts...); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("expanded, %q: %v", c.text, err)
		}
	}
	if _, err := good().Absorbed(nil, attend); !errors.Is(err, la.ErrGraph) {
		t.Error(err)
	}
	var none *nn.MLA
	if _, err := none.Absorbed(x, attend); !errors.Is(err, la.ErrGraph) {
		t.Error(err)
	}

	for _, c := range []struct {
		x, w  *G.Node
		heads int
		opt   nn.Option
		kind  error
		text  string
	}{
		{nil, x, 1, nn.Option{}, la.ErrGraph, "nil"},
		{x, in("w", 9, 5), 2, nn.Option{}, la.ErrShape, "w has shape (9, 5)"},
		{x, in("w", 8, 4), 2, nn.Option{}, la.ErrShape, "x has shape (3, 10), want 4 elements for each of 2 heads"},
		{x, in("w", 8, 5), 0, nn.Option{}, la.ErrShape, "0 heads"},
		{x, in("w", 8, 5), 2, nn.WithActivation(nn.ReLU), la.ErrUnsupported, "WithActivation"},
		{in("vector", 10), in("w", 8, 5), 2, nn.Option{}, la.ErrShape, "rank 2"},
	} {
		if _, err := nn.HeadLinear(c.x, c.w, c.heads, c.opt); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "HeadLinear") {
			t.Errorf("HeadLinear, %q: %v", c.text, err)
		}
	}
	up := tensor.New(tensor.WithShape(10, 3), tensor.Of(tensor.Float32))
	for _, c := range [][2]int{{0, 2}, {3, 2}, {2, 5}, {2, 0}} {
		if _, _, err := nn.SplitKVUp(up, c[0], c[1]); !errors.Is(err, la.ErrShape) || !strings.Contains(err.Error(), "(10, 3)") {
			t.Errorf("SplitKVUp of %v: %v", c, err)
		}
	}
	if _, _, err := nn.SplitKVUp(nil, 1, 1); !errors.Is(err, la.ErrUnsupported) {
		t.Error(err)
	}
	if _, _, err := nn.SplitKVUp(tensor.New(tensor.WithShape(10, 3), tensor.Of(tensor.Int)), 2, 2); !errors.Is(err, la.ErrDType) {
		t.Error(err)
	}
}

// TestMLASixteenBits: weights of 16 bits give what their numbers give in float32, and have no gradient.
func TestMLASixteenBits(t *testing.T) {
	rng := reftest.Rand(t)
	for _, rows := range []int{1, 3, 150} {
		const heads, in, out = 3, 70, 40
		x := make([]float32, rows*heads*in)
		for i := range x {
			x[i] = float32(rng.NormFloat64())
		}
		w := make([]la.BF16, heads*out*in)
		wide := make([]float32, len(w))
		for i := range w {
			wide[i] = float32(math.Round(rng.NormFloat64()*16) / 16)
			w[i] = half.BFromFloat32(wide[i])
		}
		run := func(v G.Value) []float32 {
			g := G.NewGraph()
			n := G.NewTensor(g, tensor.Float32, 2, G.WithShape(rows, heads*in), G.WithName("x"), G.WithValue(tensor.New(tensor.WithShape(rows, heads*in), tensor.WithBacking(x))))
			wn := G.NewTensor(g, v.(*tensor.Dense).Dtype(), 2, G.WithShape(heads*out, in), G.WithName("w"), G.WithValue(v))
			y, err := nn.HeadLinear(n, wn, heads)
			if err != nil {
				t.Fatal(err)
			}
			m := G.NewTapeMachine(g)
			defer m.Close()
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			if v.Dtype() == la.BFloat16 {
				if _, err := G.Grad(G.Must(G.Sum(y)), n); err == nil || !strings.Contains(err.Error(), "gradient with w of") {
					t.Errorf("a gradient with w of 16 bits: %v", err)
				}
			}
			return y.Value().Data().([]float32)
		}
		got := run(tensor.New(tensor.WithShape(heads*out, in), tensor.WithBacking(w)))
		for i, want := range run(tensor.New(tensor.WithShape(heads*out, in), tensor.WithBacking(wide))) {
			if d := math.Abs(float64(got[i] - want)); d > 1e-4 {
				t.Fatalf("%d rows: element %d is %v, want %v", rows, i, got[i], want)
			}
		}
	}
}
