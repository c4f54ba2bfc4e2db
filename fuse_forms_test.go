package leanattention_test

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// scalar is an input of one number, as NewScalar makes it.
func (w *writer) scalar(name string, x float64) *G.Node {
	return G.NewScalar(w.g, w.dtype, G.WithName(name), G.WithValue(w.number(x).Value()))
}

// anyScalar is one as NodeFromAny makes it.
func (w *writer) anyScalar(name string, x float64) *G.Node {
	if w.dtype == tensor.Float32 {
		return G.NodeFromAny(w.g, float32(x), G.WithName(name))
	}
	return G.NodeFromAny(w.g, x, G.WithName(name))
}

// fresh is an input whose values are made by f, at every run anew.
func (w *writer) fresh(name string, f func() []float64, shape ...int) *G.Node {
	if w.make == nil {
		w.make = make(map[string]func() *tensor.Dense)
	}
	w.make[name] = func() *tensor.Dense { return tensorOf(w.dtype, f(), shape...) }
	return input(w.g, name, w.make[name]())
}

// shown is an input of 0 and 1, with 1 for the first key of all.
func (w *writer) shown(name string, shape ...int) *G.Node {
	return w.fresh(name, func() []float64 {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		for i := range x {
			if i%shape[len(shape)-1] == 0 || w.rng.IntN(2) == 0 {
				x[i] = 1
			}
		}
		return x
	}, shape...)
}

// hidden is an input of 0 and some number, with 0 for the first key of all.
func (w *writer) hidden(name string, hide float64, shape ...int) *G.Node {
	return w.fresh(name, func() []float64 {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		for i := range x {
			if i%shape[len(shape)-1] != 0 && w.rng.IntN(2) == 0 {
				x[i] = hide
			}
		}
		return x
	}, shape...)
}

// byHand is a softmax of Exp, Sum and a division, with the maximum taken off first
// or without.
func (w *writer) byHand(s *G.Node, axis int, maximum bool) *G.Node {
	w.t.Helper()
	along := []byte{byte(axis)}
	if maximum {
		s = w.must(G.BroadcastSub(s, w.column(w.must(G.Max(s, axis)), s, axis), nil, along))
	}
	e := w.must(G.Exp(s))
	return w.must(G.BroadcastHadamardDiv(e, w.column(w.must(G.Sum(e, axis)), s, axis), nil, along))
}

// column is x with the axis that a reduction of s took away, of size 1.
func (w *writer) column(x, s *G.Node, axis int) *G.Node {
	shape := s.Shape().Clone()
	shape[axis] = 1
	return w.shape(x, shape...)
}

// perHead is attention heads that a loop makes, each with weights of its own.
func (w *writer) perHead(x *G.Node, heads, dim int, attend func(q, k, v *G.Node) *G.Node) (all []*G.Node) {
	width := x.Shape()[1]
	for range heads {
		q, k, v := w.mul(x, w.weight(width, dim)), w.mul(x, w.weight(width, dim)), w.mul(x, w.weight(width, dim))
		all = append(all, attend(q, k, v))
	}
	return all
}

// loop is heads that are cut from q, k and v, one by one, and concatenated.
func (w *writer) loop(heads int, q, k, v *G.Node, attend func(q, k, v *G.Node) *G.Node) *G.Node {
	cut := func(x *G.Node, i int) *G.Node {
		last, dim := x.Dims()-1, lastOf(x)/heads
		return w.must(G.Slice(x, append(make([]tensor.Slice, last), G.S(i*dim, (i+1)*dim))...))
	}
	var all []*G.Node
	for i := range heads {
		all = append(all, attend(cut(q, i), cut(k, i), cut(v, i)))
	}
	return w.must(G.Concat(all[0].Dims()-1, all...))
}

// form is a graph as people write it, and the nodes that come of it.
type form struct {
	written
	nodes []string // of each match: what node reports
}

// node is a match in words.
func node(m la.Match) string {
	s := fmt.Sprintf("heads %d/%d, queries %d, keys %d, scale %.4g", m.Heads, m.KVHeads, m.Queries, m.Keys, m.Scale)
	if m.Causal {
		s += ", causal"
	}
	if m.Bias != nil {
		s += fmt.Sprintf(", bias %v", m.Bias.Shape())
	}
	switch n := len(m.Scales); {
	case n == 1:
		s += ", scaled by a node"
	case n > 1:
		s += fmt.Sprintf(", scaled by %d nodes", n)
	}
	if len(m.Dropouts) > 0 {
		s += ", no dropout"
	}
	return s
}

var forms = []form{
	{written{name: "a GPT: heads in a loop, each a matrix, a scalar as the scale, dropout of 0, Concat", write: func(w *writer) []*G.Node {
		x, mask, scale := w.input("x", 5, 8), w.hidden("mask", -1e9, 5, 5), w.scalar("scale", 0.5)
		heads := w.perHead(x, 2, 4, func(q, k, v *G.Node) *G.Node {
			s := w.add(w.times(w.mul(q, w.swap(k)), scale), mask)
			return w.mul(w.must(G.Dropout(w.softmax(s), 0)), v)
		})
		return one(w.mul(w.must(G.Concat(1, heads...)), w.weight(8, 8)))
	}}, []string{
		"heads 1/1, queries 5, keys 5, scale 1, bias (5, 5), scaled by a node, no dropout",
		"heads 1/1, queries 5, keys 5, scale 1, bias (5, 5), scaled by a node, no dropout",
	}},
	{written{name: "a GPT whose heads are summed, without a mask", write: func(w *writer) []*G.Node {
		x, scale := w.input("x", 6, 8), w.anyScalar("scale", 0.35)
		heads := w.perHead(x, 3, 4, func(q, k, v *G.Node) *G.Node {
			return w.mul(w.softmax(w.mul(w.mul(q, w.swap(k)), scale)), v)
		})
		return one(w.mul(w.add(w.add(heads[0], heads[1]), heads[2]), w.weight(4, 8)))
	}}, []string{
		"heads 1/1, queries 6, keys 6, scale 1, scaled by a node",
		"heads 1/1, queries 6, keys 6, scale 1, scaled by a node",
		"heads 1/1, queries 6, keys 6, scale 1, scaled by a node",
	}},
	{written{name: "a masked graph layer: keys transposed, a mask for all sequences, SoftMax of a matrix", write: func(w *writer) []*G.Node {
		x := w.input("x", 2, 5, 6)
		project := func(name string) *G.Node {
			y := w.mul(w.shape(x, 10, 6), w.weight(6, 4))
			return w.shape(y, 2, 5, 4)
		}
		q, k, v := project("q"), project("k"), project("v")
		s := w.times(w.bmm(q, w.swap(k, 0, 2, 1)), w.anyScalar("scale", 0.5))
		s = w.must(G.BroadcastAdd(s, w.hidden("mask", math.Inf(-1), 5, 5), nil, []byte{0}))
		return one(w.bmm(w.shape(w.softmax(w.shape(s, 10, 5)), 2, 5, 5), v))
	}}, []string{"heads 2/2, queries 5, keys 5, scale 1, bias (1, 5, 5), scaled by a node"}},
	{written{name: "an encoder: divided by the root of an input, padding made of 0 and 1", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3, 4, 8), w.input("k", 2, 3, 7, 8), w.input("v", 2, 3, 7, 8)
		s := w.over(w.bmm(q, w.swap(k, 0, 1, 3, 2)), w.must(G.Sqrt(w.scalar("d", 8))))
		padding := w.times(w.must(G.Sub(w.number(1), w.shown("padding", 2, 1, 1, 7))), w.number(-1e4))
		s = w.must(G.BroadcastAdd(s, padding, nil, []byte{1, 2}))
		return one(w.bmm(w.softmax(s, 3), v))
	}}, []string{"heads 6/6, queries 4, keys 7, scale 1, bias (2, 1, 1, 7), scaled by a node"}},
	{written{name: "a classifier of sentences: Mul with a scalar on the left", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 4, 8), w.input("k", 6, 8), w.input("v", 6, 3)
		s := w.must(G.Mul(w.scalar("scale", 0.3), w.mul(q, w.must(G.Transpose(k)))))
		return one(w.mul(w.softmax(s), v))
	}}, []string{"heads 1/1, queries 4, keys 6, scale 1, scaled by a node"}},
	{written{name: "a library's own softmax, of matrices, causal", write: func(w *writer) []*G.Node {
		x := w.input("x", 5, 4)
		s := w.add(w.over(w.mul(x, w.swap(x)), w.number(2)), w.constant("mask", causalMask(1, 5, 5, -1e9), 5, 5))
		return one(w.mul(w.byHand(s, 1, false), x))
	}}, []string{"heads 1/1, queries 5, keys 5, scale 0.5, causal"}},
	{written{name: "a softmax by hand with the maximum taken off, a mask of each sequence made of 0 and 1", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 5, 4), w.input("k", 2, 5, 4), w.input("v", 2, 5, 4)
		mask := w.times(w.must(G.Sub(w.shown("adjacency", 2, 5, 5), w.number(1))), w.number(1e4))
		s := w.add(w.times(w.bmm(q, k, false, true), w.scalar("scale", 0.5)), mask)
		return one(w.bmm(w.byHand(s, 2, true), v))
	}}, []string{"heads 2/2, queries 5, keys 5, scale 1, bias (2, 5, 5), scaled by a node"}},
	{written{name: "q, k and v cut from one projection", write: func(w *writer) []*G.Node {
		const T, heads, dim = 5, 2, 3
		y := w.mul(w.input("x", T, 6), w.weight(6, 3*heads*dim))
		var cut [3]*G.Node
		for i := range cut {
			c := w.must(G.Slice(y, nil, G.S(i*heads*dim, (i+1)*heads*dim)))
			cut[i] = w.swap(w.shape(c, T, heads, dim), 1, 0, 2)
		}
		s := w.times(w.bmm(cut[0], cut[1], false, true), w.scalar("scale", 0.5))
		s = w.must(G.BroadcastAdd(s, w.constant("mask", causalMask(1, T, T, math.Inf(-1)), 1, T, T), nil, []byte{0}))
		return one(w.tokens(w.bmm(w.softmax(s, 2), cut[2])))
	}}, []string{"heads 2/2, queries 5, keys 5, scale 1, causal, scaled by a node"}},
	{written{name: "heads in a loop, cut from projections and concatenated", write: func(w *writer) []*G.Node {
		x, mask := w.input("x", 5, 8), w.hidden("mask", -1e4, 5, 5)
		q, k, v := w.mul(x, w.weight(8, 12)), w.mul(x, w.weight(8, 12)), w.mul(x, w.weight(8, 6))
		scale := w.scalar("scale", 0.5)
		return one(w.loop(3, q, k, v, func(q, k, v *G.Node) *G.Node {
			return w.mul(w.softmax(w.add(w.times(w.mul(q, w.swap(k)), scale), mask)), v)
		}))
	}}, []string{"heads 3/3, queries 5, keys 5, scale 1, bias (5, 5), scaled by a node"}},
	{written{name: "heads in a loop, cut from one projection of sequences, causal, by hand", write: func(w *writer) []*G.Node {
		y := w.input("x", 2, 4, 18)
		part := func(i int) *G.Node { return w.must(G.Slice(y, nil, nil, G.S(6*i, 6*i+6))) }
		mask := w.constant("mask", causalMask(1, 4, 4, -1e9), 1, 4, 4)
		return one(w.loop(3, part(0), part(1), part(2), func(q, k, v *G.Node) *G.Node {
			s := w.must(G.BroadcastAdd(w.over(w.bmm(q, k, false, true), w.number(2)), mask, nil, []byte{0}))
			return w.bmm(w.byHand(s, 2, true), v)
		}))
	}}, []string{"heads 6/6, queries 4, keys 4, scale 0.5, causal"}},
	{written{name: "tokens as columns: keys times queries, softmax of columns, values on the left", write: func(w *writer) []*G.Node {
		x := w.input("x", 6, 7) // (width, tokens)
		q, k, v := w.mul(w.weight(4, 6), x), w.mul(w.weight(4, 6), x), w.mul(w.weight(3, 6), x)
		s := w.must(G.HadamardDiv(w.mul(w.swap(k), q), w.scalar("root", 2)))
		return one(w.mul(v, w.byHand(s, 0, true)))
	}, misses: []string{"come transposed, and for 7 queries"}}, nil},
	{written{name: "tokens as columns, many of them", write: func(w *writer) []*G.Node {
		x := w.input("x", 6, 40)
		q, k, v := w.mul(w.weight(4, 6), x), w.mul(w.weight(4, 6), x), w.mul(w.weight(3, 6), x)
		s := w.must(G.HadamardDiv(w.mul(w.swap(k), q), w.scalar("root", 2)))
		return one(w.mul(v, w.byHand(s, 0, true)))
	}}, []string{"heads 1/1, queries 40, keys 40, scale 1, scaled by a node"}},
}

// scaledForms are the places of a scale, and what it may be.
func scaledForms() (all []form) {
	places := map[string]func(w *writer, by func(x *G.Node) *G.Node) *G.Node{
		"scores": func(w *writer, by func(x *G.Node) *G.Node) *G.Node { return w.attend(by) },
		"q": func(w *writer, by func(x *G.Node) *G.Node) *G.Node {
			q, k, v := w.qkv()
			return w.bmm(w.softmax(w.bmm(by(q), k, false, true), 2), v)
		},
		"k": func(w *writer, by func(x *G.Node) *G.Node) *G.Node {
			q, k, v := w.qkv()
			return w.bmm(w.softmax(w.bmm(q, by(k), false, true), 2), v)
		},
		"transposed k": func(w *writer, by func(x *G.Node) *G.Node) *G.Node {
			q, k, v := w.qkv()
			return w.bmm(w.softmax(w.bmm(q, by(w.swap(k, 0, 2, 1))), 2), v)
		},
	}
	scales := []struct {
		name string
		by   func(w *writer, x *G.Node) *G.Node
		node string
	}{
		{"an input", func(w *writer, x *G.Node) *G.Node { return w.times(x, w.scalar("s", 0.7)) }, "scale 1, scaled by a node"},
		{"an input on the left", func(w *writer, x *G.Node) *G.Node { return w.times(w.scalar("s", 0.7), x) }, "scale 1, scaled by a node"},
		{"divided by an input", func(w *writer, x *G.Node) *G.Node { return w.must(G.Div(x, w.scalar("s", 1.7))) }, "scale 1, scaled by a node"},
		{"computed", func(w *writer, x *G.Node) *G.Node {
			return w.times(x, w.must(G.Inverse(w.must(G.Sqrt(w.must(G.Add(w.scalar("s", 2), w.number(1))))))))
		}, "scale 1, scaled by a node"},
		{"a sum of an input", func(w *writer, x *G.Node) *G.Node { return w.times(x, w.must(G.Sum(w.input("t", 2, 2)))) }, "scale 1, scaled by a node"},
		{"a tensor of one number", func(w *writer, x *G.Node) *G.Node {
			return w.must(G.BroadcastHadamardProd(x, w.input("s", 1, 1, 1), nil, []byte{0, 1, 2}))
		}, "scale 1, scaled by a node"},
		{"a constant and two inputs", func(w *writer, x *G.Node) *G.Node {
			return w.over(w.times(w.times(x, w.number(0.5)), w.scalar("s", 1.5)), w.scalar("t", 3))
		}, "scale 0.5, scaled by 2 nodes"},
	}
	for place, put := range places {
		for _, s := range scales {
			all = append(all, form{written{name: "scale on " + place + ": " + s.name, write: func(w *writer) []*G.Node {
				return one(put(w, func(x *G.Node) *G.Node { return s.by(w, x) }))
			}}, []string{"heads 2/2, queries 3, keys 5, " + s.node}})
		}
	}
	return all
}

// more are single steps of attention, written in other ways.
var more = []form{
	{written{name: "scaled behind a mask that is an input", write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { return w.times(w.add(s, w.input("mask", 2, 3, 5)), w.scalar("s", 0.7)) }))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, bias (2, 3, 5), scaled by a node"}},
	{written{name: "scaled by an input behind a causal mask", write: func(w *writer) []*G.Node {
		m := w.constant("mask", causalMask(2, 3, 5, -3), 2, 3, 5)
		return one(w.attend(func(s *G.Node) *G.Node { return w.times(w.add(s, m), w.scalar("s", 0.7)) }))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, bias (2, 3, 5), scaled by a node"}},
	{written{name: "SoftMax of the scores without their maximum", write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node {
			return w.must(G.BroadcastSub(s, w.column(w.must(G.Max(s, 2)), s, 2), nil, []byte{2}))
		}))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "the maximum of all scores", write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node {
			return w.must(G.BroadcastSub(s, w.shape(w.must(G.Max(s)), 1, 1, 1), nil, []byte{0, 1, 2}))
		}))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "exponentials times the inverse of their sum", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		e := w.must(G.Exp(w.bmm(q, k, false, true)))
		p := w.must(G.BroadcastHadamardProd(e, w.must(G.Inverse(w.column(w.must(G.Sum(e, 2)), e, 2))), nil, []byte{2}))
		return one(w.bmm(p, v))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "by hand, one query, a sum of all", write: func(w *writer) []*G.Node {
		e := w.must(G.Exp(w.mul(w.input("q", 1, 4), w.swap(w.input("k", 5, 4)))))
		return one(w.mul(w.over(e, w.must(G.Sum(e))), w.input("v", 5, 3)))
	}}, []string{"heads 1/1, queries 1, keys 5, scale 1"}},
	{written{name: "by hand, four axes, dropout of scores and of weights", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 2, 3, 4), w.input("k", 2, 2, 5, 4), w.input("v", 2, 2, 5, 4)
		s := w.must(G.Dropout(w.bmm(q, k, false, true), 0))
		return one(w.bmm(w.must(G.Dropout(w.byHand(s, 3, true), 0)), v))
	}}, []string{"heads 4/4, queries 3, keys 5, scale 1, no dropout"}},
	{written{name: "keys times queries, transposed", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.softmax(w.swap(w.bmm(k, q, false, true), 0, 2, 1), 2), v))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "keys times queries, a softmax of columns, transposed by the product", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.byHand(w.bmm(k, q, false, true), 1, false), v, true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "values on the left, the weights transposed by the product", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(v, w.softmax(w.bmm(q, k, false, true), 2), true, true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "values on the left, the weights transposed before", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.swap(v, 0, 2, 1), w.swap(w.softmax(w.bmm(q, k, false, true), 2), 0, 2, 1)))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "keys times queries, and a causal mask of columns", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		m := transposedMask(causalMask(2, 3, 5, -1e9), 3, 5)
		s := w.add(w.bmm(k, q, false, true), w.constant("mask", m, 2, 5, 3))
		return one(w.bmm(w.byHand(s, 1, false), v, true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, causal"}},
	{written{name: "keys times queries, and a mask of all heads", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		s := w.must(G.BroadcastAdd(w.bmm(k, q, false, true), w.input("mask", 1, 5, 3), nil, []byte{0}))
		return one(w.bmm(v, w.byHand(s, 1, true), true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, bias (1, 5, 3)"}},
	{written{name: "keys times queries, and a mask of all queries", write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		s := w.must(G.BroadcastAdd(w.bmm(k, q, false, true), w.input("mask", 2, 5, 1), nil, []byte{2}))
		return one(w.bmm(v, w.byHand(s, 1, false), true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, bias (2, 5, 1)"}},
	{written{name: "one head of matrices, and a residual of its operand", write: func(w *writer) []*G.Node {
		x := w.mul(w.input("x", 5, 4), w.weight(4, 4))
		return one(w.add(x, w.mul(w.softmax(w.mul(x, w.swap(x))), x)))
	}}, []string{"heads 1/1, queries 5, keys 5, scale 1"}},
	{written{name: "a stack of heads, and a residual of its operand", write: func(w *writer) []*G.Node {
		k := w.mul(w.input("x", 10, 4), w.weight(4, 4))
		s := w.bmm(w.input("q", 2, 5, 4), w.swap(w.shape(k, 2, 5, 4), 0, 2, 1))
		return one(w.add(k, w.shape(w.bmm(w.softmax(s, 2), w.input("v", 2, 5, 4)), 10, 4)))
	}}, []string{"heads 2/2, queries 5, keys 5, scale 1"}},
	{written{name: "keys times queries, one query of each head", write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 3, 4, 1), w.input("k", 3, 6, 4), w.input("v", 3, 6, 4)
		return one(w.bmm(v, w.byHand(w.times(w.bmm(k, q), w.scalar("s", 0.5)), 1, true), true))
	}}, []string{"heads 3/3, queries 1, keys 6, scale 1, scaled by a node"}},
}

// unlike are heads in a loop that are not one node of all of them: each is its own.
func unlike() (all []form) {
	add := func(name string, write func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node) {
		all = append(all, form{written{name: "heads in a loop, " + name, write: func(w *writer) []*G.Node {
			return write(w, w.input("q", 4, 8), w.input("k", 4, 8), w.input("v", 4, 8), func(q, k, v *G.Node, by float64) *G.Node {
				return w.mul(w.softmax(w.times(w.mul(q, w.swap(k)), w.number(by))), v)
			})
		}}, []string{"heads 1/1, queries 4, keys 4, scale 0.5", "heads 1/1, queries 4, keys 4, scale 0.5"}})
	}
	cut := func(w *writer, x *G.Node, from int) *G.Node { return w.must(G.Slice(x, nil, G.S(from, from+4))) }
	add("concatenated the other way round", func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return one(w.must(G.Concat(1, b, a)))
	})
	add("concatenated as rows", func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return one(w.must(G.Concat(0, a, b)))
	})
	add("of keys that are not those of the queries", func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 4), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 0), cut(w, v, 4), 0.5)
		return one(w.must(G.Concat(1, a, b)))
	})
	add("cut so that they overlap", func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 3), cut(w, k, 4), cut(w, v, 4), 0.5)
		return one(w.must(G.Concat(1, a, b)))
	})
	add("one of which is a root", func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return []*G.Node{w.must(G.Concat(1, a, b)), a}
	})
	add("with something else in the Concat", func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return one(w.must(G.Concat(1, a, b, q)))
	})
	add("whose slices are needed elsewhere", func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		x := cut(w, q, 0)
		a, b := attend(x, cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return []*G.Node{w.must(G.Concat(1, a, b)), w.must(G.Tanh(x))}
	})
	all[len(all)-1].nodes = []string{"heads 2/2, queries 4, keys 4, scale 0.5"}
	add("with scales of their own", func(w *writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.7)
		return one(w.must(G.Concat(1, a, b)))
	})
	all[len(all)-1].nodes = []string{"heads 1/1, queries 4, keys 4, scale 0.5", "heads 1/1, queries 4, keys 4, scale 0.7"}
	return all
}

// transposedMask is masks of rows of queries as columns of them.
func transposedMask(m []float64, queries, keys int) []float64 {
	y := make([]float64, len(m))
	for at, x := range m {
		head, i, j := at/(queries*keys), at/keys%queries, at%keys
		y[(head*keys+j)*queries+i] = x
	}
	return y
}

func allForms() []form {
	return slices.Concat(forms, scaledForms(), more, unlike())
}

// TestFuseForms: attention as people write it becomes the nodes that are named.
func TestFuseForms(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range allForms() {
		for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			t.Run(c.name+" "+dtype.String(), func(t *testing.T) {
				w := newWriter(t, rng, dtype)
				roots := c.write(w)
				f := w.fuse(roots, read(roots...))
				var got []string
				for _, m := range f.Matches {
					got = append(got, node(m))
				}
				if g, want := strings.Join(got, "\n"), strings.Join(c.nodes, "\n"); g != want {
					t.Errorf("made\n%s\nwant\n%s\n%v", g, want, f)
				}
				if n := count(f.Graph, "LeanAttention"); n != len(c.nodes) {
					t.Errorf("%d nodes of attention", n)
				}
				if len(c.misses) == 0 && count(f.Graph, "Softmax")+count(f.Graph, "exp")+count(f.Graph, "MaxAlong") > 0 {
					t.Error("part of a softmax is left")
				}
				c.checkMisses(t, f)
			})
		}
	}
}

// row is the form's row in the table of docs/fuse.md.
func (c *form) row() string {
	made := c.nodes[0]
	if n := len(c.nodes); n > 1 {
		made = fmt.Sprintf("%d nodes, each of %s", n, made)
	}
	return fmt.Sprintf("| %s | %s |\n", c.name, made)
}

// TestFusePage: the page of Fuse shows the forms, with the nodes that come of them.
func TestFusePage(t *testing.T) {
	page, err := os.ReadFile("docs/fuse.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range slices.Concat(forms, more) {
		if len(c.nodes) > 0 && !strings.Contains(string(page), c.row()) {
			t.Errorf("docs/fuse.md lacks\n%s", c.row())
		}
	}
}
