package main

import (
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// eps is what OPT's layer norms add to the variance.
const eps = 1e-5

// weights makes the inputs of a graph.
type weights struct {
	folder *hf.Folder
	graph  *G.ExprGraph
}

// input is a node that holds t. Its name is its own: Gorgonia takes inputs of the
// same name, type and shape for one.
func (w *weights) input(name string, t *tensor.Dense) *G.Node {
	shape := t.Shape()
	return G.NewTensor(w.graph, t.Dtype(), len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(t))
}

// indices is a node that reads x anew in each run.
func (w *weights) indices(name string, x []int) *G.Node {
	return w.input(name, tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x)))
}

// weight is a table or a matrix of the folder, in the type that it is stored in.
func (w *weights) weight(name string, shape ...int) *G.Node {
	t, err := w.folder.Tensor(name, shape...)
	if err != nil {
		panic(err)
	}
	return w.input(name, t)
}

// vector is a bias, or a weight of a layer norm: those are float32.
func (w *weights) vector(name string, n int) *G.Node {
	t, err := w.folder.Float32(name, n)
	if err != nil {
		panic(err)
	}
	return w.input(name, t)
}

// linear is the weights of a linear layer: the matrix (out, in) and the bias.
func (w *weights) linear(name string, out, in int) (matrix, bias *G.Node) {
	return w.weight(name+".weight", out, in), w.vector(name+".bias", out)
}

// norm has a linear layer read its input normalised.
func (w *weights) norm(name string, n int) nn.Option {
	return nn.WithNorm(w.vector(name+".weight", n), w.vector(name+".bias", n), eps)
}
