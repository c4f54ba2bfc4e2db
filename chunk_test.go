package leanattention_test

import (
	"slices"
	"testing"

	la "gorgonia.org/leanattention"

	"pgregory.net/rapid"
)

// Chunks: every token of every append is in one step, in order; no step has more
// rows than it may, and no row stays empty that somebody could use; single tokens
// come before the parts of prompts; and Set takes each step as it is.
func TestChunks(t *testing.T) {
	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 16, Pages: 64})
	rapid.Check(t, func(rt *rapid.T) {
		rows := rapid.IntRange(1, 12).Draw(rt, "rows")
		step, err := cache.NewStep(rows)
		if err != nil {
			rt.Fatal(err)
		}
		var todo []la.Append
		for range rapid.IntRange(0, 8).Draw(rt, "appends") {
			seq, err := cache.NewSequence()
			if err != nil {
				rt.Fatal(err)
			}
			defer seq.Release()
			n := rapid.OneOf(rapid.Just(1), rapid.IntRange(0, 40)).Draw(rt, "tokens")
			todo = append(todo, la.Append{Seq: seq, Tokens: n})
		}
		done := make([]int, len(todo))
		for appends, parts := range la.Chunks(rows, todo) {
			if len(appends) != len(parts) {
				rt.Fatalf("%d appends and %d parts", len(appends), len(parts))
			}
			taken, left, single, cut := 0, 0, 0, 0
			for i, n := range done {
				left += todo[i].Tokens - n
				if todo[i].Tokens-n == 1 {
					single++
				}
			}
			for i, p := range parts {
				if i > 0 && p.Of <= parts[i-1].Of {
					rt.Fatalf("out of order: %v", parts)
				}
				if appends[i].Seq != todo[p.Of].Seq || appends[i].Tokens != p.To-p.From || p.From != done[p.Of] || p.To <= p.From || p.To > todo[p.Of].Tokens {
					rt.Fatalf("part %v is append %v, %d of %v are done", p, appends[i], done[p.Of], todo[p.Of])
				}
				if todo[p.Of].Tokens-done[p.Of] == 1 {
					single--
				} else {
					cut++
				}
				done[p.Of] = p.To
				taken += p.To - p.From
			}
			if taken != min(rows, left) || single > 0 && cut > 0 {
				rt.Fatalf("%d of %d rows taken, %d tokens left, %d single ones wait for %d", taken, rows, left, single, cut)
			}
			if err := step.Set(appends); err != nil {
				rt.Fatal(err)
			}
			if err := step.Rollback(); err != nil {
				rt.Fatal(err)
			}
		}
		for i, n := range done {
			if n != todo[i].Tokens {
				rt.Fatalf("%d of %d tokens of append %d", n, todo[i].Tokens, i)
			}
		}
	})
}

// Chunks neither writes to the list that it is given nor follows what happens to it;
// what it yields may be kept; and a loop may end early, or begin again.
func TestChunksKeepsLists(t *testing.T) {
	todo := []la.Append{{Tokens: 5}, {Tokens: 1}}
	cuts := la.Chunks(4, todo)
	var lists [][]la.Part
	for appends, parts := range cuts {
		lists = append(lists, parts)
		appends[0].Tokens = 9
		todo[0].Tokens = 100
		if len(lists) == 1 {
			todo[0].Tokens = 7
		}
	}
	want := [][]la.Part{{{Of: 0, From: 0, To: 3}, {Of: 1, From: 0, To: 1}}, {{Of: 0, From: 3, To: 5}}}
	if !slices.EqualFunc(lists, want, slices.Equal) {
		t.Errorf("%v, want %v", lists, want)
	}
	todo[0].Tokens = 5
	for range 2 {
		for _, parts := range cuts {
			if !slices.Equal(parts, want[0]) {
				t.Errorf("%v, want %v", parts, want[0])
			}
			break
		}
	}
}

// What no step can take is refused by Set, and by name.
func TestChunksLeavesRefusalToSet(t *testing.T) {
	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, Pages: 4})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	var seqs [2]*la.Sequence
	for i := range seqs {
		if seqs[i], err = cache.NewSequence(); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		rows int
		todo []la.Append
		want error
		text string
	}{
		"negative tokens": {2, []la.Append{{Seq: seqs[0], Tokens: 2}, {Seq: seqs[1], Tokens: -3}}, la.ErrLength, "append 1 has -3 tokens"},
		"no rows":         {0, []la.Append{{Seq: seqs[0], Tokens: 3}}, la.ErrLength, "append 0 has 3 tokens"},
		"negative rows":   {-1, []la.Append{{Seq: seqs[0], Tokens: 1}, {Seq: seqs[1], Tokens: 7}}, la.ErrLength, "append 1 has 7 tokens"},
		"no sequence":     {2, []la.Append{{Tokens: 3}}, la.ErrState, "append 0"},
	} {
		steps := 0
		for appends := range la.Chunks(c.rows, c.todo) {
			steps++
			wantError(t, step.Set(appends), c.want, "Set", c.text)
			if steps > 2 {
				t.Fatalf("%s: no end", name)
			}
		}
		if steps == 0 {
			t.Errorf("%s: no step to refuse", name)
		}
	}
	for range la.Chunks(3, []la.Append{{}, {Tokens: 0}}) {
		t.Error("a step of no tokens")
	}
	for range la.Chunks(3, nil) {
		t.Error("a step of nothing")
	}
}
