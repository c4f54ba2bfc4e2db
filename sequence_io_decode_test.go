package leanattention_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// A sequence that was saved in one place and loaded in another decodes there as if it
// had been there from the beginning; and it can be saved again, as the same bytes.
func testSequenceIODecodes(t *testing.T, places ...place) {
	rng := reftest.Rand(t)
	turn := 0
	for i, from := range places {
		for j, to := range places {
			storage := cacheTypes[turn%len(cacheTypes)]
			turn++
			t.Run(fmt.Sprintf("%v from %d to %d", storage, i, j), func(t *testing.T) {
				at := func(p place, pageSize int) (*la.Cache, *decoder) {
					cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 64, DType: storage, PageSize: pageSize, Pages: 12, Device: p.gpu})
					d := newDecoderAt(t, p, cache, 9, 4, tensor.Float32, true)
					d.do(t, rng, reftest.Normal, appended{newStored(t, cache), 1}) // under the tag cuda it now has its memory
					return cache, d
				}
				cache, d := at(from, 4)
				other, e := at(to, 16)
				s := newStored(t, cache)
				d.do(t, rng, reftest.Normal, appended{s, 7})
				d.do(t, rng, reftest.Normal, appended{s, 2})

				var file, again bytes.Buffer
				if _, err := s.seq.WriteTo(&file); err != nil {
					t.Fatal(err)
				}
				saved := slices.Clone(file.Bytes())
				loaded := s.fork(t)
				var err error
				if loaded.seq, err = other.ReadSequence(&file); err != nil {
					t.Fatal(err)
				}
				if _, err := loaded.seq.WriteTo(&again); err != nil || !bytes.Equal(again.Bytes(), saved) {
					t.Fatalf("saved again it is something else: %v", err)
				}
				e.do(t, rng, reftest.Normal, appended{loaded, 3})
				e.do(t, rng, reftest.Normal, appended{loaded, 1}, appended{newStored(t, other), 5})
				d.do(t, rng, reftest.Normal, appended{s, 1})
				closeCache(t, cache)
				closeCache(t, other)
			})
		}
	}
}

func TestSequenceIODecodes(t *testing.T) { testSequenceIODecodes(t, place{}) }
