package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Goroutines that each have a step of their own decode forks of one prompt,
// while others fork it, cut it and look at the numbers. What each of them reads
// is its own and the prompt, to the bit. Full caches come and go.
func TestConcurrentSteps(t *testing.T) { testConcurrentSteps(t, modelPlace{}, 150) }

func testConcurrentSteps(t *testing.T, at modelPlace, steps int) {
	rng := reftest.Rand(t)
	c := newTestCache(t, at.config(CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 4, PageSize: 4, Pages: 40}))
	first := newStepGraph(t, c, 8, 4, tensor.Float32, WithCausal())
	defer first.close()
	prompt := &testContext{seq: newTestSequence(t, c)}
	first.advance(t, rng, testAppend{prompt, 6})

	const decoders = 4
	var working atomic.Int32
	working.Store(decoders)
	var wg sync.WaitGroup
	for i := range decoders {
		s := newStepGraph(t, c, 8, 4, tensor.Float32, WithCausal(), WithWorkers(1+i))
		seed := rng.Uint64()
		wg.Go(func() {
			defer working.Add(-1)
			defer s.close()
			if err := decodeForks(s, prompt, rand.New(rand.NewPCG(seed, 0)), steps); err != nil {
				t.Error(err)
			}
		})
	}
	for range 2 {
		wg.Go(func() {
			for n := 0; working.Load() > 0; n++ {
				if err := forkAndRelease(c, prompt.seq, n%7); err != nil {
					t.Error(err)
					return
				}
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
	noError(t, prompt.seq.checkTokens(prompt.tokens))
	if st := c.Stats(); st.Sequences != 1 || st.FreePages != 38 || st.Shared != 0 || st.Tokens != 6 {
		t.Errorf("in the end %+v", st)
	}
}

// decodeForks does steps with forks of the prompt.
func decodeForks(s *stepGraph, prompt *testContext, rng *rand.Rand, steps int) error {
	var mine []*testContext
	for range steps {
		if len(mine) < 2 {
			f, err := prompt.seq.Fork()
			if err != nil {
				return err
			}
			mine = append(mine, &testContext{f, append([]*testToken(nil), prompt.tokens...)})
		}
		var appends []testAppend
		for _, m := range mine {
			appends = append(appends, testAppend{m, 1 + rng.IntN(4)})
		}
		if err := set(s, appends...); err != nil {
			if !errors.Is(err, ErrCacheFull) {
				return err
			}
			if err := mine[0].seq.Release(); err != nil {
				return err
			}
			mine = mine[1:]
			continue
		}
		fresh, err := s.attempt(rng, 0, appends...)
		if err != nil {
			return err
		}
		if rng.IntN(4) == 0 {
			err = s.step.Rollback()
			fresh = make([][]*testToken, len(mine))
		} else {
			err = s.step.Commit()
		}
		if err != nil {
			return err
		}
		for i, m := range mine {
			m.tokens = append(m.tokens, fresh[i]...)
			n := rng.IntN(len(m.tokens) + 1)
			switch rng.IntN(8) {
			case 0:
				m.tokens = m.tokens[:n:n]
				if err := m.seq.Truncate(n); err != nil {
					return err
				}
			case 1: // every other token of the last ones, some of which pages of the prompt may have
				kept, path := m.tokens[:n:n], []int(nil)
				for i := 1; n+i < len(m.tokens); i += 2 {
					kept, path = append(kept, m.tokens[n+i]), append(path, i)
				}
				if err := m.seq.Keep(n, path); err == nil {
					m.tokens = kept
				} else if !errors.Is(err, ErrCacheFull) {
					return err
				}
			}
			if err := m.seq.checkTokens(m.tokens); err != nil {
				return err
			}
		}
	}
	for _, m := range mine {
		if err := m.seq.Release(); err != nil {
			return err
		}
	}
	return nil
}

func forkAndRelease(c *Cache, prompt *Sequence, keep int) error {
	f, err := prompt.Fork()
	if err != nil {
		return err
	}
	if st := c.Stats(); st.FreePages < 0 || st.FreePages > c.config.Pages-2 || st.Shared < 2 || st.Sequences < 2 {
		return fmt.Errorf("stats %+v while the prompt is forked", st)
	}
	if err := f.Truncate(min(keep, f.Len())); err != nil {
		return err
	}
	return f.Release()
}

// One step in the hands of several goroutines: every call is in order or
// ErrState, and the pages are all there in the end.
func TestConcurrentCallsOfOneStep(t *testing.T) { testConcurrentCallsOfOneStep(t, modelPlace{}) }

func testConcurrentCallsOfOneStep(t *testing.T, at modelPlace) {
	rng := reftest.Rand(t)
	c := newTestCache(t, at.config(CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 2, PageSize: 2, Pages: 32}))
	s := newStepGraph(t, c, 2, 1, tensor.Float32)
	defer s.close()
	seq := newTestSequence(t, c)
	tokens := newTestTokens(2, 2)
	in := []layerInput{s.draw(rng, 0, tokens), s.draw(rng, 1, tokens)}
	var commits atomic.Int64
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 400 {
				var err error
				switch (n + i) % 4 {
				case 0:
					err = s.step.Set([]Append{{Seq: seq, Tokens: 2}})
				case 1, 2:
					layer := (n + i) % 2
					_, err = s.nodes[layer].Op().Do(in[layer].tensors[0], in[layer].tensors[1], in[layer].tensors[2])
				default:
					if n%3 == 0 {
						err = s.step.Rollback()
					} else if err = s.step.Commit(); err == nil {
						commits.Add(1)
					}
				}
				if errors.Is(err, ErrCacheFull) || errors.Is(err, ErrLength) {
					err = seq.Truncate(0) // or it is in an open step again by now
				}
				if err != nil && !errors.Is(err, ErrState) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	noError(t, s.step.Rollback())
	st := c.Stats()
	if st.Tokens != seq.Len() || st.FreePages != 32-(st.Tokens+1)/2 || commits.Load() == 0 {
		t.Errorf("%+v for a sequence of %d tokens after %d commits", st, seq.Len(), commits.Load())
	}
}

// Close waits for a layer that is computing, here one that holds on.
func TestCloseWaits(t *testing.T) {
	c := newTestCache(t, smallCache)
	c.running.RLock() // as a layer does while it computes
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	for inLine := false; !inLine; {
		if inLine = !c.running.TryRLock(); !inLine {
			c.running.RUnlock()
		}
		select {
		case err := <-closed:
			t.Fatalf("Close has not waited: %v", err)
		default:
			runtime.Gosched()
		}
	}
	if h := c.store.(*kvstore.HostPages); h.Layers == nil {
		t.Fatal("the memory has gone while a layer computes")
	}
	c.running.RUnlock()
	noError(t, <-closed)
}

// Close in the middle of everything: each call is right or ErrClosed.
func TestCloseWhileRunning(t *testing.T) {
	testCloseWhileRunning(t, 20, func() (modelPlace, func() error) { return modelPlace{}, nil })
}

// testCloseWhileRunning opens the place anew each time; what it returns beside is
// called before the cache is closed.
func testCloseWhileRunning(t *testing.T, times int, open func() (modelPlace, func() error)) {
	rng := reftest.Rand(t)
	for range times {
		at, closeFirst := open()
		c := newTestCache(t, at.config(CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 16, PageSize: 16, Pages: 64, DType: Float16}))
		var wg sync.WaitGroup
		var rounds atomic.Int32
		for range 3 {
			s := newStepGraph(t, c, 4, 4, tensor.Float32)
			seq := newTestSequence(t, c)
			tokens := newTestTokens(4, 2)
			in := []layerInput{s.draw(rng, 0, tokens), s.draw(rng, 1, tokens)}
			wg.Go(func() {
				defer s.close()
				for {
					err := s.step.Set([]Append{{Seq: seq, Tokens: 4}})
					if err == nil {
						err = s.run(in, 0)
					}
					if err == nil {
						err = s.step.Commit()
					}
					if err == nil && seq.Len() > 200 {
						err = seq.Truncate(5)
					}
					rounds.Add(1)
					if errors.Is(err, ErrClosed) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		for rounds.Load() < 20 {
			runtime.Gosched()
		}
		if closeFirst != nil {
			noError(t, closeFirst())
		}
		noError(t, c.Close())
		wg.Wait()
		if err := c.Close(); !errors.Is(err, ErrClosed) {
			t.Errorf("a second Close: %v", err)
		}
	}
}

// Check finds each kind of inconsistency of sequences and steps, and names it. internal/pages has those of pages.
func TestCacheCheck(t *testing.T) {
	type world struct {
		*Cache
		a, b, c *Sequence // c is a fork of a, and in the step
		step    *Step
	}
	build := func() *world {
		c, err := NewCache(CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 4, Pages: 16, Window: 6, SinkTokens: 2})
		noError(t, err)
		w := &world{Cache: c, a: newTestSequence(t, c), b: newTestSequence(t, c)}
		Lengthen(w.a, 15)
		noError(t, c.pool.Drop(&w.a.table, c.config.behind(15)))
		w.c = forkTest(t, w.a)
		Lengthen(w.b, 3)
		w.step, err = c.NewStep(8)
		noError(t, err, w.step.Set([]Append{{Seq: w.b, Tokens: 2}, {Seq: w.c, Tokens: 3}}), c.Check())
		return w
	}
	for what, x := range map[string]struct {
		corrupt func(w *world)
		text    string
	}{
		"a lost sequence":               {func(w *world) { delete(w.holders, w.a) }, "2 sequences have 18 tokens, and 3 with 33 are counted"},
		"a count of sequences":          {func(w *world) { w.sequences++ }, "4 with 33 are counted"},
		"a count of tokens":             {func(w *world) { w.tokens-- }, "3 with 32 are counted"},
		"a sequence that has no count":  {func(w *world) { w.holders[w.a] = false }, "2 sequences have 18 tokens"},
		"a sequence of another cache":   {func(w *world) { w.a.cache = new(Cache) }, "of another cache"},
		"a released sequence":           {func(w *world) { w.a.released = true }, "released"},
		"a copied sequence":             {func(w *world) { w.a.mark = nocopy.Mark{} }, "a copy"},
		"a sequence in no step":         {func(w *world) { w.a.step = w.step }, "in a step that is not open or does not have it"},
		"a sequence in a closed step":   {func(w *world) { delete(w.open, w.step) }, "in a step that is not open"},
		"a step without its sequence":   {func(w *world) { w.b.step = nil }, "append 0 has a sequence that is not in the step"},
		"a step that is not open":       {func(w *world) { w.step.open = false }, "step of 8 rows: it is of another cache or not open"},
		"a step with one sequence less": {func(w *world) { w.step.sequences = w.step.sequences[:1] }, "2 reservations for 1 sequence"},
		"a wrong row":                   {func(w *world) { w.step.sequences[1].Row = 3 }, "append 1 is computed in rows [3, 6)"},
		"too many keys":                 {func(w *world) { w.step.sequences[0].Keys++ }, "append 0 is computed in rows [0, 2) with 6 keys"},
		"a wrong page":                  {func(w *world) { w.step.sequences[0].Pages = slices.Clone(w.b.table.Pages) }, "append 0 is computed"},
		"another number of tokens":      {func(w *world) { w.step.reservations[0].tokens = 1 }, "append 0"},
		"another one's reservation":     {func(w *world) { w.step.reservations[0].seq = w.a }, "it is in a step"},
		"more rows than there are":      {func(w *world) { w.step.tokens = 4 }, "5 rows are given"},
		"a window's tokens":             {func(w *world) { w.a.table.Gap.End = 11 }, "tokens [2, 11) were given back"},
		"sink tokens":                   {func(w *world) { w.a.table.Gap.First = 1 }, "2 SinkTokens"},
		"a page":                        {func(w *world) { w.a.table.Pages[0] = 15 }, "holder"},
		"a page number":                 {func(w *world) { w.a.table.Pages[0] = -1 }, "page -1 of 16"},
		"a page less":                   {func(w *world) { w.a.table.Pages = w.a.table.Pages[1:] }, "pages and not"},
		"a page in use that is free":    {func(w *world) { noError(t, w.pool.Release(w.a.table.Pages[:1])) }, "counted"},
		"a page that nobody has":        {func(w *world) { _, err := w.pool.Take(nil, 1); noError(t, err) }, "has 0 holders, and 1 are counted"},
	} {
		w := build()
		x.corrupt(w)
		wrong(t, what, w.Check(), ErrInternal, "leanattention: Check: ", x.text)
	}
	w := build()
	noError(t, w.step.Rollback(), w.Check(), w.a.Release(), w.b.Release(), w.c.Release(), w.Check(), w.Close())
	wrong(t, "closed", w.Check(), ErrClosed)
}

// Need of no cache, and of a closed one.
func TestNeedClosed(t *testing.T) {
	_, err := new(Cache).Need(nil)
	wrong(t, "no cache", err, ErrState)
	c := newTestCache(t, smallCache)
	noError(t, c.Close())
	_, err = c.Need(nil)
	wrong(t, "closed", err, ErrClosed)
}

// A run has the rows that Set gave to sequences at least: one row less is refused.
func TestRunOfTooFewRows(t *testing.T) {
	c := newTestCache(t, CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 4})
	s := newStepGraph(t, c, 4, 1, tensor.Float32)
	defer s.close()
	seq := newTestSequence(t, c)
	noError(t, s.step.Set([]Append{{Seq: seq, Tokens: 3}}))
	for rows := 1; rows <= 4; rows++ {
		var in [3]G.Value
		for i := range in {
			in[i] = newMatrix(tensor.Float32, make([]float64, 2*rows), rows, 2)
		}
		_, err := s.nodes[0].Op().Do(in[:]...)
		if rows >= 3 {
			noError(t, err)
			continue
		}
		wrong(t, fmt.Sprint(rows, " rows"), err, ErrShape, fmt.Sprintf("q has %d row", rows), "Set gave 3 to sequences")
		wrong(t, "Commit", s.step.Commit(), ErrState)
	}
	noError(t, s.step.Commit())
}

// A graph that has an input with a row for each append can do no more appends.
func TestRowsOfAppends(t *testing.T) {
	c := newTestCache(t, CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 8})
	step, err := c.NewStep(4)
	noError(t, err)
	g := G.NewGraph()
	x := G.NewVector(g, tensor.Int, G.WithName("x"), G.WithShape(2), G.WithValue(tensor.New(tensor.WithShape(2), tensor.WithBacking([]int{7, 8}))))
	y, err := step.Rows(x)
	noError(t, err)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	var appends []Append
	for n := range 4 {
		noError(t, step.Set(appends))
		err := Cause(vm.RunAll())
		vm.Reset()
		if n > 2 {
			wrong(t, "three appends", err, ErrShape, "Step.Rows: x has 2 rows, and Set was given 3 appends")
		} else if noError(t, err); y.Value().Shape()[0] != max(n, 1) {
			t.Errorf("%d appends: %v", n, y.Value())
		}
		noError(t, step.Rollback())
		appends = append(appends, Append{Seq: newTestSequence(t, c), Tokens: 1})
	}
}

// unchanged is a check that nothing has changed: who holds which page and in which order pages are free, and the bits of all
// sequences.
func unchanged(t *testing.T, c *Cache) func(what string) {
	before := booksOf(c)
	bits := map[*Sequence]string{}
	for s := range c.holders {
		bits[s] = string(saved(t, s))
	}
	return func(what string) {
		t.Helper()
		noError(t, c.Check())
		if !before.equal(booksOf(c)) || len(c.holders) != len(bits) {
			t.Fatalf("%s: the cache has changed: %v", what, c)
		}
		for s, want := range bits {
			if string(saved(t, s)) != want {
				t.Fatalf("%s: %v has other bits", what, s)
			}
		}
	}
}

// The nth write or read fails, for each n, on the host and on a GPU.
func TestSequenceIOFailsAtEachCall(t *testing.T) {
	defer func(n int) { chunkBytes = n }(chunkBytes)
	chunkBytes = 20 // many parts
	gpu, _ := FakeGPU(t)
	disk := errors.New("disk full")
	for _, at := range []*device.GPU{nil, gpu} {
		s, good := savedSequence(t, at, 7)
		_, err := s.Fork()
		noError(t, err)
		Lengthen(newTestSequence(t, s.cache), 5)
		same := unchanged(t, s.cache)
		calls := map[string]func(io.Writer, io.Reader) error{
			"WriteTo":      func(w io.Writer, _ io.Reader) error { _, err := s.WriteTo(w); return err },
			"ReadSequence": func(_ io.Writer, r io.Reader) error { _, err := s.cache.ReadSequence(r); return err },
		}
		for name, call := range calls {
			for n := 1; ; n++ {
				ends := false
				r := bytes.NewReader(good)
				nth := &during{io.Discard, r, n, func() { ends = true; panic(disk) }}
				err := func() (err error) {
					defer func() {
						if r := recover(); r != nil {
							err = r.(error)
						}
					}()
					return call(failing{nth}, failing{nth})
				}()
				if !ends {
					if n < 10 {
						t.Errorf("%s: %d calls", name, n-1)
					}
					noError(t, err)
					for loaded := range s.cache.holders {
						if name == "ReadSequence" && loaded.table.Tokens == 7 && !slices.Equal(loaded.table.Pages, s.table.Pages) {
							noError(t, loaded.Release())
						}
					}
					same(name)
					break
				}
				if !errors.Is(err, disk) {
					t.Fatalf("call %d of %s: %v", n, name, err)
				}
				same(fmt.Sprintf("call %d of %s", n, name))
			}
		}
		noError(t, s.cache.Close())
	}
}

// failing returns as an error what a call panics with.
type failing struct{ *during }

func (f failing) Write(b []byte) (n int, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = r.(error)
		}
	}()
	return f.during.Write(b)
}
func (f failing) Read(b []byte) (n int, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = r.(error)
		}
	}()
	return f.during.Read(b)
}

// A sequence that takes all pages is read; one that takes more never is, and one for which too few are free is not now.
func TestReadSequenceOfAllPages(t *testing.T) {
	cache := func(pages int) *Cache {
		return newTestCache(t, CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 4, Pages: pages})
	}
	s := newTestSequence(t, cache(2))
	Lengthen(s, 8)
	good := saved(t, s)
	for pages, want := range []error{1: ErrLength, 2: nil, 3: nil} {
		if pages == 0 {
			continue
		}
		c := cache(pages)
		loaded, err := c.ReadSequence(bytes.NewReader(good))
		if !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("%d pages: %v, want %v", pages, err, want)
		}
		if loaded != nil {
			_, err := c.ReadSequence(bytes.NewReader(good))
			wrong(t, "a second time", err, ErrCacheFull)
		}
	}
}

// countingWriter says that it has written another number of bytes than it was given.
type countingWriter int

func (w countingWriter) Write(b []byte) (int, error) {
	if w < 0 {
		return int(w), io.ErrClosedPipe
	}
	return len(b) + int(w), nil
}

// What a writer says that it has written is not believed where it can't be.
func TestWriteToWrongCounts(t *testing.T) {
	s, good := savedSequence(t, nil, 7)
	n, err := s.WriteTo(countingWriter(-5))
	if n != 0 || !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("less than nothing: %d, %v", n, err)
	}
	if n, err = s.WriteTo(countingWriter(9)); n != int64(len(good)) || err != nil {
		t.Errorf("more than there is: %d, %v", n, err)
	}
	noError(t, s.cache.Check())
}

// What the function of Run returns comes out unchanged, what it panics with has its stack, and steps may nest if they are
// two.
func TestRunPassesOn(t *testing.T) {
	c := newTestCache(t, smallCache)
	s, other := newStepGraph(t, c, 4, 4, tensor.Float32), newStepGraph(t, c, 4, 4, tensor.Float32)
	defer s.close()
	defer other.close()
	a, b := &testContext{seq: newTestSequence(t, c)}, &testContext{seq: newTestSequence(t, c)}
	rng := reftest.Rand(t)
	if err := s.step.Run([]Append{{Seq: a.seq, Tokens: 2}}, func() error { return io.EOF }); err != io.EOF {
		t.Errorf("%v, want %v itself", err, io.EOF)
	}
	err, panicked, _ := outcome(func() error {
		defer func() {
			if stack := string(debug.Stack()); !strings.Contains(stack, "indexOutOfRange") {
				t.Errorf("the stack does not tell where the panic was: %s", stack)
			}
		}()
		return s.step.Run([]Append{{Seq: a.seq, Tokens: 2}}, func() error { return indexOutOfRange(nil, 3) })
	})
	if _, ok := panicked.(runtime.Error); !ok {
		t.Errorf("panic of %v, error %v", panicked, err)
	}
	both := func(last error) error {
		return s.step.Run([]Append{{Seq: a.seq, Tokens: 2}}, func() error {
			if _, err := s.attempt(rng, 0, testAppend{a, 2}); err != nil {
				return err
			}
			wrong(t, "a sequence of both", other.step.Run([]Append{{Seq: a.seq, Tokens: 1}}, func() error { return nil }), ErrState, "part of an open step")
			err := other.step.Run([]Append{{Seq: b.seq, Tokens: 3}}, func() error { _, err := other.attempt(rng, 0, testAppend{b, 3}); return err })
			return errors.Join(err, last)
		})
	}
	wrong(t, "the outer one", both(errFault), errFault)
	if a.seq.Len() != 0 || b.seq.Len() != 3 {
		t.Errorf("%v, %v", a.seq, b.seq)
	}
	noError(t, b.seq.Truncate(0), both(nil), c.Check())
	if a.seq.Len() != 2 || b.seq.Len() != 3 {
		t.Errorf("%v, %v", a.seq, b.seq)
	}
}

func indexOutOfRange(list []error, i int) error { return list[i] }

// A cache that is closed while Run's function runs: layers tell, and so does Commit, and Run adds nothing.
func TestRunOfClosedCache(t *testing.T) {
	for _, how := range []string{"runs a layer", "returns nil", "returns an error", "panics"} {
		c := newTestCache(t, smallCache)
		s := newStepGraph(t, c, 4, 4, tensor.Float32)
		a := &testContext{seq: newTestSequence(t, c)}
		rng := reftest.Rand(t)
		err, panicked, _ := outcome(func() error {
			return s.step.Run([]Append{{Seq: a.seq, Tokens: 2}}, func() error {
				_, err := s.attempt(rng, 0, testAppend{a, 2})
				noError(t, err, c.Close())
				switch how {
				case "runs a layer":
					_, err = s.attempt(rng, 0, testAppend{a, 2})
				case "returns an error":
					err = io.EOF
				case "panics":
					panic(io.EOF)
				}
				return err
			})
		})
		switch how {
		case "returns an error":
			if err != io.EOF {
				t.Error(err)
			}
		case "panics":
			if panicked != io.EOF {
				t.Error(panicked)
			}
		case "returns nil":
			wrong(t, how, err, ErrClosed, "Run: cache")
		default:
			wrong(t, how, err, ErrClosed, "CachedAttention: cache")
		}
		wrong(t, "Run", s.step.Run(nil, func() error { return nil }), ErrClosed)
		wrong(t, "Rollback", s.step.Rollback(), ErrClosed)
		s.close()
	}
}

// Goroutines that share a step: while one is in Run the others are refused, and none ends the step of another.
func TestConcurrentRuns(t *testing.T) {
	c := newTestCache(t, smallCache)
	s := newStepGraph(t, c, 4, 4, tensor.Float32)
	defer s.close()
	seq := newTestSequence(t, c)
	var inside, done atomic.Int32
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 300 {
				fails := false
				err := s.step.Run(nil, func() error {
					if inside.Add(1) != 1 {
						t.Error("two are in Run")
					}
					runtime.Gosched()
					defer inside.Add(-1)
					if fails = done.Add(1)%3 == 0; fails {
						return errFault
					}
					return nil
				})
				if !errors.Is(err, ErrState) && (fails != errors.Is(err, errFault) || !fails && err != nil) {
					t.Error(err)
				}
				if i == 0 {
					if err := errors.Join(s.step.Rollback(), s.step.Commit()); !errors.Is(err, ErrState) {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	if done.Load() == 0 { // how many come in depends on the scheduler
		t.Error("no Run came in")
	}
	noError(t, s.step.Set([]Append{{Seq: seq, Tokens: 1}}), s.step.Rollback(), c.Check())
}

// A defect while Set reserves is an error, and nothing stays reserved.
func TestSetPanics(t *testing.T) {
	c := newTestCache(t, smallCache)
	s := newStepGraph(t, c, 4, 4, tensor.Float32)
	defer s.close()
	seq := newTestSequence(t, c)
	before := booksOf(c)
	plan := s.step.plans[0].plan
	s.step.plans[0].plan = nil
	wrong(t, "Set", s.step.Set([]Append{{Seq: seq, Tokens: 2}}), ErrInternal, "Set")
	wrong(t, "Run", s.step.Run([]Append{{Seq: seq, Tokens: 2}}, func() error { return nil }), ErrInternal, "Run")
	if after := booksOf(c); !after.equal(before) || s.step.open || seq.step != nil {
		t.Errorf("%+v, before %+v; %v", after, before, s.step)
	}
	s.step.plans[0].plan = plan
	noError(t, c.Check(), s.step.Set([]Append{{Seq: seq, Tokens: 2}}), s.step.Rollback())
}
