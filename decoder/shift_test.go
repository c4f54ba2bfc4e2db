package decoder

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// randomTokens returns n tokens of the small network.
func randomTokens(rng *rand.Rand, n int) (ids []int) {
	for range n {
		ids = append(ids, rng.IntN(13))
	}
	return ids
}

// shifted returns the continuation of a text whose context is full again and again: each time a fresh text begins with the
// tokens that stay.
func shifted(t testing.TB, e *Engine, r Request) (all []int, dropped int) {
	t.Helper()
	text, most := slices.Clone(r.Prompt), r.Tokens
	for len(all) < most {
		if len(text) == e.options.Context+1 {
			n := (len(text) - r.Keep + 1) / 2
			text = slices.Delete(text, r.Keep, r.Keep+n)
			dropped += n
		}
		more := alone(t, e, Request{Prompt: text, Tokens: min(most-len(all), e.options.Context+1-len(text)), Ends: []int{}})
		all, text = append(all, more...), append(text, more...)
	}
	return all, dropped
}

// TestShift: a text whose context is full goes on as a fresh text of the tokens that stay, beside other texts, with guesses,
// with steps ahead, and after it had to wait.
func TestShift(t *testing.T) {
	rng := reftest.Rand(t)
	const most = 60
	reference := smallEngine(t, Options{Context: most, Exact: true})
	for name, o := range map[string]Options{
		"alone":         {Batch: 1},
		"guesses":       {Batch: 1, Draft: 5},
		"together":      {Batch: 4, Tokens: 4*most + 64, Chunk: 7, Draft: 5},
		"a small cache": {Batch: 4, Tokens: 128, Draft: 5},
		"steps ahead":   {Batch: 3, Tokens: 3*most + 64},
	} {
		t.Run(name, func(t *testing.T) {
			o.Context, o.Exact = most, true
			e := smallEngine(t, o)
			ahead := 0
			if name == "steps ahead" {
				e.scheduler.runner = newFaultyRunner(e, neverFails(), &ahead)
			}
			for _, keep := range []int{0, 1, 20, most - 1} {
				var texts []*Text
				var requests []Request
				for i := range 2 * o.Batch {
					r := Request{Prompt: randomTokens(rng, 1+rng.IntN(most)), Tokens: 1 + rng.IntN(reftest.Cases(t, 2, 4)*most), Ends: []int{}, Shift: true, Keep: keep, Draft: min(i, o.Draft)}
					if i == 0 {
						r.Tokens = 3 * most
					}
					if keep == most-1 { // each token is a shift
						r.Tokens = min(r.Tokens, 80)
					}
					text, err := e.Start(context.Background(), r)
					if err != nil {
						t.Fatal(err)
					}
					texts, requests = append(texts, text), append(requests, r)
				}
				for i, text := range texts {
					got, err := ids(text)
					want, dropped := shifted(t, reference, requests[i])
					if err != nil || !slices.Equal(got, want) || text.Dropped() != dropped || text.Reason() != Length {
						t.Errorf("keep %d, a prompt of %d tokens, %d more: %v, %d dropped, %q, %v; want %v, %d", keep, len(requests[i].Prompt), requests[i].Tokens, got, text.Dropped(), text.Reason(), err, want, dropped)
					}
				}
			}
			if err := pagesLost(e); err != nil {
				t.Error(err)
			}
			st := e.Stats()
			if st.Shifted < 10 || name == "a small cache" && st.Preempted == 0 || name == "steps ahead" && ahead == 0 || o.Draft > 0 && st.Accepted == 0 {
				t.Errorf("%+v, %d times ahead", st, ahead)
			}
		})
	}
}

// neverFails is a source of random numbers with which a faultyRunner has no fault.
func neverFails() *rand.Rand { return rand.New(constant{}) }

type constant struct{}

func (constant) Uint64() uint64 { return 1<<63 - 1 }

// TestShiftEnds: without a number of tokens a text goes on until its context is done, and an end ends it at once.
func TestShiftEnds(t *testing.T) {
	e := smallEngine(t, Options{Context: 30, Exact: true})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	text, err := e.Start(ctx, Request{Prompt: []int{1, 2}, Ends: []int{}, Shift: true})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, err := range text.Tokens() {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 100 {
			cancel()
		}
	}
	if n < 100 || text.Reason() != Cancelled || text.Dropped() < 60 {
		t.Errorf("%d tokens, %q, %d dropped", n, text.Reason(), text.Dropped())
	}
	r := Request{Prompt: []int{1, 2}, Tokens: 100, Shift: true, Keep: 2, Ends: []int{}}
	all, _ := shifted(t, e, r)
	r.Ends = all[90:91]
	if got := alone(t, e, r); !slices.Equal(got, all[:slices.Index(all, all[90])+1]) {
		t.Errorf("%v of %v", got, all)
	}
}

// TestShiftShares: the prompt of a text that was shifted is not computed again for a later text.
func TestShiftShares(t *testing.T) {
	e := smallEngine(t, Options{Context: 60, Tokens: 640, Exact: true})
	prompt := randomTokens(reftest.Rand(t), 40)
	want := alone(t, e, Request{Prompt: prompt, Tokens: 10, Ends: []int{}})
	e.work.Wait()
	e.scheduler.evict(0)
	alone(t, e, Request{Prompt: prompt, Tokens: 300, Shift: true, Ends: []int{}})
	text, err := e.Start(context.Background(), Request{Prompt: prompt, Tokens: 10, Ends: []int{}})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ids(text); err != nil || !slices.Equal(got, want) || text.Shared() != 39 {
		t.Errorf("%v, %d shared, %v; want %v", got, text.Shared(), err, want)
	}
	e.work.Wait()
	if n := len(e.scheduler.retained); n > 2 { // of the prompt, and of the end of the shifted text
		t.Errorf("%d sequences", n)
	}
}

// TestCutPrompts: a prompt that is too long has the continuation of the shortened prompt.
func TestCutPrompts(t *testing.T) {
	e := smallEngine(t, Options{Context: 40, Exact: true})
	prompt := randomTokens(reftest.Rand(t), 90)
	for _, c := range []struct{ prompt, tokens, keep, last int }{
		{90, 10, 0, 31},  // 31 and 10 are 41, of which the last one is not read
		{90, 10, 4, 27},  // 4 and 27 and 10
		{41, 1, 39, 1},   // the least that Cut drops
		{90, 30, 4, 18},  // half of what 4 tokens leave
		{90, 500, 4, 18}, // the same
		{90, 0, 5, 18},   // half of what 5 tokens leave, rounded up
		{90, 0, 39, 1},
		{40, 30, 4, 0}, // not too long
	} {
		r := Request{Prompt: prompt[:c.prompt], Tokens: c.tokens, Keep: c.keep, Cut: true, Ends: []int{}}
		text, err := e.Start(context.Background(), r)
		if err != nil {
			t.Fatal(err)
		}
		got, err := ids(text)
		r.Cut = false
		if c.last > 0 {
			r.Prompt = slices.Concat(prompt[:c.keep], prompt[c.prompt-c.last:c.prompt])
		}
		want := alone(t, e, r)
		if err != nil || !slices.Equal(got, want) || text.Dropped() != c.prompt-len(r.Prompt) || c.tokens > 0 && c.tokens <= 10 && len(got) != c.tokens {
			t.Errorf("%+v: %v, %d dropped, %v; want %v", c, got, text.Dropped(), err, want)
		}
		// A shift counts the tokens that the request adds, and not those that the prompt has lost.
		r = Request{Prompt: prompt[:c.prompt], Tokens: 70, Keep: c.keep, Cut: true, Shift: true, Ends: []int{}}
		if got := alone(t, e, r); len(got) != 70 {
			t.Errorf("%+v: %d tokens", c, len(got))
		}
	}
	for want, r := range map[string]Request{
		"90 tokens, and Options.Context is 40": {Prompt: prompt, Shift: true},
		"Keep is -1, not in [0, 40)":           {Prompt: prompt, Cut: true, Keep: -1},
		"Keep is 40, not in [0, 40)":           {Prompt: prompt[:1], Shift: true, Keep: 40},
		"Prompt[50] is 13":                     {Prompt: slices.Insert(slices.Clone(prompt), 50, 13), Cut: true},
	} {
		kind := ErrConfig
		if !r.Cut && len(r.Prompt) > 40 {
			kind = ErrTooLong
		}
		if _, err := e.Start(context.Background(), r); !errors.Is(err, kind) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
