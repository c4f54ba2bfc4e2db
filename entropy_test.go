package leanattention_test

import (
	"math"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestEntropy: Args.Entropy, and the node of Attention and of CachedAttention, beside a log-sum-exp, have the entropies of weights.
func TestEntropy(t *testing.T) {
	rng := reftest.Rand(t)
	const rows, heads, dim = 9, 4, 16
	s := reftest.Shape{Heads: heads, KVHeads: 2, Dim: dim, ValueDim: dim, Queries: []int{rows}, Keys: []int{rows}}
	s.Causal = true
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	want, bound := c.Entropy(reftest.Precision{Acc: reftest.Float32})
	check := func(name string, got []float32, byHead bool) {
		t.Helper()
		for i, x := range got {
			at := i
			if byHead {
				at = i%rows*heads + i/rows
			}
			if !(math.Abs(float64(x)-want[at]) <= bound[at]) {
				t.Errorf("%s: entropy %d is %v, want %v within %v", name, i, x, want[at], bound[at])
			}
		}
	}
	dense := func(x []float64, d ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(d...), tensor.WithBacking(reftest.Convert[float32](x)))
	}
	args := la.Args{
		Q: dense(c.DenseQ(rows), heads, rows, dim), K: dense(c.DenseK(rows), 2, rows, dim), V: dense(c.DenseV(rows), 2, rows, dim),
		Out: tensor.New(tensor.WithShape(heads, rows, dim), tensor.Of(tensor.Float32)), Entropy: tensor.New(tensor.WithShape(heads, rows), tensor.Of(tensor.Float32)),
	}
	options := []la.Option{la.WithCausal(), la.WithScale(c.Scale)}
	if err := la.Attend(args, options...); err != nil {
		t.Fatal(err)
	}
	check("Attend", args.Entropy.Data().([]float32), true)

	g := G.NewGraph()
	input := func(name string, v G.Value) *G.Node {
		return G.NewTensor(g, tensor.Float32, len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
	}
	out, err := la.Attention(input("q", args.Q), input("k", args.K), input("v", args.V), options...)
	if err != nil {
		t.Fatal(err)
	}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: dim, DType: tensor.Float32, PageSize: 4, Pages: 8})
	defer closeCache(t, cache)
	step, err := cache.NewStep(rows)
	if err != nil {
		t.Fatal(err)
	}
	cached, err := la.CachedAttention(input("cq", dense(c.Q, rows, heads*dim)), input("ck", dense(c.K, rows, 2*dim)), input("cv", dense(c.V, rows, 2*dim)), step.Layer(0), options...)
	if err != nil {
		t.Fatal(err)
	}
	var entropies, logs [2]G.Value
	for i, n := range []*G.Node{out, cached} {
		entropy, err := la.Entropy(n)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := la.Entropy(n); err != nil || again != entropy {
			t.Errorf("a second call: %v, %v", again, err)
		}
		G.Read(entropy, &entropies[i])
		G.Read(graphtest.LogSumExp(t, n), &logs[i])
	}
	seq, err := cache.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := step.Run([]la.Append{{Seq: seq, Tokens: rows}}, vm.RunAll); err != nil {
		t.Fatal(err)
	}
	check("Attention", entropies[0].Data().([]float32), true)
	check("CachedAttention", entropies[1].Data().([]float32), false)
	for i, x := range logs[0].Data().([]float32) {
		if y := logs[1].Data().([]float32)[i%rows*heads+i/rows]; !(math.Abs(float64(x-y)) < 1e-4) {
			t.Errorf("log-sum-exp %d: %v and %v", i, x, y)
		}
	}

	for _, x := range []struct {
		change func(a *la.Args)
		more   la.Option
		kind   error
		text   string
	}{
		{nil, la.WithDropout(.5, nil), la.ErrUnsupported, "the entropy of weights: a dropout of 0.5"},
		{nil, la.WithBatchInvariance(), la.ErrUnsupported, "the entropy of weights: batch invariance"},
		{nil, la.WithVariant(la.Variant{Score: "-softplus(-score)", Unnormalised: true}), la.ErrUnsupported, "Unnormalised"},
		{func(a *la.Args) { a.Segments = []la.Segment{{K: a.K, V: a.V}} }, la.WithTileTokens(16), la.ErrUnsupported, "Args.Entropy with 1 segments"},
		{func(a *la.Args) { a.Parents = make([][]int, 1) }, la.WithTileTokens(16), la.ErrUnsupported, "Args.Entropy with Parents"},
		{func(a *la.Args) { a.Entropy = a.Q }, la.WithTileTokens(16), la.ErrShape, "entropy has shape"},
	} {
		a := args
		if x.change != nil {
			x.change(&a)
		}
		wantError(t, la.Attend(a, append(options[:2:2], x.more)...), x.kind, "Attend", x.text)
	}
	_, err = la.Entropy(out.Graph().Inputs()[0])
	wantError(t, err, la.ErrGraph, "Entropy", "it must be the node of Attention")
	invariant, err := la.Attention(input("q2", args.Q), input("k2", args.K), input("v2", args.V), la.WithCausal(), la.WithBatchInvariance())
	if err != nil {
		t.Fatal(err)
	}
	_, err = la.Entropy(invariant)
	wantError(t, err, la.ErrUnsupported, "Entropy", "batch invariance")
}
