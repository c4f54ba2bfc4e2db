package model

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/gputest"
)

// Whatever is guessed, the text is the one without guesses, and is as long.
func TestVerify(t *testing.T) { testVerify(t, Options{}, 40) }

func TestGPUVerify(t *testing.T) {
	tokens := 40
	if testing.Short() {
		tokens = 12
	}
	testVerify(t, Options{Device: gputest.Open(t)}, tokens)
}

func testVerify(t *testing.T, o Options, tokens int) {
	rng := seeded(t)
	c := small()
	c.HiddenSize, c.WordEmbedProjDim, c.Heads, c.MaxPositions, c.Layers = 128, 128, 2, 200, 1 // heads that a GPU has kernels for, and pages
	w := load(t, c, rng)
	o.Capacity, o.Greedy, o.Drafts, o.Chunk = []int{200, 200, 200}, true, 4, 16
	texts := prompts(rng, c.VocabSize, 11, 3, 16)
	start := func() *Decoder {
		d := newDecoder(t, w, o)
		if err := d.Prefill(context.Background(), texts, nil); err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := start()
	want := make([][]int, len(texts)) // what is chosen, step by step
	for range tokens + o.Drafts + 1 {
		next := make([]int, len(texts))
		for i := range texts {
			next[i] = d.Chosen(i)
			want[i] = append(want[i], next[i])
		}
		if err := d.Step(next); err != nil {
			t.Fatal(err)
		}
	}
	d = start()
	done, drafted, accepted := make([]int, len(texts)), 0, 0
	for slices.Min(done) < tokens {
		guess := make([][]int, len(texts))
		right := make([]int, len(texts))
		for i := range texts {
			if done[i] >= tokens || rng.IntN(6) == 0 {
				continue // it rests
			}
			guess[i] = slices.Clone(want[i][done[i] : done[i]+1+rng.IntN(o.Drafts+1)])
			right[i] = len(guess[i])
			if n := rng.IntN(o.Drafts + 1); n > 0 && n < len(guess[i]) { // from here on wrong, or right by chance
				guess[i][n] = (guess[i][n] + 1) % c.VocabSize
				right[i] = n
			}
			drafted += len(guess[i]) - 1
			accepted += right[i] - 1
		}
		kept, err := d.Verify(guess)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(kept, right) {
			t.Fatalf("kept %v of %v, behind %v; the text goes on with %v", kept, guess, done, want)
		}
		for i, n := range kept {
			if done[i] += n; d.Len(i) != len(texts[i])+done[i] || d.Chosen(i) != want[i][done[i]] {
				t.Fatalf("sequence %d: %d tokens and %d behind, want %d and %d", i, d.Len(i), d.Chosen(i), len(texts[i])+done[i], want[i][done[i]])
			}
		}
	}
	if s := d.Stats(); s.Drafted != drafted || s.Accepted != accepted || s.Decode.Tokens != done[0]+done[1]+done[2] {
		t.Errorf("%+v; %d tokens were guessed, %d of them right, and %v made", s, drafted, accepted, done)
	}
	// Drafts and steps go together.
	if err := d.Step([]int{want[0][done[0]], -1, -1}); err != nil || d.Chosen(0) != want[0][done[0]+1] {
		t.Errorf("a step behind drafts: %d, want %d: %v", d.Chosen(0), want[0][done[0]+1], err)
	}

	lengths := slices.Clone(d.lengths)
	for _, wrong := range [][][]int{{{1, 1, 1, 1, 1, 1}, nil, nil}, {{c.VocabSize}, nil, nil}, {{1, -1}, nil, nil}, {{1}}} {
		if _, err := d.Verify(wrong); !errors.Is(err, ErrConfig) {
			t.Errorf("%v: %v", wrong, err)
		}
	}
	if kept, err := d.Verify([][]int{nil, nil, nil}); err != nil || !slices.Equal(kept, []int{0, 0, 0}) || !slices.Equal(d.lengths, lengths) {
		t.Errorf("nothing to verify: %v, %v", kept, err)
	}
	o.Drafts = 0
	if _, err := newDecoder(t, w, o).Verify([][]int{{1}, nil, nil}); !errors.Is(err, ErrConfig) {
		t.Errorf("without drafts: %v", err)
	}
}

func TestLookup(t *testing.T) {
	for _, c := range []struct {
		text []int
		n    int
		want []int
	}{
		{nil, 3, nil},
		{[]int{1}, 3, nil},
		{[]int{1, 2, 3}, 3, nil},
		{[]int{1, 1, 1}, 3, []int{1}}, // the text ends there
		{[]int{1, 2, 9, 8, 1, 2}, 3, []int{9, 8, 1}},
		{[]int{1, 2, 9, 8, 1, 2}, 1, []int{9}},
		{[]int{1, 2, 9, 8, 1, 2}, 0, []int{}},
		{[]int{1, 2, 9, 1, 2, 7, 1, 2}, 2, []int{7, 1}},                      // the latest place
		{[]int{5, 1, 2, 9, 6, 1, 2, 7, 5, 1, 2}, 2, []int{9, 6}},             // the longest match
		{[]int{1, 2, 3, 4, 5, 6, 0, 2, 3, 4, 5}, 2, []int{6, 0}},             // no more than mostLookup count
		{[]int{3, 9, 3}, 2, nil},                                             // one token says nothing
		{[]int{1, 2, 3, 4, 5, 7, 9, 9, 3, 4, 5, 8, 2, 3, 4, 5}, 1, []int{7}}, // four before three
	} {
		if got := Lookup(c.text, c.n); !slices.Equal(got, c.want) {
			t.Errorf("%d behind %v: %v, want %v", c.n, c.text, got, c.want)
		}
	}
	rng := rand.New(rand.NewPCG(rand.Uint64(), 0))
	for range 1000 { // what is found did follow such tokens
		text := make([]int, rng.IntN(30))
		for i := range text {
			text[i] = rng.IntN(3)
		}
		n := rng.IntN(6)
		got := Lookup(text, n)
		if len(got) > n {
			t.Fatalf("%d of %d tokens", len(got), n)
		}
		follows := len(got) == 0
		for at := range text {
			follows = follows || at >= leastLookup && slices.Equal(text[at-leastLookup:at], text[len(text)-leastLookup:]) &&
				at+len(got) <= len(text) && slices.Equal(text[at:at+len(got)], got)
		}
		if !follows {
			t.Fatalf("%v does not follow the end of %v anywhere", got, text)
		}
	}
}
