package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// format is the reference's name for an element type.
func format(t tensor.Dtype) reftest.Format {
	switch t {
	case tensor.Float32:
		return reftest.Float32
	case la.Float16:
		return reftest.Float16
	case la.BFloat16:
		return reftest.BFloat16
	}
	return reftest.Float64
}

// tensorOf is x as a tensor of element type t.
func tensorOf(t tensor.Dtype, x []float64, shape ...int) *tensor.Dense {
	var backing any
	switch t {
	case tensor.Float64:
		backing = slices.Clone(x)
	case tensor.Float32:
		backing = reftest.Convert[float32](x)
	case la.Float16:
		y := make([]la.F16, len(x))
		for i, f := range x {
			y[i] = half.FromFloat64(f)
		}
		backing = y
	case la.BFloat16:
		y := make([]la.BF16, len(x))
		for i, f := range x {
			y[i] = half.BFromFloat64(f)
		}
		backing = y
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
}

// lengthsOf is a vector of lengths of element type t.
func lengthsOf(t tensor.Dtype, n []int) *tensor.Dense {
	var backing any = slices.Clone(n)
	switch t {
	case tensor.Int32:
		backing = convertInts[int32](n)
	case tensor.Int64:
		backing = convertInts[int64](n)
	}
	return tensor.New(tensor.WithShape(len(n)), tensor.WithBacking(backing)) // without a shape one element is a scalar
}

func convertInts[T int32 | int64](n []int) []T {
	var y []T
	for _, x := range n {
		y = append(y, T(x))
	}
	return y
}

// floats is a value of floats as []float64.
func floats(t testing.TB, v G.Value) []float64 {
	t.Helper()
	switch x := v.Data().(type) {
	case []float64:
		return x
	case []float32:
		return widen(x)
	case []la.F16:
		y := make([]float64, len(x))
		for i, f := range x {
			y[i] = float64(f.Float32())
		}
		return y
	case []la.BF16:
		y := make([]float64, len(x))
		for i, f := range x {
			y[i] = float64(f.Float32())
		}
		return y
	case float32: // Gorgonia's ops make scalars of tensors of one element
		return []float64{float64(x)}
	case float64:
		return []float64{x}
	}
	t.Fatalf("value of type %T", v.Data())
	return nil
}

func widen(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, f := range x {
		y[i] = float64(f)
	}
	return y
}

// bits is the bits of a value's elements, to tell whether two are the same.
func bits(t testing.TB, v G.Value) []uint64 {
	t.Helper()
	var y []uint64
	switch x := v.Data().(type) {
	case []la.F16:
		for _, f := range x {
			y = append(y, uint64(f))
		}
	case []la.BF16:
		for _, f := range x {
			y = append(y, uint64(f))
		}
	default:
		for _, f := range floats(t, v) {
			y = append(y, math.Float64bits(f))
		}
	}
	return y
}

// problem is an attention on tensors: a case of the reference, and its operands
// with NaN wherever nothing may be read.
type problem struct {
	*reftest.Case
	spec
	q, k, v, bias *tensor.Dense // no bias: nil
}

// spec says what of an attention on tensors the reference does not know.
type spec struct {
	inputs    reftest.Inputs
	query, kv tensor.Dtype // zero: Float32, and as query
	rank      int          // zero: 4
	capacity  int          // Nk; zero: the most keys of a sequence
}

func newProblem(rng *rand.Rand, s reftest.Shape, x spec) *problem {
	if x.query == (tensor.Dtype{}) {
		x.query = tensor.Float32
	}
	if x.kv == (tensor.Dtype{}) {
		x.kv = x.query
	}
	if x.rank == 0 {
		x.rank = 4
	}
	if x.capacity == 0 {
		x.capacity = max(slices.Max(s.Keys), 1)
	}
	p := &problem{Case: reftest.New(rng, s, x.inputs, format(x.query), format(x.kv)), spec: x}
	p.q = tensorOf(x.query, p.DenseQ(p.Queries[0]), p.dims(p.Heads, p.Queries[0], p.Dim)...)
	p.k = tensorOf(x.kv, p.DenseK(x.capacity), p.dims(p.KVHeads, x.capacity, p.Dim)...)
	p.v = tensorOf(x.kv, p.DenseV(x.capacity), p.dims(p.KVHeads, x.capacity, p.ValueDim)...)
	if b := p.Bias; b.X != nil {
		shape := []int{b.Sequences, b.Heads, b.Queries, b.Keys}
		p.bias = tensorOf(x.query, p.DenseBias(), shape[4-x.rank:]...)
	}
	return p
}

// bent is s with a window, a soft cap and slopes; 0 and none for without.
func bent(s reftest.Shape, window int, softCap float64, slopes ...float64) reftest.Shape {
	s.Window, s.SoftCap, s.Slopes = window, softCap, slopes
	return s
}

// biased is s with a bias of moderate numbers, which hides no key.
func biased(rng *rand.Rand, s reftest.Shape, sequences, heads, queries int) reftest.Shape {
	s.Bias = reftest.Bias{Sequences: sequences, Heads: heads, Queries: queries, Keys: slices.Max(s.Keys)}
	for range sequences * heads * queries * s.Bias.Keys {
		s.Bias.X = append(s.Bias.X, float64(float32(rng.NormFloat64())))
	}
	return s
}

// show gives keys and values that no query sees numbers in place of NaN, and what is
// added to their scores: stock nodes multiply them by 0.
func (p *problem) show() {
	for _, x := range []*tensor.Dense{p.k, p.v, p.bias} {
		if x == nil {
			continue
		}
		switch y := x.Data().(type) {
		case []float32:
			unpoison(y)
		case []float64:
			unpoison(y)
		}
	}
}

func unpoison[F float32 | float64](x []F) {
	for i, f := range x {
		if f != f {
			x[i] = 3
		}
	}
}

// dims is the shape of rows of all sequences: with rank 3 there is one.
func (p *problem) dims(shape ...int) []int {
	if p.rank == 4 {
		return append([]int{len(p.Keys)}, shape...)
	}
	if len(p.Keys) != 1 {
		panic("rank 3 has one sequence")
	}
	return shape
}

// ragged reports whether the keys must be given by WithLengths.
func (p *problem) ragged() bool {
	return slices.ContainsFunc(p.Keys, func(n int) bool { return n != p.capacity })
}

// options are those that the case itself needs, but for the lengths and the bias.
func (p *problem) options() []la.Option {
	o := []la.Option{la.WithScale(p.Scale)}
	if p.Causal {
		o = append(o, la.WithCausal())
	}
	return append(o, bends(p.Shape)...)
}

// bends are the options that a shape of [reftest.RandomScoreMods] needs.
func bends(s reftest.Shape) (o []la.Option) {
	if s.Window != 0 {
		o = append(o, la.WithWindow(s.Window))
	}
	if s.SoftCap != 0 {
		o = append(o, la.WithSoftCap(s.SoftCap))
	}
	if s.Slopes != nil {
		o = append(o, la.WithALiBi(s.Slopes))
	}
	return o
}

// precision is that of an engine that computes in the query's type. A chain of
// 0 leaves the longest sum to the reference's rule.
func (p *problem) precision(chain int) reftest.Precision {
	return reftest.Precision{Acc: format(p.query), Out: format(p.query), Chain: chain}
}

// check compares an output, and the log-sum-exp unless nil, with the reference.
func (p *problem) check(t testing.TB, want *reftest.Result, out, lse G.Value) {
	t.Helper()
	if err := p.compare(t, want, out, lse); err != nil {
		t.Error(err)
	}
}

func (p *problem) compare(t testing.TB, want *reftest.Result, out, lse G.Value) error {
	t.Helper()
	nq := p.Queries[0]
	if got, want := out.Shape(), tensor.Shape(p.dims(p.Heads, nq, p.ValueDim)); !got.Eq(want) {
		return fmt.Errorf("output has shape %v, want %v", got, want)
	}
	if got := out.Dtype(); got != p.query {
		return fmt.Errorf("output is %v, want %v", got, p.query)
	}
	o := floats(t, out)
	if err := want.CompareO(func(s, pos, h, i int) float64 { return o[((s*p.Heads+h)*nq+pos)*p.ValueDim+i] }); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	if lse == nil {
		return nil
	}
	if got, want := lse.Shape(), tensor.Shape(p.dims(p.Heads, nq)); !got.Eq(want) {
		return fmt.Errorf("log-sum-exp has shape %v, want %v", got, want)
	}
	l := floats(t, lse)
	if err := want.CompareLSE(func(s, pos, h int) float64 { return l[(s*p.Heads+h)*nq+pos] }); err != nil {
		return fmt.Errorf("log-sum-exp: %w", err)
	}
	return nil
}

// graph is an attention node, its inputs, and the values that a run leaves.
type graph struct {
	g                *G.ExprGraph
	q, k, v, lengths *G.Node
	bias             *G.Node // nil without one
	out, lse         *G.Node
	outV, lseV       G.Value
}

// input makes an input node with a value.
func input(g *G.ExprGraph, name string, v *tensor.Dense) *G.Node {
	return G.NewTensor(g, v.Dtype(), v.Dims(), G.WithName(name), G.WithShape(v.Shape()...), G.WithValue(v))
}

// graph makes the graph of p without an attention.
func (p *problem) graph() *graph {
	g := &graph{g: G.NewGraph()}
	g.q, g.k, g.v = input(g.g, "q", p.q), input(g.g, "k", p.k), input(g.g, "v", p.v)
	if p.bias != nil {
		g.bias = input(g.g, "bias", p.bias)
	}
	return g
}

// options are those that the case itself needs in the graph g, but for the lengths.
func (g *graph) options(p *problem) []la.Option {
	if g.bias == nil {
		return p.options()
	}
	return append(p.options(), la.WithBias(g.bias))
}

// attention makes the graph of p and keeps its results.
func (p *problem) attention(t testing.TB, opts ...la.Option) *graph {
	t.Helper()
	g := p.build(t, opts...)
	g.read(t)
	return g
}

// build makes the graph of p: with lengths if p is ragged, and always with the
// log-sum-exp.
func (p *problem) build(t testing.TB, opts ...la.Option) *graph {
	t.Helper()
	g := p.graph()
	all := append(g.options(p), la.WithLSE(&g.lse))
	if p.ragged() {
		g.lengths = input(g.g, "lengths", lengthsOf(tensor.Int, p.Keys))
		all = append(all, la.WithLengths(g.lengths))
	}
	var err error
	if g.out, err = la.Attention(g.q, g.k, g.v, append(all, opts...)...); err != nil {
		t.Fatal(err)
	}
	return g
}

// read makes the graph keep its results.
func (g *graph) read(t testing.TB) {
	t.Helper()
	G.Read(g.out, &g.outV)
	if g.lse != nil {
		G.Read(g.lse, &g.lseV)
	}
	if err := la.CheckGraph(g.g); err != nil {
		t.Fatal(err)
	}
}

// run runs the graph once on a tape machine of its own.
func (g *graph) run(t testing.TB, opts ...G.VMOpt) {
	t.Helper()
	vm := G.NewTapeMachine(g.g, opts...)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
}

// tapeMachine is Gorgonia's, for graphs that the tag cuda has run on a GPU: a
// goroutine that makes or closes one must stay on its thread, see docs/cuda.md.
type tapeMachine struct{ G.VM }

func newTapeMachine(g *G.ExprGraph) tapeMachine {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return tapeMachine{G.NewTapeMachine(g)}
}

func (m tapeMachine) Close() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return m.VM.Close()
}

// again runs a graph that has a machine.
func again(t testing.TB, vm G.VM) {
	t.Helper()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	vm.Reset()
}

// let binds a new value to an input.
func let(t testing.TB, n *G.Node, v G.Value) {
	t.Helper()
	if err := G.Let(n, v); err != nil {
		t.Fatal(err)
	}
}

// repeated is n times the same.
func repeated(n, x int) []int {
	return slices.Repeat([]int{x}, n)
}

// allNaN reports whether every element of a float32 or float64 value is NaN.
func allNaN(t testing.TB, v G.Value) bool {
	t.Helper()
	return !slices.ContainsFunc(floats(t, v), func(f float64) bool { return !math.IsNaN(f) })
}
