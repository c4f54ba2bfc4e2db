package leanattention_test

import (
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// Layers of one step may differ in everything but their heads, as a model's do that
// has a window in every other layer.
func testLayersDiffer(t *testing.T, at place) {
	rng := reftest.Rand(t)
	at.layers = []reftest.Shape{{}, {Mask: attn.Mask{Causal: true}}, {Scale: 0.7}, {Mask: attn.Mask{Causal: true}, Scale: -0.2}}
	if at.gpu == nil {
		at.layers = append(at.layers, bent(reftest.Shape{}, 3, 0), bent(reftest.Shape{}, 0, 0.5), bent(reftest.Shape{}, 0, 0, 0.5, -0.25),
			bent(reftest.Shape{Mask: attn.Mask{Causal: true}}, 5, 0), bent(reftest.Shape{}, 0, 2), bent(reftest.Shape{}, 0, 0, 0.25, 1))
	}
	cache := newCache(t, la.CacheConfig{Layers: len(at.layers), KVHeads: 1, HeadDim: 64, PageSize: 4, Pages: 20, Device: at.gpu})
	d := newDecoderAt(t, at, cache, 8, 2, tensor.Float32, false)
	a, b := newStored(t, cache), newStored(t, cache)
	d.do(t, rng, reftest.Normal, appended{a, 7})
	d.do(t, rng, reftest.Normal, appended{a, 3}, appended{b, 5})
	d.do(t, rng, reftest.Normal, appended{b, 1}, appended{a, 1})
	if err := cache.Close(); err != nil {
		t.Error(err)
	}
}

func TestLayersDiffer(t *testing.T) { testLayersDiffer(t, place{}) }
