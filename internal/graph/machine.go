//go:build cuda

package graph

import (
	"fmt"

	"gorgonia.org/leanattention/internal/errs"

	G "gorgonia.org/gorgonia"
)

// CheckMachine refuses what Gorgonia's machine panics at: where no node computes
// on the GPU, it takes the register that a Read does not have for one there.
func CheckMachine(op string, g *G.ExprGraph) error {
	reads := ""
	for _, n := range g.AllNodes() {
		if _, ok := n.Op().(G.CUDADoer); ok {
			return nil
		}
		if fmt.Sprintf("%T", n.Op()) == "gorgonia.readOp" {
			reads = n.String()
		}
	}
	if reads == "" {
		return nil
	}
	return errs.Errorf(op, errs.ErrGraph, "%s, and no node on Gorgonia's CUDA machine: under the build tag cuda take the values of nodes instead", reads)
}
