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

// TestFuseOverlap: of two attentions of which one's output is the other's scores
// one is replaced.
func TestFuseOverlap(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	s := w.bmm(w.softmax(w.bmm(w.input("q", 2, 32, 4), w.input("k", 2, 5, 4), false, true), 2), w.input("v", 2, 5, 6))
	o := w.bmm(w.softmax(s, 2), w.input("u", 2, 6, 4))
	(&written{matches: 1, misses: []string{"part of another attention"}}).check(t, w.fuse([]*G.Node{o}, read(o)))
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

// TestFuseHeadsApart: where the projections of heads may be overwritten before all
// of the heads are there, each head is an attention of its own.
func TestFuseHeadsApart(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	x := w.must(G.Tanh(w.input("x", 4, 8)))
	late := w.times(w.shape(x, 32), w.number(3))
	o := w.loop(2, x, w.input("k", 4, 8), w.input("v", 4, 8), func(q, k, v *G.Node) *G.Node {
		return w.mul(w.softmax(w.mul(q, w.swap(k))), v)
	})
	roots := []*G.Node{o, late}
	f, err := la.Fuse(roots...)
	if err != nil {
		t.Fatal(err)
	}
	(&written{matches: 2}).check(t, f)
}

// TestFuseTwice: what two attentions do with one operand is done for each, where
// it stood.
func TestFuseTwice(t *testing.T) {
	w := newWriter(t, reftest.Rand(t), tensor.Float64)
	q := w.must(G.Tanh(w.input("q", 1, 2, 1, 3, 4)))
	attention := func(k, v string) *G.Node {
		return w.bmm(w.softmax(w.bmm(q, w.input(k, 1, 2, 1, 5, 4), false, true), 4), w.input(v, 1, 2, 1, 5, 6))
	}
	a := attention("k1", "v1")
	late := w.times(q, w.number(3))
	b := attention("k2", "v2")
	(&written{matches: 2}).check(t, w.fuse([]*G.Node{a, late, b}, read(a, late, b)))
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
