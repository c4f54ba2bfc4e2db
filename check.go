package leanattention

import (
	"fmt"
	"strings"

	G "gorgonia.org/gorgonia"
)

// CheckGraph looks for nodes whose 32-bit hashes are equal. Gorgonia's tape
// machine takes such nodes for one and computes only the first, so a graph with
// a collision gives wrong results without a word; rename an input and it is
// gone. The error is [ErrGraph] and lists the nodes. Call it once, when the
// graph is complete.
//
// Under the build tag cuda it also refuses a graph with a Read and no node on
// Gorgonia's CUDA machine, which would end the process.
//
// Nodes that Gorgonia itself makes equal by mistake, two Slices at 0:256 and
// 256:512 for instance, are one node in the graph already; it can't see those.
func CheckGraph(g *G.ExprGraph) (err error) {
	const op = "CheckGraph"
	defer recoverTo(op, &err)
	if g == nil {
		return errorf(op, ErrGraph, "graph is nil")
	}
	seen := make(map[uint32]*G.Node)
	var collisions []string
	for _, n := range g.AllNodes() {
		h := n.Hashcode()
		if first, ok := seen[h]; ok && first != n {
			collisions = append(collisions, fmt.Sprintf("nodes %d (%v) and %d (%v) have the hash %#x", first.ID(), first, n.ID(), n, h))
			continue
		}
		seen[h] = n
	}
	if collisions != nil {
		return errorf(op, ErrGraph, "%s", strings.Join(collisions, "; "))
	}
	return checkMachine(op, g)
}
