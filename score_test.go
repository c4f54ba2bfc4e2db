package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestBadInputSinks: what no sinks can be is refused where a node is made.
func TestBadInputSinks(t *testing.T) {
	goodQ, goodK, goodV := f32(2, 6, 1, 8), f32(2, 3, 5, 8), f32(2, 3, 5, 4)
	for _, c := range []struct {
		name  string
		sinks func(g *G.ExprGraph) *G.Node
		want  error
		text  string
	}{
		{"nil sinks", func(*G.ExprGraph) *G.Node { return nil }, la.ErrOption, "WithSinks(nil)"},
		{"sinks of KV heads", func(g *G.ExprGraph) *G.Node { return f32(3).node(g, "sinks") }, la.ErrShape, "sinks has shape (3); it must be (6)"},
		{"matrix of sinks", func(g *G.ExprGraph) *G.Node { return f32(6, 1).node(g, "sinks") }, la.ErrShape, "sinks has shape (6, 1)"},
		{"scalar sink", func(g *G.ExprGraph) *G.Node { return G.NewScalar(g, tensor.Float32, G.WithName("sinks")) }, la.ErrShape, "sinks has shape ()"},
		{"float64 sinks", func(g *G.ExprGraph) *G.Node { return input3{tensor.Float64, []int{6}}.node(g, "sinks") }, la.ErrDType, "sinks is float64; for a q of float32 it must be float32"},
		{"float16 sinks", func(g *G.ExprGraph) *G.Node { return input3{la.Float16, []int{6}}.node(g, "sinks") }, la.ErrDType, "sinks is Float16"},
		{"sinks of another graph", func(*G.ExprGraph) *G.Node { return f32(6).node(G.NewGraph(), "sinks") }, la.ErrGraph, "sinks is in another graph than q"},
		{"sinks without type", func(g *G.ExprGraph) *G.Node { return G.NewUniqueNode(G.In(g), G.WithName("untyped")) }, la.ErrDType, "sinks has no element type"},
	} {
		t.Run("Attention/"+c.name, func(t *testing.T) {
			g := G.NewGraph()
			q, k, v, opt := goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v"), la.WithSinks(c.sinks(g))
			checkBuilder(t, "Attention", g, func() (*G.Node, error) { return la.Attention(q, k, v, opt) }, c.want, c.text)
		})
	}
	t.Run("Default/sinks", func(t *testing.T) {
		g := G.NewGraph()
		q, k, v, opt := goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v"), la.WithSinks(f32(6).node(g, "sinks"))
		checkBuilder(t, "Default", g, func() (*G.Node, error) { return la.Default(q, k, v, opt) }, la.ErrUnsupported, "WithSinks")
	})
}

// TestBadInputSinksValues: in a run they are refused before anything is written.
func TestBadInputSinksValues(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(2, 1, 4, 4, 1, 40), graphtest.Spec{})
	g := p.Graph()
	dense, err := la.Attention(g.Q, g.K, g.V, la.WithSinks(graphtest.Input(g.G, "sinks", f32(2).tensor())))
	if err != nil {
		t.Fatal(err)
	}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, PageSize: 4, Pages: 3})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	cg := G.NewGraph()
	cached, err := la.CachedAttention(f32(2, 8).node(cg, "q"), f32(2, 4).node(cg, "k"), f32(2, 4).node(cg, "v"), step.Layer(0), la.WithSinks(f32(2).node(cg, "sinks")))
	if err != nil {
		t.Fatal(err)
	}
	if err := step.Set([]la.Append{{Seq: graphtest.NewStored(t, cache).Seq, Tokens: 2}}); err != nil {
		t.Fatal(err)
	}
	gpu, _ := la.FakeGPU(t)
	before := la.Slabs(cache)
	for _, c := range []struct {
		sinks G.Value
		want  error
		text  string
	}{
		{nil, la.ErrShape, "sinks is nil"},
		{(*tensor.Dense)(nil), la.ErrShape, "sinks is nil"},
		{G.NewF32(1), la.ErrUnsupported, "sinks is a *gorgonia.F32"},
		{f32(1).tensor(), la.ErrShape, "sinks has shape (1); it must be (2)"},
		{f32(2, 1).tensor(), la.ErrShape, "sinks has shape (2, 1)"},
		{input3{tensor.Float64, []int{2}}.tensor(), la.ErrDType, "sinks is float64"},
		{graphtest.Upload(t, gpu, f32(2).tensor()), la.ErrUnsupported, "sinks is on " + gpu.String()},
	} {
		for op, do := range map[string]func() (G.Value, error){
			"Attention": func() (G.Value, error) { return dense.Op().Do(p.InQ, p.InK, p.InV, c.sinks) },
			"CachedAttention": func() (G.Value, error) {
				return cached.Op().Do(f32(2, 8).tensor(), f32(2, 4).tensor(), f32(2, 4).tensor(), c.sinks)
			},
		} {
			out, err := do()
			wantError(t, err, c.want, op, c.text)
			if out != nil {
				t.Errorf("%s, sinks %v: a value beside the error", op, c.sinks)
			}
		}
	}
	if !slices.Equal(la.Slabs(cache), before) {
		t.Error("the cache has changed")
	}
	out, err := cached.Op().Do(f32(2, 8).tensor(), f32(2, 4).tensor(), f32(2, 4).tensor(), f32(2).tensor())
	if err != nil || out == nil {
		t.Errorf("%v, %v", out, err)
	}
	if err := step.Rollback(); err != nil {
		t.Error(err)
	}
	closeCache(t, cache)
}

// TestDeviceSinksPlace: on a cache of a GPU the sinks are where q is.
func TestDeviceSinksPlace(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, PageSize: 4, Pages: 3, Device: gpu})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	n, err := la.CachedAttention(f32(2, 8).node(g, "q"), f32(2, 4).node(g, "k"), f32(2, 4).node(g, "v"), step.Layer(0), la.WithSinks(f32(2).node(g, "sinks")))
	if err != nil {
		t.Fatal(err)
	}
	if err := step.Set([]la.Append{{Seq: graphtest.NewStored(t, cache).Seq, Tokens: 2}}); err != nil {
		t.Fatal(err)
	}
	q, k, sinks := f32(2, 8).tensor(), f32(2, 4).tensor(), f32(2).tensor()
	up := func(x *tensor.Dense) G.Value { return graphtest.Upload(t, gpu, x) }
	_, err = n.Op().Do(q, k, k, up(sinks))
	wantError(t, err, la.ErrUnsupported, "CachedAttention", "q is in host memory and sinks on "+gpu.String())
	_, err = n.Op().Do(up(q), up(k), up(k), sinks)
	wantError(t, err, la.ErrUnsupported, "CachedAttention", "sinks in host memory")
	freed := graphtest.Upload(t, gpu, sinks)
	if err := freed.Free(); err != nil {
		t.Fatal(err)
	}
	_, err = n.Op().Do(up(q), up(k), up(k), freed)
	wantError(t, err, la.ErrClosed, "CachedAttention", "sinks was freed")
	for _, in := range [][]G.Value{{q, k, k, sinks}, {up(q), up(k), up(k), up(sinks)}} {
		if _, err := n.Op().Do(in...); err != nil {
			t.Error(err)
		}
	}
	if err := step.Commit(); err != nil {
		t.Error(err)
	}
	closeCache(t, cache)
}

// TestSinksNone: those of -Inf change no bit, and what is no number stays in its head.
func TestSinksNone(t *testing.T) {
	rng := reftest.Rand(t)
	for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		p := graphtest.NewProblem(rng, causal(dense(4, 2, 16, 8, 9, 40, 3)), graphtest.Spec{QueryType: query})
		bits := func(sinks ...float64) (out, lse []uint64) {
			a := p.Args()
			if sinks != nil {
				a.Sinks = graphtest.SinksOf(query, sinks)
			}
			if err := la.Attend(a, append(p.AttendOptions(), la.WithWorkers(3))...); err != nil {
				t.Fatal(err)
			}
			return graphtest.Bits(t, a.Out), graphtest.Bits(t, a.LSE)
		}
		none := math.Inf(-1)
		out, lse := bits()
		if o, l := bits(none, none, none, none); !slices.Equal(o, out) || !slices.Equal(l, lse) {
			t.Errorf("%v: sinks of -Inf change something", query)
		}
		for _, bad := range []float64{math.NaN(), math.Inf(1)} {
			o, l := bits(none, none, bad, none)
			for i := range l {
				seq, head, pos := i/36, i/9%4, i%9
				same := l[i] == lse[i] && slices.Equal(o[8*i:8*i+8], out[8*i:8*i+8])
				sees := p.Visible(seq, pos) > 0
				row := slices.ContainsFunc(o[8*i:8*i+8], func(b uint64) bool { f := math.Float64frombits(b); return f == f })
				if head != 2 && !same || head == 2 && sees == row {
					t.Errorf("%v: a sink of %v, sequence %d, head %d, query %d: the same %t, numbers %t", query, bad, seq, head, pos, same, row)
				}
			}
		}
	}
}

// TestFuseKeepsSinks: a graph that is made anew has its sinks.
func TestFuseKeepsSinks(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, withSinks(dense(2, 1, 8, 8, 3, 20), 0.5, 2), graphtest.Spec{})
	g := p.Graph()
	ours, err := la.Attention(g.Q, g.K, g.V, g.Options(p)...)
	if err != nil {
		t.Fatal(err)
	}
	stock, err := la.Default(g.Q, g.K, g.V, p.Options()...)
	if err != nil {
		t.Fatal(err)
	}
	f, err := rewrite.Fuse(ours, stock)
	if err != nil || len(f.Matches) != 1 {
		t.Fatalf("%v\n%v", err, f)
	}
	if name := f.Roots[0].Op().String(); !strings.Contains(name, "sinks") {
		t.Errorf("the node is %s", name)
	}
	var out G.Value
	G.Read(f.Roots[0], &out)
	vm := G.NewTapeMachine(f.Graph)
	defer vm.Close()
	graphtest.Again(t, vm)
	p.Check(t, p.Reference(p.Precision(0)), out, nil)
}

// TestCachedSinksHaveNoGradient: it is refused, and not 0.
func TestCachedSinksHaveNoGradient(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, PageSize: 4, Pages: 3})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	sinks := f32(2).node(g, "sinks")
	n, err := la.CachedAttention(f32(2, 8).node(g, "q"), f32(2, 4).node(g, "k"), f32(2, 4).node(g, "v"), step.Layer(0), la.WithSinks(sinks))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = G.Grad(G.Must(G.Sum(n)), sinks); err == nil || !strings.Contains(err.Error(), "gradient through a cache") {
		t.Errorf("%v", err)
	}
	closeCache(t, cache)
}

// randomDropoutProblem is randomGradProblem, or randomScoreModProblem, with dropout.
func randomDropoutProblem(rng *rand.Rand) *graphtest.Problem {
	p := randomGradProblem(rng)
	if rng.IntN(2) == 0 {
		p = randomScoreModProblem(rng)
	}
	return graphtest.NewProblem(rng, reftest.RandomDropout(rng, p.Shape), p.Spec)
}

// TestGradDropout is TestGradRandom with dropout: every run has a seed of its own, which the
// forward and the backward pass share.
func TestGradDropout(t *testing.T) { testGradRandom(t, randomDropoutProblem) }

// TestDropoutOff: a seed of 0, and a probability of 0, compute what attention without the
// option does, to the bit, forward and backward, in the graph that drops with another seed.
func TestDropoutOff(t *testing.T) {
	rng := reftest.Rand(t)
	changes := 0
	for range 12 {
		p := randomScoreModProblem(rng)
		results := func(option bool, probability float64, number int) (bits []uint64) {
			g := &gradients{Problem: p, Graph: p.Graph()}
			opts := append(g.Graph.Options(p), la.WithWorkers(3), la.WithTileTokens(16))
			opts = append(opts, g.LengthOptions(p)...)
			if option {
				opts = append(opts, la.WithDropout(probability, G.NewScalar(g.G, tensor.Int, G.WithName("seed"), G.WithValue(number))))
			}
			var err error
			if g.Out, err = la.Attention(g.Graph.Q, g.Graph.K, g.Graph.V, opts...); err != nil {
				t.Fatal(err)
			}
			grads, err := G.Grad(g.sum(t, rand.New(rand.NewPCG(1, 2)), cost{out: true}), g.Graph.Q, g.Graph.K, g.Graph.V)
			if err != nil {
				t.Fatal(err)
			}
			g.LSE = graphtest.LogSumExp(t, g.Out) // also behind gradients, which have the same node
			reads := graphtest.Read(append(grads, g.Out, g.LSE)...)
			g.Run(t)
			for _, v := range reads {
				bits = append(bits, graphtest.Bits(t, *v)...)
			}
			return bits
		}
		want := results(false, 0, 0)
		for _, c := range []struct {
			probability float64
			number      int
		}{{0.5, 0}, {0, 7}, {1e-12, 7}} {
			if !slices.Equal(results(true, c.probability, c.number), want) {
				t.Errorf("%v: a probability of %v and a seed of %d give other bits", p.Shape, c.probability, c.number)
			}
		}
		if !slices.Equal(results(true, 0.5, 7), want) {
			changes++
		}
	}
	if changes == 0 {
		t.Error("dropout changes nothing")
	}
}

// TestDropoutSeeds: seeds of all integer types drop the same, as Attend does; each value drops
// other weights; and of one seed all runs, machines and numbers of workers do the same.
func TestDropoutSeeds(t *testing.T) {
	rng := reftest.Rand(t)
	s := causal(dense(4, 2, 16, 8, 9, 40, 33))
	s.Dropout, s.Seed = 0.4, 12345
	p := graphtest.NewProblem(rng, s, graphtest.Spec{})
	a := p.Args()
	if err := la.Attend(a, append(p.AttendOptions(), la.WithSchedule(la.PerHead))...); err != nil {
		t.Fatal(err)
	}
	want := graphtest.Bits(t, a.Out)
	for _, seed := range []any{12345, int32(12345), int64(12345)} {
		for _, workers := range []int{1, 3} {
			g := p.Graph()
			var err error
			n := G.NodeFromAny(g.G, seed, G.WithName("another seed"))
			lengths := graphtest.Input(g.G, "lengths", graphtest.LengthsOf(tensor.Int, p.Keys))
			if g.Out, err = la.Attention(g.Q, g.K, g.V, append(p.Options(), la.WithLengths(lengths), la.WithDropout(0.4, n), la.WithSchedule(la.PerHead), la.WithWorkers(workers))...); err != nil {
				t.Fatal(err)
			}
			g.Read(t)
			vm := G.NewTapeMachine(g.G)
			for range 2 {
				graphtest.Again(t, vm)
				if !slices.Equal(graphtest.Bits(t, g.OutValue), want) {
					t.Errorf("a seed of %T, %d workers: other bits than Attend", seed, workers)
				}
			}
			if err := vm.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	seen := map[string]bool{}
	for _, seed := range []int64{0, 1, 2, -1, 1 << 32, math.MinInt64, math.MaxInt64} {
		a.Seed = seed
		if err := la.Attend(a, p.AttendOptions()...); err != nil {
			t.Fatal(err)
		}
		seen[fmt.Sprint(graphtest.Bits(t, a.Out))] = true
	}
	if len(seen) != 7 {
		t.Errorf("7 seeds have %d outputs", len(seen))
	}
}

// TestDropoutMean: over many seeds the mean is attention without dropout. Numbers and seeds are
// fixed: those of every run would be too far off some day.
func TestDropoutMean(t *testing.T) {
	s := dense(2, 1, 8, 8, 3, 50)
	s.Dropout = 0.3
	p := graphtest.NewProblem(rand.New(rand.NewPCG(3, 4)), s, graphtest.Spec{QueryType: tensor.Float64})
	a := p.Args()
	const n = 1000
	run := func(seed int) []float64 {
		a.Seed = int64(seed)
		if err := la.Attend(a, p.AttendOptions()...); err != nil {
			t.Fatal(err)
		}
		return graphtest.Floats(t, a.Out)
	}
	plain := slices.Clone(run(0))
	sum, squares := make([]float64, len(plain)), make([]float64, len(plain))
	for seed := range n {
		for i, x := range run(seed + 1) {
			sum[i] += x
			squares[i] += x * x
		}
	}
	for i, x := range plain {
		mean := sum[i] / n
		sigma := math.Sqrt((squares[i]/n - mean*mean) / n)
		if !(math.Abs(mean-x) < 6*sigma) {
			t.Errorf("element %d is %v, and %v in the mean, %.1f sigma off", i, x, mean, math.Abs(mean-x)/sigma)
		}
	}
}

// TestDropoutStock: a graph of Gorgonia's own ops that multiplies the weights by the same mask has
// the same output and gradients.
func TestDropoutStock(t *testing.T) {
	rng := reftest.Rand(t)
	for _, s := range []reftest.Shape{dense(3, 3, 8, 4, 5, 20), dense(2, 2, 4, 4, 70, 130)} {
		s.Dropout, s.Seed = 0.35, int64(rng.Uint64())|1
		p := graphtest.NewProblem(rng, s, graphtest.Spec{QueryType: tensor.Float64, Rank: 3})
		ours := differentiate(t, p, rng, cost{out: true})
		ours.Graph.Read(t)
		ours.Run(t)

		w := graphtest.NewWriter(t, rng, tensor.Float64)
		q, k, v := graphtest.Input(w.G, "q", p.InQ), graphtest.Input(w.G, "k", p.InK), graphtest.Input(w.G, "v", p.InV)
		var mask []float64
		for h := range s.Heads {
			for i := range s.Queries[0] {
				for j := range s.Keys[0] {
					mask = append(mask, s.Kept(0, i, h, j))
				}
			}
		}
		weights := w.Softmax(w.Times(w.BMM(q, k, false, true), w.Number(p.Scale)), 2)
		out := w.BMM(w.Times(weights, w.Constant("mask", mask, s.Heads, s.Queries[0], s.Keys[0])), v)
		wO := graphtest.Input(w.G, "wO", ours.wO.Value().(*tensor.Dense))
		grads, err := G.Grad(w.Must(G.Sum(w.Times(out, wO))), q, k, v)
		if err != nil {
			t.Fatal(err)
		}
		nodes := append([]*G.Node{out}, grads...)
		got := []G.Value{ours.Graph.OutValue, ours.dq, ours.dk, ours.dv}
		for i, want := range graphtest.Outputs(t, w.G, graphtest.Read(nodes...)) {
			if err := graphtest.Within(graphtest.Floats(t, got[i]), want, 1e-11); err != nil {
				t.Errorf("%v, %s: %v", s, []string{"out", "dq", "dk", "dv"}[i], err)
			}
		}
	}
}

// TestDropoutBadInput: probabilities, nodes and values that are none, and ways that have no dropout.
func TestDropoutBadInput(t *testing.T) {
	p := graphtest.NewProblem(reftest.Rand(t), dense(6, 3, 8, 4, 1, 5), graphtest.Spec{})
	for _, x := range []float64{-0.1, 1, 2, math.NaN(), math.Inf(1), math.Inf(-1)} {
		g := G.NewGraph()
		q, k, v, seed := goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v"), G.NewScalar(g, tensor.Int, G.WithName("seed"))
		checkBuilder(t, "Attention", g, func() (*G.Node, error) { return la.Attention(q, k, v, la.WithDropout(x, seed)) }, la.ErrOption, fmt.Sprintf("WithDropout(%v) is outside [0, 1)", x))
		a := p.Args()
		wantError(t, la.Attend(a, la.WithDropout(x, nil)), la.ErrOption, "Attend", fmt.Sprintf("WithDropout(%v) is outside [0, 1)", x))
		if !graphtest.AllNaN(t, a.Out) {
			t.Errorf("a dropout of %v: something was written", x)
		}
	}
	for _, c := range []struct {
		name string
		seed func(g *G.ExprGraph) *G.Node
		want error
		text string
	}{
		{"nil", func(*G.ExprGraph) *G.Node { return nil }, la.ErrOption, "WithDropout(0.5, nil)"},
		{"float", func(g *G.ExprGraph) *G.Node { return G.NewScalar(g, tensor.Float64, G.WithName("seed")) }, la.ErrDType, "seed is float64; it must be int, int32 or int64"},
		{"vector", func(g *G.ExprGraph) *G.Node { return input3{tensor.Int, []int{1}}.node(g, "seed") }, la.ErrShape, "seed has shape (1); it must be a scalar"},
		{"another graph", func(*G.ExprGraph) *G.Node { return G.NewScalar(G.NewGraph(), tensor.Int, G.WithName("seed")) }, la.ErrGraph, "seed is in another graph than q"},
		{"untyped", func(g *G.ExprGraph) *G.Node { return G.NewUniqueNode(G.In(g), G.WithName("untyped")) }, la.ErrDType, "seed has no element type"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := G.NewGraph()
			q, k, v, seed := goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v"), c.seed(g)
			checkBuilder(t, "Attention", g, func() (*G.Node, error) { return la.Attention(q, k, v, la.WithDropout(0.5, seed)) }, c.want, c.text)
		})
	}
	g := G.NewGraph()
	q, k, v, seed := goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v"), G.NewScalar(g, tensor.Int, G.WithName("seed"))
	checkBuilder(t, "Default", g, func() (*G.Node, error) { return la.Default(q, k, v, la.WithDropout(0.5, seed)) }, la.ErrUnsupported, "WithDropout")
	wantError(t, la.Attend(p.Args(), la.WithDropout(0.5, seed)), la.ErrOption, "Attend", "WithDropout(0.5) has a node as the seed: give nil, and Args.Seed")

	n, err := la.Attention(q, k, v, la.WithDropout(0.5, seed))
	if err != nil {
		t.Fatal(err)
	}
	values := []G.Value{goodQ.tensor(), goodK.tensor(), goodV.tensor()}
	for _, c := range []struct {
		seed G.Value
		want error
		text string
	}{
		{nil, la.ErrShape, "seed is nil"},
		{(*tensor.Dense)(nil), la.ErrShape, "seed is nil"},
		{G.NewF64(1), la.ErrDType, "seed is a *gorgonia.F64"},
		{input3{tensor.Int, []int{2}}.tensor(), la.ErrShape, "seed has shape (2)"},
		{tensor.New(tensor.FromScalar(1.5)), la.ErrDType, "seed is float64"},
	} {
		out, err := n.Op().Do(append(values, c.seed)...)
		wantError(t, err, c.want, "Attention", c.text)
		if out != nil {
			t.Errorf("%v: a value beside the error", c.text)
		}
	}
	if _, err := n.Op().Do(append(values, tensor.New(tensor.FromScalar(3)))...); err != nil {
		t.Errorf("a tensor that is a scalar: %v", err)
	}
}

// fusedDropout is a graph with Gorgonia's Dropout, rewritten, and the nodes of the seeds.
func fusedDropout(t *testing.T, roots ...*G.Node) (f *rewrite.Fused, seeds []*G.Node) {
	t.Helper()
	f, err := rewrite.Fuse(roots...)
	if err != nil {
		t.Fatal(err)
	}
	if graphtest.Count(f.Graph, "Dropout") != 0 || len(f.Misses) != 0 {
		t.Errorf("a Dropout is left: %v", f)
	}
	for _, n := range f.Graph.AllNodes() {
		if n.Op() != nil && n.Op().String() == "Seed" {
			seeds = append(seeds, n)
		}
	}
	return f, seeds
}

// TestFuseDropout: Dropout behind the softmax is dropout of the node, with another seed in each run; the
// gradient is that of the run. The results are those of Attention with that seed.
func TestFuseDropout(t *testing.T) {
	rng := reftest.Rand(t)
	for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		w := graphtest.NewWriter(t, rng, dtype)
		q, k, v := w.QKV()
		mask := w.Input("mask", 2, 3, 5)
		p := w.Softmax(w.Add(w.BMM(q, k, false, true), mask), 2)
		f, seeds := fusedDropout(t, w.BMM(w.Must(G.Dropout(p, 0.4)), v))
		if len(f.Matches) != 1 || len(seeds) != 1 || !strings.HasSuffix(f.Matches[0].String(), ", dropout 0.4") {
			t.Fatalf("%v", f)
		}
		wO := graphtest.Input(f.Graph, "wO", w.Random(2, 3, 6))
		wrt := G.Nodes{f.Node(q), f.Node(k), f.Node(v)}
		grads, err := G.Grad(G.Must(G.Sum(G.Must(G.HadamardProd(f.Roots[0], wO)))), wrt...)
		if err != nil {
			t.Fatal(err)
		}
		reads := graphtest.Read(append([]*G.Node{f.Roots[0], seeds[0]}, grads...)...)

		g := G.NewGraph()
		seed := G.NewScalar(g, tensor.Int64, G.WithName("seed"))
		var in G.Nodes
		for _, n := range append(wrt, f.Node(mask), wO) {
			in = append(in, graphtest.Input(g, n.Name(), n.Value().(*tensor.Dense)))
		}
		out, err := la.Attention(in[0], in[1], in[2], la.WithScale(1), la.WithBias(in[3]), la.WithDropout(0.4, seed))
		if err != nil {
			t.Fatal(err)
		}
		wantGrads, err := G.Grad(G.Must(G.Sum(G.Must(G.HadamardProd(out, in[4])))), in[:3]...)
		if err != nil {
			t.Fatal(err)
		}
		wants := graphtest.Read(append([]*G.Node{out}, wantGrads...)...)

		vm, other := G.NewTapeMachine(f.Graph), G.NewTapeMachine(g)
		seen := map[int64]bool{}
		for range 5 {
			graphtest.Again(t, vm)
			s := (*reads[1]).Data().(int64)
			seen[s] = true
			if err := G.Let(seed, s); err != nil {
				t.Fatal(err)
			}
			graphtest.Again(t, other)
			for i, got := range append([]*G.Value{reads[0]}, reads[2:]...) {
				if !slices.Equal(graphtest.Bits(t, *got), graphtest.Bits(t, *wants[i])) {
					t.Errorf("%v, seed %d: result %d is %v, want %v", dtype, s, i, *got, *wants[i])
				}
			}
		}
		if len(seen) != 5 || seen[0] {
			t.Errorf("seeds of 5 runs: %v", seen)
		}
		for _, m := range []G.VM{vm, other} {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}

		// A machine for evaluation switches it off, and one for training on again.
		for _, off := range []bool{true, false} {
			var opts []G.VMOpt
			if off {
				opts = append(opts, G.EvalMode())
			}
			vm := G.NewTapeMachine(f.Graph, opts...)
			graphtest.Again(t, vm)
			if s := (*reads[1]).Data().(int64); (s == 0) != off {
				t.Errorf("switched off is %t, and the seed %d", off, s)
			}
			if err := vm.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestFuseDropoutForms: where it may be, and that each attention has a seed of its own.
func TestFuseDropoutForms(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range []struct {
		name  string
		write func(w *graphtest.Writer) *G.Node
		nodes []string
		seeds int
	}{
		{"one behind another", func(w *graphtest.Writer) *G.Node {
			q, k, v := w.QKV()
			return w.BMM(w.Must(G.Dropout(w.Must(G.Dropout(w.Softmax(w.BMM(q, k, false, true), 2), 0.5)), 0.75)), v)
		}, []string{"heads 2/2, queries 3, keys 5, scale 1, dropout 0.875"}, 1},
		{"weights in other stacks", func(w *graphtest.Writer) *G.Node {
			q, k, v := w.QKV()
			p := w.Softmax(w.Shape(w.BMM(q, k, false, true), 6, 5))
			return w.BMM(w.Shape(w.Must(G.Dropout(p, 0.5)), 2, 3, 5), v)
		}, []string{"heads 2/2, queries 3, keys 5, scale 1, dropout 0.5"}, 1},
		{"keys times queries", func(w *graphtest.Writer) *G.Node {
			q, k, v := w.QKV()
			return w.BMM(w.Must(G.Dropout(w.ByHand(w.BMM(k, q, false, true), 1, true), 0.5)), v, true)
		}, []string{"heads 2/2, queries 3, keys 5, scale 1, dropout 0.5"}, 1},
		{"heads in a loop", func(w *graphtest.Writer) *G.Node {
			q, k, v := w.Input("q", 4, 6), w.Input("k", 4, 6), w.Input("v", 4, 6)
			return w.Loop(3, q, k, v, func(q, k, v *G.Node) *G.Node {
				return w.Mul(w.Must(G.Dropout(w.Softmax(w.Mul(q, w.Swap(k))), 0.5)), v)
			})
		}, []string{"heads 3/3, queries 4, keys 4, scale 1, dropout 0.5"}, 1},
		{"heads in a loop, of other probabilities", func(w *graphtest.Writer) *G.Node {
			q, k, v := w.Input("q", 4, 6), w.Input("k", 4, 6), w.Input("v", 4, 6)
			p := 0.5
			return w.Loop(2, q, k, v, func(q, k, v *G.Node) *G.Node {
				p /= 2
				return w.Mul(w.Must(G.Dropout(w.Softmax(w.Mul(q, w.Swap(k))), p)), v)
			})
		}, []string{"heads 1/1, queries 4, keys 4, scale 1, dropout 0.25", "heads 1/1, queries 4, keys 4, scale 1, dropout 0.125"}, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := graphtest.NewWriter(t, rng, tensor.Float64)
			out := c.write(w)
			f, seeds := fusedDropout(t, out)
			var nodes []string
			for _, m := range f.Matches {
				nodes = append(nodes, node(m))
			}
			if !slices.Equal(nodes, c.nodes) || len(seeds) != c.seeds {
				t.Errorf("%d seeds, %q", len(seeds), nodes)
			}
			// Switched off, both graphs compute the same.
			var want []float64
			for i, g := range []*G.ExprGraph{w.G, f.Graph} {
				reads := graphtest.Read([]*G.Node{out, f.Roots[0]}[i])
				vm := G.NewTapeMachine(g, G.EvalMode())
				graphtest.Again(t, vm)
				got := slices.Clone(graphtest.Floats(t, *reads[0]))
				if i == 0 {
					want = got
				} else if err := graphtest.Near(got, want, w.DType); err != nil {
					t.Error(err)
				}
				if err := vm.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestFuseDropoutGradients: a graph that has gradients already is left alone.
func TestFuseDropoutGradients(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	q, k, v := w.QKV()
	o := w.BMM(w.Must(G.Dropout(w.Softmax(w.BMM(q, k, false, true), 2), 0.5)), v)
	cost := w.Must(G.Sum(o))
	grads, err := G.Grad(cost, q)
	if err != nil {
		t.Fatal(err)
	}
	f, err := rewrite.Fuse(append([]*G.Node{cost}, grads...)...)
	if err != nil {
		t.Fatal(err)
	}
	(&written{misses: []string{"call Fuse before Grad"}}).check(t, f)
}
