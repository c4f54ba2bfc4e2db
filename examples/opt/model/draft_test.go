package model

import (
	"context"
	"errors"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/nn"
)

// Tokens that are guessed, verified and accepted are those that steps choose, whatever the
// guesses are, with the same random numbers; the cache is as behind steps.
func TestVerify(t *testing.T) {
	testVerify(t, Options{})
	testVerify(t, Options{Attention: Default})
	testVerify(t, Options{Linear: StockLinear})
}

func TestGPUVerify(t *testing.T) { testVerify(t, Options{Device: devicetest.Open(t)}) }

func testVerify(t *testing.T, o Options) {
	rng := seeded(t)
	c := small()
	c.HiddenSize, c.WordEmbedProjDim, c.Heads, c.MaxPositions, c.Layers = 128, 128, 2, 80, 1 // heads that a GPU has kernels for, and two pages
	w := load(t, c, rng)
	lengths, n := []int{61, 3, 9}, 15
	if testing.Short() {
		lengths, n, o.Chunk = []int{5, 3, 2}, 7, 8
	}
	for _, x := range lengths {
		o.Capacity = append(o.Capacity, x+n)
	}
	texts := prompts(rng, c.VocabSize, lengths...)
	for _, drawn := range []bool{false, true} {
		if o.Greedy, o.Choices = !drawn, nil; drawn {
			o.Choices, o.Seed = slices.Repeat([]nn.Choice{{Temperature: 1, TopP: 1}}, len(lengths)), 7
		}
		want := choose(t, newDecoder(t, w, o), texts, n)
		o.Draft = 4
		d := newDecoder(t, w, o)
		o.Draft = 0
		if err := d.Prefill(context.Background(), texts, nil); err != nil {
			t.Fatal(err)
		}
		got := make([][]int, len(texts))
		for i := range texts {
			got[i] = append(got[i], d.Chosen(i))
		}
		accepted, guessed := 0, 0
		for round := 0; ; round++ {
			tokens, todo := make([][]int, len(texts)), 0
			for i, text := range got {
				left := n - len(text)
				if left == 0 {
					continue
				}
				todo++
				// A draft is right up to some token, and may be wrong from there on.
				tokens[i] = append(tokens[i], text[len(text)-1])
				for j := range rng.IntN(min(4, left-1) + 1) {
					guess := want[i][len(text)+j]
					if rng.IntN(4) == 0 {
						guess = rng.IntN(c.VocabSize)
					}
					tokens[i] = append(tokens[i], guess)
				}
				guessed += len(tokens[i]) - 1
			}
			if todo == 0 {
				break
			}
			if round%3 == 2 { // a step between
				next := make([]int, len(texts))
				for i := range next {
					if next[i] = -1; tokens[i] != nil {
						next[i], tokens[i] = tokens[i][0], tokens[i][:1]
					}
				}
				if err := d.Step(next); err != nil {
					t.Fatal(err)
				}
				for i := range texts {
					if tokens[i] != nil {
						got[i] = append(got[i], d.Chosen(i))
					}
				}
				continue
			}
			if err := d.Verify(tokens); err != nil {
				t.Fatal(err)
			}
			for i, ts := range tokens {
				if ts == nil {
					continue
				}
				keep := 1
				for got[i] = append(got[i], d.ChosenAfter(i, 0)); keep < len(ts) && d.ChosenAfter(i, keep-1) == ts[keep]; keep++ {
					got[i] = append(got[i], d.ChosenAfter(i, keep))
				}
				logits := d.LogitsAfter(i, keep-1)
				if err := d.Accept(i, keep); err != nil {
					t.Fatal(err)
				}
				accepted += keep - 1
				if d.Len(i) != len(texts[i])+len(got[i])-1 || d.Chosen(i) != got[i][len(got[i])-1] || !slices.Equal(d.Logits(i), logits) {
					t.Fatalf("sequence %d: %d tokens, %d is next: %v", i, d.Len(i), d.Chosen(i), got[i])
				}
				if o.Device == nil {
					text := append(slices.Clone(texts[i]), got[i][:len(got[i])-1]...)
					closeTo(t, "behind a draft", logits, reference{w}.last(text), 2e-4)
				}
			}
		}
		for i := range got {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("drawn %v, sequence %d: %v, and by steps %v", drawn, i, got[i], want[i])
			}
		}
		if s := d.Stats(); accepted == 0 || s.Draft.Accepted != accepted || s.Decode.Tokens != len(texts)*(n-1) || s.Draft.Passes == 0 || s.Draft.Passes > s.Decode.Passes {
			t.Errorf("%d accepted of %d: %+v", accepted, guessed, s)
		}
	}
}

// What can't be verified is an error, and changes nothing.
func TestVerifyErrors(t *testing.T) {
	rng := seeded(t)
	w := load(t, small(), rng)
	for _, o := range []Options{{Draft: -1}, {Draft: MostDraft + 1}, {Draft: 2, Attention: Fused}} {
		o.Capacity = []int{8}
		if _, err := w.NewDecoder(o); !errors.Is(err, ErrConfig) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	d, without := newDecoder(t, w, Options{Capacity: []int{8, 8}, Draft: 2}), newDecoder(t, w, Options{Capacity: []int{8, 8}})
	if err := without.Verify([][]int{{5}, nil}); !errors.Is(err, ErrConfig) {
		t.Errorf("without drafts: %v", err)
	}
	if err := d.Prefill(context.Background(), prompts(rng, 61, 6, 3), nil); err != nil {
		t.Fatal(err)
	}
	for _, tokens := range [][][]int{{{5, 6, 7}, nil}, {nil, {1, 2, 3, 4}}, {{5}}, {nil, {61}}, {nil, {-1}}} {
		if err := d.Verify(tokens); !errors.Is(err, ErrConfig) || d.Len(0) != 6 || d.Len(1) != 3 || d.Logits(1) == nil {
			t.Errorf("%v: %v", tokens, err)
		}
	}
	if err := d.Verify([][]int{nil, nil}); err != nil {
		t.Error(err)
	}
	if err := d.Verify([][]int{nil, {5, 6}}); err != nil || d.Len(1) != 5 {
		t.Fatal(err)
	}
	if d.LogitsAfter(0, 0) != nil || d.LogitsAfter(1, 2) != nil || d.LogitsAfter(1, -1) != nil || d.ChosenAfter(1, 0) != -1 {
		t.Error("something follows where nothing was verified")
	}
	for _, err := range []error{d.Accept(0, 1), d.Accept(1, 0), d.Accept(1, 3), d.Accept(2, 1), d.Accept(-1, 1)} {
		if !errors.Is(err, ErrConfig) {
			t.Error(err)
		}
	}
	if err := errors.Join(d.Truncate(1, 4), d.Accept(1, 1)); !errors.Is(err, ErrConfig) {
		t.Errorf("behind Truncate: %v", err)
	}
	if err := d.Verify([][]int{nil, {5}}); err != nil { // as many tokens as there is room for
		t.Fatal(err)
	}
	if err := d.Accept(1, 1); err != nil || d.LogitsAfter(1, 0) != nil || !errors.Is(d.Accept(1, 1), ErrConfig) || d.Len(1) != 5 {
		t.Errorf("accepted twice: %v, %d tokens", err, d.Len(1))
	}
	if err := errors.Join(d.Truncate(1, 4), d.Verify([][]int{nil, {5, 6}}), d.Step([]int{-1, 7}), d.Accept(1, 1)); !errors.Is(err, ErrConfig) {
		t.Errorf("behind Step: %v", err)
	}
}
