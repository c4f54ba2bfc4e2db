package leanattention_test

import (
	"slices"
	"testing"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// twice is a step of one row over a cache of one layer, and graphs on it.
type twice struct {
	t     *testing.T
	step  *la.Step
	seq   *la.Sequence
	cache *la.Cache
}

func newTwice(t *testing.T, gpu *la.GPU) *twice {
	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, Pages: 2, Device: gpu})
	t.Cleanup(func() { cache.Close() })
	step, err := cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	return &twice{t, step, newStored(t, cache).seq, cache}
}

// graph has a node on the layer, whose values are all x, behind its machine.
func (w *twice) graph(x float32) (*G.ExprGraph, *G.Node) {
	w.t.Helper()
	g := G.NewGraph()
	v := input(g, "x", tensor.New(tensor.WithShape(1, 64), tensor.WithBacking(slices.Repeat([]float32{x}, 64))))
	out, err := la.CachedAttention(v, v, v, w.step.Layer(0), la.WithScale(0))
	if err != nil {
		w.t.Fatal(err)
	}
	return g, out
}

// turn runs graphs in one step, and returns what the last one gave.
func (w *twice) turn(nodes ...*G.Node) (result float64) {
	w.t.Helper()
	if err := w.step.Set([]la.Append{{Seq: w.seq, Tokens: 1}}); err != nil {
		w.t.Fatal(err)
	}
	for _, n := range nodes {
		vm := G.NewTapeMachine(n.Graph())
		if err := vm.RunAll(); err != nil {
			w.t.Fatal(la.Cause(err))
		}
		result = floats(w.t, n.Value())[0]
		vm.Close()
	}
	if err := w.step.Commit(); err != nil {
		w.t.Fatal(err)
	}
	return result
}

// The second node on a layer is refused where it would overwrite what the first has
// appended in the same run, and nowhere else: not in other graphs, clones and what
// Fuse makes among them, one of which runs in a step.
func testLayerTwice(t *testing.T, gpu *la.GPU) {
	w := newTwice(t, gpu)
	g, out := w.graph(1)
	x := g.ByName("x")[0]
	for range 2 {
		_, err := la.CachedAttention(x, x, x, w.step.Layer(0))
		wantError(t, err, la.ErrGraph, "CachedAttention", "layer 0 of the step has a node in this graph")
	}
	if got := w.turn(out); got != 1 {
		t.Errorf("step 1: %v", got)
	}

	_, other := w.graph(4)
	if got := w.turn(other); got != 2.5 {
		t.Errorf("another graph on the step: %v", got)
	}
	clone := g.Clone().(*G.ExprGraph)
	if got := w.turn(clone.Node(out.ID()).(*G.Node)); got != 2 {
		t.Errorf("a clone: %v", got)
	}
	fused, err := la.Fuse(out)
	if err != nil {
		t.Fatal(err)
	}
	if got := w.turn(fused.Node(out)); got != 1.75 {
		t.Errorf("fused: %v", got)
	}
	// The last one that runs in a step is the one that counts.
	if got := w.turn(out, other); got != 2.2 && got != float64(float32(2.2)) {
		t.Errorf("two graphs in a step: %v", got)
	}

	// Two steps on one layer of a cache are two lists of rows: both may be in a graph.
	second, err := w.cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := la.CachedAttention(x, x, x, second.Layer(0)); err != nil {
		t.Error(err)
	}
}

func TestLayerTwice(t *testing.T) { testLayerTwice(t, nil) }

// A layer whose node could not be built can be built.
func TestLayerAfterFailedBuild(t *testing.T) {
	w := newTwice(t, nil)
	g := G.NewGraph()
	x := input(g, "x", tensor.New(tensor.WithShape(1, 64), tensor.WithBacking(make([]float32, 64))))
	short := input(g, "short", tensor.New(tensor.WithShape(1, 63), tensor.WithBacking(make([]float32, 63))))
	before := len(g.AllNodes())
	var lse *G.Node
	for _, err := range []error{
		second(la.CachedAttention(x, x, short, w.step.Layer(0), la.WithLSE(&lse))),
		second(la.CachedAttention(x, x, x, w.step.Layer(1))),
		second(la.CachedAttention(x, x, x, w.step.Layer(0), la.WithTileTokens(-1))),
		second(la.CachedAttention(x, nil, x, w.step.Layer(0))),
	} {
		if err == nil {
			t.Fatal("no error")
		}
	}
	if n := len(g.AllNodes()); n != before {
		t.Errorf("%d nodes of calls that failed", n-before)
	}
	if _, err := la.CachedAttention(x, x, x, w.step.Layer(0), la.WithLSE(&lse)); err != nil {
		t.Error(err)
	}
}
