package leanattention

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/pages"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
	"pgregory.net/rapid"
)

// Caches that give pages back. TestCacheAgainstModel has them, too, with all that else happens to a cache.

// mostPages is how many pages a sequence of a cache with a window has at most between two steps, as CacheConfig says.
func mostPages(c CacheConfig) int {
	return (c.Window+c.Rewind)/c.PageSize + 2 + (c.SinkTokens+c.PageSize-1)/c.PageSize
}

// A cache that gives pages back has the bits of one that keeps all, on the CPU: LeanTiles begin with the first key
// that is seen, wherever it lies. With sink tokens it is the same within the bound: where nothing is left between them and
// the window, kernels are called for both at once.
func TestWindowBits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole := CacheConfig{
			Layers: 1, KVHeads: rapid.IntRange(1, 2).Draw(t, "KV heads"), HeadDim: rapid.IntRange(1, 9).Draw(t, "head dim"),
			PageSize: rapid.IntRange(1, 9).Draw(t, "page size"), Pages: 1500,
			DType: rapid.SampledFrom([]tensor.Dtype{tensor.Float32, Float16, BFloat16}).Draw(t, "dtype"),
		}
		config := whole
		config.Window = rapid.IntRange(1, 40).Draw(t, "window")
		config.SinkTokens = rapid.SampledFrom([]int{0, 0, 1, 4, 9}).Draw(t, "sink tokens")
		config.Rewind = rapid.SampledFrom([]int{0, 0, 7}).Draw(t, "rewind")
		rows := rapid.IntRange(1, 70).Draw(t, "rows")
		config.Pages = 2 * (mostPages(config) + (rows+config.PageSize-1)/config.PageSize)
		query := rapid.SampledFrom([]tensor.Dtype{tensor.Float32, tensor.Float64}).Draw(t, "query dtype")
		heads := config.KVHeads * rapid.IntRange(1, 3).Draw(t, "group")
		opts := []Option{
			WithWindow(rapid.IntRange(1, config.Window).Draw(t, "window of the layer")), WithSinkTokens(config.SinkTokens),
			WithWorkers(rapid.IntRange(1, 4).Draw(t, "workers")), WithTileTokens(rapid.SampledFrom([]int{1, 3, 16, 0}).Draw(t, "tile tokens")),
			WithSchedule(rapid.SampledFrom([]Schedule{StreamK, PerHead, FixedSplit(2)}).Draw(t, "schedule")),
		}
		if rapid.Bool().Draw(t, "causal") {
			opts = append(opts, WithCausal())
		}
		mods := false
		if config.SinkTokens == 0 && rapid.Bool().Draw(t, "slopes") {
			opts, mods = append(opts, WithALiBi([]float64{0.5, 0.25, 0.1, 0.7, 0.01, 0}[:heads])), true
		}
		if config.SinkTokens == 0 && rapid.Bool().Draw(t, "soft cap") {
			opts, mods = append(opts, WithSoftCap(1.5)), true
		}
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "values"), 0))

		var graphs [2]*stepGraph
		var seqs [2][2]*Sequence
		for i, c := range []CacheConfig{whole, config} {
			cache, err := NewCache(c)
			noError(t, err)
			poisonUnseen(cache, nil)
			graphs[i] = newStepGraph(t, cache, rows, heads, query, opts...)
			defer graphs[i].close()
			for j := range seqs[i] {
				seqs[i][j], err = cache.NewSequence()
				noError(t, err)
			}
		}
		var contexts [2][]*testToken
		for range rapid.IntRange(2, 20).Draw(t, "steps") {
			n := [2]int{rapid.IntRange(1, rows).Draw(t, "tokens")}
			if n[0] < rows {
				n[1] = rapid.IntRange(0, rows-n[0]).Draw(t, "tokens of another one")
			}
			fresh := newTestTokens(n[0]+n[1], 1)
			in := graphs[0].draw(rng, 0, fresh)
			for i, s := range graphs {
				var appends []Append
				for j, k := range n {
					if k > 0 {
						appends = append(appends, Append{Seq: seqs[i][j], Tokens: k})
					}
				}
				noError(t, s.step.Set(appends), s.run([]layerInput{in}, 0))
			}
			if a, b := graphs[0].step.Positions(), graphs[1].step.Positions(); !slices.Equal(a, b) {
				t.Fatalf("positions %v, want %v", b, a)
			}
			for i, x := range [][2]G.Value{{graphs[0].out[0], graphs[1].out[0]}, {graphs[0].lse[0], graphs[1].lse[0]}} {
				if config.SinkTokens == 0 && !slices.Equal(bitsOf(x[0]), bitsOf(x[1])) {
					t.Fatalf("other bits (%d) at %v", i, contexts)
				}
			}
			var parts []stepPart
			for j, k := range n {
				contexts[j] = append(contexts[j], fresh[:k]...)
				if fresh = fresh[k:]; k > 0 {
					parts = append(parts, stepPart{context: contexts[j], n: k})
				}
			}
			if !mods {
				noError(t, graphs[1].checkLayer(0, in.q, parts))
			}
			noError(t, graphs[0].step.Commit(), graphs[1].step.Commit())
			poisonFree(graphs[1].step.cache)
			for j, s := range seqs[1] {
				if len(s.table.Pages) > mostPages(s.cache.config) || s.Len() != len(contexts[j]) {
					t.Fatalf("%v of %v", s, s.cache)
				}
			}
		}
	})
}

// bitsOf are the bits of a tensor's elements.
func bitsOf(v G.Value) (bits []uint64) {
	for _, x := range float64s(v) {
		bits = append(bits, math.Float64bits(x))
	}
	return bits
}

// poisonFree writes NaN to all pages that nobody holds.
func poisonFree(c *Cache) {
	_, holders := c.pool.Lists()
	poisonUnseen(c, func(_ int, page int32, _ int) bool { return holders[page] > 0 })
}

// A chat runs on for ever: 100,000 tokens go through six pages, and nothing grows.
func TestWindowForever(t *testing.T) {
	tokens := reftest.Cases(t, 5_000, 100_000)
	if testing.Short() || reftest.RaceEnabled {
		tokens = 10_000
	}
	testWindowForever(t, modelPlace{}, tokens)
}

// The same on a GPU that tests make, and on two of them.
func TestDeviceWindowForever(t *testing.T) {
	for n := 1; n <= 2; n++ {
		gpu, _ := FakeGPUs(t, n)
		testWindowForever(t, modelPlace{gpu: gpu}, 4000)
		noError(t, gpu.Close())
	}
}

func testWindowForever(t *testing.T, at modelPlace, tokens int) {
	rng := reftest.Rand(t)
	config := at.config(CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 4, PageSize: 4, Window: 10, Pages: 6, DType: Float16})
	c := newTestCache(t, config)
	prompt, decode := newStepGraph(t, c, 8, 4, tensor.Float32, WithCausal(), WithWindow(10)), newStepGraph(t, c, 1, 4, tensor.Float32, WithCausal(), WithWindow(9))
	defer prompt.close()
	defer decode.close()
	chat := &testContext{seq: newTestSequence(t, c)}
	var before runtime.MemStats
	for total, turn := 0, 0; total < tokens; turn++ {
		s, n := decode, 1
		if turn%3 > 0 {
			s, n = prompt, 1+rng.IntN(8)
		}
		noError(t, s.step.Set([]Append{{Seq: chat.seq, Tokens: n}}))
		for i, p := range s.step.Positions()[:n] {
			if p != total+i {
				t.Fatalf("row %d is at %d, want %d", i, p, total+i)
			}
		}
		fresh := newTestTokens(n, 2)
		inputs := []layerInput{s.draw(rng, 0, fresh), s.draw(rng, 1, fresh)}
		noError(t, s.run(inputs, 0))
		chat.tokens = append(chat.tokens, fresh...)
		if turn%16 < 2 {
			for l, in := range inputs { // a reference of the last tokens: the others are behind the window
				noError(t, s.checkLayer(l, in.q, []stepPart{{context: chat.tokens, n: n}}))
			}
		}
		noError(t, s.step.Commit())
		if turn%64 == 0 {
			poisonFree(c)
		}
		if keep := 24; len(chat.tokens) > keep {
			chat.tokens = slices.Clone(chat.tokens[len(chat.tokens)-keep:])
		}
		total += n
		if st := c.Stats(); c.config.Pages-st.FreePages > mostPages(config) || st.Tokens != total || chat.seq.Len() != total {
			t.Fatalf("%v behind %d tokens", c, total)
		}
		if cap(chat.seq.table.Pages) > 16 {
			t.Fatalf("a table of %d pages", cap(chat.seq.table.Pages))
		}
		if turn == 300 {
			before = collected()
		}
	}
	if after := collected(); after.HeapObjects > before.HeapObjects+1000 || after.HeapAlloc > before.HeapAlloc+1<<19 {
		t.Errorf("%d bytes in %d objects behind 300 steps, %d in %d behind %d tokens", before.HeapAlloc, before.HeapObjects, after.HeapAlloc, after.HeapObjects, chat.seq.Len())
	}
	noError(t, chat.seq.Release())
	if st := c.Stats(); st.FreePages != c.config.Pages || st.Tokens != 0 {
		t.Errorf("%v", c)
	}
	noError(t, c.Close())
}

// A long prompt in chunks needs no more than the pages of a window and of a chunk, beside another text that decodes.
func TestWindowChunks(t *testing.T) {
	rng := reftest.Rand(t)
	for _, rows := range []int{1, 5, 16, 50} {
		for _, size := range []int{1, 4, 7} {
			config := CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 3, PageSize: size, Window: 12, SinkTokens: 3 * (rows % 2)}
			config.Pages = mostPages(config) + (rows+size-1)/size
			if rows > 1 {
				config.Pages += mostPages(config) + 1
			}
			c := newTestCache(t, config)
			s := newStepGraph(t, c, rows, 2, tensor.Float32, WithCausal(), WithWindow(12), WithSinkTokens(config.SinkTokens))
			texts := []*testContext{{seq: newTestSequence(t, c)}, {seq: newTestSequence(t, c)}}
			todo := []Append{{Seq: texts[0].seq, Tokens: 120}, {Seq: texts[1].seq, Tokens: 1}}
			if rows == 1 {
				todo = todo[:1]
			}
			for appends, of := range Chunks(rows, todo) {
				noError(t, s.step.Set(appends))
				var list []testAppend
				for i, a := range appends {
					list = append(list, testAppend{texts[of[i]], a.Tokens})
				}
				fresh, err := s.attempt(rng, 0, list...)
				noError(t, err, s.step.Commit())
				for i, a := range list {
					a.tokens = append(a.tokens, fresh[i]...)
					noError(t, a.seq.checkTokens(a.tokens))
				}
			}
			if n := texts[0].seq.Len(); n != 120 {
				t.Errorf("%d tokens", n)
			}
			s.close()
			noError(t, c.Close())
		}
	}
}

// Goroutines share a cache that gives pages back.
func TestWindowConcurrentSteps(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 4, PageSize: 4, Window: 6, SinkTokens: 2, Rewind: 4, Pages: 4 * 16})
	done := make(chan error)
	steps := 200
	if reftest.RaceEnabled {
		steps = 50
	}
	const decoders = 4
	for range decoders {
		seed := rng.Uint64()
		s := newStepGraph(t, c, 5, 2, tensor.Float32, WithCausal(), WithWindow(6), WithSinkTokens(2))
		own := &testContext{seq: newTestSequence(t, c)}
		go func() {
			done <- func() error {
				defer s.close()
				rng := rand.New(rand.NewPCG(seed, 0))
				for range steps {
					a := testAppend{own, 1 + rng.IntN(5)}
					if err := set(s, a); err != nil {
						return err
					}
					fresh, err := s.attempt(rng, 0, a)
					if err != nil {
						return err
					}
					if rng.IntN(4) == 0 {
						if err := s.step.Rollback(); err != nil {
							return err
						}
						continue
					}
					if err := s.step.Commit(); err != nil {
						return err
					}
					if own.tokens = append(own.tokens, fresh[0]...); rng.IntN(3) == 0 { // guesses that were wrong
						n := len(own.tokens) - rng.IntN(min(a.n, 4))
						if err := own.seq.Truncate(n); err != nil {
							return err
						}
						own.tokens = own.tokens[:n]
					}
					f, err := own.seq.Fork()
					if err != nil {
						return err
					}
					if err := errors.Join(f.checkTokens(own.tokens), f.Release()); err != nil {
						return err
					}
				}
				return own.seq.Release()
			}()
		}()
	}
	for range decoders {
		noError(t, <-done)
	}
	if st := c.Stats(); st.FreePages != c.config.Pages || st.Tokens != 0 || st.Sequences != 0 {
		t.Errorf("%v", c)
	}
}

// A sequence that has given tokens back is saved and loaded, into caches of other pages and windows; one that
// has all of them takes no more pages in a cache with a window than it needs there.
func TestWindowSequenceIO(t *testing.T) { testWindowSequenceIO(t, nil) }

func TestDeviceWindowSequenceIO(t *testing.T) {
	gpu, _ := FakeGPU(t)
	testWindowSequenceIO(t, nil, gpu)
}

func testWindowSequenceIO(t *testing.T, places ...*device.GPU) {
	defer func(n int) { chunkBytes = n }(chunkBytes)
	rapid.Check(t, func(t *rapid.T) {
		chunkBytes = rapid.SampledFrom([]int{1, 64, 1 << 20}).Draw(t, "bytes of a part")
		var caches [2]*Cache
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "values"), 0))
		dtype := rapid.SampledFrom([]tensor.Dtype{tensor.Float32, Float16}).Draw(t, "dtype")
		for i := range caches {
			config := CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 3, ValueDim: 2, DType: dtype, Pages: 80, PageSize: rapid.IntRange(1, 9).Draw(t, "page size")}
			config.Device = rapid.SampledFrom(places).Draw(t, "place")
			if rapid.IntRange(0, 3).Draw(t, "windows") > 0 {
				config.Window, config.Rewind = rapid.IntRange(1, 20).Draw(t, "window"), rapid.IntRange(0, 5).Draw(t, "rewind")
				if config.Device == nil {
					config.SinkTokens = rapid.IntRange(0, 9).Draw(t, "sink tokens")
				}
			}
			var err error
			caches[i], err = NewCache(config)
			noError(t, err)
			defer caches[i].Close()
			fillRandom(caches[i], rng)
		}
		from, to := caches[0], caches[1]
		other, err := from.NewSequence() // so that pages are in another order
		noError(t, err)
		s, err := from.NewSequence()
		noError(t, err)
		for range rapid.IntRange(1, 4).Draw(t, "steps") {
			Lengthen(other, 1)
			Lengthen(s, rapid.IntRange(0, 15).Draw(t, "tokens"))
			if g := from.config.behind(s.table.Tokens); g.End > max(g.First, s.table.Gap.End) {
				noError(t, from.pool.Drop(&s.table, g))
			}
		}
		// A sequence that was rewound has given back more than one that has only so many tokens.
		noError(t, s.Truncate(s.Len()-rapid.IntRange(0, s.Rewind()).Draw(t, "rewound")))
		gap, n := s.table.Gap, s.Len()

		var b bytes.Buffer
		size, err := s.WriteTo(&b)
		noError(t, err)
		header := 48
		if gap != (pages.Gap{}) {
			header = 64
		}
		if want := header + (n-gap.End+gap.First)*2*2*(3+2)*int(from.config.DType.Size()); int(size) != want || b.Len() != want {
			t.Fatalf("%v: %d bytes written, %d there, want %d", s, size, b.Len(), want)
		}
		before := booksOf(to)
		for range 3 {
			cut := rapid.IntRange(0, b.Len()-1).Draw(t, "cut")
			if _, err := to.ReadSequence(bytes.NewReader(b.Bytes()[:cut])); err == nil || !before.equal(booksOf(to)) {
				t.Fatalf("%d bytes of %d: %v", cut, b.Len(), err)
			}
		}

		// What the other cache must have.
		need := func(j int) bool {
			w := to.config.Window
			return w == 0 || j < to.config.SinkTokens || j > n-w
		}
		refuses := false
		for j := range n {
			refuses = refuses || need(j) && j >= gap.First && j < gap.End
		}
		loaded, err := to.ReadSequence(&b)
		if refuses {
			if !errors.Is(err, ErrShape) || !strings.Contains(err.Error(), fmt.Sprintf("given back tokens [%d, %d) of %d", gap.First, gap.End, n)) || !before.equal(booksOf(to)) {
				t.Fatalf("%v into %v: %v", s, to, err)
			}
			return
		}
		noError(t, err)
		if b.Len() != 0 || loaded.Len() != n {
			t.Fatalf("%v of %v, %d bytes are left", loaded, s, b.Len())
		}
		if to.config.Window > 0 && len(loaded.table.Pages) > mostPages(to.config) {
			t.Fatalf("%v into %v", loaded, to)
		}
		noError(t, to.Check(), from.Check())
		vs, vl := from.testView(), to.testView()
		for j := range n {
			at, kept := s.place(j)
			there, has := loaded.place(j)
			if need(j) && !has {
				t.Fatalf("token %d is missing in %v of %v", j, loaded, to)
			}
			if kept && has && !bytes.Equal(vs.tokenBytes(s, at), vl.tokenBytes(loaded, there)) {
				t.Fatalf("token %d has other bits", j)
			}
		}
		noError(t, loaded.Release())
		if !before.equal(booksOf(to)) {
			t.Fatalf("%v", to)
		}
	})
}

// How far a sequence can be rewound that another cache has saved: as far as both have kept its tokens. It says so, and
// Truncate's error says why and the way out.
func TestRewindOfSavedSequence(t *testing.T) {
	type keeps struct{ window, sinks, rewind, page int }
	for _, x := range []struct {
		from, to keeps
		rewind   int    // of 20 tokens; -1: to needs more than from has kept
		text     string // of the refusal
	}{
		{keeps{6, 0, 0, 4}, keeps{6, 0, 8, 4}, 0, ""},
		{keeps{6, 0, 3, 4}, keeps{6, 0, 8, 3}, 3, ""},
		{keeps{6, 0, 8, 4}, keeps{6, 0, 0, 5}, 0, ""},
		{keeps{6, 0, 8, 4}, keeps{6, 0, 8, 4}, 8, ""},
		{keeps{6, 0, 0, 4}, keeps{4, 0, 0, 4}, 0, ""},
		{keeps{6, 0, 0, 4}, keeps{4, 0, 8, 4}, 2, ""}, // what a larger window keeps can be rewound
		{keeps{6, 0, 8, 4}, keeps{4, 0, 2, 4}, 2, ""},
		{keeps{6, 0, 8, 4}, keeps{8, 0, 0, 4}, 0, ""},
		{keeps{6, 0, 8, 4}, keeps{8, 0, 8, 4}, 6, ""},
		{keeps{6, 0, 0, 4}, keeps{8, 0, 0, 4}, -1, "[0, 15) of 20; the cache has a Window of 8 and 0 SinkTokens"},
		{keeps{6, 0, 0, 4}, keeps{0, 0, 0, 4}, -1, "the cache has a Window of 0"},
		{keeps{0, 0, 0, 4}, keeps{6, 0, 4, 4}, 4, ""},
		{keeps{0, 0, 0, 4}, keeps{0, 0, 0, 3}, 20, ""},
		{keeps{6, 4, 0, 4}, keeps{6, 2, 8, 3}, 0, ""},
		{keeps{6, 2, 8, 4}, keeps{6, 2, 8, 1}, 8, ""},
		{keeps{6, 2, 0, 4}, keeps{6, 4, 0, 4}, -1, "[2, 15) of 20; the cache has a Window of 6 and 4 SinkTokens"},
	} {
		cache := func(k keeps) *Cache {
			return newTestCache(t, CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, Pages: 40, PageSize: k.page, Window: k.window, SinkTokens: k.sinks, Rewind: k.rewind})
		}
		from, to := cache(x.from), cache(x.to)
		lengthen := func(s *Sequence, n int) { // as steps do
			c := s.cache
			for range n {
				Lengthen(s, 1)
				if g := c.config.behind(s.table.Tokens); g.End > max(g.First, s.table.Gap.End) {
					noError(t, c.pool.Drop(&s.table, g))
				}
			}
		}
		s := newTestSequence(t, from)
		lengthen(s, 20)
		loaded, err := to.ReadSequence(bytes.NewReader(saved(t, s)))
		if x.rewind < 0 {
			wrong(t, fmt.Sprintf("%v to %v", x.from, x.to), err, ErrShape, x.text)
			noError(t, to.Check())
			continue
		}
		noError(t, err, to.Check())
		for ; x.rewind <= x.to.rewind; x.rewind++ { // each new token adds one
			if got := loaded.Rewind(); got != x.rewind {
				t.Errorf("%v to %v, %d tokens: %d can be taken away, want %d", x.from, x.to, loaded.Len(), got, x.rewind)
			}
			for n := range loaded.Len() + 1 {
				f := forkTest(t, loaded)
				switch err := f.Truncate(n); {
				case n >= f.Len()-x.rewind || n <= x.to.sinks:
					noError(t, err)
				default:
					wrong(t, fmt.Sprintf("%v to %v, %d of %d", x.from, x.to, n, f.Len()), err, ErrLength, "given back", fmt.Sprintf("Sequence.Rewind is %d", x.rewind),
						fmt.Sprintf("keep %d tokens or more", f.Len()-x.rewind), fmt.Sprintf("or %d or fewer and append the others anew", x.to.sinks))
					if f.Len() != loaded.Len() || f.Rewind() != x.rewind {
						t.Errorf("%v after a refusal", f)
					}
				}
				noError(t, to.Check(), f.Release())
			}
			lengthen(loaded, 1)
		}
	}
}

// tokenBytes are a token's keys and values in all layers.
func (v *testView) tokenBytes(s *Sequence, at int) (b []byte) {
	for l := range v.config.Layers {
		for h := range v.config.KVHeads {
			for _, values := range []bool{false, true} {
				slab, from, n := v.testRow(values, l, s.table.Pages[at/v.config.PageSize], h, at%v.config.PageSize)
				size := slab.DType.Size()
				b = append(b, slabBytes(*slab)[from*size:(from+n)*size]...)
			}
		}
	}
	return b
}

// What a cache with a window can't do is refused, with both sides of it.
func TestWindowRefusals(t *testing.T) {
	config := CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 4, PageSize: 2, Window: 6, Pages: 20}
	for what, x := range map[string]struct {
		change func(c *CacheConfig)
		want   error
		text   string
	}{
		"negative window":      {func(c *CacheConfig) { c.Window = -1 }, ErrShape, "Window is -1"},
		"huge window":          {func(c *CacheConfig) { c.Window = 1 << 30 }, ErrShape, "Window is 1073741824, outside [0, 536870912]"},
		"negative sink tokens": {func(c *CacheConfig) { c.SinkTokens = -4 }, ErrShape, "SinkTokens is -4"},
		"negative rewind":      {func(c *CacheConfig) { c.Rewind = -2 }, ErrShape, "Rewind is -2"},
		"sinks alone":          {func(c *CacheConfig) { c.Window, c.SinkTokens = 0, 4 }, ErrShape, "Window is 0, SinkTokens 4"},
		"rewind alone":         {func(c *CacheConfig) { c.Window, c.Rewind = 0, 3 }, ErrShape, "Rewind 3"},
	} {
		c := config
		x.change(&c)
		_, err := NewCache(c)
		wrong(t, what, err, x.want, "NewCache: ", x.text)
	}

	c := newTestCache(t, config)
	config.SinkTokens = 3
	withSinks := newTestCache(t, config)
	step, err := c.NewStep(3)
	noError(t, err)
	sinkStep, err := withSinks.NewStep(3)
	noError(t, err)
	node := func(s *Step, opts ...Option) error {
		in := input3Nodes(G.NewGraph(), tensor.Float32, 3, 2, c)
		_, err := CachedAttention(in[0], in[1], in[2], s.Layer(0), opts...)
		return err
	}
	wrong(t, "no window", node(step, WithCausal()), ErrOption, "CachedAttention: a node without WithWindow", "Window of 6")
	wrong(t, "a larger window", node(step, WithWindow(7)), ErrOption, "WithWindow(7)", "Window of 6")
	wrong(t, "other sinks", node(step, WithWindow(5), WithSinkTokens(1)), ErrOption, "WithSinkTokens(1)", "keeps 0 SinkTokens")
	wrong(t, "no sinks", node(sinkStep, WithWindow(5)), ErrOption, "WithSinkTokens(0)", "keeps 3 SinkTokens")
	wrong(t, "slopes and sinks", node(sinkStep, WithWindow(5), WithSinkTokens(3), WithALiBi([]float64{1, 1})), ErrUnsupported, "WithALiBi", "3 SinkTokens")
	// A cache keeps its Rewind for Truncate: a node with a larger window would miss keys behind that.
	config.SinkTokens, config.Rewind = 0, 4
	rewinding, err := newTestCache(t, config).NewStep(3)
	noError(t, err)
	for _, window := range []int{7, 10, 11} {
		wrong(t, "a window that takes the Rewind", node(rewinding, WithWindow(window)), ErrOption, fmt.Sprintf("WithWindow(%d)", window), "Window of 6")
	}
	noError(t, node(rewinding, WithWindow(6)))
	noError(t, node(step, WithWindow(6), WithALiBi([]float64{1, 1})), node(sinkStep, WithWindow(6), WithSinkTokens(3)))

	s := newStepGraph(t, c, 10, 2, tensor.Float32, WithCausal(), WithWindow(6))
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	s.advance(t, reftest.Rand(t), testAppend{a, 10})
	if got := a.seq.String(); got != "sequence of 10 tokens but for [0, 5) in 3 pages" {
		t.Error(got)
	}
	before := c.Stats()
	wrong(t, "too short", a.seq.Truncate(9), ErrLength, "Truncate: 9 tokens of a sequence of 10: a window of 6 keys would see tokens of [0, 5)", "Rewind is 0")
	wrong(t, "a tree", s.step.Set([]Append{{Seq: a.seq, Tokens: 1, Parents: []int{-1}}}), ErrUnsupported, "window of 6 keys")
	if after := c.Stats(); after != before {
		t.Errorf("%v, want %v", after, before)
	}
	noError(t, a.seq.Truncate(10), a.seq.Truncate(0))
	if st := c.Stats(); st.FreePages != c.config.Pages || a.seq.Len() != 0 {
		t.Errorf("%v", c)
	}
	a.tokens = nil
	s.advance(t, reftest.Rand(t), testAppend{a, 7}) // from its beginning again

	// An endless sequence has an end nevertheless.
	endless := c.newSequence(pages.Table{Tokens: math.MaxInt - 2, Gap: pages.Gap{End: math.MaxInt - 3}})
	wrong(t, "more than an int", s.step.Set([]Append{{Seq: endless, Tokens: 3}}), ErrLength, fmt.Sprintf("3 tokens behind %d", math.MaxInt-2))
	_, err = c.Need([]Append{{Seq: endless, Tokens: 3}})
	wrong(t, "more than an int", err, ErrLength, "Need: append 0 has 3 tokens behind")
	delete(c.holders, endless) // it has no pages

	// Neither end of a move may be a token that is gone, the first of them included.
	first := newTestSequence(t, withSinks)
	Lengthen(first, 20)
	noError(t, withSinks.pool.Drop(&first.table, withSinks.config.behind(20)), withSinks.Check())
	wrong(t, "the first token that is gone", first.Keep(1, []int{2}), ErrLength, "token 3 would become token 1, and those of [3, 15) were given back")
	wrong(t, "the last token that is gone", first.Keep(1, []int{13}), ErrLength, "token 14 would become token 1")
	noError(t, first.Keep(1, []int{14}), withSinks.Check()) // token 15 is there
	if first.Len() != 2 || first.Rewind() != 2 {
		t.Error(first)
	}

	if got := withSinks.String(); !strings.Contains(got, "a window of 6 keys and 3 sink tokens") {
		t.Error(got)
	}
}

// What somebody makes up as a saved sequence with tokens that are gone does no harm.
func TestWindowReadSequenceHeader(t *testing.T) {
	c, err := NewCache(CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 8, Window: 6})
	noError(t, err)
	s := newTestSequence(t, c)
	Lengthen(s, 20)
	noError(t, c.pool.Drop(&s.table, c.config.behind(20)))
	good := saved(t, s)
	loaded, err := c.ReadSequence(bytes.NewReader(good))
	noError(t, err)
	noError(t, loaded.Release())
	before := booksOf(c)
	const head = headerBytes - sumBytes + gapBytes
	ff := bytes.Repeat([]byte{255}, 8)
	for _, x := range []struct {
		at    int
		value []byte
		want  error
		text  string
	}{
		{40, []byte{15}, ErrFormat, "[15, 15) of 20"},
		{40, []byte{16}, ErrFormat, "[16, 15) of 20"},
		{40, []byte{1}, nil, ""}, // it has more than the cache keeps, and then there is less than it says
		{48, []byte{21}, ErrFormat, "[0, 21) of 20"},
		{48, []byte{16}, ErrShape, "given back tokens [0, 16) of 20; the cache has a Window of 6 and 0 SinkTokens"},
		{48, ff, ErrFormat, "18446744073709551615"},
		{32, ff, ErrFormat, "of 18446744073709551615"},
		{32, binary.LittleEndian.AppendUint64(nil, math.MaxInt), ErrLength, ""},
		{32, []byte{21}, ErrFormat, "ends after"},
	} {
		b := slices.Clone(good[:head])
		copy(b[x.at:], x.value)
		b = withSum(append(withSum(b), good[head+sumBytes:len(good)-sumBytes]...))
		_, err := c.ReadSequence(bytes.NewReader(b))
		if x.want == nil {
			x.want = ErrFormat
		}
		if !errors.Is(err, x.want) || !strings.Contains(err.Error(), x.text) {
			t.Errorf("%d %v: %v, want %v with %q", x.at, x.value, err, x.want, x.text)
		}
		if !before.equal(booksOf(c)) {
			t.Fatalf("%d %v: the cache has changed", x.at, x.value)
		}
	}
	for n := range good {
		if _, err := c.ReadSequence(bytes.NewReader(good[:n])); !errors.Is(err, ErrFormat) || !before.equal(booksOf(c)) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
}
