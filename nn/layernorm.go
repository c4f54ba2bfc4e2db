package nn

import (
	"fmt"
	"hash"
	"math"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/norm"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"

	"github.com/chewxy/hm"

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
//   - Gradients: of x, gamma and beta, in host memory, on both of Gorgonia's machines. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrOption (eps), ErrGraph (nil x, other graphs).
func LayerNorm(x, gamma, beta *G.Node, eps float64) (y *G.Node, err error) {
	const name = "LayerNorm"
	defer errs.RecoverTo(prefix+name, &err)
	if x == nil {
		return nil, errorf(name, errs.ErrGraph, "x is nil")
	}
	if math.IsNaN(eps) || math.IsInf(eps, 0) || eps < 0 {
		return nil, errorf(name, errs.ErrOption, "eps is %v, want a finite number >= 0", eps)
	}
	shape := x.Shape()
	if len(shape) == 0 {
		return nil, errorf(name, errs.ErrShape, "x is a scalar, want rank 1 or more")
	}
	for _, d := range shape {
		if d < 1 {
			return nil, errorf(name, errs.ErrShape, "x has shape %v, want no empty axis", shape)
		}
	}
	dt := x.Dtype()
	if dt != tensor.Float32 && dt != tensor.Float64 {
		return nil, errorf(name, errs.ErrDType, "x is of %v, want float32 or float64", dt)
	}
	n := shape[len(shape)-1]
	op := layerNorm{rank: len(shape), eps: eps, gamma: gamma != nil, beta: beta != nil, gpu: new(ongpu.Node)}
	children := G.Nodes{x}
	for _, p := range []struct {
		name string
		node *G.Node
	}{{"gamma", gamma}, {"beta", beta}} {
		if p.node == nil {
			continue
		}
		if s := p.node.Shape(); len(s) != 1 || s[0] != n {
			return nil, errorf(name, errs.ErrShape, "%s has shape %v, want (%d) for x of shape %v", p.name, s, n, shape)
		}
		if d := p.node.Dtype(); d != dt {
			return nil, errorf(name, errs.ErrDType, "%s is of %v, x of %v%s", called(p.name, p.node), d, dt, toConvert(d, dt))
		}
		if p.node.Graph() != x.Graph() {
			return nil, errorf(name, errs.ErrGraph, "%s and x are in different graphs", p.name)
		}
		children = append(children, p.node)
	}
	return ongpu.Apply(prefix+name, op, children...)
}

// layerNorm is the operator: children x, then gamma and beta where present. It
// holds nothing but the memory of its value on GPUs, so one may serve any number
// of runs.
type layerNorm struct {
	graph.Plain
	rank        int // of x
	eps         float64
	gamma, beta bool
	gpu         *ongpu.Node
}

// OnGPU makes it an [ongpu.Op].
func (op layerNorm) OnGPU() *ongpu.Node { return op.gpu }

func (op layerNorm) Arity() int { return 1 + count(op.gamma) + count(op.beta) }

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Type makes a new type at each call: Gorgonia takes the one it is given apart.
func (op layerNorm) Type() hm.Type {
	a := hm.TypeVariable('a')
	ts := []hm.Type{tensorOf(op.rank, a)}
	for i := 1; i < op.Arity(); i++ {
		ts = append(ts, tensorOf(1, a))
	}
	return hm.NewFnType(append(ts, tensorOf(op.rank, a))...)
}

func tensorOf(rank int, of hm.Type) hm.Type { return G.TensorType{Dims: rank, Of: of} }

func (op layerNorm) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	if len(shapes) != op.Arity() || len(shapes[0]) != op.rank {
		return nil, errorf("LayerNorm", errs.ErrShape, "inputs have shapes %v", shapes)
	}
	return shapes[0].Clone(), nil
}

func (op layerNorm) String() string {
	return fmt.Sprintf("LayerNorm{rank %d, eps %v, gamma %v, beta %v}", op.rank, op.eps, op.gamma, op.beta)
}
func (op layerNorm) WriteHash(h hash.Hash) { fmt.Fprint(h, op.String()) }
func (op layerNorm) Hashcode() uint32      { return graph.Hashcode(op) }

// Do returns a new tensor at each call: what Gorgonia's in-place nodes do to it
// afterwards can harm nobody.
func (op layerNorm) Do(in ...G.Value) (y G.Value, err error) {
	const name = "LayerNorm"
	defer errs.RecoverTo(prefix+name, &err)
	defer op.gpu.Done(in, &y, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, errs.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	if anyOnGPU(in) {
		return op.doGPU(in)
	}
	switch dt := in[0].Dtype(); dt {
	case tensor.Float32:
		return forward[float32](op, in)
	case tensor.Float64:
		return forward[float64](op, in)
	default:
		return nil, errorf(name, errs.ErrDType, "x is of %v when run, want float32 or float64", dt)
	}
}

// rows is the inputs of a LayerNorm as slices, nil for an absent parameter.
type rows[F float] struct {
	shape          tensor.Shape // of x
	n              int          // elements of a row
	x, gamma, beta []F
}

func readRows[F float](op layerNorm, in []G.Value) (r rows[F], err error) {
	const name = "LayerNorm"
	r.shape = in[0].Shape()
	if len(r.shape) != op.rank {
		return r, errorf(name, errs.ErrShape, "x has shape %v when run, want rank %d", r.shape, op.rank)
	}
	r.n = r.shape[op.rank-1]
	if r.x, err = elements[F](name, "x", in[0], r.shape); err != nil {
		return r, err
	}
	in = in[1:]
	if op.gamma {
		if r.gamma, err = elements[F](name, "gamma", in[0], tensor.Shape{r.n}); err != nil {
			return r, err
		}
		in = in[1:]
	}
	if op.beta {
		r.beta, err = elements[F](name, "beta", in[0], tensor.Shape{r.n})
	}
	return r, err
}

func forward[F float](op layerNorm, in []G.Value) (G.Value, error) {
	r, err := readRows[F](op, in)
	if err != nil {
		return nil, err
	}
	t, y := output[F](r.shape)
	o := norm.Norm[F]{N: r.n, Gamma: r.gamma, Beta: r.beta, Eps: op.eps}
	o.Rows(cpu.Default(), y, r.x)
	return t, nil
}

// eachRow calls f for every row of n elements, on as many threads as that is worth. A
// panic of f comes out here, where the operator's Do recovers it.
func eachRow(rows, n int, f func(row int)) { cpu.Each(cpu.Default(), rows, n, f) }
