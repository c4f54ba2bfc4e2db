package decoder

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
)

// windowNetwork is a network whose layers see 20 and 12 tokens.
func windowNetwork() *transformer {
	n := smallNetwork()
	n.sizes.Layers, n.sizes.Windows = 2, []int{20, 12}
	n.rotate(rope.Config{HeadDim: 8})
	return n
}

// allPages is a network whose cache has all tokens, and whose layers see windows of them.
type allPages struct{ *transformer }

func (n allPages) Sizes() Sizes {
	s := n.transformer.sizes
	s.Windows = nil
	return s
}

func (n allPages) Hidden(b *Builder, tokens *G.Node) *G.Node {
	b.windows = n.transformer.sizes.Windows
	return n.transformer.Hidden(b, tokens)
}

func windowEngines(t *testing.T, o Options) (all, windows *Engine) {
	t.Helper()
	all = networkEngine(t, allPages{windowNetwork()}, namedWeights{}, Options{Context: o.Context, Exact: true})
	return all, networkEngine(t, windowNetwork(), namedWeights{}, o)
}

// TestWindow: of a network with windows, the cache has the tokens in the windows alone, and texts are those of a cache with all
// tokens: alone and together, with guesses, steps ahead, shared beginnings, dropped tokens, and saved.
func TestWindow(t *testing.T) {
	rng := reftest.Rand(t)
	for name, o := range map[string]Options{
		"one":         {Batch: 1, Chunk: 30, Tokens: 20 + 64 + 30 + 4*64},
		"guesses":     {Batch: 3, Chunk: 50, Draft: 7, Tokens: 900},
		"small cache": {Batch: 4, Chunk: 30, Tokens: 20 + 64 + 30 + 4*64},
		"files":       {Batch: 4, Chunk: 30, Tokens: 20 + 64 + 30 + 4*64},
		"steps ahead": {Batch: 3, Chunk: 30, Tokens: 900},
	} {
		t.Run(name, func(t *testing.T) {
			o.Context, o.Exact = 1000, true
			if name == "files" {
				o.Swap = t.TempDir()
			}
			reference, e := windowEngines(t, o)
			ahead := 0
			if name == "steps ahead" {
				e.scheduler.runner = newFaultyRunner(e, neverFails(), &ahead)
			}
			prompt := randomTokens(rng, 300)
			var texts []*Text
			var want [][]int
			for i := range 2 * o.Batch {
				r := Request{Prompt: slices.Concat(prompt[:100+rng.IntN(200)], randomTokens(rng, rng.IntN(20))), Tokens: 100 + rng.IntN(reftest.Cases(t, 100, 400)), Ends: []int{}, Draft: o.Draft}
				if i == 0 {
					r.Tokens = 0 // the whole context
				}
				want = append(want, alone(t, reference, Request{Prompt: r.Prompt, Tokens: r.Tokens, Ends: r.Ends}))
				text, err := e.Start(context.Background(), r)
				if err != nil {
					t.Fatal(err)
				}
				texts = append(texts, text)
			}
			for i, text := range texts {
				if got, err := ids(text); err != nil || !slices.Equal(got, want[i]) {
					t.Errorf("text %d: %d tokens, %v; want %d", i, len(got), err, len(want[i]))
				}
			}
			st := e.Stats()
			if name == "steps ahead" && ahead < 50 || o.Draft > 0 && st.Accepted == 0 {
				t.Errorf("%+v, %d times ahead", st, ahead)
			}

			// A chat goes on where it ended, and nothing of it is computed again, also after it was saved.
			text := randomTokens(rng, 250)
			text = append(text, alone(t, e, Request{Prompt: text, Tokens: 100, Ends: []int{}})...)
			var file bytes.Buffer
			if n, err := e.Save(&file, text); err != nil || n != len(text)-1 {
				t.Fatalf("%d of %d tokens, %v", n, len(text), err)
			}
			if n, err := e.Save(&bytes.Buffer{}, slices.Concat(text[:150], randomTokens(rng, 10))); err != nil || n > 20 {
				t.Errorf("%d tokens of a beginning that the cache does not have: %v", n, err)
			}
			_, other := windowEngines(t, o)
			if _, err := other.Load(&file); err != nil {
				t.Fatal(err)
			}
			text = append(text, randomTokens(rng, 5)...)
			next := alone(t, reference, Request{Prompt: text, Tokens: 50, Ends: []int{}})
			for _, e := range []*Engine{e, other} {
				before := e.Stats()
				if got := alone(t, e, Request{Prompt: text, Tokens: 50, Ends: []int{}}); !slices.Equal(got, next) {
					t.Errorf("%v, want %v", got, next)
				}
				if shared := e.Stats().SharedTokens - before.SharedTokens; shared != len(text)-6 {
					t.Errorf("%d tokens of %d were shared", shared, len(text))
				}
				if err := pagesLost(e); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestWindowShift: a text whose context is full goes on, although the cache does not have the tokens that it keeps.
func TestWindowShift(t *testing.T) {
	reference, e := windowEngines(t, Options{Context: 200, Tokens: 900, Chunk: 20, Batch: 2, Exact: true})
	r := Request{Prompt: randomTokens(reftest.Rand(t), 150), Tokens: 600, Ends: []int{}, Shift: true, Keep: 30}
	if got, want := alone(t, e, r), alone(t, reference, r); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if err := pagesLost(e); err != nil {
		t.Error(err)
	}
}

// TestWindowTokens: the least capacity of a cache is enough, and less is an error.
func TestWindowTokens(t *testing.T) {
	const least = 20 + 64 + 3 + 128 + 40 + 128
	for tokens := least; tokens < least+64; tokens += 9 {
		e, err := NewEngine(windowNetwork(), namedWeights{}, Options{Context: 2000, Tokens: tokens, Chunk: 40, Batch: 2, Draft: 3})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{1, 63, 64, 700, 1501} {
			text, err := e.Start(context.Background(), Request{Prompt: slices.Repeat([]int{1, 2}, n)[:n], Tokens: 300, Ends: []int{}, Draft: 3})
			if err != nil {
				t.Fatal(err)
			}
			if got, err := ids(text); err != nil || len(got) != 300 {
				t.Errorf("%d tokens of cache, a prompt of %d: %d tokens, %v", tokens, n, len(got), err)
			}
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := NewEngine(windowNetwork(), namedWeights{}, Options{Context: 2000, Tokens: least - 1, Chunk: 40, Batch: 2, Draft: 3}); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
	if _, err := NewEngine(smallNetwork(), namedWeights{}, Options{Context: 2000, Tokens: least, Chunk: 40, Batch: 2, Draft: 3}); !errors.Is(err, ErrConfig) {
		t.Errorf("without windows: %v", err)
	}
}
