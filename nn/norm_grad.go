package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A normRule is a norm with gamma, whose gradients of x, gamma and beta are computed together: a GPU reads x and the gradient of the result
// once.
type normRule interface {
	derivable
	hasGamma() bool
	sumsOf() (gamma, beta int)   // the inputs; -1: there is no beta
	group(in []tensor.Shape) int // elements that are normalised together
	onEngine(gamma gpu.Memory) layers.Norm
}

// normGradients returns the gradients of all inputs. Those of gamma and beta and that of x are parts of a vector, in this order.
func normGradients[T any](do step[T], of normRule, in []T, dy T) ([]T, error) {
	all, err := do(node{newOperator(normGradient{once{of.title()}, of}), new(ongpu.Node)}, append(slices.Clone(in), dy)...)
	if err != nil {
		return nil, err
	}
	shapes := make([]tensor.Shape, len(in))
	for i, x := range in {
		shapes[i] = shapeOf(x)
	}
	grads := make([]T, len(in))
	gamma, beta := of.sumsOf()
	each := aligned(of.group(shapes))
	for i := range in {
		r := vectorPart{once: once{of.title()}, to: shapes[i].Clone(), dtype: of.arguments()[0].dtype}
		switch i {
		case 0:
			r.at, r.last = 2*each, true
		case gamma:
		case beta:
			r.at = each
		default:
			if grads[i], err = do(newGradient(of, i), append(slices.Clone(in), dy)...); err != nil {
				return nil, err
			}
			continue
		}
		if grads[i], err = do(view{newOperator(r)}, all); err != nil {
			return nil, err
		}
	}
	return grads, nil
}

// shapeOf returns the shape of a node or a value.
func shapeOf(x any) tensor.Shape { return x.(interface{ Shape() tensor.Shape }).Shape() }

// normGradient is the rule of the gradients of a norm, one after the other in a vector: of gamma, of beta or nothing, of x. Gradients of
// gamma and beta are padded to a multiple of 16 bytes.
type normGradient struct {
	once
	of normRule
}

func (r normGradient) title() string  { return r.of.title() + " gradient" }
func (r normGradient) String() string { return "gradients of " + r.of.String() }
func (r normGradient) arguments() []argument {
	args := r.of.arguments()
	args[len(args)-1].name = "the output's gradient"
	return append(args, argument{name: "gradients", rank: 1, dtype: args[0].dtype})
}

func (r normGradient) shape(in []tensor.Shape) (tensor.Shape, error) {
	last := len(in) - 1
	y, err := checkShapes(r.of, in[:last])
	if err != nil {
		return nil, err
	}
	if !slices.Equal(y, in[last]) {
		return nil, errorf(r.of.title(), errs.ErrShape, "the output's gradient has shape %v, want %v", in[last], y)
	}
	return tensor.Shape{2*aligned(r.of.group(in)) + y.TotalSize()}, nil
}

func (r normGradient) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if in[0].Dtype() == tensor.Float64 {
		return joined[float64](r.of, in, shape)
	}
	return joined[float32](r.of, in, shape)
}

// joined computes the gradients in host memory.
func joined[F float](of normRule, in []G.Value, shape tensor.Shape) (G.Value, error) {
	last := len(in) - 1
	t, all := zeros[F](shape)
	gamma, beta := of.sumsOf()
	each := aligned(of.group(shapesOf(in)))
	for i, at := range map[int]int{gamma: 0, beta: each, 0: 2 * each} {
		if i < 0 {
			continue
		}
		v, err := of.gradient(i, in[:last], in[last])
		if err != nil {
			return nil, err
		}
		part, err := elements[F](of.title(), "a gradient", v, v.Shape())
		if err != nil {
			return nil, err
		}
		copy(all[at:], part)
	}
	return t, nil
}

// on returns the gradients for a GPU's engine. Without w, they have no memory.
func (r normGradient) on(w *ongpu.Work, in []tensor.Shape) *layers.NormGradient {
	n := r.of.group(in)
	o := &layers.NormGradient{Rows: in[0].TotalSize() / n, N: n}
	if w == nil {
		return o
	}
	last := len(in) - 1
	o.Norm = r.of.onEngine(w.In[1].Memory)
	o.X, o.DY, o.Scratch, o.Sums, o.DX = w.In[0].Memory, w.In[last].Memory, w.Scratch, w.Out, w.Out
	o.Sums.Len = 2 * aligned(n)
	o.DX.Offset, o.DX.Len = o.DX.Offset+4*int64(o.Sums.Len), o.DX.Len-o.Sums.Len
	return o
}

func (r normGradient) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	return w.NormGradient(r.on(w, in))
}

func (r normGradient) place(c *ongpu.Call, in []tensor.Shape, _ tensor.Shape) {
	c.Scratch = func(*layers.Engine) (int, error) { return r.on(nil, in).ScratchSize(), nil }
}

var (
	_ launched = normGradient{}
	_ placed   = normGradient{}
)
