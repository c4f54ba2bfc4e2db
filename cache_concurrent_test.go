package leanattention

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"

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
	if st := c.Stats(); st.FreePages < 0 || st.FreePages > st.Pages-2 || st.Shared < 2 || st.Sequences < 2 {
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
				if errors.Is(err, ErrCacheFull) {
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
	if h := c.store.(*hostPages); h.keys == nil || h.values == nil {
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
