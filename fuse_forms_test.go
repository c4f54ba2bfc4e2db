package leanattention_test

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// form is a graph as people write it, and the nodes that come of it.
type form struct {
	written
	nodes []string // of each match: what node reports
}

// node is a match in words: its line without the nodes of the graph.
func node(m rewrite.Match) string {
	_, s, _ := strings.Cut(m.String(), ": ")
	s = regexp.MustCompile(`(, bias \([0-9, ]*\)) of `+described).ReplaceAllString(s, "$1")
	s = regexp.MustCompile(`(, without `+described+`)+`).ReplaceAllString(s, ", no dropout")
	scales := regexp.MustCompile(`(, scaled by ` + described + `)+`)
	return scales.ReplaceAllStringFunc(s, func(all string) string {
		if n := strings.Count(all, ", scaled by "); n > 1 {
			return fmt.Sprintf(", scaled by %d nodes", n)
		}
		return ", scaled by a node"
	})
}

// biasSize is the number of elements of a match's bias, 0 if there is none.
func biasSize(m rewrite.Match) int {
	_, shape, found := strings.Cut(m.String(), ", bias (")
	if !found {
		return 0
	}
	shape, _, _ = strings.Cut(shape, ")")
	size := 1
	for text := range strings.SplitSeq(shape, ", ") {
		n, err := strconv.Atoi(text)
		if err != nil {
			panic(err)
		}
		size *= n
	}
	return size
}

// described is what stock.Describe makes of a node.
const described = `node \d+ \((?:[^()]|\([^()]*\))*\)`

var forms = []form{
	{written{name: "a GPT: heads in a loop, each a matrix, a scalar as the scale, dropout of 0, Concat", write: func(w *graphtest.Writer) []*G.Node {
		x, mask, scale := w.Input("x", 5, 8), w.Hidden("mask", -1e9, 5, 5), w.Scalar("scale", 0.5)
		heads := w.PerHead(x, 2, 4, func(q, k, v *G.Node) *G.Node {
			s := w.Add(w.Times(w.Mul(q, w.Swap(k)), scale), mask)
			return w.Mul(w.Must(G.Dropout(w.Softmax(s), 0)), v)
		})
		return one(w.Mul(w.Must(G.Concat(1, heads...)), w.Weight(8, 8)))
	}}, []string{
		"heads 1/1, queries 5, keys 5, scale 1, bias (5, 5), scaled by a node, no dropout",
		"heads 1/1, queries 5, keys 5, scale 1, bias (5, 5), scaled by a node, no dropout",
	}},
	{written{name: "a GPT whose heads are summed, without a mask", write: func(w *graphtest.Writer) []*G.Node {
		x, scale := w.Input("x", 6, 8), w.AnyScalar("scale", 0.35)
		heads := w.PerHead(x, 3, 4, func(q, k, v *G.Node) *G.Node {
			return w.Mul(w.Softmax(w.Mul(w.Mul(q, w.Swap(k)), scale)), v)
		})
		return one(w.Mul(w.Add(w.Add(heads[0], heads[1]), heads[2]), w.Weight(4, 8)))
	}}, []string{
		"heads 1/1, queries 6, keys 6, scale 1, scaled by a node",
		"heads 1/1, queries 6, keys 6, scale 1, scaled by a node",
		"heads 1/1, queries 6, keys 6, scale 1, scaled by a node",
	}},
	{written{name: "a masked graph layer: keys transposed, a mask for all sequences, SoftMax of a matrix", write: func(w *graphtest.Writer) []*G.Node {
		x := w.Input("x", 2, 5, 6)
		project := func(name string) *G.Node {
			y := w.Mul(w.Shape(x, 10, 6), w.Weight(6, 4))
			return w.Shape(y, 2, 5, 4)
		}
		q, k, v := project("q"), project("k"), project("v")
		s := w.Times(w.BMM(q, w.Swap(k, 0, 2, 1)), w.AnyScalar("scale", 0.5))
		s = w.Must(G.BroadcastAdd(s, w.Hidden("mask", math.Inf(-1), 5, 5), nil, []byte{0}))
		return one(w.BMM(w.Shape(w.Softmax(w.Shape(s, 10, 5)), 2, 5, 5), v))
	}}, []string{"heads 2/2, queries 5, keys 5, scale 1, bias (1, 5, 5), scaled by a node"}},
	{written{name: "an encoder: divided by the root of an input, padding made of 0 and 1", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3, 4, 8), w.Input("k", 2, 3, 7, 8), w.Input("v", 2, 3, 7, 8)
		s := w.Over(w.BMM(q, w.Swap(k, 0, 1, 3, 2)), w.Must(G.Sqrt(w.Scalar("d", 8))))
		padding := w.Times(w.Must(G.Sub(w.Number(1), w.Shown("padding", 2, 1, 1, 7))), w.Number(-1e4))
		s = w.Must(G.BroadcastAdd(s, padding, nil, []byte{1, 2}))
		return one(w.BMM(w.Softmax(s, 3), v))
	}}, []string{"heads 6/6, queries 4, keys 7, scale 1, bias (2, 1, 1, 7), scaled by a node"}},
	{written{name: "a classifier of sentences: Mul with a scalar on the left", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 4, 8), w.Input("k", 6, 8), w.Input("v", 6, 3)
		s := w.Must(G.Mul(w.Scalar("scale", 0.3), w.Mul(q, w.Must(G.Transpose(k)))))
		return one(w.Mul(w.Softmax(s), v))
	}}, []string{"heads 1/1, queries 4, keys 6, scale 1, scaled by a node"}},
	{written{name: "a library's own softmax, of matrices, causal", write: func(w *graphtest.Writer) []*G.Node {
		x := w.Input("x", 5, 4)
		s := w.Add(w.Over(w.Mul(x, w.Swap(x)), w.Number(2)), w.Constant("mask", graphtest.CausalMask(1, 5, 5, -1e9), 5, 5))
		return one(w.Mul(w.ByHand(s, 1, false), x))
	}}, []string{"heads 1/1, queries 5, keys 5, scale 0.5, causal"}},
	{written{name: "a softmax by hand with the maximum taken off, a mask of each sequence made of 0 and 1", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 5, 4), w.Input("k", 2, 5, 4), w.Input("v", 2, 5, 4)
		mask := w.Times(w.Must(G.Sub(w.Shown("adjacency", 2, 5, 5), w.Number(1))), w.Number(1e4))
		s := w.Add(w.Times(w.BMM(q, k, false, true), w.Scalar("scale", 0.5)), mask)
		return one(w.BMM(w.ByHand(s, 2, true), v))
	}}, []string{"heads 2/2, queries 5, keys 5, scale 1, bias (2, 5, 5), scaled by a node"}},
	{written{name: "q, k and v cut from one projection", write: func(w *graphtest.Writer) []*G.Node {
		const T, heads, dim = 5, 2, 3
		y := w.Mul(w.Input("x", T, 6), w.Weight(6, 3*heads*dim))
		var cut [3]*G.Node
		for i := range cut {
			c := w.Must(G.Slice(y, nil, G.S(i*heads*dim, (i+1)*heads*dim)))
			cut[i] = w.Swap(w.Shape(c, T, heads, dim), 1, 0, 2)
		}
		s := w.Times(w.BMM(cut[0], cut[1], false, true), w.Scalar("scale", 0.5))
		s = w.Must(G.BroadcastAdd(s, w.Constant("mask", graphtest.CausalMask(1, T, T, math.Inf(-1)), 1, T, T), nil, []byte{0}))
		return one(w.Tokens(w.BMM(w.Softmax(s, 2), cut[2])))
	}}, []string{"heads 2/2, queries 5, keys 5, scale 1, causal, scaled by a node"}},
	{written{name: "heads in a loop, cut from projections and concatenated", write: func(w *graphtest.Writer) []*G.Node {
		x, mask := w.Input("x", 5, 8), w.Hidden("mask", -1e4, 5, 5)
		q, k, v := w.Mul(x, w.Weight(8, 12)), w.Mul(x, w.Weight(8, 12)), w.Mul(x, w.Weight(8, 6))
		scale := w.Scalar("scale", 0.5)
		return one(w.Loop(3, q, k, v, func(q, k, v *G.Node) *G.Node {
			return w.Mul(w.Softmax(w.Add(w.Times(w.Mul(q, w.Swap(k)), scale), mask)), v)
		}))
	}}, []string{"heads 3/3, queries 5, keys 5, scale 1, bias (5, 5), scaled by a node"}},
	{written{name: "heads in a loop, cut from one projection of sequences, causal, by hand", write: func(w *graphtest.Writer) []*G.Node {
		y := w.Input("x", 2, 4, 18)
		part := func(i int) *G.Node { return w.Must(G.Slice(y, nil, nil, G.S(6*i, 6*i+6))) }
		mask := w.Constant("mask", graphtest.CausalMask(1, 4, 4, -1e9), 1, 4, 4)
		return one(w.Loop(3, part(0), part(1), part(2), func(q, k, v *G.Node) *G.Node {
			s := w.Must(G.BroadcastAdd(w.Over(w.BMM(q, k, false, true), w.Number(2)), mask, nil, []byte{0}))
			return w.BMM(w.ByHand(s, 2, true), v)
		}))
	}}, []string{"heads 6/6, queries 4, keys 4, scale 0.5, causal"}},
	{written{name: "tokens as columns: keys times queries, softmax of columns, values on the left", write: func(w *graphtest.Writer) []*G.Node {
		x := w.Input("x", 6, 7) // (width, tokens)
		q, k, v := w.Mul(w.Weight(4, 6), x), w.Mul(w.Weight(4, 6), x), w.Mul(w.Weight(3, 6), x)
		s := w.Must(G.HadamardDiv(w.Mul(w.Swap(k), q), w.Scalar("root", 2)))
		return one(w.Mul(v, w.ByHand(s, 0, true)))
	}, misses: []string{"come transposed, and for 7 queries"}}, nil},
	{written{name: "tokens as columns, many of them", write: func(w *graphtest.Writer) []*G.Node {
		x := w.Input("x", 6, 40)
		q, k, v := w.Mul(w.Weight(4, 6), x), w.Mul(w.Weight(4, 6), x), w.Mul(w.Weight(3, 6), x)
		s := w.Must(G.HadamardDiv(w.Mul(w.Swap(k), q), w.Scalar("root", 2)))
		return one(w.Mul(v, w.ByHand(s, 0, true)))
	}}, []string{"heads 1/1, queries 40, keys 40, scale 1, scaled by a node"}},
}

// scaledForms are the places of a scale, and what it may be.
func scaledForms() (all []form) {
	places := map[string]func(w *graphtest.Writer, by func(x *G.Node) *G.Node) *G.Node{
		"scores": func(w *graphtest.Writer, by func(x *G.Node) *G.Node) *G.Node { return w.Attend(by) },
		"q": func(w *graphtest.Writer, by func(x *G.Node) *G.Node) *G.Node {
			q, k, v := w.QKV()
			return w.BMM(w.Softmax(w.BMM(by(q), k, false, true), 2), v)
		},
		"k": func(w *graphtest.Writer, by func(x *G.Node) *G.Node) *G.Node {
			q, k, v := w.QKV()
			return w.BMM(w.Softmax(w.BMM(q, by(k), false, true), 2), v)
		},
		"transposed k": func(w *graphtest.Writer, by func(x *G.Node) *G.Node) *G.Node {
			q, k, v := w.QKV()
			return w.BMM(w.Softmax(w.BMM(q, by(w.Swap(k, 0, 2, 1))), 2), v)
		},
	}
	scales := []struct {
		name string
		by   func(w *graphtest.Writer, x *G.Node) *G.Node
		node string
	}{
		{"an input", func(w *graphtest.Writer, x *G.Node) *G.Node { return w.Times(x, w.Scalar("s", 0.7)) }, "scale 1, scaled by a node"},
		{"an input on the left", func(w *graphtest.Writer, x *G.Node) *G.Node { return w.Times(w.Scalar("s", 0.7), x) }, "scale 1, scaled by a node"},
		{"divided by an input", func(w *graphtest.Writer, x *G.Node) *G.Node { return w.Must(G.Div(x, w.Scalar("s", 1.7))) }, "scale 1, scaled by a node"},
		{"computed", func(w *graphtest.Writer, x *G.Node) *G.Node {
			return w.Times(x, w.Must(G.Inverse(w.Must(G.Sqrt(w.Must(G.Add(w.Scalar("s", 2), w.Number(1))))))))
		}, "scale 1, scaled by a node"},
		{"a sum of an input", func(w *graphtest.Writer, x *G.Node) *G.Node { return w.Times(x, w.Must(G.Sum(w.Input("t", 2, 2)))) }, "scale 1, scaled by a node"},
		{"a tensor of one number", func(w *graphtest.Writer, x *G.Node) *G.Node {
			return w.Must(G.BroadcastHadamardProd(x, w.Input("s", 1, 1, 1), nil, []byte{0, 1, 2}))
		}, "scale 1, scaled by a node"},
		{"a constant and two inputs", func(w *graphtest.Writer, x *G.Node) *G.Node {
			return w.Over(w.Times(w.Times(x, w.Number(0.5)), w.Scalar("s", 1.5)), w.Scalar("t", 3))
		}, "scale 0.5, scaled by 2 nodes"},
	}
	for place, put := range places {
		for _, s := range scales {
			all = append(all, form{written{name: "scale on " + place + ": " + s.name, write: func(w *graphtest.Writer) []*G.Node {
				return one(put(w, func(x *G.Node) *G.Node { return s.by(w, x) }))
			}}, []string{"heads 2/2, queries 3, keys 5, " + s.node}})
		}
	}
	return all
}

// more are single steps of attention, written in other ways.
var more = []form{
	{written{name: "scaled behind a mask that is an input", write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Times(w.Add(s, w.Input("mask", 2, 3, 5)), w.Scalar("s", 0.7)) }))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, bias (2, 3, 5), scaled by a node"}},
	{written{name: "scaled by an input behind a causal mask", write: func(w *graphtest.Writer) []*G.Node {
		m := w.Constant("mask", graphtest.CausalMask(2, 3, 5, -3), 2, 3, 5)
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Times(w.Add(s, m), w.Scalar("s", 0.7)) }))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, bias (2, 3, 5), scaled by a node"}},
	{written{name: "SoftMax of the scores without their maximum", write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node {
			return w.Must(G.BroadcastSub(s, w.Column(w.Must(G.Max(s, 2)), s, 2), nil, []byte{2}))
		}))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "the maximum of all scores", write: func(w *graphtest.Writer) []*G.Node {
		return one(w.Attend(func(s *G.Node) *G.Node {
			return w.Must(G.BroadcastSub(s, w.Shape(w.Must(G.Max(s)), 1, 1, 1), nil, []byte{0, 1, 2}))
		}))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "exponentials times the inverse of their sum", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		e := w.Must(G.Exp(w.BMM(q, k, false, true)))
		p := w.Must(G.BroadcastHadamardProd(e, w.Must(G.Inverse(w.Column(w.Must(G.Sum(e, 2)), e, 2))), nil, []byte{2}))
		return one(w.BMM(p, v))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "by hand, one query, a sum of all", write: func(w *graphtest.Writer) []*G.Node {
		e := w.Must(G.Exp(w.Mul(w.Input("q", 1, 4), w.Swap(w.Input("k", 5, 4)))))
		return one(w.Mul(w.Over(e, w.Must(G.Sum(e))), w.Input("v", 5, 3)))
	}}, []string{"heads 1/1, queries 1, keys 5, scale 1"}},
	{written{name: "by hand, four axes, dropout of scores and of weights", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 2, 3, 4), w.Input("k", 2, 2, 5, 4), w.Input("v", 2, 2, 5, 4)
		s := w.Must(G.Dropout(w.BMM(q, k, false, true), 0))
		return one(w.BMM(w.Must(G.Dropout(w.ByHand(s, 3, true), 0)), v))
	}}, []string{"heads 4/4, queries 3, keys 5, scale 1, no dropout"}},
	{written{name: "keys times queries, transposed", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.BMM(w.Softmax(w.Swap(w.BMM(k, q, false, true), 0, 2, 1), 2), v))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "keys times queries, a softmax of columns, transposed by the product", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.BMM(w.ByHand(w.BMM(k, q, false, true), 1, false), v, true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "values on the left, the weights transposed by the product", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.BMM(v, w.Softmax(w.BMM(q, k, false, true), 2), true, true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "values on the left, the weights transposed before", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.BMM(w.Swap(v, 0, 2, 1), w.Swap(w.Softmax(w.BMM(q, k, false, true), 2), 0, 2, 1)))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1"}},
	{written{name: "keys times queries, and a causal mask of columns", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		m := transposedMask(graphtest.CausalMask(2, 3, 5, -1e9), 3, 5)
		s := w.Add(w.BMM(k, q, false, true), w.Constant("mask", m, 2, 5, 3))
		return one(w.BMM(w.ByHand(s, 1, false), v, true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, causal"}},
	{written{name: "keys times queries, and a mask of all heads", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		s := w.Must(G.BroadcastAdd(w.BMM(k, q, false, true), w.Input("mask", 1, 5, 3), nil, []byte{0}))
		return one(w.BMM(v, w.ByHand(s, 1, true), true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, bias (1, 5, 3)"}},
	{written{name: "keys times queries, and a mask of all queries", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		s := w.Must(G.BroadcastAdd(w.BMM(k, q, false, true), w.Input("mask", 2, 5, 1), nil, []byte{2}))
		return one(w.BMM(v, w.ByHand(s, 1, false), true))
	}}, []string{"heads 2/2, queries 3, keys 5, scale 1, bias (2, 5, 1)"}},
	{written{name: "one head of matrices, and a residual of its operand", write: func(w *graphtest.Writer) []*G.Node {
		x := w.Mul(w.Input("x", 5, 4), w.Weight(4, 4))
		return one(w.Add(x, w.Mul(w.Softmax(w.Mul(x, w.Swap(x))), x)))
	}}, []string{"heads 1/1, queries 5, keys 5, scale 1"}},
	{written{name: "a stack of heads, and a residual of its operand", write: func(w *graphtest.Writer) []*G.Node {
		k := w.Mul(w.Input("x", 10, 4), w.Weight(4, 4))
		s := w.BMM(w.Input("q", 2, 5, 4), w.Swap(w.Shape(k, 2, 5, 4), 0, 2, 1))
		return one(w.Add(k, w.Shape(w.BMM(w.Softmax(s, 2), w.Input("v", 2, 5, 4)), 10, 4)))
	}}, []string{"heads 2/2, queries 5, keys 5, scale 1"}},
	{written{name: "keys times queries, one query of each head", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 3, 4, 1), w.Input("k", 3, 6, 4), w.Input("v", 3, 6, 4)
		return one(w.BMM(v, w.ByHand(w.Times(w.BMM(k, q), w.Scalar("s", 0.5)), 1, true), true))
	}}, []string{"heads 3/3, queries 1, keys 6, scale 1, scaled by a node"}},
}

// unlike are heads in a loop that are not one node of all of them: each is its own.
func unlike() (all []form) {
	add := func(name string, write func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node) {
		all = append(all, form{written{name: "heads in a loop, " + name, write: func(w *graphtest.Writer) []*G.Node {
			return write(w, w.Input("q", 4, 8), w.Input("k", 4, 8), w.Input("v", 4, 8), func(q, k, v *G.Node, by float64) *G.Node {
				return w.Mul(w.Softmax(w.Times(w.Mul(q, w.Swap(k)), w.Number(by))), v)
			})
		}}, []string{"heads 1/1, queries 4, keys 4, scale 0.5", "heads 1/1, queries 4, keys 4, scale 0.5"}})
	}
	cut := func(w *graphtest.Writer, x *G.Node, from int) *G.Node {
		return w.Must(G.Slice(x, nil, G.S(from, from+4)))
	}
	add("concatenated the other way round", func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return one(w.Must(G.Concat(1, b, a)))
	})
	add("concatenated as rows", func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return one(w.Must(G.Concat(0, a, b)))
	})
	add("of keys that are not those of the queries", func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 4), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 0), cut(w, v, 4), 0.5)
		return one(w.Must(G.Concat(1, a, b)))
	})
	add("cut so that they overlap", func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 3), cut(w, k, 4), cut(w, v, 4), 0.5)
		return one(w.Must(G.Concat(1, a, b)))
	})
	add("one of which is a root", func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return []*G.Node{w.Must(G.Concat(1, a, b)), a}
	})
	add("with something else in the Concat", func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return one(w.Must(G.Concat(1, a, b, q)))
	})
	add("whose slices are needed elsewhere", func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		x := cut(w, q, 0)
		a, b := attend(x, cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.5)
		return []*G.Node{w.Must(G.Concat(1, a, b)), w.Must(G.Tanh(x))}
	})
	all[len(all)-1].nodes = []string{"heads 2/2, queries 4, keys 4, scale 0.5"}
	add("with scales of their own", func(w *graphtest.Writer, q, k, v *G.Node, attend func(q, k, v *G.Node, by float64) *G.Node) []*G.Node {
		a, b := attend(cut(w, q, 0), cut(w, k, 0), cut(w, v, 0), 0.5), attend(cut(w, q, 4), cut(w, k, 4), cut(w, v, 4), 0.7)
		return one(w.Must(G.Concat(1, a, b)))
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
				w := graphtest.NewWriter(t, rng, dtype)
				roots := c.write(w)
				f := w.Fuse(roots, graphtest.Read(roots...))
				var got []string
				for _, m := range f.Matches {
					got = append(got, node(m))
				}
				if g, want := strings.Join(got, "\n"), strings.Join(c.nodes, "\n"); g != want {
					t.Errorf("made\n%s\nwant\n%s\n%v", g, want, f)
				}
				if n := graphtest.Count(f.Graph, "LeanAttention"); n != len(c.nodes) {
					t.Errorf("%d nodes of attention", n)
				}
				if len(c.misses) == 0 && graphtest.Count(f.Graph, "Softmax")+graphtest.Count(f.Graph, "exp")+graphtest.Count(f.Graph, "MaxAlong") > 0 {
					t.Error("part of a softmax is left")
				}
				c.checkMisses(t, f)
			})
		}
	}
}

// biasedAttention is attention with masks that are not causal, or may not be.
var biasedAttention = []written{
	{name: "mask is an input, though causal", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, m, v := w.Input("q", 2, 3, 4), w.Input("k", 2, 5, 4), graphtest.Input(w.G, "mask", graphtest.TensorOf(w.DType, graphtest.CausalMask(2, 3, 5, -1e9), 2, 3, 5)), w.Input("v", 2, 5, 6)
		return one(w.BMM(w.Softmax(w.Add(w.BMM(q, k, false, true), m), 2), v))
	}},
	{name: "mask is broadcast from an input", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		m := w.Input("mask", 1, 3, 5)
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Must(G.BroadcastAdd(s, m, nil, []byte{0})) }))
	}},
	{name: "mask lets one key more be seen", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		return w.Added(w.Constant("mask", edited(4, 0), 2, 3, 5))
	}},
	{name: "mask hides one key more", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		return w.Added(w.Constant("mask", edited(16, -1e9), 2, 3, 5))
	}},
	{name: "mask that hides a little", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		return w.Added(w.Constant("mask", edited(4, -9000), 2, 3, 5))
	}},
	{name: "default with a window", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.Must(la.Default(q, k, v, la.WithCausal(), la.WithWindow(2))))
	}},
	{name: "default with slopes", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		return one(w.Must(la.Default(q, k, v, la.WithALiBi([]float64{1, 2}))))
	}},
	{name: "mask with a bias", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		return w.Added(w.Constant("mask", edited(0, 1e-30), 2, 3, 5))
	}},
	{name: "mask aligned to the first key", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		m := graphtest.CausalMask(2, 3, 5, 0)
		for at := range m {
			if at%5 > at/5%3 {
				m[at] = -1e9
			}
		}
		return w.Added(w.Constant("mask", m, 2, 3, 5))
	}},
	{name: "mask under which one query sees no key", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		s := w.BMM(w.Input("q", 2, 4, 4), w.Input("k", 2, 3, 4), false, true)
		s = w.Add(s, w.Constant("mask", graphtest.CausalMask(2, 4, 3, -20), 2, 4, 3))
		return one(w.BMM(w.Softmax(s, 2), w.Input("v", 2, 3, 4)))
	}},
	{name: "mask of some heads only", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 3, 5, 4), w.Input("k", 3, 5, 4), w.Input("v", 3, 5, 4)
		m := w.Constant("mask", append(graphtest.CausalMask(2, 5, 5, -1e9), make([]float64, 25)...), 3, 5, 5)
		return one(w.BMM(w.Softmax(w.Add(w.BMM(q, k, false, true), m), 2), v))
	}},
	{name: "mask with a period that is not that of the rows", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3, 4), w.Input("k", 2, 5, 4), w.Input("v", 2, 5, 4)
		m := w.Constant("mask", graphtest.CausalMask(3, 2, 5, -1e9), 2, 3, 5)
		return one(w.BMM(w.Softmax(w.Add(w.BMM(q, k, false, true), m), 2), v))
	}},
	{name: "mask of each head for all its queries", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		s := w.BMM(w.Input("q", 2, 4, 4), w.Input("k", 2, 5, 4), false, true)
		m := w.Constant("mask", graphtest.CausalMask(1, 2, 5, -1e9), 2, 1, 5) // one row each
		s = w.Must(G.BroadcastAdd(s, m, nil, []byte{1}))
		return one(w.BMM(w.Softmax(s, 2), w.Input("v", 2, 5, 4)))
	}},
	{name: "mask turned around by a negative scale", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		m := w.Constant("mask", graphtest.CausalMask(2, 3, 5, -3), 2, 3, 5)
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Times(w.Add(s, m), w.Number(-0.5)) }))
	}},
	{name: "mask made small by the scale", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		m := w.Constant("mask", graphtest.CausalMask(2, 3, 5, -1e5), 2, 3, 5)
		return one(w.Attend(func(s *G.Node) *G.Node { return w.Times(w.Add(s, m), w.Number(0.01)) }))
	}},
	{name: "padding of each sequence, for all its heads and queries", noGrad: "TestUpstreamSumAxis of docs/externalop", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3, 4, 8), w.Input("k", 2, 3, 7, 8), w.Input("v", 2, 3, 7, 8)
		s := w.Times(w.BMM(q, k, false, true), w.Number(0.3))
		s = w.Must(G.BroadcastAdd(s, w.Input("padding", 2, 1, 1, 7), nil, []byte{1, 2}))
		return one(w.BMM(w.Softmax(s, 3), v))
	}},
	{name: "a bias for each head, on the left, and a causal mask", matches: 1, bias: true, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3, 4, 8), w.Input("k", 2, 3, 7, 8), w.Input("v", 2, 3, 7, 8)
		s := w.Must(G.BroadcastAdd(w.Input("bias", 1, 3, 4, 7), w.BMM(q, k, false, true), []byte{0}, nil))
		s = w.Must(G.BroadcastAdd(s, w.Constant("mask", graphtest.CausalMask(1, 4, 7, -1e9), 1, 1, 4, 7), nil, []byte{0, 1}))
		return one(w.BMM(w.Softmax(s, 3), v))
	}},
	{name: "a bias for groups of heads as rows", matches: 1, bias: true, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3*4, 8), w.Input("k", 2, 6, 8), w.Input("v", 2, 6, 8)
		s := w.Add(w.BMM(q, k, false, true), w.Constant("mask", graphtest.CausalMask(2*3, 4, 6, -1e9), 2, 3*4, 6))
		s = w.Must(G.BroadcastAdd(s, w.Input("bias", 1, 3*4, 6), nil, []byte{0}))
		return one(w.BMM(w.Softmax(s, 2), v))
	}},
	{name: "a bias for each group of heads", matches: 1, bias: true, causal: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 3*4, 8), w.Input("k", 2, 6, 8), w.Input("v", 2, 6, 8)
		s := w.Add(w.BMM(q, k, false, true), w.Constant("mask", graphtest.CausalMask(2*3, 4, 6, -1e9), 2, 3*4, 6))
		s = w.Must(G.BroadcastAdd(s, w.Input("bias", 2, 1, 6), nil, []byte{1}))
		return one(w.BMM(w.Softmax(s, 2), v))
	}},
	{name: "heads and sequences in one axis, a bias for all of them, scaled behind it", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 6, 4, 8), w.Input("k", 6, 7, 8), w.Input("v", 6, 7, 8)
		s := w.Must(G.BroadcastSub(w.BMM(q, k, false, true), w.Input("bias", 1, 4, 7), nil, []byte{0}))
		return one(w.BMM(w.Softmax(w.Over(s, w.Number(3)), 2), v))
	}},
	{name: "five axes, a bias in other rows", matches: 1, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.Input("q", 2, 1, 2, 3, 4), w.Input("k", 2, 1, 2, 5, 4), w.Input("v", 4, 5, 6)
		s := w.Add(w.Shape(w.BMM(q, k, false, true), 60), w.Input("bias", 60))
		return one(w.BMM(w.Softmax(w.Shape(s, 4, 3, 5), 2), v))
	}},
	{name: "positions as a product of the queries", matches: 1, bias: true, write: func(w *graphtest.Writer) []*G.Node {
		q, k, v := w.QKV()
		s := w.Add(w.BMM(q, k, false, true), w.BMM(q, w.Input("positions", 2, 5, 4), false, true))
		return one(w.BMM(w.Softmax(w.Times(s, w.Number(0.5)), 2), v))
	}},
	{name: "one head, matrices, a bias that layers share", matches: 2, bias: true, gone: "Softmax", write: func(w *graphtest.Writer) []*G.Node {
		x, bias := w.Input("x", 6, 8), w.Must(G.Tanh(w.Input("bias", 6, 6)))
		for range 2 {
			s := w.Add(w.Mul(w.Mul(x, w.Weight(8, 8)), w.Swap(w.Mul(x, w.Weight(8, 8)))), bias)
			x = w.Add(x, w.Mul(w.Softmax(s), w.Mul(x, w.Weight(8, 8))))
		}
		return []*G.Node{x}
	}},
}

// TestFuseBias: masks that are not causal become biases.
func TestFuseBias(t *testing.T) { testFuse(t, biasedAttention) }

// TestFuseHiddenRow: what a query gets all of whose keys a mask hides. A finite number
// shifts all scores alike, which is as if there were no mask, but for the digits that
// it costs; behind -Inf there is nothing, which Gorgonia has as NaN.
func TestFuseHiddenRow(t *testing.T) {
	rng := reftest.Rand(t)
	const hiddenRow = 1
	for _, c := range []struct {
		hide float64
		unit map[tensor.Dtype]float64
	}{
		{-1e4, map[tensor.Dtype]float64{tensor.Float32: 1e-2, tensor.Float64: 1e-10}},
		{-1e9, map[tensor.Dtype]float64{tensor.Float32: 1, tensor.Float64: 1e-5}},
		{math.Inf(-1), nil},
	} {
		for _, constant := range []bool{false, true} {
			for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
				w := graphtest.NewWriter(t, rng, dtype)
				m := make([]float64, 2*3*5)
				for at := range m {
					if at/5%3 == hiddenRow {
						m[at] = c.hide
					}
				}
				q, k, v := w.QKV()
				mask := graphtest.Input(w.G, "mask", graphtest.TensorOf(dtype, m, 2, 3, 5))
				if constant {
					mask = w.Constant("a mask", m, 2, 3, 5)
				}
				o := w.BMM(w.ByHand(w.Add(w.BMM(q, k, false, true), mask), 2, true), v)
				f, err := rewrite.Fuse(o)
				if err != nil || len(f.Matches) != 1 || !strings.Contains(f.Matches[0].String(), ", bias (2, 3, 5) of "+stock.Describe(mask)) {
					t.Fatal(f, err)
				}
				want, got := graphtest.Outputs(t, w.G, graphtest.Read(o))[0], graphtest.Outputs(t, f.Graph, graphtest.Read(f.Roots...))[0]
				for row := range 2 * 3 {
					from, to := row*6, row*6+6
					unit := map[tensor.Dtype]float64{tensor.Float32: 2e-5, tensor.Float64: 1e-12}[dtype]
					switch {
					case row%3 != hiddenRow:
					case c.unit == nil:
						for i, x := range want[from:to] {
							if !math.IsNaN(x) {
								t.Errorf("Gorgonia has %v for a hidden row: the documentation of Fuse is wrong", x)
							}
							want[from+i] = 0
						}
					case dtype == tensor.Float32 && c.hide == -1e9: // all digits are gone: the mean of the values
						for i := range 6 {
							mean := 0.0
							for j := range 5 {
								mean += graphtest.Floats(t, v.Value())[(row/3*5+j)*6+i] / 5
							}
							if math.Abs(want[from+i]-mean) > 1e-5 {
								t.Fatalf("Gorgonia has %v, not the mean %v", want[from+i], mean)
							}
						}
					default:
						unit = c.unit[dtype]
					}
					if err := graphtest.Within(got[from:to], want[from:to], unit); err != nil {
						t.Errorf("%v, mask of %v, row %d: %v", dtype, c.hide, row, err)
					}
				}
			}
		}
	}
}

// TestFuseMaskShapes: masks of the shapes that people add, as an input or made of one
// by arithmetic, are biases of that shape.
func TestFuseMaskShapes(t *testing.T) {
	rng := reftest.Rand(t)
	for _, shape := range []tensor.Shape{{5, 5}, {1, 5, 5}, {2, 5, 5}, {2, 1, 5}, {1, 1, 5}, {5}} {
		for _, hide := range []float64{-1e9, -1e4, math.Inf(-1)} {
			for _, made := range []bool{false, true} {
				if made && math.IsInf(hide, 0) {
					continue // 0 times that is NaN
				}
				w := graphtest.NewWriter(t, rng, tensor.Float32)
				q, k, v := w.Input("q", 2, 5, 4), w.Input("k", 2, 5, 4), w.Input("v", 2, 5, 4)
				var mask *G.Node
				if made {
					mask = w.Times(w.Must(G.Sub(w.Number(1), w.Shown("shown", shape...))), w.Number(hide))
				} else {
					mask = w.Hidden("hidden", hide, shape...)
				}
				var along []byte
				s := w.Times(w.BMM(q, k, false, true), w.Scalar("scale", 0.5))
				for i := range 3 {
					if at := i - 3 + len(shape); at < 0 || shape[at] != s.Shape()[i] {
						along = append(along, byte(i))
					}
				}
				if along == nil {
					s = w.Add(s, mask)
				} else {
					s = w.Must(G.BroadcastAdd(s, mask, nil, along))
				}
				o := w.BMM(w.Softmax(s, 2), v)
				f := w.Fuse(one(o), graphtest.Read(o))
				if len(f.Matches) != 1 || biasSize(f.Matches[0]) != shape.TotalSize() {
					t.Errorf("a mask of %v, %v: %v", shape, hide, f)
				}
			}
		}
	}
}

// TestFuseIdleDropout: a Dropout is left out where it is the identity, which it is for
// probability 0 and behind a machine for evaluation.
func TestFuseIdleDropout(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range []struct {
		p        float64
		evaluate bool
	}{{0, false}, {0, true}, {0.5, true}} {
		w := graphtest.NewWriter(t, rng, tensor.Float64)
		o := w.Behind(func(p *G.Node) *G.Node { return w.Must(G.Dropout(p, c.p)) })
		if c.evaluate {
			vm := G.NewTapeMachine(w.G, G.EvalMode())
			if err := vm.Close(); err != nil {
				t.Fatal(err)
			}
		}
		f, err := rewrite.Fuse(o)
		if err != nil || len(f.Matches)+len(f.Misses) != 1 {
			t.Fatal(f, err)
		}
		if len(f.Matches) != 1 || strings.Count(f.Matches[0].String(), "without node 5 (Dropout{") != 1 || graphtest.Count(f.Graph, "Dropout") != 0 {
			t.Errorf("%v: %v", c, f)
		}
		reads := graphtest.Read(o)
		vm := G.NewTapeMachine(w.G, G.EvalMode())
		graphtest.Again(t, vm)
		want := graphtest.Floats(t, *reads[0])
		if err := graphtest.Near(graphtest.Outputs(t, f.Graph, graphtest.Read(f.Roots...))[0], want, w.DType); err != nil {
			t.Error(err)
		}
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
