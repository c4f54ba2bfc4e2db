package leanattention_test

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	gonum "gonum.org/v1/gonum/graph"
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

// leftAlone is what is not attention, or not surely, each with the reason.
var leftAlone = []written{
	{name: "another axis", misses: []string{"axis 1 of (2, 3, 5)"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.softmax(w.bmm(q, k, false, true), 1), v))
	}},
	{name: "columns: SoftMax takes the first axis of (n, 1)", misses: []string{"axis 0 of (6, 1)"}, write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3, 4), w.input("k", 2, 1, 4), w.input("v", 2, 1, 6)
		p := w.softmax(w.shape(w.bmm(q, k, false, true), 6, 1))
		return one(w.bmm(w.shape(p, 2, 3, 1), v))
	}},
	{name: "scale is an input", misses: []string{`the scale of its scores depends on node 5 (input "scale"), whose value may change`}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node {
			return w.times(s, G.NewScalar(w.g, w.dtype, G.WithName("scale"), G.WithValue(w.number(0.5).Value())))
		}))
	}},
	{name: "scale of each score", misses: []string{"not one number that is constant"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node {
			x := make([]float64, 30)
			for i := range x {
				x[i] = 1 + float64(i)
			}
			return w.times(s, w.constant("scales", x, 2, 3, 5))
		}))
	}},
	{name: "a number divided by scores", misses: []string{"the scale of its scores, at"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { return w.over(w.number(0.5), s) }))
	}},
	{name: "mask is an input, though causal", misses: []string{`depends on node 2 (input "mask"), whose value may change`}, write: func(w *writer) []*G.Node {
		q, k, m, v := w.input("q", 2, 3, 4), w.input("k", 2, 5, 4), input(w.g, "mask", tensorOf(w.dtype, causalMask(2, 3, 5, -1e9), 2, 3, 5)), w.input("v", 2, 5, 6)
		return one(w.bmm(w.softmax(w.add(w.bmm(q, k, false, true), m), 2), v))
	}},
	{name: "mask is broadcast from an input", misses: []string{`(input "mask"), whose value may change`}, write: func(w *writer) []*G.Node {
		m := w.input("mask", 1, 3, 5)
		return one(w.attend(func(s *G.Node) *G.Node { return w.must(G.BroadcastAdd(s, m, nil, []byte{0})) }))
	}},
	{name: "mask lets one key more be seen", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		return w.added(w.constant("mask", edited(4, 0), 2, 3, 5))
	}},
	{name: "mask hides one key more", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		return w.added(w.constant("mask", edited(16, -1e9), 2, 3, 5))
	}},
	{name: "mask that hides a little", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		return w.added(w.constant("mask", edited(4, -9000), 2, 3, 5))
	}},
	{name: "mask with a bias", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		return w.added(w.constant("mask", edited(0, 1e-30), 2, 3, 5))
	}},
	{name: "mask aligned to the first key", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		m := causalMask(2, 3, 5, 0)
		for at := range m {
			if at%5 > at/5%3 {
				m[at] = -1e9
			}
		}
		return w.added(w.constant("mask", m, 2, 3, 5))
	}},
	{name: "mask under which one query sees no key", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		s := w.bmm(w.input("q", 2, 4, 4), w.input("k", 2, 3, 4), false, true)
		s = w.add(s, w.constant("mask", causalMask(2, 4, 3, -1e9), 2, 4, 3))
		return one(w.bmm(w.softmax(s, 2), w.input("v", 2, 3, 4)))
	}},
	{name: "mask of some heads only", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 3, 5, 4), w.input("k", 3, 5, 4), w.input("v", 3, 5, 4)
		m := w.constant("mask", append(causalMask(2, 5, 5, -1e9), make([]float64, 25)...), 3, 5, 5)
		return one(w.bmm(w.softmax(w.add(w.bmm(q, k, false, true), m), 2), v))
	}},
	{name: "mask with a period that is not that of the rows", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		q, k, v := w.input("q", 2, 3, 4), w.input("k", 2, 5, 4), w.input("v", 2, 5, 4)
		m := w.constant("mask", causalMask(3, 2, 5, -1e9), 2, 3, 5)
		return one(w.bmm(w.softmax(w.add(w.bmm(q, k, false, true), m), 2), v))
	}},
	{name: "mask turned around by a negative scale", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		m := w.constant("mask", causalMask(2, 3, 5, -1e9), 2, 3, 5)
		return one(w.attend(func(s *G.Node) *G.Node { return w.times(w.add(s, m), w.number(-0.5)) }))
	}},
	{name: "mask made small by the scale", misses: []string{"not causal"}, write: func(w *writer) []*G.Node {
		m := w.constant("mask", causalMask(2, 3, 5, -1e5), 2, 3, 5)
		return one(w.attend(func(s *G.Node) *G.Node { return w.times(w.add(s, m), w.number(0.01)) }))
	}},
	{name: "scores of another attention added", misses: []string{"its scores are needed elsewhere", "the mask of its scores, at"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		s := w.bmm(q, k, false, true)
		a := w.bmm(w.softmax(s, 2), v)
		more := w.add(w.bmm(q, w.must(G.Tanh(k)), false, true), s)
		return []*G.Node{a, w.bmm(w.softmax(more, 2), v)}
	}},
	{name: "dropout of weights", misses: []string{"(Dropout{"}, write: func(w *writer) []*G.Node {
		return one(w.behind(func(p *G.Node) *G.Node { return w.must(G.Dropout(p, 0)) }))
	}},
	{name: "dropout of scores", misses: []string{"its scores come from node 4 (Dropout{"}, write: func(w *writer) []*G.Node {
		return one(w.attend(func(s *G.Node) *G.Node { return w.must(G.Dropout(s, 0)) }))
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
	{name: "scores are read", misses: []string{"needed elsewhere too: node 3 (A ××× Bᵀ)"}, write: func(w *writer) []*G.Node {
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
	{name: "weights in other rows", misses: []string{"(Reshape(2, 5, 3)), not into a product"}, write: func(w *writer) []*G.Node {
		q, k, _ := w.qkv()
		return one(w.bmm(w.shape(w.softmax(w.bmm(q, k, false, true), 2), 2, 5, 3), w.input("u", 2, 3, 4)))
	}},
	{name: "scores in other rows", misses: []string{"a Reshape changed the rows"}, write: func(w *writer) []*G.Node {
		q, k, _ := w.qkv()
		return one(w.bmm(w.softmax(w.shape(w.bmm(q, k, false, true), 2, 5, 3), 2), w.input("u", 2, 3, 4)))
	}},
	{name: "scores in other stacks", misses: []string{"2 matrices of 6 rows and its weights 3 of 4"}, write: func(w *writer) []*G.Node {
		s := w.bmm(w.input("q", 2, 6, 4), w.input("k", 2, 5, 4), false, true)
		return one(w.bmm(w.shape(w.softmax(s, 2), 3, 4, 5), w.input("v", 3, 5, 4)))
	}},
	{name: "scores transposed", misses: []string{"its scores come from node 4 (Aᵀ{0, 2, 1})"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		return one(w.bmm(w.softmax(w.swap(w.bmm(k, q, false, true), 0, 2, 1), 2), v))
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
	{name: "SoftMax made by hand", misses: []string{"by way of node 10 (÷ false), without a SoftMax"}, write: func(w *writer) []*G.Node {
		q, k, v := w.qkv()
		e := w.must(G.Exp(w.bmm(q, k, false, true)))
		sum := w.shape(w.must(G.Sum(e, 2)), 2, 3, 1)
		return one(w.bmm(w.must(G.BroadcastHadamardDiv(e, sum, nil, []byte{2})), v))
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
			p = w.must(G.Dropout(p, 0))
		}
		x = w.must(G.Tanh(w.bmm(p, x)))
	}
	(&written{matches: 4, misses: []string{"Dropout"}}).check(t, w.fuse([]*G.Node{x}, read(x)))
}

// TestFuseReads: what is read in the old graph is read in the new one, also
// what no root needs, and an input without a value is bound under its new node.
func TestFuseReads(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	x := G.NewTensor(w.g, w.dtype, 3, G.WithShape(2, 3, 4), G.WithName("x"))
	unbound := G.NewTensor(w.g, w.dtype, 3, G.WithShape(2, 3, 4), G.WithName("of no use"))
	o := w.must(G.Tanh(w.bmm(w.softmax(w.bmm(x, x, false, true), 2), x)))
	aside := w.must(G.Exp(x))
	reads := read(aside, o)
	f, err := la.Fuse(o)
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Matches) != 1 || f.Node(aside) == nil || f.Node(unbound) != nil || f.Node(x).Value() != nil {
		t.Fatalf("%v, x has value %v", f, f.Node(x).Value())
	}
	if f.Node(f.Matches[0].Output) != f.Matches[0].Node {
		t.Error("the node of the match is not the image of its output")
	}
	value := w.random(2, 3, 4)
	let(t, x, value)
	let(t, unbound, value)
	want := outputs(t, w.g, reads)
	let(t, f.Node(x), value)
	got := outputs(t, f.Graph, reads)
	for i := range want {
		if err := near(got[i], want[i], w.dtype); err != nil {
			t.Error(err)
		}
	}
}

// TestFuseSet: the other statement goes along too.
func TestFuseSet(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	x, y := w.input("x", 2, 3), w.input("y", 2, 3)
	set := G.Set(x, w.must(G.Tanh(y)))
	f, err := la.Fuse(w.must(G.Exp(x)))
	if err != nil || f.Node(set) == nil || count(f.Graph, "tanh") != 1 || f.Node(set).Op() != set.Op() {
		t.Errorf("%v, %v", f, err)
	}
}

// TestFuseNames: nodes keep the names that they were given, and get no others.
func TestFuseNames(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	x := G.NewTensor(w.g, w.dtype, 3, G.WithShape(2, 3, 4), G.WithValue(w.random(2, 3, 4)))
	o := w.bmm(w.softmax(w.bmm(x, x, false, true), 2), x)
	G.WithName("layer 1")(o)
	y := w.must(G.Tanh(o))
	f := w.fuse([]*G.Node{y}, read(y))
	if got := f.Node(o).Name(); got != "layer 1" {
		t.Errorf("the attention is called %q", got)
	}
	if len(f.Graph.ByName("")) != 2 || f.Node(x).Name() != x.Name() {
		t.Errorf("of two nodes without a name %d are left; the input is %q", len(f.Graph.ByName("")), f.Node(x).Name())
	}
}

// TestFuseShares: ops with a state and values are the same ones, and a graph
// rewritten twice has nothing left to match.
func TestFuseShares(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.input("x", 2, 3, 4)
	d := w.must(G.Dropout(x, 0))
	o := w.bmm(w.softmax(w.bmm(d, d, false, true), 2), d)
	f := w.fuse([]*G.Node{o}, read(o))
	if f.Node(d).Op() != d.Op() {
		t.Error("a Dropout is another one")
	}
	again, err := la.Fuse(f.Roots...)
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
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.input("x", 2, 3, 4)
	o := w.bmm(w.softmax(w.bmm(x, w.must(G.Tanh(x)), false, true), 2), x)
	cost := w.must(G.Sum(o))
	grads, err := G.Grad(cost, x)
	if err != nil {
		t.Fatal(err)
	}
	roots := append([]*G.Node{cost}, grads...)
	f := w.fuse(roots, read(roots...))
	(&written{misses: []string{"needed 3 times"}}).check(t, f)
	if f.Node(x).Deriv() != f.Node(grads[0]) {
		t.Error("the input has another gradient node")
	}
}

// TestFuseInfinity: a scale that is not a number stays where it is.
func TestFuseInfinity(t *testing.T) {
	rng := reftest.Rand(t)
	for name, scale := range map[string]func(w *writer, x *G.Node) *G.Node{
		"infinite":     func(w *writer, x *G.Node) *G.Node { return w.times(x, w.number(math.Inf(1))) },
		"over 0":       func(w *writer, x *G.Node) *G.Node { return w.over(x, w.number(0)) },
		"too much":     func(w *writer, x *G.Node) *G.Node { return w.times(w.times(x, w.number(1e200)), w.number(1e201)) },
		"not a number": func(w *writer, x *G.Node) *G.Node { return w.add(x, w.number(math.NaN())) },
	} {
		w := newWriter(t, rng, tensor.Float64)
		f, err := la.Fuse(w.attend(func(s *G.Node) *G.Node { return scale(w, s) }))
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
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	y := w.must(G.Tanh(w.input("x", 2, 3, 6)))
	v, k, q := w.input("v", 2, 5, 6), w.input("k", 2, 5, 4), w.must(G.Exp(w.input("q", 2, 3, 4)))
	o := w.bmm(w.softmax(w.bmm(q, k, false, true), 2), v)
	G.WithChildren(G.Nodes{o})(y)
	w.g.SetEdge(edge{y, o})
	want := slices.Clone(floats(t, evaluate(t, y, make(map[*G.Node]G.Value))))
	f, err := la.Fuse(y)
	if err != nil || len(f.Matches) != 1 {
		t.Fatalf("%v, %v", f, err)
	}
	if err := near(outputs(t, f.Graph, read(f.Roots...))[0], want, w.dtype); err != nil {
		t.Error(err)
	}
}

// TestFuseMerges: two ways to write one attention become one node, and so do the
// nodes behind them; their types stay those of the old graph's too.
func TestFuseMerges(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	q, k, v := w.qkv()
	half := w.number(0.5)
	a := w.shape(w.bmm(w.softmax(w.times(w.bmm(q, k, false, true), half), 2), v), 3, 2, 2, 3)
	b := w.shape(w.bmm(w.softmax(w.bmm(w.times(q, half), k, false, true), 2), v), 3, 2, 2, 3)
	c := w.add(w.must(G.Tanh(a)), b)
	f := w.fuse([]*G.Node{c}, read(c))
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
		late func(w *writer, k *G.Node) *G.Node
	}{
		"a Reshape":  {written{misses: []string{"may overwrite an operand"}}, func(w *writer, k *G.Node) *G.Node { return w.times(w.shape(k, 40), w.number(3)) }},
		"the node":   {written{matches: 1}, func(w *writer, k *G.Node) *G.Node { return w.times(k, w.number(3)) }},
		"a new node": {written{matches: 1}, func(w *writer, k *G.Node) *G.Node { return w.must(G.Exp(w.shape(k, 40))) }},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWriter(t, rng, tensor.Float64)
			q, k := w.input("q", 1, 2, 1, 3, 4), w.must(G.Tanh(w.input("k", 1, 2, 1, 5, 4)))
			s := w.bmm(q, k, false, true)
			late := c.late(w, k)
			v := w.must(G.Exp(w.input("v", 1, 2, 1, 5, 6)))
			o := w.bmm(w.softmax(s, 4), v)
			c.check(t, w.fuse([]*G.Node{o, late}, read(o, late)))
		})
	}
}

// colliding is two names of inputs like x whose nodes have the same hash.
func (w *writer) colliding(x *G.Node) (a, b string) {
	seen := make(map[uint32]string)
	for {
		name := fmt.Sprintf("%x", w.rng.Uint64())
		h := fnv.New32a()
		fmt.Fprintf(h, "%v%v%s\x00", x.Type(), x.Shape(), name) // of no children
		if other, ok := seen[h.Sum32()]; ok {
			return other, name
		}
		seen[h.Sum32()] = name
	}
}

// TestFuseCollision: where Gorgonia takes two nodes for one Fuse says so.
func TestFuseCollision(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	nameA, nameB := w.colliding(w.input("x", 2, 3, 4))
	a, b := w.input(nameA, 2, 3, 4), w.input(nameB, 2, 3, 4)
	if f, err := la.Fuse(w.add(a, b)); f != nil || !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), nameB) {
		t.Errorf("inputs: %v, %v", f, err)
	}
	_, k, v := w.qkv()
	half := w.number(0.5)
	x := w.bmm(w.softmax(w.times(w.bmm(a, k, false, true), half), 2), v)
	y := w.bmm(w.softmax(w.bmm(w.times(b, half), k, false, true), 2), v)
	if f, err := la.Fuse(x, y); f != nil || !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), "other inputs; rename") {
		t.Errorf("attentions: %v, %v", f, err)
	}
}

func TestFuseErrors(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.input("x", 2, 3)
	other := newWriter(t, w.rng, tensor.Float64).input("x", 2, 3)
	for name, roots := range map[string][]*G.Node{
		"none": nil, "nil": {x, nil}, "two graphs": {x, other}, "no graph": {G.NewConstant(1.0)},
	} {
		if f, err := la.Fuse(roots...); f != nil || !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), "Fuse") {
			t.Errorf("%s: %v, %v", name, f, err)
		}
	}
	f, err := la.Fuse(x)
	if err != nil || f.Roots[0].Value() != x.Value() || f.String() != "0 fused, 0 left alone\n" {
		t.Errorf("an input alone: %v, %v", f, err)
	}
}
