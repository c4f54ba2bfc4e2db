package device

import (
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Tensor is a row-major tensor in the memory of a [GPU]. Its elements are float32, leanattention.Float16,
// leanattention.BFloat16 or int32. A Tensor is a gorgonia.Value: it can be the value of an input, through gorgonia.Let, and
// travels from node to node. Gorgonia's own ops refuse it, since the host cannot read it: [ToGPU] and [ToHost] are the edges of
// the part of a graph that is on a GPU. (gorgonia.WithNaNWatch and WithInfWatch end the process at such values.)
//
// Work on a tensor is queued: only a download waits. A node keeps the memory of its value from run to run, so the value of a
// node is overwritten when the node runs again. The use of the old value is ErrState then. Clone keeps a value, and
// gorgonia.Read makes a Clone.
//
// Tensors from [GPU.Upload], [GPU.NewTensor] and Clone have memory of their own until Free, or until nothing refers to them.
// A Tensor has the methods of a gorgonia.Value: Shape, Dtype and Size return shape, element type and number of elements. Data
// returns nil, since there is no memory that the host could read.
//
// A Tensor is used by its pointer. The use of a copy is ErrState.
type Tensor struct{ value }

// value has the methods that Gorgonia asks of a value.
type value = ongpu.Value

// newTensor makes a tensor for package ongpu.
func newTensor() *ongpu.Tensor {
	t := new(Tensor)
	of := t.value.Internal()
	of.Public = t
	return of
}

// public gives users a tensor that package ongpu made.
func public(t *ongpu.Tensor, err error) (*Tensor, error) {
	if err != nil {
		return nil, err
	}
	return t.Public.(*Tensor), nil
}

// Internal is for the packages of this module.
func (t *Tensor) Internal() *ongpu.Tensor {
	if t == nil {
		return nil
	}
	return t.value.Internal()
}

// GPU returns the GPU that the tensor is on.
func (t *Tensor) GPU() *GPU {
	of := t.Internal()
	if of == nil || of.GPU == nil {
		return nil
	}
	g, _ := of.GPU.Public.(*GPU)
	return g
}

// Download waits for all work that was queued before, and copies the tensor to the host. Errors: ErrState if the tensor has
// been overwritten, ErrClosed if it has been freed, and the errors of the work before.
func (t *Tensor) Download() (*tensor.Dense, error) { return t.Internal().Download() }

// QueueDownload is Download for a caller that has more work to queue. It queues the copy; wait waits for the copy, and not for
// later work, and returns the values that the tensor had between the earlier and the later work.
//
//   - Call wait exactly once: until then the copy takes pinned memory.
//   - Errors: as Download, and ErrUnsupported for a tensor that several GPUs share, or of more than 4 MiB.
func (t *Tensor) QueueDownload() (wait func() (*tensor.Dense, error), err error) {
	return t.Internal().QueueDownload()
}

// Free gives the memory back. Work that was queued before still has it. Errors: ErrClosed if the tensor was freed before or
// the GPU is closed, ErrState for the old value of a node that has run again.
func (t *Tensor) Free() error { return t.Internal().Free() }

// Clone copies the tensor on its GPU. The result is a *Tensor with memory of its own. Gorgonia calls Clone where it keeps
// values. Errors: as Download, and ErrOutOfMemory.
func (t *Tensor) Clone() (any, error) {
	c, err := public(t.Internal().Clone())
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Rows returns rows [from, to) of the tensor's first axis, in the same memory. The result cannot be freed by itself, and its
// use is ErrClosed once the tensor is freed. Errors: ErrShape, ErrClosed.
func (t *Tensor) Rows(from, to int) (*Tensor, error) { return public(t.Internal().Rows(from, to)) }

// CopyFrom makes the tensor equal to src: a *Tensor of the same shape and element type on the same GPU, or such a
// *tensor.Dense in host memory. CopyFrom returns when src in host memory has been read; the copy is queued. Gorgonia calls
// CopyFrom where it keeps values.
func (t *Tensor) CopyFrom(src any) error { return t.Internal().CopyFrom(src) }

var (
	_ G.Value        = (*Tensor)(nil)
	_ G.Typer        = (*Tensor)(nil)
	_ G.CloneErrorer = (*Tensor)(nil)
	_ G.CopierFrom   = (*Tensor)(nil)
	_ G.ZeroValuer   = (*Tensor)(nil)
	_ G.ValueEqualer = (*Tensor)(nil)
)
