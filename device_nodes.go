package leanattention

import (
	"fmt"
	"hash"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/graph"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// ToDevice adds the copy of x to a GPU to the graph: behind it, ops of this
// module compute there. x is float32, [Float16], [BFloat16] or int32, of rank 1
// or more. A run queues the copy and goes on. Weights need no node: bind what
// [GPU.Upload] returns to an input.
//
// It has no gradient. Errors: [ErrGraph], [ErrShape], [ErrDType], [ErrState] and
// [ErrClosed] of the GPU; in a run [ErrUnsupported] for a value that is on a GPU
// already, [ErrOutOfMemory], [ErrClosed].
func ToDevice(x *G.Node, gpu *GPU) (out *G.Node, err error) {
	const op = "ToDevice"
	defer recoverTo(op, &err)
	if err := gpu.enter(op); err != nil {
		return nil, err
	}
	gpu.group.Leave()
	m, err := newMove(op, x)
	if err != nil {
		return nil, err
	}
	return apply(op, &toDeviceOp{move: m, gpu: gpu}, x)
}

// ToHost adds the copy of x from its GPU to the graph, as a *tensor.Dense. A run
// waits for all that x follows from; what went wrong in it is reported here.
//
// It has no gradient. Errors: [ErrGraph], [ErrShape], [ErrDType]; in a run
// [ErrUnsupported] for a value in host memory, and those of
// [DeviceTensor.Download].
func ToHost(x *G.Node) (out *G.Node, err error) {
	const op = "ToHost"
	defer recoverTo(op, &err)
	m, err := newMove(op, x)
	if err != nil {
		return nil, err
	}
	return apply(op, &toHostOp{m}, x)
}

// move is what the two have in common: an op that gives x on as it is.
type move struct {
	graph.Plain
	name  string
	shape tensor.Shape
	dtype tensor.Dtype
}

func newMove(name string, x *G.Node) (m move, err error) {
	o, err := nodeOperand(name, "x", x)
	if err != nil {
		return m, err
	}
	m = move{name: name, shape: o.shape.Clone(), dtype: o.dtype}
	return m, m.check(o.shape)
}

func (m *move) check(shape tensor.Shape) error {
	if len(shape) == 0 {
		return errorf(m.name, ErrShape, "x is a scalar")
	}
	return checkDeviceShape(m.name, m.dtype, shape)
}

func (m *move) Arity() int { return 1 }
func (m *move) Type() hm.Type {
	of := func() hm.Type { return G.TensorType{Dims: len(m.shape), Of: hm.TypeVariable('a')} }
	return hm.NewFnType(of(), of())
}

func (m *move) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, errorf(m.name, ErrShape, "%v", err)
	}
	if len(shapes) != 1 {
		return nil, errorf(m.name, ErrShape, "%d inputs; it has 1", len(shapes))
	}
	if err := m.check(shapes[0]); err != nil {
		return nil, err
	}
	return shapes[0].Clone(), nil
}

// value checks what a run gives the node.
func (m *move) value(in []G.Value) (G.Value, error) {
	if len(in) != 1 {
		return nil, errorf(m.name, ErrShape, "%d inputs; it has 1", len(in))
	}
	if in[0] == nil {
		return nil, errorf(m.name, ErrShape, "x is nil")
	}
	if t := in[0].Dtype(); t != m.dtype {
		return nil, errorf(m.name, ErrDType, "x is %v; the graph was built for %v", t, m.dtype)
	}
	if !rowsOf(in[0].Shape(), m.shape) {
		return nil, errorf(m.name, ErrShape, "x has shape %v; the graph was built for %v", in[0].Shape(), m.shape)
	}
	return in[0], nil
}

// rowsOf says whether a shape is another one, or has fewer rows.
func rowsOf(s, all tensor.Shape) bool {
	return len(s) == len(all) && (len(s) == 0 || s[0] >= 1 && s[0] <= all[0] && slices.Equal(s[1:], all[1:]))
}

func (m *move) DiffWRT(n int) []bool { return firstThree(n) }
func (m *move) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errorf(m.name, ErrUnsupported, "gradient of a copy from or to a GPU")
}
func (m *move) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errorf(m.name, ErrUnsupported, "gradient of a copy from or to a GPU")
}

type toDeviceOp struct {
	move
	gpu  *GPU
	slot device.Slot
}

func (op *toDeviceOp) Do(in ...G.Value) (out G.Value, err error) {
	defer recoverTo(op.name, &err)
	v, err := op.value(in)
	if err != nil {
		return nil, err
	}
	if at := placeOf(v); at != nil {
		return nil, errorf(op.name, ErrUnsupported, "x is on %v already", at)
	}
	t, err := denseValue(op.name, "x", v)
	if err != nil {
		return nil, err
	}
	if err := op.gpu.enter(op.name); err != nil {
		return nil, err
	}
	defer op.gpu.group.Leave()
	var d *DeviceTensor
	err = op.gpu.queue.Submit(func(sub *device.Submission) (err error) {
		d, err = op.gpu.nextValue(sub, &op.slot, op.dtype, op.shape)
		return err
	})
	if err == nil {
		err = d.fill(rowMajorBytes(t))
	}
	runtime.KeepAlive(t)
	if err != nil {
		return nil, tensorError(op.name, "the value", err)
	}
	return d, nil
}

func (op *toDeviceOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.ToDevice GPU %d %v %v", op.gpu.id, op.dtype, op.shape)
}
func (op *toDeviceOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *toDeviceOp) String() string   { return fmt.Sprintf("ToDevice{%v}", op.gpu) }

type toHostOp struct{ move }

func (op *toHostOp) Do(in ...G.Value) (out G.Value, err error) {
	defer recoverTo(op.name, &err)
	v, err := op.value(in)
	if err != nil {
		return nil, err
	}
	d, ok := v.(*DeviceTensor)
	if !ok {
		return nil, errorf(op.name, ErrUnsupported, "x is a %T in %s already", v, hostName)
	}
	if err := d.enter(op.name); err != nil {
		return nil, err
	}
	defer d.gpu.group.Leave()
	t := tensor.New(tensor.Of(d.dtype), tensor.WithShape(d.shape...))
	if err := d.read(rowMajorBytes(t)); err != nil {
		return nil, tensorError(op.name, "x", err)
	}
	return t, nil
}

func (op *toHostOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.ToHost %v %v", op.dtype, op.shape)
}
func (op *toHostOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *toHostOp) String() string   { return "ToHost" }

var (
	_ G.SDOp = (*toDeviceOp)(nil)
	_ G.ADOp = (*toDeviceOp)(nil)
	_ G.SDOp = (*toHostOp)(nil)
	_ G.ADOp = (*toHostOp)(nil)
)
