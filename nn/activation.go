package nn

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// GELU is the Gaussian error linear unit, exactly: each element times the probability
// that a standard normal variable is below it,
//
//	y = x/2 (1 + erf(x/sqrt(2)))
//
// Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415. It is
// not the approximation by tanh, which differs by up to 5e-4 and is [GELUTanh]. Behind a
// [Linear], [WithGELU] is the same and takes no node.
//
// x is of rank 1 or more, float32 or float64; y has its shape and type. In float32 y is
// off by no more than 2^-22 of x. NaN stays NaN, and -Inf becomes it, as the formula
// has it.
//
// It computes on a GPU where x is a [device.Tensor] of float32.
//
// The gradient is available on both of Gorgonia's machines, in host memory; it can not be
// differentiated once more.
//
// Errors: ErrShape, ErrDType, ErrGraph (nil x).
func GELU(x *G.Node) (y *G.Node, err error) { return newActivation("GELU", x, attn.GELU) }

// GELUTanh is the approximation of [GELU] by tanh, which some checkpoints were trained with
// (gelu_new, gelu_pytorch_tanh):
//
//	y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
//
// Section 2 of arXiv:1606.08415. All else is as of GELU. Behind a [Linear] it is [WithGELUTanh].
func GELUTanh(x *G.Node) (y *G.Node, err error) { return newActivation("GELUTanh", x, attn.GELUTanh) }

// SiLU is the sigmoid linear unit, also called swish:
//
//	y = x / (1 + exp(-x))
//
// Section 4.1 of arXiv:1606.08415 and Elfwing, Uchibe and Doya, arXiv:1702.03118. All else is as
// of [GELU]. Behind a [Linear] it is [WithSiLU], and with a product behind it a [GLU] or, with the layers of both, a [GatedLinear].
func SiLU(x *G.Node) (y *G.Node, err error) { return newActivation("SiLU", x, attn.SiLU) }

func newActivation(name string, x *G.Node, f attn.Activation) (y *G.Node, err error) {
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	return newNode(activation{name: name, rank: len(x.Shape()), dtype: x.Dtype(), f: f}, x)
}

// activation is the rule of a function of each element.
type activation struct {
	name  string
	rank  int
	dtype tensor.Dtype
	f     attn.Activation
}

func (r activation) title() string         { return r.name }
func (r activation) String() string        { return fmt.Sprintf("%s{%v, rank %d}", r.name, r.dtype, r.rank) }
func (r activation) arguments() []argument { return alike(r.rank, r.dtype, "x", "y") }

func (r activation) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (r activation) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return activated[float64](r, in, shape)
	}
	return activated[float32](r, in, shape)
}

func activated[F float](r activation, in []G.Value, shape tensor.Shape) (G.Value, error) {
	x, err := elements[F](r.name, "x", in[0], shape)
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
	x, err := elements[F](r.name, "x", in, in.Shape())
	if err != nil {
		return nil, err
	}
	dy, err := elements[F](r.name, "the output's gradient", grad, in.Shape())
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

// slope is the derivative of f at v. Where v is infinite it is the limit.
func slope(f attn.Activation, v float64) float64 {
	switch f {
	case attn.ReLU:
		if v > 0 {
			return 1
		}
		return v * 0 // NaN of NaN
	case attn.GELU: // P(v) + v p(v), with the normal distribution P and its density p
		s := math.Erfc(-v/math.Sqrt2) / 2
		if p := math.Exp(-v * v / 2); p > 0 { // v may be infinite where it is not
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

// sigmoidSlope is the derivative of v s(u), where u has the derivative du and s is the sigmoid.
func sigmoidSlope(v, u, du float64) float64 {
	e := math.Exp(-math.Abs(u))
	s := 1 / (1 + e)
	if u < 0 {
		s = e / (1 + e)
	}
	if e > 0 { // v may be infinite where it is not
		s += v * du * e / ((1 + e) * (1 + e))
	}
	return s
}

func (r activation) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	return w.Elements(&decoder.Elements{N: shape.TotalSize(), Activation: r.f, X: w.In[0].Memory, Y: w.Out})
}

// piece is so many elements that a goroutine takes at a time.
const piece = 1 << 12

// eachPiece calls f for pieces of n elements, on several cores where that is worth it.
func eachPiece(n int, f func(from, to int)) {
	eachRow((n+piece-1)/piece, piece, func(i int) { f(i*piece, min((i+1)*piece, n)) })
}
