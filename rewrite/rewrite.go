// Package rewrite reads and changes graphs of Gorgonia: [Fuse] puts attention in the place of stock nodes, [Check] reports nodes
// that Gorgonia confuses, and [ShareMemory] lets nodes share memory. Package leanattention has the kinds of errors.
package rewrite

import (
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
)

// Check looks for nodes that Gorgonia takes for one node, with wrong results and no error. Call Check once, when the graph is
// complete. The error is ErrGraph and lists the nodes:
//
//   - nodes with equal 32-bit hashes: Gorgonia's tape machine computes only the first of them. Another name for an input
//     ends such a collision.
//   - inputs without a name: Gorgonia makes one node of all nameless inputs with one type and shape. gorgonia.WithName names an
//     input. Ops of packages leanattention and nn refuse such a node as two of their operands, and only Check reports a node
//     that two ops share.
//
// Under the build tag cuda, Check also refuses a graph with a Read and no node on Gorgonia's CUDA machine, which would end the
// process.
//
// Gorgonia itself makes some nodes equal by mistake, for instance two Slices at 0:256 and 256:512. They are one node in
// the graph already, and Check cannot see them.
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
// Any other value is gone after the run: reading it is ErrState on a GPU, and gives arbitrary numbers in host memory.
//
// Call ShareMemory once, when the graph is complete and before the graph runs, and again for a graph that [Fuse] makes. Afterwards:
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
