package leanattention_test

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	gonum "gonum.org/v1/gonum/graph"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// written is a decoder as somebody writes it, and what Fuse is to make of it.
type written struct {
	name    string
	write   func(w *graphtest.Writer) (roots []*G.Node)
	matches int
	causal  bool
	bias    bool
	misses  []string // parts of the reasons, in order
	gone    string   // part of the name of ops that are to be gone
	noGrad  string   // why the gradients of the graph as written cannot be compared with
}

var decoders = []written{
	{name: "3-D, heads as the batch, three layers", matches: 3, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		const T, heads, width = 5, 2, 8
		x := w.Input("x", T, width)
		mask := w.Constant("mask", graphtest.CausalMask(1, T, T, math.Inf(-1)), 1, T, T)
		for range 3 {
			q, k, v := w.Heads(w.Mul(x, w.Weight(width, width)), heads), w.Heads(w.Mul(x, w.Weight(width, width)), heads), w.Heads(w.Mul(x, w.Weight(width, width)), heads)
			s := w.Times(w.BMM(q, k, false, true), w.Number(1/math.Sqrt(width/heads)))
			s = w.Must(G.BroadcastAdd(s, mask, nil, []byte{0}))
			o := w.Tokens(w.BMM(w.Softmax(s, 2), v))
			x = w.FeedForward(w.Add(x, w.Mul(o, w.Weight(width, width))))
		}
		return []*G.Node{x}
	}},
	{name: "4-D, keys transposed with the heads, divided by a root, SoftMax of a matrix", matches: 2, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		const B, T, heads, dim = 2, 3, 2, 4
		x := w.Input("x", B*T, heads*dim)
		for range 2 {
			split := func() *G.Node { return w.Shape(w.Mul(x, w.Weight(heads*dim, heads*dim)), B, T, heads, dim) }
			q, k, v := w.Swap(split(), 0, 2, 1, 3), w.Swap(split(), 0, 2, 3, 1), w.Swap(split(), 0, 2, 1, 3)
			s := w.Over(w.BMM(q, k), w.Must(G.Sqrt(w.Number(dim))))
			p := w.Shape(w.Softmax(w.Shape(s, B*heads*T, T), 1), B, heads, T, T)
			o := w.Shape(w.Swap(w.BMM(p, v), 0, 2, 1, 3), B*T, heads*dim)
			x = w.Add(x, w.Mul(o, w.Weight(heads*dim, heads*dim)))
		}
		return []*G.Node{x}
	}},
	{name: "one head, matrices, as tutorials have it", matches: 1, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		x := w.Input("x", 6, 8)
		wq, wk, wv := w.Weight(8, 8), w.Weight(8, 8), w.Weight(8, 8)
		scores := w.Mul(w.Mul(x, wq), w.Swap(w.Mul(x, wk)))
		scaled := w.Must(G.Div(scores, w.Number(math.Sqrt(8))))
		return []*G.Node{w.Mul(w.Softmax(scaled), w.Mul(x, wv))}
	}},
	{name: "layers of a library: biases, scaled queries, a mask of full size", matches: 2, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		const T, heads, width = 4, 3, 12
		x := w.Input("x", T, width)
		for range 2 {
			q := w.Times(w.Dense(x, width), w.Number(0.5))
			k, v := w.Dense(x, width), w.Dense(x, width)
			s := w.BMM(w.Heads(q, heads), w.Heads(k, heads), false, true)
			s = w.Add(s, w.Constant("mask", graphtest.CausalMask(heads, T, T, -1e9), heads, T, T))
			h := w.Must(G.Tanh(w.Dense(w.Tokens(w.BMM(w.Softmax(s), w.Heads(v, heads))), width)))
			x = w.Add(x, h)
		}
		return []*G.Node{w.Softmax(w.Dense(x, 7))}
	}, misses: []string{"its result is needed 2 times"}},
	{name: "keys transposed twice, and scaled before and after", matches: 1, gone: "A ×××", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 4, 3, 8), w.Input("k", 4, 7, 8), w.Input("v", 4, 7, 5)
		k = w.Times(k, w.Number(0.5))
		k = w.Swap(w.Times(w.Swap(k, 0, 2, 1), w.Number(3)), 0, 2, 1)
		return []*G.Node{w.BMM(w.Softmax(w.Times(w.Number(0.25), w.BMM(q, k, false, true)), 2), v)}
	}},
	{name: "keys scaled before they are transposed, few queries", matches: 1, gone: "⊙", write: func(w *graphtest.Writer) []*G.Node {
		k := w.Swap(w.Times(w.Input("kt", 2, 4, 5), w.Number(0.5)), 0, 2, 1)
		return []*G.Node{w.BMM(w.Softmax(w.BMM(w.Input("q", 2, 3, 4), k, false, true), 2), w.Input("v", 2, 5, 6))}
	}},
	{name: "decode over caches that are inputs", matches: 1, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3, 1, 8), w.Input("cache of keys", 2, 3, 40, 8), w.Input("cache of values", 2, 3, 40, 8)
		s := w.BMM(q, w.Times(k, w.Number(1/math.Sqrt(8))), false, true)
		return []*G.Node{w.BMM(w.Softmax(s, 3), v)}
	}},
	{name: "values projected last, everything transposed", matches: 1, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		qt, k := w.Input("qt", 2, 8, 3), w.Input("k", 2, 6, 8)
		p := w.Softmax(w.Times(w.BMM(qt, k, true, true), w.Number(0.3)))
		v := w.Swap(w.BMM(k, w.Input("wv", 2, 8, 4)), 0, 2, 1)
		return []*G.Node{w.BMM(p, v, false, true)}
	}},
	{name: "keys of a batch of heads, five axes", matches: 1, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 1, 2, 3, 4), w.Input("k", 2, 1, 2, 5, 4), w.Input("v", 4, 5, 6)
		p := w.Softmax(w.Over(w.BMM(q, k, false, true), w.Number(2)))
		return []*G.Node{w.BMM(w.Shape(p, 4, 3, 5), v)}
	}},
	{name: "groups of heads as rows, causal, scaled behind the mask", matches: 1, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3*4, 8), w.Input("k", 2, 6, 8), w.Input("v", 2, 6, 8)
		s := w.Must(G.Sub(w.BMM(q, k, false, true), w.Constant("mask", graphtest.CausalMask(2*3, 4, 6, 1e6), 2, 3*4, 6)))
		return []*G.Node{w.BMM(w.Softmax(w.Times(s, w.Number(0.35)), 2), v)}
	}},
	{name: "a mask computed of constants", matches: 1, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 3, 5, 4), w.Input("k", 3, 5, 4), w.Input("v", 3, 5, 4)
		lower := graphtest.CausalMask(1, 5, 5, -1) // (lower + 1 - 1) * 1e9
		m := w.Times(w.Must(G.Neg(w.Must(G.Neg(w.Constant("lower", lower, 1, 5, 5))))), w.Number(1e9))
		s := w.Must(G.BroadcastAdd(w.BMM(q, k, false, true), m, nil, []byte{0}))
		return []*G.Node{w.BMM(w.Softmax(s, 2), v)}
	}},
	{name: "masks for all heads of all sequences, and for half of them", matches: 1, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 3, 2, 4, 4), w.Input("k", 3, 2, 4, 4), w.Input("v", 3, 2, 4, 4)
		s := w.Must(G.BroadcastAdd(w.BMM(q, k, false, true), w.Constant("mask", graphtest.CausalMask(1, 4, 4, -1e9), 1, 1, 4, 4), nil, []byte{0, 1}))
		s = w.Must(G.BroadcastAdd(w.Shape(s, 2, 3, 4, 4), w.Constant("masks", graphtest.CausalMask(3, 4, 4, -1e6), 1, 3, 4, 4), nil, []byte{0}))
		return []*G.Node{w.BMM(w.Shape(w.Softmax(s, 3), 3, 2, 4, 4), v)}
	}},
	{name: "keys that come transposed, many queries", matches: 1, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, kt, v := w.Input("q", 2, 16, 8), w.Input("kt", 2, 8, 9), w.Input("v", 2, 9, 8)
		return []*G.Node{w.BMM(w.Softmax(w.Times(w.BMM(q, kt), w.Number(0.3)), 2), v)}
	}},
	{name: "scores and weights in one row on the way", matches: 1, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		s := w.Times(w.Shape(w.BMM(w.Input("q", 2, 3, 4), w.Input("k", 2, 5, 4), false, true), 30), w.Number(0.5))
		s = w.Shape(w.Add(s, w.Constant("mask", graphtest.CausalMask(2, 3, 5, -1e9), 30)), 6, 5)
		return []*G.Node{w.BMM(w.Shape(w.Shape(w.Softmax(s, 1), 30), 2, 3, 5), w.Input("v", 2, 5, 6))}
	}},
	{name: "weights in another stack of the same matrices", matches: 1, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		s := w.BMM(w.Input("q", 2, 2, 3, 4), w.Input("k", 2, 2, 5, 4), false, true)
		return []*G.Node{w.BMM(w.Shape(w.Softmax(s, 3), 4, 3, 5), w.Input("v", 4, 5, 6))}
	}},
	{name: "keys that are transposed and in other rows", matches: 1, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, v := w.Input("q", 2, 70, 8), w.Input("v", 2, 9, 8)
		kt := w.Shape(w.Input("k", 2, 9, 8), 2, 8, 9)
		return []*G.Node{w.BMM(w.Softmax(w.Times(w.BMM(q, kt), w.Number(0.3)), 2), v)}
	}},
	{name: "attention of attention", matches: 2, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		x := w.Input("x", 2, 4, 4)
		a := w.BMM(w.Softmax(w.BMM(x, x, false, true), 2), x)
		b := w.BMM(w.Softmax(w.BMM(a, a, false, true), 2), a)
		return []*G.Node{b, a}
	}},
	{name: "two roots, a shared part, reads inside", matches: 2, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		x := w.Input("x", 3, 4, 4)
		y := w.Must(G.Tanh(x))
		a := w.BMM(w.Softmax(w.Times(w.BMM(y, y, false, true), w.Number(2)), 2), y)
		b := w.BMM(w.Softmax(w.Times(w.BMM(a, y, false, true), w.Number(2)), 2), a)
		return []*G.Node{w.Must(G.Sum(b)), w.Add(a, y)}
	}},
	{name: "default, causal, grouped", matches: 2, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 4, 3, 8), w.Input("k", 2, 2, 7, 8), w.Input("v", 2, 2, 7, 8)
		a := w.Must(la.Default(q, k, v, la.WithCausal()))
		return []*G.Node{w.Must(la.Default(a, k, v, la.WithCausal(), la.WithScale(-0.7)))}
	}},
}

// TestFuse rewrites decoders of many hands.
func TestFuse(t *testing.T) { testFuse(t, decoders) }

func testFuse(t *testing.T, all []written) {
	rng := reftest.Rand(t)
	for _, d := range all {
		for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			t.Run(d.name+" "+dtype.String(), func(t *testing.T) {
				w := graphtest.NewWriter(t, rng, dtype)
				roots := d.write(w)
				f := w.Fuse(roots, graphtest.Read(roots...))
				d.check(t, f)
			})
		}
	}
}

// check compares what Fuse did with what it was to do.
func (d *written) check(t *testing.T, f *rewrite.Fused) {
	t.Helper()
	if len(f.Matches) != d.matches || graphtest.Count(f.Graph, "LeanAttention") != d.matches {
		t.Errorf("%d matches and %d nodes of attention, want %d\n%v", len(f.Matches), graphtest.Count(f.Graph, "LeanAttention"), d.matches, f)
	}
	for _, m := range f.Matches {
		if strings.Contains(m.String(), ", causal") != d.causal || strings.Contains(m.String(), ", bias ") != d.bias {
			t.Errorf("causal is to be %t, a bias %t\n%v", d.causal, d.bias, m)
		}
	}
	d.checkMisses(t, f)
	if d.gone != "" && len(d.misses) == 0 && graphtest.Count(f.Graph, d.gone) > 0 {
		t.Errorf("%d nodes of %s are left", graphtest.Count(f.Graph, d.gone), d.gone)
	}
}

// checkMisses compares the reasons, each of which says in one line what to change.
func (d *written) checkMisses(t *testing.T, f *rewrite.Fused) {
	t.Helper()
	if len(f.Misses) != len(d.misses) {
		t.Fatalf("%d misses, want %d\n%v", len(f.Misses), len(d.misses), f)
	}
	for i, m := range f.Misses {
		_, reason, _ := strings.Cut(m.String(), ": ")
		if !strings.Contains(reason, d.misses[i]) || m.Node != nil || m.Output == nil {
			t.Errorf("miss %d is %q, want %q", i, reason, d.misses[i])
		}
		if !strings.Contains(reason, ": ") || strings.Contains(reason, "\n") {
			t.Errorf("miss %d does not say in one line what to change: %q", i, reason)
		}
	}
}

// edited is the causal mask of qkv with one number changed.
func edited(at int, x float64) []float64 {
	m := graphtest.CausalMask(2, 3, 5, -1e9)
	m[at] = x
	return m
}

func one(n *G.Node) []*G.Node { return []*G.Node{n} }

// almost is a probability of Dropout that drops nothing, though Gorgonia tries.
const almost = 1e-300

// leftAlone is what is not attention, or not surely, each with the reason.
var leftAlone = []written{
	{name: "another axis", misses: []string{"it goes along axis 1 of (2, 3, 5), and its product with values, node 5 (A ××× B), sums over the other axis"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.BMM(w.Softmax(w.BMM(q, k, false, true), 1), v))
	}},
	{name: "an axis of heads", misses: []string{"axis 0 of (2, 3, 5)"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.BMM(w.Softmax(w.BMM(q, k, false, true), 0), v))
	}},
	{name: "columns: SoftMax takes the first axis of (n, 1)", misses: []string{"are transposed, at node"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3, 4), w.Input("k", 2, 1, 4), w.Input("v", 2, 1, 6)
		p := w.Softmax(w.Shape(w.BMM(q, k, false, true), 6, 1))
		return one(w.BMM(w.Shape(p, 2, 3, 1), v))
	}},
	{name: "scale of each score", misses: []string{"not one number for all of them: scale queries or keys"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node {
			x := make([]float64, 30)
			for i := range x {
				x[i] = 1 + float64(i)
			}
			return w.Times(s, w.Constant("scales", x, 2, 3, 5))
		}))
	}},
	{name: "a number divided by scores", misses: []string{"its scores divide something, at"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Over(w.Number(0.5), s) }))
	}},
	{name: "default with a soft cap", misses: []string{"anh"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.Must(la.Default(q, k, v, la.WithSoftCap(2))))
	}},
	{name: "mask that starts anew in the middle of a head", misses: []string{"repeated in a way that is not that of its heads and queries"}, write: func(w *graphtest.Writer) []*G.Node {
		s := w.Shape(w.BMM(w.Input("q", 3, 4, 4), w.Input("k", 3, 5, 4), false, true), 4, 3, 5)
		m := w.Constant("mask", graphtest.CausalMask(2, 2, 5, -1e9)[:15], 1, 3, 5)
		s = w.Shape(w.Must(G.BroadcastAdd(s, m, nil, []byte{0})), 3, 4, 5)
		return one(w.BMM(w.Softmax(s, 2), w.Input("v", 3, 5, 4)))
	}},
	{name: "two masks, the second of which hides more in the last head", misses: []string{"2 masks that are not causal"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		s := w.Must(G.BroadcastAdd(w.BMM(q, k, false, true), w.Constant("mask", graphtest.CausalMask(1, 3, 5, -1e9), 1, 3, 5), nil, []byte{0}))
		s = w.Add(s, w.Constant("more", edited(26, -1e9), 2, 3, 5))
		return one(w.BMM(w.Softmax(s, 2), v))
	}},
	{name: "masks that take each other away", misses: []string{"2 masks that are not causal"}, write: func(w *graphtest.Writer) []*G.Node {
		m := w.Constant("mask", graphtest.CausalMask(2, 3, 5, -1e4), 2, 3, 5)
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Add(w.Must(G.Sub(s, m)), m) }))
	}},
	{name: "scores of another attention added", matches: 1, bias: true, misses: []string{"its scores are needed elsewhere"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		s := w.BMM(q, k, false, true)
		a := w.BMM(w.Softmax(s, 2), v)
		more := w.Add(w.BMM(q, w.Must(G.Tanh(k)), false, true), s)
		return []*G.Node{a, w.BMM(w.Softmax(more, 2), v)}
	}},
	{name: "a mask and a bias that are both inputs", misses: []string{"2 masks that are not causal, at node 5 (+ false) and node 7 (+ false)"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Add(w.Add(s, w.Input("bias", 2, 3, 5)), w.Input("mask", 2, 3, 5)) }))
	}},
	{name: "scores taken away from something", misses: []string{"its scores are taken away from something, at node 5 (- false)"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Must(G.Sub(w.Input("bias", 2, 3, 5), s)) }))
	}},
	{name: "mask computed from the scores", misses: []string{"its scores are needed elsewhere"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Add(s, w.Must(G.Tanh(s))) }))
	}},
	{name: "mask for some of the heads that share keys", misses: []string{"repeated in a way that is not"}, write: func(w *graphtest.Writer) []*G.Node {
		s := w.BMM(w.Input("q", 2, 3, 4, 4), w.Input("k", 2, 3, 6, 4), false, true)
		s = w.Must(G.BroadcastAdd(s, w.Constant("causal", graphtest.CausalMask(2, 2, 6, -1e9), 1, 1, 4, 6), nil, []byte{0, 1}))
		s = w.Must(G.BroadcastAdd(s, w.Input("mask", 1, 3, 4, 6), nil, []byte{0}))
		return one(w.BMM(w.Softmax(s, 3), w.Input("v", 2, 3, 6, 4)))
	}},
	{name: "mask of a number for each query", misses: []string{"is computed from its scores"}, write: func(w *graphtest.Writer) []*G.Node {
		m := w.Input("mask", 2, 3, 1)
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Must(G.BroadcastAdd(s, m, nil, []byte{2})) }))
	}},
	{name: "nothing but sums", misses: []string{"its scores come from node 2 (+ false), not from a product"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.BMM(w.Softmax(w.Add(w.Input("a", 2, 3, 5), w.Input("b", 2, 3, 5)), 2), w.Input("v", 2, 5, 6)))
	}},
	{name: "dropout of all weights", misses: []string{"(Dropout{training=true}()), which drops with probability 1: "}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Behind(func(p *G.Node) *G.Node { return w.Must(G.Dropout(p, 1)) }))
	}},
	{name: "dropout of too many weights", misses: []string{"which drops with probability 1.5: "}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Behind(func(p *G.Node) *G.Node { return w.Must(G.Dropout(p, 1.5)) }))
	}},
	{name: "dropout of scores", misses: []string{"its scores come from node 4 (Dropout{"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Must(G.Dropout(s, almost)) }))
	}},
	{name: "weights scaled", misses: []string{"(⊙ false), not into a product"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Behind(func(p *G.Node) *G.Node { return w.Times(p, w.Number(2)) }))
	}},
	{name: "weights are a root", misses: []string{"needed 3 times"}, write: func(w *graphtest.Writer) []*G.Node {
		var p *G.Node
		o := w.Behind(func(x *G.Node) *G.Node { p = x; return x })
		return []*G.Node{o, p}
	}},
	{name: "weights are read", misses: []string{"needed 2 times"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Behind(func(p *G.Node) *G.Node { G.Read(p, new(G.Value)); return p }))
	}},
	{name: "scores are read", misses: []string{"needed elsewhere too, at node 3 (A ××× Bᵀ)"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node { G.Read(s, new(G.Value)); return s }))
	}},
	{name: "weights used twice", misses: []string{"needed 2 times"}, write: func(w *graphtest.Writer) []*G.Node {
		var p *G.Node
		o := w.Behind(func(x *G.Node) *G.Node { p = x; return x })
		return []*G.Node{o, w.BMM(p, w.Input("v2", 2, 5, 6))}
	}},
	{name: "weights transposed", misses: []string{"it goes along axis 2 of (2, 5, 5), and its product with values, node 5 (Aᵀ ××× B), sums over the other axis"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k := w.Input("q", 2, 5, 4), w.Input("k", 2, 5, 4)
		return one(w.BMM(w.Softmax(w.BMM(q, k, false, true), 2), w.Input("v", 2, 5, 6), true))
	}},
	{name: "weights on the right", misses: []string{"sums over the other axis"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k := w.Input("q", 2, 5, 4), w.Input("k", 2, 5, 4)
		return one(w.BMM(w.Input("v", 2, 6, 5), w.Softmax(w.BMM(q, k, false, true), 2)))
	}},
	{name: "weights in other rows", misses: []string{"its rows are not those of node 5 (Reshape(2, 5, 3))"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, _ := w.QKV()
		return one(w.BMM(w.Shape(w.Softmax(w.BMM(q, k, false, true), 2), 2, 5, 3), w.Input("u", 2, 3, 4)))
	}},
	{name: "scores in other rows", misses: []string{"its rows are not those of node 3 (A ××× Bᵀ)"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, _ := w.QKV()
		return one(w.BMM(w.Softmax(w.Shape(w.BMM(q, k, false, true), 2, 5, 3), 2), w.Input("u", 2, 3, 4)))
	}},
	{name: "scores in other stacks", misses: []string{"2 matrices of 6 rows and its weights 3 of 4"}, write: func(w *graphtest.Writer) []*G.Node {
		s := w.BMM(w.Input("q", 2, 6, 4), w.Input("k", 2, 5, 4), false, true)
		return one(w.BMM(w.Shape(w.Softmax(s, 2), 3, 4, 5), w.Input("v", 3, 5, 4)))
	}},
	{name: "no product of scores", misses: []string{"its scores come from node 1 (tanh)"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.BMM(w.Softmax(w.Must(G.Tanh(w.Input("s", 2, 3, 5))), 2), w.Input("v", 2, 5, 6)))
	}},
	{name: "a classifier", misses: []string{"its result is needed 2 times"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Softmax(w.Mul(w.Input("x", 3, 4), w.Weight(4, 6))))
	}},
	{name: "keys come transposed, few queries", misses: []string{"come transposed, and for 15 queries"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.BMM(w.Softmax(w.BMM(w.Input("q", 2, 15, 4), w.Input("kt", 2, 4, 5)), 2), w.Input("v", 2, 5, 6)))
	}},
	{name: "values come transposed, few queries", misses: []string{"come transposed, and for 3 queries"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.BMM(w.Softmax(w.BMM(w.Input("q", 2, 3, 4), w.Input("k", 2, 5, 4), false, true), 2), w.Input("vt", 2, 6, 5), false, true))
	}},
	{name: "keys and values come transposed, not many queries", misses: []string{"come transposed, and for 31 queries"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.BMM(w.Softmax(w.BMM(w.Input("q", 2, 31, 4), w.Input("kt", 2, 4, 5)), 2), w.Input("vt", 2, 6, 5), false, true))
	}},
	{name: "exponentials over their sum and a little", misses: []string{"which is made of their sum, node 5 (Σ[2]), and more"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		e := w.Must(G.Exp(w.BMM(q, k, false, true)))
		sum := w.Add(w.Column(w.Must(G.Sum(e, 2)), e, 2), w.Number(1e-3))
		return one(w.BMM(w.Must(G.BroadcastHadamardDiv(e, sum, nil, []byte{2})), v))
	}},
	{name: "exponentials over a sum of all", misses: []string{"a sum over several axes"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		e := w.Must(G.Exp(w.BMM(q, k, false, true)))
		return one(w.BMM(w.Over(e, w.Must(G.Sum(e))), v))
	}},
	{name: "exponentials over a sum along another axis", misses: []string{"it goes along axis 1 of (2, 3, 5)"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.BMM(w.ByHand(w.BMM(q, k, false, true), 1, false), v))
	}},
	{name: "exponentials over the sum of others", misses: []string{"it divides exponentials, node 4 (exp), by a sum of others, node 7 (Σ[2])"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		e, f := w.Must(G.Exp(w.BMM(q, k, false, true))), w.Must(G.Exp(w.Input("s", 2, 3, 5)))
		return one(w.BMM(w.Must(G.BroadcastHadamardDiv(e, w.Column(w.Must(G.Sum(f, 2)), f, 2), nil, []byte{2})), v))
	}},
	{name: "exponentials that are a root", misses: []string{"its exponentials or their sum are needed elsewhere"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		e := w.Must(G.Exp(w.BMM(q, k, false, true)))
		return []*G.Node{w.BMM(w.Must(G.BroadcastHadamardDiv(e, w.Column(w.Must(G.Sum(e, 2)), e, 2), nil, []byte{2})), v), e}
	}},
	{name: "the maximum of each key taken off", misses: []string{"its scores are needed elsewhere"}, write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node {
			return w.Must(G.BroadcastSub(s, w.Column(w.Must(G.Max(s, 1)), s, 1), nil, []byte{1}))
		}))
	}},
	{name: "columns in one row on the way, and masked there", misses: []string{"are transposed, at node"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		m := w.Constant("mask", graphtest.CausalMask(2, 3, 5, -1e9), 30)
		s := w.Shape(w.Add(w.Shape(w.BMM(k, q, false, true), 30), m), 2, 5, 3)
		return one(w.BMM(w.ByHand(s, 1, false), v, true))
	}},
	{name: "columns reshaped on the way", misses: []string{"are transposed, at node"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		s := w.Shape(w.Shape(w.BMM(k, q, false, true), 30), 2, 5, 3)
		return one(w.BMM(w.ByHand(s, 1, false), v, true))
	}},
	{name: "the logarithm", misses: []string{"by way of node 4 (Softmax{2, true}())"}, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.BMM(w.Must(G.LogSoftMax(w.BMM(q, k, false, true), 2)), v))
	}},
	{name: "nothing of the kind", write: func(w *graphtest.Writer) []*G.Node {
		return one(w.FeedForward(w.Input("x", 3, 4)))
	}},
}

// TestFuseLeavesAlone: what is not understood stays, and the report says why.
func TestFuseLeavesAlone(t *testing.T) {
	rng := reftest.Rand(t)
	for _, d := range leftAlone {
		t.Run(d.name, func(t *testing.T) {
			w := graphtest.NewWriter(t, rng, tensor.Float64)
			roots := d.write(w)
			d.check(t, w.Fuse(roots, graphtest.Read(roots...)))
		})
	}
}

// TestFuseOneOfMany: what stands in the way of one layer does not in the way of
// others.
func TestFuseOneOfMany(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float32)
	x := w.Input("x", 2, 4, 4)
	for i := range 5 {
		p := w.Softmax(w.BMM(x, x, false, true), 2)
		if i == 2 {
			p = w.Must(G.Dropout(p, 1))
		}
		x = w.Must(G.Tanh(w.BMM(p, x)))
	}
	(&written{matches: 4, misses: []string{"Dropout"}}).check(t, w.Fuse([]*G.Node{x}, graphtest.Read(x)))
}

// TestFuseReads: what is read in the old graph is read in the new one, also
// what no root needs, and an input without a value is bound under its new node.
func TestFuseReads(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	x := G.NewTensor(w.G, w.DType, 3, G.WithShape(2, 3, 4), G.WithName("x"))
	unbound := G.NewTensor(w.G, w.DType, 3, G.WithShape(2, 3, 4), G.WithName("of no use"))
	o := w.Must(G.Tanh(w.BMM(w.Softmax(w.BMM(x, x, false, true), 2), x)))
	aside := w.Must(G.Exp(x))
	reads := graphtest.Read(aside, o)
	f, err := rewrite.Fuse(o)
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Matches) != 1 || f.Node(aside) == nil || f.Node(unbound) != nil || f.Node(x).Value() != nil {
		t.Fatalf("%v, x has value %v", f, f.Node(x).Value())
	}
	if f.Node(f.Matches[0].Output) != f.Matches[0].Node {
		t.Error("the node of the match is not the image of its output")
	}
	value := w.Random(2, 3, 4)
	graphtest.Let(t, x, value)
	graphtest.Let(t, unbound, value)
	want := graphtest.Outputs(t, w.G, reads)
	graphtest.Let(t, f.Node(x), value)
	got := graphtest.Outputs(t, f.Graph, reads)
	for i := range want {
		if err := graphtest.Near(got[i], want[i], w.DType); err != nil {
			t.Error(err)
		}
	}
}

// TestFuseSet: the other statement goes along too.
func TestFuseSet(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	x, y := w.Input("x", 2, 3), w.Input("y", 2, 3)
	set := G.Set(x, w.Must(G.Tanh(y)))
	f, err := rewrite.Fuse(w.Must(G.Exp(x)))
	if err != nil || f.Node(set) == nil || graphtest.Count(f.Graph, "tanh") != 1 || f.Node(set).Op() != set.Op() {
		t.Errorf("%v, %v", f, err)
	}
}

// TestFuseNames: nodes keep the names that they were given, and get no others.
func TestFuseNames(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.Input("x", 2, 3, 4)
	o := w.BMM(w.Softmax(w.BMM(x, x, false, true), 2), x)
	G.WithName("layer 1")(o)
	y := w.Must(G.Tanh(o))
	f := w.Fuse([]*G.Node{y}, graphtest.Read(y))
	if got := f.Node(o).Name(); got != "layer 1" {
		t.Errorf("the attention is called %q", got)
	}
	if len(f.Graph.ByName("")) != 1 || f.Node(x).Name() != x.Name() {
		t.Errorf("of one node without a name %d are left; the input is %q", len(f.Graph.ByName("")), f.Node(x).Name())
	}
}

// TestFuseShares: ops with a state and values are the same ones, and a graph
// rewritten twice has nothing left to match.
func TestFuseShares(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.Input("x", 2, 3, 4)
	d := w.Must(G.Dropout(x, 0))
	o := w.BMM(w.Softmax(w.BMM(d, d, false, true), 2), d)
	f := w.Fuse([]*G.Node{o}, graphtest.Read(o))
	if f.Node(d).Op() != d.Op() {
		t.Error("a Dropout is another one")
	}
	again, err := rewrite.Fuse(f.Roots...)
	if err != nil || len(again.Matches) != 0 || len(again.Misses) != 0 {
		t.Errorf("a second time: %v, %v", again, err)
	}
	if f.Node(nil) != nil || f.Node(f.Roots[0]) != nil {
		t.Error("nodes that are not of the old graph have images")
	}
}

// TestFuseGradients: a graph with gradients is rebuilt with them, unmatched,
// because gradients read the weights.
func TestFuseGradients(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.Input("x", 2, 3, 4)
	o := w.BMM(w.Softmax(w.BMM(x, w.Must(G.Tanh(x)), false, true), 2), x)
	cost := w.Must(G.Sum(o))
	grads, err := G.Grad(cost, x)
	if err != nil {
		t.Fatal(err)
	}
	roots := append([]*G.Node{cost}, grads...)
	f := w.Fuse(roots, graphtest.Read(roots...))
	(&written{misses: []string{"needed 3 times"}}).check(t, f)
	if f.Node(x).Deriv() != f.Node(grads[0]) {
		t.Error("the input has another gradient node")
	}
}

// TestFuseInfinity: a scale that is not a number stays where it is.
func TestFuseInfinity(t *testing.T) {
	rng := reftest.Rand(t)
	for name, scale := range map[string]func(w *graphtest.Writer, x *G.Node) *G.Node{
		"infinite": func(w *graphtest.Writer, x *G.Node) *G.Node { return w.Times(x, w.Number(math.Inf(1))) },
		"over 0":   func(w *graphtest.Writer, x *G.Node) *G.Node { return w.Over(x, w.Number(0)) },
		"too much": func(w *graphtest.Writer, x *G.Node) *G.Node {
			return w.Times(w.Times(x, w.Number(1e200)), w.Number(1e201))
		},
		"not a number": func(w *graphtest.Writer, x *G.Node) *G.Node { return w.Add(x, w.Number(math.NaN())) },
	} {
		w := graphtest.NewWriter(t, rng, tensor.Float64)
		f, err := rewrite.Fuse(w.Attend(func(s *G.Node) *G.Node { return scale(w, s) }))
		if err != nil || len(f.Matches) != 0 || len(f.Misses) != 1 {
			t.Errorf("%s: %v, %v", name, f, err)
		}
	}
}

// edge is an edge from the outside.
type edge struct{ from, to *G.Node }

func (e edge) From() gonum.Node         { return e.from }
func (e edge) To() gonum.Node           { return e.to }
func (e edge) ReversedEdge() gonum.Edge { return edge{e.to, e.from} }

// TestFuseRewired: a graph that was changed by hand may have nodes before their
// inputs.
func TestFuseRewired(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	y := w.Must(G.Tanh(w.Input("x", 2, 3, 6)))
	v, k, q := w.Input("v", 2, 5, 6), w.Input("k", 2, 5, 4), w.Must(G.Exp(w.Input("q", 2, 3, 4)))
	o := w.BMM(w.Softmax(w.BMM(q, k, false, true), 2), v)
	G.WithChildren(G.Nodes{o})(y)
	w.G.SetEdge(edge{y, o})
	want := slices.Clone(graphtest.Floats(t, evaluate(t, y, make(map[*G.Node]G.Value))))
	f, err := rewrite.Fuse(y)
	if err != nil || len(f.Matches) != 1 {
		t.Fatalf("%v, %v", f, err)
	}
	if err := graphtest.Near(graphtest.Outputs(t, f.Graph, graphtest.Read(f.Roots...))[0], want, w.DType); err != nil {
		t.Error(err)
	}
}

// TestFuseOverlap: of two attentions of which one's output is the other's scores
// one is replaced.
func TestFuseOverlap(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	s := w.BMM(w.Softmax(w.BMM(w.Input("q", 2, 32, 4), w.Input("k", 2, 5, 4), false, true), 2), w.Input("v", 2, 5, 6))
	o := w.BMM(w.Softmax(s, 2), w.Input("u", 2, 6, 4))
	(&written{matches: 1, misses: []string{"part of another attention"}}).check(t, w.Fuse([]*G.Node{o}, graphtest.Read(o)))
}

// TestFuseMerges: two ways to write one attention become one node, and so do the
// nodes behind them; their types stay those of the old graph's too.
func TestFuseMerges(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	q, k, v := w.QKV()
	half := w.Number(0.5)
	a := w.Shape(w.BMM(w.Softmax(w.Times(w.BMM(q, k, false, true), half), 2), v), 3, 2, 2, 3)
	b := w.Shape(w.BMM(w.Softmax(w.BMM(w.Times(q, half), k, false, true), 2), v), 3, 2, 2, 3)
	c := w.Add(w.Must(G.Tanh(a)), b)
	f := w.Fuse([]*G.Node{c}, graphtest.Read(c))
	if len(f.Matches) != 2 || f.Matches[0].Node != f.Matches[1].Node || f.Node(a) != f.Node(b) || a == b {
		t.Errorf("%v", f)
	}
}

// TestFuseOverwritten: Gorgonia may write over a node by way of its Reshape, so
// an attention that would read it later than the products did stays. What is
// written over under the operand's own node waits.
func TestFuseOverwritten(t *testing.T) {
	rng := reftest.Rand(t)
	for name, c := range map[string]struct {
		written
		late func(w *graphtest.Writer, k *G.Node) *G.Node
	}{
		"a Reshape":  {written{misses: []string{"may overwrite an operand"}}, func(w *graphtest.Writer, k *G.Node) *G.Node { return w.Times(w.Shape(k, 40), w.Number(3)) }},
		"the node":   {written{matches: 1}, func(w *graphtest.Writer, k *G.Node) *G.Node { return w.Times(k, w.Number(3)) }},
		"a new node": {written{matches: 1}, func(w *graphtest.Writer, k *G.Node) *G.Node { return w.Must(G.Exp(w.Shape(k, 40))) }},
	} {
		t.Run(name, func(t *testing.T) {
			w := graphtest.NewWriter(t, rng, tensor.Float64)
			q, k := w.Input("q", 1, 2, 1, 3, 4), w.Must(G.Tanh(w.Input("k", 1, 2, 1, 5, 4)))
			s := w.BMM(q, k, false, true)
			late := c.late(w, k)
			v := w.Must(G.Exp(w.Input("v", 1, 2, 1, 5, 6)))
			o := w.BMM(w.Softmax(s, 4), v)
			c.check(t, w.Fuse([]*G.Node{o, late}, graphtest.Read(o, late)))
		})
	}
}

// TestFuseHeadsApart: where the projections of heads may be overwritten before all
// of the heads are there, each head is an attention of its own.
func TestFuseHeadsApart(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.Must(G.Tanh(w.Input("x", 4, 8)))
	late := w.Times(w.Shape(x, 32), w.Number(3))
	o := w.Loop(2, x, w.Input("k", 4, 8), w.Input("v", 4, 8), func(q, k, v *G.Node) *G.Node {
		return w.Mul(w.Softmax(w.Mul(q, w.Swap(k))), v)
	})
	roots := []*G.Node{o, late}
	f, err := rewrite.Fuse(roots...)
	if err != nil {
		t.Fatal(err)
	}
	(&written{matches: 2}).check(t, f)
}

// TestFuseTwice: what two attentions do with one operand is done for each, where
// it stood.
func TestFuseTwice(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	q := w.Must(G.Tanh(w.Input("q", 1, 2, 1, 3, 4)))
	attention := func(k, v string) *G.Node {
		return w.BMM(w.Softmax(w.BMM(q, w.Input(k, 1, 2, 1, 5, 4), false, true), 4), w.Input(v, 1, 2, 1, 5, 6))
	}
	a := attention("k1", "v1")
	late := w.Times(q, w.Number(3))
	b := attention("k2", "v2")
	(&written{matches: 2}).check(t, w.Fuse([]*G.Node{a, late, b}, graphtest.Read(a, late, b)))
}

// TestFuseCollision: where Gorgonia takes two nodes for one Fuse says so.
func TestFuseCollision(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	nameA, nameB := w.Colliding(w.Input("x", 2, 3, 4))
	a, b := w.Input(nameA, 2, 3, 4), w.Input(nameB, 2, 3, 4)
	if f, err := rewrite.Fuse(w.Add(a, b)); f != nil || !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), nameB) {
		t.Errorf("inputs: %v, %v", f, err)
	}
	_, k, v := w.QKV()
	half := w.Number(0.5)
	x := w.BMM(w.Softmax(w.Times(w.BMM(a, k, false, true), half), 2), v)
	y := w.BMM(w.Softmax(w.BMM(w.Times(b, half), k, false, true), 2), v)
	if f, err := rewrite.Fuse(x, y); f != nil || !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), "other inputs; rename") {
		t.Errorf("attentions: %v, %v", f, err)
	}
}

func TestFuseErrors(t *testing.T) {
	w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.Input("x", 2, 3)
	other := graphtest.NewWriter(t, w.Rng, tensor.Float64).Input("x", 2, 3)
	for name, roots := range map[string][]*G.Node{
		"none": nil, "nil": {x, nil}, "two graphs": {x, other}, "no graph": {G.NewConstant(1.0)},
	} {
		if f, err := rewrite.Fuse(roots...); f != nil || !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), "rewrite.Fuse") {
			t.Errorf("%s: %v, %v", name, f, err)
		}
	}
	f, err := rewrite.Fuse(x)
	if err != nil || f.Roots[0].Value() != x.Value() || f.String() != "0 fused, 0 left alone\n" {
		t.Errorf("an input alone: %v, %v", f, err)
	}
}
