package leanattention_test

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
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// promptModel is layers of latent attention, in graphs of both forms.
type promptModel struct {
	layers, width, heads, nope, rope, latent, value int
	dtype                                           tensor.Dtype
	weights                                         map[string]*tensor.Dense
	opts                                            []la.Option
	rotary                                          *rope.Config
}

func newPromptModel(rng *rand.Rand, dtype tensor.Dtype) *promptModel {
	m := &promptModel{
		layers: 1 + rng.IntN(2), width: 1 + rng.IntN(30), heads: 1 + rng.IntN(4), nope: 1 + rng.IntN(20), rope: 2 * rng.IntN(6), latent: 1 + rng.IntN(30),
		value: 1 + rng.IntN(20), dtype: dtype, weights: map[string]*tensor.Dense{},
	}
	if m.layers > 1 { // the norm of few numbers, all near 0, makes much of the rounding of the layer before
		m.width, m.latent = m.width+8, m.latent+8
	}
	m.opts = []la.Option{la.WithCausal(), la.WithScale(1 / math.Sqrt(float64(m.nope+m.rope)))}
	if m.rope > 0 {
		m.rotary = &rope.Config{Dim: m.rope, Last: true, Interleaved: rng.IntN(2) == 0, Scaling: rope.YaRN{Factor: 4, Context: 16, MScale: 0.8, MScaleAllDim: 0.6}}
		m.opts = append(m.opts, la.WithRotary(*m.rotary))
	}
	for i := range m.layers {
		for name, shape := range map[string][]int{
			"query": {m.heads * (m.nope + m.rope), m.width}, "down": {m.latent + m.rope, m.width}, "norm": {m.latent}, "key": {m.heads * m.latent, m.nope}, "value": {m.heads * m.value, m.latent},
			"out": {m.width, m.heads * m.value},
		} {
			m.weights[fmt.Sprint(name, i)] = m.random(rng, shape...)
		}
	}
	return m
}

func (m *promptModel) random(rng *rand.Rand, shape ...int) *tensor.Dense {
	n := tensor.Shape(shape).TotalSize()
	scale := 1 / math.Sqrt(float64(shape[len(shape)-1]))
	if m.dtype == tensor.Float64 {
		x := make([]float64, n)
		for i := range x {
			x[i] = scale * rng.NormFloat64()
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(scale * rng.NormFloat64())
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
}

// promptGraph is a graph of a model for a step.
type promptGraph struct {
	step *la.Step
	x    *tensor.Dense
	y    *G.Node
	vm   interface {
		G.VM
		Close() error
	}
}

func (m *promptModel) graph(t *testing.T, cache *la.Cache, rows int, expanded, few bool, opts ...la.Option) *promptGraph {
	t.Helper()
	step, err := cache.NewStep(rows)
	if err != nil {
		t.Fatal(err)
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	opts = slices.Concat(m.opts, opts)
	g := G.NewGraph()
	p := &promptGraph{step: step, x: tensor.New(tensor.WithShape(rows, m.width), tensor.Of(m.dtype))}
	h := G.NewTensor(g, m.dtype, 2, G.WithShape(rows, m.width), G.WithName("x"), G.WithValue(p.x))
	if few {
		h = must(step.Rows(h))
	}
	for i := range m.layers {
		w := func(name string) *G.Node {
			v := m.weights[fmt.Sprint(name, i)]
			return G.NewTensor(g, m.dtype, v.Dims(), G.WithShape(v.Shape()...), G.WithName(fmt.Sprint(name, i)), G.WithValue(v))
		}
		a := nn.MLA{Heads: m.heads, Eps: 1e-6, Query: w("query"), Down: w("down"), Norm: w("norm"), Key: w("key"), Value: w("value")}
		var y *G.Node
		if expanded {
			y = must(a.Expanded(h, func(q, k, v, latents *G.Node) (*G.Node, error) {
				return la.PromptAttention(q, k, v, latents, m.heads, step.Layer(i), opts...)
			}))
		} else {
			y = must(a.Absorbed(h, func(q, k *G.Node) (*G.Node, error) { return la.CachedAttention(q, k, nil, step.Layer(i), opts...) }))
		}
		h = must(nn.Linear(y, w("out"), nil, nn.WithResidual(h)))
	}
	p.y, p.vm = h, G.NewTapeMachine(g)
	t.Cleanup(func() { p.vm.Close() })
	return p
}

// run appends rows of x to sequences, and returns the rows of y.
func (p *promptGraph) run(appends []la.Append, x []float64) (y []float64, err error) {
	err = p.step.Run(appends, func() error {
		switch data := p.x.Data().(type) {
		case []float64:
			copy(data, x)
		case []float32:
			for i, v := range x {
				data[i] = float32(v)
			}
		}
		defer p.vm.Reset()
		if err := la.Cause(p.vm.RunAll()); err != nil {
			return err
		}
		switch data := p.y.Value().Data().(type) {
		case []float64:
			y = slices.Clone(data)
		case []float32:
			for _, v := range data {
				y = append(y, float64(v))
			}
		}
		return nil
	})
	return y, err
}

// TestPromptAttention: texts that begin with the keys and values of all heads, and go on with latent vectors, are those of latent vectors
// alone: in ragged batches, with all masks and changes of scores, and positions of their own.
func TestPromptAttention(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 40 {
		dtype, storage, atol := tensor.Float64, tensor.Float32, 2e-5
		switch i % 4 {
		case 1:
			dtype = tensor.Float32
		case 2:
			dtype, storage, atol = tensor.Float32, la.Float16, 2e-2
		case 3:
			dtype, storage, atol = tensor.Float32, la.BFloat16, 1e-1
		}
		m := newPromptModel(rng, dtype)
		config := la.CacheConfig{
			Layers: m.layers, KVHeads: 1, HeadDim: m.latent + m.rope, ValueDim: m.latent, ValuesInKeys: true, DType: storage, PageSize: 1 + rng.IntN(20), Pages: 900,
		}
		var opts []la.Option
		switch i % 5 {
		case 1:
			opts = append(opts, la.WithWindow(1+rng.IntN(40)))
		case 2:
			opts = append(opts, la.WithSoftCap(2))
		case 3:
			slopes := make([]float64, m.heads)
			for h := range slopes {
				slopes[h] = rng.Float64()
			}
			opts = append(opts, la.WithALiBi(slopes))
		case 4:
			opts = append(opts, la.WithBatchInvariance())
		}
		opts = append(opts, la.WithWorkers(rng.IntN(4)), la.WithSchedule(graphtest.Schedules[i%3]))
		const most, texts = 300, 3
		few := i%2 == 0
		var graphs [2][2]*promptGraph // with prompts in either form, and decode
		var caches [2]*la.Cache
		for form := range graphs {
			caches[form] = graphtest.NewCache(t, config)
			graphs[form] = [2]*promptGraph{m.graph(t, caches[form], most, form == 1, few, opts...), m.graph(t, caches[form], 8, false, few, opts...)}
		}
		var tokens [texts]int
		var positions [texts][]int
		for j := range tokens {
			if tokens[j] = 1 + rng.IntN(most/texts); i%8 < 2 {
				positions[j] = make([]int, tokens[j])
				for k := range positions[j] {
					positions[j][k] = rng.IntN(1000)
				}
			}
		}
		var x [][]float64 // of each step
		for j := range 3 {
			rows := 0
			if j == 0 {
				for _, n := range tokens {
					rows += n
				}
			} else {
				rows = texts + j
			}
			step := make([]float64, rows*m.width)
			for k := range step {
				step[k] = rng.NormFloat64()
			}
			x = append(x, step)
		}
		var want [][]float64
		for form := range graphs {
			var all []la.Append
			for j, n := range tokens {
				s, err := caches[form].NewSequence()
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, la.Append{Seq: s, Tokens: n, Positions: positions[j]})
			}
			for j, step := range x {
				g := graphs[form][min(j, 1)]
				if j > 0 {
					for k := range all {
						all[k].Tokens, all[k].Positions = 1, nil
					}
					all[0].Tokens = 1 + j
				}
				y, err := g.run(all, step)
				if err != nil {
					t.Fatalf("%+v: %v", m, err)
				}
				if y = y[:len(step)]; form == 0 {
					want = append(want, y)
					continue
				}
				for k, v := range y {
					if !(math.Abs(v-want[j][k]) <= atol*(1+math.Abs(want[j][k]))) {
						t.Fatalf("case %d, %v in %v, step %d, texts of %v: row %d, element %d: %v, with latent vectors alone %v", i, dtype, storage, j, tokens, k/m.width, k%m.width, v, want[j][k])
					}
				}
			}
			if form == 1 { // no sequence is empty now
				_, err := graphs[form][0].run(all[:1], x[1])
				if !errors.Is(err, la.ErrState) || !strings.Contains(err.Error(), "PromptAttention") {
					t.Errorf("a sequence with tokens: %v", err)
				}
				if n := all[0].Seq.Len(); n != tokens[0]+5 {
					t.Errorf("a sequence of %d tokens after the error, want %d", n, tokens[0]+5)
				}
			}
			for _, a := range all {
				if err := a.Seq.Release(); err != nil {
					t.Fatal(err)
				}
			}
			closeCache(t, caches[form])
		}
	}
}

// TestPromptAttentionRefused: what does not fit is an error that names the operand.
func TestPromptAttentionRefused(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 24, ValueDim: 16, ValuesInKeys: true, Pages: 4})
	plain := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 24, Pages: 4})
	step := func(c *la.Cache) *la.Step {
		s, err := c.NewStep(5)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s, other := step(cache), step(plain)
	g := G.NewGraph()
	in := func(name string, columns int) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(5, columns), G.WithName(fmt.Sprint(name, columns)))
	}
	q, k, v, latents := in("q", 24), in("k", 24), in("v", 14), in("latents", 24)
	elsewhere := G.NewMatrix(G.NewGraph(), tensor.Float32, G.WithShape(5, 14), G.WithName("v"))
	for _, c := range []struct {
		q, k, v, latents *G.Node
		heads            int
		layer            la.Layer
		opt              la.Option
		kind             error
		text             string
	}{
		{q, k, v, latents, 2, la.Layer{}, la.WithCausal(), la.ErrState, "layer of no step"},
		{q, k, v, latents, 2, s.Layer(2), la.WithCausal(), la.ErrShape, "layer 2 of a cache with 2"},
		{q, k, v, latents, 2, other.Layer(0), la.WithCausal(), la.ErrUnsupported, "ValuesInKeys"},
		{nil, k, v, latents, 2, s.Layer(0), la.WithCausal(), la.ErrGraph, "q is nil"},
		{q, k, v, nil, 2, s.Layer(0), la.WithCausal(), la.ErrGraph, "latents is nil"},
		{q, k, elsewhere, latents, 2, s.Layer(0), la.WithCausal(), la.ErrGraph, "v is in another graph"},
		{q, k, v, latents, 0, s.Layer(0), la.WithCausal(), la.ErrShape, "0 heads"},
		{q, k, v, latents, 5, s.Layer(0), la.WithCausal(), la.ErrShape, "q has 24 columns, not those of 5 heads"},
		{q, in("k", 22), v, latents, 2, s.Layer(0), la.WithCausal(), la.ErrShape, "k has 22 columns and q 24"},
		{q, k, in("v", 13), latents, 2, s.Layer(0), la.WithCausal(), la.ErrShape, "v has 13 columns"},
		{q, k, v, in("latents", 23), 2, s.Layer(0), la.WithCausal(), la.ErrShape, "latents has 23 columns"},
		{q, k, v, latents, 2, s.Layer(0), la.WithSinks(in("sinks", 2)), la.ErrUnsupported, "WithSinks"},
		{q, k, v, latents, 2, s.Layer(0), la.WithRotary(rope.Config{Last: true}), la.ErrShape, "set Dim"},
		{q, k, v, latents, 2, s.Layer(0), la.WithRotary(rope.Config{Dim: 14, Last: true}), la.ErrShape, "14 elements of heads of 12"},
		{q, k, v, latents, 2, s.Layer(0), la.WithRotary(rope.Config{HeadDim: 12, Dim: 8}), la.ErrShape, "HeadDim is 12"},
		{q, k, v, latents, 2, s.Layer(0), la.WithALiBi([]float64{1}), la.ErrShape, "1 slope for 2 query heads"},
	} {
		_, err := la.PromptAttention(c.q, c.k, c.v, c.latents, c.heads, c.layer, c.opt)
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "PromptAttention") {
			t.Errorf("%q: %v", c.text, err)
		}
	}
	y, err := la.PromptAttention(q, k, v, latents, 2, s.Layer(0), la.WithCausal())
	if err != nil || !slices.Equal(y.Shape(), tensor.Shape{5, 14}) {
		t.Fatal(y, err)
	}
	if _, err := la.CachedAttention(in("all q", 24), latents, nil, s.Layer(0)); !errors.Is(err, la.ErrGraph) {
		t.Errorf("a second node of a layer: %v", err)
	}
	if _, err := la.LogSumExp(y); !errors.Is(err, la.ErrGraph) {
		t.Error(err)
	}
	if _, err := G.Grad(G.Must(G.Sum(y)), q); err == nil || !strings.Contains(err.Error(), "gradient through a cache") {
		t.Error(err)
	}
}
