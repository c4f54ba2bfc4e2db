// Package rewrite reads and changes graphs of Gorgonia: [Fuse] puts attention in the place of stock nodes, [Check] reports nodes
// that Gorgonia confuses, and [ShareMemory] has nodes share memory. The kinds of errors are those of package leanattention.
package rewrite

import (
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
)

// Check looks for nodes that Gorgonia takes for one node, which gives wrong results
// without an error. The error is ErrGraph and lists the nodes. Call it
// once, when the graph is complete. It reports
//
//   - nodes whose 32-bit hashes are equal: Gorgonia's tape machine computes only
//     the first of them. Another name for an input ends such a collision.
//   - inputs without a name: Gorgonia makes one node of all of them that have one type
//     and shape. gorgonia.WithName gives an input a name. Ops of packages leanattention
//     and nn refuse such a node as two of their operands, and only Check
//     reports one that two ops share.
//
// Under the build tag cuda it also refuses a graph with a Read and no node on
// Gorgonia's CUDA machine, which would end the process.
//
// Nodes that Gorgonia itself makes equal by mistake, two Slices at 0:256 and
// 256:512 for instance, are one node in the graph already; Check cannot see those.
func Check(g *G.ExprGraph) (err error) {
	const op = "rewrite.Check"
	defer errs.RecoverTo(op, &err)
	return graph.Check(op, g)
}

// ShareMemory lets the nodes of a graph share memory. The value of a node is overwritten when all nodes that read it have run.
// So a run needs the memory of the values that exist at the same time: for a decoder, of one layer in place of all layers.
//
// These values stay until the next run:
//
//   - values that no node reads, and values of the nodes in keep
//   - values of inputs
//   - values that ops of other modules read
//   - values of attention with a log-sum-exp
//
// To read any other value after the run is ErrState on a GPU, and gives arbitrary numbers in host memory.
//
// Call ShareMemory once, when the graph is complete and before it runs; again for a graph that [Fuse] makes. Afterwards:
//
//   - A new node of this module that reads a shared value is ErrGraph. So are gradients.
//   - A recording keeps the memory of its values for itself until Close. Record of several GPUs is ErrUnsupported.
//
// Errors: ErrGraph for a nil graph, or a node of another graph.
func ShareMemory(g *G.ExprGraph, keep ...*G.Node) (err error) {
	const op = "rewrite.ShareMemory"
	defer errs.RecoverTo(op, &err)
	return ongpu.ShareMemory(op, g, keep...)
}
