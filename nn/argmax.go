package nn

import (
	"hash"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"github.com/chewxy/hm"
	"gorgonia.org/leanattention/internal/choose"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/graph"
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
	const name = "ArgMax"
	defer errs.RecoverTo(prefix+name, &err)
	if x == nil {
		return nil, errorf(name, errs.ErrGraph, "x is nil")
	}
	if x.Dtype() != tensor.Float32 {
		return nil, errorf(name, errs.ErrDType, "x is of %v, want float32", x.Dtype())
	}
	op := argMax{inference: "ArgMax", gpu: new(ongpu.Node)}
	if _, err := op.shape(x.Shape()); err != nil {
		return nil, err
	}
	return ongpu.Apply(prefix+name, op, x)
}

type argMax struct {
	graph.Plain
	inference
	gpu *ongpu.Node
}

func (op argMax) shape(x tensor.Shape) (tensor.Shape, error) {
	if len(x) != 2 || x[0] < 1 || x[1] < 1 {
		return nil, errorf("ArgMax", errs.ErrShape, "x has shape %v, want rank 2 and no empty axis", x)
	}
	return tensor.Shape{x[0]}, nil
}

// OnGPU makes it an [ongpu.Op].
func (op argMax) OnGPU() *ongpu.Node { return op.gpu }

func (op argMax) Arity() int { return 1 }
func (op argMax) Type() hm.Type {
	return hm.NewFnType(tensorOf(2, tensor.Float32), tensorOf(1, tensor.Int32))
}

func (op argMax) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	if len(shapes) != 1 {
		return nil, errorf("ArgMax", errs.ErrShape, "%d inputs, want 1", len(shapes))
	}
	return op.shape(shapes[0])
}

func (op argMax) String() string        { return "ArgMax" }
func (op argMax) WriteHash(h hash.Hash) { h.Write([]byte("leanattention.nn.ArgMax")) }
func (op argMax) Hashcode() uint32      { return graph.Hashcode(op) }

func (op argMax) Do(in ...G.Value) (y G.Value, err error) {
	const name = "ArgMax"
	defer errs.RecoverTo(prefix+name, &err)
	defer op.gpu.Done(in, &y, &err)
	if len(in) != 1 {
		return nil, errorf(name, errs.ErrGraph, "%d inputs, want 1", len(in))
	}
	shape, err := op.shape(in[0].Shape())
	if err != nil {
		return nil, err
	}
	if anyOnGPU(in) {
		return op.doGPU(in, shape)
	}
	x, err := elements[float32](name, "x", in[0], in[0].Shape())
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

func (op argMax) doGPU(in []G.Value, shape tensor.Shape) (G.Value, error) {
	const name = "ArgMax"
	what := func(int) string { return "x" }
	if err := checkDTypes(name, what, in, func(int) tensor.Dtype { return tensor.Float32 }); err != nil {
		return nil, err
	}
	n := in[0].Shape()[1]
	return ongpu.Compute(&ongpu.Call{
		Op: "nn." + name, Node: op.gpu, Names: []string{"x"}, In: in, DType: tensor.Int32, Shape: shape,
		Queue: func(w *ongpu.Work) error {
			o := &decoder.Samples{Logits: w.In[0].Memory, Rows: shape[0], Vocab: n, Stride: n, IDs: gpuBytes(w.Out)}
			return w.Sample(o)
		},
		Apart: func(in []ongpu.Layout) (*ongpu.Apart, error) {
			columns, ok := byColumns(in[0], n)
			if !ok || shape[0] > decoder.ArgMaxRows {
				return nil, nil
			}
			return &ongpu.Apart{Layout: ongpu.Layout{Replicated: true}, Shape: shape, Meet: func(x *decoder.Exchange, member int, all []*ongpu.Work) error {
				o := &decoder.AllArgMax{Rows: shape[0], Columns: columns}
				for _, w := range all {
					o.X, o.IDs = append(o.X, w.In[0].Memory), append(o.IDs, gpuBytes(w.Out))
				}
				w := all[member]
				return w.Do(func(s *cuda.Stream) error { return w.AllArgMax(s, x, o, member) })
			}}, nil
		},
	})
}

// byColumns is how many columns each member of a group has of rows of logits, if that is how they are dealt out and they can choose
// tokens together.
func byColumns(l ongpu.Layout, n int) (columns []int, ok bool) {
	each, even := l.Evenly(n)
	return slices.Repeat([]int{each}, l.Members), l.Sharded && l.Axis == 1 && even && l.Members <= ongpu.MostMembers && n <= decoder.MostVocab
}

var (
	_ G.SDOp = argMax{}
	_ G.ADOp = argMax{}
)
