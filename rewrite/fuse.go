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
	Matches []Match   // the attention that was replaced, in the order of the graph that was given
	Misses  []Match   // what looks like a part of an attention and was left as it is

	images map[*G.Node]*G.Node
}

// A Match is a place in the graph that was given. Its String is a line: for a replaced attention its
// heads, numbers of queries and keys, scale and masks, for a miss the reason and what to write instead.
type Match struct {
	// Output is the node of the graph that was given: the product of weights and values, or the Concat of several. Of a
	// miss Output is a SoftMax, a division of exponentials by a sum, or a product whose weights are made of another
	// product by way of exponentials.
	Output *G.Node

	// Node is the node of Attention in the new graph; nil for a miss.
	Node *G.Node

	text string
}

// String describes the match in a line.
func (m Match) String() string { return m.text }

// Node is the node of the new graph that has the value of a node of the graph
// that was given. It is nil where there is none: for the scores and weights of
// an attention that was replaced, for inputs that only those needed, and for
// nodes that no root needs.
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

// describe is the line of a match.
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

// Fuse looks in the graph of the roots for attention made of Gorgonia's own ops
// and returns the graph anew, with leanattention.Attention in its place. The graph that was
// given stays as it is. docs/fuse.md is a table of the forms that it finds, each with
// the node that comes of it. In short:
//
//	scores   BatchedMatMul of q and k, or Mul of matrices: any number of axes
//	         in front of (N, d), so heads may be an axis or part of the batch.
//	         k times q where the softmax is of columns, or a Transpose follows
//	k        transposed by BatchedMatMul's flag or by Transpose, any number of
//	         times, with other axes moved in the same Transpose too; q and v
//	         the same. A k or v that comes transposed needs a copy: it is found
//	         from 16 queries on, where that pays, and both from 32 on
//	scale    HadamardProd, HadamardDiv, Mul or Div with a number, as often as
//	         one likes: of q, of k or of the scores. One that is constant, or
//	         computed of constants, is leanattention.WithScale; a tensor of equal numbers will
//	         do. Any other one, an input or a scalar that is computed, multiplies
//	         or divides q in the new graph: its value may change, and it has its gradient
//	mask     Add, Sub or a broadcast form of them, before or after the scale.
//	         A tensor that is constant or computed of constants and exactly
//	         causal is leanattention.WithCausal: for query i of Nq and key j of N it is 0
//	         where j <= N-Nq+i, and elsewhere at most -10000 (taken for -Inf).
//	         Any other one, an input too, or made of one by arithmetic, is
//	         leanattention.WithBias; of these there may be one. Where it is broadcast it stays
//	         as small as it is
//	weights  SoftMax over the last axis of scores, or over the one before; or Exp,
//	         Sum and a division, with the maximum taken off first or without
//	dropout  behind the weights: leanattention.WithDropout. The node draws numbers of its own, with
//	         another seed in each run: the law is the same, the weights that are
//	         dropped are others. A machine that is made with gorgonia.EvalMode of the
//	         new graph switches it off, and one without switches it on. Dropout of
//	         probability 0, of scores too, or that such a machine has switched off
//	         before, is not in the new graph
//	out      BatchedMatMul, or Mul, of the weights and v, or of v, transposed, and
//	         the weights, transposed
//	between  Reshape, as long as the softmax has the rows of the scores and the
//	         second product those of the softmax
//	heads    that a loop makes one by one are a node each. Where they are slices, in
//	         order, of the same projections, with one scale and mask, and their
//	         outputs go into one Concat, they are one node of all heads
//
// Attention made by leanattention.Default is found too, though its scale and mask are inputs.
//
// It leaves alone what it does not understand, and says why, and what to change, in
// Misses: several masks that are not causal; a scale for each head, query or key;
// Dropout of scores that drops; anything else between; scores or weights that something else
// reads or that are a root.
//
// The new graph has the nodes that the roots need and every gorgonia.Read of
// the old one, whose values both graphs store where it says. Inputs keep names,
// types and values: weights are the same memory in both graphs, and an input
// without a value is to be bound, by gorgonia.Let, under its old or its new node
// ([Fused.Node]). Later values too: when a machine of the new graph runs, an input takes the value
// that Let has bound to the old node since the run before, unless Let has bound one to the
// new node. So nothing may bind values to old nodes while such a machine runs. A program of
// gorgonia.CompileFunction takes values under the new nodes alone: its run is ErrState
// where an old node has a later one. Clones of the new graph have inputs of their own.
// Ops with a state, Dropout or BatchNorm for instance, are shared.
//
// Call it before gorgonia.Grad, since gradients read the scores: those of a
// graph that has them already leave the attention alone. Results differ by
// rounding, and where Gorgonia's nodes give NaN: SoftMax, see leanattention.Default;
// exponentials that overflow; and a query from which -Inf hides all keys, whose
// output is 0. It knows the ops of Gorgonia v0.9.18 by their names.
//
// Errors: ErrGraph for roots that are nil or of several graphs, and for a
// graph in which two nodes have the hash by which Gorgonia tells nodes apart ([Check]).
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

// fusing puts leanattention.Attention in the place of what was found.
type fusing struct{}

// Fixed says of the inputs that leanattention.Default makes that they are constants: it cannot
// have those, which Gorgonia confuses, so its inputs say by their names what they
// are.
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

// seedOp makes another seed of dropout in each run, as Gorgonia's Dropout draws other numbers. Of its
// input it takes nothing: a node without one would be an input of the graph to Gorgonia. A machine for
// evaluation switches it off, and others on, as they do with Dropout.
type seedOp struct {
	graph.Plain
	rank   int
	number uint64 // no two of them are one node: what these drop would be the same
	off    atomic.Bool
}

var seeds atomic.Uint64

// SetTraining is what Gorgonia's machines call when they are made.
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
