package nn

import (
	"fmt"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// GLU is a gated linear unit, after the two linear layers:
//
//	y = f(gate) * up
//
// Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, equations 5 and 6: with [SiLU] SwiGLU, with [GELU] GEGLU, with
// [ReLU] ReGLU. [GatedLinear] is a GLU with its layers in one node.
//
//   - gate and up: one shape, of rank 1 or more; float32 or float64. y is as they are. On a GPU: float32.
//   - Gradients: of both, in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrOption (f), ErrGraph (nil nodes, other graphs).
func GLU(gate, up *G.Node, f Activation) (y *G.Node, err error) {
	const name = "GLU"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "gate", gate); err != nil {
		return nil, err
	}
	if err := f.check(name); err != nil {
		return nil, err
	}
	return newNode(glu{rank: len(gate.Shape()), dtype: gate.Dtype(), f: f}, gate, up)
}

type glu struct {
	rank  int
	dtype tensor.Dtype
	f     Activation
}

func (r glu) title() string         { return "GLU" }
func (r glu) String() string        { return fmt.Sprintf("GLU{%v, %v, rank %d}", r.f, r.dtype, r.rank) }
func (r glu) arguments() []argument { return alike(r.rank, r.dtype, "gate", "up", "y") }

func (r glu) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[0].Clone(), sameShape("GLU", r.arguments(), in)
}

func (r glu) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return gluForward[float64](r, in, shape)
	}
	return gluForward[float32](r, in, shape)
}

func gluForward[F float](r glu, in []G.Value, shape tensor.Shape) (G.Value, error) {
	gate, up, err := two[F](r.title(), r.arguments(), in)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	gated(y, gate, up, r.f.function())
	return t, nil
}

// gated is y = f(gate) * up.
func gated[F float](y, gate, up []F, f attn.Activation) {
	eachPiece(len(y), func(from, to int) {
		y, up := y[from:to], up[from:to]
		copy(y, gate[from:to])
		vector.Activate(f, y)
		for i, v := range up {
			y[i] *= v
		}
	})
}

// two returns the elements of two inputs.
func two[F float](title string, args []argument, in []G.Value) (a, b []F, err error) {
	if a, err = elements[F](title, args[0].name, in[0], in[0].Shape()); err == nil {
		b, err = elements[F](title, args[1].name, in[1], in[1].Shape())
	}
	return a, b, err
}

// gradient is dgate = dy up f'(gate), and dup = dy f(gate).
func (r glu) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return gluBackward[float64](r, i, in, dy)
	}
	return gluBackward[float32](r, i, in, dy)
}

func gluBackward[F float](r glu, of int, in []G.Value, grad G.Value) (G.Value, error) {
	gate, up, err := two[F](r.title(), r.arguments(), in)
	if err != nil {
		return nil, err
	}
	dy, err := elements[F](r.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	t, d := output[F](grad.Shape())
	f := r.f.function()
	if of == 1 {
		gated(d, gate, dy, f)
		return t, nil
	}
	eachPiece(len(d), func(from, to int) {
		for i := from; i < to; i++ {
			d[i] = F(float64(dy[i]) * float64(up[i]) * slope(f, float64(gate[i])))
		}
	})
	return t, nil
}

func (r glu) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	return w.Elements(&layers.Elements{N: shape.TotalSize(), Activation: r.f.function(), X: w.In[0].Memory, Times: w.In[1].Memory, Y: w.Out})
}

func (r glu) launchGradient(of int, w *ongpu.Work, in []tensor.Shape) error {
	n, gate, up, dy := in[0].TotalSize(), w.In[0].Memory, w.In[1].Memory, w.In[2].Memory
	if of == 1 {
		return w.Elements(&layers.Elements{N: n, Activation: r.f.function(), X: gate, Times: dy, Y: w.Out})
	}
	return w.Slopes(&layers.Slopes{N: n, Width: n, Step: n, Activation: r.f.function(), DY: dy, X: gate, Times: up, DX: w.Out})
}

var _ trained = glu{}
