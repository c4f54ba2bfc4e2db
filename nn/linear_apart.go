package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/tensor"
)

// Linear layers on several GPUs that each do their part without waiting for each other (Megatron-LM, arXiv:1909.08053, section 3):
// by output features each makes columns of y of all of x, and by input features each makes partial sums of y of its columns of x,
// which are added.

// byOutputs is layers whose weights are sharded by output features, of inputs that all GPUs have; nil where they are
// anything else.
func (op linear) byOutputs(in []ongpu.Layout, shapes []tensor.Shape, out tensor.Shape) *ongpu.Apart {
	if op.gate && op.parts == 1 {
		return nil
	}
	mine := make([]tensor.Shape, len(shapes)) // of each member
	for i, l := range in {
		mine[i] = shapes[i].Clone()
		var ok bool
		axis := 0
		switch {
		case op.isResidual(i):
			axis = 1
		case op.isBias(i) && l.Replicated: // they are taken in place
			n, even := l.Evenly(shapes[i][0])
			if !even || n%4 != 0 {
				return nil
			}
			mine[i][0] = n
			continue
		case !op.isWeight(i) && !op.isBias(i):
			if !l.Replicated {
				return nil
			}
			continue
		}
		if mine[i][axis], ok = l.Evenly(shapes[i][axis]); !ok || !l.Sharded || l.Axis != axis {
			return nil
		}
	}
	members := in[0].Members
	a := &ongpu.Apart{Layout: ongpu.Layout{Sharded: true, Axis: 1}, Joined: op.joined, Shape: out.Clone()}
	a.Shape[len(out)-1] /= members
	a.Scratch = func(_ int, d *decoder.Engine) (int, error) { return op.scratchOn(d, mine) }
	a.Queue = func(member int, w *ongpu.Work) error {
		for i := range w.In {
			if n := mine[i][0]; op.isBias(i) && in[i].Replicated {
				w.In[i].Offset += int64(member*n) * 4
				w.In[i].Len = n
			}
		}
		return w.Linear(op.on(w.In, mine, w.Out, w.Scratch))
	}
	return a
}

// byInputs is a layer whose weights are sharded by input features; nil for others. x may be sharded so, too; else each
// GPU takes its columns of it. What else there is the first one adds.
func (op linear) byInputs(in []ongpu.Layout, shapes []tensor.Shape, out tensor.Shape) (*ongpu.Apart, error) {
	if !in[1].Sharded || in[1].Axis != 1 {
		return nil, nil
	}
	name, what := op.title(), op.OperandName(1)
	switch {
	case op.parts > 1:
		return nil, errorf(name, errs.ErrUnsupported, "%s is sharded on axis 1, by input features, and there are %d layers: want one", what, op.parts)
	case op.norm:
		return nil, errorf(name, errs.ErrUnsupported, "%s is sharded on axis 1, by input features, and x is to be normalised: no GPU has all of it", what)
	case op.activation != attn.NoActivation:
		return nil, errorf(name, errs.ErrUnsupported, "%s is sharded on axis 1, by input features, and %v would be of partial sums", what, op.activation)
	}
	width, even := in[1].Evenly(shapes[1][1])
	if !even || width*int(op.w.Size())%16 != 0 {
		return nil, errorf(name, errs.ErrUnsupported, "%s of shape %v is sharded on axis 1 over %d GPUs, want a multiple of 16 bytes of a row for each", what, shapes[1], in[1].Members)
	}
	for i, l := range in[2:] {
		if l.Sharded && !op.isResidual(2+i) {
			return nil, errorf(name, errs.ErrUnsupported, "%s is sharded, and %s by input features, want it whole", op.OperandName(2+i), what)
		}
	}
	mine := slices.Clone(shapes)
	mine[0], mine[1] = tensor.Shape{shapes[0][0], width}, tensor.Shape{shapes[1][0], width}
	sliced := !in[0].Sharded
	a := &ongpu.Apart{Layout: ongpu.Layout{Replicated: true}, Shape: out, Sum: true, Replicate: make([]bool, len(in))}
	for i := range in {
		a.Replicate[i] = i != 1 && (i > 0 || sliced)
	}
	columns, rows := 0, shapes[0][0]
	if sliced && rows > 1 {
		columns = attn.Ceil(shapes[0][0]*width, 4) * 4
	}
	a.Scratch = func(_ int, d *decoder.Engine) (int, error) {
		n, err := op.scratchOn(d, mine)
		return columns + n, err
	}
	a.Queue = func(member int, w *ongpu.Work) error {
		switch {
		case sliced && rows == 1: // its columns lie together
			x := w.In[0].Memory
			x.Offset += int64(member*width) * 4
			x.Len = width
			w.In[0].Memory = x
		case sliced:
			x := w.Scratch
			x.Len = rows * width
			w.Scratch.Offset += int64(columns) * 4
			w.Scratch.Len -= columns
			move := &decoder.Move{Move: attn.Move{Dims: [3]int{1, 1, rows}, N: width,
				From: attn.Lattice{At: member * width, Steps: [3]int{0, 0, shapes[0][1]}}, To: attn.Lattice{Steps: [3]int{0, 0, width}}}, X: w.In[0].Memory, Y: x}
			if err := w.Move(move); err != nil {
				return err
			}
			w.In[0] = ongpu.Operand{Memory: x}
		}
		o := op.on(w.In, mine, w.Out, w.Scratch)
		if member > 0 { // the first one's part of the sum has them
			o.Residual, o.Parts[0].B = gpu.Memory{}, gpu.Memory{}
		}
		return w.Linear(o)
	}
	return a, nil
}

// What an input is.
func (op linear) isWeight(i int) bool { return i >= 1 && i <= op.parts }
func (op linear) isBias(i int) bool   { return op.bias && i > op.parts && i <= 2*op.parts }
func (op linear) isResidual(i int) bool {
	at := 1 + op.parts
	if op.bias {
		at += op.parts
	}
	return op.residual && i == at
}
