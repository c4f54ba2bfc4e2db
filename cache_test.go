package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/memory"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var smallCache = CacheConfig{Layers: 3, KVHeads: 2, HeadDim: 4, ValueDim: 3, PageSize: 4, Pages: 12}

// NewCache refuses what no computer has, and what this one has not, instead of letting
// make panic or the system end the process.
func TestNewCacheBeyondMemory(t *testing.T) {
	for _, c := range []struct {
		config CacheConfig
		want   error
	}{
		{CacheConfig{Layers: 1, KVHeads: 1 << 20, HeadDim: 1 << 20, PageSize: 1 << 9, Pages: 1}, ErrOutOfMemory},
		{CacheConfig{Layers: 1 << 30, KVHeads: 1 << 30, HeadDim: 1 << 30, PageSize: 1 << 30, Pages: 1 << 30}, ErrShape},
		{CacheConfig{Layers: math.MaxInt32, KVHeads: 1, HeadDim: math.MaxInt32, PageSize: 1, Pages: 1}, ErrShape},
		{CacheConfig{Layers: 12, KVHeads: 12, HeadDim: 64, PageSize: 64, Pages: 580_000}, ErrOutOfMemory}, // 2.7 TB
		{CacheConfig{Layers: math.MaxInt32, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: 1}, ErrOutOfMemory},
	} {
		if c.want == ErrOutOfMemory {
			if f, known := memory.Now(); !known || f.Total > 1<<37 {
				continue
			}
		}
		if _, err := NewCache(c.config); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.config, err, c.want)
		}
	}
}

// A cache takes what is free, to the byte, and what CacheConfig.Bytes says.
func TestNewCacheFree(t *testing.T) {
	defer func(now func() (memory.Free, bool)) { memory.Now = now }(memory.Now)
	config := smallCache
	bytes, err := config.Bytes()
	noError(t, err)
	if want := int64(3 * 12 * 2 * 4 * (4 + 3) * 4); bytes != want {
		t.Errorf("%d bytes, want %d", bytes, want)
	}
	var free int64
	memory.Now = func() (memory.Free, bool) { return memory.Free{Bytes: free, Total: 1 << 20, Of: "a test"}, true }
	free = bytes + 8*12 + 64*3 // what says who has which page
	c, err := NewCache(config)
	noError(t, err)
	if got := c.Stats().Bytes; got != bytes {
		t.Errorf("%d bytes, and Bytes said %d", got, bytes)
	}
	free--
	_, err = NewCache(config)
	if !errors.Is(err, ErrOutOfMemory) {
		t.Fatal(err)
	}
	for _, text := range []string{"NewCache: 8352 bytes for 3 layers of 12 pages of 4 tokens, 2 KV heads of 4 and 3, float32, in host memory", "8351 of 1048576 bytes of a test are free"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not say %q", err, text)
		}
	}
	memory.Now = func() (memory.Free, bool) { return memory.Free{}, false } // a system that does not tell
	_, err = NewCache(config)
	noError(t, err)

	config.DType = Float16
	if half, err := config.Bytes(); err != nil || half != bytes/2 {
		t.Errorf("float16: %d bytes, %v", half, err)
	}
	config.DType = tensor.Float64
	if _, err := config.Bytes(); !errors.Is(err, ErrDType) || !strings.Contains(err.Error(), "CacheConfig.Bytes") {
		t.Error(err)
	}
	if _, err := (CacheConfig{}).Bytes(); !errors.Is(err, ErrShape) {
		t.Error(err)
	}
}

// Two sequences with a common half-filled page go their own ways, in one step
// or in different ones, and neither sees the other's tokens.
func TestForksDiverge(t *testing.T) {
	for _, together := range []bool{false, true} {
		rng := reftest.Rand(t)
		c := newTestCache(t, smallCache)
		s := newStepGraph(t, c, 8, 4, tensor.Float32, WithCausal())
		defer s.close()
		a := &testContext{seq: newTestSequence(t, c)}
		s.advance(t, rng, testAppend{a, 6}) // a page and a half

		b := a.fork(t)
		if st := c.Stats(); st.FreePages != 10 || st.Shared != 2 {
			t.Fatalf("a fork shares all pages: %+v", st)
		}
		if together {
			s.advance(t, rng, testAppend{b, 3}, testAppend{a, 1})
		} else {
			s.advance(t, rng, testAppend{b, 3})
			if a.seq.Len() != 6 || b.seq.Len() != 9 {
				t.Fatalf("lengths %d and %d", a.seq.Len(), b.seq.Len())
			}
			noError(t, a.seq.checkTokens(a.tokens))
			s.advance(t, rng, testAppend{a, 1})
		}
		// The full page is still shared; a has a second one, b a second and a third.
		if st := c.Stats(); st.FreePages != 8 || st.Shared != 1 {
			t.Fatalf("%+v", st)
		}
		for range 3 {
			s.advance(t, rng, testAppend{a, 2}, testAppend{b, 1})
			noError(t, a.seq.checkTokens(a.tokens), b.seq.checkTokens(b.tokens))
		}
	}
}

// A fork at a page's end shares it and copies nothing.
func TestForkAtPageEnd(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, smallCache)
	s := newStepGraph(t, c, 8, 2, tensor.Float32)
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	s.advance(t, rng, testAppend{a, 8})
	b := a.fork(t)
	s.advance(t, rng, testAppend{a, 1}, testAppend{b, 1})
	if st := c.Stats(); st.FreePages != 8 || st.Shared != 2 {
		t.Fatalf("%+v", st)
	}
	noError(t, a.seq.checkTokens(a.tokens), b.seq.checkTokens(b.tokens))
}

// Truncate into a shared page leaves the others' tokens, also when the
// sequence then goes on in that page.
func TestTruncateIntoSharedPage(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, smallCache)
	s := newStepGraph(t, c, 8, 4, tensor.Float64, WithCausal())
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	s.advance(t, rng, testAppend{a, 7})
	b := a.fork(t)
	s.advance(t, rng, testAppend{b, 8}) // b: the shared page, and three of its own
	if st := c.Stats(); st.FreePages != 7 {
		t.Fatalf("%+v", st)
	}
	b.truncate(t, 2)
	if st := c.Stats(); st.FreePages != 10 || st.Shared != 1 {
		t.Fatalf("%+v", st)
	}
	s.advance(t, rng, testAppend{b, 3}, testAppend{a, 1})
	noError(t, a.seq.checkTokens(a.tokens), b.seq.checkTokens(b.tokens))

	// Whoever holds a page alone writes into it.
	noError(t, b.seq.Release())
	free := c.Stats().FreePages
	a.truncate(t, 5)
	s.advance(t, rng, testAppend{a, 3})
	if st := c.Stats(); st.FreePages != free || st.Shared != 0 {
		t.Fatalf("%+v, free before %d", st, free)
	}
}

// A run that fails between two layers, followed by Rollback, leaves every
// visible byte, and the same step then succeeds.
func TestCancelledRun(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, smallCache)
	s := newStepGraph(t, c, 8, 4, tensor.Float32, WithCausal())
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	s.advance(t, rng, testAppend{a, 6})
	b := a.fork(t)
	s.advance(t, rng, testAppend{b, 3})
	for failAt := 1; failAt < smallCache.Layers; failAt++ {
		before := c.Stats()
		todo := []testAppend{{a, 5}, {b, 2}}
		noError(t, set(s, todo...))
		if _, err := s.attempt(rng, failAt, todo...); !errors.Is(err, errFault) {
			t.Fatalf("the run ended with %v", err)
		}
		if err := s.step.Commit(); !errors.Is(err, ErrState) {
			t.Fatalf("commit of half a run: %v", err)
		}
		noError(t, s.step.Rollback())
		if after := c.Stats(); after != before {
			t.Fatalf("stats %+v, before %+v", after, before)
		}
		noError(t, a.seq.checkTokens(a.tokens), b.seq.checkTokens(b.tokens))
	}
	s.advance(t, rng, testAppend{a, 5}, testAppend{b, 2})

	// Or, without Rollback, the run is repeated.
	noError(t, set(s, testAppend{a, 2}))
	if _, err := s.attempt(rng, 1, testAppend{a, 2}); !errors.Is(err, errFault) {
		t.Fatalf("the run ended with %v", err)
	}
	fresh, err := s.attempt(rng, 0, testAppend{a, 2})
	noError(t, err, s.step.Commit(), a.seq.checkTokens(append(a.tokens, fresh[0]...)))
}

// The repetition of a complete run fails half-way: the first layers hold tokens
// of the second run and the last ones of the first, which must not be committed.
func TestCommitOfMixedRuns(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, smallCache)
	s := newStepGraph(t, c, 2, 2, tensor.Float32)
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	noError(t, set(s, testAppend{a, 2}))
	_, err := s.attempt(rng, 0, testAppend{a, 2})
	noError(t, err)
	if _, err = s.attempt(rng, 2, testAppend{a, 2}); !errors.Is(err, errFault) {
		t.Fatalf("the run ended with %v", err)
	}
	if err = s.step.Commit(); !errors.Is(err, ErrState) {
		t.Fatalf("commit: %v", err)
	}
	fresh, err := s.attempt(rng, 0, testAppend{a, 2})
	noError(t, err, s.step.Commit(), a.seq.checkTokens(fresh[0]))
}

// Out of pages is ErrCacheFull, and every number and every byte is as before.
func TestCacheFullChangesNothing(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 3, PageSize: 4, Pages: 4, DType: BFloat16})
	s := newStepGraph(t, c, 16, 2, tensor.Float32)
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	s.advance(t, rng, testAppend{a, 6})
	b := a.fork(t)
	for name, todo := range map[string][]testAppend{
		"one too many":      {{a, 7}},               // 2 pages, and 1 as its half page is shared
		"a copy each":       {{a, 1}, {b, 5}},       // 1, and 2
		"the second of two": {{b, 2}, {a, 3}},       // 1, and 2
		"a new sequence":    {{&testContext{}, 9}},  // 3
		"far too many":      {{&testContext{}, 16}}, // 4
		"the last of three": {{&testContext{}, 1}, {a, 1}, {b, 1}},
	} {
		for i := range todo {
			if todo[i].seq == nil {
				todo[i].seq = newTestSequence(t, c)
			}
		}
		stats, bytesBefore := c.Stats(), Slabs(c)
		pages := [][]int32{append([]int32(nil), a.seq.table.Pages...), append([]int32(nil), b.seq.table.Pages...)}
		if err := set(s, todo...); !errors.Is(err, ErrCacheFull) {
			t.Fatalf("%s: %v", name, err)
		}
		if got := c.Stats(); got != stats {
			t.Errorf("%s: stats %+v, before %+v", name, got, stats)
		}
		if !bytes.Equal(Slabs(c), bytesBefore) {
			t.Errorf("%s: memory has changed", name)
		}
		for i, q := range []*Sequence{a.seq, b.seq} {
			if q.step != nil || len(q.table.Pages) != 2 || q.table.Pages[0] != pages[i][0] || q.table.Pages[1] != pages[i][1] {
				t.Errorf("%s: sequence %d has pages %v, before %v", name, i, q.table.Pages, pages[i])
			}
		}
		for i := range todo {
			if todo[i].seq.Len() == 0 {
				noError(t, todo[i].seq.Release())
			}
		}
	}
	// The step is as good as before, and with a page less to copy there is room.
	noError(t, b.seq.Release())
	s.advance(t, rng, testAppend{a, 10})
	if st := c.Stats(); st.FreePages != 0 {
		t.Fatalf("%+v", st)
	}
	if err := set(s, testAppend{a, 1}); !errors.Is(err, ErrCacheFull) {
		t.Fatal(err)
	}
}

// A step may be set before its graph is built.
func TestGraphBuiltAfterSet(t *testing.T) {
	c := newTestCache(t, CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 2, Pages: 2})
	step, err := c.NewStep(1)
	noError(t, err)
	seq := newTestSequence(t, c)
	noError(t, step.Set([]Append{{seq, 1}}))
	g := G.NewGraph()
	x := func(name string, v ...float32) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(1, 2), G.WithName(name),
			G.WithValue(tensor.New(tensor.WithShape(1, 2), tensor.WithBacking(v))))
	}
	out, err := CachedAttention(x("q", 1, 1), x("k", 1, 2), x("v", 3, 4), step.Layer(0))
	noError(t, err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	noError(t, m.RunAll(), step.Commit())
	if got := float64s(out.Value()); got[0] != 3 || got[1] != 4 {
		t.Fatalf("got %v, want the value of the only token", got)
	}
}

// In steady state Set and Commit allocate nothing, whatever mix they are given.
func TestStepDoesNotAllocate(t *testing.T) {
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 8, PageSize: 4, Pages: 64})
	s := newStepGraph(t, c, 16, 4, tensor.Float32, WithCausal())
	defer s.close()
	var sequences []*Sequence
	var appends []Append
	for i := range 5 {
		sequences = append(sequences, newTestSequence(t, c))
		appends = append(appends, Append{sequences[i], 1 + i%3})
	}
	in := make([]layerInput, 2)
	rng := reftest.Rand(t)
	for l := range in {
		in[l] = s.draw(rng, l, nil)
	}
	var inSteps uint64
	var before, after runtime.MemStats
	counted := func(f func() error) {
		runtime.ReadMemStats(&before)
		err := f()
		runtime.ReadMemStats(&after)
		inSteps += after.Mallocs - before.Mallocs
		noError(t, err)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // so that nobody else allocates
	const steps = 400
	for i := range 2 * steps {
		if i == steps { // grown by now
			inSteps = 0
		}
		counted(func() error { return s.step.Set(appends) })
		noError(t, s.runLayer(0, in[0]), s.runLayer(1, in[1]))
		counted(s.step.Commit)
		if i%3 == 0 {
			counted(func() error { return s.step.Set(appends) })
			counted(s.step.Rollback)
		}
		for _, q := range sequences { // the contexts wax and wane
			if q.Len() > 30 {
				noError(t, q.Truncate(i%17))
			}
		}
	}
	if inSteps > steps/20 { // the runtime itself allocates now and then
		t.Errorf("%d allocations in %d steps", inSteps, steps)
	}
}

// Layers have one plan where all that a schedule or a kernel depends on is equal, and
// each its own where anything differs.
func TestPlansOfLayers(t *testing.T) {
	cfg := smallCache
	cfg.Layers = 40
	c := newTestCache(t, cfg)
	step, err := c.NewStep(3)
	noError(t, err)
	g := G.NewGraph()
	layer := 0
	add := func(heads int, opts ...Option) {
		t.Helper()
		var in [3]*G.Node
		for i, width := range [...]int{heads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim, cfg.KVHeads * cfg.ValueDim} {
			in[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(3, width), G.WithName(fmt.Sprint("qkv"[i], heads, layer)))
		}
		_, err := CachedAttention(in[0], in[1], in[2], step.Layer(layer), opts...)
		noError(t, err)
		layer++
	}
	options := [][]Option{
		nil, {WithCausal()}, {WithScale(1)}, {WithScale(2)}, {WithWindow(3)}, {WithWindow(4)}, {WithSoftCap(1)}, {WithSoftCap(2)},
		{WithALiBi([]float64{1, 2, 3, 4})}, {WithALiBi([]float64{1, 2, 3, 5})}, {WithSchedule(PerHead)}, {WithSchedule(FixedSplit(2))}, {WithSchedule(FixedSplit(3))},
		{WithTileTokens(1)}, {WithTileTokens(2)}, {WithWorkers(1)}, {WithWorkers(2)}, {WithCausal(), WithWorkers(1)},
	}
	for range 2 {
		for _, o := range options {
			add(4, o...)
		}
		if n := len(step.plans); n != len(options) {
			t.Fatalf("%d plans for %d kinds of layers", n, len(options))
		}
	}
	add(2)
	add(2)
	if n := len(step.plans); n != len(options)+1 {
		t.Errorf("%d plans after layers of two heads", n)
	}
}

// A step that is rolled back leaves the pool of pages as it was, to the order of the
// free list, wherever the failure was.
func TestRollbackRestoresThePool(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 3, PageSize: 4, Pages: 12})
	s := newStepGraph(t, c, 16, 2, tensor.Float32)
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	s.advance(t, rng, testAppend{a, 6})
	b, other := a.fork(t), &testContext{seq: newTestSequence(t, c)}
	s.advance(t, rng, testAppend{other, 9})
	other.tokens = other.tokens[:3]
	noError(t, other.seq.Truncate(3)) // the free list is not in order any more
	before := booksOf(c)
	appends := []testAppend{{b, 4}, {other, 6}, {a, 3}}
	for _, failAt := range []int{-1, 0, 1} { // before a run, nowhere, in a layer
		noError(t, set(s, appends...))
		if failAt >= 0 {
			if _, err := s.attempt(rng, failAt, appends...); (err != nil) != (failAt > 0) {
				t.Fatal(failAt, err)
			}
		}
		if booksOf(c).equal(before) {
			t.Fatal("the step has reserved nothing")
		}
		noError(t, s.step.Rollback())
		if after := booksOf(c); !after.equal(before) {
			t.Fatalf("failure at %d: %+v, before %+v", failAt, after, before)
		}
	}
}

// Where the pool's numbers are wrong, which only a defect could bring about, calls say
// so and change nothing: no page goes to two sequences.
func TestWrongPool(t *testing.T) {
	for name, do := range map[string]func(*Sequence, *Step) error{
		"Fork":     func(q *Sequence, _ *Step) error { _, err := q.Fork(); return err },
		"WriteTo":  func(q *Sequence, _ *Step) error { _, err := q.WriteTo(new(bytes.Buffer)); return err },
		"Truncate": func(q *Sequence, _ *Step) error { return q.Truncate(1) },
		"Release":  func(q *Sequence, _ *Step) error { return q.Release() },
	} {
		c := newTestCache(t, smallCache)
		q := newTestSequence(t, c)
		Lengthen(q, 10)
		step, err := c.NewStep(4)
		noError(t, err, c.pool.Release(q.table.Pages[1:]))
		before := booksOf(c)
		if err := do(q, step); !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), name+": pages: page ") {
			t.Errorf("%s: %v", name, err)
		}
		if after := booksOf(c); !after.equal(before) || q.Len() != 10 {
			t.Errorf("%s: %+v, before %+v", name, after, before)
		}
	}
	c := newTestCache(t, smallCache)
	q := newTestSequence(t, c)
	step, err := c.NewStep(4)
	noError(t, err, step.Set([]Append{{q, 4}}), c.pool.Release(step.reservations[0].Fresh()))
	if err := step.Rollback(); !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), "Rollback: pages: page 0 is free") {
		t.Error(err)
	}
	if c.pool.Free() != smallCache.Pages || step.open || q.step != nil {
		t.Errorf("%d pages free, step %v, sequence %v", c.pool.Free(), step, q)
	}
}
