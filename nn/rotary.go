package nn

import (
	"cmp"
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/rope"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Rotary is the rotary embedding that config describes: it rotates the heads of queries or keys by the positions of their tokens.
//
//   - x: (rows, heads*HeadDim), as for leanattention.CachedAttention, or (rows, heads, HeadDim); float32 or float64. y has the shape
//     and type of x.
//   - positions: one int or int32 for each row. It is data: leanattention.Step.Positions sets it before each run of a decoder.
//     leanattention.WithRotary does the same within attention, without a node or positions.
//   - Angles are reduced in float64: their error is at most 2^-51 of the position, in radians, and 2^-22 in float32.
//   - On a GPU: x float32, positions int32, at most 256 rotated elements of a head, which are its first ones.
//   - Gradient: of x, in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrOption (config), ErrGraph (nil nodes, other graphs).
func Rotary(x, positions *G.Node, config rope.Config) (y *G.Node, err error) {
	const name = "Rotary"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	if positions == nil {
		return nil, errorf(name, errs.ErrGraph, "positions is nil")
	}
	if d := positions.Dtype(); d != tensor.Int && d != tensor.Int32 {
		return nil, errorf(name, errs.ErrDType, "positions is of %v, want int or int32", d)
	}
	if rank := len(x.Shape()); rank != 2 && rank != 3 {
		return nil, errorf(name, errs.ErrShape, "x has shape %v, want rank 2 or 3", x.Shape())
	}
	w, m, err := config.Frequencies()
	if err != nil {
		return nil, err
	}
	r := rotary{rank: len(x.Shape()), dtype: x.Dtype(), positions: positions.Dtype(), config: config}
	r.how = attn.RotaryOf(config.HeadDim, w, m, config.Interleaved, config.Last)
	return newNode(r, x, positions)
}

// rotary is the rule of Rotary.
type rotary struct {
	rank             int
	dtype, positions tensor.Dtype
	config           rope.Config
	how              attn.Rotary
}

func (r rotary) title() string { return "Rotary" }
func (r rotary) String() string {
	c := r.config
	return fmt.Sprintf("Rotary{%v, rank %d, positions %v, %d of %d elements from %d on, base %v, interleaved %v, scaling %T%+v}",
		r.dtype, r.rank, r.positions, cmp.Or(c.Dim, c.HeadDim), c.HeadDim, r.how.First, c.Base, c.Interleaved, c.Scaling, c.Scaling)
}

func (r rotary) arguments() []argument {
	x := argument{name: "x", rank: r.rank, dtype: r.dtype}
	return []argument{x, data(argument{name: "positions", rank: 1, dtype: r.positions}), x}
}

func (r rotary) shape(in []tensor.Shape) (tensor.Shape, error) {
	x, d := in[0], r.how.HeadDim
	if width := x[r.rank-1]; r.rank == 2 && width%d != 0 || r.rank == 3 && width != d {
		return nil, errorf("Rotary", errs.ErrShape, "x has shape %v, want (rows, heads*%d) or (rows, heads, %d)", x, d, d)
	}
	if in[1][0] != x[0] {
		return nil, errorf("Rotary", errs.ErrShape, "positions has shape %v, want (%d) for x of shape %v", in[1], x[0], x)
	}
	return x.Clone(), nil
}

func (r rotary) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	return r.turn(in[0], in[1], shape, 1)
}

// gradient rotates back.
func (r rotary) gradient(_ int, in []G.Value, dy G.Value) (G.Value, error) {
	return r.turn(dy, in[1], dy.Shape(), -1)
}

// turn rotates x forwards (sign 1) or backwards (sign -1).
func (r rotary) turn(x, positions G.Value, shape tensor.Shape, sign float64) (G.Value, error) {
	at, err := integers("Rotary", "positions", r.positions, positions)
	if err != nil {
		return nil, err
	}
	if r.dtype == tensor.Float64 {
		return turned[float64](&r.how, x, at, shape, sign)
	}
	return turned[float32](&r.how, x, at, shape, sign)
}

func turned[F float](r *attn.Rotary, v G.Value, positions []int, shape tensor.Shape, sign float64) (G.Value, error) {
	x, err := elements[F]("Rotary", "x", v, shape)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	width, pairs := len(x)/len(positions), r.Turns.Len()
	eachRow(len(positions), width, func(row int) {
		cos, sin := make([]F, pairs), make([]F, pairs)
		for i := range pairs {
			s, c := math.Sincos(r.Turns.Of(i).Angle(positions[row]))
			cos[i], sin[i] = F(r.Factor*c), F(sign*r.Factor*s)
		}
		for at := row * width; at < (row+1)*width; at += r.HeadDim {
			attention.Turn(y[at:at+r.HeadDim], x[at:at+r.HeadDim], r.First, cos, sin, r.Interleaved)
		}
	})
	return t, nil
}

// integers returns the elements of an int or an int32 tensor.
func integers(name, what string, dtype tensor.Dtype, v G.Value) ([]int, error) {
	if dtype == tensor.Int {
		return elements[int](name, what, v, v.Shape())
	}
	short, err := elements[int32](name, what, v, v.Shape())
	long := make([]int, len(short))
	for i, x := range short {
		long[i] = int(x)
	}
	return long, err
}

func (r rotary) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	rows := shape[0]
	return w.Rotary(&layers.Rotary{
		Rotary: r.how, Rows: rows, Heads: shape.TotalSize() / (rows * r.how.HeadDim),
		X: w.In[0].Memory, Positions: gpuBytes(w.In[1].Memory), Y: w.Out,
	})
}

func (r rotary) launchGradient(_ int, w *ongpu.Work, in []tensor.Shape) error {
	back := *w
	back.In = []ongpu.Operand{w.In[2], w.In[1]}
	r.how = r.how.Back()
	return r.launch(&back, in, in[0])
}

var _ trained = rotary{}
