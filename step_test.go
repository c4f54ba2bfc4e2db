package leanattention_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// Positions and Last against a count by hand, over the life of a step.
func TestStepRows(t *testing.T) {
	rng := reftest.Rand(t)
	cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 4, PageSize: 4, Pages: 20})
	d := newDecoder(t, cache, 7, 1, tensor.Float32, true)
	a, b, c := newStored(t, cache), newStored(t, cache), newStored(t, cache)
	check := func(when string, positions, last []int) {
		t.Helper()
		if got := d.step.Positions(); !slices.Equal(got, positions) || (got == nil) != (positions == nil) {
			t.Errorf("%s: positions %v, want %v", when, got, positions)
		}
		if got := d.step.Last(); !slices.Equal(got, last) || (got == nil) != (last == nil) {
			t.Errorf("%s: last rows %v, want %v", when, got, last)
		}
	}
	check("before the first Set", nil, nil)
	u := d.set(t, rng, reftest.AllInputs[0], appended{a, 3}, appended{b, 4})
	check("all rows", []int{0, 1, 2, 0, 1, 2, 3}, []int{2, 6})
	d.run(t, u)
	check("run", []int{0, 1, 2, 0, 1, 2, 3}, []int{2, 6})
	d.commit(t, u)
	check("committed", []int{0, 1, 2, 0, 1, 2, 3}, []int{2, 6})
	d.step.Positions()[0], d.step.Last()[0] = 99, 99
	d.do(t, rng, reftest.AllInputs[0], appended{b, 1}, appended{c, 2}, appended{a, 1})
	check("rows of nobody", []int{4, 0, 1, 3, 0, 0, 0}, []int{0, 2, 3})

	if err := d.step.Set([]la.Append{{Seq: a.seq, Tokens: 2}}); err != nil {
		t.Fatal(err)
	}
	check("set", []int{4, 5, 0, 0, 0, 0, 0}, []int{1})
	if err := d.step.Set(nil); !errors.Is(err, la.ErrState) {
		t.Fatal(err)
	}
	check("a second Set is refused", []int{4, 5, 0, 0, 0, 0, 0}, []int{1})
	if err := d.step.Rollback(); err != nil {
		t.Fatal(err)
	}
	check("rolled back", nil, nil)
	if err := d.step.Set(nil); err != nil {
		t.Fatal(err)
	}
	check("nobody's", make([]int, 7), []int{})
	if err := d.step.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := d.step.Set([]la.Append{{Seq: a.seq, Tokens: 8}}); !errors.Is(err, la.ErrLength) {
		t.Fatal(err)
	}
	check("a Set that failed", nil, nil)
}

// A step doesn't tell of Reset where something else is missing.
func TestCommitWithoutRun(t *testing.T) {
	rng := reftest.Rand(t)
	cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 4, Pages: 2})
	d := newDecoder(t, cache, 2, 1, tensor.Float32, true)
	s := newStored(t, cache)
	u := d.set(t, rng, reftest.Normal, appended{s, 1})
	wantError(t, d.step.Commit(), la.ErrState, "Commit", "layer 0 has not run since Set")
	d.run(t, u)
	d.commit(t, u)

	if err := d.step.Set(nil); err != nil { // nothing to run for
		t.Fatal(err)
	}
	if err := d.step.Commit(); err != nil {
		t.Error(err)
	}
	// A machine that is not reset.
	for turn := range 2 {
		u = d.set(t, rng, reftest.Normal, appended{s, 1})
		if err := d.vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		if turn == 0 {
			d.commit(t, u)
		}
	}
	wantError(t, d.step.Commit(), la.ErrState, "Commit", "no layer has run since Set", "machine.Reset")
	d.vm.Reset()
	d.run(t, u)
	d.commit(t, u)
}

// Set takes a time that grows with the appends, and in steady state no memory.
func TestSetOfManySequences(t *testing.T) {
	const n = 40_000
	c := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: n + 1})
	step, err := c.NewStep(n)
	if err != nil {
		t.Fatal(err)
	}
	appends := make([]la.Append, n)
	for i := range appends {
		appends[i] = la.Append{Seq: newStored(t, c).seq, Tokens: 1}
	}
	again := func() {
		if err := errors.Join(step.Set(appends), step.Rollback()); err != nil {
			t.Fatal(err)
		}
	}
	best := time.Hour
	for range 5 {
		began := time.Now()
		if err := step.Set(appends); err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(began))
		if err := step.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
	if best > 300*time.Millisecond { // it took 630 when it compared each with each, and takes 5
		t.Errorf("%v for %d appends", best, n)
	}
	if !raceEnabled {
		if allocs := testing.AllocsPerRun(5, again); allocs > 0 {
			t.Errorf("%v allocations for a Set like the one before", allocs)
		}
	}
	for _, pair := range [][2]int{{0, n - 1}, {7, 8}, {123, 30_000}} {
		twice := slices.Clone(appends)
		twice[pair[1]] = twice[pair[0]]
		if err := step.Set(twice); !errors.Is(err, la.ErrState) || !strings.Contains(err.Error(), fmt.Sprintf("appends %d and %d have the same sequence", pair[0], pair[1])) {
			t.Errorf("%v: %v", pair, err)
		}
		again() // it leaves no mark
	}
}
