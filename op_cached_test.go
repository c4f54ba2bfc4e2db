package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var cacheTypes = []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}

// TestCachedAttention (rows 9, 12, 25, 31, 47) decodes sequences of all lengths
// beside each other, prompts and single tokens in one step, with all page
// sizes and element types.
func TestCachedAttention(t *testing.T) { testCachedAttention(t, place{}) }

func testCachedAttention(t *testing.T, at place) {
	geometries := [][4]int{{2, 2, 16, 16}, {6, 2, 8, 20}, {7, 1, 40, 24}, {4, 4, 3, 1}, {12, 3, 59, 59}, {5, 1, 80, 64}}
	pageSizes := []int{1, 3, 16, 64}
	if at.real {
		geometries = [][4]int{{2, 2, 64, 64}, {6, 2, 80, 80}, {7, 1, 96, 96}, {12, 3, 128, 128}, {16, 1, 64, 64}, {5, 1, 256, 256}, {12, 12, 64, 64}}
		pageSizes = []int{1, 3, 8, 16, 64, 256}
	}
	rng := reftest.Rand(t)
	turn, long := 0, 100 // tokens of a long prompt
	if raceEnabled {
		long = 25
	}
	for _, pageSize := range pageSizes {
		for _, storage := range cacheTypes {
			for _, query := range at.queries() {
				g := geometries[turn%len(geometries)]
				schedule, workers, causal := schedules[turn%3], turn%5, turn%4 != 0
				if at.gpu != nil {
					at.there = turn%2 == 0
				}
				turn++
				name := fmt.Sprintf("page %d %v in %v h%d/%d d%d/%d %v workers %d causal %v", pageSize, query, storage, g[0], g[1], g[2], g[3], schedule, workers, causal)
				t.Run(name, func(t *testing.T) {
					cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: g[1], HeadDim: g[2], ValueDim: g[3], DType: storage, PageSize: pageSize, Pages: 8*long/pageSize + 24, Device: at.gpu})
					la.PoisonFree(cache)
					opts := []la.Option{la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(32)}
					prefill := newDecoderAt(t, at, cache, long+50, g[0], query, causal, opts...)
					decode := newDecoderAt(t, at, cache, 4, g[0], query, causal, opts...)
					decodeMix(t, rng, cache, prefill, decode, long)
					closeCache(t, cache)
				})
			}
		}
	}
}

// TestCachedAttentionBends is TestCachedAttention with windows, soft caps and slopes.
func TestCachedAttentionBends(t *testing.T) {
	rng := reftest.Rand(t)
	long, n := 100, 24
	if raceEnabled {
		long, n = 25, 8
	}
	for turn := range n {
		g := [][4]int{{2, 2, 16, 16}, {6, 2, 8, 20}, {7, 1, 40, 24}, {4, 4, 3, 1}}[turn%4]
		pageSize := []int{1, 3, 16, 64}[rng.IntN(4)]
		at := place{bent: reftest.RandomScoreMods(rng, reftest.Shape{Heads: g[0]})}
		cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: g[1], HeadDim: g[2], ValueDim: g[3], DType: cacheTypes[turn%3], PageSize: pageSize, Pages: 8*long/pageSize + 24})
		la.PoisonFree(cache)
		opts := []la.Option{la.WithSchedule(schedules[turn%3]), la.WithWorkers(turn % 5), la.WithTileTokens(32)}
		query := []tensor.Dtype{tensor.Float32, tensor.Float64}[rng.IntN(2)]
		prefill := newDecoderAt(t, at, cache, long+50, g[0], query, turn%4 != 0, opts...)
		decode := newDecoderAt(t, at, cache, 4, g[0], query, turn%4 != 0, opts...)
		decodeMix(t, rng, cache, prefill, decode, long)
		closeCache(t, cache)
	}
}

// TestCachedAttentionWindowNaN: tokens that the window has left behind are not read.
func TestCachedAttentionWindowNaN(t *testing.T) {
	const window, tokens = 4, 3
	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 8, PageSize: 3, Pages: 8})
	d := newDecoderAt(t, place{bent: reftest.Shape{Mask: attn.Mask{Window: window}}}, cache, tokens, 2, tensor.Float32, true)
	s := newStored(t, cache)
	rng := reftest.Rand(t)
	for turn := range 4 {
		u := d.set(t, rng, reftest.Normal, appended{s, tokens})
		if turn == 0 {
			for _, n := range []*G.Node{d.k[0], d.v[0]} {
				reftest.Poison(n.Value().Data().([]float32))
			}
		}
		if turn > 2 { // rows 9 and on see tokens from 6 on
			d.run(t, u)
		} else {
			again(t, d.vm)
			nan := slices.ContainsFunc(floats(t, d.outV[0]), math.IsNaN)
			if want := turn < 2; nan != want { // row 5 is the last that sees token 2
				t.Errorf("turn %d: NaN is %v", turn, nan)
			}
		}
		d.commit(t, u)
	}
	closeCache(t, cache)
}

func closeCache(t testing.TB, c *la.Cache) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

// decodeMix runs prompts, chunks of prompts and single tokens beside each other,
// on sequences that come, fork and go.
func decodeMix(t testing.TB, rng *rand.Rand, cache *la.Cache, prefill, decode *decoder, long int) {
	t.Helper()
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
}

// TestCachedAttentionLong (rows 21, 26, 27, 29, 31): long contexts, filled in
// chunks, under a chunk of a prompt and many single tokens.
func TestCachedAttentionLong(t *testing.T) { testCachedAttentionLong(t, place{}) }

func testCachedAttentionLong(t *testing.T, at place) {
	rng := reftest.Rand(t)
	const chunk = 1024
	longest, prompt, singles, dim, valueDim := 5000, 129, 12, 16, 8
	if at.real {
		dim, valueDim = 64, 64
	}
	if raceEnabled {
		longest, prompt, singles = 1100, 33, 3
	}
	for i, storage := range cacheTypes {
		cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: dim, ValueDim: valueDim, DType: storage, PageSize: []int{16, 64, 3}[i], Pages: 3000, Device: at.gpu})
		la.PoisonFree(cache)
		fill := newDecoderAt(t, at, cache, chunk, 2, tensor.Float32, true)
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
		mixed := newDecoderAt(t, at, cache, 200, 2, tensor.Float32, true)
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
func TestCachedAttentionRerun(t *testing.T) { testCachedAttentionRerun(t, place{}, 3) }

func testCachedAttentionRerun(t *testing.T, at place, repeats int) {
	rng := reftest.Rand(t)
	dim := 12
	if at.real {
		dim = 64
	}
	for _, storage := range cacheTypes {
		cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: dim, DType: storage, PageSize: 4, Pages: 60, Device: at.gpu})
		la.PoisonFree(cache)
		d := newDecoderAt(t, at, cache, 30, 4, tensor.Float32, true)
		a, b := newStored(t, cache), newStored(t, cache)
		d.do(t, rng, reftest.Normal, appended{a, 10}, appended{b, 7})

		u := d.set(t, rng, reftest.Peaked, appended{b, 3}, appended{a, 6})
		d.run(t, u)
		first, slabs := d.bits(t), la.Slabs(cache)
		for range repeats {
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
		closeCache(t, cache)
	}
}

// TestCachedAttentionPoison (row 33): what lies in pages and slots that no
// sequence holds does not change a bit.
func TestCachedAttentionPoison(t *testing.T) { testCachedAttentionPoison(t, place{}) }

func testCachedAttentionPoison(t *testing.T, at place) {
	rounds := 3
	if raceEnabled {
		rounds = 1
	}
	dim, valueDim := 24, 8
	if at.real {
		dim, valueDim = 96, 96
	}
	for _, storage := range cacheTypes {
		seed := rand.Uint64()
		var clean []uint64
		for _, poison := range []bool{false, true} {
			rng := rand.New(rand.NewPCG(seed, 1))
			cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: dim, ValueDim: valueDim, DType: storage, PageSize: 8, Pages: 80, Device: at.gpu})
			if poison {
				la.PoisonFree(cache)
			}
			d := newDecoderAt(t, at, cache, 300, 4, tensor.Float32, true)
			a, b := newStored(t, cache), newStored(t, cache)
			var all []uint64
			for range rounds {
				d.do(t, rng, reftest.Normal, appended{a, 90}, appended{b, 61})
				all = append(all, d.bits(t)...)
			}
			if clean == nil {
				clean = all
			} else if !slices.Equal(all, clean) {
				t.Errorf("seed %d, %v: NaN in unused slots changes the output", seed, storage)
			}
			closeCache(t, cache)
		}
	}
}

// TestCachedAttentionStores (row 22) looks into the memory: after a step the
// cache holds exactly the rounded keys and values, where the documentation of
// Cache says, and nothing else changed.
func TestCachedAttentionStores(t *testing.T) { testCachedAttentionStores(t, place{}) }

func testCachedAttentionStores(t *testing.T, at place) {
	rng := reftest.Rand(t)
	const heads, pageSize, pages = 3, 4, 6
	dim, valueDim := 5, 4
	if at.real {
		dim, valueDim = 80, 80
	}
	for _, storage := range cacheTypes {
		for _, query := range at.queries() {
			cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: heads, HeadDim: dim, ValueDim: valueDim, DType: storage, PageSize: pageSize, Pages: pages, Device: at.gpu})
			la.ZeroPages(cache)
			d := newDecoderAt(t, at, cache, 9, heads, query, true)
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
			closeCache(t, cache)
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
// inputs, since each writes to the cache; and a layer of a step has no second node
// in a graph, with whatever options.
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
				for _, opts := range [][]la.Option{nil, {la.WithCausal()}, {la.WithScale(3), la.WithWorkers(2)}} {
					_, err := la.CachedAttention(q, k, v, s.Layer(layer), opts...)
					wantError(t, err, la.ErrGraph, "CachedAttention", fmt.Sprintf("layer %d of the step", layer), "has a node in this graph", "2 layers")
				}
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
