package nn

import (
	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
)

// A Linear has no gradient: it is there for decoding. DiffWRT, SymDiff and
// DoDiff are there because Gorgonia panics at an operator that lacks them, or
// takes its gradient for zero; the error says what is missing.

// DiffWRT claims every input, so that whoever asks for a gradient gets the error.
func (op linear) DiffWRT(inputs int) []bool {
	wrt := make([]bool, inputs)
	for i := range wrt {
		wrt[i] = true
	}
	return wrt
}

// SymDiff is where the tape machine's gradients would come from.
func (op linear) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errorf("Linear", la.ErrUnsupported, "gradient")
}

// DoDiff is where the lisp machine's gradients would come from.
func (op linear) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errorf("Linear", la.ErrUnsupported, "gradient")
}
