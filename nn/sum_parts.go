package nn

import (
	"fmt"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// SumParts adds up the parts of each row of x, which lie side by side:
//
//	y[:, c] = x[:, c] + x[:, n+c] + x[:, 2n+c] + ...
//
// x is (rows, parts*n), and y is (rows, n). parts is at least 1.
//
//   - Types: float32 or float64. On a GPU: float32.
//   - Several GPUs: if x is sharded on axis 1, each GPU has one part, and n is a multiple of four times the number of GPUs, then the GPUs
//     exchange their parts and y is sharded on axis 1. So GPUs that have all heads of a part of the latent vectors ([TPLA]) get the sums of
//     their heads. Otherwise each GPU sums a replicated x, and GPU 0 gathers and sums any other x.
//   - Gradient: in host memory, on both of Gorgonia's machines. No second derivative.
//   - Errors: ErrShape (x is not a matrix, parts is below 1 or does not divide a row), ErrDType, ErrGraph (nil x).
func SumParts(x *G.Node, parts int) (y *G.Node, err error) {
	const name = "SumParts"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	if len(x.Shape()) != 2 {
		return nil, errorf(name, errs.ErrShape, "x has shape %v, want (rows, parts*n)", x.Shape())
	}
	return newNode(sumParts{kind{2, x.Dtype()}, parts}, x)
}

// sumParts is the rule of SumParts.
type sumParts struct {
	kind
	parts int
}

func (r sumParts) title() string { return "SumParts" }
func (r sumParts) String() string {
	return fmt.Sprintf("SumParts{%v, %d}", r.dtype, r.parts)
}
func (r sumParts) arguments() []argument { return alike(r.rank, r.dtype, "x", "y") }

func (r sumParts) shape(in []tensor.Shape) (tensor.Shape, error) {
	x := in[0]
	if r.parts < 1 || x[1] < r.parts || x[1]%r.parts != 0 {
		return nil, errorf(r.title(), errs.ErrShape, "x has shape %v, want a multiple of %d columns, and one part at least", x, r.parts)
	}
	return tensor.Shape{x[0], x[1] / r.parts}, nil
}

func (r sumParts) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return partsSummed[float64](r, in[0], shape)
	}
	return partsSummed[float32](r, in[0], shape)
}

func partsSummed[F float](r sumParts, v G.Value, shape tensor.Shape) (G.Value, error) {
	x, err := elements[F](r.title(), "x", v, v.Shape())
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	n := shape[1]
	eachRow(shape[0], n*r.parts, func(row int) {
		y, x := y[row*n:][:n], x[row*n*r.parts:]
		copy(y, x)
		for part := 1; part < r.parts; part++ {
			for i, v := range x[part*n:][:n] {
				y[i] += v
			}
		}
	})
	return t, nil
}

// gradient is dy for each part.
func (r sumParts) gradient(_ int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return partsGradient[float64](r, in[0].Shape(), dy)
	}
	return partsGradient[float32](r, in[0].Shape(), dy)
}

func partsGradient[F float](r sumParts, shape tensor.Shape, grad G.Value) (G.Value, error) {
	dy, err := elements[F](r.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	t, dx := output[F](shape)
	n := shape[1] / r.parts
	for at := 0; at < len(dx); at += n {
		copy(dx[at:][:n], dy[at/shape[1]*n:])
	}
	return t, nil
}

// place has GPUs with a part each exchange the parts. One GPU needs scratch memory for parts of several rows.
func (r sumParts) place(c *ongpu.Call, in []tensor.Shape, shape tensor.Shape) {
	c.Scratch = func(*layers.Engine) (int, error) {
		if shape[0] == 1 {
			return 0, nil
		}
		return in[0].TotalSize(), nil
	}
	c.PerGPU = func(layouts []ongpu.Layout) (*ongpu.PerGPU, error) {
		l := layouts[0]
		if !l.Sharded || l.Axis != 1 || l.Members != r.parts || l.Members > ongpu.MostMembers || shape[1]%(4*r.parts) != 0 {
			return nil, nil
		}
		return &ongpu.PerGPU{
			Layout: ongpu.Layout{Sharded: true, Axis: 1}, Shape: tensor.Shape{shape[0], shape[1] / r.parts}, Replicate: []bool{false},
			Meet: func(x *layers.Exchange, member int, all []*ongpu.Work) error {
				o := &layers.AllReduce{Rows: shape[0], N: shape[1], Scatter: true}
				for _, w := range all {
					o.X, o.Y = append(o.X, w.In[0].Memory), append(o.Y, w.Out)
				}
				w := all[member]
				return w.Do(func(s *cuda.Stream) error { return w.AllReduce(s, x, o, member) })
			},
		}, nil
	}
}

// launch puts the parts of all rows one behind the other, and adds them up.
func (r sumParts) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	x, rows, n := w.In[0].Memory, shape[0], shape[1]
	if rows > 1 {
		m := attn.Move{Dims: [3]int{1, r.parts, rows}, N: n, From: attn.Lattice{Steps: [3]int{0, n, in[0][1]}}, To: attn.Lattice{Steps: [3]int{0, rows * n, n}}}
		if err := w.Move(&layers.Move{Move: m, X: x, Y: w.Scratch}); err != nil {
			return err
		}
		x = w.Scratch
	}
	return w.AddParts(r.parts, rows*n, x, w.Out)
}

var (
	_ rule      = sumParts{}
	_ launched  = sumParts{}
	_ placed    = sumParts{}
	_ derivable = sumParts{}
)
