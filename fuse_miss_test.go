package leanattention_test

import (
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// qkv is operands of attention with 3 queries and 5 keys.
func (w *writer) qkv() (q, k, v *G.Node) {
	return w.input("q", 2, 3, 4), w.input("k", 2, 5, 4), w.input("v", 2, 5, 6)
}

// attend is attention whose scores go through f.
func (w *writer) attend(f func(scores *G.Node) *G.Node) *G.Node {
	q, k, v := w.qkv()
	return w.bmm(w.softmax(f(w.bmm(q, k, false, true)), 2), v)
}

// behind is attention whose weights go through f.
func (w *writer) behind(f func(weights *G.Node) *G.Node) *G.Node {
	q, k, v := w.qkv()
	return w.bmm(f(w.softmax(w.bmm(q, k, false, true), 2)), v)
}

// added is attention with a mask.
func (w *writer) added(mask *G.Node) []*G.Node {
	return []*G.Node{w.attend(func(s *G.Node) *G.Node { return w.add(s, mask) })}
}

// edited is the causal mask of qkv with one number changed.
func edited(at int, x float64) []float64 {
	m := causalMask(2, 3, 5, -1e9)
	m[at] = x
	return m
}

func one(n *G.Node) []*G.Node { return []*G.Node{n} }

// almost is a probability of Dropout that drops nothing, though Gorgonia tries.
const almost = 1e-300

// leftAlone is what is not attention, or not surely, each with the reason.
var leftAlone = []written{
	{name: "another axis", misses: []string{"not the left side, untransposed"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.softmax(w.bmm(q, k, false, true), 1), v))
	}},
	{name: "an axis of heads", misses: []string{"axis 0 of (2, 3, 5)"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.softmax(w.bmm(q, k, false, true), 0), v))
	}},
	{name: "columns: SoftMax takes the first axis of (n, 1)", misses: []string{"are transposed, at node"}, write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3, 4), w.input("k", 2, 1, 4), w.input("v", 2, 1, 6)
		p := w.softmax(w.shape(w.bmm(q, k, false, true), 6, 1))
		return one(w.bmm(w.shape(p, 2, 3, 1), v))
	}},
	{name: "scale of each score", misses: []string{"not one number for all of them: scale queries or keys"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node {
			x := make([]float64, 30)
			for i := range x {
				x[i] = 1 + float64(i)
			}
			return w.times(s, w.constant("scales", x, 2, 3, 5))
		}))
	}},
	{name: "a number divided by scores", misses: []string{"its scores divide something, at"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { return w.over(w.number(0.5), s) }))
	}},
	{name: "default with a soft cap", misses: []string{"anh"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.must(la.Default(q, k, v, la.WithSoftCap(2))))
	}},
	{name: "mask that starts anew in the middle of a head", misses: []string{"repeated in a way that is not that of its heads and queries"}, write: func(w *writer) []*G.Node {
		s := w.shape(w.bmm(w.input("q", 3, 4, 4), w.input("k", 3, 5, 4), false, true), 4, 3, 5)
		m := w.constant("mask", causalMask(2, 2, 5, -1e9)[:15], 1, 3, 5)
		s = w.shape(w.must(G.BroadcastAdd(s, m, nil, []byte{0})), 3, 4, 5)
		return one(w.bmm(w.softmax(s, 2), w.input("v", 3, 5, 4)))
	}},
	{name: "two masks, the second of which hides more in the last head", misses: []string{"2 masks that are not causal"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		s := w.must(G.BroadcastAdd(w.bmm(q, k, false, true), w.constant("mask", causalMask(1, 3, 5, -1e9), 1, 3, 5), nil, []byte{0}))
		s = w.add(s, w.constant("more", edited(26, -1e9), 2, 3, 5))
		return one(w.bmm(w.softmax(s, 2), v))
	}},
	{name: "masks that take each other away", misses: []string{"2 masks that are not causal"}, write: func(w *writer) []*G.Node {
		m := w.constant("mask", causalMask(2, 3, 5, -1e4), 2, 3, 5)
		return one(w.attend(func(s *G.Node) *G.Node { return w.add(w.must(G.Sub(s, m)), m) }))
	}},
	{name: "scores of another attention added", matches: 1, bias: true, misses: []string{"its scores are needed elsewhere"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		s := w.bmm(q, k, false, true)
		a := w.bmm(w.softmax(s, 2), v)
		more := w.add(w.bmm(q, w.must(G.Tanh(k)), false, true), s)
		return []*G.Node{a, w.bmm(w.softmax(more, 2), v)}
	}},
	{name: "a mask and a bias that are both inputs", misses: []string{"2 masks that are not causal, at node 5 (+ false) and node 7 (+ false)"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { return w.add(w.add(s, w.input("bias", 2, 3, 5)), w.input("mask", 2, 3, 5)) }))
	}},
	{name: "scores taken away from something", misses: []string{"its scores are taken away from something, at node 5 (- false)"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { return w.must(G.Sub(w.input("bias", 2, 3, 5), s)) }))
	}},
	{name: "mask computed from the scores", misses: []string{"its scores are needed elsewhere"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { return w.add(s, w.must(G.Tanh(s))) }))
	}},
	{name: "mask for some of the heads that share keys", misses: []string{"repeated in a way that is not"}, write: func(w *writer) []*G.Node {
		s := w.bmm(w.input("q", 2, 3, 4, 4), w.input("k", 2, 3, 6, 4), false, true)
		s = w.must(G.BroadcastAdd(s, w.constant("causal", causalMask(2, 2, 6, -1e9), 1, 1, 4, 6), nil, []byte{0, 1}))
		s = w.must(G.BroadcastAdd(s, w.input("mask", 1, 3, 4, 6), nil, []byte{0}))
		return one(w.bmm(w.softmax(s, 3), w.input("v", 2, 3, 6, 4)))
	}},
	{name: "mask of a number for each query", misses: []string{"is computed from its scores"}, write: func(w *writer) []*G.Node {
		m := w.input("mask", 2, 3, 1)
		return one(w.attend(func(s *G.Node) *G.Node { return w.must(G.BroadcastAdd(s, m, nil, []byte{2})) }))
	}},
	{name: "nothing but sums", misses: []string{"its scores come from node 2 (+ false), not from a product"}, write: func(w *writer) []*G.Node {
		return one(w.bmm(w.softmax(w.add(w.input("a", 2, 3, 5), w.input("b", 2, 3, 5)), 2), w.input("v", 2, 5, 6)))
	}},
	{name: "dropout of weights", misses: []string{"(Dropout{"}, write: func(w *writer) []*G.Node {
		return one(w.behind(func(p *G.Node) *G.Node { return w.must(G.Dropout(p, almost)) }))
	}},
	{name: "dropout of scores", misses: []string{"its scores come from node 4 (Dropout{"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { return w.must(G.Dropout(s, almost)) }))
	}},
	{name: "weights scaled", misses: []string{"(⊙ false), not into a product"}, write: func(w *writer) []*G.Node {
		return one(w.behind(func(p *G.Node) *G.Node { return w.times(p, w.number(2)) }))
	}},
	{name: "weights are a root", misses: []string{"needed 3 times"}, write: func(w *writer) []*G.Node {
		var p *G.Node
		o := w.behind(func(x *G.Node) *G.Node { p = x; return x })
		return []*G.Node{o, p}
	}},
	{name: "weights are read", misses: []string{"needed 2 times"}, write: func(w *writer) []*G.Node {
		return one(w.behind(func(p *G.Node) *G.Node { G.Read(p, new(G.Value)); return p }))
	}},
	{name: "scores are read", misses: []string{"needed elsewhere too, at node 3 (A ××× Bᵀ)"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { G.Read(s, new(G.Value)); return s }))
	}},
	{name: "weights used twice", misses: []string{"needed 2 times"}, write: func(w *writer) []*G.Node {
		var p *G.Node
		o := w.behind(func(x *G.Node) *G.Node { p = x; return x })
		return []*G.Node{o, w.bmm(p, w.input("v2", 2, 5, 6))}
	}},
	{name: "weights transposed", misses: []string{"not the left side, untransposed"}, write: func(w *writer) []*G.Node {
		q, k := w.input("q", 2, 5, 4), w.input("k", 2, 5, 4)
		return one(w.bmm(w.softmax(w.bmm(q, k, false, true), 2), w.input("v", 2, 5, 6), true))
	}},
	{name: "weights on the right", misses: []string{"not the left side, untransposed"}, write: func(w *writer) []*G.Node {
		q, k := w.input("q", 2, 5, 4), w.input("k", 2, 5, 4)
		return one(w.bmm(w.input("v", 2, 6, 5), w.softmax(w.bmm(q, k, false, true), 2)))
	}},
	{name: "weights in other rows", misses: []string{"its rows are not those of node 5 (Reshape(2, 5, 3))"}, write: func(w *writer) []*G.Node {
		q, k, _ := w.qkv()
		return one(w.bmm(w.shape(w.softmax(w.bmm(q, k, false, true), 2), 2, 5, 3), w.input("u", 2, 3, 4)))
	}},
	{name: "scores in other rows", misses: []string{"its rows are not those of node 3 (A ××× Bᵀ)"}, write: func(w *writer) []*G.Node {
		q, k, _ := w.qkv()
		return one(w.bmm(w.softmax(w.shape(w.bmm(q, k, false, true), 2, 5, 3), 2), w.input("u", 2, 3, 4)))
	}},
	{name: "scores in other stacks", misses: []string{"2 matrices of 6 rows and its weights 3 of 4"}, write: func(w *writer) []*G.Node {
		s := w.bmm(w.input("q", 2, 6, 4), w.input("k", 2, 5, 4), false, true)
		return one(w.bmm(w.shape(w.softmax(s, 2), 3, 4, 5), w.input("v", 3, 5, 4)))
	}},
	{name: "no product of scores", misses: []string{"its scores come from node 1 (tanh)"}, write: func(w *writer) []*G.Node {
		return one(w.bmm(w.softmax(w.must(G.Tanh(w.input("s", 2, 3, 5))), 2), w.input("v", 2, 5, 6)))
	}},
	{name: "a classifier", misses: []string{"its result is needed 2 times"}, write: func(w *writer) []*G.Node {
		return one(w.softmax(w.mul(w.input("x", 3, 4), w.weight(4, 6))))
	}},
	{name: "keys come transposed, few queries", misses: []string{"come transposed, and for 15 queries"}, write: func(w *writer) []*G.Node {
		return one(w.bmm(w.softmax(w.bmm(w.input("q", 2, 15, 4), w.input("kt", 2, 4, 5)), 2), w.input("v", 2, 5, 6)))
	}},
	{name: "values come transposed, few queries", misses: []string{"come transposed, and for 3 queries"}, write: func(w *writer) []*G.Node {
		return one(w.bmm(w.softmax(w.bmm(w.input("q", 2, 3, 4), w.input("k", 2, 5, 4), false, true), 2), w.input("vt", 2, 6, 5), false, true))
	}},
	{name: "keys and values come transposed, not many queries", misses: []string{"come transposed, and for 31 queries"}, write: func(w *writer) []*G.Node {
		return one(w.bmm(w.softmax(w.bmm(w.input("q", 2, 31, 4), w.input("kt", 2, 4, 5)), 2), w.input("vt", 2, 6, 5), false, true))
	}},
	{name: "exponentials over their sum and a little", misses: []string{"(÷ false), without a SoftMax"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		e := w.must(G.Exp(w.bmm(q, k, false, true)))
		sum := w.add(w.column(w.must(G.Sum(e, 2)), e, 2), w.number(1e-3))
		return one(w.bmm(w.must(G.BroadcastHadamardDiv(e, sum, nil, []byte{2})), v))
	}},
	{name: "exponentials over a sum of all", misses: []string{"a sum over several axes"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		e := w.must(G.Exp(w.bmm(q, k, false, true)))
		return one(w.bmm(w.over(e, w.must(G.Sum(e))), v))
	}},
	{name: "exponentials over a sum along another axis", misses: []string{"not the left side, untransposed"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.byHand(w.bmm(q, k, false, true), 1, false), v))
	}},
	{name: "exponentials over the sum of others", misses: []string{"without a SoftMax"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		e, f := w.must(G.Exp(w.bmm(q, k, false, true))), w.must(G.Exp(w.input("s", 2, 3, 5)))
		return one(w.bmm(w.must(G.BroadcastHadamardDiv(e, w.column(w.must(G.Sum(f, 2)), f, 2), nil, []byte{2})), v))
	}},
	{name: "exponentials that are a root", misses: []string{"its exponentials or their sum are needed elsewhere"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		e := w.must(G.Exp(w.bmm(q, k, false, true)))
		return []*G.Node{w.bmm(w.must(G.BroadcastHadamardDiv(e, w.column(w.must(G.Sum(e, 2)), e, 2), nil, []byte{2})), v), e}
	}},
	{name: "the maximum of each key taken off", misses: []string{"its scores are needed elsewhere"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node {
			return w.must(G.BroadcastSub(s, w.column(w.must(G.Max(s, 1)), s, 1), nil, []byte{1}))
		}))
	}},
	{name: "columns in one row on the way, and masked there", misses: []string{"are transposed, at node"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		m := w.constant("mask", causalMask(2, 3, 5, -1e9), 30)
		s := w.shape(w.add(w.shape(w.bmm(k, q, false, true), 30), m), 2, 5, 3)
		return one(w.bmm(w.byHand(s, 1, false), v, true))
	}},
	{name: "columns reshaped on the way", misses: []string{"are transposed, at node"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		s := w.shape(w.shape(w.bmm(k, q, false, true), 30), 2, 5, 3)
		return one(w.bmm(w.byHand(s, 1, false), v, true))
	}},
	{name: "the logarithm", misses: []string{"by way of node 4 (Softmax{2, true}())"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.must(G.LogSoftMax(w.bmm(q, k, false, true), 2)), v))
	}},
	{name: "nothing of the kind", write: func(w *writer) []*G.Node {
		return one(w.feedForward(w.input("x", 3, 4)))
	}},
}

// TestFuseLeavesAlone: what is not understood stays, and the report says why.
func TestFuseLeavesAlone(t *testing.T) {
	rng := reftest.Rand(t)
	for _, d := range leftAlone {
		t.Run(d.name, func(t *testing.T) {
			w := newWriter(t, rng, tensor.Float64)
			roots := d.write(w)
			d.check(t, w.fuse(roots, read(roots...)))
		})
	}
}

// TestFuseOneOfMany: what stands in the way of one layer does not in the way of
// others.
func TestFuseOneOfMany(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float32)
	x := w.input("x", 2, 4, 4)
	for i := range 5 {
		p := w.softmax(w.bmm(x, x, false, true), 2)
		if i == 2 {
			p = w.must(G.Dropout(p, almost))
		}
		x = w.must(G.Tanh(w.bmm(p, x)))
	}
	(&written{matches: 4, misses: []string{"Dropout"}}).check(t, w.fuse([]*G.Node{x}, read(x)))
}
