package nn

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// An Activation is a function of each element.
type Activation uint8

const (
	// ReLU is max(x, 0). NaN stays NaN.
	ReLU Activation = iota + 1

	// GELU is the Gaussian error linear unit, x/2 (1 + erf(x/sqrt(2))): Hendrycks and Gimpel, arXiv:1606.08415.
	GELU

	// GELUTanh approximates GELU by x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), to 5e-4: section 2 of arXiv:1606.08415.
	// Checkpoints call it gelu_new or gelu_pytorch_tanh.
	GELUTanh

	// SiLU is x / (1 + exp(-x)), also called swish: Elfwing, Uchibe and Doya, arXiv:1702.03118.
	SiLU

	activations // one more than the last
)

// String returns the name of f.
func (f Activation) String() string {
	if f.check("") != nil {
		return fmt.Sprintf("Activation(%d)", uint8(f))
	}
	return [...]string{ReLU: "ReLU", GELU: "GELU", GELUTanh: "GELUTanh", SiLU: "SiLU"}[f]
}

func (f Activation) function() attn.Activation {
	return [...]attn.Activation{attn.NoActivation, ReLU: attn.ReLU, GELU: attn.GELU, GELUTanh: attn.GELUTanh, SiLU: attn.SiLU}[f]
}

func (f Activation) check(name string) error {
	if f < ReLU || f >= activations {
		return errorf(name, errs.ErrOption, "the activation is Activation(%d), want ReLU, GELU, GELUTanh or SiLU", uint8(f))
	}
	return nil
}

// Activate returns f(x), element by element. [WithActivation] is the same as a part of a [Linear], and [GLU] multiplies by a second
// layer.
//
//   - x: rank 1 or more, float32 or float64. y has the shape and type of x.
//   - In float32, y is off by at most 2^-22 of x.
//   - On a GPU: float32.
//   - Gradient: of x, in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrOption (f), ErrGraph (nil x).
func Activate(x *G.Node, f Activation) (y *G.Node, err error) {
	const name = "Activate"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	if err := f.check(name); err != nil {
		return nil, err
	}
	return newNode(activation{rank: len(x.Shape()), dtype: x.Dtype(), f: f.function()}, x)
}

// activation is the rule of Activate.
type activation struct {
	rank  int
	dtype tensor.Dtype
	f     attn.Activation
}

func (r activation) title() string { return "Activate" }
func (r activation) String() string {
	return fmt.Sprintf("Activate{%v, %v, rank %d}", r.f, r.dtype, r.rank)
}
func (r activation) arguments() []argument { return alike(r.rank, r.dtype, "x", "y") }

func (r activation) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (r activation) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return activated[float64](r, in, shape)
	}
	return activated[float32](r, in, shape)
}

func activated[F float](r activation, in []G.Value, shape tensor.Shape) (G.Value, error) {
	x, err := elements[F](r.title(), "x", in[0], shape)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	eachPiece(len(y), func(from, to int) {
		copy(y[from:to], x[from:to])
		vector.Activate(r.f, y[from:to])
	})
	return t, nil
}

func (r activation) gradient(_ int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return activationGrad[float64](r, in[0], dy)
	}
	return activationGrad[float32](r, in[0], dy)
}

func activationGrad[F float](r activation, in, grad G.Value) (G.Value, error) {
	x, err := elements[F](r.title(), "x", in, in.Shape())
	if err != nil {
		return nil, err
	}
	dy, err := elements[F](r.title(), "the output's gradient", grad, in.Shape())
	if err != nil {
		return nil, err
	}
	t, dx := output[F](in.Shape())
	eachPiece(len(dx), func(from, to int) {
		for i := from; i < to; i++ {
			dx[i] = F(float64(dy[i]) * slope(r.f, float64(x[i])))
		}
	})
	return t, nil
}

// slope returns the derivative of f at v, at an infinite v the limit.
func slope(f attn.Activation, v float64) float64 {
	switch f {
	case attn.ReLU:
		if v > 0 {
			return 1
		}
		return v * 0 // NaN of NaN
	case attn.GELU: // P(v) + v p(v), with the normal distribution P and its density p
		s := math.Erfc(-v/math.Sqrt2) / 2
		if p := math.Exp(-v * v / 2); p > 0 { // else v may be infinite
			s += v * p / math.Sqrt(2*math.Pi)
		}
		return s
	case attn.GELUTanh: // v times the sigmoid of u
		const a = 2 * math.Sqrt2 / math.SqrtPi
		return sigmoidSlope(v, v*(a+a*0.044715*v*v), a+3*a*0.044715*v*v)
	case attn.SiLU:
		return sigmoidSlope(v, v, 1)
	}
	return 1
}

// sigmoidSlope returns the derivative of v s(u), where s is the sigmoid and du the derivative of u.
func sigmoidSlope(v, u, du float64) float64 {
	e := math.Exp(-math.Abs(u))
	s := 1 / (1 + e)
	if u < 0 {
		s = e / (1 + e)
	}
	if e > 0 { // else v may be infinite
		s += v * du * e / ((1 + e) * (1 + e))
	}
	return s
}

func (r activation) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	return w.Elements(&layers.Elements{N: shape.TotalSize(), Activation: r.f, X: w.In[0].Memory, Y: w.Out})
}

func (r activation) launchGradient(_ int, w *ongpu.Work, in []tensor.Shape) error {
	n := in[0].TotalSize()
	return w.Slopes(&layers.Slopes{N: n, Width: n, Step: n, Activation: r.f, DY: w.In[1].Memory, X: w.In[0].Memory, DX: w.Out})
}

var _ trained = activation{}

// piece is the number of elements of a work item.
const piece = 1 << 12

// eachPiece calls f for pieces of n elements, on as many threads as the work is worth.
func eachPiece(n int, f func(from, to int)) {
	eachRow((n+piece-1)/piece, piece, func(i int) { f(i*piece, min((i+1)*piece, n)) })
}
