package nn

import (
	"errors"
	"fmt"
	"hash"
	"slices"
	"unsafe"

	"github.com/chewxy/hm"
	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/graph"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A LinearOption changes one thing of a [Linear]. Of an option given twice the last one counts.
type LinearOption struct {
	relu     bool
	residual *G.Node
}

// WithReLU makes negative outputs 0, behind the bias and before the residual. NaN stays NaN.
func WithReLU() LinearOption { return LinearOption{relu: true} }

// WithResidual adds r, of the output's shape and type, to the output.
func WithResidual(r *G.Node) LinearOption { return LinearOption{residual: r} }

// Linear is a fully connected layer:
//
//	y = f(x w^T + b) + residual
//
// with x of shape (rows, in), w (out, in), as checkpoints store it, b (out), and
// y and residual (rows, out). b may be nil for none; f is max(., 0) under
// [WithReLU] and nothing otherwise; residual is 0 without [WithResidual].
//
// x, b, residual and y are float32, and w is float32, [la.Float16] or
// [la.BFloat16]: sums are in float32 whatever w is stored in. Or all of them are
// float64, which is the slow way.
//
// Weights are read from memory once for a block of up to 128 rows, at the
// memory's speed if rows are few, as they are in decoding. A row's result has
// the same bits whatever the other rows are and however many. w is best an
// input with its values in row-major order: of any other, such as the transpose
// of a node, a copy is made at each run.
//
// It has no gradients: asking for one is ErrUnsupported.
//
// Errors: ErrShape, ErrDType, ErrGraph (nil x or w, other graphs).
func Linear(x, w, b *G.Node, opts ...LinearOption) (y *G.Node, err error) {
	const name = "Linear"
	defer recoverTo(name, &err)
	if x == nil || w == nil {
		return nil, errorf(name, la.ErrGraph, "x or w is nil")
	}
	op := linear{x: x.Dtype(), w: w.Dtype(), bias: b != nil}
	var residual *G.Node
	for _, o := range opts {
		op.relu = op.relu || o.relu
		if o.residual != nil {
			residual = o.residual
		}
	}
	op.residual = residual != nil
	if err := op.checkTypes(); err != nil {
		return nil, err
	}
	children := G.Nodes{x, w}
	for _, n := range []*G.Node{b, residual} {
		if n != nil {
			children = append(children, n)
		}
	}
	shapes := make([]tensor.Shape, len(children))
	for i, n := range children {
		if n.Graph() != x.Graph() {
			return nil, errorf(name, la.ErrGraph, "%s and x are in different graphs", op.name(i))
		}
		if i >= 2 && n.Dtype() != op.x {
			return nil, errorf(name, la.ErrDType, "%s is of %v, x of %v", op.name(i), n.Dtype(), op.x)
		}
		shapes[i] = n.Shape()
	}
	if _, err := op.shape(shapes); err != nil {
		return nil, err
	}
	return apply(name, op, children...)
}

// linear is the operator: children x, w, then bias and residual where present.
// It holds no state, so one value may serve any number of nodes and runs.
type linear struct {
	graph.Plain
	x, w                 tensor.Dtype // of the inputs; the others have x's
	bias, residual, relu bool
}

// name is what the i-th child is.
func (op linear) name(i int) string {
	switch {
	case i == 0:
		return "x"
	case i == 1:
		return "w"
	case i == 2 && op.bias:
		return "b"
	}
	return "residual"
}

func (op linear) checkTypes() error {
	switch {
	case op.x == tensor.Float32 && isWeight(op.w):
		return nil
	case op.x == tensor.Float64 && op.w == tensor.Float64:
		return nil
	}
	return errorf("Linear", la.ErrDType,
		"x is of %v and w of %v, want float32 and one of float32, Float16, BFloat16, or float64 and float64", op.x, op.w)
}

// shape checks the shapes of the inputs and returns the output's.
func (op linear) shape(in []tensor.Shape) (tensor.Shape, error) {
	const name = "Linear"
	if len(in) != op.Arity() {
		return nil, errorf(name, la.ErrShape, "%d inputs, want %d", len(in), op.Arity())
	}
	for i, s := range in[:2] {
		if len(s) != 2 || s[0] < 1 || s[1] < 1 {
			return nil, errorf(name, la.ErrShape, "%s has shape %v, want rank 2 and no empty axis", op.name(i), s)
		}
	}
	if in[0][1] != in[1][1] {
		return nil, errorf(name, la.ErrShape, "x has shape %v and w %v, want the same second axis", in[0], in[1])
	}
	out := tensor.Shape{in[0][0], in[1][0]}
	for i, s := range in[2:] {
		want := out
		if op.bias && i == 0 {
			want = out[1:]
		}
		if !slices.Equal(s, want) {
			return nil, errorf(name, la.ErrShape, "%s has shape %v, want %v for x of shape %v and w of %v", op.name(i+2), s, want, in[0], in[1])
		}
	}
	return out, nil
}

func (op linear) Arity() int { return 2 + count(op.bias) + count(op.residual) }

// Type makes a new type at each call: Gorgonia takes the one it is given apart.
func (op linear) Type() hm.Type {
	ts := []hm.Type{tensorOf(2, op.x), tensorOf(2, op.w)}
	if op.bias {
		ts = append(ts, tensorOf(1, op.x))
	}
	if op.residual {
		ts = append(ts, tensorOf(2, op.x))
	}
	return hm.NewFnType(append(ts, tensorOf(2, op.x))...)
}

func (op linear) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	return op.shape(shapes)
}

func (op linear) String() string {
	return fmt.Sprintf("Linear{x %v, w %v, bias %v, residual %v, relu %v}", op.x, op.w, op.bias, op.residual, op.relu)
}
func (op linear) WriteHash(h hash.Hash) { fmt.Fprint(h, op.String()) }
func (op linear) Hashcode() uint32      { return graph.Hashcode(op) }

// Do returns a new tensor at each call: what Gorgonia's in-place nodes do to it
// afterwards can harm nobody.
func (op linear) Do(in ...G.Value) (y G.Value, err error) {
	const name = "Linear"
	defer recoverTo(name, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, la.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	if op.x == tensor.Float64 {
		return linearForward[float64](op, in)
	}
	return linearForward[float32](op, in)
}

// readLinear is the inputs of a Linear as the engine takes them, but for Y.
func readLinear[F float](op linear, in []G.Value) (o cpu.LinearOperands[F], shape tensor.Shape, err error) {
	const name = "Linear"
	var most [4]tensor.Shape
	shapes := most[:len(in)]
	for i, v := range in {
		shapes[i] = v.Shape()
	}
	if shape, err = op.shape(shapes); err != nil {
		return o, nil, err
	}
	o.Rows, o.In, o.Out, o.ReLU = shape[0], shapes[0][1], shape[1], op.relu
	if o.X, err = elements[F](name, "x", in[0], shapes[0]); err != nil {
		return o, nil, err
	}
	switch op.w {
	case tensor.Float32:
		o.W, err = weights[float32](cpu.Float32, in[1])
	case tensor.Float64:
		o.W, err = weights[float64](cpu.Float64, in[1])
	case la.Float16:
		o.W, err = weights[la.F16](cpu.Float16, in[1])
	case la.BFloat16:
		o.W, err = weights[la.BF16](cpu.BFloat16, in[1])
	}
	if err != nil {
		return o, nil, err
	}
	in, shapes = in[2:], shapes[2:]
	if op.bias {
		if o.Bias, err = elements[F](name, "b", in[0], shapes[0]); err != nil {
			return o, nil, err
		}
		in, shapes = in[1:], shapes[1:]
	}
	if op.residual {
		o.Residual, err = elements[F](name, "residual", in[0], shapes[0])
	}
	return o, shape, err
}

func weights[T any](d cpu.DType, v G.Value) (cpu.Buffer, error) {
	w, err := elements[T]("Linear", "w", v, v.Shape())
	return cpu.Buffer{DType: d, Ptr: unsafe.Pointer(unsafe.SliceData(w)), Len: len(w)}, err
}

func linearForward[F float](op linear, in []G.Value) (G.Value, error) {
	o, shape, err := readLinear[F](op, in)
	if err != nil {
		return nil, err
	}
	var y *tensor.Dense
	y, o.Y = output[F](shape)
	if err := runLinear(&o); err != nil {
		return nil, err
	}
	return y, nil
}

func runLinear[F float](o *cpu.LinearOperands[F]) error {
	err := cpu.Linear(cpu.Default(), o)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, cpu.ErrTier):
		return errorf("Linear", la.ErrOption, "%v", err)
	}
	return errorf("Linear", la.ErrInternal, "%v", err)
}
