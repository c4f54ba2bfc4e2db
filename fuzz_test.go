package leanattention_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// fuzzed reads small decisions from a fuzzer's bytes, and 0 behind their end.
type fuzzed []byte

func (f *fuzzed) next() int {
	if len(*f) == 0 {
		return 0
	}
	b := (*f)[0]
	*f = (*f)[1:]
	return int(b)
}

// fuzzSizes are sizes of axes: good, none, and such that no product of two fits.
var fuzzSizes = []int{1, 2, 3, 4, 6, 8, 16, 59, 64, 256, 1 << 20, 1 << 33, 0, -1}

func (f *fuzzed) size() int      { return fuzzSizes[f.next()%len(fuzzSizes)] }
func (f *fuzzed) smallSize() int { return fuzzSizes[f.next()%9] }

var fuzzTypes = []tensor.Dtype{tensor.Float32, tensor.Float64, la.Float16, la.BFloat16, tensor.Int, tensor.Bool}

func isFloat(t tensor.Dtype) bool { return t == tensor.Float32 || t == tensor.Float64 }

// mutate changes some axes, the ranks and the element types of operands.
func (f *fuzzed) mutate(x []input3) {
	for n := f.next() % 4; n > 0; n-- {
		o := &x[f.next()%len(x)]
		o.shape = slices.Clone(o.shape)
		switch kind := f.next() % 8; {
		case kind < 5 && len(o.shape) > 0:
			o.shape[f.next()%len(o.shape)] = f.size()
		case kind == 5 && len(o.shape) > 0:
			o.shape = o.shape[1:]
		case kind == 6 && len(o.shape) < 6:
			o.shape = append(o.shape, f.size())
		default:
			o.of = fuzzTypes[f.next()%len(fuzzTypes)]
		}
	}
}

// nodes makes the inputs q, k and v; false if Gorgonia has no such nodes.
func fuzzNodes(g *G.ExprGraph, x []input3) (n [3]*G.Node, ok bool) {
	defer func() { ok = recover() == nil }()
	for i, o := range x {
		name := string("qkv"[i])
		if len(o.shape) == 0 {
			n[i] = G.NewScalar(g, o.of, G.WithName(name))
		} else {
			n[i] = o.node(g, name)
		}
	}
	return n, true
}

// denseResult says, apart from the code under test, what attention on dense
// operands gives: the shape of the output, or nil.
func denseResult(x []input3, isDefault, causal bool) tensor.Shape {
	q, k, v := x[0], x[1], x[2]
	if !isFloat(q.of) || k.of != v.of || k.of == tensor.Int || k.of == tensor.Bool || isDefault && k.of != q.of {
		return nil
	}
	if len(q.shape) < 3 || len(q.shape) > 4 || len(k.shape) != len(q.shape) || len(v.shape) != len(q.shape) {
		return nil
	}
	if slices.Min(slices.Concat(q.shape, k.shape, v.shape)) < 1 {
		return nil
	}
	at := func(o input3, fromEnd int) int { return o.shape[len(o.shape)-fromEnd] }
	if len(q.shape) == 4 && (at(k, 4) != at(q, 4) || at(v, 4) != at(q, 4)) {
		return nil
	}
	if at(k, 3) != at(v, 3) || at(q, 3)%at(k, 3) != 0 || at(q, 1) != at(k, 1) || at(k, 2) != at(v, 2) {
		return nil
	}
	if isDefault && causal && at(q, 2) > at(k, 2) {
		return nil
	}
	out := slices.Clone(q.shape)
	out[len(out)-1] = at(v, 1)
	return out
}

// FuzzShapes gives the builders operands of all shapes and types: they accept
// what fits together and nothing else, infer the right shape, and never panic.
func FuzzShapes(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{0, 1, 2, 2, 1, 1, 5, 8, 8})
	f.Add([]byte{1, 1, 2, 2, 1, 1, 5, 8, 8, 0, 1, 2, 0, 11})
	f.Add([]byte{2, 3, 1, 1, 2, 4, 6, 7, 3, 1, 1, 0, 3, 12, 2, 5})
	f.Add([]byte{3, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 10, 1, 1, 1, 11, 2, 7, 1})
	f.Add([]byte{0, 0, 9, 9, 9, 9, 9, 9, 9, 2, 0, 1, 10, 10, 1, 2, 11})
	f.Fuzz(func(t *testing.T, data []byte) {
		b := fuzzed(data)
		if b.next()%2 == 0 {
			fuzzDense(t, &b)
		} else {
			fuzzCached(t, &b)
		}
	})
}

func fuzzDense(t *testing.T, b *fuzzed) {
	flags := b.next()
	isDefault, causal, flat := flags&1 != 0, flags&2 != 0, flags&4 != 0
	batch, kv, group, nq, nk, d, dv := b.smallSize(), b.smallSize(), 1+b.next()%8, b.smallSize(), b.smallSize(), b.smallSize(), b.smallSize()
	query, storage := fuzzTypes[flags>>3&1], fuzzTypes[flags>>4&3]
	good := []input3{{query, []int{batch, kv * group, nq, d}}, {storage, []int{batch, kv, nk, d}}, {storage, []int{batch, kv, nk, dv}}}
	if flat {
		for i := range good {
			good[i].shape = good[i].shape[1:]
		}
	}
	x := slices.Clone(good)
	b.mutate(x)
	if want := denseResult(x, isDefault, causal); isDefault && causal && want != nil {
		if rows, keys := want[len(want)-2]*want[len(want)-3], x[1].shape[len(want)-2]; rows > 1<<16 || keys > 1<<12 || rows*keys > 1<<20 {
			return // the mask would be too large a tensor
		}
	}
	var opts []la.Option
	if causal {
		opts = append(opts, la.WithCausal())
	}
	build, name := la.Attention, "Attention"
	if isDefault {
		build, name = la.Default, "Default"
	}
	n := checkFuzzed(t, name, x, denseResult(x, isDefault, causal), func(q, k, v *G.Node) (*G.Node, error) { return build(q, k, v, opts...) })
	if n == nil || isDefault {
		return
	}
	// Shape inference by itself, with other shapes for the same element types.
	b.mutate(x)
	shapes := make([]G.DimSizer, 0, 4)
	for i := range x {
		x[i].of = []tensor.Dtype{query, storage, storage}[i]
		shapes = append(shapes, tensor.Shape(x[i].shape))
	}
	switch b.next() % 8 {
	case 0:
		shapes = shapes[1:]
	case 1:
		shapes = append(shapes, tensor.Shape{batch})
	case 2:
		shapes[b.next()%3] = nil
	}
	out, err := n.Op().InferShape(shapes...)
	want := denseResult(x, false, causal)
	if len(shapes) != 3 || slices.Contains(shapes, nil) {
		want = nil
	}
	// The types of the first mutation stay those of the op.
	checkInferred(t, fmt.Sprint(x), out, err, want)
}

// checkFuzzed builds on operands x and checks the result against the wanted
// shape; nil for none.
func checkFuzzed(t *testing.T, name string, x []input3, want tensor.Shape, build func(q, k, v *G.Node) (*G.Node, error)) *G.Node {
	t.Helper()
	g := G.NewGraph()
	in, ok := fuzzNodes(g, x)
	if !ok {
		return nil
	}
	before := len(g.AllNodes())
	n, err := build(in[0], in[1], in[2])
	var out tensor.Shape
	if n != nil {
		out = n.Shape()
		if n.Dtype() != x[0].of {
			t.Errorf("%s of %v is of %v", name, x, n.Dtype())
		}
	}
	if err != nil && len(g.AllNodes()) != before {
		t.Errorf("%s of %v: nodes were added before the error %q", name, x, err)
	}
	checkInferred(t, fmt.Sprint(name, x), out, err, want)
	return n
}

func checkInferred(t *testing.T, what string, out tensor.Shape, err error, want tensor.Shape) {
	t.Helper()
	switch {
	case want != nil && err != nil:
		t.Errorf("%s: %v, want shape %v", what, err, want)
	case want != nil && !slices.Equal(out, want):
		t.Errorf("%s has shape %v, want %v", what, out, want)
	case want == nil && (err == nil || out != nil):
		t.Errorf("%s: accepted, with shape %v and error %v", what, out, err)
	case want == nil && !errors.Is(err, la.ErrShape) && !errors.Is(err, la.ErrDType) && !errors.Is(err, la.ErrUnsupported):
		t.Errorf("%s: %v", what, err)
	}
}

func fuzzCached(t *testing.T, b *fuzzed) {
	cfg := la.CacheConfig{Layers: 1 + b.next()%3, KVHeads: 1 + b.next()%4, HeadDim: 1 + b.next()%65, ValueDim: 1 + b.next()%33, PageSize: 1 + b.next()%3, Pages: 1}
	cache, err := la.NewCache(cfg)
	if err != nil {
		t.Fatal(err)
	}
	tokens, group, query := 1+b.next()%5, 1+b.next()%4, fuzzTypes[b.next()%2]
	step, err := cache.NewStep(tokens)
	if err != nil {
		t.Fatal(err)
	}
	x := []input3{
		{query, []int{tokens, group * cfg.KVHeads * cfg.HeadDim}},
		{query, []int{tokens, cfg.KVHeads * cfg.HeadDim}},
		{query, []int{tokens, cfg.KVHeads * cfg.ValueDim}},
	}
	b.mutate(x)
	result := func() tensor.Shape {
		q, k, v := x[0], x[1], x[2]
		if !isFloat(q.of) || k.of != q.of || v.of != q.of || len(q.shape) != 2 || len(k.shape) != 2 || len(v.shape) != 2 {
			return nil
		}
		if q.shape[0] != tokens || k.shape[0] != tokens || v.shape[0] != tokens || q.shape[1] < 1 || q.shape[1]%(cfg.KVHeads*cfg.HeadDim) != 0 {
			return nil
		}
		if k.shape[1] != cfg.KVHeads*cfg.HeadDim || v.shape[1] != cfg.KVHeads*cfg.ValueDim {
			return nil
		}
		return tensor.Shape{tokens, q.shape[1] / cfg.HeadDim * cfg.ValueDim}
	}
	n := checkFuzzed(t, "CachedAttention", x, result(), func(q, k, v *G.Node) (*G.Node, error) {
		return la.CachedAttention(q, k, v, step.Layer(cfg.Layers-1))
	})
	if n == nil {
		return
	}
	b.mutate(x)
	shapes := make([]G.DimSizer, 0, 3)
	for i := range x {
		x[i].of = query
		shapes = append(shapes, tensor.Shape(x[i].shape))
	}
	out, err := n.Op().InferShape(shapes...)
	checkInferred(t, fmt.Sprint("CachedAttention ", x), out, err, result())
}
