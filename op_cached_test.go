package leanattention_test

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var cacheTypes = []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}

// TestCachedAttention (rows 9, 12, 25, 31, 47) decodes sequences of all lengths
// beside each other, prompts and single tokens in one step, with all page
// sizes and element types.
func TestCachedAttention(t *testing.T) { testCachedAttention(t, graphtest.Place{}) }

func testCachedAttention(t *testing.T, at graphtest.Place) {
	geometries := [][4]int{{2, 2, 16, 16}, {6, 2, 8, 20}, {7, 1, 40, 24}, {4, 4, 3, 1}, {12, 3, 59, 59}, {5, 1, 80, 64}}
	pageSizes := []int{1, 3, 16, 64}
	if at.Real {
		geometries = [][4]int{{2, 2, 64, 64}, {6, 2, 80, 80}, {7, 1, 96, 96}, {12, 3, 128, 128}, {16, 1, 64, 64}, {5, 1, 256, 256}, {12, 12, 64, 64}}
		pageSizes = []int{1, 3, 8, 16, 64, 256}
	}
	rng := reftest.Rand(t)
	turn, start, long := 0, rng.IntN(2), 100 // tokens of a long prompt
	if reftest.RaceEnabled {
		long = 25
	}
	for _, pageSize := range pageSizes {
		for _, storage := range cacheTypes {
			for _, query := range at.Queries() {
				if !at.Real && !reftest.Every(t) && (at.GPU != nil && rng.IntN(4) > 0 || at.GPU == nil && (turn/6+turn+start)%2 > 0) { // half of each geometry and page size
					turn++
					continue
				}
				g := geometries[turn%len(geometries)]
				schedule, workers, causal := graphtest.Schedules[turn%3], turn%5, turn%4 != 0
				if at.GPU != nil {
					at.There = turn%2 == 0
				}
				turn++
				at.Used = turn%5 < 2
				name := fmt.Sprintf("page %d %v in %v h%d/%d d%d/%d %v workers %d causal %v", pageSize, query, storage, g[0], g[1], g[2], g[3], schedule, workers, causal)
				t.Run(name, func(t *testing.T) {
					cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: g[1], HeadDim: g[2], ValueDim: g[3], DType: storage, PageSize: pageSize, Pages: 8*long/pageSize + 24, Device: at.GPU})
					la.PoisonFree(cache)
					opts := []la.Option{la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(32)}
					prefill := graphtest.NewDecoderAt(t, at, cache, long+50, g[0], query, causal, opts...)
					decode := graphtest.NewDecoderAt(t, at, cache, 4, g[0], query, causal, opts...)
					decodeMix(t, rng, cache, prefill, decode, long)
					closeCache(t, cache)
				})
			}
		}
	}
}

// TestCachedAttentionScoreMods is TestCachedAttention with windows, soft caps and slopes.
func TestCachedAttentionScoreMods(t *testing.T) {
	rng := reftest.Rand(t)
	long, n := 100, reftest.Cases(t, 12, 24)
	if reftest.RaceEnabled {
		long, n = 25, 8
	}
	for turn := range n {
		g := [][4]int{{2, 2, 16, 16}, {6, 2, 8, 20}, {7, 1, 40, 24}, {4, 4, 3, 1}}[turn%4]
		pageSize := []int{1, 3, 16, 64}[rng.IntN(4)]
		at := graphtest.Place{ScoreMods: reftest.RandomScoreMods(rng, reftest.Shape{Heads: g[0]})}
		cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: g[1], HeadDim: g[2], ValueDim: g[3], DType: cacheTypes[turn%3], PageSize: pageSize, Pages: 8*long/pageSize + 24})
		la.PoisonFree(cache)
		opts := []la.Option{la.WithSchedule(graphtest.Schedules[turn%3]), la.WithWorkers(turn % 5), la.WithTileTokens(32)}
		query := []tensor.Dtype{tensor.Float32, tensor.Float64}[rng.IntN(2)]
		prefill := graphtest.NewDecoderAt(t, at, cache, long+50, g[0], query, turn%4 != 0, opts...)
		decode := graphtest.NewDecoderAt(t, at, cache, 4, g[0], query, turn%4 != 0, opts...)
		decodeMix(t, rng, cache, prefill, decode, long)
		closeCache(t, cache)
	}
}

// TestCachedAttentionRotary is TestCachedAttention with rotary embeddings, in some cases beside windows, soft caps, slopes and
// sinks, and on a cache that gives pages back.
func TestCachedAttentionRotary(t *testing.T) {
	testCachedAttentionRotary(t, graphtest.Place{}, reftest.Cases(t, 12, 24))
	t.Run("forks at once", func(t *testing.T) {
		la.SharePrefixes(t)
		testCachedAttentionRotary(t, graphtest.Place{}, reftest.Cases(t, 12, 24))
	})
}

func TestGPUCachedAttentionRotary(t *testing.T) {
	testCachedAttentionRotary(t, graphtest.Place{GPU: devicetest.Open(t), Real: true}, reftest.Cases(t, 3, 24))
}

func TestGPUsCachedAttentionRotary(t *testing.T) {
	testCachedAttentionRotary(t, graphtest.Place{GPU: devicetest.OpenSome(t, 2), Real: true}, reftest.Cases(t, 3, 24))
}

func testCachedAttentionRotary(t *testing.T, at graphtest.Place, n int) {
	rng := reftest.Rand(t)
	geometries, long := [][4]int{{2, 2, 16, 16}, {6, 2, 8, 20}, {7, 1, 40, 24}, {4, 4, 3, 1}}, 100
	if at.Real {
		geometries = [][4]int{{2, 2, 64, 64}, {6, 2, 80, 80}, {12, 3, 128, 128}, {10, 2, 256, 256}}
	}
	if reftest.RaceEnabled {
		long, n = 25, (n+2)/3
	}
	for turn := range n {
		g, config := geometries[turn%4], la.CacheConfig{Layers: 2, PageSize: []int{1, 3, 16, 64}[rng.IntN(4)], DType: cacheTypes[turn%3], Device: at.GPU, Shard: la.ShardHeads}
		config.KVHeads, config.HeadDim, config.ValueDim, config.Pages = g[1], g[2], g[3], 8*long/config.PageSize+24
		at.There, at.Used, at.ScoreMods = at.GPU != nil && turn%2 == 0, turn%5 < 2, reftest.Shape{}
		at.Rotary = graphtest.RandomRotary(rng, g[2])
		if turn%3 == 1 {
			at.ScoreMods = reftest.RandomScoreMods(rng, reftest.Shape{Heads: g[0]})
		}
		if turn%3 == 2 {
			config.Window, config.SinkTokens = 40, 3*(turn%2)
			at.ScoreMods.Window, at.ScoreMods.SinkTokens = 1+rng.IntN(40), config.SinkTokens
		}
		cache := graphtest.NewCache(t, config)
		la.PoisonFree(cache)
		opts := []la.Option{la.WithSchedule(graphtest.Schedules[turn%3]), la.WithWorkers(turn % 5), la.WithTileTokens(32)}
		queries := at.Queries()
		query := queries[turn%len(queries)]
		prefill := graphtest.NewDecoderAt(t, at, cache, long+50, g[0], query, turn%4 != 0, opts...)
		decode := graphtest.NewDecoderAt(t, at, cache, 4, g[0], query, turn%4 != 0, opts...)
		decodeMix(t, rng, cache, prefill, decode, long)
		closeCache(t, cache)
	}
}

// TestCachedAttentionWindowNaN: tokens that the window has left behind are not read.
func TestCachedAttentionWindowNaN(t *testing.T) {
	const window, tokens = 4, 3
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 8, PageSize: 3, Pages: 8})
	d := graphtest.NewDecoderAt(t, graphtest.Place{ScoreMods: reftest.Shape{Mask: attn.Mask{Window: window}}}, cache, tokens, 2, tensor.Float32, true)
	s := graphtest.NewStored(t, cache)
	rng := reftest.Rand(t)
	for turn := range 4 {
		u := d.Set(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: tokens})
		if turn == 0 {
			for _, n := range []*G.Node{d.K[0], d.V[0]} {
				reftest.Poison(n.Value().Data().([]float32))
			}
		}
		if turn > 2 { // rows 9 and on see tokens from 6 on
			d.Run(t, u)
		} else {
			graphtest.Again(t, d.VM)
			nan := slices.ContainsFunc(graphtest.Floats(t, d.OutValues[0]), math.IsNaN)
			if want := turn < 2; nan != want { // row 5 is the last that sees token 2
				t.Errorf("turn %d: NaN is %v", turn, nan)
			}
		}
		d.Commit(t, u)
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
func decodeMix(t testing.TB, rng *rand.Rand, cache *la.Cache, prefill, decode *graphtest.Decoder, long int) {
	t.Helper()
	a, b, c, d := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache), graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
	inputs := func() reftest.Inputs { return reftest.AllInputs[rng.IntN(4)] }

	prefill.Do(t, rng, inputs(), graphtest.Appended{To: a, Tokens: 1 + rng.IntN(long)}, graphtest.Appended{To: b, Tokens: 5})
	decode.Do(t, rng, inputs(), graphtest.Appended{To: b, Tokens: 1}, graphtest.Appended{To: a, Tokens: 1})
	prefill.Do(t, rng, inputs(), graphtest.Appended{To: a, Tokens: 1}, graphtest.Appended{To: c, Tokens: 1 + rng.IntN(long)}, graphtest.Appended{To: b, Tokens: 3})
	decode.Do(t, rng, inputs(), graphtest.Appended{To: c, Tokens: 1}, graphtest.Appended{To: a, Tokens: 1}, graphtest.Appended{To: d, Tokens: 1}, graphtest.Appended{To: b, Tokens: 1})
	f := a.Fork(t) // row 37: a prefix that two share
	decode.Do(t, rng, inputs(), graphtest.Appended{To: f, Tokens: 2}, graphtest.Appended{To: a, Tokens: 1})
	if err := c.Seq.Release(); err != nil {
		t.Fatal(err)
	}
	la.PoisonFree(cache)
	for range 5 {
		decode.Do(t, rng, inputs(), graphtest.Appended{To: d, Tokens: 1}, graphtest.Appended{To: f, Tokens: 1}, graphtest.Appended{To: a, Tokens: 1}, graphtest.Appended{To: b, Tokens: 1})
	}
	prefill.Do(t, rng, inputs(), graphtest.Appended{To: f, Tokens: 20}, graphtest.Appended{To: d, Tokens: long - 10}, graphtest.Appended{To: graphtest.NewStored(t, cache), Tokens: 40})
}

// TestCachedAttentionLong (rows 21, 26, 27, 29, 31): long contexts, filled in
// chunks, under a chunk of a prompt and many single tokens.
func TestCachedAttentionLong(t *testing.T) { testCachedAttentionLong(t, graphtest.Place{}) }

func testCachedAttentionLong(t *testing.T, at graphtest.Place) {
	rng := reftest.Rand(t)
	const chunk = 1024
	longest, prompt, singles, dim, valueDim := 5000, 129, 12, 16, 8
	if at.Real {
		dim, valueDim = 64, 64
	}
	if reftest.RaceEnabled {
		longest, prompt, singles = 1100, 33, 3
	}
	for i, storage := range cacheTypes {
		cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: dim, ValueDim: valueDim, DType: storage, PageSize: []int{16, 64, 3}[i], Pages: 3000, Device: at.GPU})
		la.PoisonFree(cache)
		fill := graphtest.NewDecoderAt(t, at, cache, chunk, 2, tensor.Float32, true)
		grow := func(n int) *graphtest.Stored {
			s := graphtest.NewStored(t, cache)
			for s.Seq.Len() < n {
				u := fill.Set(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: min(chunk, n-s.Seq.Len())})
				graphtest.Again(t, fill.VM) // checked below, through what it stored
				fill.Commit(t, u)
			}
			return s
		}
		long, middle, short := grow(longest), grow(334), grow(13)
		mixed := graphtest.NewDecoderAt(t, at, cache, 200, 2, tensor.Float32, true)
		parts := []graphtest.Appended{{To: long, Tokens: 1}, {To: short, Tokens: 5}, {To: middle, Tokens: prompt}}
		for n := range singles {
			parts = append(parts, graphtest.Appended{To: grow(n * 17), Tokens: 1 + n%3})
		}
		mixed.Do(t, rng, reftest.Peaked, parts...)
		mixed.Do(t, rng, reftest.Peaked, append([]graphtest.Appended{{To: long, Tokens: 17}}, parts[3:]...)...)
	}
}

// TestCachedAttentionRerun: before Commit a step may run as often as one likes,
// with the same bits, and with other inputs too: the last run counts. After
// Rollback nothing of it is left.
func TestCachedAttentionRerun(t *testing.T) { testCachedAttentionRerun(t, graphtest.Place{}, 3) }

func testCachedAttentionRerun(t *testing.T, at graphtest.Place, repeats int) {
	rng := reftest.Rand(t)
	dim := 12
	if at.Real {
		dim = 64
	}
	for _, storage := range cacheTypes {
		cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: dim, DType: storage, PageSize: 4, Pages: 60, Device: at.GPU})
		la.PoisonFree(cache)
		d := graphtest.NewDecoderAt(t, at, cache, 30, 4, tensor.Float32, true)
		a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
		d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 10}, graphtest.Appended{To: b, Tokens: 7})

		u := d.Set(t, rng, reftest.Peaked, graphtest.Appended{To: b, Tokens: 3}, graphtest.Appended{To: a, Tokens: 6})
		d.Run(t, u)
		first, slabs := d.Bits(t), la.Slabs(cache)
		for range repeats {
			graphtest.Again(t, d.VM)
			if !slices.Equal(d.Bits(t), first) || !slices.Equal(la.Slabs(cache), slabs) {
				t.Fatalf("%v: a repeated run gives other bits", storage)
			}
		}
		if err := d.Step.Rollback(); err != nil {
			t.Fatal(err)
		}
		la.PoisonFree(cache) // what the step wrote to fresh pages; in a's and b's last pages it stays, unseen
		if a.Seq.Len() != 10 || b.Seq.Len() != 7 {
			t.Fatalf("lengths %d and %d after Rollback", a.Seq.Len(), b.Seq.Len())
		}

		// Other tokens first, then those that are committed.
		d.Run(t, d.Set(t, rng, reftest.Extreme, graphtest.Appended{To: a, Tokens: 3}, graphtest.Appended{To: b, Tokens: 2}))
		right := d.Draw(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 3}, graphtest.Appended{To: b, Tokens: 2})
		d.Run(t, right)
		d.Commit(t, right)
		d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 1}, graphtest.Appended{To: b, Tokens: 1})
		closeCache(t, cache)
	}
}

// TestCachedAttentionPoison (row 33): what lies in pages and slots that no
// sequence holds does not change a bit.
func TestCachedAttentionPoison(t *testing.T) { testCachedAttentionPoison(t, graphtest.Place{}) }

func testCachedAttentionPoison(t *testing.T, at graphtest.Place) {
	rounds := 3
	if reftest.RaceEnabled {
		rounds = 1
	}
	dim, valueDim := 24, 8
	if at.Real {
		dim, valueDim = 96, 96
	}
	for _, storage := range cacheTypes {
		seed := rand.Uint64()
		var clean []uint64
		for _, poison := range []bool{false, true} {
			rng := rand.New(rand.NewPCG(seed, 1))
			cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: dim, ValueDim: valueDim, DType: storage, PageSize: 8, Pages: 80, Device: at.GPU})
			if poison {
				la.PoisonFree(cache)
			}
			d := graphtest.NewDecoderAt(t, at, cache, 300, 4, tensor.Float32, true)
			a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
			var all []uint64
			for range rounds {
				d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 90}, graphtest.Appended{To: b, Tokens: 61})
				all = append(all, d.Bits(t)...)
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
func TestCachedAttentionStores(t *testing.T) { testCachedAttentionStores(t, graphtest.Place{}) }

func testCachedAttentionStores(t *testing.T, at graphtest.Place) {
	rng := reftest.Rand(t)
	const heads, pageSize, pages = 3, 4, 6
	dim, valueDim := 5, 4
	if at.Real {
		dim, valueDim = 80, 80
	}
	for _, storage := range cacheTypes {
		for _, query := range at.Queries() {
			cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: heads, HeadDim: dim, ValueDim: valueDim, DType: storage, PageSize: pageSize, Pages: pages, Device: at.GPU})
			la.ZeroPages(cache)
			d := graphtest.NewDecoderAt(t, at, cache, 9, heads, query, true)
			s := graphtest.NewStored(t, cache)
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 7})
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 3}) // the lowest pages: 0, 1, 2

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
				for _, u := range graphtest.Bits(t, graphtest.TensorOf(storage, x, len(x))) {
					if storage == tensor.Float32 {
						u = uint64(math.Float32bits(float32(math.Float64frombits(u))))
					}
					for b := range size {
						want = append(want, byte(u>>(8*b)))
					}
				}
			}
			for l := range 2 {
				slab(s.K[l], dim)
				slab(s.V[l], valueDim)
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
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 16, PageSize: 16, Pages: 200})
	fill := graphtest.NewDecoder(t, cache, 1000, 4, tensor.Float32, true)
	a, b, c := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
	u := fill.Set(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 600}, graphtest.Appended{To: b, Tokens: 1}, graphtest.Appended{To: c, Tokens: 333})
	graphtest.Again(t, fill.VM)
	fill.Commit(t, u)

	var whole []uint64
	for _, schedule := range []la.Schedule{la.StreamK, la.PerHead, la.FixedSplit(3)} {
		for workers := 1; workers <= 8; workers++ {
			d := graphtest.NewDecoder(t, cache, 4, 4, tensor.Float32, true, la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(32))
			// The seed is the same, so that a gets the same token, alone and with others.
			u := d.Set(t, rand.New(rand.NewPCG(1, 1)), reftest.Normal, graphtest.Appended{To: a, Tokens: 1})
			d.Run(t, u)
			alone := d.Bits(t)
			inputs := [][]float64{u.Cases[0].Q, fresh(u.Cases[0].K, 2*16), fresh(u.Cases[0].V, 2*16)}
			if err := d.Step.Rollback(); err != nil {
				t.Fatal(err)
			}
			u = d.Set(t, rng, reftest.Peaked, graphtest.Appended{To: a, Tokens: 1}, graphtest.Appended{To: c, Tokens: 2}, graphtest.Appended{To: b, Tokens: 1})
			for i, n := range []*G.Node{d.Q[0], d.K[0], d.V[0]} {
				copy(n.Value().Data().([]float32), reftest.Convert[float32](inputs[i]))
			}
			graphtest.Again(t, d.VM)
			first := d.Bits(t)
			for range 2 {
				graphtest.Again(t, d.VM)
				if !slices.Equal(d.Bits(t), first) {
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
			if err := d.Step.Rollback(); err != nil {
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
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 8, PageSize: 3, Pages: 400, DType: la.Float16})
	la.PoisonFree(cache)
	base := graphtest.NewStored(t, cache)
	graphtest.NewDecoder(t, cache, 50, 2, tensor.Float32, true).Do(t, rng, reftest.Normal, graphtest.Appended{To: base, Tokens: 50})
	for i := range 4 {
		s := base.Fork(t) // all write to the page that they share, at the same time
		own := graphtest.NewStored(t, cache)
		rng := rand.New(rand.NewPCG(rng.Uint64(), uint64(i)))
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			d := graphtest.NewDecoder(t, cache, 6, 2, tensor.Float32, true)
			for range 20 {
				d.Do(t, rng, reftest.Normal, graphtest.Appended{To: own, Tokens: 1 + rng.IntN(3)}, graphtest.Appended{To: s, Tokens: 1 + rng.IntN(3)})
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
		c := graphtest.NewCache(t, cfg)
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
	if err := rewrite.Check(g); err != nil {
		t.Error(err)
	}
}

// TestCachedAttentionStats: a step counts what its layers did.
func TestCachedAttentionStats(t *testing.T) {
	rng := reftest.Rand(t)
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 3, KVHeads: 1, HeadDim: 8, Pages: 4})
	d := graphtest.NewDecoder(t, cache, 2, 1, tensor.Float32, true)
	s := graphtest.NewStored(t, cache)
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 1})
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 2})
	if n, took := la.LayerRuns(d.Step), d.Step.AttentionTime(); n != 6 || took <= 0 {
		t.Errorf("%d runs of layers in %v after two steps of three layers", n, took)
	}
}

// Layers of one step may differ in everything but their heads, as a model's do that
// has a window in every other layer.
func testLayersDiffer(t *testing.T, at graphtest.Place) {
	rng := reftest.Rand(t)
	at.Layers = []reftest.Shape{{}, {Mask: attn.Mask{Causal: true}}, {Scale: 0.7}, {Mask: attn.Mask{Causal: true}, Scale: -0.2},
		{Mask: attn.Mask{Causal: true}, Sinks: []float64{0.5, -2}}, {Mask: attn.Mask{Causal: true}, Sinks: []float64{3, 0}}}
	if at.GPU == nil {
		at.Layers = append(at.Layers, graphtest.WithScoreMods(reftest.Shape{}, 3, 0), graphtest.WithScoreMods(reftest.Shape{}, 0, 0.5), graphtest.WithScoreMods(reftest.Shape{}, 0, 0, 0.5, -0.25),
			graphtest.WithScoreMods(reftest.Shape{Mask: attn.Mask{Causal: true}}, 5, 0), graphtest.WithScoreMods(reftest.Shape{}, 0, 2), graphtest.WithScoreMods(reftest.Shape{}, 0, 0, 0.25, 1))
	}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: len(at.Layers), KVHeads: 1, HeadDim: 64, PageSize: 4, Pages: 20, Device: at.GPU})
	d := graphtest.NewDecoderAt(t, at, cache, 8, 2, tensor.Float32, false)
	a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 7})
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 3}, graphtest.Appended{To: b, Tokens: 5})
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: b, Tokens: 1}, graphtest.Appended{To: a, Tokens: 1})
	if err := cache.Close(); err != nil {
		t.Error(err)
	}
}

func TestLayersDiffer(t *testing.T) { testLayersDiffer(t, graphtest.Place{}) }

// twice is a step of one row over a cache of one layer, and graphs on it.
type twice struct {
	t     *testing.T
	step  *la.Step
	seq   *la.Sequence
	cache *la.Cache
}

func newTwice(t *testing.T, gpu *device.GPU) *twice {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, Pages: 2, Device: gpu})
	t.Cleanup(func() { cache.Close() })
	step, err := cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	return &twice{t, step, graphtest.NewStored(t, cache).Seq, cache}
}

// graph has a node on the layer, whose values are all x, behind its machine.
func (w *twice) graph(x float32) (*G.ExprGraph, *G.Node) {
	w.t.Helper()
	g := G.NewGraph()
	v := graphtest.Input(g, "x", tensor.New(tensor.WithShape(1, 64), tensor.WithBacking(slices.Repeat([]float32{x}, 64))))
	out, err := la.CachedAttention(v, v, v, w.step.Layer(0), la.WithScale(0))
	if err != nil {
		w.t.Fatal(err)
	}
	return g, out
}

// turn runs graphs in one step, and returns what the last one gave.
func (w *twice) turn(nodes ...*G.Node) (result float64) {
	w.t.Helper()
	if err := w.step.Set([]la.Append{{Seq: w.seq, Tokens: 1}}); err != nil {
		w.t.Fatal(err)
	}
	for _, n := range nodes {
		vm := G.NewTapeMachine(n.Graph())
		if err := vm.RunAll(); err != nil {
			w.t.Fatal(la.Cause(err))
		}
		result = graphtest.Floats(w.t, n.Value())[0]
		vm.Close()
	}
	if err := w.step.Commit(); err != nil {
		w.t.Fatal(err)
	}
	return result
}

// The second node on a layer is refused where it would overwrite what the first has
// appended in the same run, and nowhere else: not in other graphs, clones and what
// Fuse makes among them, one of which runs in a step.
func testLayerTwice(t *testing.T, gpu *device.GPU) {
	w := newTwice(t, gpu)
	g, out := w.graph(1)
	x := g.ByName("x")[0]
	for range 2 {
		_, err := la.CachedAttention(x, x, x, w.step.Layer(0))
		wantError(t, err, la.ErrGraph, "CachedAttention", "layer 0 of the step has a node in this graph")
	}
	if got := w.turn(out); got != 1 {
		t.Errorf("step 1: %v", got)
	}

	_, other := w.graph(4)
	if got := w.turn(other); got != 2.5 {
		t.Errorf("another graph on the step: %v", got)
	}
	clone := g.Clone().(*G.ExprGraph)
	if got := w.turn(clone.Node(out.ID()).(*G.Node)); got != 2 {
		t.Errorf("a clone: %v", got)
	}
	fused, err := rewrite.Fuse(out)
	if err != nil {
		t.Fatal(err)
	}
	if got := w.turn(fused.Node(out)); got != 1.75 {
		t.Errorf("fused: %v", got)
	}
	// The last one that runs in a step is the one that counts.
	if got := w.turn(out, other); got != 2.2 && got != float64(float32(2.2)) {
		t.Errorf("two graphs in a step: %v", got)
	}

	// Two steps on one layer of a cache are two lists of rows: both may be in a graph.
	second, err := w.cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := la.CachedAttention(x, x, x, second.Layer(0)); err != nil {
		t.Error(err)
	}
}

func TestLayerTwice(t *testing.T) { testLayerTwice(t, nil) }

// A layer whose node could not be built can be built.
func TestLayerAfterFailedBuild(t *testing.T) {
	w := newTwice(t, nil)
	g := G.NewGraph()
	x := graphtest.Input(g, "x", tensor.New(tensor.WithShape(1, 64), tensor.WithBacking(make([]float32, 64))))
	short := graphtest.Input(g, "short", tensor.New(tensor.WithShape(1, 63), tensor.WithBacking(make([]float32, 63))))
	before := len(g.AllNodes())
	for _, err := range []error{
		second(la.CachedAttention(x, x, short, w.step.Layer(0))),
		second(la.CachedAttention(x, x, x, w.step.Layer(1))),
		second(la.CachedAttention(x, x, x, w.step.Layer(0), la.WithTileTokens(-1))),
		second(la.CachedAttention(x, nil, x, w.step.Layer(0))),
	} {
		if err == nil {
			t.Fatal("no error")
		}
	}
	if n := len(g.AllNodes()); n != before {
		t.Errorf("%d nodes of calls that failed", n-before)
	}
	if _, err := la.CachedAttention(x, x, x, w.step.Layer(0)); err != nil {
		t.Error(err)
	}
}

// A sequence that was saved in one place and loaded in another decodes there as if it
// had been there from the beginning; and it can be saved again, as the same bytes.
func testSequenceIODecodes(t *testing.T, places ...graphtest.Place) {
	rng := reftest.Rand(t)
	turn := 0
	for i, from := range places {
		for j, to := range places {
			storage := cacheTypes[turn%len(cacheTypes)]
			turn++
			t.Run(fmt.Sprintf("%v from %d to %d", storage, i, j), func(t *testing.T) {
				at := func(p graphtest.Place, pageSize int) (*la.Cache, *graphtest.Decoder) {
					cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 64, DType: storage, PageSize: pageSize, Pages: 12, Device: p.GPU})
					d := graphtest.NewDecoderAt(t, p, cache, 9, 4, tensor.Float32, true)
					d.Do(t, rng, reftest.Normal, graphtest.Appended{To: graphtest.NewStored(t, cache), Tokens: 1}) // under the tag cuda it now has its memory
					return cache, d
				}
				cache, d := at(from, 4)
				other, e := at(to, 16)
				s := graphtest.NewStored(t, cache)
				d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 7})
				d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 2})

				var file, again bytes.Buffer
				if _, err := s.Seq.WriteTo(&file); err != nil {
					t.Fatal(err)
				}
				saved := slices.Clone(file.Bytes())
				loaded := s.Fork(t)
				var err error
				if loaded.Seq, err = other.ReadSequence(&file); err != nil {
					t.Fatal(err)
				}
				if _, err := loaded.Seq.WriteTo(&again); err != nil || !bytes.Equal(again.Bytes(), saved) {
					t.Fatalf("saved again it is something else: %v", err)
				}
				e.Do(t, rng, reftest.Normal, graphtest.Appended{To: loaded, Tokens: 3})
				e.Do(t, rng, reftest.Normal, graphtest.Appended{To: loaded, Tokens: 1}, graphtest.Appended{To: graphtest.NewStored(t, other), Tokens: 5})
				d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 1})
				closeCache(t, cache)
				closeCache(t, other)
			})
		}
	}
}

func TestSequenceIODecodes(t *testing.T) { testSequenceIODecodes(t, graphtest.Place{}) }
