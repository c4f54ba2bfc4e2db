package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/choose"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// ArgMax returns the index of the largest element of each row, and of equal elements the first: the most likely token.
//
//   - x: (rows, n), float32. The result: (rows), int32.
//   - A row with NaN or +Inf, or with -Inf alone, has index -1.
//   - On a GPU: rows of at most 2^19 elements. On several GPUs with x sharded on axis 1, each GPU reads its columns, and all have
//     the result.
//   - Gradients: ErrUnsupported.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil x).
func ArgMax(x *G.Node) (y *G.Node, err error) {
	defer errs.RecoverTo(prefix+"ArgMax", &err)
	return newNode(argMax{}, x)
}

// argMax is the rule of ArgMax.
type argMax struct{}

func (argMax) title() string  { return "ArgMax" }
func (argMax) String() string { return "ArgMax" }

func (argMax) arguments() []argument {
	return []argument{{name: "x", rank: 2, dtype: tensor.Float32}, data(argument{name: "ids", rank: 1, dtype: tensor.Int32})}
}

func (argMax) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0][:1].Clone(), nil }

func (r argMax) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	x, err := elements[float32](r.title(), "x", in[0], in[0].Shape())
	if err != nil {
		return nil, err
	}
	n := in[0].Shape()[1]
	ids := make([]int32, shape[0])
	for row := range ids {
		ids[row] = int32(choose.Largest(x[row*n : (row+1)*n]))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(ids)), nil
}

func (argMax) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	n := in[0][1]
	return w.Sample(&layers.Samples{Logits: w.In[0].Memory, Rows: shape[0], Vocab: n, Stride: n, IDs: gpuBytes(w.Out)})
}

// place has each GPU read its columns of x.
func (argMax) place(c *ongpu.Call, in []tensor.Shape, shape tensor.Shape) {
	c.PerGPU = func(layouts []ongpu.Layout) (*ongpu.PerGPU, error) {
		columns, ok := byColumns(layouts[0], in[0][1])
		if !ok || shape[0] > layers.ArgMaxRows {
			return nil, nil
		}
		return &ongpu.PerGPU{Layout: ongpu.Layout{Replicated: true}, Shape: shape, Meet: func(x *layers.Exchange, member int, all []*ongpu.Work) error {
			o := &layers.AllArgMax{Rows: shape[0], Columns: columns}
			for _, w := range all {
				o.X, o.IDs = append(o.X, w.In[0].Memory), append(o.IDs, gpuBytes(w.Out))
			}
			w := all[member]
			return w.Do(func(s *cuda.Stream) error { return w.AllArgMax(s, x, o, member) })
		}}, nil
	}
}

// byColumns returns how many columns of logits each GPU has. ok is false if logits are not sharded evenly by columns, or if the GPUs
// cannot choose tokens together.
func byColumns(l ongpu.Layout, n int) (columns []int, ok bool) {
	each, even := l.Evenly(n)
	return slices.Repeat([]int{each}, l.Members), l.Sharded && l.Axis == 1 && even && l.Members <= ongpu.MostMembers && n <= layers.MostVocab
}

var (
	_ rule     = argMax{}
	_ launched = argMax{}
	_ placed   = argMax{}
)
