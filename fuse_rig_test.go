package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// writer writes graphs as users do, with a fatal error for each mistake.
type writer struct {
	t     testing.TB
	g     *G.ExprGraph
	rng   *rand.Rand
	dtype tensor.Dtype
	n     int
	make  map[string]func() *tensor.Dense // of inputs whose values are not random, by their names
}

func newWriter(t testing.TB, rng *rand.Rand, dtype tensor.Dtype) *writer {
	return &writer{t: t, g: G.NewGraph(), rng: rng, dtype: dtype}
}

func (w *writer) must(n *G.Node, err error) *G.Node {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// random is numbers of a spread that keeps scores moderate.
func (w *writer) random(shape ...int) *tensor.Dense {
	x := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = w.rng.NormFloat64()
	}
	return tensorOf(w.dtype, x, shape...)
}

// input is a named input with random numbers.
func (w *writer) input(name string, shape ...int) *G.Node {
	return input(w.g, name, w.random(shape...))
}

// weight is an input with a name of its own.
func (w *writer) weight(in, out int) *G.Node {
	w.n++
	return input(w.g, fmt.Sprintf("weight %d", w.n), w.small(in, out))
}

// small is numbers that make half of what they multiply: layers that add to
// their input keep scores moderate. Large ones can't be compared: tensor's
// SoftMax is imprecise, or NaN, where a row lies far below its first number
// (docs/externalop has the test).
func (w *writer) small(shape ...int) *tensor.Dense {
	x := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = w.rng.NormFloat64() / (2 * math.Sqrt(float64(shape[0])))
	}
	return tensorOf(w.dtype, x, shape...)
}

// number is a constant.
func (w *writer) number(x float64) *G.Node {
	if w.dtype == tensor.Float32 {
		return w.g.AddNode(G.NewConstant(float32(x)))
	}
	return w.g.AddNode(G.NewConstant(x))
}

// constant is a constant tensor. Gorgonia takes those for equal that print
// alike, but for their names.
func (w *writer) constant(name string, x []float64, shape ...int) *G.Node {
	return w.g.AddNode(G.NewConstant(tensorOf(w.dtype, x, shape...), G.WithName(name)))
}

func (w *writer) bmm(a, b *G.Node, trans ...bool) *G.Node {
	w.t.Helper()
	return w.must(G.BatchedMatMul(a, b, trans...))
}
func (w *writer) mul(a, b *G.Node) *G.Node   { w.t.Helper(); return w.must(G.Mul(a, b)) }
func (w *writer) times(a, b *G.Node) *G.Node { w.t.Helper(); return w.must(G.HadamardProd(a, b)) }
func (w *writer) over(a, b *G.Node) *G.Node  { w.t.Helper(); return w.must(G.HadamardDiv(a, b)) }
func (w *writer) add(a, b *G.Node) *G.Node   { w.t.Helper(); return w.must(G.Add(a, b)) }
func (w *writer) swap(a *G.Node, p ...int) *G.Node {
	w.t.Helper()
	return w.must(G.Transpose(a, p...))
}
func (w *writer) shape(a *G.Node, s ...int) *G.Node {
	w.t.Helper()
	return w.must(G.Reshape(a, s))
}
func (w *writer) softmax(a *G.Node, axis ...int) *G.Node {
	w.t.Helper()
	return w.must(G.SoftMax(a, axis...))
}

// causalMask is heads times the causal mask of nq queries over n keys.
func causalMask(heads, nq, n int, hide float64) []float64 {
	m := make([]float64, heads*nq*n)
	for at := range m {
		if i, j := at/n%nq, at%n; j > n-nq+i {
			m[at] = hide
		}
	}
	return m
}

// picture is all that a graph is: what must not change.
func picture(g *G.ExprGraph) string {
	var b strings.Builder
	for _, n := range g.AllNodes() {
		var children []int64
		for it := g.From(n.ID()); it != nil && it.Next(); {
			children = append(children, it.Node().ID())
		}
		fmt.Fprintf(&b, "%d %x %q %v %v %v %p", n.ID(), n.Hashcode(), n.Name(), n.Type(), n.Shape(), children, n.Value())
		if d, ok := n.Value().(*tensor.Dense); ok {
			fmt.Fprintf(&b, " %v %v %v", d.Shape(), d.Strides(), d.Data())
		}
		if n.Op() != nil {
			fmt.Fprintf(&b, " %T %x", n.Op(), n.Op().Hashcode())
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// outputs runs a graph and copies what reads were told to read.
func outputs(t testing.TB, g *G.ExprGraph, reads []*G.Value) [][]float64 {
	t.Helper()
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	var out [][]float64
	for _, r := range reads {
		out = append(out, slices.Clone(floats(t, *r)))
		*r = nil
	}
	return out
}

// fuse rewrites the graph of roots and checks all that holds for every graph:
// the old one is as it was, results are the same, for several inputs, and
// inputs are the same values. reads are what the graph reads its results into.
func (w *writer) fuse(roots []*G.Node, reads []*G.Value) *la.Fused {
	t := w.t
	t.Helper()
	before := picture(w.g)
	f, err := la.Fuse(roots...)
	if err != nil {
		t.Fatal(err)
	}
	if after := picture(w.g); after != before {
		t.Errorf("the graph that was given changed:\n%s\nwas\n%s", after, before)
	}
	if len(f.Roots) != len(roots) {
		t.Fatalf("%d roots of %d", len(f.Roots), len(roots))
	}
	for i, r := range f.Roots {
		if r == nil || r.Graph() != f.Graph || f.Graph == w.g || f.Node(roots[i]) != r {
			t.Fatalf("root %d is %v", i, r)
		}
		if r.Op() != nil && r.Op().Type() != nil && (!r.Shape().Eq(roots[i].Shape()) || r.Dtype() != roots[i].Dtype()) {
			t.Errorf("root %d is %v of %v and was %v of %v", i, r.Shape(), r.Dtype(), roots[i].Shape(), roots[i].Dtype())
		}
	}
	for round := range 3 {
		for _, n := range w.g.AllNodes() {
			x := f.Node(n)
			if n.Op() != nil || x == nil {
				continue
			}
			if v := w.another(n); round > 0 && v != nil {
				let(t, n, v)
				let(t, x, v)
			}
			if x.Name() != n.Name() || !x.Shape().Eq(n.Shape()) || !x.Type().Eq(n.Type()) || x.Value() != n.Value() {
				t.Errorf("input %v %v of value %p is now %v %v of value %p", n, n.Shape(), n.Value(), x, x.Shape(), x.Value())
			}
		}
		want := outputs(t, w.g, reads)
		got := outputs(t, f.Graph, reads)
		for i := range want {
			if err := near(got[i], want[i], w.dtype); err != nil {
				t.Errorf("round %d, result %d: %v\n%v", round, i, err, f)
			}
		}
	}
	return f
}

// another is a new value for an input, nil for one that is fixed.
func (w *writer) another(n *G.Node) G.Value {
	switch name := n.Name(); {
	case strings.HasPrefix(name, "leanattention."):
		return nil
	case w.make[name] != nil:
		return w.make[name]()
	case n.IsScalar():
		return w.number(0.2 + w.rng.Float64()).Value()
	case n.IsMatrix(): // a weight
		return w.small(n.Shape()...)
	}
	return w.random(n.Shape()...)
}

// near compares results of two orders of the same sums.
func near(got, want []float64, t tensor.Dtype) error {
	unit := 2e-5
	if t == tensor.Float64 {
		unit = 1e-12
	}
	return within(got, want, unit)
}

// within compares numbers, of which the largest may be off by unit times itself, and
// others by as much.
func within(got, want []float64, unit float64) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d numbers, want %d", len(got), len(want))
	}
	most := 1.0
	for _, x := range want {
		if !math.IsNaN(x) {
			most = max(most, math.Abs(x))
		}
	}
	for i := range got {
		if math.IsNaN(got[i]) && math.IsNaN(want[i]) {
			continue
		}
		if !(math.Abs(got[i]-want[i]) <= unit*most) {
			return fmt.Errorf("number %d is %v, want %v", i, got[i], want[i])
		}
	}
	return nil
}

// read makes the graph keep values of nodes.
func read(nodes ...*G.Node) (reads []*G.Value) {
	for _, n := range nodes {
		v := new(G.Value)
		G.Read(n, v)
		reads = append(reads, v)
	}
	return reads
}

// count is the nodes of a graph whose op is called so.
func count(g *G.ExprGraph, op string) (n int) {
	for _, x := range g.AllNodes() {
		if x.Op() != nil && strings.Contains(x.Op().String(), op) {
			n++
		}
	}
	return n
}
