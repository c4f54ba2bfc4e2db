package ongpu

import (
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/stock"
)

// ShareMemory makes the nodes of a graph share memory, except keep. Package rewrite documents it for users.
func ShareMemory(op string, g *G.ExprGraph, keep ...*G.Node) error {
	if g == nil {
		return errs.Errorf(op, errs.ErrGraph, "graph is nil")
	}
	for i, n := range keep {
		if n == nil || n.Graph() != g {
			return errs.Errorf(op, errs.ErrGraph, "keep[%d] is no node of the graph", i)
		}
	}
	nodes := g.AllNodes()
	readers := make(map[*G.Node][]*G.Node) // once for each read of a node
	for _, n := range nodes {
		for _, child := range readBy(n) {
			readers[child] = append(readers[child], n)
		}
	}
	for _, n := range nodes {
		if o, ok := n.Op().(Op); ok {
			o.OnGPU().Reads, o.OnGPU().Shares = reads(n, readers, keep), true
		}
	}
	for _, n := range nodes {
		if o, ok := n.Op().(Op); ok {
			o.OnGPU().From = nil
			for _, child := range readBy(n) {
				o.OnGPU().From = append(o.OnGPU().From, SharedBy(child))
			}
		}
	}
	return nil
}

// readBy returns the children whose values n reads.
func readBy(n *G.Node) []*G.Node {
	children := stock.ChildrenOf(n)
	switch n.Op().(type) {
	case PartOp, FirstOp:
		return children[:1]
	}
	return children
}

// reads returns how often a node's value is read, reads of its parts included; 0 for a value that stays.
func reads(n *G.Node, readers map[*G.Node][]*G.Node, keep []*G.Node) (total int) {
	if slices.Contains(keep, n) {
		return 0
	}
	for _, r := range readers[n] {
		switch r.Op().(type) {
		case PartOp:
			of := reads(r, readers, keep)
			if of == 0 {
				return 0
			}
			total += of
		case Op:
			total++
		default:
			return 0
		}
	}
	return total
}
