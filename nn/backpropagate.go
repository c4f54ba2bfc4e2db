package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Backpropagate adds the nodes of gradients to a graph, as gorgonia.Backpropagate does. The gradients of a node with several readers, as
// of residual connections, are added by [Add], which computes on GPUs, too.
//
//   - gradients has the gradient of each output, in the output's shape and type.
//   - The result has the gradient of each node of wrt. An input of the graph in wrt then has a gorgonia.Node.Grad, for solvers.
//   - A sum adds gradients in a fixed order. Sums of scalars and of types that Add does not take are Gorgonia's own.
//   - Errors: ErrGraph (nil nodes, other graphs, a node of wrt that no output depends on or that has a gradient already, an op without
//     gradients), ErrShape, ErrDType, and those of the ops.
func Backpropagate(outputs, gradients, wrt G.Nodes) (grads G.Nodes, err error) {
	const name = "Backpropagate"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkBackward(name, outputs, gradients, wrt); err != nil {
		return nil, err
	}
	if grads, err = backpropagate(name, outputs, gradients, wrt, false); err != nil {
		return nil, err
	}
	for i, n := range wrt {
		if grads[i] == nil {
			return nil, errorf(name, errs.ErrGraph, "no output depends on %v", n)
		}
	}
	for i, n := range wrt {
		if n.Op() == nil {
			stock.SetDeriv(n, grads[i])
		}
	}
	return grads, nil
}

// backpropagate is Backpropagate of checked arguments. A node that no output depends on has a nil gradient, and no gorgonia.Node.Grad is set.
// An output may have a nil gradient. With partial, gradients are partial derivatives, as if the nodes of wrt depended on nothing.
func backpropagate(name string, outputs, gradients, wrt G.Nodes, partial bool) (grads G.Nodes, err error) {
	sorted, err := G.Sort(outputs[0].Graph()) // readers before what they read
	if err != nil {
		return nil, errorf(name, errs.ErrGraph, "%v", err)
	}
	active, readers := dependents(sorted, wrt), readersOf(sorted, outputs, wrt)
	behind := map[*G.Node]behindActivation{} // layers whose gradients begin behind their activation
	of, parts := map[*G.Node][]*G.Node{}, map[*G.Node][]partGradient{}
	for i, y := range outputs {
		if gradients[i] != nil {
			of[y] = append(of[y], gradients[i])
		}
	}
	for _, n := range sorted {
		if list := parts[n]; len(list) > 0 && active[n] {
			if down, err := ofHeads(n, list, len(of[n]) == 0); err != nil {
				return nil, errs.Within(prefix+name, err)
			} else if down != nil {
				for i, c := range stock.ChildrenOf(n) {
					if active[c] {
						of[c] = append(of[c], down[i])
					}
				}
				continue
			}
			more, err := ofWhole(n, list, len(of[n]) == 0)
			if err != nil {
				return nil, err
			}
			of[n] = append(of[n], more...)
		}
		if a, ok := behind[n]; ok {
			children := stock.ChildrenOf(n)
			down, err := linearGradientsThrough(inGraph, a.of, children, G.Nodes{a.dy}, a.f, n)
			if err != nil {
				return nil, errs.Within(prefix+name, err)
			}
			for i, c := range children {
				if active[c] {
					of[c] = append(of[c], down[i])
				}
			}
			continue
		}
		all := of[n]
		if len(all) == 0 || !active[n] {
			continue
		}
		sum, err := sumOf(all)
		if err != nil {
			return nil, err
		}
		of[n] = []*G.Node{sum}
		if partial && slices.Contains(wrt, n) {
			continue
		}
		children := stock.ChildrenOf(n)
		through := differentiable(n, children)
		if !slices.ContainsFunc(children, func(c *G.Node) bool { return active[c] }) {
			continue
		}
		if p, ok := partOfLinears(n, sum, readers); ok {
			whole := stock.ChildrenOf(p.part)[0]
			parts[whole] = append(parts[whole], p)
			continue
		}
		if a, ok := behindLayers(n, sum, readers); ok && active[children[0]] {
			behind[children[0]] = a
			continue
		}
		op, ok := n.Op().(G.SDOp)
		if !ok {
			return nil, errorf(name, errs.ErrGraph, "%v has an op without gradients", n)
		}
		down, err := op.SymDiff(children, n, sum)
		if err != nil {
			return nil, errs.Within(prefix+name, err)
		}
		for i, c := range children {
			if through[i] && active[c] {
				of[c] = append(of[c], down[i])
			}
		}
	}
	for _, n := range wrt {
		grads = append(grads, append(of[n], nil)[0])
	}
	return grads, nil
}

func checkBackward(name string, outputs, gradients, wrt G.Nodes) error {
	if len(outputs) == 0 || len(outputs) != len(gradients) || len(wrt) == 0 {
		return errorf(name, errs.ErrGraph, "%d outputs, %d gradients of them, and %d nodes of wrt", len(outputs), len(gradients), len(wrt))
	}
	all := slices.Concat(outputs, gradients, wrt)
	for _, n := range all {
		if n == nil || n.Graph() != all[0].Graph() || n.Graph() == nil {
			return errorf(name, errs.ErrGraph, "%v is no node of the graph of the first output", n)
		}
	}
	for i, y := range outputs {
		switch dy := gradients[i]; {
		case !slices.Equal(dy.Shape(), y.Shape()):
			return errorf(name, errs.ErrShape, "the gradient of output %d has shape %v, want %v", i, dy.Shape(), y.Shape())
		case dy.Dtype() != y.Dtype():
			return errorf(name, errs.ErrDType, "the gradient of output %d is of %v, want %v", i, dy.Dtype(), y.Dtype())
		}
	}
	for i, n := range wrt {
		switch {
		case n.Deriv() != nil:
			return errorf(name, errs.ErrGraph, "%v has a gradient already: one call of Backpropagate makes all", n)
		case slices.Contains(wrt[:i], n):
			return errorf(name, errs.ErrGraph, "%v is twice in wrt", n)
		}
	}
	if err := ongpu.Stay(all...); err != nil {
		return errorf(name, errs.ErrGraph, "%v", err)
	}
	return nil
}

// dependents returns the nodes that depend on a node of wrt, these among them.
func dependents(sorted, wrt G.Nodes) map[*G.Node]bool {
	active := map[*G.Node]bool{}
	for _, n := range wrt {
		active[n] = true
	}
	for _, n := range slices.Backward(sorted) {
		children := stock.ChildrenOf(n)
		for i, through := range differentiable(n, children) {
			active[n] = active[n] || through && active[children[i]]
		}
	}
	return active
}

// differentiable reports for each child of a node whether there is a gradient of it. Ops that say nothing are asked for their gradients,
// which is an error.
func differentiable(n *G.Node, children []*G.Node) []bool {
	through := slices.Repeat([]bool{true}, len(children))
	if op, ok := n.Op().(interface{ DiffWRT(int) []bool }); ok {
		copy(through, op.DiffWRT(len(children)))
	}
	return through
}

// sumOf adds gradients of a node in their order.
func sumOf(all []*G.Node) (sum *G.Node, err error) {
	sum = all[0]
	for _, n := range all[1:] {
		if t := n.Dtype(); len(n.Shape()) == 0 || t != tensor.Float32 && t != tensor.Float64 {
			sum, err = G.Add(sum, n)
		} else {
			sum, err = Add(sum, n)
		}
		if err != nil {
			return nil, err
		}
	}
	return sum, nil
}
