package leanattention_test

import (
	"errors"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestUnfusedOnHost: Gorgonia's nodes do that, so nothing here does, nor writes
// anything.
func TestUnfusedOnHost(t *testing.T) {
	p := newProblem(reftest.Rand(t), dense(4, 2, 64, 64, 1, 300), spec{query: tensor.Float32, kv: tensor.Float32})
	a := p.args()
	if err := la.Attend(a, append(p.options(), la.WithSchedule(la.Unfused))...); !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("Attend: %v", err)
	}
	for _, x := range a.Out.(*tensor.Dense).Float32s() {
		if x == x {
			t.Fatal("Attend wrote, and refused")
		}
	}
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, DType: tensor.Float32, PageSize: 16, Pages: 4})
	if err != nil {
		t.Fatal(err)
	}
	step, err := cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	row := func(name string, width int) *G.Node {
		return G.NewTensor(g, tensor.Float32, 2, G.WithShape(1, width), G.WithName(name))
	}
	if _, err := la.CachedAttention(row("q", 4*64), row("k", 2*64), row("v", 2*64), step.Layer(0), la.WithSchedule(la.Unfused)); !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("CachedAttention: %v", err)
	}
	if err := cache.Close(); err != nil {
		t.Error(err)
	}
	if s := la.Unfused.String(); s != "Unfused" {
		t.Errorf("its name is %s", s)
	}
}
