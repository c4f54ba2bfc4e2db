package nn

import (
	"fmt"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Convert returns the elements of x in another type, rounded to nearest: between linear layers, which have float32, and attention
// whose gradients are computed on a GPU, which has leanattention.Float16 or leanattention.BFloat16.
//
//   - x: rank 1 or more. One of the two types is float32, and the other one is float16 or bfloat16. Numbers that are too large for
//     float16 become infinite.
//   - Gradient: the output's gradient, converted back, on the tape machine. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil x).
func Convert(x *G.Node, to tensor.Dtype) (y *G.Node, err error) {
	const name = "Convert"
	defer errs.RecoverTo(prefix+name, &err)
	if x == nil {
		return nil, errorf(name, errs.ErrGraph, "x is nil")
	}
	r := convert{rank: len(x.Shape()), from: x.Dtype(), to: to}
	isHalf := func(t tensor.Dtype) bool { return t == operand.Float16 || t == operand.BFloat16 }
	switch {
	case r.rank == 0:
		return nil, errorf(name, errs.ErrShape, "x is a scalar, want rank 1 or more")
	case !(r.from == tensor.Float32 && isHalf(to)) && !(isHalf(r.from) && to == tensor.Float32):
		return nil, errorf(name, errs.ErrDType, "%s is of %v, and is to be of %v: want float32 and one of float16 and bfloat16", called("x", x), r.from, to)
	}
	return newNode(r, x)
}

type convert struct {
	rank     int
	from, to tensor.Dtype
}

func (r convert) title() string { return "Convert" }
func (r convert) String() string {
	return fmt.Sprintf("Convert{%v to %v, rank %d}", r.from, r.to, r.rank)
}

func (r convert) arguments() []argument {
	return []argument{{name: "x", rank: r.rank, dtype: r.from, halves: true}, {name: "y", rank: r.rank, dtype: r.to, halves: true}}
}

func (r convert) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (r convert) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	switch {
	case r.from == operand.Float16:
		return widened(in[0], shape, half.DecodeFloat16[half.Float16])
	case r.from == operand.BFloat16:
		return widened(in[0], shape, half.DecodeBFloat16[half.BFloat16])
	case r.to == operand.Float16:
		return narrowed(in[0], shape, half.EncodeFloat16[half.Float16])
	}
	return narrowed(in[0], shape, half.EncodeBFloat16[half.BFloat16])
}

func widened[H any](v G.Value, shape tensor.Shape, decode func([]float32, []H)) (G.Value, error) {
	x, err := elements[H]("Convert", "x", v, shape)
	if err != nil {
		return nil, err
	}
	t, y := output[float32](shape)
	decode(y, x)
	return t, nil
}

func narrowed[H any](v G.Value, shape tensor.Shape, encode func([]H, []float32)) (G.Value, error) {
	x, err := elements[float32]("Convert", "x", v, shape)
	if err != nil {
		return nil, err
	}
	t, y := dense.Unwritten[H](dtypeOf[H](), shape)
	encode(y, x)
	return t, nil
}

func (r convert) back() convert { return convert{rank: r.rank, from: r.to, to: r.from} }

func (r convert) graphGradients(_ []*G.Node, dy *G.Node) ([]*G.Node, error) {
	dx, err := newNode(r.back(), dy)
	return []*G.Node{dx}, err
}

func (r convert) valueGradients(_ []G.Value, dy G.Value) ([]G.Value, error) {
	dx, err := r.back().compute([]G.Value{dy}, dy.Shape())
	return []G.Value{dx}, err
}

func (r convert) launch(w *ongpu.Work, _ []tensor.Shape, shape tensor.Shape) error {
	return w.Convert(&layers.Convert{N: shape.TotalSize(), X: w.In[0].Memory, Y: w.Out})
}

var (
	_ launched = convert{}
	_ composed = convert{}
)
