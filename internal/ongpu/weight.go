package ongpu

import (
	"errors"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Where several GPUs have a weight: shards of an axis, the whole on the first GPU, or the whole on each.
const (
	ByRows = iota
	ByColumns
	OnFirst
	OnAll
)

// UploadWeight copies a matrix of weights to the GPU. A tensor keeps its order. A matrix of 8 and fewer bits gets the order of the kernels, and
// each member's shard is packed as a matrix of its own. d has the memory.
func (g *GPU) UploadWeight(op string, v G.Value, to int) (on G.Value, d *Tensor, err error) {
	const name = "w"
	defer errs.RecoverTo(op, &err)
	if t, ok := v.(tensor.Tensor); ok {
		switch to {
		case OnFirst:
			d, err = g.Upload(t)
		case OnAll:
			d, err = g.UploadReplicated(t)
		default:
			d, err = g.UploadSharded(t, to)
		}
		return d.Value(), d, err
	}
	w, ok := v.(*operand.Weight)
	switch {
	case !ok:
		return nil, nil, errs.Errorf(op, errs.ErrUnsupported, "%s is a %T, want a tensor or a weight in host memory", name, v)
	case !weight.CanPack(w.Of):
		return nil, nil, errs.Errorf(op, errs.ErrUnsupported, "%s of %v on a GPU, want %s, float32, float16 or bfloat16: convert %s, or keep all inputs in host memory", name, w.Of, weight.Names(weight.CanPack), name)
	}
	m, err := w.Host(op, name)
	if err != nil {
		return nil, nil, err
	}
	if err := g.Enter(op); err != nil {
		return nil, nil, err
	}
	defer g.Group.Leave()
	rows, columns := w.Shape()[0], w.Shape()[1]
	switch {
	case to == OnAll:
		d, err = g.uploadPacked(op, &m, columns, g.newReplicated)
	case to == OnFirst || len(g.Members) == 1:
		d, err = g.uploadPacked(op, &m, columns, g.Alloc)
	default:
		d, err = g.uploadShards(op, &m, rows, columns, to)
	}
	if err != nil {
		return nil, nil, err
	}
	return operand.NewPacked(w.Of, d.Value(), rows, columns), d, nil
}

// packed returns a matrix in the order that kernels read, as a tensor of words.
func packed(op string, m *weight.Matrix, columns int) (*weight.Packed, *tensor.Dense, error) {
	p, err := weight.Packing(m, columns)
	if err != nil {
		return nil, nil, errs.Errorf(op, errs.ErrShape, "%v", err)
	}
	words := tensor.New(tensor.WithShape(p.Bytes/4), tensor.WithBacking(make([]int32, p.Bytes/4)))
	p.Pack(operand.RowMajorBytes(words), m)
	return &p, words, nil
}

// uploadPacked packs a whole matrix, and copies the result to memory that alloc returns.
func (g *GPU) uploadPacked(op string, m *weight.Matrix, columns int, alloc func(string, tensor.Dtype, tensor.Shape) (*Tensor, error)) (*Tensor, error) {
	p, words, err := packed(op, m, columns)
	if err != nil {
		return nil, err
	}
	d, err := g.upload(op, words, alloc)
	if err != nil {
		return nil, err
	}
	for i := range 1 + len(d.Replicas) {
		d.On(i).Packed = p
	}
	return d, nil
}

// uploadShards packs each member's rows or columns of a matrix, and copies them to the member. The GPU is entered.
func (g *GPU) uploadShards(op string, m *weight.Matrix, rows, columns, axis int) (d *Tensor, err error) {
	n := len(g.Members)
	d = g.TensorOf(Content{Shape: tensor.Shape{rows, columns}, DType: tensor.Int32, Axis: axis})
	defer func() {
		if err != nil {
			err = errors.Join(err, freeAll(d.Shards))
		}
	}()
	if d.Shape[axis] < n {
		return d, errs.Errorf(op, errs.ErrShape, "axis %d of shape %v for %d GPUs: each must have one element of it", axis, d.Shape, n)
	}
	for i, member := range g.Members {
		first, count := Share(d.Shape[axis], n, i)
		var mine weight.Matrix
		width := columns
		if axis == ByRows {
			mine = m.Rows(first, count, columns)
		} else if mine, err = m.Columns(first, count, columns); err != nil {
			return d, errs.Errorf(op, errs.ErrUnsupported, "w of shape %v on %d GPUs: %v: shard w on axis 0, or convert w to float16", d.Shape, n, err)
		} else {
			width = count
		}
		p, words, err := packed(op, &mine, width)
		if err != nil {
			return d, err
		}
		s, err := member.Alloc(op, tensor.Int32, words.Shape())
		if err != nil {
			return d, err
		}
		s.Packed = p
		d.Shards = append(d.Shards, s)
		data := operand.RowMajorBytes(words)
		if err := eachPiece((len(data)+pieceBytes-1)/pieceBytes, func(piece int) error {
			at := piece * pieceBytes
			return d.movePiece(i, at, min(pieceBytes, len(data)-at), data, true)
		}); err != nil {
			return d, Error(op, err)
		}
	}
	return d, nil
}
