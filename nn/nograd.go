package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	G "gorgonia.org/gorgonia"
)

// inference is the name of an operator that is there for decoding and refuses to be
// differentiated. It is to be embedded. It has DiffWRT, SymDiff and DoDiff, because
// Gorgonia panics at an operator that lacks them, or takes its gradient for zero.
type inference string

// DiffWRT claims every input, so that whoever asks for a gradient gets the error.
func (inference) DiffWRT(inputs int) []bool { return slices.Repeat([]bool{true}, inputs) }

// SymDiff is where the tape machine's gradients would come from.
func (name inference) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errorf(string(name), errs.ErrUnsupported, "gradient")
}

// DoDiff is where the lisp machine's gradients would come from.
func (name inference) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errorf(string(name), errs.ErrUnsupported, "gradient")
}
