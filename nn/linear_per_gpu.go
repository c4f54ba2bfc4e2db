package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/tensor"
)

// Linear layers on several GPUs that do not wait for each other (Megatron-LM, arXiv:1909.08053, section 3). By output features, each
// GPU computes columns of y from all of x. By input features, each GPU computes partial sums of y from columns of x, and the sums
// are added.

// byOutputs returns the work of layers whose weights are sharded by output features, with the other inputs on all GPUs; nil for
// another layout. packed describes a member's packed weights.
func (op linear) byOutputs(list []ongpu.Layout, shapes []tensor.Shape, out tensor.Shape, packed func(member int) []ongpu.Operand) *ongpu.PerGPU {
	if op.gate && op.parts == 1 {
		return nil
	}
	mine := make([]tensor.Shape, len(shapes)) // of each member
	for i, s := range shapes {
		mine[i] = s.Clone()
	}
	in, of := named(op, list), named(op, mine)
	sharded := func(l ongpu.Layout, shape tensor.Shape, axis int) (ok bool) {
		shape[axis], ok = l.Evenly(shape[axis])
		return ok && l.Sharded && l.Axis == axis
	}
	for i := range in.w {
		if !sharded(in.w[i], of.w[i], 0) {
			return nil
		}
	}
	for i, l := range in.b {
		if !l.Replicated {
			if !sharded(l, of.b[i], 0) {
				return nil
			}
			continue
		}
		n, even := l.Evenly(of.b[i][0]) // each GPU reads its part in place
		if !even || n%4 != 0 {
			return nil
		}
		of.b[i][0] = n
	}
	if in.residual != nil && !sharded(*in.residual, *of.residual, 1) || !in.x.Replicated {
		return nil
	}
	for _, l := range [...]*ongpu.Layout{in.gamma, in.beta} {
		if l != nil && !l.Replicated {
			return nil
		}
	}
	members := in.x.Members
	a := &ongpu.PerGPU{Layout: ongpu.Layout{Sharded: true, Axis: 1}, Joined: op.joined, Shape: out.Clone()}
	a.Shape[len(out)-1] /= members
	a.Scratch = func(member int, d *layers.Engine) (int, error) {
		return op.scratchOn(d, packed(member), mine)
	}
	a.Queue = func(member int, w *ongpu.Work) error {
		own := named(op, w.In).b
		for i := range own {
			if n := of.b[i][0]; in.b[i].Replicated {
				own[i].Offset += int64(member*n) * 4
				own[i].Len = n
			}
		}
		return w.Linear(op.on(w.In, mine, w.Out, w.Scratch))
	}
	return a
}

// byInputs returns the work of a layer whose weights are sharded by input features; nil for another layout. x may be sharded by
// columns too; otherwise each GPU reads its columns of x. GPU 0 adds bias and residual.
func (op linear) byInputs(list []ongpu.Layout, shapes []tensor.Shape, out tensor.Shape, packed func(member int) []ongpu.Operand) (*ongpu.PerGPU, error) {
	in, of, names := named(op, list), named(op, shapes), op.names()
	w := in.w[0]
	if !w.Sharded || w.Axis != 1 {
		return nil, nil
	}
	name, what := op.title(), names.w[0]
	switch {
	case op.parts > 1:
		return nil, errorf(name, errs.ErrUnsupported, "%s is sharded on axis 1, by input features, want one layer, not %d", what, op.parts)
	case op.norm:
		return nil, errorf(name, errs.ErrUnsupported, "%s is sharded on axis 1, by input features, and no GPU has all of x for a norm: normalise x before", what)
	case op.activation != attn.NoActivation:
		return nil, errorf(name, errs.ErrUnsupported, "%s is sharded on axis 1, by input features, and %v would be of partial sums: apply the activation after the layer", what, op.activation)
	}
	width, even := w.Evenly(of.w[0][1])
	if each := op.w.Block(); !even || width%each != 0 || width/each*op.w.Bytes()%16 != 0 && each == 1 {
		return nil, errorf(name, errs.ErrUnsupported, "%s of shape %v is sharded on axis 1 over %d GPUs, want a multiple of 16 bytes of a row for each", what, of.w[0], w.Members)
	}
	if op.bias && in.b[0].Sharded {
		return nil, errorf(name, errs.ErrUnsupported, "%s is sharded, and %s is sharded by input features, want %s whole", names.b[0], what, names.b[0])
	}
	mine := slices.Clone(shapes)
	mineOf := named(op, mine)
	mineOf.w[0] = tensor.Shape{of.w[0][0], width}
	mineOf.x = tensor.Shape{of.x[0], width}
	mine = mineOf.list()
	sliced := !in.x.Sharded
	a := &ongpu.PerGPU{Layout: ongpu.Layout{Replicated: true}, Shape: out, Sum: true}
	replicate := layerOperands[bool]{x: sliced, w: []bool{false}, b: slices.Repeat([]bool{true}, len(in.b))}
	if yes := true; op.residual {
		replicate.residual = &yes
	}
	a.Replicate = replicate.list()
	columns, rows := 0, of.x[0]
	if sliced && rows > 1 {
		columns = aligned(rows * width)
	}
	a.Scratch = func(member int, d *layers.Engine) (int, error) {
		n, err := op.scratchOn(d, packed(member), mine)
		return columns + n, err
	}
	a.Queue = func(member int, w *ongpu.Work) error {
		own := named(op, w.In)
		switch {
		case sliced && rows == 1: // the columns of one row are contiguous
			own.x.Offset += int64(member*width) * 4
			own.x.Len = width
		case sliced:
			x := w.Scratch
			x.Len = rows * width
			w.Scratch.Offset += int64(columns) * 4
			w.Scratch.Len -= columns
			move := &layers.Move{Move: attn.Move{Dims: [3]int{1, 1, rows}, N: width,
				From: attn.Lattice{At: member * width, Steps: [3]int{0, 0, of.x[1]}}, To: attn.Lattice{Steps: [3]int{0, 0, width}}}, X: own.x.Memory, Y: x}
			if err := w.Move(move); err != nil {
				return err
			}
			own.x = ongpu.Operand{Memory: x}
		}
		o := op.on(own.list(), mine, w.Out, w.Scratch)
		if member > 0 { // GPU 0 adds both
			o.Residual, o.Parts[0].B = gpu.Memory{}, gpu.Memory{}
		}
		return w.Linear(o)
	}
	return a, nil
}
