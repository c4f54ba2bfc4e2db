package leanattention

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/nocopy"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// DeviceTensor is a row-major tensor in the memory of a [GPU], of float32,
// [Float16], [BFloat16] or int32. It is a gorgonia.Value: it can be the value of
// an input, through gorgonia.Let, and it travels from node to node. Gorgonia's
// own ops refuse it, since the host cannot read it; [ToDevice] and [ToHost] are
// the edges of the part of a graph that is on a GPU. (gorgonia.WithNaNWatch and
// WithInfWatch know no such values, and end the process.)
//
// What is asked of it is queued: only a download waits. A tensor that a node
// made is overwritten when the node runs again, since the node keeps its memory
// from run to run. The old value is then [ErrState]; take a Clone of what is to
// stay. gorgonia.Read takes one by itself.
//
// Tensors from [GPU.Upload], [GPU.NewTensor] and Clone have memory of their own
// until Free, or until nothing refers to them.
//
// A DeviceTensor is used by its pointer. A copy of a DeviceTensor is [ErrState] wherever it is used.
type DeviceTensor struct {
	mark       nocopy.Mark
	gpu        *GPU
	memory     *device.Memory
	generation uint64        // of memory
	offset     int64         // bytes; not 0 in a part of what a node made
	whole      *DeviceTensor // that this is a part of; nil: of none
	shape      tensor.Shape
	dtype      tensor.Dtype
	axis       int             // that is sharded
	shards     []*DeviceTensor // one on each member; nil: it is whole
	replicas   []*DeviceTensor // the same on each member but the first; nil: it is on the first alone
	made       bool            // shards that nodes made: who needs it whole puts them together
	joined     bool            // shards are parts one behind the other, each dealt out: only views of it are used
	lse        *DeviceTensor   // of an attention's output, on its way to the node of the log-sum-exp
	broken     error           // why there is no value
}

// deviceType says whether a GPU's memory may have elements of type t.
func deviceType(t tensor.Dtype) bool {
	return t == tensor.Float32 || t == Float16 || t == BFloat16 || t == tensor.Int32
}

// checkDeviceShape checks what is to be a tensor on a GPU.
func checkDeviceShape(op string, t tensor.Dtype, shape tensor.Shape) error {
	if !deviceType(t) {
		return errs.Errorf(op, ErrDType, "x is %v; on a GPU it must be float32, Float16, BFloat16 or int32", t)
	}
	for axis, n := range shape {
		if n < 1 {
			return errs.Errorf(op, ErrShape, "x has size %d on axis %d, shape %v", n, axis, shape)
		}
	}
	if _, ok := product(append([]int{int(t.Size())}, shape...)...); !ok {
		return errs.Errorf(op, ErrShape, "x of shape %v has more bytes than an address", shape)
	}
	return nil
}

// NewTensor takes memory for a tensor. Its content is arbitrary. Errors:
// [ErrDType], [ErrShape], [ErrOutOfMemory], [ErrClosed].
func (g *GPU) NewTensor(t tensor.Dtype, shape ...int) (*DeviceTensor, error) {
	const op = "GPU.NewTensor"
	if err := checkDeviceShape(op, t, shape); err != nil {
		return nil, err
	}
	if err := g.enter(op); err != nil {
		return nil, err
	}
	defer g.group.Leave()
	return g.newTensor(op, t, shape)
}

// newTensor is NewTensor of what is checked, on a GPU that is entered.
func (g *GPU) newTensor(op string, t tensor.Dtype, shape tensor.Shape) (d *DeviceTensor, err error) {
	err = g.queue.Submit(func(sub *device.Submission) error {
		d, err = g.wrap(sub, t, shape, func(n int64) (*device.Memory, error) { return sub.Alloc(n) })
		return err
	})
	if err != nil {
		return nil, gpuError(op, err)
	}
	return d, nil
}

// nextValue is a new value of a node, in the memory of its slot.
func (g *GPU) nextValue(sub *device.Submission, slot *device.Slot, t tensor.Dtype, shape tensor.Shape, inputs ...*DeviceTensor) (*DeviceTensor, error) {
	return g.wrap(sub, t, shape, func(n int64) (*device.Memory, error) {
		var used [4]*device.Memory
		list := used[:0]
		for _, in := range inputs {
			list = append(list, in.memory)
		}
		return sub.Next(slot, n, list...)
	})
}

func (g *GPU) wrap(sub *device.Submission, t tensor.Dtype, shape tensor.Shape, take func(int64) (*device.Memory, error)) (*DeviceTensor, error) {
	m, err := take(int64(shape.TotalSize()) * int64(t.Size()))
	if err != nil {
		return nil, err
	}
	return (&DeviceTensor{gpu: g, memory: m, generation: sub.Generation(m), shape: shape.Clone(), dtype: t}).set(), nil
}

// Upload copies a tensor to the GPU. It returns when x has been read; the copy
// itself is queued. Errors: [ErrUnsupported] for what is no *tensor.Dense that Go
// can read, [ErrDType], [ErrShape], [ErrOutOfMemory], [ErrClosed].
func (g *GPU) Upload(x tensor.Tensor) (d *DeviceTensor, err error) {
	const op = "GPU.Upload"
	defer errs.RecoverTo(op, &err)
	return g.upload(op, x, g.newTensor)
}

// upload copies a tensor to what make takes the memory for.
func (g *GPU) upload(op string, x tensor.Tensor, make func(string, tensor.Dtype, tensor.Shape) (*DeviceTensor, error)) (d *DeviceTensor, err error) {
	t, err := denseValue(op, "x", x)
	if err != nil {
		return nil, err
	}
	if err := checkDeviceShape(op, t.Dtype(), t.Shape()); err != nil {
		return nil, err
	}
	if err := g.enter(op); err != nil {
		return nil, err
	}
	defer g.group.Leave()
	if d, err = make(op, t.Dtype(), t.Shape()); err != nil {
		return nil, err
	}
	if err := d.fill(rowMajorBytes(t)); err != nil {
		return nil, errors.Join(gpuError(op, err), d.free())
	}
	return d, nil
}

// pieceBytes is how much of a tensor is copied at once: pinned memory is scarce.
const pieceBytes = 4 << 20

// uploaders are how many goroutines bring the pieces of a tensor to pinned memory:
// one reads some 8 GB/s of a file's pages, where a GPU takes several times as much.
const uploaders = 4

// fill queues the copy of what the tensor is to hold. The GPU is entered.
func (d *DeviceTensor) fill(src []byte) error {
	defer runtime.KeepAlive(d)
	if d.shards != nil {
		return d.move(src, true)
	}
	return eachPiece((len(src)+pieceBytes-1)/pieceBytes, func(i int) error { return d.fillFrom(src, i*pieceBytes) })
}

// eachPiece calls f for so many pieces, of several at once. The error is one of them.
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
		next.Store(int64(pieces)) // for the others
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
func (d *DeviceTensor) fillFrom(src []byte, at int) error {
	q := d.gpu.queue
	piece := src[at:min(at+pieceBytes, len(src))]
	p, err := q.TakePinned(len(piece))
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	copy(p.Bytes, piece)
	return d.through(p, func(sub *device.Submission, b *cuda.Buffer) error {
		if err := sub.Upload(b, d.offset+int64(at), p, 0, len(piece)); err != nil {
			return err
		}
		return d.eachReplica(sub, func(b *cuda.Buffer, offset int64) error {
			return sub.Upload(b, offset+int64(at), p, 0, len(piece))
		})
	})
}

// Download waits for what was asked before, and copies the tensor to the host.
// Errors: [ErrState] if it has been overwritten, [ErrClosed] if it has been
// freed, and what went wrong in work that was queued before.
func (d *DeviceTensor) Download() (t *tensor.Dense, err error) {
	const op = "DeviceTensor.Download"
	defer errs.RecoverTo(op, &err)
	if err := d.enter(op); err != nil {
		return nil, err
	}
	defer d.gpu.group.Leave()
	t = dense.New(d.dtype, d.shape...)
	if err := d.read(rowMajorBytes(t)); err != nil {
		return nil, tensorError(op, "the tensor", err)
	}
	return t, nil
}

// read fills dst with what the tensor holds. The GPU is entered.
func (d *DeviceTensor) read(dst []byte) error {
	defer runtime.KeepAlive(d)
	if d.shards != nil {
		return d.move(dst, false)
	}
	q := d.gpu.queue
	for at := 0; at < len(dst); at += pieceBytes {
		piece := dst[at:min(at+pieceBytes, len(dst))]
		p, err := q.TakePinned(len(piece))
		if err != nil {
			return err
		}
		err = d.through(p, func(sub *device.Submission, b *cuda.Buffer) error {
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
func (d *DeviceTensor) through(p *device.Pinned, queue func(*device.Submission, *cuda.Buffer) error) error {
	return d.gpu.queue.Submit(func(sub *device.Submission) error {
		b, err := sub.Use(d.memory, d.generation)
		if err != nil {
			return err
		}
		if err := queue(sub, b); err != nil {
			return err
		}
		return sub.Mark(p)
	})
}

// Free gives the memory back. Work that was queued before still has it. Errors:
// [ErrClosed] if it was freed before or the GPU is closed, [ErrState] for the old
// value of a node that has run again.
func (d *DeviceTensor) Free() error {
	const op = "DeviceTensor.Free"
	if err := d.enterFor(op, (*GPU).enterToFree); err != nil {
		return err
	}
	defer d.gpu.group.Leave()
	if d.whole != nil {
		return errs.Errorf(op, ErrUnsupported, "the tensor is a part of another")
	}
	if err := d.free(); err != nil {
		return tensorError(op, "the tensor", err)
	}
	return nil
}

func (d *DeviceTensor) free() error {
	if d.shards != nil {
		return freeAll(d.shards)
	}
	err := d.gpu.queue.Submit(func(sub *device.Submission) error {
		if _, err := sub.Use(d.memory, d.generation); err != nil {
			return err
		}
		return sub.Free(d.memory)
	})
	return errors.Join(err, freeAll(d.replicas))
}

// set notes where d is, see [nocopy.Mark].
func (d *DeviceTensor) set() *DeviceTensor {
	d.mark.Set()
	return d
}

// problem says why d is no tensor that a GPU has made.
func (d *DeviceTensor) problem(name string) string {
	const by = "a GPU"
	if d == nil {
		return nocopy.Unmade(name, by)
	}
	return d.mark.Problem(name, by)
}

// errTensorCopied is the use of a copy.
var errTensorCopied = errors.New("is a copy of a tensor: use the pointer that the GPU gave")

// enter checks that d was made, and keeps its GPU open until queue.Leave.
func (d *DeviceTensor) enter(op string) error { return d.enterFor(op, (*GPU).enter) }

func (d *DeviceTensor) enterFor(op string, enter func(*GPU, string) error) error {
	if problem := d.problem("the tensor"); problem != "" {
		return errs.Errorf(op, ErrState, "%s", problem)
	}
	if d.broken != nil {
		return tensorError(op, "the tensor", d.broken)
	}
	return enter(d.gpu, op)
}

// use is the tensor's memory, to queue work on. The caller keeps d alive until
// that is queued.
func (d *DeviceTensor) use(sub *device.Submission) (deviceMemory, error) {
	if d.mark.Problem("", "") != "" {
		return deviceMemory{}, errTensorCopied
	}
	if d.broken != nil {
		return deviceMemory{}, d.broken
	}
	if err := d.notWhole(); err != nil {
		return deviceMemory{}, err
	}
	b, err := sub.Use(d.memory, d.generation)
	if err != nil {
		return deviceMemory{}, err
	}
	t, _ := storageType(d.dtype)
	return deviceMemory{Buffer: b, Offset: d.offset, DType: t, Len: d.Size()}, nil
}

// GPU is the GPU that the tensor is on.
func (d *DeviceTensor) GPU() *GPU {
	if d == nil {
		return nil
	}
	return d.gpu
}

// Shape is the tensor's shape.
func (d *DeviceTensor) Shape() tensor.Shape {
	if d == nil {
		return nil
	}
	return d.shape
}

// Dtype is the type of its elements.
func (d *DeviceTensor) Dtype() tensor.Dtype {
	if d == nil {
		return tensor.Dtype{}
	}
	return d.dtype
}

// Size is the number of its elements.
func (d *DeviceTensor) Size() int {
	if d == nil || d.gpu == nil {
		return 0
	}
	return d.shape.TotalSize()
}

// Type is its type in Gorgonia's type system.
func (d *DeviceTensor) Type() hm.Type {
	if len(d.Shape()) == 0 {
		return d.Dtype()
	}
	return G.TensorType{Dims: len(d.shape), Of: d.dtype}
}

// Data is nil, and Uintptr and MemSize are 0: there is no memory that the host
// could read. Download copies it. (Under the build tag cuda MemSize is the size
// on the GPU, so that the copy of it by Gorgonia's machine is an error.)
func (d *DeviceTensor) Data() any { return nil }

// Uintptr is 0, see Data.
func (d *DeviceTensor) Uintptr() uintptr { return 0 }

// MemSize is 0, see Data.
func (d *DeviceTensor) MemSize() uintptr {
	if G.CUDA {
		return uintptr(d.bytes())
	}
	return 0
}

// Format writes what the tensor is and where, not what it holds.
func (d *DeviceTensor) Format(s fmt.State, _ rune) {
	if d == nil || d.gpu == nil {
		fmt.Fprint(s, "DeviceTensor of no GPU")
		return
	}
	fmt.Fprintf(s, "%v %v on %v", d.dtype, d.shape, d.gpu)
}

// Clone copies the tensor on its GPU; the result is a *DeviceTensor with memory
// of its own. Gorgonia calls it where it keeps values. Errors are those of Download, and
// [ErrOutOfMemory].
func (d *DeviceTensor) Clone() (any, error) {
	const op = "DeviceTensor.Clone"
	if err := d.enter(op); err != nil {
		return nil, err
	}
	defer d.gpu.group.Leave()
	if err := d.notWhole(); err != nil {
		return nil, tensorError(op, "the tensor", err)
	}
	newTensor := d.gpu.newTensor
	if d.replicas != nil {
		newTensor = d.gpu.newReplicated
	}
	c, err := newTensor(op, d.dtype, d.shape)
	if err != nil {
		return nil, err
	}
	if err := c.copyFrom(d); err != nil {
		return nil, errors.Join(tensorError(op, "the tensor", err), c.free())
	}
	return c, nil
}

// Rows is the part [from, to) of the tensor's first axis, in the same memory: what
// is written to one is read from the other. It cannot be freed by itself, and is
// [ErrClosed] once the tensor is freed. Errors: [ErrShape], [ErrClosed].
func (d *DeviceTensor) Rows(from, to int) (*DeviceTensor, error) {
	const op = "DeviceTensor.Rows"
	if err := d.enter(op); err != nil {
		return nil, err
	}
	d.gpu.group.Leave()
	if err := d.notWhole(); err != nil {
		return nil, tensorError(op, "the tensor", err)
	}
	if len(d.shape) == 0 || from < 0 || to <= from || to > d.shape[0] {
		return nil, errs.Errorf(op, ErrShape, "rows [%d, %d) of shape %v", from, to, d.shape)
	}
	shape := d.shape.Clone()
	shape[0] = to - from
	return d.part(from*(d.Size()/d.shape[0]), shape), nil
}

// part is elements from one on, in the same memory.
func (d *DeviceTensor) part(from int, shape tensor.Shape) *DeviceTensor {
	part := (&DeviceTensor{gpu: d.gpu, memory: d.memory, generation: d.generation, offset: d.offset + int64(from)*int64(d.dtype.Size()),
		whole: d, shape: shape, dtype: d.dtype}).set()
	for _, r := range d.replicas {
		part.replicas = append(part.replicas, r.part(from, shape))
	}
	return part
}

// partApart is a view of a tensor that is sharded by nodes: of each member's shard.
func (d *DeviceTensor) partApart(from int, shape tensor.Shape) (*DeviceTensor, error) {
	n, size := len(d.shards), shape.TotalSize()
	axis := -1
	if d.joined {
		axis = len(shape) - 1
	} else {
		row := 1 // elements that are dealt out together
		for _, s := range d.shape[d.axis:] {
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
		return nil, fmt.Errorf("shape %v of %v, which is %w", shape, d.shape, d.notWhole())
	}
	part := (&DeviceTensor{gpu: d.gpu, whole: d, shape: shape.Clone(), dtype: d.dtype, axis: axis, made: true}).set()
	of := shape.Clone()
	of[axis] /= n
	for _, s := range d.shards {
		part.shards = append(part.shards, s.part(from/n, of))
	}
	return part, nil
}

// CopyFrom makes the tensor equal to another of the same shape and element type
// on the same GPU, or to a *tensor.Dense in host memory: it returns when that has
// been read, and the copy is queued. Gorgonia calls it where it keeps values.
func (d *DeviceTensor) CopyFrom(src any) error {
	const op = "DeviceTensor.CopyFrom"
	if err := d.enter(op); err != nil {
		return err
	}
	defer d.gpu.group.Leave()
	if t, ok := src.(*tensor.Dense); ok {
		return d.write(op, t)
	}
	s, ok := src.(*DeviceTensor)
	switch {
	case !ok || s == nil || s.gpu == nil:
		return errs.Errorf(op, ErrUnsupported, "from a %T to a tensor on %v", src, d.gpu)
	case s.problem("") != "":
		return errs.Errorf(op, ErrState, "%s", s.problem("the source"))
	case s.gpu != d.gpu:
		return errs.Errorf(op, ErrUnsupported, "from %s to %s", s.gpu, otherName(d.gpu, s.gpu))
	case s.dtype != d.dtype:
		return errs.Errorf(op, ErrDType, "from %v to %v", s.dtype, d.dtype)
	case !sameShape(s.shape, d.shape):
		return errs.Errorf(op, ErrShape, "from %v to %v", s.shape, d.shape)
	case s.memory != nil && s.memory == d.memory && s.offset != d.offset && s.offset < d.offset+d.bytes() && d.offset < s.offset+s.bytes():
		return errs.Errorf(op, ErrUnsupported, "the source and the tensor are rows of one tensor, and some rows are in both") // a driver copies them in any order
	}
	if err := d.copyFrom(s); err != nil {
		return tensorError(op, "the tensor", err)
	}
	return nil
}

// write is CopyFrom of a tensor of the host.
func (d *DeviceTensor) write(op string, t *tensor.Dense) error {
	t, err := denseValue(op, "the source", t)
	switch {
	case err != nil:
		return err
	case t.Dtype() != d.dtype:
		return errs.Errorf(op, ErrDType, "from %v to %v", t.Dtype(), d.dtype)
	case !sameShape(t.Shape(), d.shape):
		return errs.Errorf(op, ErrShape, "from %v to %v", t.Shape(), d.shape)
	}
	if err := d.fill(rowMajorBytes(t)); err != nil {
		return tensorError(op, "the tensor", err)
	}
	return nil
}

func (d *DeviceTensor) copyFrom(src *DeviceTensor) error {
	defer runtime.KeepAlive(src)
	defer runtime.KeepAlive(d)
	return d.gpu.queue.Submit(func(sub *device.Submission) error {
		from, err := src.use(sub)
		if err != nil {
			return err
		}
		to, err := d.use(sub)
		if err != nil || to == from {
			return err
		}
		return sub.Do(func(s *cuda.Stream) error {
			if err := s.Copy(to.Buffer, to.Offset, from.Buffer, from.Offset, d.bytes()); err != nil {
				return err
			}
			return d.eachReplica(sub, func(b *cuda.Buffer, offset int64) error {
				return s.Copy(b, offset, from.Buffer, from.Offset, d.bytes())
			})
		})
	})
}

func (d *DeviceTensor) bytes() int64 {
	n := d.Size()
	if n == 0 { // of no GPU: it has no element type
		return 0
	}
	return int64(n) * int64(d.dtype.Size())
}

// ZeroValue sets all elements to 0, for Gorgonia's lisp machine, and returns the
// tensor. Where that fails, the tensor can't be used any more, and its use says why.
func (d *DeviceTensor) ZeroValue() G.Value {
	const op = "DeviceTensor.ZeroValue"
	if err := d.enter(op); err != nil {
		return d
	}
	defer d.gpu.group.Leave()
	defer runtime.KeepAlive(d)
	if err := d.notWhole(); err != nil {
		d.broken = err
		return d
	}
	d.broken = d.gpu.queue.Submit(func(sub *device.Submission) error {
		m, err := d.use(sub)
		if err != nil {
			return err
		}
		return sub.Do(func(s *cuda.Stream) error {
			if err := s.Set(m.Buffer, m.Offset, 0, d.bytes()); err != nil {
				return err
			}
			return d.eachReplica(sub, func(b *cuda.Buffer, offset int64) error { return s.Set(b, offset, 0, d.bytes()) })
		})
	})
	return d
}

// ValueEq says whether v is this very tensor: what they hold is not compared.
func (d *DeviceTensor) ValueEq(v G.Value) bool { return v == G.Value(d) }

var (
	_ G.Value        = (*DeviceTensor)(nil)
	_ G.Typer        = (*DeviceTensor)(nil)
	_ G.CloneErrorer = (*DeviceTensor)(nil)
	_ G.CopierFrom   = (*DeviceTensor)(nil)
	_ G.ZeroValuer   = (*DeviceTensor)(nil)
	_ G.ValueEqualer = (*DeviceTensor)(nil)
)

// useAs is use for an operand with a name.
func (d *DeviceTensor) useAs(sub *device.Submission, name string) (deviceMemory, error) {
	m, err := d.use(sub)
	if err != nil {
		err = &operandError{name, err}
	}
	return m, err
}

func (d *DeviceTensor) operand(name string) operand { return operand{name, d.shape, d.dtype} }
