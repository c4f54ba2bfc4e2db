package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Add is a + b, element by element. b has the shape of a, or is a vector of the length of a's last axis, which is added to each row.
//
//   - Types: float32 or float64. On a GPU: float32.
//   - Gradients: of both, in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil nodes, other graphs).
func Add(a, b *G.Node) (y *G.Node, err error) { return newPair("Add", a, b) }

// Mul is a * b, element by element. All else is as [Add].
func Mul(a, b *G.Node) (y *G.Node, err error) { return newPair("Mul", a, b) }

// Scale is x times factor. x has rank 1 or more. Types, GPUs and the gradient are as [Add].
//
// Errors: ErrShape, ErrDType, ErrOption (factor is 0, infinite or NaN), ErrGraph (nil x).
func Scale(x *G.Node, factor float64) (y *G.Node, err error) {
	const name = "Scale"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	if factor == 0 || math.IsNaN(factor) || math.IsInf(factor, 0) {
		return nil, errorf(name, errs.ErrOption, "factor is %v, want a finite number that is not 0", factor)
	}
	return newNode(scale{kind{len(x.Shape()), x.Dtype()}, factor}, x)
}

func newPair(name string, a, b *G.Node) (y *G.Node, err error) {
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "a", a); err != nil {
		return nil, err
	}
	if b == nil {
		return nil, errorf(name, errs.ErrGraph, "b is nil")
	}
	r := pair{kind: kind{len(a.Shape()), a.Dtype()}, times: name == "Mul"}
	r.row = len(b.Shape()) == 1 && r.rank > 1
	return newNode(r, a, b)
}

// pair is the rule of a sum or a product.
type pair struct {
	kind
	times bool
	row   bool // b is a vector, which each row of a takes
}

func (r pair) title() string {
	if r.times {
		return "Mul"
	}
	return "Add"
}

func (r pair) String() string {
	return fmt.Sprintf("%s{%v, rank %d, row %v}", r.title(), r.dtype, r.rank, r.row)
}

func (r pair) arguments() []argument {
	args := alike(r.rank, r.dtype, "a", "b", "y")
	if r.row {
		args[1].rank = 1
	}
	return args
}

func (r pair) shape(in []tensor.Shape) (tensor.Shape, error) {
	a, b := in[0], in[1]
	if r.row && b[0] != a[r.rank-1] || !r.row && !slices.Equal(a, b) {
		return nil, errorf(r.title(), errs.ErrShape, "a has shape %v and b %v, want b of shape %v, or (%d) for each row", a, b, a, a[r.rank-1])
	}
	return a.Clone(), nil
}

func (r pair) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return paired[float64](r, in, shape)
	}
	return paired[float32](r, in, shape)
}

func paired[F float](r pair, in []G.Value, shape tensor.Shape) (G.Value, error) {
	a, b, err := two[F](r.title(), r.arguments(), in)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	eachRow(len(y)/len(b), len(b), func(row int) {
		at := row * len(b)
		for i, v := range b {
			if r.times {
				y[at+i] = a[at+i] * v
			} else {
				y[at+i] = a[at+i] + v
			}
		}
	})
	return t, nil
}

func (r pair) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return pairGrad[float64](r, i, in, dy)
	}
	return pairGrad[float32](r, i, in, dy)
}

// pairGrad is dy for a sum, and dy times the other operand for a product. The gradient of a vector is summed over rows.
func pairGrad[F float](r pair, of int, in []G.Value, grad G.Value) (G.Value, error) {
	a, b, err := two[F](r.title(), r.arguments(), in)
	if err != nil {
		return nil, err
	}
	dy, err := elements[F](r.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	t, d := output[F](in[of].Shape())
	sum := make([]float64, len(d))
	for i, v := range dy {
		s := float64(v)
		if r.times {
			s *= [2]float64{float64(b[i%len(b)]), float64(a[i])}[of]
		}
		sum[i%len(d)] += s
	}
	for i, s := range sum {
		d[i] = F(s)
	}
	return t, nil
}

func (r pair) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	o := layers.Elements{N: shape.TotalSize(), X: w.In[0].Memory, Y: w.Out}
	period := 0
	if r.row {
		period = in[1][0]
	}
	if r.times {
		o.Times, o.TimesPeriod = w.In[1].Memory, period
	} else {
		o.Plus, o.PlusPeriod = w.In[1].Memory, period
	}
	return w.Elements(&o)
}

func (r pair) launchGradient(of int, w *ongpu.Work, in []tensor.Shape) error {
	o := layers.Elements{N: in[0].TotalSize(), X: w.In[2].Memory, Y: w.Out}
	if r.times {
		o.Times = w.In[1-of].Memory
	}
	if r.row && of == 1 {
		return w.ColumnSums(&layers.ColumnSums{Rows: o.N / in[1][0], N: in[1][0], X: o.X, Times: o.Times, Y: w.Out, Scratch: w.Scratch})
	}
	if r.row && r.times {
		o.TimesPeriod = in[1][0]
	}
	return w.Elements(&o)
}

func (r pair) gradientScratch(_ *layers.Engine, of int, in []tensor.Shape) (int, error) {
	if !r.row || of != 1 {
		return 0, nil
	}
	sums := layers.ColumnSums{Rows: in[0].TotalSize() / in[1][0], N: in[1][0]}
	return sums.ScratchSize(), nil
}

type scale struct {
	kind
	by float64
}

func (r scale) title() string { return "Scale" }
func (r scale) String() string {
	return fmt.Sprintf("Scale{%v, rank %d, by %v}", r.dtype, r.rank, r.by)
}
func (r scale) arguments() []argument { return alike(r.rank, r.dtype, "x", "y") }

func (r scale) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (r scale) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return scaled[float64](r.by, in[0], shape)
	}
	return scaled[float32](r.by, in[0], shape)
}

func scaled[F float](by float64, v G.Value, shape tensor.Shape) (G.Value, error) {
	x, err := elements[F]("Scale", "x", v, shape)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	for i, v := range x {
		y[i] = v * F(by)
	}
	return t, nil
}

func (r scale) gradient(_ int, _ []G.Value, dy G.Value) (G.Value, error) {
	return r.compute([]G.Value{dy}, dy.Shape())
}

func (r scale) launch(w *ongpu.Work, _ []tensor.Shape, shape tensor.Shape) error {
	return w.Elements(&layers.Elements{N: shape.TotalSize(), Scale: r.by, X: w.In[0].Memory, Y: w.Out})
}

func (r scale) launchGradient(_ int, w *ongpu.Work, in []tensor.Shape) error {
	return w.Elements(&layers.Elements{N: in[0].TotalSize(), Scale: r.by, X: w.In[1].Memory, Y: w.Out})
}

var (
	_ trained = pair{}
	_ trained = scale{}
)
