package decoder

import (
	"context"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// TestSecond: a second text with the same 1,000 tokens in front computes its own tokens alone, in one step: while the first text reads
// these tokens, while it is computed, and after it was cancelled.
func TestSecond(t *testing.T) {
	rng := reftest.Rand(t)
	own := func() (ids []int) {
		for range 1 + rng.IntN(16) {
			ids = append(ids, rng.IntN(13))
		}
		return ids
	}
	for _, o := range []Options{{}, {BatchInvariant: true}} {
		o.Context, o.Tokens, o.Batch, o.Chunk, o.Exact = 1100, 4400, 4, 384, true
		e := smallEngine(t, o)
		s := &e.scheduler
		start := func(ctx context.Context, prompt []int) *Text {
			t.Helper()
			return addText(t, e, ctx, Request{Prompt: prompt, Tokens: 40, Ends: []int{}})
		}
		// second checks that the first token of a text comes with the next step.
		second := func(name string, front, more []int, others int) {
			t.Helper()
			rows := e.stats.Rows
			text := start(context.Background(), slices.Concat(front, more))
			s.step()
			if len(text.out) != 1 || text.Shared() != len(front) || e.stats.Rows-rows != len(more)+others {
				t.Errorf("%s: %d tokens after a step of %d rows, %d tokens shared; want 1 after %d rows and %d shared", name, len(text.out), e.stats.Rows-rows, text.Shared(), len(more)+others, len(front))
			}
			text.end(Cancelled, nil)
			s.sweep()
		}
		different := func(from *Text, by int, ids []int) []int {
			ids[0] = (from.tokens[1000] + by) % 13
			return ids
		}
		front := tokensOf(1000, rng.Int())
		ctx, cancel := context.WithCancel(context.Background())
		first := start(ctx, slices.Concat(front, own()))
		for len(first.out) < 5 {
			s.step()
		}
		second("while the first is computed", front, different(first, 1, own()), 1)
		cancel()
		s.step()
		second("after the first was cancelled", front, different(first, 2, own()), 0)

		front = tokensOf(1000, rng.Int())
		ctx, cancel = context.WithCancel(context.Background())
		first = start(ctx, slices.Concat(front, own()))
		s.step()
		other := start(context.Background(), append(slices.Clone(front), (first.tokens[1000]+1)%13))
		rows := e.stats.Rows
		for len(first.out) == 0 {
			s.step()
		}
		if s.step(); other.Shared() != 1000 || len(other.out) == 0 || e.stats.Rows-rows > 1000+16+20 {
			t.Errorf("while the first reads: %d tokens shared, %d chosen, %d rows", other.Shared(), len(other.out), e.stats.Rows-rows)
		}
		cancel()
		other.end(Cancelled, nil)
		s.step()

		front = tokensOf(1000, rng.Int())
		ctx, cancel = context.WithCancel(context.Background())
		first = start(ctx, front)
		s.step()
		s.step()
		read := first.seq.Len()
		cancel()
		rows = e.stats.Rows
		third := start(context.Background(), front)
		for len(third.out) == 0 {
			s.step()
		}
		if got := e.stats.Rows - rows; read == 0 || third.Shared() != read || got != 1000-read {
			t.Errorf("cancelled after %d tokens were read: %d are shared, %d rows", read, third.Shared(), got)
		}
		third.end(Cancelled, nil)
		s.sweep()
		if err := pagesLost(e); err != nil {
			t.Error(err)
		}
	}
}
