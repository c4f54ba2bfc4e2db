package nn

import (
	"fmt"
	"hash"
	"math"
	"slices"

	"github.com/chewxy/hm"
	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/graph"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// GELU is the Gaussian error linear unit, exactly: each element times the probability
// that a standard normal variable is below it,
//
//	y = x/2 (1 + erf(x/sqrt(2)))
//
// Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415. It is
// not the approximation by tanh, which differs by up to 5e-4. Behind a [Linear],
// [WithGELU] is the same and takes no node.
//
// x is of rank 1 or more, float32 or float64; y has its shape and type. In float32 y is
// off by no more than 2^-22 of x. NaN stays NaN, and -Inf becomes it, as the formula
// has it.
//
// The gradient is available on both of Gorgonia's machines; it can not be
// differentiated once more. x on a GPU is ErrUnsupported: there [WithGELU] is.
//
// Errors: ErrShape, ErrDType, ErrGraph (nil x).
func GELU(x *G.Node) (y *G.Node, err error) {
	const name = "GELU"
	defer recoverTo(name, &err)
	if x == nil {
		return nil, errorf(name, la.ErrGraph, "x is nil")
	}
	shape := x.Shape()
	if len(shape) == 0 {
		return nil, errorf(name, la.ErrShape, "x is a scalar, want rank 1 or more")
	}
	for _, d := range shape {
		if d < 1 {
			return nil, errorf(name, la.ErrShape, "x has shape %v, want no empty axis", shape)
		}
	}
	if dt := x.Dtype(); dt != tensor.Float32 && dt != tensor.Float64 {
		return nil, errorf(name, la.ErrDType, "x is of %v, want float32 or float64", dt)
	}
	return apply(name, gelu{rank: len(shape)}, x)
}

// gelu is the operator; with grad, its gradient, whose second input is the output's.
type gelu struct {
	graph.Plain
	rank int
	grad bool
}

func (op gelu) Arity() int { return 1 + count(op.grad) }

func (op gelu) Type() hm.Type {
	a := hm.TypeVariable('a')
	var ts []hm.Type
	for range op.Arity() + 1 {
		ts = append(ts, tensorOf(op.rank, a))
	}
	return hm.NewFnType(ts...)
}

func (op gelu) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	if len(shapes) != op.Arity() || len(shapes[0]) != op.rank || !slices.Equal(shapes[0], shapes[len(shapes)-1]) {
		return nil, errorf("GELU", la.ErrShape, "inputs have shapes %v", shapes)
	}
	return shapes[0].Clone(), nil
}

func (op gelu) String() string        { return fmt.Sprintf("GELU{rank %d, gradient %v}", op.rank, op.grad) }
func (op gelu) WriteHash(h hash.Hash) { fmt.Fprint(h, op.String()) }
func (op gelu) Hashcode() uint32      { return graph.Hashcode(op) }

// Do returns a new tensor at each call, as LayerNorm's does.
func (op gelu) Do(in ...G.Value) (y G.Value, err error) {
	const name = "GELU"
	defer recoverTo(name, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, la.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	if anyOnGPU(in) {
		return nil, errorf(name, la.ErrUnsupported, "x on a GPU; a Linear with WithGELU computes it there")
	}
	switch dt := in[0].Dtype(); dt {
	case tensor.Float32:
		return geluOf[float32](op, in)
	case tensor.Float64:
		return geluOf[float64](op, in)
	default:
		return nil, errorf(name, la.ErrDType, "x is of %v when run, want float32 or float64", dt)
	}
}

// geluPiece is so many elements that a goroutine takes at a time.
const geluPiece = 1 << 12

func geluOf[F float](op gelu, in []G.Value) (G.Value, error) {
	const name = "GELU"
	shape := in[0].Shape()
	if len(shape) != op.rank {
		return nil, errorf(name, la.ErrShape, "x has shape %v when run, want rank %d", shape, op.rank)
	}
	x, err := elements[F](name, "x", in[0], shape)
	if err != nil {
		return nil, err
	}
	var dy []F
	if op.grad {
		if dy, err = elements[F](name, "the output's gradient", in[1], shape); err != nil {
			return nil, err
		}
	}
	t, y := output[F](shape)
	eachRow((len(y)+geluPiece-1)/geluPiece, geluPiece, func(i int) {
		from, to := i*geluPiece, min((i+1)*geluPiece, len(y))
		if op.grad {
			geluGrad(y[from:to], x[from:to], dy[from:to])
			return
		}
		copy(y[from:to], x[from:to])
		cpu.Activate(attn.GELU, y[from:to])
	})
	return t, nil
}

// geluGrad writes dy times the derivative of the GELU, which is P(x) + x p(x) with the
// normal distribution P and its density p.
func geluGrad[F float](dx, x, dy []F) {
	for i, v := range x {
		v := float64(v)
		slope := math.Erfc(-v/math.Sqrt2) / 2
		if p := math.Exp(-v * v / 2); p > 0 { // v may be infinite where it is not
			slope += v * p / math.Sqrt(2*math.Pi)
		}
		dx[i] = F(float64(dy[i]) * slope)
	}
}

// DiffWRT says that x has a gradient.
func (op gelu) DiffWRT(inputs int) []bool { return slices.Repeat([]bool{true}, inputs) }

// SymDiff adds the gradient's node (tape machine).
func (op gelu) SymDiff(in G.Nodes, _, grad *G.Node) (grads G.Nodes, err error) {
	const name = "GELU.SymDiff"
	defer recoverTo(name, &err)
	switch {
	case op.grad:
		return nil, errorf("GELU", la.ErrUnsupported, "second derivative")
	case len(in) != op.Arity():
		return nil, errorf(name, la.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	n, err := apply(name, gelu{rank: op.rank, grad: true}, in[0], grad)
	if err != nil {
		return nil, err
	}
	return G.Nodes{n}, nil
}

// DoDiff adds the gradient to that of x (lisp machine).
func (op gelu) DoDiff(_ G.ExecutionContext, in G.Nodes, y *G.Node) (err error) {
	const name = "GELU.DoDiff"
	defer recoverTo(name, &err)
	switch {
	case op.grad:
		return errorf("GELU", la.ErrUnsupported, "second derivative")
	case len(in) != op.Arity():
		return errorf(name, la.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	dy, err := y.Grad()
	if err != nil {
		return errorf(name, la.ErrGraph, "%v", err)
	}
	d, err := gelu{rank: op.rank, grad: true}.Do(in[0].Value(), dy)
	if err != nil {
		return err
	}
	sum, err := in[0].Grad()
	if err != nil {
		return errorf(name, la.ErrGraph, "%v", err)
	}
	if _, err = tensor.Add(sum, d, tensor.UseUnsafe()); err != nil {
		return errorf(name, la.ErrGraph, "%v", err)
	}
	return nil
}

var (
	_ G.SDOp = gelu{}
	_ G.ADOp = gelu{}
)
