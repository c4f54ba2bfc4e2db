package leanattention

import (
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/stock"
)

// ShareMemory has the nodes of a graph share memory: a value that others read is
// overwritten once all of them have run, and so is what a node needs on the way. A run
// takes the memory of the values that are needed at the same time, not of all: of a decoder
// with many rows, that of a layer instead of all layers. On a CPU it is memory that a run need
// not ask the system for, which takes longer to hand it out than many a node takes to compute.
//
// Values that nobody reads stay until the next run, and so do those of keep, of inputs, of
// nodes that other ops than this module's read, and those with a log-sum-exp. Reading another
// one after the run is [ErrState] on a GPU; in host memory it has whatever was written since.
//
// Call it once, when the graph is complete, and before it runs; a graph that was fused is
// another one. No node of this module can read a shared value that is added later, and there are no
// gradients behind it: [ErrGraph]. Such a graph can't be recorded: [GPU.Record] is [ErrUnsupported].
//
// Errors: [ErrGraph] for no graph, or a node of another one.
func ShareMemory(g *G.ExprGraph, keep ...*G.Node) (err error) {
	const op = "ShareMemory"
	defer errs.RecoverTo(op, &err)
	if g == nil {
		return errs.Errorf(op, ErrGraph, "graph is nil")
	}
	for i, n := range keep {
		if n == nil || n.Graph() != g {
			return errs.Errorf(op, ErrGraph, "keep[%d] is no node of the graph", i)
		}
	}
	nodes := g.AllNodes()
	readers := make(map[*G.Node][]*G.Node) // once for each time that they read a node
	for _, n := range nodes {
		for _, child := range stock.ChildrenOf(n) {
			readers[child] = append(readers[child], n)
		}
	}
	for _, n := range nodes {
		if o, ok := n.Op().(ongpu.Op); ok {
			o.OnGPU().Reads = reads(n, readers, keep)
		}
	}
	for _, n := range nodes {
		if o, ok := n.Op().(ongpu.Op); ok {
			o.OnGPU().From = nil
			for _, child := range stock.ChildrenOf(n) {
				o.OnGPU().From = append(o.OnGPU().From, ongpu.SharedBy(child))
			}
		}
	}
	return nil
}

// reads is how often a node's value is read, with its parts; 0 where it is to stay.
func reads(n *G.Node, readers map[*G.Node][]*G.Node, keep []*G.Node) (total int) {
	if slices.Contains(keep, n) {
		return 0
	}
	for _, r := range readers[n] {
		switch r.Op().(type) {
		case ongpu.Op:
			total++
		case ongpu.PartOp:
			of := reads(r, readers, keep)
			if of == 0 {
				return 0
			}
			total += of
		default:
			return 0
		}
	}
	return total
}
