package leanattention_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gputest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// testGPTOSS is the attention of gpt-oss: sinks in every layer, and a window in every second one; prompts in chunks, and
// tokens behind them.
func testGPTOSS(t *testing.T, at graphtest.Place, heads, kvHeads, window, prompt, rows int) {
	rng := reftest.Rand(t)
	full := reftest.RandomSinks(rng, reftest.Shape{Heads: heads, Mask: attn.Mask{Causal: true}})
	windowed := reftest.RandomSinks(rng, full)
	windowed.Window = window
	at.Layers = []reftest.Shape{windowed, full}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: kvHeads, HeadDim: 64, DType: la.BFloat16, PageSize: 16, Pages: 2*(prompt/16+2) + 8, Device: at.GPU})
	la.PoisonFree(cache)
	read := graphtest.NewDecoderAt(t, at, cache, rows, heads, tensor.Float32, true)
	seqs := []*graphtest.Stored{graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)}
	for _, parts := range la.Chunks(rows, []la.Append{{Seq: seqs[0].Seq, Tokens: prompt}, {Seq: seqs[1].Seq, Tokens: window / 2}}) {
		var appended []graphtest.Appended
		for _, p := range parts {
			appended = append(appended, graphtest.Appended{To: seqs[p.Of], Tokens: p.To - p.From})
		}
		read.Do(t, rng, reftest.Normal, appended...)
	}
	decode := graphtest.NewDecoderAt(t, at, cache, 3, heads, tensor.Float32, true) // a row is nobody's
	for range 3 {
		decode.Do(t, rng, reftest.Peaked, graphtest.Appended{To: seqs[1], Tokens: 1}, graphtest.Appended{To: seqs[0], Tokens: 1})
	}
	closeCache(t, cache)
}

func TestGPTOSS(t *testing.T) { testGPTOSS(t, graphtest.Place{}, 64, 8, 128, 200, 90) }

func TestGPUGPTOSS(t *testing.T) {
	gpu := gputest.Open(t)
	for _, there := range []bool{false, true} {
		testGPTOSS(t, graphtest.Place{GPU: gpu, Real: true, There: there}, 16, 2, 24, 50, 30)
	}
}

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
			if err := la.Attend(a, append(p.Options(), la.WithWorkers(3))...); err != nil {
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
	f, err := la.Fuse(ours, stock)
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

// TestGPUSinksComputed: sinks that a node makes on the GPU, in a graph whose nodes share memory.
func TestGPUSinksComputed(t *testing.T) {
	gpu := gputest.Open(t)
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{3}, Keys: []int{3}, Mask: attn.Mask{Causal: true}}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, PageSize: 4, Pages: 3, Device: gpu})
	step, err := cache.NewStep(3)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	there := func(n *G.Node) *G.Node {
		return graphtest.Move(t, n, func(n *G.Node) (*G.Node, error) { return la.ToDevice(n, gpu) })
	}
	q, k, v, half := f32(3, 256).node(g, "q"), f32(3, 128).node(g, "k"), f32(3, 128).node(g, "v"), f32(1, 4).node(g, "half")
	sinks, err := nn.Scale(there(half), 2)
	if err != nil {
		t.Fatal(err)
	}
	if sinks, err = nn.Reshape(sinks, 4); err != nil {
		t.Fatal(err)
	}
	out, err := la.CachedAttention(there(q), there(k), there(v), step.Layer(0), la.WithCausal(), la.WithSinks(sinks))
	if err != nil {
		t.Fatal(err)
	}
	var result G.Value
	G.Read(graphtest.Move(t, out, la.ToHost), &result)
	if err := la.ShareMemory(g); err != nil {
		t.Fatal(err)
	}
	vm := graphtest.NewTapeMachine(g)
	defer vm.Close()
	for range 3 {
		s = reftest.RandomSinks(rng, s)
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
		halves := slices.Clone(s.Sinks)
		for i := range halves {
			halves[i] /= 2
		}
		for _, x := range []struct {
			n     *G.Node
			of    []float64
			shape []int
		}{{q, c.Q, []int{3, 256}}, {k, c.K, []int{3, 128}}, {v, c.V, []int{3, 128}}, {half, halves, []int{1, 4}}} {
			graphtest.Let(t, x.n, graphtest.TensorOf(tensor.Float32, x.of, x.shape...))
		}
		if err := step.Set([]la.Append{{Seq: graphtest.NewStored(t, cache).Seq, Tokens: 3}}); err != nil {
			t.Fatal(err)
		}
		graphtest.Again(t, vm)
		got := graphtest.Floats(t, result)
		want := c.Reference(graphtest.Place{GPU: gpu, Real: true}.Precision(tensor.Float32, tensor.Float32))
		if err := want.CompareO(func(_, pos, h, i int) float64 { return got[(pos*4+h)*64+i] }); err != nil {
			t.Errorf("%v: %v", s, err)
		}
		if err := step.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
	closeCache(t, cache)
}
