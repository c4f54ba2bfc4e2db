package nn

import (
	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
)

// noGradient is what an operator that is there for decoding answers when it is
// asked for a gradient. It has DiffWRT, SymDiff and DoDiff, because Gorgonia
// panics at an operator that lacks them, or takes its gradient for zero.
func noGradient(name string) error { return errorf(name, la.ErrUnsupported, "gradient") }

// everyInput claims every input for DiffWRT, so that whoever asks for a gradient
// gets the error.
func everyInput(inputs int) []bool {
	wrt := make([]bool, inputs)
	for i := range wrt {
		wrt[i] = true
	}
	return wrt
}

func (op linear) DiffWRT(inputs int) []bool { return everyInput(inputs) }

// SymDiff is where the tape machine's gradients would come from.
func (op linear) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, noGradient("Linear")
}

// DoDiff is where the lisp machine's gradients would come from.
func (op linear) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error { return noGradient("Linear") }

func (op linearPart) DiffWRT(inputs int) []bool { return everyInput(inputs) }

func (op linearPart) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, noGradient("Linears")
}

func (op linearPart) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error { return noGradient("Linears") }
