package device

import (
	"fmt"
	"hash"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/leanattention/internal/operand"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/tensor"
)

// ToGPU adds a copy of x to a GPU to the graph. Ops of this module that read the copy compute on that GPU. A run queues the
// copy and goes on. A weight needs no copy in the graph: bind the result of [GPU.Upload] to an input.
//
//   - x is float32, leanattention.Float16, leanattention.BFloat16 or int32, of rank 1 or more.
//   - The copy has no gradient.
//   - Errors: ErrGraph, ErrShape, ErrDType, ErrState and ErrClosed of the GPU. In a run: ErrUnsupported for a value that is on
//     a GPU already, ErrOutOfMemory, ErrClosed.
func ToGPU(x *G.Node, to *GPU) (out *G.Node, err error) {
	const op = "device.ToGPU"
	defer errs.RecoverTo(op, &err)
	gpu := to.Internal()
	if err := gpu.Enter(op); err != nil {
		return nil, err
	}
	gpu.Group.Leave()
	m, err := newMove(op, x)
	if err != nil {
		return nil, err
	}
	return ongpu.Apply(op, &toGPUOp{move: m, gpu: gpu}, x)
}

// ToHost adds a copy of x from its GPU to the graph, as a *tensor.Dense. A run waits for all work that x depends on, and
// returns the errors of that work.
//
//   - The copy has no gradient.
//   - Errors: ErrGraph, ErrShape, ErrDType. In a run: ErrUnsupported for a value in host memory, and the
//     errors of [Tensor.Download].
func ToHost(x *G.Node) (out *G.Node, err error) {
	const op = "device.ToHost"
	defer errs.RecoverTo(op, &err)
	m, err := newMove(op, x)
	if err != nil {
		return nil, err
	}
	return ongpu.Apply(op, &toHostOp{m}, x)
}

// move is the common part of ToGPU and ToHost: an op that passes x on unchanged.
type move struct {
	graph.Plain
	name  string
	shape tensor.Shape
	dtype tensor.Dtype
}

func newMove(name string, x *G.Node) (m move, err error) {
	o, err := operand.OfNode(name, "x", x)
	if err != nil {
		return m, err
	}
	m = move{name: name, shape: o.Shape.Clone(), dtype: o.DType}
	return m, m.check(o.Shape)
}

func (m *move) check(shape tensor.Shape) error {
	if len(shape) == 0 {
		return errs.Errorf(m.name, errs.ErrShape, "x is a scalar")
	}
	return ongpu.CheckShape(m.name, m.dtype, shape)
}

func (m *move) Arity() int { return 1 }

func (m *move) Type() hm.Type {
	of := func() hm.Type { return G.TensorType{Dims: len(m.shape), Of: hm.TypeVariable('a')} }
	return hm.NewFnType(of(), of())
}

func (m *move) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, errs.Errorf(m.name, errs.ErrShape, "%v", err)
	}
	if len(shapes) != 1 {
		return nil, errs.Errorf(m.name, errs.ErrShape, "%d inputs; it has 1", len(shapes))
	}
	if err := m.check(shapes[0]); err != nil {
		return nil, err
	}
	return shapes[0].Clone(), nil
}

// value checks what a run gives the node.
func (m *move) value(in []G.Value) (G.Value, error) {
	if len(in) != 1 {
		return nil, errs.Errorf(m.name, errs.ErrShape, "%d inputs; it has 1", len(in))
	}
	if in[0] == nil {
		return nil, errs.Errorf(m.name, errs.ErrShape, "x is nil")
	}
	if t := in[0].Dtype(); t != m.dtype {
		return nil, errs.Errorf(m.name, errs.ErrDType, "x is %v; the graph was built for %v", t, m.dtype)
	}
	if !rowsOf(in[0].Shape(), m.shape) {
		return nil, errs.Errorf(m.name, errs.ErrShape, "x has shape %v; the graph was built for %v", in[0].Shape(), m.shape)
	}
	return in[0], nil
}

// rowsOf says whether a shape is another one, or has fewer rows.
func rowsOf(s, all tensor.Shape) bool {
	return len(s) == len(all) && (len(s) == 0 || s[0] >= 1 && s[0] <= all[0] && slices.Equal(s[1:], all[1:]))
}

func (m *move) DiffWRT(n int) []bool { return slices.Repeat([]bool{true}, n) }

func (m *move) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errs.Errorf(m.name, errs.ErrUnsupported, "gradient of a copy from or to a GPU")
}

func (m *move) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf(m.name, errs.ErrUnsupported, "gradient of a copy from or to a GPU")
}

type toGPUOp struct {
	move
	gpu  *ongpu.GPU
	slot queue.Slot
}

func (op *toGPUOp) Do(in ...G.Value) (out G.Value, err error) {
	defer errs.RecoverTo(op.name, &err)
	v, err := op.value(in)
	if err != nil {
		return nil, err
	}
	if at := ongpu.PlaceOf(v); at != nil {
		return nil, errs.Errorf(op.name, errs.ErrUnsupported, "x is on %v already", at)
	}
	t, err := ongpu.Dense(op.name, "x", v)
	if err != nil {
		return nil, err
	}
	if err := op.gpu.Enter(op.name); err != nil {
		return nil, err
	}
	defer op.gpu.Group.Leave()
	var d *ongpu.Tensor
	err = op.gpu.Queue.Submit(func(sub *queue.Submission) (err error) {
		d, err = op.gpu.NextValue(sub, &op.slot, op.dtype, op.shape)
		return err
	})
	if err == nil {
		err = d.Fill(operand.RowMajorBytes(t))
	}
	runtime.KeepAlive(t)
	if err != nil {
		return nil, ongpu.TensorError(op.name, "the value", err)
	}
	return d.Value(), nil
}

func (op *toGPUOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.device.ToGPU GPU %d %v %v", op.gpu.ID, op.dtype, op.shape)
}

func (op *toGPUOp) Hashcode() uint32 { return graph.Hashcode(op) }

func (op *toGPUOp) String() string { return fmt.Sprintf("ToGPU{%v}", op.gpu) }

type toHostOp struct{ move }

func (op *toHostOp) Do(in ...G.Value) (out G.Value, err error) {
	defer errs.RecoverTo(op.name, &err)
	v, err := op.value(in)
	if err != nil {
		return nil, err
	}
	d, ok := ongpu.Of(v)
	if !ok {
		return nil, errs.Errorf(op.name, errs.ErrUnsupported, "x is a %T in %s already", v, errs.Host)
	}
	if err := d.Enter(op.name); err != nil {
		return nil, err
	}
	defer d.GPU.Group.Leave()
	t := dense.New(d.DType, d.Shape...)
	if err := d.Read(operand.RowMajorBytes(t)); err != nil {
		return nil, ongpu.TensorError(op.name, "x", err)
	}
	return t, nil
}

func (op *toHostOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.ToHost %v %v", op.dtype, op.shape)
}

func (op *toHostOp) Hashcode() uint32 { return graph.Hashcode(op) }

func (op *toHostOp) String() string { return "device.ToHost" }

var (
	_ G.SDOp = (*toGPUOp)(nil)
	_ G.ADOp = (*toGPUOp)(nil)
	_ G.SDOp = (*toHostOp)(nil)
	_ G.ADOp = (*toHostOp)(nil)
)

// ToGPU says which way the copy goes, see [ongpu.CopyOp].
func (*toGPUOp) ToGPU() bool { return true }

// ToGPU says which way the copy goes, see [ongpu.CopyOp].
func (*toHostOp) ToGPU() bool { return false }
