package graphtest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Format returns the reference's format for an element type.
func Format(t tensor.Dtype) reftest.Format {
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

// TensorOf returns x as a tensor of element type t.
func TensorOf(t tensor.Dtype, x []float64, shape ...int) *tensor.Dense {
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

// LengthsOf returns a vector of lengths of element type t.
func LengthsOf(t tensor.Dtype, n []int) *tensor.Dense {
	var backing any = slices.Clone(n)
	switch t {
	case tensor.Int32:
		backing = convertInts[int32](n)
	case tensor.Int64:
		backing = convertInts[int64](n)
	}
	return tensor.New(tensor.WithShape(len(n)), tensor.WithBacking(backing)) // without a shape, one element would become a scalar
}

func convertInts[T int32 | int64](n []int) []T {
	var y []T
	for _, x := range n {
		y = append(y, T(x))
	}
	return y
}

// Floats returns the floats of a value as []float64.
func Floats(t testing.TB, v G.Value) []float64 {
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
	case float32: // Gorgonia's ops return scalars for tensors of one element
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

// Bits returns the bits of a value's elements, for exact comparisons.
func Bits(t testing.TB, v G.Value) []uint64 {
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
		for _, f := range Floats(t, v) {
			y = append(y, math.Float64bits(f))
		}
	}
	return y
}

// Problem is an attention problem on tensors: a case of the reference, and its operands with NaN wherever
// attention must not read.
type Problem struct {
	*reftest.Case
	Spec
	InQ, InK, InV   *tensor.Dense
	InBias, InSinks *tensor.Dense // nil without a bias or sinks
}

// Spec holds the properties of a Problem that a reftest.Shape does not have.
type Spec struct {
	Inputs            reftest.Inputs
	QueryType, KVType tensor.Dtype // zero: Float32, and the type of the queries
	Rank              int          // zero: 4
	Capacity          int          // Nk; zero: the largest number of keys of a sequence
	Rows              int          // Nq; zero: the largest number of queries of a sequence
}

// NewProblem draws a problem of a shape. Zero fields of x have their defaults.
func NewProblem(rng *rand.Rand, s reftest.Shape, x Spec) *Problem {
	if x.QueryType == (tensor.Dtype{}) {
		x.QueryType = tensor.Float32
	}
	if x.KVType == (tensor.Dtype{}) {
		x.KVType = x.QueryType
	}
	if x.Rank == 0 {
		x.Rank = 4
	}
	if x.Capacity == 0 {
		x.Capacity = max(slices.Max(s.Keys), 1)
	}
	if x.Rows == 0 {
		x.Rows = slices.Max(s.Queries)
	}
	p := &Problem{Case: reftest.New(rng, s, x.Inputs, Format(x.QueryType), Format(x.KVType)), Spec: x}
	if p.Bias.X = slices.Clone(p.Bias.X); p.Bias.X != nil { // the bias also has the queries' type
		for i, b := range p.Bias.X {
			p.Bias.X[i] = Format(x.QueryType).Round(b)
		}
	}
	p.InQ = TensorOf(x.QueryType, p.DenseQ(p.Rows), p.Dims(p.Heads, p.Rows, p.Dim)...)
	p.InK = TensorOf(x.KVType, p.DenseK(x.Capacity), p.Dims(p.KVHeads, x.Capacity, p.Dim)...)
	p.InV = TensorOf(x.KVType, p.DenseV(x.Capacity), p.Dims(p.KVHeads, x.Capacity, p.ValueDim)...)
	if b := p.Bias; b.X != nil {
		shape := []int{b.Sequences, b.Heads, b.Queries, b.Keys}
		p.InBias = TensorOf(x.QueryType, p.DenseBias(), shape[4-x.Rank:]...)
	}
	if p.Sinks != nil {
		p.InSinks = SinksOf(x.QueryType, p.Sinks)
	}
	return p
}

// SinksOf returns attention sinks as a tensor, for queries of an element type.
func SinksOf(query tensor.Dtype, sinks []float64) *tensor.Dense {
	if query != tensor.Float64 {
		query = tensor.Float32
	}
	return TensorOf(query, sinks, len(sinks))
}

// WithScoreMods returns s with a window, a soft cap and slopes. 0 and no slopes turn each off.
func WithScoreMods(s reftest.Shape, window int, softCap float64, slopes ...float64) reftest.Shape {
	s.Window, s.SoftCap, s.Slopes = window, softCap, slopes
	return s
}

// Biased returns s with a bias of moderate numbers. The bias hides no key.
func Biased(rng *rand.Rand, s reftest.Shape, sequences, heads, queries int) reftest.Shape {
	s.Bias = reftest.Bias{Sequences: sequences, Heads: heads, Queries: queries, Keys: slices.Max(s.Keys)}
	for range sequences * heads * queries * s.Bias.Keys {
		s.Bias.X = append(s.Bias.X, float64(float32(rng.NormFloat64())))
	}
	return s
}

// Show replaces NaN by numbers in keys and values that no query sees, and in their bias. Gorgonia's own nodes
// multiply them by 0.
func (p *Problem) Show() {
	for _, x := range []*tensor.Dense{p.InK, p.InV, p.InBias} {
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

// Dims returns a shape with the axis of the sequences first. With rank 3 there is one sequence and no such
// axis.
func (p *Problem) Dims(shape ...int) []int {
	if p.Rank == 4 {
		return append([]int{len(p.Keys)}, shape...)
	}
	if len(p.Keys) != 1 {
		panic("rank 3 has one sequence")
	}
	return shape
}

// Ragged reports whether the problem needs WithLengths.
func (p *Problem) Ragged() bool {
	return p.Padded() || slices.ContainsFunc(p.Keys, func(n int) bool { return n != p.Capacity })
}

// Padded reports whether the problem needs WithQueryLengths.
func (p *Problem) Padded() bool {
	return slices.ContainsFunc(p.Queries, func(n int) bool { return n != p.Rows })
}

// PadQueries gives some sequences of s fewer queries. x.Rows becomes the largest number of queries before the
// change.
func PadQueries(rng *rand.Rand, s *reftest.Shape, x *Spec) {
	s.Queries, x.Rows = slices.Clone(s.Queries), max(x.Rows, slices.Max(s.Queries))
	full := rng.IntN(len(s.Queries)) // a bias has as many rows as the longest sequence
	for i := range s.Queries {
		if i != full && rng.IntN(4) > 0 {
			s.Queries[i] = rng.IntN(x.Rows + 1)
		}
	}
}

// Options returns the options of the case, without lengths, bias, sinks and seed.
func (p *Problem) Options() []la.Option {
	o := []la.Option{la.WithScale(p.Scale)}
	if p.Ragged() && !p.Padded() {
		o = append(o, la.WithQueriesAtEnd())
	}
	if p.Causal {
		o = append(o, la.WithCausal())
	}
	return append(o, scoreMods(p.Shape)...)
}

// AttendOptions returns the options that Attend needs.
func (p *Problem) AttendOptions() []la.Option {
	o := p.Options()
	if p.Dropout != 0 {
		o = append(o, la.WithDropout(p.Dropout, nil))
	}
	return o
}

// scoreMods returns the options of a shape of [reftest.RandomScoreMods], without sinks.
func scoreMods(s reftest.Shape) (o []la.Option) {
	if s.Window != 0 {
		o = append(o, la.WithWindow(s.Window))
	}
	if s.SinkTokens != 0 {
		o = append(o, la.WithSinkTokens(s.SinkTokens))
	}
	if s.SoftCap != 0 {
		o = append(o, la.WithSoftCap(s.SoftCap))
	}
	if s.Slopes != nil {
		o = append(o, la.WithALiBi(s.Slopes))
	}
	return o
}

// Precision returns the precision of an engine that computes in the query's type. A chain of 0 selects the
// reference's default for the longest sum.
func (p *Problem) Precision(chain int) reftest.Precision {
	return reftest.Precision{Acc: Format(p.QueryType), Out: Format(p.QueryType), Chain: chain}
}

// Check compares an output with the reference, and the log-sum-exp too unless lse is nil.
func (p *Problem) Check(t testing.TB, want *reftest.Result, out, lse G.Value) {
	t.Helper()
	if err := p.Compare(t, want, out, lse); err != nil {
		t.Error(err)
	}
}

// Compare is Check with a returned error.
func (p *Problem) Compare(t testing.TB, want *reftest.Result, out, lse G.Value) error {
	t.Helper()
	nq := p.Rows
	if got, want := out.Shape(), tensor.Shape(p.Dims(p.Heads, nq, p.ValueDim)); !got.Eq(want) {
		return fmt.Errorf("output has shape %v, want %v", got, want)
	}
	if got := out.Dtype(); got != p.QueryType {
		return fmt.Errorf("output is %v, want %v", got, p.QueryType)
	}
	o := Floats(t, out)
	if err := want.CompareO(func(s, pos, h, i int) float64 { return o[((s*p.Heads+h)*nq+pos)*p.ValueDim+i] }); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	for s, queries := range p.Queries {
		for h := range p.Heads {
			for i, x := range o[((s*p.Heads+h)*nq+queries)*p.ValueDim : (s*p.Heads+h+1)*nq*p.ValueDim] {
				if x != 0 {
					return fmt.Errorf("output of sequence %d behind its %d queries, element %d of head %d: %v", s, queries, i, h, x)
				}
			}
		}
	}
	if lse == nil {
		return nil
	}
	if got, want := lse.Shape(), tensor.Shape(p.Dims(p.Heads, nq)); !got.Eq(want) {
		return fmt.Errorf("log-sum-exp has shape %v, want %v", got, want)
	}
	l := Floats(t, lse)
	if err := want.CompareLSE(func(s, pos, h int) float64 { return l[(s*p.Heads+h)*nq+pos] }); err != nil {
		return fmt.Errorf("log-sum-exp: %w", err)
	}
	for s, queries := range p.Queries {
		for h := range p.Heads {
			for i, x := range l[(s*p.Heads+h)*nq+queries : (s*p.Heads+h+1)*nq] {
				if want := p.Sink(h); x != want && !(math.Abs(x-want) <= 1e-5*(math.Abs(want)+1)) {
					return fmt.Errorf("log-sum-exp of sequence %d, row %d behind its %d queries, of head %d: %v, want %v", s, i, queries, h, x, want)
				}
			}
		}
	}
	return nil
}

// Graph is a graph with an attention node, its inputs, and the results of a run.
type Graph struct {
	G                  *G.ExprGraph
	Q, K, V, Lengths   *G.Node
	QueryLengths       *G.Node // nil if the problem is not padded
	BiasNode, Seed     *G.Node // nil without a bias or dropout
	SinksNode          *G.Node // nil without sinks
	Out, LSE           *G.Node
	OutValue, LSEValue G.Value
}

// Input makes an input node with a value.
func Input(g *G.ExprGraph, name string, v *tensor.Dense) *G.Node {
	return G.NewTensor(g, v.Dtype(), v.Dims(), G.WithName(name), G.WithShape(v.Shape()...), G.WithValue(v))
}

// Graph makes the inputs of p without an attention node.
func (p *Problem) Graph() *Graph {
	g := &Graph{G: G.NewGraph()}
	g.Q, g.K, g.V = Input(g.G, "q", p.InQ), Input(g.G, "k", p.InK), Input(g.G, "v", p.InV)
	if p.InBias != nil {
		g.BiasNode = Input(g.G, "bias", p.InBias)
	}
	if p.Dropout != 0 {
		g.Seed = G.NewScalar(g.G, tensor.Int64, G.WithName("seed"), G.WithValue(p.Shape.Seed))
	}
	if p.InSinks != nil {
		g.SinksNode = Input(g.G, "sinks", p.InSinks)
	}
	return g
}

// Options returns the options of p in the graph g, without lengths.
func (g *Graph) Options(p *Problem) []la.Option {
	o := p.Options()
	if g.BiasNode != nil {
		o = append(o, la.WithBias(g.BiasNode))
	}
	if g.Seed != nil {
		o = append(o, la.WithDropout(p.Dropout, g.Seed))
	}
	if g.SinksNode != nil {
		o = append(o, la.WithSinks(g.SinksNode))
	}
	return o
}

// LengthOptions makes the length inputs that p needs and returns their options.
func (g *Graph) LengthOptions(p *Problem) (o []la.Option) {
	if p.Ragged() {
		g.Lengths = Input(g.G, "lengths", LengthsOf(tensor.Int, p.Keys))
		o = append(o, la.WithLengths(g.Lengths))
	}
	if p.Padded() {
		g.QueryLengths = Input(g.G, "query lengths", LengthsOf(tensor.Int32, p.Queries))
		o = append(o, la.WithQueryLengths(g.QueryLengths))
	}
	return o
}

// Attention makes the graph of p and reads its results.
func (p *Problem) Attention(t testing.TB, opts ...la.Option) *Graph {
	t.Helper()
	g := p.Build(t, opts...)
	g.Read(t)
	return g
}

// Build makes the graph of p with the log-sum-exp, and with lengths if p is ragged.
func (p *Problem) Build(t testing.TB, opts ...la.Option) *Graph {
	t.Helper()
	g := p.Graph()
	all := append(g.Options(p), g.LengthOptions(p)...)
	var err error
	if g.Out, err = la.Attention(g.Q, g.K, g.V, append(all, opts...)...); err != nil {
		t.Fatal(err)
	}
	g.LSE = LogSumExp(t, g.Out)
	return g
}

// LogSumExp returns the log-sum-exp node of an attention node.
func LogSumExp(t testing.TB, out *G.Node) *G.Node {
	t.Helper()
	lse, err := la.LogSumExp(out)
	if err != nil {
		t.Fatal(err)
	}
	return lse
}

// Read adds read nodes for the results.
func (g *Graph) Read(t testing.TB) {
	t.Helper()
	G.Read(g.Out, &g.OutValue)
	if g.LSE != nil {
		G.Read(g.LSE, &g.LSEValue)
	}
	if err := rewrite.Check(g.G); err != nil {
		t.Fatal(err)
	}
}

// Run runs the graph once on a new tape machine.
func (g *Graph) Run(t testing.TB, opts ...G.VMOpt) {
	t.Helper()
	vm := G.NewTapeMachine(g.G, opts...)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
}

// TapeMachine is Gorgonia's tape machine for graphs that run on a GPU under the build tag cuda. The goroutine
// that makes or closes a machine must stay on its thread, see docs/cuda.md.
type TapeMachine struct{ G.VM }

func NewTapeMachine(g *G.ExprGraph) TapeMachine {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return TapeMachine{G.NewTapeMachine(g)}
}

func (m TapeMachine) Close() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return m.VM.Close()
}

// Again runs a graph on its machine.
func Again(t testing.TB, vm G.VM) {
	t.Helper()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	vm.Reset()
}

// Let binds a new value to an input.
func Let(t testing.TB, n *G.Node, v G.Value) {
	t.Helper()
	if err := G.Let(n, v); err != nil {
		t.Fatal(err)
	}
}

// Repeated returns x n times.
func Repeated(n, x int) []int {
	return slices.Repeat([]int{x}, n)
}

// AllNaN reports whether every element of a float32 or float64 value is NaN.
func AllNaN(t testing.TB, v G.Value) bool {
	t.Helper()
	return !slices.ContainsFunc(Floats(t, v), func(f float64) bool { return !math.IsNaN(f) })
}

// Results makes poisoned tensors for the results of p.
func (p *Problem) Results() (out, lse *tensor.Dense) {
	out = tensor.New(tensor.Of(p.QueryType), tensor.WithShape(p.Dims(p.Heads, p.Rows, p.ValueDim)...))
	lse = tensor.New(tensor.Of(p.QueryType), tensor.WithShape(p.Dims(p.Heads, p.Rows)...))
	for _, x := range []*tensor.Dense{out, lse} {
		switch m := x.Data().(type) {
		case []float32:
			reftest.Poison(m)
		case []float64:
			reftest.Poison(m)
		}
	}
	return out, lse
}

// Args returns the operands of p for Attend.
func (p *Problem) Args() la.Args {
	a := la.Args{Q: p.InQ, K: p.InK, V: p.InV, Lengths: p.Keys, Seed: p.Shape.Seed}
	if p.InBias != nil {
		a.Bias = p.InBias
	}
	if p.InSinks != nil {
		a.Sinks = p.InSinks
	}
	out, lse := p.Results()
	a.Out, a.LSE, a.Parents, a.QueryLengths = out, lse, p.parents(), p.queryLengths()
	return a
}

// queryLengths returns the query lengths of p for Attend, or nil if p is not padded.
func (p *Problem) queryLengths() []int {
	if !p.Padded() {
		return nil
	}
	return p.Queries
}

// parents returns the trees of p for Attend, or nil without trees.
func (p *Problem) parents() (all [][]int) {
	if !p.Tree {
		return nil
	}
	for i := range p.Keys {
		all = append(all, reftest.Parents(p.TreeOf(i)))
	}
	return all
}

// Both makes a graph with the default attention as Out, and returns leanattention's node on the same inputs.
func (p *Problem) Both(t testing.TB) (g *Graph, ours *G.Node) {
	t.Helper()
	g = p.Graph()
	var err error
	if g.Out, err = la.Default(g.Q, g.K, g.V, g.Options(p)...); err != nil {
		t.Fatal(err)
	}
	if ours, err = la.Attention(g.Q, g.K, g.V, g.Options(p)...); err != nil {
		t.Fatal(err)
	}
	g.Read(t)
	return g, ours
}

// CheckClose checks that two outputs differ by at most the sum of their error bounds.
func (p *Problem) CheckClose(t testing.TB, want *reftest.Result, a, b G.Value) {
	t.Helper()
	nq := p.Rows
	other := *want
	other.O, other.OBound = nil, slices.Clone(want.OBound)
	o := Floats(t, b)
	for s := range p.Keys {
		for pos := range nq {
			for h := range p.Heads {
				at := ((s*p.Heads+h)*nq + pos) * p.ValueDim
				other.O = append(other.O, o[at:at+p.ValueDim]...)
			}
		}
	}
	for i := range other.OBound {
		other.OBound[i] *= 2
	}
	if err := p.Compare(t, &other, a, nil); err != nil {
		t.Errorf("ours against the default: %v", err)
	}
}

// AttendThere runs Attend for p on tensors of a GPU and downloads the results.
func (p *Problem) AttendThere(t testing.TB, gpu *device.GPU, opts ...la.Option) (out, lse *tensor.Dense) {
	t.Helper()
	a := p.ArgsThere(t, gpu)
	if err := la.Attend(a, append(p.AttendOptions(), opts...)...); err != nil {
		t.Fatalf("%v: %v", p.Shape, err)
	}
	return Download(t, a.Out), Download(t, a.LSE)
}

// ArgsThere returns the operands of p for Attend on a GPU.
func (p *Problem) ArgsThere(t testing.TB, gpu *device.GPU) la.Args {
	t.Helper()
	nan := func(dt tensor.Dtype, shape []int) *device.Tensor {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		reftest.Poison(x)
		return Upload(t, gpu, TensorOf(dt, x, shape...))
	}
	a := la.Args{
		Q: Upload(t, gpu, p.InQ), K: Upload(t, gpu, p.InK), V: Upload(t, gpu, p.InV), Lengths: p.Keys,
		Out:     nan(p.QueryType, p.Dims(p.Heads, p.Rows, p.ValueDim)),
		LSE:     nan(tensor.Float32, p.Dims(p.Heads, p.Rows)),
		Parents: p.parents(), QueryLengths: p.queryLengths(),
	}
	if p.InSinks != nil {
		a.Sinks = Upload(t, gpu, p.InSinks)
	}
	return a
}

// ReferenceThere returns the reference for p on a GPU.
func (p *Problem) ReferenceThere(at Place) *reftest.Result {
	return p.Reference(at.Precision(p.QueryType, p.KVType))
}

// Another draws a problem with p's tensor shapes and with other numbers, lengths and seed. Query lengths are
// redrawn only if p is padded. The result may have no padding.
func (p *Problem) Another(rng *rand.Rand) *Problem {
	s := p.Shape
	if p.Ragged() {
		s.Keys = slices.Clone(s.Keys)
		for i := range s.Keys {
			s.Keys[i] = rng.IntN(p.Capacity + 1)
		}
	}
	x := p.Spec
	if p.Padded() {
		PadQueries(rng, &s, &x)
	}
	if s.Dropout != 0 {
		s.Seed = rng.Int64()
	}
	return NewProblem(rng, s, x)
}

// work returns the number of elements of the output.
func (p *Problem) work() int { return p.QueryRows() * p.Heads * p.ValueDim }

// Upload returns x on a GPU.
func Upload(t testing.TB, gpu *device.GPU, x tensor.Tensor) *device.Tensor {
	t.Helper()
	d, err := gpu.Upload(x)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Download returns a GPU value in host memory.
func Download(t testing.TB, v G.Value) *tensor.Dense {
	t.Helper()
	x, err := v.(*device.Tensor).Download()
	if err != nil {
		t.Fatal(err)
	}
	return x
}
