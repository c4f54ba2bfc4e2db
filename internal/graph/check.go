package graph

import (
	"fmt"
	"strings"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/errs"
)

// Check reports nodes of g that Gorgonia takes for one node, and a graph that Gorgonia's CUDA machine panics at.
func Check(op string, g *G.ExprGraph) error {
	if g == nil {
		return errs.Errorf(op, errs.ErrGraph, "graph is nil")
	}
	faults := Collisions(g)
	for _, n := range g.AllNodes() {
		if Nameless(n) {
			faults = append(faults, fmt.Sprintf("node %d, an input of type %v and shape %v, has no name: Gorgonia makes one node of all such inputs; name each of them (gorgonia.WithName)", n.ID(), n.Type(), n.Shape()))
		}
	}
	if faults != nil {
		return errs.Errorf(op, errs.ErrGraph, "%s", strings.Join(faults, "; "))
	}
	return CheckMachine(op, g)
}

// Collisions describes the nodes of g whose hashes are equal.
func Collisions(g *G.ExprGraph) (all []string) {
	seen := make(map[uint32]*G.Node)
	for _, n := range g.AllNodes() {
		h := n.Hashcode()
		if first, ok := seen[h]; ok && first != n {
			all = append(all, fmt.Sprintf("nodes %d (%v) and %d (%v) have the hash %#x", first.ID(), first, n.ID(), n, h))
			continue
		}
		seen[h] = n
	}
	return all
}
