package nn

import (
	"fmt"
	"hash"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cpu/norm"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/graph"

	"github.com/chewxy/hm"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The gradients, with xh = (x - mean) * rstd and dy the gradient of y:
//
//	dx     = rstd * (g - mean(g) - xh * mean(g*xh)),  g = dy * gamma
//	dgamma = sum over rows of dy * xh
//	dbeta  = sum over rows of dy
//
// They are three operators, because an operator of Gorgonia has one result;
// each computes the moments again, which is cheaper than to keep them.

// DiffWRT says that every input has a gradient.
func (op layerNorm) DiffWRT(inputs int) []bool {
	wrt := make([]bool, inputs)
	for i := range wrt {
		wrt[i] = true
	}
	return wrt
}

// SymDiff adds the nodes of the gradients (tape machine).
func (op layerNorm) SymDiff(in G.Nodes, _, grad *G.Node) (grads G.Nodes, err error) {
	defer errs.RecoverTo(prefix+"LayerNorm.SymDiff", &err)
	return layerNormGradients(inGraph, op, in, grad)
}

// DoDiff adds the gradients to those of the inputs (lisp machine).
func (op layerNorm) DoDiff(_ G.ExecutionContext, in G.Nodes, y *G.Node) (err error) {
	const name = "LayerNorm.DoDiff"
	defer errs.RecoverTo(prefix+name, &err)
	return addGradients(name, in, y, func(in []G.Value, dy G.Value) ([]G.Value, error) {
		return layerNormGradients(atOnce, op, in, dy)
	})
}

func layerNormGradients[T any](do step[T], op layerNorm, in []T, dy T) (grads []T, err error) {
	if len(in) != op.Arity() {
		return nil, errorf("LayerNorm", errs.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	for _, of := range op.inputs() {
		d, err := do(layerNormGrad{norm: op, of: of}, append(slices.Clone(in), dy)...)
		if err != nil {
			return nil, err
		}
		grads = append(grads, d)
	}
	return grads, nil
}

type input uint8

const (
	inputX input = iota
	inputGamma
	inputBeta
)

func (i input) String() string { return [...]string{"x", "gamma", "beta"}[i] }

// inputs is the inputs that the operator has, in order.
func (op layerNorm) inputs() []input {
	in := []input{inputX}
	if op.gamma {
		in = append(in, inputGamma)
	}
	if op.beta {
		in = append(in, inputBeta)
	}
	return in
}

// layerNormGrad is the gradient of one input of a LayerNorm; its children are
// the LayerNorm's inputs and the gradient of its output.
type layerNormGrad struct {
	graph.Plain
	norm layerNorm
	of   input
}

func (op layerNormGrad) Arity() int { return op.norm.Arity() + 1 }

func (op layerNormGrad) Type() hm.Type {
	a := hm.TypeVariable('a')
	ts := []hm.Type{tensorOf(op.norm.rank, a)}
	for range op.norm.Arity() - 1 {
		ts = append(ts, tensorOf(1, a))
	}
	ts = append(ts, tensorOf(op.norm.rank, a))
	if op.of == inputX {
		return hm.NewFnType(append(ts, tensorOf(op.norm.rank, a))...)
	}
	return hm.NewFnType(append(ts, tensorOf(1, a))...)
}

func (op layerNormGrad) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	if len(shapes) != op.Arity() || len(shapes[0]) != op.norm.rank || !slices.Equal(shapes[0], shapes[len(shapes)-1]) {
		return nil, errorf("LayerNorm gradient", errs.ErrShape, "inputs have shapes %v", shapes)
	}
	if op.of == inputX {
		return shapes[0].Clone(), nil
	}
	return tensor.Shape{shapes[0][op.norm.rank-1]}, nil
}

func (op layerNormGrad) String() string        { return fmt.Sprintf("d%v of %v", op.of, op.norm) }
func (op layerNormGrad) WriteHash(h hash.Hash) { fmt.Fprint(h, op.String()) }
func (op layerNormGrad) Hashcode() uint32      { return graph.Hashcode(op) }

// DiffWRT and SymDiff are there because Gorgonia panics at an operator that
// lacks them; the error says what is missing.
func (op layerNormGrad) DiffWRT(inputs int) []bool { return op.norm.DiffWRT(inputs) }

func (op layerNormGrad) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errorf("LayerNorm", errs.ErrUnsupported, "second derivative")
}

func (op layerNormGrad) Do(in ...G.Value) (d G.Value, err error) {
	const name = "LayerNorm gradient"
	defer errs.RecoverTo(prefix+name, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, errs.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	switch dt := in[0].Dtype(); dt {
	case tensor.Float32:
		return backward[float32](op, in)
	case tensor.Float64:
		return backward[float64](op, in)
	default:
		return nil, errorf(name, errs.ErrDType, "x is of %v when run, want float32 or float64", dt)
	}
}

func backward[F float](op layerNormGrad, in []G.Value) (G.Value, error) {
	last := len(in) - 1
	r, err := readRows[F](op.norm, in[:last])
	if err != nil {
		return nil, err
	}
	dy, err := elements[F]("LayerNorm gradient", "the output's gradient", in[last], r.shape)
	if err != nil {
		return nil, err
	}
	n := r.n
	if op.of == inputX {
		dx := dense.Make[F](len(r.x))
		eachRow(len(dx)/n, n, func(row int) {
			at := row * n
			gradX(dx[at:at+n], r.x[at:at+n], r.gamma, dy[at:at+n], op.norm.eps)
		})
		return tensor.New(tensor.WithShape(r.shape.Clone()...), tensor.WithBacking(dx)), nil
	}
	// One goroutine: the sum over rows has one order, so it has the same bits
	// on every machine.
	sum := make([]float64, n)
	for at := 0; at < len(dy); at += n {
		if op.of == inputBeta {
			for i, g := range dy[at : at+n] {
				sum[i] += float64(g)
			}
			continue
		}
		mean, rstd := norm.Moments(r.x[at:at+n], op.norm.eps)
		for i, g := range dy[at : at+n] {
			sum[i] += float64(g) * (float64(r.x[at+i]) - mean) * rstd
		}
	}
	d := make([]F, n)
	for i, s := range sum {
		d[i] = F(s)
	}
	return tensor.New(tensor.WithShape(n), tensor.WithBacking(d)), nil
}

// gradX writes dx of one row; gamma may be nil.
func gradX[F float](dx, x, gamma, dy []F, eps float64) {
	mean, rstd := norm.Moments(x, eps)
	scaled := func(i int) float64 {
		if gamma == nil {
			return float64(dy[i])
		}
		return float64(dy[i]) * float64(gamma[i])
	}
	var g, gx float64
	for i, v := range x {
		s := scaled(i)
		g += s
		gx += s * (float64(v) - mean) * rstd
	}
	n := float64(len(x))
	g, gx = g/n, gx/n
	for i, v := range x {
		dx[i] = F(rstd * (scaled(i) - g - (float64(v)-mean)*rstd*gx))
	}
}
