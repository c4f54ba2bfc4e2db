package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Recompute returns y with gradients that compute the nodes between x and y a second time. So the values between x and y need no memory from
// the forward to the backward pass. A decoder's layer is
//
//	y, err := layer(x)
//	y, err = nn.Recompute(x, y)
//
// A node between x and y depends on x, and y depends on the node. Nodes outside of the block, such as weights, are computed once.
//
//   - Memory: call rewrite.ShareMemory, as without Recompute. A run then has one value of x for each block, and the values between x and y
//     of one block at a time. The cost is one more forward pass of the block.
//   - Bits: y, and gradients that Backpropagate adds, have the bits of a graph without Recompute, unless more than two nodes, some in a block
//     and some not, read one value. Dropout drops the same weights, since the seed is an input.
//   - x and y: any shape and type, in host memory or on a GPU. y has one gradient for each use of the block, as other nodes have.
//   - Gradients: on the tape machine. No second derivative.
//   - Errors: ErrGraph (nil nodes, other graphs, y does not depend on x); ErrUnsupported for a block with gorgonia.Dropout,
//     leanattention.LogSumExp, a cache, copies to and from GPUs, or an op of another package than leanattention, nn and gorgonia.
func Recompute(x, y *G.Node) (again *G.Node, err error) {
	const name = "Recompute"
	defer errs.RecoverTo(prefix+name, &err)
	b, err := newBlock(name, x, y)
	if err != nil {
		return nil, err
	}
	if len(x.Shape()) == 0 || len(y.Shape()) == 0 {
		return nil, errorf(name, errs.ErrShape, "x of shape %v and y of shape %v, want no scalar", x.Shape(), y.Shape())
	}
	for _, n := range b.nodes {
		if _, ok := opAgain(n); !ok {
			return nil, errorf(name, errs.ErrUnsupported, "the block has %v: end the block before this node", n)
		}
	}
	children := append(G.Nodes{y, x}, b.others...)
	args := argumentsOf(children)
	for i, n := range children {
		args[i].data = i == 0 || !b.graded[n]
	}
	return newCopied(recomputed{&ordered{name, args}}, children...)
}

// A block is the nodes between x and y.
type block struct {
	nodes  G.Nodes          // inputs first
	others G.Nodes          // nodes outside of the block, besides x, that nodes of the block read
	graded map[*G.Node]bool // of x and others: with a gradient
}

func newBlock(name string, x, y *G.Node) (b block, err error) {
	if x == nil || y == nil || x.Graph() != y.Graph() || x.Graph() == nil {
		return b, errorf(name, errs.ErrGraph, "x or y is nil or in another graph")
	}
	sorted, err := G.Sort(y.Graph()) // readers before their inputs
	if err != nil {
		return b, errorf(name, errs.ErrGraph, "%v", err)
	}
	needed, behind := map[*G.Node]bool{y: true}, map[*G.Node]bool{x: true}
	for _, n := range sorted {
		if needed[n] && n != x {
			for _, c := range stock.ChildrenOf(n) {
				needed[c] = true
			}
		}
	}
	for _, n := range slices.Backward(sorted) {
		children := stock.ChildrenOf(n)
		if n == x || !needed[n] || !slices.ContainsFunc(children, func(c *G.Node) bool { return behind[c] }) {
			continue
		}
		behind[n], b.nodes = true, append(b.nodes, n)
	}
	if x == y || !behind[y] {
		return b, errorf(name, errs.ErrGraph, "y, %v, does not depend on x, %v", y, x)
	}
	b.graded = map[*G.Node]bool{y: true}
	for _, n := range slices.Backward(b.nodes) {
		children := stock.ChildrenOf(n)
		through := differentiable(n, children)
		for i, c := range children {
			b.graded[c] = b.graded[c] || b.graded[n] && through[i] && stock.Of(c).Kind != stock.Constant
			if !behind[c] && !slices.Contains(b.others, c) {
				b.others = append(b.others, c)
			}
		}
	}
	return b, nil
}

// opAgain returns the op of a node for a second node. ok is false if the second node may have another value.
func opAgain(n *G.Node) (op G.Op, ok bool) {
	switch o := n.Op().(type) {
	case ongpu.StatefulOp:
		return o.Again(), true
	case view:
		return o, true
	}
	switch s := stock.Of(n); s.Kind {
	case stock.Product, stock.SoftMax, stock.LogSoftMax, stock.Slice, stock.Whole, stock.Concat:
		return n.Op(), true
	default:
		return n.Op(), s.Kind.Plain()
	}
}

// ordered is the rule of x as it is, computed after its other inputs.
type ordered struct {
	name string
	args []argument
}

// after returns x, computed after other nodes.
func after(name string, x *G.Node, others ...*G.Node) (*G.Node, error) {
	children := append(G.Nodes{x}, others...)
	return newCopied(&ordered{name, argumentsOf(children)}, children...)
}

// argumentsOf returns arguments for the children, and for the value of the first one.
func argumentsOf(children G.Nodes) []argument {
	var args []argument
	for i, n := range append(slices.Clone(children), children[0]) {
		args = append(args, argument{name: fmt.Sprintf("input %d", i), rank: n.Dims(), dtype: n.Dtype()})
	}
	return args
}

func (r *ordered) title() string                                 { return r.name }
func (r *ordered) String() string                                { return fmt.Sprintf("%s%v", r.name, r.args) }
func (r *ordered) arguments() []argument                         { return r.args }
func (r *ordered) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }
func (r *ordered) from(tensor.Shape) int                         { return 0 }

func (r *ordered) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	switch r.args[0].dtype {
	case tensor.Float32, tensor.Float64, operand.Float16, operand.BFloat16:
		return movedOf(r.name, []attn.Move{{Dims: [3]int{1, 1, 1}, N: shape.TotalSize()}}, in[:1], shape)
	}
	x, err := ongpu.Dense(r.name, r.args[0].name, in[0])
	if err != nil {
		return nil, err
	}
	return x.Clone().(*tensor.Dense), nil
}

// recomputed is the rule of the value of a block. Its inputs are y, x and the other nodes that the block reads.
type recomputed struct{ *ordered }

func (r recomputed) graphGradients([]*G.Node, *G.Node) ([]*G.Node, error) {
	return nil, errorf(r.name, errs.ErrUnsupported, "gradients without the node")
}

func (r recomputed) valueGradients([]G.Value, G.Value) ([]G.Value, error) {
	return nil, errorf(r.name, errs.ErrUnsupported, "gradients on the lisp machine: use a tape machine")
}

// outputGradients adds the block again, computed once dy is there, and its gradients. The gradient of x comes after all others: earlier
// blocks are computed again when this one needs no memory.
func (r recomputed) outputGradients(in []*G.Node, _, dy *G.Node) (grads []*G.Node, err error) {
	b, err := newBlock(r.name, in[1], in[0])
	if err != nil {
		return nil, err
	}
	x, err := after(r.name, in[1], dy)
	if err != nil {
		return nil, err
	}
	again := map[*G.Node]*G.Node{in[1]: x}
	childrenOf := func(n *G.Node) G.Nodes {
		children := slices.Clone(stock.ChildrenOf(n))
		for i, c := range children {
			if a, ok := again[c]; ok {
				children[i] = a
			}
		}
		return children
	}
	y, outputs, gradients := in[0], G.Nodes(nil), G.Nodes{dy}
	for _, n := range b.nodes { // y is the last one
		if _, ok := nodeRule[linear](n); ok && n == y { // no gradient reads its value
			outputs = childrenOf(y)
			if gradients, err = y.Op().(G.SDOp).SymDiff(outputs, nil, dy); err != nil {
				return nil, err
			}
			break
		}
		op, _ := opAgain(n)
		if again[n], err = ongpu.Apply(prefix+r.name, op, childrenOf(n)...); err != nil {
			return nil, err
		}
	}
	if outputs == nil {
		outputs = G.Nodes{again[y]}
	}
	var wrt G.Nodes
	var of []int
	for i, a := range r.args[:len(in)] {
		if !a.data {
			of = append(of, i)
			if wrt = append(wrt, in[i]); i == 1 {
				wrt[0] = x
			}
		}
	}
	all, err := backpropagate(r.name, outputs, gradients, wrt, true)
	if err != nil {
		return nil, err
	}
	grads = make([]*G.Node, len(in))
	for i, g := range all {
		if grads[of[i]] = g; g == nil {
			return nil, errorf(r.name, errs.ErrGraph, "y does not depend on %v", in[of[i]])
		}
	}
	if grads[1] != nil && len(all) > 1 {
		grads[1], err = after(r.name, grads[1], all[1:]...)
	}
	return grads, err
}

var (
	_ window           = recomputed{}
	_ composed         = recomputed{}
	_ composedOfOutput = recomputed{}
)
