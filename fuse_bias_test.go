package leanattention_test

import (
	"testing"

	G "gorgonia.org/gorgonia"
	la "gorgonia.org/leanattention"
)

// biasedAttention is attention with masks that are not causal, or may not be.
var biasedAttention = []written{
	{name: "mask is an input, though causal", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, m, v := w.input("q", 2, 3, 4), w.input("k", 2, 5, 4), input(w.g, "mask", tensorOf(w.dtype, causalMask(2, 3, 5, -1e9), 2, 3, 5)), w.input("v", 2, 5, 6)
		return one(w.bmm(w.softmax(w.add(w.bmm(q, k, false, true), m), 2), v))
	}},
	{name: "mask is broadcast from an input", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		m := w.input("mask", 1, 3, 5)
		return one(w.attend(func(s *G.Node) *G.Node { return w.must(G.BroadcastAdd(s, m, nil, []byte{0})) }))
	}},
	{name: "mask lets one key more be seen", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		return w.added(w.constant("mask", edited(4, 0), 2, 3, 5))
	}},
	{name: "mask hides one key more", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		return w.added(w.constant("mask", edited(16, -1e9), 2, 3, 5))
	}},
	{name: "mask that hides a little", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		return w.added(w.constant("mask", edited(4, -9000), 2, 3, 5))
	}},
	{name: "default with a window", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.must(la.Default(q, k, v, la.WithCausal(), la.WithWindow(2))))
	}},
	{name: "default with slopes", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.must(la.Default(q, k, v, la.WithALiBi([]float64{1, 2}))))
	}},
	{name: "mask with a bias", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		return w.added(w.constant("mask", edited(0, 1e-30), 2, 3, 5))
	}},
	{name: "mask aligned to the first key", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		m := causalMask(2, 3, 5, 0)
		for at := range m {
			if at%5 > at/5%3 {
				m[at] = -1e9
			}
		}
		return w.added(w.constant("mask", m, 2, 3, 5))
	}},
	{name: "mask under which one query sees no key", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		s := w.bmm(w.input("q", 2, 4, 4), w.input("k", 2, 3, 4), false, true)
		s = w.add(s, w.constant("mask", causalMask(2, 4, 3, -20), 2, 4, 3))
		return one(w.bmm(w.softmax(s, 2), w.input("v", 2, 3, 4)))
	}},
	{name: "mask of some heads only", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 3, 5, 4), w.input("k", 3, 5, 4), w.input("v", 3, 5, 4)
		m := w.constant("mask", append(causalMask(2, 5, 5, -1e9), make([]float64, 25)...), 3, 5, 5)
		return one(w.bmm(w.softmax(w.add(w.bmm(q, k, false, true), m), 2), v))
	}},
	{name: "mask with a period that is not that of the rows", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3, 4), w.input("k", 2, 5, 4), w.input("v", 2, 5, 4)
		m := w.constant("mask", causalMask(3, 2, 5, -1e9), 2, 3, 5)
		return one(w.bmm(w.softmax(w.add(w.bmm(q, k, false, true), m), 2), v))
	}},
	{name: "mask of each head for all its queries", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		s := w.bmm(w.input("q", 2, 4, 4), w.input("k", 2, 5, 4), false, true)
		m := w.constant("mask", causalMask(1, 2, 5, -1e9), 2, 1, 5) // one row each
		s = w.must(G.BroadcastAdd(s, m, nil, []byte{1}))
		return one(w.bmm(w.softmax(s, 2), w.input("v", 2, 5, 4)))
	}},
	{name: "mask turned around by a negative scale", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		m := w.constant("mask", causalMask(2, 3, 5, -3), 2, 3, 5)
		return one(w.attend(func(s *G.Node) *G.Node { return w.times(w.add(s, m), w.number(-0.5)) }))
	}},
	{name: "mask made small by the scale", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		m := w.constant("mask", causalMask(2, 3, 5, -1e5), 2, 3, 5)
		return one(w.attend(func(s *G.Node) *G.Node { return w.times(w.add(s, m), w.number(0.01)) }))
	}},
	{name: "padding of each sequence, for all its heads and queries", noGrad: "TestUpstreamSumAxis of docs/externalop", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3, 4, 8), w.input("k", 2, 3, 7, 8), w.input("v", 2, 3, 7, 8)
		s := w.times(w.bmm(q, k, false, true), w.number(0.3))
		s = w.must(G.BroadcastAdd(s, w.input("padding", 2, 1, 1, 7), nil, []byte{1, 2}))
		return one(w.bmm(w.softmax(s, 3), v))
	}},
	{name: "a bias for each head, on the left, and a causal mask", matches: 1, bias: true, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3, 4, 8), w.input("k", 2, 3, 7, 8), w.input("v", 2, 3, 7, 8)
		s := w.must(G.BroadcastAdd(w.input("bias", 1, 3, 4, 7), w.bmm(q, k, false, true), []byte{0}, nil))
		s = w.must(G.BroadcastAdd(s, w.constant("mask", causalMask(1, 4, 7, -1e9), 1, 1, 4, 7), nil, []byte{0, 1}))
		return one(w.bmm(w.softmax(s, 3), v))
	}},
	{name: "a bias for groups of heads as rows", matches: 1, bias: true, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3*4, 8), w.input("k", 2, 6, 8), w.input("v", 2, 6, 8)
		s := w.add(w.bmm(q, k, false, true), w.constant("mask", causalMask(2*3, 4, 6, -1e9), 2, 3*4, 6))
		s = w.must(G.BroadcastAdd(s, w.input("bias", 1, 3*4, 6), nil, []byte{0}))
		return one(w.bmm(w.softmax(s, 2), v))
	}},
	{name: "a bias for each group of heads", matches: 1, bias: true, causal: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3*4, 8), w.input("k", 2, 6, 8), w.input("v", 2, 6, 8)
		s := w.add(w.bmm(q, k, false, true), w.constant("mask", causalMask(2*3, 4, 6, -1e9), 2, 3*4, 6))
		s = w.must(G.BroadcastAdd(s, w.input("bias", 2, 1, 6), nil, []byte{1}))
		return one(w.bmm(w.softmax(s, 2), v))
	}},
	{name: "heads and sequences in one axis, a bias for all of them, scaled behind it", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 6, 4, 8), w.input("k", 6, 7, 8), w.input("v", 6, 7, 8)
		s := w.must(G.BroadcastSub(w.bmm(q, k, false, true), w.input("bias", 1, 4, 7), nil, []byte{0}))
		return one(w.bmm(w.softmax(w.over(s, w.number(3)), 2), v))
	}},
	{name: "five axes, a bias in other rows", matches: 1, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 1, 2, 3, 4), w.input("k", 2, 1, 2, 5, 4), w.input("v", 4, 5, 6)
		s := w.add(w.shape(w.bmm(q, k, false, true), 60), w.input("bias", 60))
		return one(w.bmm(w.softmax(w.shape(s, 4, 3, 5), 2), v))
	}},
	{name: "positions as a product of the queries", matches: 1, bias: true, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		s := w.add(w.bmm(q, k, false, true), w.bmm(q, w.input("positions", 2, 5, 4), false, true))
		return one(w.bmm(w.softmax(w.times(s, w.number(0.5)), 2), v))
	}},
	{name: "one head, matrices, a bias that layers share", matches: 2, bias: true, gone: "Softmax", write: func(w *writer) []*G.Node {
		x, bias := w.input("x", 6, 8), w.must(G.Tanh(w.input("bias", 6, 6)))
		for range 2 {
			s := w.add(w.mul(w.mul(x, w.weight(8, 8)), w.swap(w.mul(x, w.weight(8, 8)))), bias)
			x = w.add(x, w.mul(w.softmax(s), w.mul(x, w.weight(8, 8))))
		}
		return []*G.Node{x}
	}},
}

// TestFuseBias: masks that are not causal become biases.
func TestFuseBias(t *testing.T) { testFuse(t, biasedAttention) }
