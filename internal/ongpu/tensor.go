package ongpu

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Tensor is a row-major tensor in the memory of a [GPU]. Package device documents it for users.
type Tensor struct {
	Public G.Value // the tensor of package device that has this one; nil: none
	mark   nocopy.Mark
	GPU    *GPU
	Content
	LSE    *Tensor // of an attention's output, for the node of the log-sum-exp
	broken error   // why the tensor has no value

	Entropy, Mass *Tensor // as LSE
}

// Content is the data of a tensor.
type Content struct {
	Memory     *queue.Memory
	generation uint64  // generation of memory
	offset     int64   // bytes; not 0 in a part of a node's value
	whole      *Tensor // the tensor of which this is a part; nil: none
	Shape      tensor.Shape
	DType      tensor.Dtype
	Axis       int            // the sharded axis
	Shards     []*Tensor      // one on each member; nil: the tensor is whole
	Replicas   []*Tensor      // copies on the members after the first; nil: the first alone has the tensor
	Made       bool           // nodes made the shards: a reader of the whole gathers them
	Packed     *weight.Packed // the tensor is 32-bit words of weights; nil: elements in row-major order
	Joined     bool           // shards have consecutive parts, each divided: only views of the tensor are used
}

// deviceType reports whether a GPU's memory can have elements of type t.
func deviceType(t tensor.Dtype) bool {
	return t == tensor.Float32 || t == operand.Float16 || t == operand.BFloat16 || t == tensor.Int32
}

// CheckShape checks the type and shape of a new tensor on a GPU.
func CheckShape(op string, t tensor.Dtype, shape tensor.Shape) error {
	if !deviceType(t) {
		return errs.Errorf(op, errs.ErrDType, "x is %v; on a GPU it must be float32, Float16, BFloat16 or int32", t)
	}
	for axis, n := range shape {
		if n < 1 {
			return errs.Errorf(op, errs.ErrShape, "x has size %d on axis %d, shape %v", n, axis, shape)
		}
	}
	if _, ok := operand.Product(append([]int{int(t.Size())}, shape...)...); !ok {
		return errs.Errorf(op, errs.ErrShape, "x of shape %v has more bytes than an address", shape)
	}
	return nil
}

// NewTensor allocates a tensor with arbitrary content. Errors: ErrDType, ErrShape, ErrOutOfMemory, ErrClosed.
func (g *GPU) NewTensor(t tensor.Dtype, shape ...int) (*Tensor, error) {
	const op = "GPU.NewTensor"
	if err := CheckShape(op, t, shape); err != nil {
		return nil, err
	}
	if err := g.Enter(op); err != nil {
		return nil, err
	}
	defer g.Group.Leave()
	return g.Alloc(op, t, shape)
}

// Alloc is NewTensor after the checks, on an entered GPU.
func (g *GPU) Alloc(op string, t tensor.Dtype, shape tensor.Shape) (d *Tensor, err error) {
	err = g.Queue.Submit(func(sub *queue.Submission) error {
		d, err = g.Wrap(sub, t, shape, func(n int64) (*queue.Memory, error) { return sub.Alloc(n) })
		return err
	})
	if err != nil {
		return nil, Error(op, err)
	}
	return d, nil
}

// NextValue returns a new value of a node, in the memory of its slot.
func (g *GPU) NextValue(sub *queue.Submission, slot *queue.Slot, t tensor.Dtype, shape tensor.Shape, inputs ...*Tensor) (*Tensor, error) {
	return g.Wrap(sub, t, shape, func(n int64) (*queue.Memory, error) {
		var used [4]*queue.Memory
		list := used[:0]
		for _, in := range inputs {
			list = append(list, in.Memory)
		}
		return sub.Next(slot, n, list...)
	})
}

func (g *GPU) Wrap(sub *queue.Submission, t tensor.Dtype, shape tensor.Shape, take func(int64) (*queue.Memory, error)) (*Tensor, error) {
	m, err := take(int64(shape.TotalSize()) * int64(t.Size()))
	if err != nil {
		return nil, err
	}
	return g.TensorOf(Content{Memory: m, generation: sub.Generation(m), Shape: shape.Clone(), DType: t}), nil
}

// Upload copies a tensor to the GPU. Upload returns after x has been read; the copy itself is queued. Errors:
// ErrUnsupported if x is not a *tensor.Dense that Go can read, ErrDType, ErrShape, ErrOutOfMemory, ErrClosed.
func (g *GPU) Upload(x tensor.Tensor) (d *Tensor, err error) {
	const op = "GPU.Upload"
	defer errs.RecoverTo(op, &err)
	return g.upload(op, x, g.Alloc)
}

// upload copies a tensor to memory that make allocates.
func (g *GPU) upload(op string, x tensor.Tensor, make func(string, tensor.Dtype, tensor.Shape) (*Tensor, error)) (d *Tensor, err error) {
	t, err := Dense(op, "x", x)
	if err != nil {
		return nil, err
	}
	if err := CheckShape(op, t.Dtype(), t.Shape()); err != nil {
		return nil, err
	}
	if err := g.Enter(op); err != nil {
		return nil, err
	}
	defer g.Group.Leave()
	if d, err = make(op, t.Dtype(), t.Shape()); err != nil {
		return nil, err
	}
	if err := d.Fill(operand.RowMajorBytes(t)); err != nil {
		return nil, errors.Join(Error(op, err), d.free())
	}
	return d, nil
}

// pieceBytes is the size of one copy: pinned memory is scarce.
const pieceBytes = 4 << 20

// uploaders is the number of goroutines that copy a tensor's pieces to pinned memory: one reads some 8 GB/s of a
// file's pages, and a GPU takes several times as much.
const uploaders = 4

// Fill queues the copy of src to the tensor. The GPU is entered.
func (d *Tensor) Fill(src []byte) error {
	defer runtime.KeepAlive(d)
	if d.Shards != nil {
		return d.move(src, true)
	}
	return eachPiece((len(src)+pieceBytes-1)/pieceBytes, func(i int) error { return d.fillFrom(src, i*pieceBytes) })
}

// eachPiece calls f for each piece, for several at once, and returns one of the errors.
func eachPiece(pieces int, f func(i int) error) error {
	if pieces == 1 {
		return f(0)
	}
	var next atomic.Int64
	work := func() (err error) {
		defer errs.RecoverTo("upload", &err)
		for err == nil {
			i := int(next.Add(1)) - 1
			if i >= pieces {
				return nil
			}
			err = f(i)
		}
		next.Store(int64(pieces)) // stops the others
		return err
	}
	helpers := min(uploaders, pieces, runtime.GOMAXPROCS(0)) - 1
	done := make(chan error)
	for range helpers {
		go func() { done <- work() }()
	}
	err := work()
	for range helpers {
		if other := <-done; err == nil {
			err = other
		}
	}
	return err
}

// fillFrom queues the copy of the piece that begins at byte `at`.
func (d *Tensor) fillFrom(src []byte, at int) error {
	q := d.GPU.Queue
	piece := src[at:min(at+pieceBytes, len(src))]
	p, err := q.TakePinned(len(piece))
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	copy(p.Bytes, piece)
	return d.through(p, func(sub *queue.Submission, b *cuda.Buffer) error {
		if err := sub.Upload(b, d.offset+int64(at), p, 0, len(piece)); err != nil {
			return err
		}
		return d.eachReplica(sub, func(b *cuda.Buffer, offset int64) error {
			return sub.Upload(b, offset+int64(at), p, 0, len(piece))
		})
	})
}

// Download waits for earlier work, and copies the tensor to the host. Errors: ErrState for an overwritten tensor,
// ErrClosed for a freed tensor, and failures of earlier queued work.
func (d *Tensor) Download() (t *tensor.Dense, err error) {
	const op = "Tensor.Download"
	defer errs.RecoverTo(op, &err)
	if err := d.Enter(op); err != nil {
		return nil, err
	}
	defer d.GPU.Group.Leave()
	t = dense.New(d.DType, d.Shape...)
	if err := d.Read(operand.RowMajorBytes(t)); err != nil {
		return nil, TensorError(op, "the tensor", err)
	}
	return t, nil
}

// QueueDownload queues the copy of Download. wait waits for the copy, and not for work that is queued later; it must be
// called once. Errors: those of Download, and ErrUnsupported for a tensor that several GPUs share or that is larger than
// a block of pinned memory.
func (d *Tensor) QueueDownload() (wait func() (*tensor.Dense, error), err error) {
	const op = "Tensor.QueueDownload"
	defer errs.RecoverTo(op, &err)
	if err := d.Enter(op); err != nil {
		return nil, err
	}
	defer d.GPU.Group.Leave()
	t := dense.New(d.DType, d.Shape...)
	to, q := operand.RowMajorBytes(t), d.GPU.Queue
	switch {
	case d.Shards != nil:
		return nil, errs.Errorf(op, errs.ErrUnsupported, "%d GPUs share the tensor: use Download", len(d.Shards))
	case len(to) > pieceBytes:
		return nil, errs.Errorf(op, errs.ErrUnsupported, "the tensor has %d bytes, more than %d: use Download", len(to), pieceBytes)
	}
	p, err := q.TakePinned(len(to))
	if err != nil {
		return nil, TensorError(op, "the tensor", err)
	}
	if err := d.through(p, func(sub *queue.Submission, b *cuda.Buffer) error {
		return sub.Download(p, 0, b, d.offset, len(to))
	}); err != nil {
		q.GivePinned(p)
		return nil, TensorError(op, "the tensor", err)
	}
	return func() (_ *tensor.Dense, err error) {
		defer errs.RecoverTo(op, &err)
		if err := d.GPU.Enter(op); err != nil {
			return nil, err
		}
		defer d.GPU.Group.Leave()
		defer q.GivePinned(p)
		if err := q.Wait(p); err != nil {
			return nil, TensorError(op, "the tensor", err)
		}
		copy(to, p.Bytes)
		return t, nil
	}, nil
}

// Read copies the tensor to dst. The GPU is entered.
func (d *Tensor) Read(dst []byte) error {
	defer runtime.KeepAlive(d)
	if d.Shards != nil {
		return d.move(dst, false)
	}
	q := d.GPU.Queue
	for at := 0; at < len(dst); at += pieceBytes {
		piece := dst[at:min(at+pieceBytes, len(dst))]
		p, err := q.TakePinned(len(piece))
		if err != nil {
			return err
		}
		err = d.through(p, func(sub *queue.Submission, b *cuda.Buffer) error {
			return sub.Download(p, 0, b, d.offset+int64(at), len(piece))
		})
		if err == nil {
			err = q.Wait(p)
		}
		if err == nil {
			copy(piece, p.Bytes)
		}
		q.GivePinned(p)
		if err != nil {
			return err
		}
	}
	return nil
}

// through queues a copy between the tensor and p. The GPU is entered.
func (d *Tensor) through(p *queue.Pinned, copy func(*queue.Submission, *cuda.Buffer) error) error {
	return d.GPU.Queue.Submit(func(sub *queue.Submission) error {
		b, err := sub.Use(d.Memory, d.generation)
		if err != nil {
			return err
		}
		if err := copy(sub, b); err != nil {
			return err
		}
		return sub.Mark(p)
	})
}

// Free frees the memory. Earlier queued work may still use the memory. Errors: ErrClosed if the tensor was freed
// before or the GPU is closed, ErrState for the old value of a node that has run again.
func (d *Tensor) Free() error {
	const op = "Tensor.Free"
	if err := d.enterFor(op, (*GPU).enterToFree); err != nil {
		return err
	}
	defer d.GPU.Group.Leave()
	if d.whole != nil {
		return errs.Errorf(op, errs.ErrUnsupported, "the tensor is a part of another")
	}
	if err := d.free(); err != nil {
		return TensorError(op, "the tensor", err)
	}
	return nil
}

func (d *Tensor) free() error {
	if d.Shards != nil {
		return freeAll(d.Shards)
	}
	err := d.GPU.Queue.Submit(func(sub *queue.Submission) error {
		if _, err := sub.Use(d.Memory, d.generation); err != nil {
			return err
		}
		return sub.Free(d.Memory)
	})
	return errors.Join(err, freeAll(d.Replicas))
}

// TensorOf returns a new tensor on the GPU.
func (g *GPU) TensorOf(c Content) *Tensor {
	d := g.fresh()
	d.GPU, d.Content = g, c
	d.mark.Set()
	return d
}

// Value returns the tensor as a value of nodes: the public tensor that has d.
func (d *Tensor) Value() G.Value {
	if d == nil {
		return nil
	}
	return d.Public
}

// problem returns why d is no tensor that a GPU has made, or "".
func (d *Tensor) problem(name string) string {
	const by = "a GPU"
	if d == nil {
		return nocopy.Unmade(name, by)
	}
	return d.mark.Problem(name, by)
}

// errTensorCopied is returned for a copy of a tensor struct.
var errTensorCopied = errors.New("is a copy of a tensor: use the pointer that the GPU gave")

// Enter checks that a GPU made d, and keeps the GPU open until queue.Leave.
func (d *Tensor) Enter(op string) error { return d.enterFor(op, (*GPU).Enter) }

func (d *Tensor) enterFor(op string, enter func(*GPU, string) error) error {
	if problem := d.problem("the tensor"); problem != "" {
		return errs.Errorf(op, errs.ErrState, "%s", problem)
	}
	if d.broken != nil {
		return TensorError(op, "the tensor", d.broken)
	}
	return enter(d.GPU, op)
}

// Use returns the tensor's memory. The caller keeps d alive until its work is queued.
func (d *Tensor) Use(sub *queue.Submission) (Mem, error) {
	if d.mark.Problem("", "") != "" {
		return Mem{}, errTensorCopied
	}
	if d.broken != nil {
		return Mem{}, d.broken
	}
	if err := d.NotWhole(); err != nil {
		return Mem{}, err
	}
	b, err := sub.Use(d.Memory, d.generation)
	if err != nil {
		return Mem{}, err
	}
	t, _ := operand.StorageType(d.DType)
	return Mem{Buffer: b, Offset: d.offset, DType: t, Len: d.Size()}, nil
}

// Size returns the number of elements.
func (d *Tensor) Size() int {
	if d == nil || d.GPU == nil {
		return 0
	}
	return d.Shape.TotalSize()
}

// Clone copies the tensor on its GPU; the result is a *device.Tensor with memory of its own. Gorgonia calls Clone to
// keep values. Errors: those of Download, and ErrOutOfMemory.
func (d *Tensor) Clone() (*Tensor, error) {
	const op = "Tensor.Clone"
	if err := d.Enter(op); err != nil {
		return nil, err
	}
	defer d.GPU.Group.Leave()
	if err := d.NotWhole(); err != nil {
		return nil, TensorError(op, "the tensor", err)
	}
	newTensor := d.GPU.Alloc
	if d.Replicas != nil {
		newTensor = d.GPU.newReplicated
	}
	c, err := newTensor(op, d.DType, d.Shape)
	if err != nil {
		return nil, err
	}
	if err := c.copyFrom(d); err != nil {
		return nil, errors.Join(TensorError(op, "the tensor", err), c.free())
	}
	return c, nil
}

// Rows returns the part [from, to) of the tensor's first axis, in the same memory. The part can't be freed by itself,
// and is ErrClosed after the tensor is freed. Errors: ErrShape, ErrClosed.
func (d *Tensor) Rows(from, to int) (*Tensor, error) {
	const op = "Tensor.Rows"
	if err := d.Enter(op); err != nil {
		return nil, err
	}
	d.GPU.Group.Leave()
	if err := d.NotWhole(); err != nil {
		return nil, TensorError(op, "the tensor", err)
	}
	if len(d.Shape) == 0 || from < 0 || to <= from || to > d.Shape[0] {
		return nil, errs.Errorf(op, errs.ErrShape, "rows [%d, %d) of shape %v", from, to, d.Shape)
	}
	shape := d.Shape.Clone()
	shape[0] = to - from
	return d.part(from*(d.Size()/d.Shape[0]), shape), nil
}

// part returns the elements from an index on, in the same memory.
func (d *Tensor) part(from int, shape tensor.Shape) *Tensor {
	part := d.GPU.TensorOf(Content{Memory: d.Memory, generation: d.generation, offset: d.offset + int64(from)*int64(d.DType.Size()),
		whole: d, Shape: shape, DType: d.DType})
	for _, r := range d.Replicas {
		part.Replicas = append(part.Replicas, r.part(from, shape))
	}
	return part
}

// setType makes d, and what it has of other members, a tensor of another type.
func (d *Tensor) setType(t tensor.Dtype) {
	d.DType = t
	for _, r := range d.Replicas {
		r.setType(t)
	}
}

// partPerGPU returns a view of each member's shard of a tensor that nodes sharded.
func (d *Tensor) partPerGPU(from int, shape tensor.Shape) (*Tensor, error) {
	n, size := len(d.Shards), shape.TotalSize()
	axis := -1
	if d.Joined {
		axis = len(shape) - 1
	} else {
		row := 1 // elements that stay on one member
		for _, s := range d.Shape[d.Axis:] {
			row *= s
		}
		outer := 1
		for i, s := range shape {
			if outer*row == size && s%n == 0 && from%row == 0 {
				axis = i
				break
			}
			outer *= s
		}
	}
	if axis < 0 || shape[axis]%n != 0 || from%n != 0 {
		return nil, fmt.Errorf("shape %v of %v, which is %w", shape, d.Shape, d.NotWhole())
	}
	part := d.GPU.TensorOf(Content{whole: d, Shape: shape.Clone(), DType: d.DType, Axis: axis, Made: true})
	of := shape.Clone()
	of[axis] /= n
	for _, s := range d.Shards {
		part.Shards = append(part.Shards, s.part(from/n, of))
	}
	return part, nil
}

// CopyFrom copies another tensor of the same shape and element type on the same GPU, or a *tensor.Dense in host
// memory. CopyFrom returns after host memory has been read; the copy is queued. Gorgonia calls CopyFrom to keep
// values.
func (d *Tensor) CopyFrom(src any) error {
	const op = "Tensor.CopyFrom"
	if err := d.Enter(op); err != nil {
		return err
	}
	defer d.GPU.Group.Leave()
	if t, ok := src.(*tensor.Dense); ok {
		return d.write(op, t)
	}
	s, ok := Of(src)
	switch {
	case !ok || s == nil || s.GPU == nil:
		return errs.Errorf(op, errs.ErrUnsupported, "from a %T to a tensor on %v", src, d.GPU)
	case s.problem("") != "":
		return errs.Errorf(op, errs.ErrState, "%s", s.problem("the source"))
	case s.GPU != d.GPU:
		return errs.Errorf(op, errs.ErrUnsupported, "from %s to %s", s.GPU, OtherName(d.GPU, s.GPU))
	case s.DType != d.DType:
		return errs.Errorf(op, errs.ErrDType, "from %v to %v", s.DType, d.DType)
	case !slices.Equal(s.Shape, d.Shape):
		return errs.Errorf(op, errs.ErrShape, "from %v to %v", s.Shape, d.Shape)
	case s.Memory != nil && s.Memory == d.Memory && s.offset != d.offset && s.offset < d.offset+d.Bytes() && d.offset < s.offset+s.Bytes():
		return errs.Errorf(op, errs.ErrUnsupported, "the source and the tensor are rows of one tensor, and some rows are in both") // a driver copies overlapping ranges in any order
	}
	if err := d.copyFrom(s); err != nil {
		return TensorError(op, "the tensor", err)
	}
	return nil
}

// write is CopyFrom for a tensor of the host.
func (d *Tensor) write(op string, t *tensor.Dense) error {
	t, err := Dense(op, "the source", t)
	switch {
	case err != nil:
		return err
	case t.Dtype() != d.DType:
		return errs.Errorf(op, errs.ErrDType, "from %v to %v", t.Dtype(), d.DType)
	case !slices.Equal(t.Shape(), d.Shape):
		return errs.Errorf(op, errs.ErrShape, "from %v to %v", t.Shape(), d.Shape)
	}
	if err := d.Fill(operand.RowMajorBytes(t)); err != nil {
		return TensorError(op, "the tensor", err)
	}
	return nil
}

func (d *Tensor) copyFrom(src *Tensor) error {
	defer runtime.KeepAlive(src)
	defer runtime.KeepAlive(d)
	return d.GPU.Queue.Submit(func(sub *queue.Submission) error {
		from, err := src.Use(sub)
		if err != nil {
			return err
		}
		to, err := d.Use(sub)
		if err != nil || to == from {
			return err
		}
		return sub.Do(func(s *cuda.Stream) error {
			if err := s.Copy(to.Buffer, to.Offset, from.Buffer, from.Offset, d.Bytes()); err != nil {
				return err
			}
			return d.eachReplica(sub, func(b *cuda.Buffer, offset int64) error {
				return s.Copy(b, offset, from.Buffer, from.Offset, d.Bytes())
			})
		})
	})
}

func (d *Tensor) Bytes() int64 {
	n := d.Size()
	if n == 0 { // a tensor of no GPU has no element type
		return 0
	}
	return int64(n) * int64(d.DType.Size())
}

// Zero sets all elements to 0. After a failure the tensor is broken.
func (d *Tensor) Zero() {
	const op = "Tensor.ZeroValue"
	if err := d.Enter(op); err != nil {
		return
	}
	defer d.GPU.Group.Leave()
	defer runtime.KeepAlive(d)
	if err := d.NotWhole(); err != nil {
		d.broken = err
		return
	}
	d.broken = d.GPU.Queue.Submit(func(sub *queue.Submission) error {
		m, err := d.Use(sub)
		if err != nil {
			return err
		}
		return sub.Do(func(s *cuda.Stream) error {
			if err := s.Set(m.Buffer, m.Offset, 0, d.Bytes()); err != nil {
				return err
			}
			return d.eachReplica(sub, func(b *cuda.Buffer, offset int64) error { return s.Set(b, offset, 0, d.Bytes()) })
		})
	})
	return
}

// UseAs is Use for an operand with a name.
func (d *Tensor) UseAs(sub *queue.Submission, name string) (Mem, error) {
	m, err := d.Use(sub)
	if err != nil {
		err = InOperand(name, err)
	}
	return m, err
}

func (d *Tensor) Operand(name string) operand.Operand { return operand.New(name, d.Shape, d.DType) }
