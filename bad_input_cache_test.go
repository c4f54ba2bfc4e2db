package leanattention_test

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func TestBadInputNewCache(t *testing.T) {
	good := la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 8, ValueDim: 4, DType: la.Float16, PageSize: 4, Pages: 3}
	noMachine := la.ErrOutOfMemory
	if math.MaxInt == math.MaxInt32 {
		noMachine = la.ErrShape
	}
	for _, c := range []struct {
		change func(*la.CacheConfig)
		want   error
		text   string
	}{
		{func(c *la.CacheConfig) { *c = la.CacheConfig{} }, la.ErrShape, "Layers is 0"},
		{func(c *la.CacheConfig) { c.Layers = -1 }, la.ErrShape, "Layers is -1"},
		{func(c *la.CacheConfig) { c.KVHeads = 0 }, la.ErrShape, "KVHeads is 0"},
		{func(c *la.CacheConfig) { c.HeadDim = 0 }, la.ErrShape, "HeadDim is 0"},
		{func(c *la.CacheConfig) { c.ValueDim = -2 }, la.ErrShape, "ValueDim is -2"},
		{func(c *la.CacheConfig) { c.PageSize = -4 }, la.ErrShape, "PageSize is -4"},
		{func(c *la.CacheConfig) { c.Pages = 0 }, la.ErrShape, "Pages is 0"},
		{func(c *la.CacheConfig) { c.Pages = math.MaxInt32; c.Pages++ }, la.ErrShape, fmt.Sprintf("outside [1, %d]", math.MaxInt32)},
		{func(c *la.CacheConfig) { c.Pages, c.PageSize, c.KVHeads = math.MaxInt32, math.MaxInt32, 64 }, la.ErrShape, "more bytes than an address has"},
		{func(c *la.CacheConfig) { c.Layers, c.Pages, c.PageSize = math.MaxInt32, math.MaxInt32, 8 }, la.ErrShape, "more bytes than an address has"},
		{func(c *la.CacheConfig) { c.Pages, c.PageSize = math.MaxInt32, 1<<28 }, la.ErrShape, "2147483647 pages"},
		{func(c *la.CacheConfig) { c.Pages, c.PageSize = math.MaxInt32, 1<<20 }, noMachine, "2147483647 pages"}, // where an int has 64 bits, they fit an int
		{func(c *la.CacheConfig) { c.DType = tensor.Float64 }, la.ErrDType, "DType is float64"},
		{func(c *la.CacheConfig) { c.DType = tensor.Int16 }, la.ErrDType, "DType is int16"},
	} {
		cfg := good
		c.change(&cfg)
		cache, err := la.NewCache(cfg)
		wantError(t, err, c.want, "NewCache", c.text)
		if cache != nil {
			t.Errorf("%+v: a cache beside the error", cfg)
		}
	}
	// The defaults.
	cfg := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 8, Pages: 1}).Config()
	if want := (la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 8, ValueDim: 8, DType: tensor.Float32, PageSize: 64, Pages: 1}); !reflect.DeepEqual(cfg, want) {
		t.Errorf("config is %+v, want %+v", cfg, want)
	}
}

func TestBadInputCachedAttention(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 3, HeadDim: 8, ValueDim: 4, PageSize: 4, Pages: 3})
	step, err := cache.NewStep(5)
	if err != nil {
		t.Fatal(err)
	}
	goodQ, goodK, goodV := f32(5, 48), f32(5, 24), f32(5, 12)
	double := func(shape ...int) input3 { return input3{tensor.Float64, shape} }
	for _, c := range []struct {
		name    string
		q, k, v input3
		want    error
		text    string
	}{
		{"q of rank 3", f32(5, 6, 8), goodK, goodV, la.ErrShape, "q has rank 3"},
		{"q of rank 1", f32(5), goodK, goodV, la.ErrShape, "q has rank 1"},
		{"k of rank 3", goodQ, f32(5, 3, 8), goodV, la.ErrShape, "k has rank 3"},
		{"v of rank 4", goodQ, goodK, f32(1, 5, 3, 4), la.ErrShape, "v has rank 4"},
		{"rows of q", f32(4, 48), goodK, goodV, la.ErrShape, "q has 4 rows and the step 5 tokens"},
		{"rows of k", goodQ, f32(6, 24), goodV, la.ErrShape, "k has 6 rows"},
		{"rows of v", goodQ, goodK, f32(1, 12), la.ErrShape, "v has 1 row"},
		{"width of q", f32(5, 47), goodK, goodV, la.ErrShape, "q has 47 columns"},
		{"heads of q", f32(5, 32), goodK, goodV, la.ErrShape, "q has 4 heads, not a multiple of the cache's 3 KV heads"},
		{"no heads of q", f32(5, 0), goodK, goodV, la.ErrShape, "q has 0 columns"},
		{"width of k", goodQ, f32(5, 48), goodV, la.ErrShape, "k has 48 columns; the cache's 3 KV heads need 24"},
		{"width of v", goodQ, goodK, f32(5, 24), la.ErrShape, "v has 24 columns; the cache's 3 KV heads need 12"},
		{"float16 q", input3{la.Float16, []int{5, 48}}, goodK, goodV, la.ErrDType, "q is Float16"},
		{"int k", goodQ, input3{tensor.Int, []int{5, 24}}, goodV, la.ErrDType, "k is int"},
		{"float64 k", goodQ, double(5, 24), goodV, la.ErrDType, "k is float64 and q is float32"},
		{"float64 v", goodQ, goodK, double(5, 12), la.ErrDType, "v is float64 and q is float32"},
		{"float64 q", double(5, 48), goodK, goodV, la.ErrDType, "k is float32 and q is float64"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := G.NewGraph()
			q, k, v := c.q.node(g, "q"), c.k.node(g, "k"), c.v.node(g, "v")
			checkBuilder(t, "CachedAttention", g, func() (*G.Node, error) { return la.CachedAttention(q, k, v, step.Layer(0)) }, c.want, c.text)
		})
	}
	with := func(name string, want error, text string, layer la.Layer, f func(g *G.ExprGraph, x *[3]*G.Node) []la.Option) {
		t.Run(name, func(t *testing.T) {
			g := G.NewGraph()
			x := [3]*G.Node{goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v")}
			opts := f(g, &x)
			checkBuilder(t, "CachedAttention", g, func() (*G.Node, error) { return la.CachedAttention(x[0], x[1], x[2], layer, opts...) }, want, text)
		})
	}
	none := func(*G.ExprGraph, *[3]*G.Node) []la.Option { return nil }
	with("no layer", la.ErrState, "layer of no step", la.Layer{}, none)
	with("layer of an empty step", la.ErrState, "layer of no step", new(la.Step).Layer(0), none)
	with("negative layer", la.ErrShape, "layer -1 of a cache with 2 layers", step.Layer(-1), none)
	with("layer past the last", la.ErrShape, "layer 2 of a cache with 2 layers", step.Layer(2), none)
	for i, name := range []string{"q", "k", "v"} {
		with("nil "+name, la.ErrGraph, name+" is nil", step.Layer(0), func(_ *G.ExprGraph, x *[3]*G.Node) []la.Option {
			x[i] = nil
			return nil
		})
		if i > 0 {
			with(name+" of another graph", la.ErrGraph, name+" is in another graph than q", step.Layer(0), func(_ *G.ExprGraph, x *[3]*G.Node) []la.Option {
				x[i] = []input3{goodQ, goodK, goodV}[i].node(G.NewGraph(), name)
				return nil
			})
		}
	}
	for _, o := range badOptions {
		with(o.name, o.want, o.text, step.Layer(0), func(*G.ExprGraph, *[3]*G.Node) []la.Option { return []la.Option{o.opt} })
	}
	with("lengths", la.ErrUnsupported, "WithLengths", step.Layer(0), func(g *G.ExprGraph, _ *[3]*G.Node) []la.Option {
		return []la.Option{la.WithLengths(input3{tensor.Int, []int{5}}.node(g, "lengths"))}
	})
	with("bias", la.ErrUnsupported, "WithBias", step.Layer(0), func(*G.ExprGraph, *[3]*G.Node) []la.Option { return []la.Option{la.WithBias(nil)} })
	for _, c := range []struct {
		name   string
		config rope.Config
		want   error
		text   string
	}{
		{"rotary of other heads", rope.Config{HeadDim: 16}, la.ErrShape, "WithRotary: HeadDim is 16, and the cache has heads of 8"},
		{"negative rotary heads", rope.Config{HeadDim: -8}, la.ErrShape, "WithRotary: rope.Config: HeadDim is -8"},
		{"rotary of odd elements", rope.Config{Dim: 3}, la.ErrShape, "WithRotary: rope.Config: 3 elements of heads of 8 are turned"},
		{"rotary of more elements", rope.Config{Dim: 10}, la.ErrShape, "WithRotary: rope.Config: 10 elements of heads of 8 are turned"},
		{"rotary base", rope.Config{Base: 1}, la.ErrOption, "WithRotary: rope.Config: Base is 1"},
		{"rotary scaling", rope.Config{Scaling: rope.YaRN{Factor: 0.5}}, la.ErrOption, "WithRotary: rope.Config: rope.YaRN: Factor must be a number from 1 on"},
	} {
		with(c.name, c.want, c.text, step.Layer(0), func(*G.ExprGraph, *[3]*G.Node) []la.Option { return []la.Option{la.WithRotary(c.config)} })
	}
	with("nil sinks", la.ErrOption, "WithSinks(nil)", step.Layer(0), func(*G.ExprGraph, *[3]*G.Node) []la.Option { return []la.Option{la.WithSinks(nil)} })
	with("sinks of KV heads", la.ErrShape, "sinks has shape (3); it must be (6)", step.Layer(0), func(g *G.ExprGraph, _ *[3]*G.Node) []la.Option {
		return []la.Option{la.WithSinks(f32(3).node(g, "sinks"))}
	})
	with("float64 sinks", la.ErrDType, "sinks is float64", step.Layer(0), func(g *G.ExprGraph, _ *[3]*G.Node) []la.Option {
		return []la.Option{la.WithSinks(double(6).node(g, "sinks"))}
	})
	with("sinks of another graph", la.ErrGraph, "sinks is in another graph than q", step.Layer(0), func(*G.ExprGraph, *[3]*G.Node) []la.Option {
		return []la.Option{la.WithSinks(f32(6).node(G.NewGraph(), "sinks"))}
	})
}

// TestBadInputCachedValues: values that are not the nodes' change neither the
// cache nor the step.
func TestBadInputCachedValues(t *testing.T) {
	rng := reftest.Rand(t)
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, PageSize: 4, Pages: 3})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	q := f32(2, 8).node(g, "q")
	n, err := la.CachedAttention(q, f32(2, 4).node(g, "k"), f32(2, 4).node(g, "v"), step.Layer(0))
	if err != nil {
		t.Fatal(err)
	}
	seq := graphtest.NewStored(t, cache).Seq
	if err := step.Set([]la.Append{{Seq: seq, Tokens: 2}}); err != nil {
		t.Fatal(err)
	}
	ones := func(dt tensor.Dtype, shape ...int) *tensor.Dense {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = rng.NormFloat64()
		}
		return graphtest.TensorOf(dt, x, shape...)
	}
	gq, gk := ones(tensor.Float32, 2, 8), ones(tensor.Float32, 2, 4)
	before := la.Slabs(cache)
	for _, c := range []struct {
		in   []G.Value
		want error
		text string
	}{
		{nil, la.ErrShape, "0 inputs"},
		{[]G.Value{gq, gk}, la.ErrShape, "2 inputs"},
		{[]G.Value{gq, gk, gk, gk}, la.ErrShape, "4 inputs"},
		{[]G.Value{nil, gk, gk}, la.ErrShape, "q is nil"},
		{[]G.Value{gq, gk, (*tensor.Dense)(nil)}, la.ErrShape, "v is nil"},
		{[]G.Value{gq, G.NewF32(1), gk}, la.ErrUnsupported, "k is a *gorgonia.F32"},
		{[]G.Value{gq, gk, ones(tensor.Float32, 2, 5)}, la.ErrShape, "v has 5 columns"},
		{[]G.Value{gk, gk, gk}, la.ErrShape, "not what the graph was built for"},
		{[]G.Value{ones(tensor.Float64, 2, 8), ones(tensor.Float64, 2, 4), ones(tensor.Float64, 2, 4)}, la.ErrShape, "not what the graph was built for"},
	} {
		out, err := n.Op().Do(c.in...)
		wantError(t, err, c.want, "CachedAttention", c.text)
		if out != nil {
			t.Error("a value beside the error")
		}
	}
	if !slices.Equal(la.Slabs(cache), before) {
		t.Error("the cache was written before the error")
	}
	wantError(t, step.Commit(), la.ErrState, "Commit", "layer 0")
	if _, err := n.Op().Do(gq, gk, gk); err != nil {
		t.Fatal(err)
	}
	if slices.Equal(la.Slabs(cache), before) {
		t.Error("a run wrote nothing")
	}
	if err := step.Commit(); err != nil {
		t.Fatal(err)
	}
	_, err = n.Op().Do(gq, gk, gk)
	wantError(t, err, la.ErrState, "CachedAttention", "layer 0: step is not open")
}

// TestBadInputState: calls out of order, and arguments out of range, of caches,
// sequences and steps. Each leaves everything as it was.
func TestBadInputState(t *testing.T) {
	rng := reftest.Rand(t)
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 4, PageSize: 4, Pages: 5})
	other := graphtest.NewStored(t, graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 4, PageSize: 4, Pages: 5}))
	d, d2 := graphtest.NewDecoder(t, cache, 12, 1, tensor.Float32, true), graphtest.NewDecoder(t, cache, 12, 1, tensor.Float32, true)
	a, b, c, gone := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache), graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
	if err := gone.Seq.Release(); err != nil {
		t.Fatal(err)
	}
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 6}, graphtest.Appended{To: b, Tokens: 3}) // 3 pages of 5

	unchanged := func(name string) {
		t.Helper()
		s := cache.Stats()
		if s.FreePages != 2 || s.Sequences != 3 || s.Tokens != 9 || a.Seq.Len() != 6 || b.Seq.Len() != 3 {
			t.Fatalf("%s changed something: %+v, lengths %d, %d", name, s, a.Seq.Len(), b.Seq.Len())
		}
	}
	for _, n := range []int{0, -1, 1<<24 + 1} {
		s, err := cache.NewStep(n)
		wantError(t, err, la.ErrLength, "NewStep", fmt.Sprint(n))
		if s != nil {
			t.Error("a step beside the error")
		}
	}
	for _, x := range []struct {
		name    string
		appends []la.Append
		want    error
		text    string
	}{
		{"no sequence", []la.Append{{Seq: a.Seq, Tokens: 1}, {Tokens: 1}}, la.ErrState, "append 1 has no sequence"},
		{"empty sequence", []la.Append{{Seq: new(la.Sequence), Tokens: 1}}, la.ErrState, "append 0: sequence was not made by NewSequence"},
		{"another cache's", []la.Append{{Seq: other.Seq, Tokens: 1}}, la.ErrState, "append 0 has a sequence of another cache"},
		{"released", []la.Append{{Seq: gone.Seq, Tokens: 1}}, la.ErrClosed, "released"},
		{"twice", []la.Append{{Seq: a.Seq, Tokens: 1}, {Seq: b.Seq, Tokens: 1}, {Seq: a.Seq, Tokens: 1}}, la.ErrState, "appends 0 and 2"},
		{"no tokens", []la.Append{{Seq: a.Seq}}, la.ErrLength, "append 0 has 0 tokens"},
		{"negative tokens", []la.Append{{Seq: a.Seq, Tokens: 1}, {Seq: b.Seq, Tokens: -1}}, la.ErrLength, "append 1 has -1 tokens"},
		{"too many tokens", []la.Append{{Seq: c.Seq, Tokens: 5}, {Seq: b.Seq, Tokens: 8}}, la.ErrLength, "append 1 has 8 tokens, outside [1, 7]"},
		{"huge tokens", []la.Append{{Seq: c.Seq, Tokens: 5}, {Seq: b.Seq, Tokens: math.MaxInt}}, la.ErrLength, "append 1 has"},
		{"cache full", []la.Append{{Seq: a.Seq, Tokens: 2}, {Seq: c.Seq, Tokens: 9}}, la.ErrCacheFull, "3 pages of 4 tokens needed, 2 of 5 free"},
	} {
		wantError(t, d.Step.Set(x.appends), x.want, "Set", x.text)
		unchanged("Set: " + x.name)
	}
	wantError(t, d.Step.Commit(), la.ErrState, "Commit", "not open")
	if err := d.Step.Rollback(); err != nil {
		t.Errorf("Rollback of a step that is not open: %v", err)
	}
	wantError(t, la.Cause(d.VM.RunAll()), la.ErrState, "CachedAttention", "layer 0", "Set")
	d.VM.Reset()
	wantError(t, a.Seq.Truncate(-1), la.ErrLength, "Truncate", "-1 tokens of a sequence of 6")
	wantError(t, a.Seq.Truncate(7), la.ErrLength, "Truncate", "7 tokens of a sequence of 6")
	wantError(t, gone.Seq.Truncate(0), la.ErrClosed, "Truncate", "released")
	wantError(t, gone.Seq.Release(), la.ErrClosed, "Release", "released")
	_, err := gone.Seq.Fork()
	wantError(t, err, la.ErrClosed, "Fork", "released")
	if gone.Seq.Len() != 0 {
		t.Errorf("a released sequence has length %d", gone.Seq.Len())
	}
	unchanged("a refused call")

	// A sequence in an open step.
	u := d.Set(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 2}, graphtest.Appended{To: c, Tokens: 1})
	wantError(t, d.Step.Set([]la.Append{{Seq: b.Seq, Tokens: 1}}), la.ErrState, "Set", "step is open")
	wantError(t, d2.Step.Set([]la.Append{{Seq: b.Seq, Tokens: 1}, {Seq: a.Seq, Tokens: 1}}), la.ErrState, "Set", "open step")
	wantError(t, a.Seq.Truncate(1), la.ErrState, "Truncate", "open step")
	wantError(t, a.Seq.Release(), la.ErrState, "Release", "open step")
	_, err = a.Seq.Fork()
	wantError(t, err, la.ErrState, "Fork", "open step")
	wantError(t, d.Step.Commit(), la.ErrState, "Commit", "no layer has run since Set", "machine.Reset")
	d.Run(t, u)
	if err := d.Step.Rollback(); err != nil {
		t.Fatal(err)
	}
	unchanged("a step that was rolled back")
	wantError(t, d.Step.Commit(), la.ErrState, "Commit", "not open")

	// Everything goes on as if nothing had been.
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: b, Tokens: 1}, graphtest.Appended{To: a, Tokens: 2})

	if err := cache.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = cache.NewSequence()
	wantError(t, err, la.ErrClosed, "NewSequence", "cache")
	_, err = cache.NewStep(1)
	wantError(t, err, la.ErrClosed, "NewStep", "cache")
	_, err = a.Seq.Fork()
	wantError(t, err, la.ErrClosed, "Fork", "cache")
	wantError(t, a.Seq.Truncate(0), la.ErrClosed, "Truncate", "cache")
	wantError(t, a.Seq.Release(), la.ErrClosed, "Release", "cache")
	wantError(t, d.Step.Set(nil), la.ErrClosed, "Set", "cache")
	wantError(t, d.Step.Commit(), la.ErrClosed, "Commit", "cache")
	wantError(t, d.Step.Rollback(), la.ErrClosed, "Rollback", "cache")
	wantError(t, cache.Close(), la.ErrClosed, "Close", "cache")
	wantError(t, la.Cause(d.VM.RunAll()), la.ErrClosed, "CachedAttention", "cache")
}
