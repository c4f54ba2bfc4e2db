package ongpu

import (
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// UploadWeight copies a matrix of weights to the GPU. A tensor keeps its order. A matrix of 8 or 4 bits gets the order of the kernels. d has
// the memory.
func (g *GPU) UploadWeight(v G.Value) (on G.Value, d *Tensor, err error) {
	const op, name = "GPU.UploadWeight", "w"
	defer errs.RecoverTo(op, &err)
	if t, ok := v.(tensor.Tensor); ok {
		d, err = g.upload(op, t, g.Alloc)
		return d.Value(), d, err
	}
	w, ok := v.(*operand.Weight)
	if !ok {
		return nil, nil, errs.Errorf(op, errs.ErrUnsupported, "%s is a %T, want a tensor or a weight in host memory", name, v)
	}
	if !weight.CanPack(w.Of) {
		return nil, nil, errs.Errorf(op, errs.ErrUnsupported, "%s of %v on a GPU, want %s, float32, float16 or bfloat16: convert %s, or keep all inputs in host memory", name, w.Of, weight.Names(weight.CanPack), name)
	}
	if err := g.Check(op); err != nil {
		return nil, nil, err
	}
	if n := len(g.Members); n > 1 {
		return nil, nil, errs.Errorf(op, errs.ErrUnsupported, "%s of %v on %d GPUs that were opened as one: open one GPU, or convert %s to float16", name, w.Of, n, name)
	}
	m, err := w.Host(op, name)
	if err != nil {
		return nil, nil, err
	}
	shape := w.Shape()
	p, err := weight.Packing(&m, shape[1])
	if err != nil {
		return nil, nil, errs.Errorf(op, errs.ErrShape, "%v", err)
	}
	words := tensor.New(tensor.WithShape(p.Bytes/4), tensor.WithBacking(make([]int32, p.Bytes/4)))
	p.Pack(operand.RowMajorBytes(words), &m)
	if d, err = g.upload(op, words, g.Alloc); err != nil {
		return nil, nil, err
	}
	d.Packed = &p
	return operand.NewPacked(w.Of, d.Value(), shape[0], shape[1]), d, nil
}
