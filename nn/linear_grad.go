package nn

import (
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	cpulinear "gorgonia.org/leanattention/internal/cpu/linear"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func (op linear) graphGradients(in []*G.Node, dy *G.Node) ([]*G.Node, error) {
	return linearGradients(inGraph, op, in, dy)
}

func (op linear) valueGradients(in []G.Value, dy G.Value) ([]G.Value, error) {
	return linearGradients(atOnce, op, in, dy)
}

func (op linear) title() string {
	if op.gate {
		return "GatedLinear"
	}
	return "Linear"
}

// inner returns the layers without norm, activation, gate and residual.
func (op linear) inner() linear {
	return linear{x: op.x, w: op.w, rest: op.rest, parts: op.parts, joined: op.joined || op.gate && op.parts == 2, bias: op.bias, mixed: op.products != 0, products: op.products}
}

// normedAs returns the layers with the norm of others in front of them.
func (op linear) normedAs(o linear) linear {
	op.norm, op.gamma, op.beta, op.rms, op.offset, op.eps = o.norm, o.gamma, o.beta, o.rms, o.offset, o.eps
	return op
}

// normBefore applies the norm in front of the layers. in has x and the norm's weights.
func normBefore[T any](do step[T], op linear, in []T) (T, error) {
	if op.rms {
		return do(node{newOperator(op.rmsNorm()), new(ongpu.Node)}, in...)
	}
	return do(node{newOperator(op.layerNorm()), new(ongpu.Node)}, in...)
}

// normBeforeGradients returns the gradients of the norm in front of the layers.
func normBeforeGradients[T any](do step[T], op linear, in []T, dy T) ([]T, error) {
	if op.rms {
		return gradients(do, op.rmsNorm(), in, dy)
	}
	return gradients(do, op.layerNorm(), in, dy)
}

func (op linear) rmsNorm() rmsNorm {
	return rmsNorm{rank: 2, dtype: op.x, eps: op.eps, gamma: op.gamma, offset: op.offset}
}

func (op linear) layerNorm() layerNorm {
	return layerNorm{rank: 2, dtype: op.x, eps: op.eps, gamma: op.gamma, beta: op.beta}
}

// linearGradients returns the gradients of y = f(norm(x) W^T + b) + residual: the residual's is dy, and with
// g = dy f'(norm(x) W^T + b) the layers' are
//
//	dnorm(x) = g W,   dW = g^T norm(x),   db = sum over rows of g
//
// The gradients of f and the norm are those of their own ops.
func linearGradients[T any](do step[T], op linear, list []T, dy T) ([]T, error) {
	return linearGradientsThrough(do, op, list, []T{dy}, attn.NoActivation)
}

// linearGradientsThrough is linearGradients of layers with products of 16 bits, without activation, gate and residual. With f, dy is the
// gradient of f(before), and before the output of the layers.
//
// With several dys, each is the gradient of a layer's output behind SplitHeads, in the type of the products.
func linearGradientsThrough[T any](do step[T], op linear, list, dys []T, f attn.Activation, before ...T) ([]T, error) {
	dy := dys[0]
	args := op.arguments()
	for _, f := range op.formats() {
		if operand.WeightType(f) != op.x {
			return nil, errorf(op.title(), errs.ErrUnsupported, "gradient with w of %v and x of %v, want one type for both, float32 or float64", f, op.x)
		}
	}
	switch {
	case len(list) != len(args)-1:
		return nil, errorf(op.title(), errs.ErrGraph, "%d inputs, want %d", len(list), len(args)-1)
	}
	inner, in := op.inner(), named(op, list)
	own := layerOperands[T]{x: in.x, w: in.w, b: in.b}
	ofNorm := layerOperands[T]{x: in.x, gamma: in.gamma, beta: in.beta}
	var err error
	if op.norm && op.products == 0 {
		if own.x, err = normBefore(do, op, ofNorm.list()); err != nil {
			return nil, err
		}
	}
	grads := layerOperands[T]{}
	if op.residual {
		residual := dy
		grads.residual = &residual
	}
	if op.activation != attn.NoActivation {
		forward, of := inner, own
		if op.products != 0 {
			forward, of = inner.normedAs(op), layerOperands[T]{x: in.x, w: in.w, b: in.b, gamma: in.gamma, beta: in.beta}
		}
		y, err := do(node{newOperator(forward), new(ongpu.Node)}, of.list()...)
		if err != nil {
			return nil, err
		}
		if op.products != 0 && !op.gate {
			f, before = op.activation, []T{y}
		} else {
			var f derivable = activation{rank: inner.rank(), dtype: op.x, f: op.activation}
			if op.gate {
				f = gateOfBoth{joined: inner.joined, dtype: op.x, f: op.activation, width: widthOf(in.w[0], op.parts)}
			}
			if dy, err = do(newGradient(f, 0), y, dy); err != nil {
				return nil, err
			}
			dys = []T{dy}
		}
	}
	of := layerOperands[T]{}
	if op.products != 0 {
		of, err = roundedGradients(do, op, in, dys, f, before...)
	} else if all, e := gradients(do, inner, own.list(), dy); e != nil {
		err = e
	} else {
		of = named(inner, all)
	}
	if err != nil {
		return nil, err
	}
	grads.x, grads.w, grads.b = of.x, of.w, of.b
	if op.norm {
		through, err := normBeforeGradients(do, op, ofNorm.list(), of.x)
		if err != nil {
			return nil, err
		}
		grads.x, through = through[0], through[1:]
		for i, to := range [...]**T{&grads.gamma, &grads.beta} {
			if [...]bool{op.gamma, op.beta}[i] {
				*to, through = &through[0], through[1:]
			}
		}
	}
	return grads.list(), nil
}

// gradient is for inner layers: without norm, activation, gate and residual.
func (op linear) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if op.x == tensor.Float64 {
		return linearBackward[float64](op, i, in, dy)
	}
	return linearBackward[float32](op, i, in, dy)
}

func linearBackward[F float](op linear, of int, in []G.Value, grad G.Value) (G.Value, error) {
	o, err := readLinear[F](op, in)
	if err != nil {
		return nil, err
	}
	all, err := elements[F](op.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	g := make([][]F, op.parts) // of each layer, rows x out
	for i, p := range o.parts {
		g[i], all = all[:p.Rows*p.Out], all[p.Rows*p.Out:]
	}
	t, d := output[F](in[of].Shape())
	which := make([]int, len(in))
	for i := range which {
		which[i] = i
	}
	at := named(op, which)
	if of == at.x {
		return t, linearGradX(d, o.parts, g)
	}
	if i := slices.Index(at.w, of); i >= 0 { // dW is g^T x
		p := &o.parts[i]
		return t, multiply(d, transposed(g[i], p.Rows, p.Out, p.Out), transposed(o.x, p.Rows, p.In, p.In), nil, p.Out, p.In, p.Rows)
	}
	sum := make([]float64, len(d))
	for i, v := range g[slices.Index(at.b, of)] {
		sum[i%len(d)] += float64(v)
	}
	for i, s := range sum {
		d[i] = F(s)
	}
	return t, nil
}

func (op linear) launchGradient(of int, w *ongpu.Work, shapes []tensor.Shape) error {
	last := len(w.In) - 1
	in, shape := named(op, w.In[:last]), named(op, shapes[:last])
	rows, width, dy := shape.x[0], shape.x[1], w.In[last].Memory
	for i, s := range shape.w {
		out := s[0]
		dy.Len = rows * out
		switch of {
		case 0:
			o := layers.Product{M: rows, N: width, K: out, A: dy, B: in.w[i].Memory, C: w.Out, Products: op.products, Scratch: w.Scratch}
			if i > 0 {
				o.Plus = w.Out
			}
			if err := w.Product(&o); err != nil {
				return err
			}
		case 1 + i:
			return w.Product(&layers.Product{M: out, N: width, K: rows, Transposed: true, A: dy, B: in.x.Memory, C: w.Out, Products: op.products, Scratch: w.Scratch})
		case 1 + op.parts + i:
			return w.ColumnSums(&layers.ColumnSums{Rows: rows, N: out, X: dy, Y: w.Out, Scratch: w.Scratch})
		}
		dy.Offset += int64(dy.Len) * 4
	}
	return nil
}

func (op linear) gradientScratch(d *layers.Engine, of int, shapes []tensor.Shape) (most int, err error) {
	shape := named(op, shapes[:len(shapes)-1])
	rows, width := shape.x[0], shape.x[1]
	for i, s := range shape.w {
		if of == 1+op.parts+i {
			sums := layers.ColumnSums{Rows: rows, N: s[0]}
			return sums.ScratchSize(), nil
		}
		o := layers.Product{M: rows, N: width, K: s[0], Products: op.products}
		if of > 0 {
			o = layers.Product{M: s[0], N: width, K: rows, Transposed: true, Products: op.products}
		}
		if of > 0 && of != 1+i {
			continue
		}
		n, err := d.ProductScratch(&o)
		if err != nil {
			return 0, err
		}
		most = max(most, n)
	}
	return most, nil
}

func (r linearPart) launchGradient(_ int, w *ongpu.Work, in []tensor.Shape) error {
	m := attn.Move{Dims: [3]int{1, 1, 1}, N: in[1].TotalSize()}
	m.To.At = r.from(in[0])
	return launchBack(w, m, w.In[1].Memory)
}

// linearGradX computes d, the sum of g W of the layers.
func linearGradX[F float](d []F, parts []cpulinear.Operands[F], g [][]F) error {
	var before []F // the sum of the layers before
	for i, p := range parts {
		to := d
		if i < len(parts)-1 {
			to = dense.Make[F](len(d))
		}
		w := unsafe.Slice((*F)(p.W.Ptr), p.W.Len)
		if err := multiply(to, g[i], transposed(w, p.Out, p.In, p.In), before, p.Rows, p.In, p.Out); err != nil {
			return err
		}
		before = to
	}
	return nil
}

// multiply computes y = a b^T + plus, with y of rows x columns and sums of n products.
func multiply[F float](y, a, b, plus []F, rows, columns, n int) error {
	return runLinear(&cpulinear.Operands[F]{Rows: rows, In: n, Out: columns, X: a, W: matrixOf(b), Residual: plus, Y: y})
}

// matrixOf returns x as the weights of a layer.
func matrixOf[F float](x []F) weight.Matrix {
	f := weight.Float32
	if unsafe.Sizeof(F(0)) == 8 {
		f = weight.Float64
	}
	return weight.Matrix{Format: f, Ptr: unsafe.Pointer(unsafe.SliceData(x)), Len: len(x)}
}

// transposed returns the transpose of a matrix: the first columns of rows that begin each `row` elements.
func transposed[F float](x []F, rows, columns, row int) []F {
	y := dense.Make[F](rows * columns)
	eachRow((rows+transposedBlock-1)/transposedBlock, transposedBlock*columns, func(b int) {
		transpose(y, x, b*transposedBlock, min((b+1)*transposedBlock, rows), rows, columns, row)
	})
	return y
}

const transposedBlock = 32 // rows and columns of a block, which stays in the cache

// transpose writes to y the part of a transpose that rows [from, to) of x make.
func transpose[T any](y, x []T, from, to, rows, columns, row int) {
	for b := from; b < to; b += transposedBlock {
		for c := 0; c < columns; c += transposedBlock {
			for i := b; i < min(b+transposedBlock, to); i++ {
				for j := c; j < min(c+transposedBlock, columns); j++ {
					y[j*rows+i] = x[i*row+j]
				}
			}
		}
	}
}

var (
	_ trained = linear{}
	_ trained = linearPart{}
)
