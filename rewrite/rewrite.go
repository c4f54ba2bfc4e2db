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

// ShareMemory has the nodes of a graph share memory: a value that others read is
// overwritten once all of them have run, and so is what a node needs on the way. A run
// takes the memory of the values that are needed at the same time, not of all: of a decoder
// with many rows, that of a layer instead of all layers. On a CPU it is memory that a run need
// not ask the system for, which takes longer to hand it out than many a node takes to compute.
//
// Values that nobody reads stay until the next run, and so do those of keep, of inputs, of
// nodes that other ops than this module's read, and those with a log-sum-exp. Reading another
// one after the run is ErrState on a GPU; in host memory it has whatever was written since.
//
// Call it once, when the graph is complete, and before it runs; a graph that was fused is
// another one. No node of this module can read a shared value that is added later, and there are no
// gradients behind it: ErrGraph. Such a graph can't be recorded: Record of a GPU is ErrUnsupported.
//
// Errors: ErrGraph for no graph, or a node of another one.
func ShareMemory(g *G.ExprGraph, keep ...*G.Node) (err error) {
	const op = "rewrite.ShareMemory"
	defer errs.RecoverTo(op, &err)
	return ongpu.ShareMemory(op, g, keep...)
}
