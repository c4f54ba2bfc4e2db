package graphtest

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Writer writes graphs as users write them. Every error ends the test.
type Writer struct {
	t     testing.TB
	G     *G.ExprGraph
	Rng   *rand.Rand
	DType tensor.Dtype
	N     int
	Make  map[string]func() *tensor.Dense // makes inputs with non-random values, keyed by name
}

// NewWriter starts a graph of one element type.
func NewWriter(t testing.TB, rng *rand.Rand, dtype tensor.Dtype) *Writer {
	return &Writer{t: t, G: G.NewGraph(), Rng: rng, DType: dtype}
}

// Must returns n, and ends the test if err is not nil.
func (w *Writer) Must(n *G.Node, err error) *G.Node {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// Random returns a tensor of N(0,1), which keeps scores moderate.
func (w *Writer) Random(shape ...int) *tensor.Dense {
	x := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = w.Rng.NormFloat64()
	}
	return TensorOf(w.DType, x, shape...)
}

// Input makes a named input with random numbers.
func (w *Writer) Input(name string, shape ...int) *G.Node {
	return Input(w.G, name, w.Random(shape...))
}

// Weight makes an input with a unique name.
func (w *Writer) Weight(in, out int) *G.Node {
	w.N++
	return Input(w.G, fmt.Sprintf("weight %d", w.N), w.small(in, out))
}

// small returns a tensor whose product halves the size of its input. Residual layers then keep scores
// moderate. Large scores cannot be compared, because tensor's SoftMax is imprecise, or NaN, if a row's
// elements are far below its first element (docs/externalop has the test).
func (w *Writer) small(shape ...int) *tensor.Dense {
	x := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = w.Rng.NormFloat64() / (2 * math.Sqrt(float64(shape[0])))
	}
	return TensorOf(w.DType, x, shape...)
}

// Number returns a constant.
func (w *Writer) Number(x float64) *G.Node {
	if w.DType == tensor.Float32 {
		return w.G.AddNode(G.NewConstant(float32(x)))
	}
	return w.G.AddNode(G.NewConstant(x))
}

// Constant returns a constant tensor. The name is necessary: Gorgonia considers constants equal if they print
// the same, except for their names.
func (w *Writer) Constant(name string, x []float64, shape ...int) *G.Node {
	return w.G.AddNode(G.NewConstant(TensorOf(w.DType, x, shape...), G.WithName(name)))
}

func (w *Writer) BMM(a, b *G.Node, trans ...bool) *G.Node {
	w.t.Helper()
	return w.Must(G.BatchedMatMul(a, b, trans...))
}
func (w *Writer) Mul(a, b *G.Node) *G.Node   { w.t.Helper(); return w.Must(G.Mul(a, b)) }
func (w *Writer) Times(a, b *G.Node) *G.Node { w.t.Helper(); return w.Must(G.HadamardProd(a, b)) }
func (w *Writer) Over(a, b *G.Node) *G.Node  { w.t.Helper(); return w.Must(G.HadamardDiv(a, b)) }
func (w *Writer) Add(a, b *G.Node) *G.Node   { w.t.Helper(); return w.Must(G.Add(a, b)) }
func (w *Writer) Swap(a *G.Node, p ...int) *G.Node {
	w.t.Helper()
	return w.Must(G.Transpose(a, p...))
}
func (w *Writer) Shape(a *G.Node, s ...int) *G.Node {
	w.t.Helper()
	return w.Must(G.Reshape(a, s))
}
func (w *Writer) Softmax(a *G.Node, axis ...int) *G.Node {
	w.t.Helper()
	return w.Must(G.SoftMax(a, axis...))
}

// CausalMask returns the causal mask of nq queries over n keys, repeated for each head. hide is the number at
// hidden keys.
func CausalMask(heads, nq, n int, hide float64) []float64 {
	m := make([]float64, heads*nq*n)
	for at := range m {
		if i, j := at/n%nq, at%n; j > n-nq+i {
			m[at] = hide
		}
	}
	return m
}

// picture returns a description of the whole graph, to detect changes.
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

// linkFirst checks that a graph from Fuse transfers values before a machine loads them.
func linkFirst(t testing.TB, g *G.ExprGraph) {
	t.Helper()
	sorted, err := G.Sort(g)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(sorted)
	isLink := func(n *G.Node) bool { return n.Op() != nil && n.Op().String() == "Link" }
	isInput := func(n *G.Node) bool { return n.Op() == nil }
	if link, input := slices.IndexFunc(sorted, isLink), slices.IndexFunc(sorted, isInput); link > input {
		t.Errorf("the link is node %d that a machine runs, behind input %v, node %d", link, sorted[input], input)
	}
}

// Outputs runs a graph and returns copies of the values in reads.
func Outputs(t testing.TB, g *G.ExprGraph, reads []*G.Value) [][]float64 {
	t.Helper()
	linkFirst(t, g)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	var out [][]float64
	for _, r := range reads {
		out = append(out, slices.Clone(Floats(t, *r)))
		*r = nil
	}
	return out
}

// Fuse rewrites the graph of roots and checks the properties that hold for every graph:
//
//   - the old graph does not change
//   - the results are the same, for several inputs
//   - the inputs have the same values
//
// reads holds the values that the graph reads its results into.
func (w *Writer) Fuse(roots []*G.Node, reads []*G.Value) *rewrite.Fused {
	t := w.t
	t.Helper()
	before := picture(w.G)
	f, err := rewrite.Fuse(roots...)
	if err != nil {
		t.Fatal(err)
	}
	if after := picture(w.G); after != before {
		t.Errorf("the graph that was given changed:\n%s\nwas\n%s", after, before)
	}
	if len(f.Roots) != len(roots) {
		t.Fatalf("%d roots of %d", len(f.Roots), len(roots))
	}
	for i, r := range f.Roots {
		if r == nil || r.Graph() != f.Graph || f.Graph == w.G || f.Node(roots[i]) != r {
			t.Fatalf("root %d is %v", i, r)
		}
		if r.Op() != nil && r.Op().Type() != nil && (!r.Shape().Eq(roots[i].Shape()) || r.Dtype() != roots[i].Dtype()) {
			t.Errorf("root %d is %v of %v and was %v of %v", i, r.Shape(), r.Dtype(), roots[i].Shape(), roots[i].Dtype())
		}
	}
	const letOld = 2 // round in which values are bound to the old graph's nodes only
	for round := range 3 {
		for _, n := range w.G.AllNodes() {
			x := f.Node(n)
			if n.Op() != nil || x == nil {
				continue
			}
			if v := w.another(n); round > 0 && v != nil {
				Let(t, n, v)
				if round != letOld {
					Let(t, x, v)
				}
			}
			if x.Name() != n.Name() || !x.Shape().Eq(n.Shape()) || !x.Type().Eq(n.Type()) || x.Value() != n.Value() && round != letOld {
				t.Errorf("input %v %v of value %p is now %v %v of value %p", n, n.Shape(), n.Value(), x, x.Shape(), x.Value())
			}
		}
		want := Outputs(t, w.G, reads)
		got := Outputs(t, f.Graph, reads)
		for i := range want {
			if err := Near(got[i], want[i], w.DType); err != nil {
				t.Errorf("round %d, result %d: %v\n%v", round, i, err, f)
			}
		}
		for _, n := range w.G.Inputs() {
			if x := f.Node(n); x != nil && x.Value() != n.Value() {
				t.Errorf("round %d: input %v has value %p, and in the new graph %p", round, n, n.Value(), x.Value())
			}
		}
	}
	return f
}

// another returns a new value for an input, or nil for a fixed input.
func (w *Writer) another(n *G.Node) G.Value {
	switch name := n.Name(); {
	case strings.HasPrefix(name, "leanattention."):
		return nil
	case w.Make[name] != nil:
		return w.Make[name]()
	case n.IsScalar():
		return w.Number(0.2 + w.Rng.Float64()).Value()
	case n.IsMatrix(): // a weight
		return w.small(n.Shape()...)
	}
	return w.Random(n.Shape()...)
}

// Near compares results of the same sums in two orders.
func Near(got, want []float64, t tensor.Dtype) error {
	unit := 2e-5
	if t == tensor.Float64 {
		unit = 1e-12
	}
	return Within(got, want, unit)
}

// Within checks that all numbers differ by at most unit times the largest absolute value, which counts as at
// least 1.
func Within(got, want []float64, unit float64) error {
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

// Read makes the graph keep the values of nodes.
func Read(nodes ...*G.Node) (reads []*G.Value) {
	for _, n := range nodes {
		v := new(G.Value)
		G.Read(n, v)
		reads = append(reads, v)
	}
	return reads
}

// Count returns the number of nodes whose op contains a name.
func Count(g *G.ExprGraph, op string) (n int) {
	for _, x := range g.AllNodes() {
		if x.Op() != nil && strings.Contains(x.Op().String(), op) {
			n++
		}
	}
	return n
}

// Heads splits (T, heads*d) into (heads, T, d).
func (w *Writer) Heads(x *G.Node, heads int) *G.Node {
	s := x.Shape()
	return w.Swap(w.Shape(x, s[0], heads, s[1]/heads), 1, 0, 2)
}

// Tokens is the inverse of Heads.
func (w *Writer) Tokens(x *G.Node) *G.Node {
	s := x.Shape()
	return w.Shape(w.Swap(x, 1, 0, 2), s[1], s[0]*s[2])
}

// FeedForward returns the feed-forward half of a layer.
func (w *Writer) FeedForward(x *G.Node) *G.Node {
	width := x.Shape()[1]
	h := w.Must(G.Rectify(w.Mul(x, w.Weight(width, 2*width))))
	return w.Add(x, w.Mul(h, w.Weight(2*width, width)))
}

// Dense returns a fully connected layer with a bias, as layer libraries write it.
func (w *Writer) Dense(x *G.Node, out int) *G.Node {
	y := w.Mul(x, w.Weight(x.Shape()[1], out))
	return w.Must(G.BroadcastAdd(y, w.Weight(1, out), nil, []byte{0}))
}

// QKV returns operands of attention with 3 queries and 5 keys.
func (w *Writer) QKV() (q, k, v *G.Node) {
	return w.Input("q", 2, 3, 4), w.Input("k", 2, 5, 4), w.Input("v", 2, 5, 6)
}

// Attend returns attention with f applied to the scores.
func (w *Writer) Attend(f func(scores *G.Node) *G.Node) *G.Node {
	q, k, v := w.QKV()
	return w.BMM(w.Softmax(f(w.BMM(q, k, false, true)), 2), v)
}

// Behind returns attention with f applied to the weights.
func (w *Writer) Behind(f func(weights *G.Node) *G.Node) *G.Node {
	q, k, v := w.QKV()
	return w.BMM(f(w.Softmax(w.BMM(q, k, false, true), 2)), v)
}

// Added returns attention with a mask added to the scores.
func (w *Writer) Added(mask *G.Node) []*G.Node {
	return []*G.Node{w.Attend(func(s *G.Node) *G.Node { return w.Add(s, mask) })}
}

// Colliding returns two names for inputs like x whose nodes have the same hash.
func (w *Writer) Colliding(x *G.Node) (a, b string) {
	seen := make(map[uint32]string)
	for {
		name := fmt.Sprintf("%x", w.Rng.Uint64())
		h := fnv.New32a()
		fmt.Fprintf(h, "%v%v%s\x00", x.Type(), x.Shape(), name) // a node without children
		if other, ok := seen[h.Sum32()]; ok {
			return other, name
		}
		seen[h.Sum32()] = name
	}
}

// Scalar returns an input of one number, made by NewScalar.
func (w *Writer) Scalar(name string, x float64) *G.Node {
	return G.NewScalar(w.G, w.DType, G.WithName(name), G.WithValue(w.Number(x).Value()))
}

// AnyScalar returns an input of one number, made by NodeFromAny.
func (w *Writer) AnyScalar(name string, x float64) *G.Node {
	if w.DType == tensor.Float32 {
		return G.NodeFromAny(w.G, float32(x), G.WithName(name))
	}
	return G.NodeFromAny(w.G, x, G.WithName(name))
}

// fresh returns an input whose value f makes again for every run.
func (w *Writer) fresh(name string, f func() []float64, shape ...int) *G.Node {
	if w.Make == nil {
		w.Make = make(map[string]func() *tensor.Dense)
	}
	w.Make[name] = func() *tensor.Dense { return TensorOf(w.DType, f(), shape...) }
	return Input(w.G, name, w.Make[name]())
}

// Shown returns an input of 0 and 1, with 1 for the first key of each row.
func (w *Writer) Shown(name string, shape ...int) *G.Node {
	return w.fresh(name, func() []float64 {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		for i := range x {
			if i%shape[len(shape)-1] == 0 || w.Rng.IntN(2) == 0 {
				x[i] = 1
			}
		}
		return x
	}, shape...)
}

// Hidden returns an input of 0 and hide, with 0 for the first key of each row.
func (w *Writer) Hidden(name string, hide float64, shape ...int) *G.Node {
	return w.fresh(name, func() []float64 {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		for i := range x {
			if i%shape[len(shape)-1] != 0 && w.Rng.IntN(2) == 0 {
				x[i] = hide
			}
		}
		return x
	}, shape...)
}

// ByHand returns a softmax of Exp, Sum and a division. If maximum is set, the maximum is subtracted first.
func (w *Writer) ByHand(s *G.Node, axis int, maximum bool) *G.Node {
	w.t.Helper()
	along := []byte{byte(axis)}
	if maximum {
		s = w.Must(G.BroadcastSub(s, w.Column(w.Must(G.Max(s, axis)), s, axis), nil, along))
	}
	e := w.Must(G.Exp(s))
	return w.Must(G.BroadcastHadamardDiv(e, w.Column(w.Must(G.Sum(e, axis)), s, axis), nil, along))
}

// Column returns x with the reduced axis of s restored, with size 1.
func (w *Writer) Column(x, s *G.Node, axis int) *G.Node {
	shape := s.Shape().Clone()
	shape[axis] = 1
	return w.Shape(x, shape...)
}

// PerHead returns attention heads that a loop makes, each with its own weights.
func (w *Writer) PerHead(x *G.Node, heads, dim int, attend func(q, k, v *G.Node) *G.Node) (all []*G.Node) {
	width := x.Shape()[1]
	for range heads {
		q, k, v := w.Mul(x, w.Weight(width, dim)), w.Mul(x, w.Weight(width, dim)), w.Mul(x, w.Weight(width, dim))
		all = append(all, attend(q, k, v))
	}
	return all
}

// Loop slices heads from q, k and v one by one, and concatenates the results of attend.
func (w *Writer) Loop(heads int, q, k, v *G.Node, attend func(q, k, v *G.Node) *G.Node) *G.Node {
	cut := func(x *G.Node, i int) *G.Node {
		last, dim := x.Dims()-1, LastOf(x)/heads
		return w.Must(G.Slice(x, append(make([]tensor.Slice, last), G.S(i*dim, (i+1)*dim))...))
	}
	var all []*G.Node
	for i := range heads {
		all = append(all, attend(cut(q, i), cut(k, i), cut(v, i)))
	}
	return w.Must(G.Concat(all[0].Dims()-1, all...))
}

// Stack returns layers of attention with 12 heads of 64 on their own keys and values, written with Gorgonia's
// ops.
func (w *Writer) Stack(layers, queries, keys int, causal bool) *G.Node {
	const heads, dim = 12, 64
	x := w.Input("q", heads, queries, dim)
	for i := range layers {
		k, v := w.Input(fmt.Sprint("k", i), heads, keys, dim), w.Input(fmt.Sprint("v", i), heads, keys, dim)
		s := w.Times(w.BMM(x, k, false, true), w.Number(1/math.Sqrt(dim)))
		if causal {
			mask := w.Constant("mask", CausalMask(1, queries, keys, math.Inf(-1)), 1, queries, keys)
			s = w.Must(G.BroadcastAdd(s, mask, nil, []byte{0}))
		}
		x = w.BMM(w.Softmax(s, 2), v)
	}
	return x
}

// LastOf returns the size of the last axis.
func LastOf(n *G.Node) int { return n.Shape()[n.Dims()-1] }
