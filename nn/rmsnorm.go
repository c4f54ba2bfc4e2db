package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/norm"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// WithUnitOffset has [RMSNorm], [QKNorm] or [WithRMSNorm] multiply by 1+gamma in place of gamma, as Gemma's weights need.
func WithUnitOffset() Option { return Option{name: optionUnitOffset} }

// unitOffset reports whether the options have WithUnitOffset, and refuses other options.
func unitOffset(name string, opts []Option, gamma bool) (offset bool, err error) {
	for _, o := range opts {
		switch {
		case o.name == "":
		case o.name != optionUnitOffset:
			return false, errorf(name, errs.ErrUnsupported, "option %s, want %s or none", o.name, optionUnitOffset)
		case offset:
			return false, errorf(name, errs.ErrOption, "option %s is given twice", o.name)
		default:
			offset = true
		}
	}
	if offset && !gamma {
		return false, errorf(name, errs.ErrUnsupported, "option %s without gamma: pass gamma", optionUnitOffset)
	}
	return offset, nil
}

// RMSNorm divides each row of x by its root mean square. A row is the last axis:
//
//	y[i] = x[i] / sqrt(mean(x^2) + eps) * gamma[i] + residual[i]
//
// Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4.
//
//   - x: rank 1 or more, rows of n >= 1 elements, float32 or float64. y and residual have the shape and type of x.
//   - gamma: n elements of the type of x. nil means ones.
//   - residual: nil means zeros. It is for models that normalise a branch before the sum, as Gemma 2. A residual before a norm is
//     [WithResidual] of the [Linear] in front.
//   - Options: [WithUnitOffset].
//   - eps: finite and not negative. With eps 0, a row of zeros gives NaN.
//   - A row with a NaN or an infinity gives NaN. Means are float64 on the CPU, float32 on a GPU, where x is float32.
//   - Gradients: of x, gamma and residual, in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrOption (eps, an option given twice), ErrGraph (nil x, other graphs), ErrUnsupported (another
//     option, an offset without a gamma).
func RMSNorm(x, gamma, residual *G.Node, eps float64, opts ...Option) (y *G.Node, err error) {
	return newRMSNorm("RMSNorm", x, gamma, residual, eps, false, opts)
}

// QKNorm is an [RMSNorm] of each head of queries or keys, as in Qwen 3 before the rotary embedding.
//
//   - x: rank 1 or more. The last axis is a multiple of gamma's n elements, as (rows, heads*n), or n, as (rows, heads, n). Each n
//     elements are a row.
//   - On several GPUs, x may be sharded by columns, in whole heads, if gamma is replicated. Then y is, too.
//   - gamma: not nil. All else, errors too, is as RMSNorm.
func QKNorm(x, gamma *G.Node, eps float64, opts ...Option) (y *G.Node, err error) {
	if gamma == nil {
		return nil, errorf("QKNorm", errs.ErrGraph, "gamma is nil")
	}
	return newRMSNorm("QKNorm", x, gamma, nil, eps, true, opts)
}

func newRMSNorm(name string, x, gamma, residual *G.Node, eps float64, heads bool, opts []Option) (y *G.Node, err error) {
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	if err := checkEps(name, eps); err != nil {
		return nil, err
	}
	op := rmsNorm{rank: len(x.Shape()), dtype: x.Dtype(), eps: eps, gamma: gamma != nil, residual: residual != nil, heads: heads}
	if op.offset, err = unitOffset(name, opts, op.gamma); err != nil {
		return nil, err
	}
	in := normOperands[*G.Node]{x: x}
	if gamma != nil {
		in.gamma = &gamma
	}
	if residual != nil {
		in.plus = &residual
	}
	return newNode(op, in.list()...)
}

func checkEps(name string, eps float64) error {
	if math.IsNaN(eps) || math.IsInf(eps, 0) || eps < 0 {
		return errorf(name, errs.ErrOption, "eps is %v, want a finite number >= 0", eps)
	}
	return nil
}

// rmsNorm is the rule of RMSNorm and QKNorm. Its inputs are normOperands.
type rmsNorm struct {
	rank            int
	dtype           tensor.Dtype
	eps             float64
	gamma, residual bool
	offset          bool // 1+gamma
	heads           bool // a QKNorm: each part of a row with the length of gamma is normalised
}

func (r rmsNorm) title() string {
	if r.heads {
		return "QKNorm"
	}
	return "RMSNorm"
}

func (r rmsNorm) String() string {
	return fmt.Sprintf("%s{%v, rank %d, eps %v, gamma %v, 1+gamma %v, residual %v}", r.title(), r.dtype, r.rank, r.eps, r.gamma, r.offset, r.residual)
}

func (r rmsNorm) arguments() []argument {
	args := alike(r.rank, r.dtype, "x")
	if r.gamma {
		args = append(args, alike(1, r.dtype, "gamma")...)
	}
	if r.residual {
		args = append(args, alike(r.rank, r.dtype, "residual")...)
	}
	return append(args, alike(r.rank, r.dtype, "y")...)
}

func (r rmsNorm) shape(list []tensor.Shape) (tensor.Shape, error) {
	in := normOf(r.gamma, r.residual, list)
	width := in.x[r.rank-1]
	if r.gamma {
		gamma := *in.gamma
		if r.heads && width%gamma[0] != 0 {
			return nil, errorf(r.title(), errs.ErrShape, "gamma has shape %v, and x %v: want rows of a multiple of %d elements", gamma, in.x, gamma[0])
		}
		if !r.heads && gamma[0] != width {
			return nil, errorf(r.title(), errs.ErrShape, "gamma has shape %v, want (%d) for x of shape %v", gamma, width, in.x)
		}
	}
	if r.residual && !slices.Equal(*in.plus, in.x) {
		return nil, errorf(r.title(), errs.ErrShape, "residual has shape %v, want %v, the shape of x", *in.plus, in.x)
	}
	return in.x.Clone(), nil
}

// group returns how many elements are normalised together.
func (r rmsNorm) group(list []tensor.Shape) int {
	in := normOf(r.gamma, r.residual, list)
	if r.heads {
		return (*in.gamma)[0]
	}
	return in.x[r.rank-1]
}

func (r rmsNorm) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return rmsForward[float64](r, in, shape)
	}
	return rmsForward[float32](r, in, shape)
}

func readRMS[F float](r rmsNorm, in []G.Value) (o rows[F], err error) {
	if o, err = readRows[F](r.title(), "residual", normOf(r.gamma, r.residual, in)); err != nil {
		return o, err
	}
	o.n = r.group(shapesOf(in))
	if r.offset {
		o.gamma = onePlus(o.gamma)
	}
	return o, nil
}

// onePlus returns 1+x.
func onePlus[F float](x []F) []F {
	x = slices.Clone(x)
	for i := range x {
		x[i]++
	}
	return x
}

func rmsForward[F float](r rmsNorm, in []G.Value, shape tensor.Shape) (G.Value, error) {
	o, err := readRMS[F](r, in)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	norm := norm.Norm[F]{N: o.n, Gamma: o.gamma, Beta: o.plus, Eps: r.eps, RMS: true}
	norm.Rows(cpu.Default(), y, o.x)
	return t, nil
}

// gradient is, with xh = x/sqrt(mean(x^2) + eps) and g = dy*gamma,
//
//	dx        = (g - xh mean(g xh)) / sqrt(mean(x^2) + eps)
//	dgamma    = sum over rows of dy xh
//	dresidual = dy
func (r rmsNorm) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return rmsBackward[float64](r, i, in, dy)
	}
	return rmsBackward[float32](r, i, in, dy)
}

func rmsBackward[F float](r rmsNorm, of int, in []G.Value, grad G.Value) (G.Value, error) {
	o, err := readRMS[F](r, in)
	if err != nil {
		return nil, err
	}
	dy, err := elements[F](r.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	n := o.n
	t, d := output[F](in[of].Shape())
	switch {
	case of == 0:
		eachRow(len(d)/n, n, func(row int) {
			at := row * n
			rmsGradX(d[at:at+n], o.x[at:at+n], o.gamma, dy[at:at+n], r.eps)
		})
	case of == 1 && r.gamma:
		// One goroutine: the sum over rows has one order, so it has the same bits on every machine.
		sum := make([]float64, n)
		for at := 0; at < len(dy); at += n {
			f := norm.ReciprocalRMS(o.x[at:at+n], r.eps)
			for i, g := range dy[at : at+n] {
				sum[i] += float64(g) * float64(o.x[at+i]) * f
			}
		}
		for i, s := range sum {
			d[i] = F(s)
		}
	default:
		copy(d, dy)
	}
	return t, nil
}

func (r rmsNorm) hasGamma() bool { return r.gamma }

func (r rmsNorm) sumsOf() (gamma, beta int) { return 1, -1 }

func (r rmsNorm) onEngine(gamma gpu.Memory) layers.Norm {
	return layers.Norm{Eps: r.eps, RMS: true, UnitOffset: r.offset, Gamma: gamma}
}

func (r rmsNorm) launchGradient(of int, w *ongpu.Work, shapes []tensor.Shape) error {
	last := len(w.In) - 1
	n, all, dy := r.group(shapes[:last]), shapes[0].TotalSize(), w.In[last].Memory
	if of > 0 { // the residual
		return w.Elements(&layers.Elements{N: all, X: dy, Y: w.Out})
	}
	return w.NormGradient(&layers.NormGradient{Norm: r.onEngine(gpu.Memory{}), Rows: all / n, N: n, X: w.In[0].Memory, DY: dy, DX: w.Out})
}

// rmsGradX writes dx of one row; gamma may be nil.
func rmsGradX[F float](dx, x, gamma, dy []F, eps float64) {
	f := norm.ReciprocalRMS(x, eps)
	scaled := func(i int) float64 {
		if gamma == nil {
			return float64(dy[i])
		}
		return float64(dy[i]) * float64(gamma[i])
	}
	mean := 0.0
	for i, v := range x {
		mean += scaled(i) * float64(v) * f
	}
	mean /= float64(len(x))
	for i, v := range x {
		dx[i] = F(f * (scaled(i) - float64(v)*f*mean))
	}
}

// place has each GPU norm its heads.
func (r rmsNorm) place(c *ongpu.Call, in []tensor.Shape, shape tensor.Shape) {
	if !r.heads {
		return
	}
	c.PerGPU = func(layouts []ongpu.Layout) (*ongpu.PerGPU, error) {
		of, last := normOf(r.gamma, r.residual, layouts), r.rank-1
		each, even := of.x.Evenly(shape[last])
		if !even || !of.x.Sharded || of.x.Axis != last || !of.gamma.Replicated || each%r.group(in) != 0 {
			return nil, nil
		}
		mine := shape.Clone()
		mine[last] = each
		shapes := slices.Clone(in)
		shapes[0] = mine
		return &ongpu.PerGPU{Layout: of.x, Shape: mine, Queue: func(_ int, w *ongpu.Work) error { return r.launch(w, shapes, mine) }}, nil
	}
}

func (r rmsNorm) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	n, own := r.group(in), normOf(r.gamma, r.residual, w.In)
	return w.RMSNorm(&layers.RMSNorm{
		Rows: shape.TotalSize() / n, N: n, Eps: r.eps, UnitOffset: r.offset,
		X: own.x.Memory, Gamma: memoryOrNone(own.gamma), Residual: memoryOrNone(own.plus), Y: w.Out,
	})
}

var (
	_ trained  = rmsNorm{}
	_ normRule = rmsNorm{}
)
