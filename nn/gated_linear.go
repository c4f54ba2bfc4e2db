package nn

import (
	"fmt"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	cpulinear "gorgonia.org/leanattention/internal/cpu/linear"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// GatedLinear is two linear layers of one x, and a gate, in one node. Most decoders' feed-forward networks begin with it:
//
//	y = f(x w0^T + b0) * (x w1^T + b1) + residual
//
// Without [WithResidual], residual is 0.
//
//   - ws: w0, the gate's weight (gate_proj), and w1 (up_proj), both (inner, in); or one weight, (2 inner, in), whose first half is
//     the gate's (gate_up_proj). bs: as many biases, or none. y and residual: (rows, inner).
//   - Options: those of [Linear] but [WithActivation].
//   - Types, gradients, CPUs and GPUs: as Linear. On several GPUs, two weights may be sharded by output features; one weight with
//     both halves is ErrUnsupported.
//   - Cost: on a GPU the launches of one Linear. The outputs of the two layers are never in memory.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil x or weights, other graphs), ErrOption (f), ErrUnsupported (an activation, other
//     numbers of weights).
func GatedLinear(x *G.Node, ws, bs []*G.Node, f Activation, opts ...Option) (y *G.Node, err error) {
	const name = "GatedLinear"
	defer errs.RecoverTo(prefix+name, &err)
	if err := f.check(name); err != nil {
		return nil, err
	}
	if len(ws) > 2 {
		return nil, errorf(name, errs.ErrUnsupported, "%d weights, want two, or one with both halves", len(ws))
	}
	op, children, err := newLinear(name, x, ws, bs, f, opts)
	if err != nil {
		return nil, err
	}
	return newNode(op, children...)
}

// halves returns the two layers of one weight in host memory.
func halves[F float](both cpulinear.Operands[F]) []cpulinear.Operands[F] {
	gate, up := both, both
	n := both.Out / 2
	gate.Out, up.Out = n, n
	gate.W, up.W = both.W.Rows(0, n, both.In), both.W.Rows(n, n, both.In)
	if both.Bias != nil {
		gate.Bias, up.Bias = both.Bias[:n], both.Bias[n:]
	}
	return []cpulinear.Operands[F]{gate, up}
}

// gateAndUp returns the two layers on a GPU, of one weight or of two.
func gateAndUp(parts []layers.LinearPart, in int) []layers.LinearPart {
	if len(parts) == 2 {
		return parts
	}
	gate := parts[0]
	gate.Out /= 2
	gate.W.Len = gate.Out * in
	gate.B.Len = gate.Out
	up := gate
	if gate.Packed != nil {
		gate.W.Len = parts[0].W.Len
		up.W.Len, up.First = gate.W.Len, gate.Out
		up.B.Offset += int64(gate.Out * 4)
		return []layers.LinearPart{gate, up}
	}
	up.W.Offset += int64(gate.W.Len * gate.W.DType.Size())
	up.B.Offset += int64(gate.Out * 4)
	return []layers.LinearPart{gate, up}
}

// runGated computes the gate, and then the other layer, whose kernel multiplies by the gate.
func runGated[F float](o *operands[F], x, y []F) error {
	gate, up := &o.parts[0], &o.parts[1]
	made := scratch[F](len(y))
	defer giveBack(made)
	times := *made
	gate.Residual, up.Residual = nil, gate.Residual
	gate.X, gate.Y = x, times
	up.X, up.Y, up.Times, up.Activation = x, y, times, attn.NoActivation
	return runLinears(o.parts)
}

// gateOfBoth is the gate of a GatedLinear as a function of the outputs of its layers. The outputs are one after the other if the
// layers are joined, and otherwise side by side in each row. gateOfBoth exists for its gradient.
type gateOfBoth struct {
	joined bool
	dtype  tensor.Dtype
	f      attn.Activation
	width  int // of y
}

// widthOf returns the columns of a gate with weight w, a node or a value.
func widthOf(w any, weights int) int {
	n := w.(interface{ Shape() tensor.Shape }).Shape()[0]
	if weights == 1 {
		return n / 2
	}
	return n
}

func (r gateOfBoth) title() string { return "GatedLinear" }
func (r gateOfBoth) String() string {
	return fmt.Sprintf("Gate{%v, %v, joined %v, width %d}", r.f, r.dtype, r.joined, r.width)
}

func (r gateOfBoth) arguments() []argument {
	rank := 2
	if r.joined {
		rank = 1
	}
	return []argument{{name: "gate and up", rank: rank, dtype: r.dtype}, {name: "y", rank: 2, dtype: r.dtype}}
}

func (r gateOfBoth) shape(in []tensor.Shape) (tensor.Shape, error) {
	n := in[0].TotalSize()
	if n%(2*r.width) != 0 || !r.joined && in[0][1] != 2*r.width {
		return nil, errorf(r.title(), errs.ErrShape, "gate and up have shape %v, want rows of 2 x %d elements", in[0], r.width)
	}
	return tensor.Shape{n / (2 * r.width), r.width}, nil
}

// gradient is that of both outputs, in their layout.
func (r gateOfBoth) gradient(_ int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return gateBackward[float64](r, in[0], dy)
	}
	return gateBackward[float32](r, in[0], dy)
}

func gateBackward[F float](r gateOfBoth, both, grad G.Value) (G.Value, error) {
	x, err := elements[F](r.title(), "gate and up", both, both.Shape())
	if err != nil {
		return nil, err
	}
	dy, err := elements[F](r.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	t, d := output[F](both.Shape())
	rows, n := len(dy)/r.width, r.width
	eachRow(rows, n, func(row int) {
		gate, up := 2*row*n, (2*row+1)*n
		if r.joined {
			gate, up = row*n, (rows+row)*n
		}
		dy := dy[row*n:][:n]
		gated(d[up:up+n], x[gate:gate+n], dy, r.f)
		for i, v := range dy {
			d[gate+i] = F(float64(v) * float64(x[up+i]) * slope(r.f, float64(x[gate+i])))
		}
	})
	return t, nil
}

func (r gateOfBoth) launchGradient(_ int, w *ongpu.Work, in []tensor.Shape) error {
	n := in[1].TotalSize()
	o := layers.Slopes{N: n, Width: r.width, Step: 2 * r.width, Activation: r.f, DY: w.In[1].Memory, X: w.In[0].Memory, DX: w.Out}
	up := r.width
	if r.joined {
		o.Width, o.Step, up = n, n, n
	}
	o.Times, o.DTimes = floatsFrom(o.X, up), floatsFrom(o.DX, up)
	return w.Slopes(&o)
}

// floatsFrom returns float32 memory without its first elements.
func floatsFrom(m gpu.Memory, first int) gpu.Memory {
	m.Offset, m.Len = m.Offset+int64(first)*4, m.Len-first
	return m
}

var _ trained = gateOfBoth{}
