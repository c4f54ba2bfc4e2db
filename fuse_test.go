package leanattention_test

import (
	"math"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// written is a decoder as somebody writes it, and what Fuse is to make of it.
type written struct {
	name    string
	write   func(w *writer) (roots []*G.Node)
	matches int
	causal  bool
	bias    bool
	misses  []string // parts of the reasons, in order
	gone    string   // part of the name of ops that are to be gone
	noGrad  string   // why the gradients of the graph as written cannot be compared with
}

// heads splits (T, heads*d) into (heads, T, d).
func (w *writer) heads(x *G.Node, heads int) *G.Node {
	s := x.Shape()
	return w.swap(w.shape(x, s[0], heads, s[1]/heads), 1, 0, 2)
}

// tokens is the reverse of heads.
func (w *writer) tokens(x *G.Node) *G.Node {
	s := x.Shape()
	return w.shape(w.swap(x, 1, 0, 2), s[1], s[0]*s[2])
}

// feedForward is the other half of a layer.
func (w *writer) feedForward(x *G.Node) *G.Node {
	width := x.Shape()[1]
	h := w.must(G.Rectify(w.mul(x, w.weight(width, 2*width))))
	return w.add(x, w.mul(h, w.weight(2*width, width)))
}

// dense is a fully connected layer with a bias, as layer libraries write it.
func (w *writer) dense(x *G.Node, out int) *G.Node {
	y := w.mul(x, w.weight(x.Shape()[1], out))
	return w.must(G.BroadcastAdd(y, w.weight(1, out), nil, []byte{0}))
}

var decoders = []written{
	{name: "3-D, heads as the batch, three layers", matches: 3, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		const T, heads, width = 5, 2, 8
		x := w.input("x", T, width)
		mask := w.constant("mask", causalMask(1, T, T, math.Inf(-1)), 1, T, T)
		for range 3 {
			q, k, v := w.heads(w.mul(x, w.weight(width, width)), heads), w.heads(w.mul(x, w.weight(width, width)), heads), w.heads(w.mul(x, w.weight(width, width)), heads)
			s := w.times(w.bmm(q, k, false, true), w.number(1/math.Sqrt(width/heads)))
			s = w.must(G.BroadcastAdd(s, mask, nil, []byte{0}))
			o := w.tokens(w.bmm(w.softmax(s, 2), v))
			x = w.feedForward(w.add(x, w.mul(o, w.weight(width, width))))
		}
		return []*G.Node{x}
	}},
	{name: "4-D, keys transposed with the heads, divided by a root, SoftMax of a matrix", matches: 2, gone: "Softmax", write: func(w *writer) []*G.Node {
		const B, T, heads, dim = 2, 3, 2, 4
		x := w.input("x", B*T, heads*dim)
		for range 2 {
			split := func() *G.Node { return w.shape(w.mul(x, w.weight(heads*dim, heads*dim)), B, T, heads, dim) }
			q, k, v := w.swap(split(), 0, 2, 1, 3), w.swap(split(), 0, 2, 3, 1), w.swap(split(), 0, 2, 1, 3)
			s := w.over(w.bmm(q, k), w.must(G.Sqrt(w.number(dim))))
			p := w.shape(w.softmax(w.shape(s, B*heads*T, T), 1), B, heads, T, T)
			o := w.shape(w.swap(w.bmm(p, v), 0, 2, 1, 3), B*T, heads*dim)
			x = w.add(x, w.mul(o, w.weight(heads*dim, heads*dim)))
		}
		return []*G.Node{x}
	}},
	{name: "one head, matrices, as tutorials have it", matches: 1, gone: "Softmax", write: func(w *writer) []*G.Node {
		x := w.input("x", 6, 8)
		wq, wk, wv := w.weight(8, 8), w.weight(8, 8), w.weight(8, 8)
		scores := w.mul(w.mul(x, wq), w.swap(w.mul(x, wk)))
		scaled := w.must(G.Div(scores, w.number(math.Sqrt(8))))
		return []*G.Node{w.mul(w.softmax(scaled), w.mul(x, wv))}
	}},
	{name: "layers of a library: biases, scaled queries, a mask of full size", matches: 2, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		const T, heads, width = 4, 3, 12
		x := w.input("x", T, width)
		for range 2 {
			q := w.times(w.dense(x, width), w.number(0.5))
			k, v := w.dense(x, width), w.dense(x, width)
			s := w.bmm(w.heads(q, heads), w.heads(k, heads), false, true)
			s = w.add(s, w.constant("mask", causalMask(heads, T, T, -1e9), heads, T, T))
			h := w.must(G.Tanh(w.dense(w.tokens(w.bmm(w.softmax(s), w.heads(v, heads))), width)))
			x = w.add(x, h)
		}
		return []*G.Node{w.softmax(w.dense(x, 7))}
	}, misses: []string{"its result is needed 2 times"}},
	{name: "keys transposed twice, and scaled before and after", matches: 1, gone: "A ×××", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 4, 3, 8), w.input("k", 4, 7, 8), w.input("v", 4, 7, 5)
		k = w.times(k, w.number(0.5))
		k = w.swap(w.times(w.swap(k, 0, 2, 1), w.number(3)), 0, 2, 1)
		return []*G.Node{w.bmm(w.softmax(w.times(w.number(0.25), w.bmm(q, k, false, true)), 2), v)}
	}},
	{name: "keys scaled before they are transposed, few queries", matches: 1, gone: "⊙", write: func(w *writer) []*G.Node {
		k := w.swap(w.times(w.input("kt", 2, 4, 5), w.number(0.5)), 0, 2, 1)
		return []*G.Node{w.bmm(w.softmax(w.bmm(w.input("q", 2, 3, 4), k, false, true), 2), w.input("v", 2, 5, 6))}
	}},
	{name: "decode over caches that are inputs", matches: 1, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3, 1, 8), w.input("cache of keys", 2, 3, 40, 8), w.input("cache of values", 2, 3, 40, 8)
		s := w.bmm(q, w.times(k, w.number(1/math.Sqrt(8))), false, true)
		return []*G.Node{w.bmm(w.softmax(s, 3), v)}
	}},
	{name: "values projected last, everything transposed", matches: 1, gone: "Softmax", write: func(w *writer) []*G.Node {
		qt, k := w.input("qt", 2, 8, 3), w.input("k", 2, 6, 8)
		p := w.softmax(w.times(w.bmm(qt, k, true, true), w.number(0.3)))
		v := w.swap(w.bmm(k, w.input("wv", 2, 8, 4)), 0, 2, 1)
		return []*G.Node{w.bmm(p, v, false, true)}
	}},
	{name: "keys of a batch of heads, five axes", matches: 1, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 1, 2, 3, 4), w.input("k", 2, 1, 2, 5, 4), w.input("v", 4, 5, 6)
		p := w.softmax(w.over(w.bmm(q, k, false, true), w.number(2)))
		return []*G.Node{w.bmm(w.shape(p, 4, 3, 5), v)}
	}},
	{name: "groups of heads as rows, causal, scaled behind the mask", matches: 1, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3*4, 8), w.input("k", 2, 6, 8), w.input("v", 2, 6, 8)
		s := w.must(G.Sub(w.bmm(q, k, false, true), w.constant("mask", causalMask(2*3, 4, 6, 1e6), 2, 3*4, 6)))
		return []*G.Node{w.bmm(w.softmax(w.times(s, w.number(0.35)), 2), v)}
	}},
	{name: "a mask computed of constants", matches: 1, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 3, 5, 4), w.input("k", 3, 5, 4), w.input("v", 3, 5, 4)
		lower := causalMask(1, 5, 5, -1) // (lower + 1 - 1) * 1e9
		m := w.times(w.must(G.Neg(w.must(G.Neg(w.constant("lower", lower, 1, 5, 5))))), w.number(1e9))
		s := w.must(G.BroadcastAdd(w.bmm(q, k, false, true), m, nil, []byte{0}))
		return []*G.Node{w.bmm(w.softmax(s, 2), v)}
	}},
	{name: "masks for all heads of all sequences, and for half of them", matches: 1, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 3, 2, 4, 4), w.input("k", 3, 2, 4, 4), w.input("v", 3, 2, 4, 4)
		s := w.must(G.BroadcastAdd(w.bmm(q, k, false, true), w.constant("mask", causalMask(1, 4, 4, -1e9), 1, 1, 4, 4), nil, []byte{0, 1}))
		s = w.must(G.BroadcastAdd(w.shape(s, 2, 3, 4, 4), w.constant("masks", causalMask(3, 4, 4, -1e6), 1, 3, 4, 4), nil, []byte{0}))
		return []*G.Node{w.bmm(w.shape(w.softmax(s, 3), 3, 2, 4, 4), v)}
	}},
	{name: "keys that come transposed, many queries", matches: 1, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, kt, v := w.input("q", 2, 16, 8), w.input("kt", 2, 8, 9), w.input("v", 2, 9, 8)
		return []*G.Node{w.bmm(w.softmax(w.times(w.bmm(q, kt), w.number(0.3)), 2), v)}
	}},
	{name: "scores and weights in one row on the way", matches: 1, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		s := w.times(w.shape(w.bmm(w.input("q", 2, 3, 4), w.input("k", 2, 5, 4), false, true), 30), w.number(0.5))
		s = w.shape(w.add(s, w.constant("mask", causalMask(2, 3, 5, -1e9), 30)), 6, 5)
		return []*G.Node{w.bmm(w.shape(w.shape(w.softmax(s, 1), 30), 2, 3, 5), w.input("v", 2, 5, 6))}
	}},
	{name: "weights in another stack of the same matrices", matches: 1, gone: "Softmax", write: func(w *writer) []*G.Node {
		s := w.bmm(w.input("q", 2, 2, 3, 4), w.input("k", 2, 2, 5, 4), false, true)
		return []*G.Node{w.bmm(w.shape(w.softmax(s, 3), 4, 3, 5), w.input("v", 4, 5, 6))}
	}},
	{name: "keys that are transposed and in other rows", matches: 1, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, v := w.input("q", 2, 70, 8), w.input("v", 2, 9, 8)
		kt := w.shape(w.input("k", 2, 9, 8), 2, 8, 9)
		return []*G.Node{w.bmm(w.softmax(w.times(w.bmm(q, kt), w.number(0.3)), 2), v)}
	}},
	{name: "attention of attention", matches: 2, gone: "Softmax", write: func(w *writer) []*G.Node {
		x := w.input("x", 2, 4, 4)
		a := w.bmm(w.softmax(w.bmm(x, x, false, true), 2), x)
		b := w.bmm(w.softmax(w.bmm(a, a, false, true), 2), a)
		return []*G.Node{b, a}
	}},
	{name: "two roots, a shared part, reads inside", matches: 2, gone: "Softmax", write: func(w *writer) []*G.Node {
		x := w.input("x", 3, 4, 4)
		y := w.must(G.Tanh(x))
		a := w.bmm(w.softmax(w.times(w.bmm(y, y, false, true), w.number(2)), 2), y)
		b := w.bmm(w.softmax(w.times(w.bmm(a, y, false, true), w.number(2)), 2), a)
		return []*G.Node{w.must(G.Sum(b)), w.add(a, y)}
	}},
	{name: "default, causal, grouped", matches: 2, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 4, 3, 8), w.input("k", 2, 2, 7, 8), w.input("v", 2, 2, 7, 8)
		a := w.must(la.Default(q, k, v, la.WithCausal()))
		return []*G.Node{w.must(la.Default(a, k, v, la.WithCausal(), la.WithScale(-0.7)))}
	}},
}

// TestFuse rewrites decoders of many hands.
func TestFuse(t *testing.T) { testFuse(t, decoders) }

func testFuse(t *testing.T, all []written) {
	rng := reftest.Rand(t)
	for _, d := range all {
		for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			t.Run(d.name+" "+dtype.String(), func(t *testing.T) {
				w := newWriter(t, rng, dtype)
				roots := d.write(w)
				f := w.fuse(roots, read(roots...))
				d.check(t, f)
			})
		}
	}
}

// check compares what Fuse did with what it was to do.
func (d *written) check(t *testing.T, f *la.Fused) {
	t.Helper()
	if len(f.Matches) != d.matches || count(f.Graph, "LeanAttention") != d.matches {
		t.Errorf("%d matches and %d nodes of attention, want %d\n%v", len(f.Matches), count(f.Graph, "LeanAttention"), d.matches, f)
	}
	for _, m := range f.Matches {
		if m.Causal != d.causal {
			t.Errorf("causal is %v\n%v", m.Causal, f)
		}
		if (m.Bias != nil) != d.bias {
			t.Errorf("the bias is %v\n%v", m.Bias, f)
		}
	}
	d.checkMisses(t, f)
	if d.gone != "" && len(d.misses) == 0 && count(f.Graph, d.gone) > 0 {
		t.Errorf("%d nodes of %s are left", count(f.Graph, d.gone), d.gone)
	}
}

// checkMisses compares the reasons, each of which says in one line what to change.
func (d *written) checkMisses(t *testing.T, f *la.Fused) {
	t.Helper()
	if len(f.Misses) != len(d.misses) {
		t.Fatalf("%d misses, want %d\n%v", len(f.Misses), len(d.misses), f)
	}
	for i, m := range f.Misses {
		if !strings.Contains(m.Reason, d.misses[i]) {
			t.Errorf("miss %d is %q, want %q", i, m.Reason, d.misses[i])
		}
		if !strings.Contains(m.Reason, ": ") || strings.Contains(m.Reason, "\n") {
			t.Errorf("miss %d does not say in one line what to change: %q", i, m.Reason)
		}
	}
}
