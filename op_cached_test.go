package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// decoder is a graph with one CachedAttention node for each layer of a cache,
// whose inputs a test sets freely.
type decoder struct {
	cache      *la.Cache
	step       *la.Step
	heads      int
	query      tensor.Dtype
	causal     bool
	vm         G.VM
	q, k, v    []*G.Node // one for each layer
	outV, lseV []G.Value
}

func newCache(t testing.TB, c la.CacheConfig) *la.Cache {
	t.Helper()
	cache, err := la.NewCache(c)
	if err != nil {
		t.Fatal(err)
	}
	return cache
}

func newDecoder(t testing.TB, c *la.Cache, tokens, heads int, query tensor.Dtype, causal bool, opts ...la.Option) *decoder {
	t.Helper()
	step, err := c.NewStep(tokens)
	if err != nil {
		t.Fatal(err)
	}
	cfg := c.Config()
	d := &decoder{cache: c, step: step, heads: heads, query: query, causal: causal}
	d.outV, d.lseV = make([]G.Value, cfg.Layers), make([]G.Value, cfg.Layers)
	if causal {
		opts = append(opts, la.WithCausal())
	}
	g := G.NewGraph()
	for l := range cfg.Layers {
		matrix := func(name string, width int) *G.Node {
			return G.NewMatrix(g, query, G.WithShape(tokens, width), G.WithName(fmt.Sprint(name, l)))
		}
		d.q = append(d.q, matrix("q", heads*cfg.HeadDim))
		d.k = append(d.k, matrix("k", cfg.KVHeads*cfg.HeadDim))
		d.v = append(d.v, matrix("v", cfg.KVHeads*cfg.ValueDim))
		var lse *G.Node
		out, err := la.CachedAttention(d.q[l], d.k[l], d.v[l], step.Layer(l), append(slices.Clone(opts), la.WithLSE(&lse))...)
		if err != nil {
			t.Fatal(err)
		}
		G.Read(out, &d.outV[l])
		G.Read(lse, &d.lseV[l])
	}
	if err := la.CheckGraph(g); err != nil {
		t.Fatal(err)
	}
	d.vm = G.NewTapeMachine(g)
	t.Cleanup(func() { d.vm.Close() })
	return d
}

// stored is a sequence, and what the cache must hold of it: for each layer
// (tokens, KVHeads, dim) as it was rounded.
type stored struct {
	seq  *la.Sequence
	k, v [][]float64
}

func newStored(t testing.TB, c *la.Cache) *stored {
	t.Helper()
	seq, err := c.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	n := c.Config().Layers
	return &stored{seq, make([][]float64, n), make([][]float64, n)}
}

func (s *stored) fork(t testing.TB) *stored {
	t.Helper()
	seq, err := s.seq.Fork()
	if err != nil {
		t.Fatal(err)
	}
	f := &stored{seq: seq}
	for l := range s.k {
		f.k, f.v = append(f.k, slices.Clone(s.k[l])), append(f.v, slices.Clone(s.v[l]))
	}
	return f
}

// appended is some tokens of a sequence in a step.
type appended struct {
	to     *stored
	tokens int
}

// turn is one step: the cases of its layers, for the reference, and the new
// tokens' keys and values.
type turn struct {
	cases []*reftest.Case
	rows  int
	parts []appended
}

// set begins a step, and binds inputs to the graph.
func (d *decoder) set(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...appended) *turn {
	t.Helper()
	var appends []la.Append
	for _, p := range parts {
		appends = append(appends, la.Append{Seq: p.to.seq, Tokens: p.tokens})
	}
	if err := d.step.Set(appends); err != nil {
		t.Fatal(err)
	}
	return d.draw(t, rng, in, parts...)
}

// draw binds inputs to the graph: new keys and values in the query's type, and
// NaN in the rows that belong to nobody.
func (d *decoder) draw(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...appended) *turn {
	t.Helper()
	cfg := d.cache.Config()
	s := reftest.Shape{Heads: d.heads, KVHeads: cfg.KVHeads, Dim: cfg.HeadDim, ValueDim: cfg.ValueDim, Causal: d.causal}
	for _, p := range parts {
		s.Queries = append(s.Queries, p.tokens)
		s.Keys = append(s.Keys, p.to.seq.Len()+p.tokens)
	}
	u := &turn{parts: parts, rows: s.QueryRows()}
	for l := range d.q {
		c := reftest.New(rng, s, in, format(d.query), format(d.query))
		q := slices.Clone(c.Q)
		k := d.history(c.K, cfg.KVHeads*cfg.HeadDim, parts, func(s *stored) []float64 { return s.k[l] })
		v := d.history(c.V, cfg.KVHeads*cfg.ValueDim, parts, func(s *stored) []float64 { return s.v[l] })
		let(t, d.q[l], d.rows(q, d.heads*cfg.HeadDim))
		let(t, d.k[l], d.rows(k, cfg.KVHeads*cfg.HeadDim))
		let(t, d.v[l], d.rows(v, cfg.KVHeads*cfg.ValueDim))
		u.cases = append(u.cases, c)
	}
	return u
}

// history puts into all the rows of earlier tokens what the cache holds, rounds
// those of new tokens as the cache does, and returns the new ones as they were.
func (d *decoder) history(all []float64, width int, parts []appended, old func(*stored) []float64) (fresh []float64) {
	f := format(d.cache.Config().DType)
	for _, p := range parts {
		n := copy(all, old(p.to))
		x := all[n : n+p.tokens*width]
		fresh = append(fresh, x...)
		for i := range x {
			x[i] = f.Round(x[i])
		}
		all = all[n+len(x):]
	}
	return fresh
}

// rows is x as rows of the step, with NaN in those that x has not.
func (d *decoder) rows(x []float64, width int) *tensor.Dense {
	for len(x) < d.step.Tokens()*width {
		x = append(x, math.NaN())
	}
	return tensorOf(d.query, x, d.step.Tokens(), width)
}

// run runs the graph, and compares every layer with the reference.
func (d *decoder) run(t testing.TB, u *turn) {
	t.Helper()
	again(t, d.vm)
	for l, c := range u.cases {
		if err := d.compare(t, l, u, c.Reference(reftest.Precision{Acc: format(d.query), Out: format(d.query)})); err != nil {
			t.Fatalf("layer %d, %v: %v", l, c.Shape, err)
		}
	}
}

func (d *decoder) compare(t testing.TB, layer int, u *turn, want *reftest.Result) error {
	t.Helper()
	dv := d.cache.Config().ValueDim
	if got, want := d.outV[layer].Shape(), (tensor.Shape{d.step.Tokens(), d.heads * dv}); !got.Eq(want) {
		return fmt.Errorf("output has shape %v, want %v", got, want)
	}
	if got, want := d.lseV[layer].Shape(), (tensor.Shape{d.step.Tokens(), d.heads}); !got.Eq(want) {
		return fmt.Errorf("log-sum-exp has shape %v, want %v", got, want)
	}
	out, lse := floats(t, d.outV[layer]), floats(t, d.lseV[layer])
	first := make([]int, len(u.parts)+1)
	for i, p := range u.parts {
		first[i+1] = first[i] + p.tokens
	}
	if err := want.CompareO(func(s, pos, h, i int) float64 { return out[((first[s]+pos)*d.heads+h)*dv+i] }); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	if err := want.CompareLSE(func(s, pos, h int) float64 { return lse[(first[s]+pos)*d.heads+h] }); err != nil {
		return fmt.Errorf("log-sum-exp: %w", err)
	}
	if i := slices.IndexFunc(out[u.rows*d.heads*dv:], func(f float64) bool { return f != 0 }); i >= 0 {
		return fmt.Errorf("rows of nobody: element %d is not 0", i)
	}
	if i := slices.IndexFunc(lse[u.rows*d.heads:], func(f float64) bool { return !math.IsInf(f, -1) }); i >= 0 {
		return fmt.Errorf("rows of nobody: log-sum-exp %d is not -Inf", i)
	}
	return nil
}

// commit commits the step, and notes what the cache holds now.
func (d *decoder) commit(t testing.TB, u *turn) {
	t.Helper()
	if err := d.step.Commit(); err != nil {
		t.Fatal(err)
	}
	cfg := d.cache.Config()
	for l, c := range u.cases {
		at := 0
		for i, p := range u.parts {
			n := c.Keys[i]
			wk, wv := cfg.KVHeads*cfg.HeadDim, cfg.KVHeads*cfg.ValueDim
			p.to.k[l] = slices.Clone(c.K[at*wk : (at+n)*wk])
			p.to.v[l] = slices.Clone(c.V[at*wv : (at+n)*wv])
			at += n
		}
	}
}

// do is a whole step.
func (d *decoder) do(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...appended) {
	t.Helper()
	u := d.set(t, rng, in, parts...)
	d.run(t, u)
	d.commit(t, u)
}

// bits is the bits of all outputs.
func (d *decoder) bits(t testing.TB) []uint64 {
	t.Helper()
	var all []uint64
	for l := range d.outV {
		all = append(append(all, bits(t, d.outV[l])...), bits(t, d.lseV[l])...)
	}
	return all
}

var cacheTypes = []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}

// TestCachedAttention (rows 9, 12, 25, 31, 47) decodes sequences of all lengths
// beside each other, prompts and single tokens in one step, with all page
// sizes and element types.
func TestCachedAttention(t *testing.T) {
	geometries := [][4]int{{2, 2, 16, 16}, {6, 2, 8, 20}, {7, 1, 40, 24}, {4, 4, 3, 1}, {12, 3, 59, 59}, {5, 1, 80, 64}}
	rng := reftest.Rand(t)
	turn, long := 0, 100 // tokens of a long prompt
	if raceEnabled {
		long = 25
	}
	for _, pageSize := range []int{1, 3, 16, 64} {
		for _, storage := range cacheTypes {
			for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
				g := geometries[turn%len(geometries)]
				schedule, workers, causal := schedules[turn%3], turn%5, turn%4 != 0
				turn++
				name := fmt.Sprintf("page %d %v in %v h%d/%d d%d/%d %v workers %d causal %v", pageSize, query, storage, g[0], g[1], g[2], g[3], schedule, workers, causal)
				t.Run(name, func(t *testing.T) {
					cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: g[1], HeadDim: g[2], ValueDim: g[3], DType: storage, PageSize: pageSize, Pages: 8*long/pageSize + 60})
					la.PoisonFree(cache)
					opts := []la.Option{la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(32)}
					prefill := newDecoder(t, cache, long+50, g[0], query, causal, opts...)
					decode := newDecoder(t, cache, 4, g[0], query, causal, opts...)
					a, b, c, d := newStored(t, cache), newStored(t, cache), newStored(t, cache), newStored(t, cache)
					inputs := func() reftest.Inputs { return reftest.AllInputs[rng.IntN(4)] }

					prefill.do(t, rng, inputs(), appended{a, 1 + rng.IntN(long)}, appended{b, 5})
					decode.do(t, rng, inputs(), appended{b, 1}, appended{a, 1})
					prefill.do(t, rng, inputs(), appended{a, 1}, appended{c, 1 + rng.IntN(long)}, appended{b, 3})
					decode.do(t, rng, inputs(), appended{c, 1}, appended{a, 1}, appended{d, 1}, appended{b, 1})
					f := a.fork(t) // row 37: a prefix that two share
					decode.do(t, rng, inputs(), appended{f, 2}, appended{a, 1})
					if err := c.seq.Release(); err != nil {
						t.Fatal(err)
					}
					la.PoisonFree(cache)
					for range 5 {
						decode.do(t, rng, inputs(), appended{d, 1}, appended{f, 1}, appended{a, 1}, appended{b, 1})
					}
					prefill.do(t, rng, inputs(), appended{f, 20}, appended{d, long - 10}, appended{newStored(t, cache), 40})
				})
			}
		}
	}
}

// TestCachedAttentionLong (rows 21, 26, 27, 29, 31): long contexts, filled in
// chunks, under a chunk of a prompt and many single tokens.
func TestCachedAttentionLong(t *testing.T) {
	rng := reftest.Rand(t)
	const chunk = 1024
	longest, prompt, singles := 5000, 129, 12
	if raceEnabled {
		longest, prompt, singles = 1100, 33, 3
	}
	for i, storage := range cacheTypes {
		cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 16, ValueDim: 8, DType: storage, PageSize: []int{16, 64, 3}[i], Pages: 3000})
		la.PoisonFree(cache)
		fill := newDecoder(t, cache, chunk, 2, tensor.Float32, true)
		grow := func(n int) *stored {
			s := newStored(t, cache)
			for s.seq.Len() < n {
				u := fill.set(t, rng, reftest.Normal, appended{s, min(chunk, n-s.seq.Len())})
				again(t, fill.vm) // checked below, through what it stored
				fill.commit(t, u)
			}
			return s
		}
		long, middle, short := grow(longest), grow(334), grow(13)
		mixed := newDecoder(t, cache, 200, 2, tensor.Float32, true)
		parts := []appended{{long, 1}, {short, 5}, {middle, prompt}}
		for n := range singles {
			parts = append(parts, appended{grow(n * 17), 1 + n%3})
		}
		mixed.do(t, rng, reftest.Peaked, parts...)
		mixed.do(t, rng, reftest.Peaked, append([]appended{{long, 17}}, parts[3:]...)...)
	}
}

// TestCachedAttentionRerun: before Commit a step may run as often as one likes,
// with the same bits, and with other inputs too: the last run counts. After
// Rollback nothing of it is left.
func TestCachedAttentionRerun(t *testing.T) {
	rng := reftest.Rand(t)
	for _, storage := range cacheTypes {
		cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 12, DType: storage, PageSize: 4, Pages: 60})
		la.PoisonFree(cache)
		d := newDecoder(t, cache, 30, 4, tensor.Float32, true)
		a, b := newStored(t, cache), newStored(t, cache)
		d.do(t, rng, reftest.Normal, appended{a, 10}, appended{b, 7})

		u := d.set(t, rng, reftest.Peaked, appended{b, 3}, appended{a, 6})
		d.run(t, u)
		first, slabs := d.bits(t), la.Slabs(cache)
		for range 3 {
			again(t, d.vm)
			if !slices.Equal(d.bits(t), first) || !slices.Equal(la.Slabs(cache), slabs) {
				t.Fatalf("%v: a repeated run gives other bits", storage)
			}
		}
		if err := d.step.Rollback(); err != nil {
			t.Fatal(err)
		}
		la.PoisonFree(cache) // what the step wrote to fresh pages; in a's and b's last pages it stays, unseen
		if a.seq.Len() != 10 || b.seq.Len() != 7 {
			t.Fatalf("lengths %d and %d after Rollback", a.seq.Len(), b.seq.Len())
		}

		// Other tokens first, then those that are committed.
		d.run(t, d.set(t, rng, reftest.Extreme, appended{a, 3}, appended{b, 2}))
		right := d.draw(t, rng, reftest.Normal, appended{a, 3}, appended{b, 2})
		d.run(t, right)
		d.commit(t, right)
		d.do(t, rng, reftest.Normal, appended{a, 1}, appended{b, 1})
	}
}

// TestCachedAttentionPoison (row 33): what lies in pages and slots that no
// sequence holds does not change a bit.
func TestCachedAttentionPoison(t *testing.T) {
	for _, storage := range cacheTypes {
		seed := rand.Uint64()
		var clean []uint64
		for _, poison := range []bool{false, true} {
			rng := rand.New(rand.NewPCG(seed, 1))
			cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 24, ValueDim: 8, DType: storage, PageSize: 8, Pages: 80})
			if poison {
				la.PoisonFree(cache)
			}
			d := newDecoder(t, cache, 300, 4, tensor.Float32, true)
			a, b := newStored(t, cache), newStored(t, cache)
			var all []uint64
			for range 3 {
				d.do(t, rng, reftest.Normal, appended{a, 90}, appended{b, 61})
				all = append(all, d.bits(t)...)
			}
			if clean == nil {
				clean = all
			} else if !slices.Equal(all, clean) {
				t.Errorf("seed %d, %v: NaN in unused slots changes the output", seed, storage)
			}
		}
	}
}

// TestCachedAttentionStores (row 22) looks into the memory: after a step the
// cache holds exactly the rounded keys and values, where the documentation of
// Cache says, and nothing else changed.
func TestCachedAttentionStores(t *testing.T) {
	rng := reftest.Rand(t)
	const heads, dim, valueDim, pageSize, pages = 3, 5, 4, 4, 6
	for _, storage := range cacheTypes {
		for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: heads, HeadDim: dim, ValueDim: valueDim, DType: storage, PageSize: pageSize, Pages: pages})
			d := newDecoder(t, cache, 9, heads, query, true)
			s := newStored(t, cache)
			d.do(t, rng, reftest.Normal, appended{s, 7})
			d.do(t, rng, reftest.Normal, appended{s, 3}) // the lowest pages: 0, 1, 2

			size := 2
			if storage == tensor.Float32 {
				size = 4
			}
			var want []byte
			slab := func(rows []float64, dim int) {
				x := make([]float64, pages*heads*pageSize*dim)
				for at := range rows {
					tok, h, i := at/(heads*dim), at/dim%heads, at%dim
					x[((tok/pageSize*heads+h)*pageSize+tok%pageSize)*dim+i] = rows[at]
				}
				for _, u := range bits(t, tensorOf(storage, x, len(x))) {
					if storage == tensor.Float32 {
						u = uint64(math.Float32bits(float32(math.Float64frombits(u))))
					}
					for b := range size {
						want = append(want, byte(u>>(8*b)))
					}
				}
			}
			for l := range 2 {
				slab(s.k[l], dim)
				slab(s.v[l], valueDim)
			}
			if !slices.Equal(la.Slabs(cache), want) {
				t.Errorf("%v in %v: memory is not what was stored", query, storage)
			}
		}
	}
}

// TestCachedAttentionDeterministic: every schedule and number of workers gives
// its own bits again and again, and with PerHead the bits of a sequence do not
// depend on its neighbours or the workers (row 39).
func TestCachedAttentionDeterministic(t *testing.T) {
	rng := reftest.Rand(t)
	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 16, PageSize: 16, Pages: 200})
	fill := newDecoder(t, cache, 1000, 4, tensor.Float32, true)
	a, b, c := newStored(t, cache), newStored(t, cache), newStored(t, cache)
	u := fill.set(t, rng, reftest.Normal, appended{a, 600}, appended{b, 1}, appended{c, 333})
	again(t, fill.vm)
	fill.commit(t, u)

	var whole []uint64
	for _, schedule := range []la.Schedule{la.StreamK, la.PerHead, la.FixedSplit(3)} {
		for workers := 1; workers <= 8; workers++ {
			d := newDecoder(t, cache, 4, 4, tensor.Float32, true, la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(32))
			// The seed is the same, so that a gets the same token, alone and with others.
			u := d.set(t, rand.New(rand.NewPCG(1, 1)), reftest.Normal, appended{a, 1})
			d.run(t, u)
			alone := d.bits(t)
			inputs := [][]float64{u.cases[0].Q, fresh(u.cases[0].K, 2*16), fresh(u.cases[0].V, 2*16)}
			if err := d.step.Rollback(); err != nil {
				t.Fatal(err)
			}
			u = d.set(t, rng, reftest.Peaked, appended{a, 1}, appended{c, 2}, appended{b, 1})
			for i, n := range []*G.Node{d.q[0], d.k[0], d.v[0]} {
				copy(n.Value().Data().([]float32), reftest.Convert[float32](inputs[i]))
			}
			again(t, d.vm)
			first := d.bits(t)
			for range 2 {
				again(t, d.vm)
				if !slices.Equal(d.bits(t), first) {
					t.Fatalf("%v, %d workers: other bits at a repeat", schedule, workers)
				}
			}
			if schedule == la.PerHead || workers == 1 {
				if whole == nil {
					whole = alone[:4*16]
				}
				if !slices.Equal(alone[:4*16], whole) || !slices.Equal(first[:4*16], whole) {
					t.Errorf("%v, %d workers: the bits depend on the workers or the neighbours", schedule, workers)
				}
			}
			if err := d.step.Rollback(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// fresh is the last row of rows.
func fresh(rows []float64, width int) []float64 { return rows[len(rows)-width:] }

// TestCachedAttentionConcurrent: steps of one cache, with sequences of their
// own, at the same time.
func TestCachedAttentionConcurrent(t *testing.T) {
	rng := reftest.Rand(t)
	cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 8, PageSize: 3, Pages: 400, DType: la.Float16})
	la.PoisonFree(cache)
	base := newStored(t, cache)
	newDecoder(t, cache, 50, 2, tensor.Float32, true).do(t, rng, reftest.Normal, appended{base, 50})
	for i := range 4 {
		s := base.fork(t) // all write to the page that they share, at the same time
		own := newStored(t, cache)
		rng := rand.New(rand.NewPCG(rng.Uint64(), uint64(i)))
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			d := newDecoder(t, cache, 6, 2, tensor.Float32, true)
			for range 20 {
				d.do(t, rng, reftest.Normal, appended{own, 1 + rng.IntN(3)}, appended{s, 1 + rng.IntN(3)})
			}
		})
	}
}

// TestCachedAttentionNodes: each call is a node of its own, even on the same
// inputs, since each writes to the cache.
func TestCachedAttentionNodes(t *testing.T) {
	cfg := la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 4, Pages: 1}
	g := G.NewGraph()
	q, k, v := f32(2, 8).node(g, "q"), f32(2, 4).node(g, "k"), f32(2, 4).node(g, "v")
	seen := map[int64]string{}
	add := func(name string, layer la.Layer, opts ...la.Option) {
		t.Helper()
		n, err := la.CachedAttention(q, k, v, layer, opts...)
		if err != nil {
			t.Fatal(err)
		}
		if same, ok := seen[n.ID()]; ok {
			t.Errorf("%q and %q are one node", name, same)
		}
		seen[n.ID()] = name
	}
	for _, cache := range []string{"cache 1", "cache 2"} {
		c := newCache(t, cfg)
		for _, step := range []string{"step 1", "step 2"} {
			s, err := c.NewStep(2)
			if err != nil {
				t.Fatal(err)
			}
			for layer := range cfg.Layers {
				name := fmt.Sprint(cache, step, "layer", layer)
				add(name, s.Layer(layer))
				add(name+" again", s.Layer(layer))
				add(name+" causal", s.Layer(layer), la.WithCausal())
			}
		}
	}
	if err := la.CheckGraph(g); err != nil {
		t.Error(err)
	}
}

// TestCachedAttentionStats: a step counts what its layers did.
func TestCachedAttentionStats(t *testing.T) {
	rng := reftest.Rand(t)
	cache := newCache(t, la.CacheConfig{Layers: 3, KVHeads: 1, HeadDim: 8, Pages: 4})
	d := newDecoder(t, cache, 2, 1, tensor.Float32, true)
	s := newStored(t, cache)
	d.do(t, rng, reftest.Normal, appended{s, 1})
	d.do(t, rng, reftest.Normal, appended{s, 2})
	if got := d.step.Stats(); got.Layers != 6 || got.Attention <= 0 {
		t.Errorf("stats are %+v after two steps of three layers", got)
	}
}
