package fuse_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestFuseReport: the report has a line for exponentials between two products that are no softmax, of stacks and of plain matrices,
// and none for other layers.
func TestFuseReport(t *testing.T) {
	exp := func(w *graphtest.Writer, x *G.Node) *G.Node { return w.Must(G.Exp(x)) }
	sum := func(w *graphtest.Writer, e *G.Node, axis int) *G.Node {
		return w.Column(w.Must(G.Sum(e, axis)), e, axis)
	}
	over := func(w *graphtest.Writer, a, b *G.Node, axis int) *G.Node {
		return w.Must(G.BroadcastHadamardDiv(a, b, nil, []byte{byte(axis)}))
	}
	sigmoid := func(w *graphtest.Writer, x *G.Node) *G.Node {
		return w.Must(G.Inverse(w.Add(exp(w, w.Must(G.Neg(x))), w.Number(1))))
	}
	for name, c := range map[string]struct {
		between func(w *graphtest.Writer, s *G.Node, keys int) *G.Node // the products; keys is an axis of s
		matrix  string                                                 // part of the only line, nothing for no line
		stack   string                                                 // the same, "" where it is matrix
	}{
		"the sum of others": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node {
			return over(w, exp(w, s), sum(w, exp(w, w.Input("other", s.Shape()...)), keys), keys)
		}, "by a sum of others", ""},
		"the inverse of the sum of others": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node {
			r := w.Must(G.Inverse(sum(w, w.Input("other", s.Shape()...), keys)))
			return w.Must(G.BroadcastHadamardProd(r, exp(w, s), []byte{byte(keys)}, nil))
		}, "by a sum of others", ""},
		"the sum of the scores": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node {
			return over(w, exp(w, s), sum(w, s, keys), keys)
		}, "by a sum of others", ""},
		"the axis of queries": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node { return w.ByHand(s, keys-1, false) }, "sums over the other axis", ""},
		"a sum along the axis of queries, as a column": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node {
			e := exp(w, s)
			return over(w, e, w.Column(w.Must(G.Sum(e, keys-1)), e, keys), keys)
		}, "repeated along another axis", ""},
		"a sum and more": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node {
			e := exp(w, s)
			return over(w, e, w.Add(sum(w, e, keys), w.Number(1)), keys)
		}, "is made of their sum", ""},
		"one over the sum": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node {
			e := exp(w, s)
			return w.Must(G.BroadcastHadamardProd(e, w.Over(w.Number(1), sum(w, e, keys)), nil, []byte{byte(keys)}))
		}, "is made of their sum", ""},
		"exponentials times a mask": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node {
			e := w.Times(exp(w, s), w.Input("shown", s.Shape()...))
			return over(w, e, sum(w, e, keys), keys)
		}, "(÷ false), without a SoftMax", ""},
		"exponentials alone": {func(w *graphtest.Writer, s *G.Node, _ int) *G.Node { return exp(w, s) }, "(exp), without a SoftMax", ""},
		"the logarithm":      {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node { return w.Must(G.LogSoftMax(s, keys)) }, "without a SoftMax", ""},
		"a sigmoid by hand":  {func(w *graphtest.Writer, s *G.Node, _ int) *G.Node { return sigmoid(w, s) }, "", "without a SoftMax"},
		"SiLU by hand":       {func(w *graphtest.Writer, s *G.Node, _ int) *G.Node { return w.Times(s, sigmoid(w, s)) }, "", "without a SoftMax"},
		"tanh":               {func(w *graphtest.Writer, s *G.Node, _ int) *G.Node { return w.Must(G.Tanh(s)) }, "", ""},
		"a bias and ReLU": {func(w *graphtest.Writer, s *G.Node, _ int) *G.Node {
			return w.Must(G.Rectify(w.Add(s, w.Input("b", s.Shape()...))))
		}, "", ""},
		"a scale and a residual": {func(w *graphtest.Writer, s *G.Node, _ int) *G.Node { return w.Add(w.Times(s, w.Number(2)), s) }, "", ""},
		"a mean taken off": {func(w *graphtest.Writer, s *G.Node, keys int) *G.Node {
			return w.Must(G.BroadcastSub(s, sum(w, s, keys), nil, []byte{byte(keys)}))
		}, "", ""},
		"exponentials aside": {func(w *graphtest.Writer, s *G.Node, _ int) *G.Node {
			return w.Times(s, exp(w, w.Input("gate", s.Shape()...)))
		}, "", ""},
	} {
		for _, outer := range [][]int{nil, {2}, {2, 3}} {
			t.Run(fmt.Sprint(name, outer), func(t *testing.T) {
				w := graphtest.NewWriter(t, reftest.Rand(t), tensor.Float64)
				shape := func(s ...int) []int { return slices.Concat(outer, s) }
				product, want := w.BMM, c.matrix
				if outer == nil {
					product = func(a, b *G.Node, _ ...bool) *G.Node { return w.Mul(a, b) }
				} else if c.stack != "" {
					want = c.stack
				}
				q := w.Input("q", shape(5, 4)...)
				s := product(q, w.Input("k", shape(4, 5)...))
				y := product(c.between(w, s, len(outer)+1), w.Input("v", shape(5, 6)...))
				f := w.Fuse([]*G.Node{y}, graphtest.Read(y))
				switch {
				case len(f.Matches) > 0 || len(f.Misses) > 1 || (len(f.Misses) == 0) != (want == ""):
					t.Errorf("want %q\n%v", want, f)
				case want != "":
					_, reason, _ := strings.Cut(f.Misses[0].String(), ": ")
					if !strings.Contains(reason, want) || !strings.Contains(reason, ": ") {
						t.Errorf("%q does not say %q and what to change", reason, want)
					}
				}

				// Gradients are no further attentions.
				cost := w.Must(G.Sum(y))
				grads, err := G.Grad(cost, q)
				if err != nil {
					t.Fatal(err)
				}
				if f, err = rewrite.Fuse(cost, grads[0]); err != nil || len(f.Matches) > 0 || len(f.Misses) > 1 || (len(f.Misses) == 0) != (want == "") {
					t.Errorf("with gradients: want %q, error %v\n%v", want, err, f)
				}
			})
		}
	}
}
