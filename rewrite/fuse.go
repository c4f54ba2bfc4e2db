package rewrite

import (
	"errors"
	"fmt"
	"hash"
	"math"
	"math/rand/v2"
	"strings"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/leanattention"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/fuse"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/stock"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Fused is a graph in which [Fuse] put leanattention.Attention in the place of attention
// made of Gorgonia's own ops.
type Fused struct {
	_       nocopy.Mark
	Graph   *G.ExprGraph
	Roots   []*G.Node // the new nodes of the roots, in their order
	Matches []Match   // replaced attention, in the order of the old graph
	Misses  []Match   // nodes that look like a part of attention and remain

	images map[*G.Node]*G.Node
}

// A Match is a place in the old graph. String describes a replaced attention by heads, numbers of queries and keys, scale and
// masks, and a miss by the reason and the remedy.
type Match struct {
	// Output is a node of the old graph: the product of weights and values, or the Concat of several products. For a miss, Output
	// is a SoftMax, a division of exponentials by a sum, or a product whose weights are exponentials of another product.
	Output *G.Node

	// Node is the node of Attention in the new graph; nil for a miss.
	Node *G.Node

	text string
}

// String describes the match in a line.
func (m Match) String() string { return m.text }

// Node returns the node of the new graph that has the value of a node of the old graph. The result is nil for the scores and
// weights of a replaced attention, for inputs that nothing else reads, and for nodes that no root needs.
func (f *Fused) Node(old *G.Node) *G.Node {
	if f == nil {
		return nil
	}
	return f.images[old]
}

// String returns a report: a line for each match and each miss.
func (f *Fused) String() string {
	if f == nil {
		return "nothing fused"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d fused, %d left alone\n", len(f.Matches), len(f.Misses))
	for _, list := range [...][]Match{f.Matches, f.Misses} {
		for _, m := range list {
			fmt.Fprintln(&b, m)
		}
	}
	return b.String()
}

// describe returns the line of a match.
func describe(m *fuse.Match) string {
	var b strings.Builder
	fmt.Fprintf(&b, "fused %s: heads %d/%d, queries %d, keys %d, scale %.6g",
		stock.Describe(m.Output), m.Heads, m.KVHeads, m.Queries, m.Keys, m.Scale)
	if m.Causal {
		b.WriteString(", causal")
	}
	if m.Bias != nil {
		fmt.Fprintf(&b, ", bias %v of %s", m.Bias.Shape(), stock.Describe(m.Bias))
	}
	for _, n := range m.Scales {
		b.WriteString(", scaled by " + stock.Describe(n))
	}
	if m.Dropout != 0 {
		fmt.Fprintf(&b, ", dropout %.4g", m.Dropout)
	}
	for _, n := range m.Dropouts {
		b.WriteString(", without " + stock.Describe(n))
	}
	return b.String()
}

// Fuse looks for attention made of Gorgonia's own ops in the graph of the roots. Fuse returns a new graph, with
// leanattention.Attention in place of each match, and leaves the old graph unchanged. docs/fuse.md lists the forms that Fuse finds,
// each with its new node. In short:
//
//	scores   BatchedMatMul of q and k, or Mul of matrices, with any number of axes
//	         before (N, d): heads are an axis or a part of the batch. Also k times q,
//	         if the softmax is of columns or a Transpose follows
//	k        transposed by BatchedMatMul's flag or by Transpose, any number of
//	         times; the Transpose may move other axes, too; the same for q and v.
//	         A transposed k or v needs a copy, which pays from 16 queries on, and
//	         copies of both from 32 on. Below, Fuse leaves the attention unchanged
//	scale    HadamardProd, HadamardDiv, Mul or Div of q, k or the scores with a number,
//	         any number of times. A constant, a number computed from constants, and a
//	         tensor of equal numbers become leanattention.WithScale. Another scale, an
//	         input or a computed scalar, multiplies or divides q in the new graph:
//	         its value may change, and it keeps its gradient
//	mask     Add, Sub or a broadcast form of them, before or after the scale.
//	         A constant tensor, or one computed from constants, that is exactly
//	         causal becomes leanattention.WithCausal: for query i of Nq and key j of N
//	         0 where j <= N-Nq+i, and elsewhere at most -10000 (taken for -Inf).
//	         Any other mask, also an input or a mask computed from one, becomes
//	         leanattention.WithBias, at most one. A broadcast mask stays as small
//	         as it is
//	weights  SoftMax over the last axis of scores, or over the axis before; or Exp,
//	         Sum and a division, with the maximum subtracted before or not
//	dropout  of the weights: leanattention.WithDropout. The node draws its own numbers,
//	         with another seed in each run: the distribution is that of Gorgonia's
//	         Dropout, the dropped weights are others. A machine of the new graph with
//	         gorgonia.EvalMode switches dropout off, a machine without it switches
//	         dropout on. Dropout of probability 0, also of scores, and dropout that
//	         such a machine switched off before Fuse are not in the new graph
//	out      BatchedMatMul, or Mul, of the weights and v, or of the transposed v and
//	         the transposed weights
//	between  Reshape, if the softmax has the rows of the scores and the second
//	         product has the rows of the softmax
//	heads    made one by one in a loop become a node each. Heads become one node if
//	         they are slices, in order, of the same projections, with one scale and
//	         mask, and one Concat joins their outputs
//
// Fuse finds attention made by leanattention.Default, too, though its scale and mask are inputs.
//
// Misses has each attention that Fuse leaves unchanged, with the reason and the remedy:
//
//   - several masks that are not causal
//   - a scale for each head, query or key
//   - Dropout of scores that drops
//   - other ops between the parts
//   - scores or weights that other nodes read or that are roots
//
// The new graph has the nodes that the roots need, and every gorgonia.Read of the old graph: both graphs store the value that is
// read at the same address. Inputs keep names, types and values:
//
//   - Weights are the same memory in both graphs.
//   - An input without a value may be bound by gorgonia.Let, under its old or its new node ([Fused.Node]).
//   - When a machine of the new graph runs, an input takes the value that Let has bound to the old node since the last run, unless Let
//     has bound a value to the new node. So no goroutine may bind values to old nodes while such a machine runs.
//   - A program of gorgonia.CompileFunction takes values under new nodes alone. Its run is ErrState if an old node has a later value.
//   - Clones of the new graph have inputs of their own.
//   - Ops with a state, such as Dropout and BatchNorm, are shared.
//
// Call Fuse before gorgonia.Grad. Gradients read the scores, so Fuse leaves the attention of a graph with gradients unchanged.
// Results differ by rounding, and where Gorgonia's nodes give NaN: SoftMax (see leanattention.Default), exponentials that overflow,
// and a query for which -Inf hides all keys, whose output is 0. Fuse knows the ops of Gorgonia v0.9.18 by their names.
//
// Errors: ErrGraph for roots that are nil or of several graphs, and for a graph with two nodes of one hash ([Check]).
func Fuse(roots ...*G.Node) (f *Fused, err error) {
	const op = "rewrite.Fuse"
	defer errs.RecoverTo(op, &err)
	if len(roots) == 0 {
		return nil, errs.Errorf(op, errs.ErrGraph, "no roots")
	}
	for i, r := range roots {
		if r == nil || r.Graph() == nil {
			return nil, errs.Errorf(op, errs.ErrGraph, "root %d is nil or in no graph", i)
		}
		if r.Graph() != roots[0].Graph() {
			return nil, errs.Errorf(op, errs.ErrGraph, "root %d is in another graph than root 0", i)
		}
	}
	r, err := fuse.Rewrite(roots, fusing{})
	var fault *fuse.Error
	if errors.As(err, &fault) {
		return nil, errs.Errorf(op, errs.ErrGraph, "%v", fault)
	}
	if err != nil {
		return nil, err
	}
	if same := graph.Collisions(r.Graph); same != nil {
		return nil, errs.Errorf(op, errs.ErrGraph, "%s", strings.Join(same, "; "))
	}
	if err = graph.CheckMachine(op, r.Graph); err != nil {
		return nil, err
	}
	return newFused(roots, r), nil
}

// fusing puts leanattention.Attention in the place of a match.
type fusing struct{}

// Fixed reports whether an input is a scale or a mask of leanattention.Default. Default makes inputs in place of constants, since
// Gorgonia confuses constants, and marks the inputs by their names.
func (fusing) Fixed(n *G.Node) bool {
	name := stock.NameOf(n)
	return strings.HasPrefix(name, fuse.ScaleName) || strings.HasPrefix(name, fuse.MaskName)
}

func (fusing) Check(q, k, v tensor.Shape, t tensor.Dtype) error {
	g := G.NewGraph()
	in := func(name string, s tensor.Shape) *G.Node {
		return G.NewTensor(g, t, len(s), G.WithShape(s...), G.WithName(name))
	}
	_, err := leanattention.Attention(in("q", q), in("k", k), in("v", v))
	return err
}

func (fusing) Node(q, k, v, seed, bias *G.Node, m *fuse.Match) (*G.Node, error) {
	opts := []leanattention.Option{leanattention.WithScale(m.Scale)}
	if m.Causal {
		opts = append(opts, leanattention.WithCausal())
	}
	if seed != nil {
		opts = append(opts, leanattention.WithDropout(m.Dropout, seed))
	}
	if bias != nil {
		opts = append(opts, leanattention.WithBias(bias, m.BiasScale))
	}
	n, err := leanattention.Attention(q, k, v, opts...)
	if err != nil {
		return nil, err
	}
	n.Op().(interface{ SetStale(func() error) }).SetStale(m.Stale)
	return n, nil
}

func (fusing) Seed(q *G.Node) (*G.Node, error) {
	return ongpu.Apply("rewrite.Fuse", &seedOp{rank: q.Dims(), number: seeds.Add(1)}, q)
}

// seedOp makes another seed of dropout in each run, as Gorgonia's Dropout draws other numbers. The op ignores its input:
// Gorgonia takes a node without inputs for an input of the graph. A machine for evaluation switches the op off, and other machines
// switch the op on, as they do with Dropout.
type seedOp struct {
	graph.Plain
	rank   int
	number uint64 // differs in each op: equal nodes would become one, and drop the same weights
	off    atomic.Bool
}

var seeds atomic.Uint64

// SetTraining is called by each new machine of Gorgonia.
func (op *seedOp) SetTraining(training bool) error {
	op.off.Store(!training)
	return nil
}

func (op *seedOp) Do(...G.Value) (G.Value, error) {
	if op.off.Load() {
		return G.NewI64(0), nil
	}
	return G.NewI64(1 + rand.Int64N(math.MaxInt64)), nil
}

func (op *seedOp) Arity() int { return 1 }
func (op *seedOp) Type() hm.Type {
	return hm.NewFnType(G.TensorType{Dims: op.rank, Of: hm.TypeVariable('a')}, tensor.Int64)
}
func (op *seedOp) InferShape(...G.DimSizer) (tensor.Shape, error) { return tensor.ScalarShape(), nil }
func (op *seedOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.Seed %d of rank %d", op.number, op.rank)
}
func (op *seedOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *seedOp) String() string   { return "Seed" }

// A seed has no gradient, and leaves none.
func (op *seedOp) DiffWRT(n int) []bool { return make([]bool, n) }
func (op *seedOp) SymDiff(in G.Nodes, _, _ *G.Node) (G.Nodes, error) {
	return make(G.Nodes, len(in)), nil
}
func (op *seedOp) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error { return nil }

var (
	_ G.SDOp        = (*seedOp)(nil)
	_ G.ADOp        = (*seedOp)(nil)
	_ G.TrainModeOp = (*seedOp)(nil)
)

func newFused(roots []*G.Node, r *fuse.Result) *Fused {
	f := &Fused{Graph: r.Graph, images: r.Images}
	for _, n := range roots {
		f.Roots = append(f.Roots, r.Images[n])
	}
	for _, m := range r.Matches {
		f.Matches = append(f.Matches, Match{m.Output, r.Attention[m], describe(m)})
	}
	for _, m := range r.Misses {
		f.Misses = append(f.Misses, Match{m.Node, nil, fmt.Sprintf("left %s: %s", stock.Describe(m.Node), m.Reason)})
	}
	return f
}
