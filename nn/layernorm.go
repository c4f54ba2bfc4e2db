package nn

import (
	"fmt"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/norm"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

type float interface{ float32 | float64 }

// LayerNorm normalises each row of x. A row is the last axis:
//
//	y[i] = (x[i] - mean) / sqrt(variance + eps) * gamma[i] + beta[i]
//
// mean and variance (biased) are the row's: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, equations 3 and 4.
//
//   - x: rank 1 or more, rows of n >= 1 elements, float32 or float64. y has the shape and type of x.
//   - gamma and beta: n elements of the type of x. nil means ones for gamma, and zeros for beta.
//   - eps: finite and not negative. With eps 0, a row of equal elements gives NaN.
//   - A row with a NaN or an infinity gives NaN.
//   - On the CPU, moments are float64, and the variance is that of differences to the mean: a large common offset costs no digits.
//     On a GPU, x is float32 and moments are float32.
//   - Gradients: of x, gamma and beta, in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrOption (eps), ErrGraph (nil x, other graphs).
func LayerNorm(x, gamma, beta *G.Node, eps float64) (y *G.Node, err error) {
	const name = "LayerNorm"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	if err := checkEps(name, eps); err != nil {
		return nil, err
	}
	in := normOperands[*G.Node]{x: x}
	if gamma != nil {
		in.gamma = &gamma
	}
	if beta != nil {
		in.plus = &beta
	}
	return newNode(layerNorm{rank: len(x.Shape()), dtype: x.Dtype(), eps: eps, gamma: gamma != nil, beta: beta != nil}, in.list()...)
}

// normOperands has the operands of a norm by name. T is what stands for an operand.
type normOperands[T any] struct {
	x     T
	gamma *T // nil: none
	plus  *T // beta of a LayerNorm, residual of an RMSNorm; nil: none
}

// list returns the operands in the order of the op's inputs.
func (o *normOperands[T]) list() []T {
	list := []T{o.x}
	for _, p := range [...]*T{o.gamma, o.plus} {
		if p != nil {
			list = append(list, *p)
		}
	}
	return list
}

// normOf names the operands in a list of a norm's inputs.
func normOf[T any](gamma, plus bool, list []T) normOperands[T] {
	o := normOperands[T]{x: list[0]}
	if gamma {
		o.gamma = &list[1]
	}
	if plus {
		o.plus = &list[1+count(gamma)]
	}
	return o
}

// layerNorm is the rule of LayerNorm. Its inputs are normOperands.
type layerNorm struct {
	rank        int // of x
	dtype       tensor.Dtype
	eps         float64
	gamma, beta bool
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (r layerNorm) title() string { return "LayerNorm" }
func (r layerNorm) String() string {
	return fmt.Sprintf("LayerNorm{%v, rank %d, eps %v, gamma %v, beta %v}", r.dtype, r.rank, r.eps, r.gamma, r.beta)
}

func (r layerNorm) arguments() []argument {
	args := alike(r.rank, r.dtype, "x")
	if r.gamma {
		args = append(args, alike(1, r.dtype, "gamma")...)
	}
	if r.beta {
		args = append(args, alike(1, r.dtype, "beta")...)
	}
	return append(args, alike(r.rank, r.dtype, "y")...)
}

func (r layerNorm) shape(in []tensor.Shape) (tensor.Shape, error) {
	x := in[0]
	for i, s := range in[1:] {
		if s[0] != x[r.rank-1] {
			return nil, errorf(r.title(), errs.ErrShape, "%s has shape %v, want (%d) for x of shape %v", r.arguments()[i+1].name, s, x[r.rank-1], x)
		}
	}
	return x.Clone(), nil
}

func (r layerNorm) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return layerNormForward[float64](r, in, shape)
	}
	return layerNormForward[float32](r, in, shape)
}

// rows has the inputs of a norm as slices; an absent input is nil.
type rows[F float] struct {
	n              int // elements of a row
	x, gamma, plus []F
}

// readRows reads the inputs of a norm. plus is the name of the last input in errors.
func readRows[F float](title, plus string, in normOperands[G.Value]) (r rows[F], err error) {
	shape := in.x.Shape()
	r.n = shape[len(shape)-1]
	read := func(to *[]F, what string, v *G.Value) {
		if v != nil && err == nil {
			*to, err = elements[F](title, what, *v, (*v).Shape())
		}
	}
	read(&r.x, "x", &in.x)
	read(&r.gamma, "gamma", in.gamma)
	read(&r.plus, plus, in.plus)
	return r, err
}

func layerNormForward[F float](r layerNorm, in []G.Value, shape tensor.Shape) (G.Value, error) {
	o, err := readRows[F](r.title(), "beta", normOf(r.gamma, r.beta, in))
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	norm := norm.Norm[F]{N: o.n, Gamma: o.gamma, Beta: o.plus, Eps: r.eps}
	norm.Rows(cpu.Default(), y, o.x)
	return t, nil
}

func (r layerNorm) launch(w *ongpu.Work, _ []tensor.Shape, shape tensor.Shape) error {
	in, n := normOf(r.gamma, r.beta, w.In), shape[r.rank-1]
	o := &layers.Norm{Eps: r.eps, Gamma: memoryOrNone(in.gamma), Beta: memoryOrNone(in.plus)}
	return w.Do(func(s *cuda.Stream) error { return w.Norm(s, shape.TotalSize()/n, n, in.x.Memory, w.Out, o) })
}

// memoryOrNone returns the memory of an operand that may be absent.
func memoryOrNone(x *ongpu.Operand) gpu.Memory {
	if x == nil {
		return gpu.Memory{}
	}
	return x.Memory
}

func (r layerNorm) hasGamma() bool { return r.gamma }

func (r layerNorm) sumsOf() (gamma, beta int) {
	if r.beta {
		return 1, 2
	}
	return 1, -1
}

func (r layerNorm) group(in []tensor.Shape) int { return in[0][r.rank-1] }

func (r layerNorm) onEngine(gamma gpu.Memory) layers.Norm {
	return layers.Norm{Eps: r.eps, Gamma: gamma}
}

func (r layerNorm) launchGradient(of int, w *ongpu.Work, shapes []tensor.Shape) error {
	last, n := len(w.In)-1, r.group(shapes)
	rows, dy := shapes[0].TotalSize()/n, w.In[last].Memory
	if of > 0 { // beta
		return w.ColumnSums(&layers.ColumnSums{Rows: rows, N: n, X: dy, Y: w.Out, Scratch: w.Scratch})
	}
	return w.NormGradient(&layers.NormGradient{Norm: r.onEngine(gpu.Memory{}), Rows: rows, N: n, X: w.In[0].Memory, DY: dy, DX: w.Out})
}

func (r layerNorm) gradientScratch(_ *layers.Engine, of int, shapes []tensor.Shape) (int, error) {
	n := r.group(shapes)
	sums := layers.ColumnSums{Rows: shapes[0].TotalSize() / n, N: n}
	return count(of > 0) * sums.ScratchSize(), nil
}

// gradient is, with xh = (x - mean) rstd and g = dy gamma,
//
//	dx     = rstd (g - mean(g) - xh mean(g xh))
//	dgamma = sum over rows of dy xh
//	dbeta  = sum over rows of dy
//
// Moments are computed again, which is cheaper than keeping them.
func (r layerNorm) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return layerNormBackward[float64](r, i, in, dy)
	}
	return layerNormBackward[float32](r, i, in, dy)
}

func layerNormBackward[F float](r layerNorm, of int, in []G.Value, grad G.Value) (G.Value, error) {
	o, err := readRows[F](r.title(), "beta", normOf(r.gamma, r.beta, in))
	if err != nil {
		return nil, err
	}
	dy, err := elements[F](r.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	n := o.n
	t, d := output[F](in[of].Shape())
	if of == 0 {
		eachRow(len(d)/n, n, func(row int) {
			at := row * n
			gradX(d[at:at+n], o.x[at:at+n], o.gamma, dy[at:at+n], r.eps)
		})
		return t, nil
	}
	// One goroutine: the sum over rows has one order, so it has the same bits on every machine.
	sum := make([]float64, n)
	for at := 0; at < len(dy); at += n {
		if !r.gamma || of == 2 { // beta
			for i, g := range dy[at : at+n] {
				sum[i] += float64(g)
			}
			continue
		}
		mean, rstd := norm.Moments(o.x[at:at+n], r.eps)
		for i, g := range dy[at : at+n] {
			sum[i] += float64(g) * (float64(o.x[at+i]) - mean) * rstd
		}
	}
	for i, s := range sum {
		d[i] = F(s)
	}
	return t, nil
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

// eachRow calls f for every row of n elements, on as many threads as the work is worth. A panic of f is a panic of eachRow.
func eachRow(rows, n int, f func(row int)) { cpu.Each(cpu.Default(), rows, n, f) }

var (
	_ rule     = layerNorm{}
	_ launched = layerNorm{}
	_ trained  = layerNorm{}
	_ normRule = layerNorm{}
)
