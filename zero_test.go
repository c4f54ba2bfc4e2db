package leanattention_test

import (
	"errors"
	"testing"

	la "gorgonia.org/leanattention"
)

// TestZeroValues: what was not made by this package's functions is refused, and
// nothing panics.
func TestZeroValues(t *testing.T) {
	real, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, Pages: 1})
	if err != nil {
		t.Fatal(err)
	}
	step, err := real.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	second := func(_ any, err error) error { return err }
	for _, cache := range []*la.Cache{nil, {}} {
		for _, sequence := range []*la.Sequence{nil, {}} {
			for _, zero := range []*la.Step{nil, {}} {
				for name, err := range map[string]error{
					"NewSequence":      second(cache.NewSequence()),
					"NewStep":          second(cache.NewStep(1)),
					"Close":            cache.Close(),
					"Fork":             second(sequence.Fork()),
					"Truncate":         sequence.Truncate(0),
					"Release":          sequence.Release(),
					"Set":              zero.Set(nil),
					"Set to that":      step.Set([]la.Append{{Seq: sequence, Tokens: 1}}),
					"Commit":           zero.Commit(),
					"Rollback":         zero.Rollback(),
					"CachedAttention":  second(la.CachedAttention(nil, nil, nil, zero.Layer(0))),
					"CachedAttention2": second(la.CachedAttention(nil, nil, nil, la.Layer{})),
				} {
					if !errors.Is(err, la.ErrState) {
						t.Errorf("%s of a zero value: %v; want %v", name, err, la.ErrState)
					}
				}
				if n := sequence.Len(); n != 0 {
					t.Errorf("a zero sequence has %d tokens", n)
				}
				if n := zero.Tokens(); n != 0 {
					t.Errorf("a zero step has %d rows", n)
				}
				if s := zero.Stats(); s != (la.StepStats{}) {
					t.Errorf("a zero step has stats %+v", s)
				}
				if s := cache.Stats(); s != (la.CacheStats{}) {
					t.Errorf("a zero cache has stats %+v", s)
				}
				if c := cache.Config(); c.Layers != 0 {
					t.Errorf("a zero cache has config %+v", c)
				}
			}
		}
	}
}
