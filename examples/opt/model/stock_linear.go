package model

import (
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// multiply returns x wᵀ for w of shape (out, in), as in checkpoints, with Gorgonia's own nodes. BatchedMatMul reads w
// in place; Mul by a transposed w copies w.
func (b *builder) multiply(x, w *G.Node) *G.Node {
	return b.do(func() (*G.Node, error) { return G.BatchedMatMul(x, w, false, true) })
}

// stockLinear is linear with Gorgonia's own nodes. bias may be nil. (Gorgonia has no error function: a GELU is nn's.)
func (b *builder) stockLinear(x, w *G.Node, biasName string, bias *tensor.Dense, activated bool, residual *G.Node) *G.Node {
	y := b.multiply(x, w)
	if bias != nil && b.err == nil {
		// The same memory as a matrix of one row, to be repeated for each row of y.
		row := b.input(biasName, tensor.New(tensor.WithShape(1, bias.Shape()[0]), tensor.WithBacking(bias.Data())))
		if y.Shape()[0] == 1 {
			y = b.add(y, row)
		} else {
			sum := y
			y = b.do(func() (*G.Node, error) { return G.BroadcastAdd(sum, row, nil, []byte{0}) })
		}
	}
	if activated {
		sum := y
		y = b.do(func() (*G.Node, error) { return b.activation().node(sum) })
	}
	if residual != nil {
		y = b.add(residual, y)
	}
	return y
}
