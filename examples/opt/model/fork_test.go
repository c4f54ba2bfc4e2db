package model

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
)

// What goes on from a fork, or beside it, has the logits of its own text.
func TestFork(t *testing.T) { testFork(t, Options{}) }

func TestGPUFork(t *testing.T) {
	gpu := devicetest.Open(t)
	testFork(t, Options{Device: gpu})
	if !testing.Short() {
		testFork(t, Options{Device: gpu, Attention: Default})
	}
}

func testFork(t *testing.T, o Options) {
	rng := seeded(t)
	c := small()
	c.HiddenSize, c.WordEmbedProjDim, c.Heads, c.MaxPositions, c.Layers = 128, 128, 2, 200, 1 // heads that a GPU has kernels for, and pages
	w := load(t, c, rng)
	o.Capacity, o.ForkTokens = []int{200, 200}, 300
	d := newDecoder(t, w, o)
	first, again := 70, 60
	if testing.Short() { // one page
		first, again, o.Chunk = 11, 3, 8
	}
	texts := prompts(rng, c.VocabSize, first, 3)
	check := func(what string, i int, text []int) {
		t.Helper()
		want := reference{w}.logits(text)
		closeTo(t, what, d.Logits(i), want[len(text)-1], 2e-4)
	}
	extend := func(i int, text []int, n int) []int {
		t.Helper()
		more := make([][]int, 2)
		more[i] = prompts(rng, c.VocabSize, n)[0]
		if err := d.Prefill(context.Background(), more, nil); err != nil {
			t.Fatal(err)
		}
		return append(slices.Clone(text), more[i]...)
	}
	if err := d.Prefill(context.Background(), texts, nil); err != nil {
		t.Fatal(err)
	}
	var forks []*Fork
	var at [][]int
	text := texts[0]
	for range 3 { // the last of them is at a place where nothing was written since
		f, err := d.Fork(0)
		if err != nil {
			t.Fatal(err)
		}
		forks, at = append(forks, f), append(at, text)
		text = extend(0, text, 5)
		check("behind a fork", 0, text)
	}
	if err := d.Truncate(0, 10); err != nil {
		t.Fatal(err)
	}
	extend(0, text[:10], again)
	for _, i := range []int{1, 0, 2} {
		if err := d.Return(0, forks[i]); err != nil {
			t.Fatal(err)
		}
		if d.Len(0) != len(at[i]) || d.Logits(0) != nil {
			t.Errorf("fork %d has %d tokens, want %d", i, d.Len(0), len(at[i]))
		}
		text := extend(0, at[i], 9)
		check("after a return", 0, text)
		if err := d.Return(0, forks[i]); !errors.Is(err, ErrConfig) {
			t.Errorf("a second return: %v", err)
		}
	}
	texts[1] = extend(1, texts[1], 2)
	check("the sequence beside it", 1, texts[1])

	// A fork of one sequence is one for the others, too.
	f, err := d.Fork(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Return(0, f); err != nil {
		t.Fatal(err)
	}
	check("the other one's", 0, extend(0, texts[1], 1))
	f, err = d.Fork(0)
	if err := errors.Join(err, f.Release()); err != nil {
		t.Error(err)
	}
	if err := f.Release(); !errors.Is(err, ErrConfig) {
		t.Errorf("released twice: %v", err)
	}
	pages := d.cache.(*leanCache).Stats()
	if pages.Sequences != 2 || pages.Tokens != d.Len(0)+d.Len(1) {
		t.Errorf("something is kept: %+v", pages)
	}
}

// What begins as another sequence does has the logits of its own text, however far that one has gone on, and
// takes the pages of what is its own.
func TestShare(t *testing.T) { testShare(t, Options{}) }

func TestGPUShare(t *testing.T) { testShare(t, Options{Device: devicetest.Open(t)}) }

func testShare(t *testing.T, o Options) {
	rng := seeded(t)
	c := small()
	c.HiddenSize, c.WordEmbedProjDim, c.Heads, c.MaxPositions, c.Layers = 128, 128, 2, 200, 1 // heads that a GPU has kernels for, and pages
	w := load(t, c, rng)
	n, common := 130, []int{64, 70, 70, 1}
	if testing.Short() {
		n, common, o.Chunk = 7, []int{4, 5, 5, 1}, 8
	}
	first := prompts(rng, c.VocabSize, n)[0]
	texts := [][]int{first}
	o.Capacity, o.Shared = []int{n + 2}, make([]Shared, 1)
	for _, m := range common {
		own := prompts(rng, c.VocabSize, 3)[0]
		texts = append(texts, slices.Concat(first[:m], own))
		o.Capacity, o.Shared = append(o.Capacity, m+5), append(o.Shared, Shared{From: 0, Tokens: m})
	}
	last := len(texts) // and one that begins as one that shares does
	texts = append(texts, slices.Concat(texts[2][:common[1]+1], []int{7}))
	o.Capacity, o.Shared = append(o.Capacity, common[1]+4), append(o.Shared, Shared{From: 2, Tokens: common[1] + 1})
	d := newDecoder(t, w, o)
	read := func(tokens [][]int) {
		t.Helper()
		if err := d.Prefill(context.Background(), tokens, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Share(1); !errors.Is(err, ErrConfig) {
		t.Errorf("before the other one has the tokens: %v", err)
	}
	alone := make([][]int, len(texts))
	if !testing.Short() {
		alone[0] = first[:common[1]-1]
		read(alone)
		if err := d.Share(2); !errors.Is(err, ErrConfig) || d.Len(2) != 0 {
			t.Errorf("one token too early: %v, %d tokens", err, d.Len(2))
		}
		if err := d.Truncate(0, 0); err != nil {
			t.Fatal(err)
		}
	}
	alone[0] = first
	read(alone)
	alone[0] = nil
	for i := 1; i < last; i++ {
		if err := d.Share(i); err != nil || d.Len(i) != common[i-1] || d.Logits(i) != nil {
			t.Fatalf("sequence %d has %d tokens: %v", i, d.Len(i), err)
		}
		alone[i] = texts[i][common[i-1]:]
	}
	read(alone)
	if err := d.Share(last); err != nil {
		t.Fatal(err)
	}
	clear(alone)
	alone[last] = []int{7}
	read(alone)
	for round := range 3 { // to the last place of each
		for i, text := range texts {
			want := reference{w}.logits(text)
			closeTo(t, "behind what is shared", d.Logits(i), want[len(text)-1], 2e-4)
		}
		if round == 2 {
			break
		}
		next := prompts(rng, c.VocabSize, len(texts))[0]
		if err := d.Step(next); err != nil {
			t.Fatal(err)
		}
		for i, id := range next {
			texts[i] = append(slices.Clone(texts[i]), id)
		}
	}
	for _, i := range []int{-1, 0, 1, len(texts)} {
		if err := d.Share(i); !errors.Is(err, ErrConfig) {
			t.Errorf("sequence %d: %v", i, err)
		}
	}
}

// There are just the pages that are needed when all go on from one place at once.
func TestSharePages(t *testing.T) {
	rng := seeded(t)
	c := small()
	c.MaxPositions = 128
	w := load(t, c, rng)
	d := newDecoder(t, w, Options{Capacity: []int{128, 128, 128}, Shared: []Shared{{}, {Tokens: 70}, {Tokens: 70}}})
	if s := d.cache.(*leanCache).Config(); s.Pages != 5 {
		t.Errorf("%d pages, want one for the beginning, one for the end of each, and one that all copy", s.Pages)
	}
	err := errors.Join(d.Prefill(context.Background(), [][]int{prompts(rng, c.VocabSize, 70)[0], nil, nil}, nil), d.Share(1), d.Share(2))
	for range 58 {
		err = errors.Join(err, d.Step(prompts(rng, c.VocabSize, 3)[0]))
	}
	if err != nil {
		t.Error(err)
	}
}

// What can't be shared is an error.
func TestShareErrors(t *testing.T) {
	w := load(t, small(), seeded(t))
	for _, o := range []Options{
		{Shared: []Shared{{}}},
		{Shared: []Shared{{}, {From: 1, Tokens: 2}}},
		{Shared: []Shared{{From: 1, Tokens: 2}, {}}},
		{Shared: []Shared{{}, {From: -1, Tokens: 2}}},
		{Shared: []Shared{{}, {Tokens: 9}}},
		{Shared: []Shared{{}, {Tokens: -1}}},
		{Shared: []Shared{{}, {Tokens: 2}}, Attention: Default},
	} {
		o.Capacity = []int{8, 8}
		if _, err := w.NewDecoder(o); !errors.Is(err, ErrConfig) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	d := newDecoder(t, w, Options{Capacity: []int{8, 8}})
	if err := d.Share(1); !errors.Is(err, ErrConfig) {
		t.Errorf("nothing to share: %v", err)
	}
}

// What can't be forked is an error, and too many forks are a full cache.
func TestForkErrors(t *testing.T) {
	rng := seeded(t)
	w := load(t, small(), rng)
	for _, a := range []Attention{Default, Fused} {
		d := newDecoder(t, w, Options{Capacity: []int{8}, Attention: a})
		if _, err := d.Fork(0); !errors.Is(err, ErrConfig) {
			t.Errorf("attention %d: %v", a, err)
		}
		if _, err := w.NewDecoder(Options{Capacity: []int{8}, Attention: a, ForkTokens: 1}); !errors.Is(err, ErrConfig) {
			t.Errorf("attention %d with room for forks: %v", a, err)
		}
	}
	if _, err := w.NewDecoder(Options{Capacity: []int{8}, ForkTokens: -1}); !errors.Is(err, ErrConfig) {
		t.Errorf("-1 tokens: %v", err)
	}
	d, other := newDecoder(t, w, Options{Capacity: []int{8}}), newDecoder(t, w, Options{Capacity: []int{8}})
	if err := d.Prefill(context.Background(), prompts(rng, 61, 3), nil); err != nil {
		t.Fatal(err)
	}
	f, err := d.Fork(0)
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{d.Return(1, f), d.Return(-1, f), other.Return(0, f), d.Return(0, nil), (*Fork)(nil).Release()} {
		if !errors.Is(err, ErrConfig) {
			t.Errorf("%v", err)
		}
	}
	if _, err := d.Fork(1); !errors.Is(err, ErrConfig) {
		t.Errorf("sequence 1: %v", err)
	}
	if err := d.Step([]int{5}); !errors.Is(err, la.ErrCacheFull) || d.Len(0) != 3 {
		t.Errorf("no page for a copy: %v", err)
	}
	if err := errors.Join(d.Return(0, f), d.Step([]int{5})); err != nil {
		t.Error(err)
	}
	d.Close()
	if _, err := d.Fork(0); !errors.Is(err, ErrConfig) {
		t.Errorf("closed: %v", err)
	}
}

// Each sequence has a capacity of its own: what fits the one and not the other is refused there alone.
func TestCapacities(t *testing.T) {
	rng := seeded(t)
	w := load(t, small(), rng)
	for big := range 2 {
		few, capacity := 1-big, []int{5, 5}
		capacity[big] = 20
		o := Options{Capacity: capacity, ForkTokens: 64, Draft: 4, Greedy: true}
		d := newDecoder(t, w, o)
		at := func(i int, tokens []int) [][]int {
			all := make([][]int, 2)
			all[i] = tokens
			return all
		}
		ten, three := prompts(rng, 61, 10)[0], prompts(rng, 61, 3)[0]
		if err := errors.Join(d.Prefill(context.Background(), at(big, ten), nil), d.Prefill(context.Background(), at(few, three), nil)); err != nil {
			t.Fatal(err)
		}
		fork := func() *Fork {
			f, err := d.Fork(big)
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
		var saved bytes.Buffer
		if err := d.WriteSequence(big, &saved); err != nil {
			t.Fatal(err)
		}
		f := fork()
		_, share := w.NewDecoder(Options{Capacity: []int{20, 5}, Shared: []Shared{{}, {Tokens: 6}}})
		_, shareOther := w.NewDecoder(Options{Capacity: []int{5, 20}, Shared: []Shared{{}, {Tokens: 6}}})
		_, ahead := d.Continue([]int{1, 1}, 4)
		for what, err := range map[string]error{
			"Return": d.Return(few, f), "ReadSequence": d.ReadSequence(few, bytes.NewReader(saved.Bytes()), 10),
			"Prefill": d.Prefill(context.Background(), at(few, three), nil), "Verify": d.Verify(at(few, three)),
			"Shared": share, "Shared by more": shareOther, "Continue": ahead,
		} {
			if !errors.Is(err, ErrConfig) || d.Len(few) != 3 || d.Len(big) != 10 {
				t.Errorf("%s of more than the capacity of sequence %d: %v", what, few, err)
			}
		}
		if err := errors.Join(
			d.ReadSequence(big, bytes.NewReader(saved.Bytes()), 10), d.Return(big, f),
			d.Verify(at(big, three)), d.Prefill(context.Background(), at(big, ten[:7]), nil),
		); err != nil || d.Len(big) != 20 || d.Len(few) != 3 {
			t.Errorf("to the capacity of sequence %d: %d and %d tokens, %v", big, d.Len(big), d.Len(few), err)
		}
	}
}
