package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// anyOnGPU reports whether an input of a node is on a GPU. Package ongpu refuses inputs in several places.
func anyOnGPU(in []G.Value) bool {
	return slices.ContainsFunc(in, func(v G.Value) bool {
		if w, ok := v.(*operand.Weight); ok {
			v = w.Elements
		}
		_, ok := ongpu.Of(v)
		return ok
	})
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

// gpuBytes returns memory without its type.
func gpuBytes(m gpu.Memory) gpu.Bytes { return gpu.Bytes{Buffer: m.Buffer, Offset: m.Offset} }

// tensorsOf returns the inputs as tensors on GPUs. A weight is its one tensor: packed weights have their scales there.
func tensorsOf(in []G.Value) []G.Value {
	for i, v := range in {
		if w, ok := v.(*operand.Weight); ok {
			in = slices.Clone(in)
			in[i] = w.Elements
		}
	}
	return in
}

func (op linear) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	return w.Linear(op.on(w.In, in, w.Out, w.Scratch))
}

func (op linear) place(c *ongpu.Call, shapes []tensor.Shape, shape tensor.Shape) {
	c.Scratch = func(d *layers.Engine) (int, error) { return op.scratchOn(d, packedOf(c.In), shapes) }
	c.Spread = func(in []ongpu.Operand, out gpu.Memory) (ongpu.Spread, error) {
		if err := op.checkOneGPU(); err != nil {
			return nil, err
		}
		shards, err := op.shards(in, shapes)
		if err != nil {
			return nil, err
		}
		return ongpu.LinearShards{Sharded: &layers.Sharded{Linear: *op.on(in, shapes, out, gpu.Memory{}), Shards: shards}}, nil
	}
	c.PerGPU = func(in []ongpu.Layout) (*ongpu.PerGPU, error) {
		if err := op.checkOneGPU(); err != nil {
			return nil, err
		}
		packed := func(member int) []ongpu.Operand { return packedOn(c.In, member) }
		if a := op.byOutputs(in, shapes, shape, packed); a != nil {
			return a, nil
		}
		return op.byInputs(in, shapes, shape, packed)
	}
}

// checkOneGPU returns an error if the layers are for one GPU alone.
func (op linear) checkOneGPU() error {
	if op.products == 0 {
		return nil
	}
	return errorf(op.title(), errs.ErrUnsupported, "option %s(%v) on several GPUs: leave the type out, or use one GPU", optionMixed, op.products)
}

// on returns the layers for the GPU's engine. Operands have no memory before the work is queued.
func (op linear) on(list []ongpu.Operand, shapes []tensor.Shape, out, scratch gpu.Memory) *layers.Linear {
	in, of := named(op, list), named(op, shapes)
	rows, width := of.x[0], of.x[1]
	o := &layers.Linear{Rows: rows, In: width, Activation: op.activation, Gate: op.gate, Early: true, RoundX: op.mixed, QuantiseX: op.quantised, Products: op.products, X: in.x.Memory, Scratch: scratch}
	at := 0
	for i := range in.w {
		p := layers.LinearPart{Out: of.w[i][0], W: in.w[i].Memory, Y: out, Packed: in.w[i].Packed}
		p.W.DType, _ = operand.StorageType(operand.WeightType(op.formats()[i])) // the type is needed where only shards have memory
		p.Y.Offset += int64(at) * 4
		p.Y.Len = rows * p.Out
		at += p.Y.Len
		o.Early = o.Early && in.w[i].Fixed
		if op.bias {
			p.B = in.b[i].Memory
		}
		o.Parts = append(o.Parts, p)
	}
	if op.gate {
		o.Parts = gateAndUp(o.Parts, width)
		o.Parts[0].Y = out
	}
	o.Residual = memoryOrNone(in.residual)
	if op.norm {
		o.Norm = &layers.Norm{Eps: op.eps, RMS: op.rms, UnitOffset: op.offset, Gamma: memoryOrNone(in.gamma), Beta: memoryOrNone(in.beta)}
		for _, x := range []*ongpu.Operand{in.gamma, in.beta} {
			o.Early = o.Early && (x == nil || x.Fixed)
		}
	}
	return o
}

// scratchOn returns the scratch memory of the layers on a GPU, in float32 elements. The operands have no memory.
func (op linear) scratchOn(d *layers.Engine, list []ongpu.Operand, shapes []tensor.Shape) (int, error) {
	return d.Scratch(op.on(list, shapes, gpu.Memory{}, gpu.Memory{}))
}

// packedOf returns operands that say how weights are packed, and have no memory.
func packedOf(in []G.Value) []ongpu.Operand { return packedOn(in, 0) }

// packedOn returns, for each input, how a member's shard is packed. An input in row-major order has the zero Operand.
func packedOn(in []G.Value, member int) []ongpu.Operand {
	list := make([]ongpu.Operand, len(in))
	for i, v := range in {
		d := ongpu.Must(v)
		if d.Shards != nil {
			d = d.Shards[member]
		}
		list[i].Packed = d.Packed
	}
	return list
}

// shards returns each GPU's shards of the weights and biases. Weights are sharded on axis 0, output features. Biases are sharded so
// too, or whole. All other inputs are whole. Anything else is an error.
func (op linear) shards(list []ongpu.Operand, shapes []tensor.Shape) (shards [][]layers.Shard, err error) {
	name, in, of, names := op.title(), named(op, list), named(op, shapes), op.names()
	if op.gate && op.parts == 1 {
		return nil, errorf(name, errs.ErrUnsupported, "%s has the weights of both layers and is sharded over several GPUs: pass two weights", names.w[0])
	}
	byRows := func(what string, x *ongpu.Operand, shape tensor.Shape) error {
		if x.Shards != nil && x.Axis != 0 {
			return errorf(name, errs.ErrUnsupported, "%s of shape %v is sharded on axis %d, want axis 0", what, shape, x.Axis)
		}
		return nil
	}
	for i := range in.w {
		if in.w[i].Shards == nil {
			return nil, errorf(name, errs.ErrUnsupported, "%s is whole, and another weight is sharded over several GPUs: shard all weights or none", names.w[i])
		}
		if err := byRows(names.w[i], &in.w[i], of.w[i]); err != nil {
			return nil, err
		}
	}
	for i := range in.b {
		if err := byRows(names.b[i], &in.b[i], of.b[i]); err != nil {
			return nil, err
		}
	}
	whole := layerOperands[ongpu.Operand]{x: in.x, residual: in.residual, gamma: in.gamma, beta: in.beta}
	called := layerOperands[string]{x: names.x, residual: names.residual, gamma: names.gamma, beta: names.beta}
	for i, x := range whole.list() {
		if x.Shards != nil {
			return nil, errorf(name, errs.ErrUnsupported, "%s is sharded over several GPUs, want a whole tensor", called.list()[i])
		}
	}
	for member := range in.w[0].Shards {
		mine := make([]layers.Shard, op.parts)
		for i := range mine {
			w := &in.w[i].Shards[member]
			mine[i] = layers.Shard{First: w.First, Out: w.N, W: w.Memory, Packed: w.Packed}
			if op.bias {
				if b := in.b[i].Shards; b != nil {
					mine[i].B = b[member].Memory
				}
			}
		}
		shards = append(shards, mine)
	}
	return shards, nil
}

// launch queues the gathering. An id outside of the table makes a row of NaN, since the host does not read ids.
func (op embedding) launch(w *ongpu.Work, shapes []tensor.Shape, shape tensor.Shape) error {
	in := operandsOf(op, w.In)
	o := &layers.Gather{Rows: shape[0], N: shape[1], TableRows: operandsOf(op, shapes).table[0], Table: in.table.Memory, Packed: in.table.Packed, IDs: in.ids.Memory, Y: w.Out}
	if in.residual != nil {
		o.Residual = in.residual.Memory
	}
	return w.Gather(o)
}
