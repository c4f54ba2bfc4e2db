package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// anyOnGPU says whether a node's inputs are on a GPU; whether they all are, who
// queues the work finds out.
func anyOnGPU(in []G.Value) bool {
	return slices.ContainsFunc(in, func(v G.Value) bool {
		_, ok := ongpu.Of(v)
		return ok
	})
}

// checkDTypes checks what a run gives a node on a GPU.
func checkDTypes(name string, what func(i int) string, in []G.Value, want func(i int) tensor.Dtype) error {
	for i, v := range in {
		if d := v.Dtype(); d != want(i) {
			return errorf(name, errs.ErrDType, "%s is of %v when run, want %v", what(i), d, want(i))
		}
	}
	return nil
}

func namesOf(n int, name func(i int) string) []string {
	s := make([]string, n)
	for i := range s {
		s[i] = name(i)
	}
	return s
}

func shapesOf(in []G.Value) []tensor.Shape {
	s := make([]tensor.Shape, len(in))
	for i, v := range in {
		s[i] = v.Shape()
	}
	return s
}

// gpuBytes is memory whose type does not matter.
func gpuBytes(m gpu.Memory) gpu.Bytes { return gpu.Bytes{Buffer: m.Buffer, Offset: m.Offset} }

// doGPU is Do where the inputs are on a GPU.
func (op linear) doGPU(in []G.Value) (G.Value, error) {
	name := op.title()
	if op.x != tensor.Float32 {
		return nil, errorf(name, errs.ErrUnsupported, "x of %v on a GPU, want float32", op.x)
	}
	shapes := shapesOf(in)
	shape, err := op.shape(shapes)
	if err != nil {
		return nil, err
	}
	isW := func(i int) bool { return i >= 1 && i <= op.parts }
	if err := checkDTypes(name, op.OperandName, in, func(i int) tensor.Dtype {
		if isW(i) {
			return op.w
		}
		return op.x
	}); err != nil {
		return nil, err
	}
	return ongpu.Compute(&ongpu.Call{
		Op: "nn." + name, Node: op.gpu, Names: namesOf(len(in), op.OperandName), In: in, DType: op.x, Shape: shape,
		Scratch: func(d *decoder.Engine) (int, error) { return op.scratchOn(d, shapes) },
		Queue:   func(w *ongpu.Work) error { return w.Linear(op.on(w.In, shapes, w.Out, w.Scratch)) },
		Spread: func(in []ongpu.Operand, out gpu.Memory) (ongpu.Spread, error) {
			shards, err := op.shards(in, shapes)
			if err != nil {
				return nil, err
			}
			return ongpu.LinearShards{Sharded: &decoder.Sharded{Linear: *op.on(in, shapes, out, gpu.Memory{}), Shards: shards}}, nil
		},
		Apart: func(in []ongpu.Layout) (*ongpu.Apart, error) {
			if a := op.byOutputs(in, shapes, shape); a != nil {
				return a, nil
			}
			return op.byInputs(in, shapes, shape)
		},
	})
}

// on is the layers on a GPU, of operands as far as they are known: memory comes with the work.
func (op linear) on(in []ongpu.Operand, shapes []tensor.Shape, out, scratch gpu.Memory) *decoder.Linear {
	rows, width := shapes[0][0], shapes[0][1]
	o := &decoder.Linear{Rows: rows, In: width, Activation: op.activation, Gate: op.gate, Early: true, RoundX: op.mixed, X: in[0].Memory, Scratch: scratch}
	at := 0
	for i := range op.parts {
		w, p := &in[1+i], decoder.LinearPart{Out: shapes[1+i][0]}
		p.W, p.Y = w.Memory, out
		p.W.DType, _ = operand.StorageType(op.w) // also of shards
		p.Y.Offset += int64(at) * 4
		p.Y.Len = rows * p.Out
		at += p.Y.Len
		o.Early = o.Early && w.Fixed
		if op.bias {
			p.B = in[1+op.parts+i].Memory
		}
		o.Parts = append(o.Parts, p)
	}
	if op.gate {
		o.Parts = gateAndUp(o.Parts, width)
		o.Parts[0].Y = out
	}
	in = in[len(in)-count(op.residual)-count(op.gamma)-count(op.beta):]
	if op.residual {
		o.Residual, in = in[0].Memory, in[1:]
	}
	if op.norm {
		o.Norm = &decoder.Norm{Eps: op.eps, RMS: op.rms, UnitOffset: op.offset}
		for _, x := range in {
			o.Early = o.Early && x.Fixed
		}
		if op.gamma {
			o.Norm.Gamma, in = in[0].Memory, in[1:]
		}
		if op.beta {
			o.Norm.Beta = in[0].Memory
		}
	}
	return o
}

// scratchOn is how many float32 the layers need besides on a GPU.
func (op linear) scratchOn(d *decoder.Engine, shapes []tensor.Shape) (int, error) {
	in := make([]ongpu.Operand, op.Arity())
	for i := range op.parts {
		in[1+i].DType, _ = operand.StorageType(op.w)
	}
	return d.Scratch(op.on(in, shapes, gpu.Memory{}, gpu.Memory{}))
}

// shards are what each GPU has of the weights and the biases, and the errors of what is not dealt out by output
// features.
func (op linear) shards(in []ongpu.Operand, shapes []tensor.Shape) (shards [][]decoder.Shard, err error) {
	name := op.title()
	if op.gate && op.parts == 1 {
		return nil, errorf(name, errs.ErrUnsupported, "%s has the weights of the gate and of the other layer, and is sharded over several GPUs: want two of them", op.OperandName(1))
	}
	biases := 0
	if op.bias {
		biases = op.parts
	}
	for i := range in {
		x := &in[i]
		isW, isB := i >= 1 && i <= op.parts, i > op.parts && i <= op.parts+biases
		switch {
		case isW && x.Shards == nil:
			return nil, errorf(name, errs.ErrUnsupported, "%s is whole, and others are sharded over several GPUs", op.OperandName(i))
		case x.Shards == nil:
		case !isW && !isB:
			return nil, errorf(name, errs.ErrUnsupported, "%s is sharded over several GPUs, want it whole", op.OperandName(i))
		case x.Axis != 0:
			return nil, errorf(name, errs.ErrUnsupported, "%s is sharded on axis %d of shape %v, want it on axis 0", op.OperandName(i), x.Axis, shapes[i])
		}
	}
	for member := range in[1].Shards {
		mine := make([]decoder.Shard, op.parts)
		for i := range mine {
			w := &in[1+i].Shards[member]
			mine[i] = decoder.Shard{First: w.First, Out: w.N, W: w.Memory}
			if op.bias {
				if b := in[1+op.parts+i].Shards; b != nil {
					mine[i].B = b[member].Memory
				}
			}
		}
		shards = append(shards, mine)
	}
	return shards, nil
}

// doGPU is Do where the inputs are on a GPU.
func (op layerNorm) doGPU(in []G.Value) (G.Value, error) {
	const name = "LayerNorm"
	shapes := shapesOf(in)
	if _, err := op.checkShapes(shapes); err != nil {
		return nil, err
	}
	if err := checkDTypes(name, op.OperandName, in, func(int) tensor.Dtype { return tensor.Float32 }); err != nil {
		return nil, err
	}
	n := shapes[0][op.rank-1]
	return ongpu.Compute(&ongpu.Call{
		Op: "nn." + name, Node: op.gpu, Names: namesOf(len(in), op.OperandName), In: in, DType: tensor.Float32, Shape: shapes[0],
		Queue: func(w *ongpu.Work) error {
			norm := &decoder.Norm{Eps: op.eps}
			rest := w.In[1:]
			if op.gamma {
				norm.Gamma, rest = rest[0].Memory, rest[1:]
			}
			if op.beta {
				norm.Beta = rest[0].Memory
			}
			return w.Do(func(s *cuda.Stream) error {
				return w.Norm(s, shapes[0].TotalSize()/n, n, w.In[0].Memory, w.Out, norm)
			})
		},
	})
}

// OperandName makes it a [graph.Named].
func (op layerNorm) OperandName(i int) string {
	switch {
	case i == 0:
		return "x"
	case i == 1 && op.gamma:
		return "gamma"
	}
	return "beta"
}

// checkShapes checks what a run gives the node; n is the length of a row.
func (op layerNorm) checkShapes(in []tensor.Shape) (n int, err error) {
	const name = "LayerNorm"
	if len(in[0]) != op.rank {
		return 0, errorf(name, errs.ErrShape, "x has shape %v when run, want rank %d", in[0], op.rank)
	}
	n = in[0][op.rank-1]
	for i, s := range in[1:] {
		if !slices.Equal(s, tensor.Shape{n}) {
			return 0, errorf(name, errs.ErrShape, "%s has shape %v when run, want (%d)", op.OperandName(i+1), s, n)
		}
	}
	return n, nil
}

// doGPU is Do where the inputs are on a GPU. An id outside of the table makes a
// row of NaN: the host does not see the ids.
func (op embedding) doGPU(in []G.Value) (G.Value, error) {
	const name = "Embedding"
	if op.table == tensor.Float64 {
		return nil, errorf(name, errs.ErrUnsupported, "table of float64 on a GPU, want float32, Float16 or BFloat16")
	}
	if op.ids != tensor.Int32 {
		return nil, errorf(name, errs.ErrUnsupported, "ids of %v on a GPU, want int32", op.ids)
	}
	shapes := shapesOf(in)
	shape, err := op.shape(shapes)
	if err != nil {
		return nil, err
	}
	what := func(i int) string { return embeddingInputs[i] }
	if err := checkDTypes(name, what, in, func(i int) tensor.Dtype {
		return [...]tensor.Dtype{op.table, op.ids, tensor.Float32}[i]
	}); err != nil {
		return nil, err
	}
	return ongpu.Compute(&ongpu.Call{
		Op: "nn." + name, Node: op.gpu, Names: namesOf(len(in), what), In: in, DType: tensor.Float32, Shape: shape,
		Queue: func(w *ongpu.Work) error {
			o := &decoder.Gather{Rows: shape[0], N: shape[1], TableRows: shapes[0][0], Table: w.In[0].Memory, IDs: w.In[1].Memory, Y: w.Out}
			if op.residual {
				o.Residual = w.In[2].Memory
			}
			return w.Gather(o)
		},
	})
}
