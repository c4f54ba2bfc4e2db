package nn

import (
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	cpulinear "gorgonia.org/leanattention/internal/cpu/linear"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// DiffWRT says that every input has a gradient.
func (op linear) DiffWRT(inputs int) []bool { return slices.Repeat([]bool{true}, inputs) }

// SymDiff adds the nodes of the gradients (tape machine).
func (op linear) SymDiff(in G.Nodes, _, dy *G.Node) (grads G.Nodes, err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	return linearGradients(inGraph, op, in, dy)
}

// DoDiff adds the gradients to those of the inputs (lisp machine).
func (op linear) DoDiff(_ G.ExecutionContext, in G.Nodes, y *G.Node) (err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	return addGradients(op.title(), in, y, func(in []G.Value, dy G.Value) ([]G.Value, error) {
		return linearGradients(atOnce, op, in, dy)
	})
}

func (op linear) title() string {
	if op.gate {
		return "GatedLinear"
	}
	return "Linear"
}

// inner is the layers without norm, activation, gate and residual.
func (op linear) inner() linear {
	return linear{x: op.x, w: op.w, parts: op.parts, joined: op.joined || op.gate && op.parts == 2, bias: op.bias, gpu: new(ongpu.Node)}
}

// normBefore does the norm before the layers, of x and its weights.
func normBefore[T any](do step[T], op linear, in []T) (T, error) {
	if op.rms {
		return do(node{operator{rule: op.rmsNorm()}, new(ongpu.Node)}, in...)
	}
	return do(op.layerNorm(), in...)
}

// normGradients are those of the norm before the layers.
func normGradients[T any](do step[T], op linear, in []T, dy T) ([]T, error) {
	if op.rms {
		return gradients(do, op.rmsNorm(), in, dy)
	}
	return layerNormGradients(do, op.layerNorm(), in, dy)
}

func (op linear) rmsNorm() rmsNorm {
	return rmsNorm{rank: 2, dtype: op.x, eps: op.eps, gamma: op.gamma, offset: op.offset}
}

func (op linear) layerNorm() layerNorm {
	return layerNorm{rank: 2, eps: op.eps, gamma: op.gamma, beta: op.beta, gpu: new(ongpu.Node)}
}

// linearGradients are those of y = f(norm(x) W^T + b) + residual: the residual's is dy, and with
// g = dy f'(norm(x) W^T + b) the layers' are
//
//	dnorm(x) = g W,   dW = g^T norm(x),   db = sum over rows of g
//
// What f and the norm make of them is the gradient of their own ops.
func linearGradients[T any](do step[T], op linear, in []T, dy T) (grads []T, err error) {
	switch {
	case op.w != op.x:
		return nil, errorf(op.title(), errs.ErrUnsupported, "gradient with w of %v and x of %v; both must have one type", op.w, op.x)
	case len(in) != op.Arity():
		return nil, errorf(op.title(), errs.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	inner := op.inner()
	own, rest := slices.Clone(in[:inner.Arity()]), in[inner.Arity():]
	var residual []T
	if op.residual {
		residual, rest = []T{dy}, rest[1:]
	}
	normed := append([]T{in[0]}, rest...)
	if op.norm {
		if own[0], err = normBefore(do, op, normed); err != nil {
			return nil, err
		}
	}
	if op.activation != attn.NoActivation {
		before, err := do(inner, own...)
		if err != nil {
			return nil, err
		}
		var f derivable = activation{name: op.activation.String(), rank: inner.rank(), dtype: op.x, f: op.activation}
		if op.gate {
			f = gateOfBoth{joined: inner.joined, dtype: op.x, f: op.activation, width: widthOf(own[1], op.parts)}
		}
		if dy, err = do(gradient{d: f}, before, dy); err != nil {
			return nil, err
		}
	}
	if grads, err = gradients(do, inner, own, dy); err != nil {
		return nil, err
	}
	grads = append(grads, residual...)
	if !op.norm {
		return grads, nil
	}
	through, err := normGradients(do, op, normed, grads[0])
	if err != nil {
		return nil, err
	}
	grads[0] = through[0]
	return append(grads, through[1:]...), nil
}

// rank is that of the output.
func (op linear) rank() int {
	if op.joined {
		return 1
	}
	return 2
}

// arguments are those of an inner layer.
func (op linear) arguments() (args []argument) {
	args = append(args, argument{name: "x", rank: 2, dtype: op.x})
	for i := range op.parts {
		args = append(args, argument{name: op.OperandName(1 + i), rank: 2, dtype: op.w})
	}
	for i := range op.parts * count(op.bias) {
		args = append(args, argument{name: op.OperandName(1 + op.parts + i), rank: 1, dtype: op.x})
	}
	return append(args, argument{name: "y", rank: op.rank(), dtype: op.x})
}

// gradient is that of an inner layer.
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
	switch {
	case of == 0:
		return t, linearGradX(d, o.parts, g)
	case of <= op.parts: // dW is g^T x
		p := &o.parts[of-1]
		return t, multiply(d, transposed(g[of-1], p.Rows, p.Out), transposed(o.x, p.Rows, p.In), nil, p.Out, p.In, p.Rows)
	}
	i := of - 1 - op.parts
	sum := make([]float64, len(d))
	for at, v := range g[i] {
		sum[at%len(d)] += float64(v)
	}
	for at, s := range sum {
		d[at] = F(s)
	}
	return t, nil
}

// linearGradX is the sum of g W of the layers.
func linearGradX[F float](d []F, parts []cpulinear.Operands[F], g [][]F) error {
	var before []F // of the layers ahead
	for i, p := range parts {
		to := d
		if i < len(parts)-1 {
			to = dense.Make[F](len(d))
		}
		w := unsafe.Slice((*F)(p.W.Ptr), p.W.Len)
		if err := multiply(to, g[i], transposed(w, p.Out, p.In), before, p.Rows, p.In, p.Out); err != nil {
			return err
		}
		before = to
	}
	return nil
}

// multiply is y = a b^T + plus, with y of rows x columns and sums of n products.
func multiply[F float](y, a, b, plus []F, rows, columns, n int) error {
	d := attn.Float32
	if unsafe.Sizeof(F(0)) == 8 {
		d = attn.Float64
	}
	w := cpu.Buffer{DType: d, Ptr: unsafe.Pointer(unsafe.SliceData(b)), Len: len(b)}
	return runLinear(&cpulinear.Operands[F]{Rows: rows, In: n, Out: columns, X: a, W: w, Residual: plus, Y: y})
}

// transposed is the columns of a matrix, one behind the other.
func transposed[F float](x []F, rows, columns int) []F {
	const block = 32 // rows and columns that stay in the cache meanwhile
	y := dense.Make[F](len(x))
	eachRow((rows+block-1)/block, block*columns, func(b int) {
		from, to := b*block, min((b+1)*block, rows)
		for c := 0; c < columns; c += block {
			for i := from; i < to; i++ {
				for j := c; j < min(c+block, columns); j++ {
					y[j*rows+i] = x[i*columns+j]
				}
			}
		}
	})
	return y
}

var _ derivable = linear{}
