package leanattention

import (
	"errors"
	"fmt"
	"hash"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/stock"
	"gorgonia.org/leanattention/kernels"

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
	defer errs.RecoverTo(op, &err)
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
	defer errs.RecoverTo(op, &err)
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
		return errs.Errorf(m.name, ErrShape, "x is a scalar")
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
		return nil, errs.Errorf(m.name, ErrShape, "%v", err)
	}
	if len(shapes) != 1 {
		return nil, errs.Errorf(m.name, ErrShape, "%d inputs; it has 1", len(shapes))
	}
	if err := m.check(shapes[0]); err != nil {
		return nil, err
	}
	return shapes[0].Clone(), nil
}

// value checks what a run gives the node.
func (m *move) value(in []G.Value) (G.Value, error) {
	if len(in) != 1 {
		return nil, errs.Errorf(m.name, ErrShape, "%d inputs; it has 1", len(in))
	}
	if in[0] == nil {
		return nil, errs.Errorf(m.name, ErrShape, "x is nil")
	}
	if t := in[0].Dtype(); t != m.dtype {
		return nil, errs.Errorf(m.name, ErrDType, "x is %v; the graph was built for %v", t, m.dtype)
	}
	if !rowsOf(in[0].Shape(), m.shape) {
		return nil, errs.Errorf(m.name, ErrShape, "x has shape %v; the graph was built for %v", in[0].Shape(), m.shape)
	}
	return in[0], nil
}

// rowsOf says whether a shape is another one, or has fewer rows.
func rowsOf(s, all tensor.Shape) bool {
	return len(s) == len(all) && (len(s) == 0 || s[0] >= 1 && s[0] <= all[0] && slices.Equal(s[1:], all[1:]))
}

func (m *move) DiffWRT(n int) []bool { return firstThree(n) }
func (m *move) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errs.Errorf(m.name, ErrUnsupported, "gradient of a copy from or to a GPU")
}
func (m *move) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf(m.name, ErrUnsupported, "gradient of a copy from or to a GPU")
}

type toDeviceOp struct {
	move
	gpu  *GPU
	slot device.Slot
}

func (op *toDeviceOp) Do(in ...G.Value) (out G.Value, err error) {
	defer errs.RecoverTo(op.name, &err)
	v, err := op.value(in)
	if err != nil {
		return nil, err
	}
	if at := placeOf(v); at != nil {
		return nil, errs.Errorf(op.name, ErrUnsupported, "x is on %v already", at)
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
	defer errs.RecoverTo(op.name, &err)
	v, err := op.value(in)
	if err != nil {
		return nil, err
	}
	d, ok := v.(*DeviceTensor)
	if !ok {
		return nil, errs.Errorf(op.name, ErrUnsupported, "x is a %T in %s already", v, errs.Host)
	}
	if err := d.enter(op.name); err != nil {
		return nil, err
	}
	defer d.gpu.group.Leave()
	t := dense.New(d.dtype, d.shape...)
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

func init() { ongpu.Compute, ongpu.Part, ongpu.Devices = computeOnGPU, partOnGPU, devicesOf }

// devicesOf is [ongpu.Devices].
func devicesOf(op string, gpu any) (devs []*cuda.Device, group *device.Group, leave func(), err error) {
	g, _ := gpu.(*GPU)
	if err := g.enter(op); err != nil {
		return nil, nil, nil, err
	}
	for _, m := range g.members {
		devs = append(devs, m.dev)
	}
	return devs, g.group, g.group.Leave, nil
}

// newDecoder is a variable for tests.
var newDecoder = decoder.New

// layers is the GPU's kernels for a decoder's other layers, loaded when they are
// first needed. The GPU is entered.
func (g *GPU) layers(op string) (*decoder.Engine, error) {
	g.decoder.Lock()
	defer g.decoder.Unlock()
	if g.decoder.kernels == nil {
		d, err := newDecoder(g.dev)
		if errors.Is(err, kernels.ErrNoImage) {
			return nil, errs.Errorf(op, ErrUnsupported, "on %v: %v", g, err)
		}
		if err != nil {
			return nil, gpuError(op, err)
		}
		g.decoder.kernels = d
	}
	return g.decoder.kernels, nil
}

// computeOnGPU is [ongpu.Compute].
func computeOnGPU(c *ongpu.Call) (out G.Value, err error) {
	g, err := samePlace(c.Op, c.Names, c.In)
	if err != nil {
		return nil, err
	}
	if g == nil {
		return nil, errs.Errorf(c.Op, ErrUnsupported, "%s is in %s", c.Names[0], errs.Host)
	}
	if err := g.enter(c.Op); err != nil {
		return nil, err
	}
	defer g.group.Leave()
	defer runtime.KeepAlive(c.In)
	a, err := g.apart(c)
	if err != nil {
		return nil, err
	}
	if a != nil {
		return g.computeApart(c, a)
	}
	if slices.ContainsFunc(c.In, isMade) {
		whole := *c
		free, err := g.gatherInputs(&whole)
		defer free()
		if err != nil {
			return nil, g.computeError(c.Op, err)
		}
		c = &whole
	}
	if c.Spread != nil && slices.ContainsFunc(c.In, isSharded) {
		return g.computeSharded(c)
	}
	layers, err := g.layers(c.Op)
	if err != nil {
		return nil, err
	}
	err = g.queue.Submit(func(sub *device.Submission) error {
		w := &ongpu.Work{Engine: layers, Submission: sub}
		in, result, err := g.operandsOf(sub, c, w, (*DeviceTensor).wholeOperand)
		if err != nil {
			return err
		}
		if c.Scratch != nil {
			n, err := c.Scratch(layers)
			if err != nil {
				return err
			}
			if n > 0 {
				s, free, err := g.scratch(sub, c.Node, &c.Node.On(g.group, 0).Rest, tensor.Float32, tensor.Shape{n})
				if err != nil {
					return err
				}
				defer free()
				if w.Scratch, err = s.use(sub); err != nil {
					return err
				}
			}
		}
		out = result
		if err := c.Queue(w); err != nil {
			return err
		}
		return haveRead(sub, in...)
	})
	if err := g.computeError(c.Op, err); err != nil {
		return nil, err
	}
	return out, nil
}

// operandsOf has the memory of a call's inputs and of its value in w. in are those that are whole.
func (g *GPU) operandsOf(sub *device.Submission, c *ongpu.Call, w *ongpu.Work, operand func(*DeviceTensor, *device.Submission, string) (ongpu.Operand, error)) (in []*DeviceTensor, result *DeviceTensor, err error) {
	for i, v := range c.In {
		d := v.(*DeviceTensor)
		o, err := operand(d, sub, c.Names[i])
		if err != nil {
			return nil, nil, err
		}
		w.In = append(w.In, o)
		if d.shards == nil {
			in = append(in, d)
		}
	}
	if result, err = g.nodeValue(sub, c.Node, c.DType, c.Shape, in...); err != nil {
		return nil, nil, err
	}
	w.Out, err = result.use(sub)
	return in, result, err
}

// wholeOperand is an input of work that takes no sharded ones.
func (d *DeviceTensor) wholeOperand(sub *device.Submission, name string) (ongpu.Operand, error) {
	m, err := d.useAs(sub, name)
	return ongpu.Operand{Memory: m, Fixed: err == nil && sub.Fixed(d.memory)}, err
}

// computeError is what went wrong with a node's work, as its user is told.
func (g *GPU) computeError(op string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, attn.ErrShape), errors.Is(err, attn.ErrUnsupported): // right, but no kernel can do it
		return errs.Errorf(op, ErrUnsupported, "on %v: %v", g, err)
	case errors.Is(err, device.ErrShared):
		return errs.Errorf(op, ErrUnsupported, "on %v: %v", g, err)
	case errors.Is(err, attn.ErrDType):
		return errs.Errorf(op, ErrDType, "on %v: %v", g, err)
	}
	return deviceEngineError(op, "queue", err)
}

// partOnGPU is [ongpu.Part].
func partOnGPU(op string, whole G.Value, from int, shape tensor.Shape) (G.Value, error) {
	d, ok := whole.(*DeviceTensor)
	if !ok {
		return nil, errs.Errorf(op, ErrUnsupported, "x is a %T", whole)
	}
	if err := d.enter(op); err != nil {
		return nil, err
	}
	d.gpu.group.Leave()
	size := shape.TotalSize()
	if from < 0 || size < 1 || from > d.Size()-size {
		return nil, errs.Errorf(op, ErrShape, "elements [%d, %d) of %d", from, from+size, d.Size())
	}
	if d.made {
		part, err := d.partApart(from, shape)
		if err != nil {
			return nil, tensorError(op, "x", err)
		}
		return part, nil
	}
	if err := d.notWhole(); err != nil {
		return nil, tensorError(op, "x", err)
	}
	return d.part(from, shape.Clone()), nil
}

// ShareMemory has the nodes of a graph share memory: a value that others read is
// overwritten once all of them have run, and so is what a node needs on the way. A run
// takes the memory of the values that are needed at the same time, not of all: of a decoder
// with many rows, that of a layer instead of all layers. On a CPU it is memory that a run need
// not ask the system for, which takes longer to hand it out than many a node takes to compute.
//
// Values that nobody reads stay until the next run, and so do those of keep, of inputs, of
// nodes that other ops than this module's read, and those with a log-sum-exp. Reading another
// one after the run is [ErrState] on a GPU; in host memory it has whatever was written since.
//
// Call it once, when the graph is complete, and before it runs; a graph that was fused is
// another one. No node of this module can read a shared value that is added later, and there are no
// gradients behind it: [ErrGraph]. Such a graph can't be recorded: [GPU.Record] is [ErrUnsupported].
//
// Errors: [ErrGraph] for no graph, or a node of another one.
func ShareMemory(g *G.ExprGraph, keep ...*G.Node) (err error) {
	const op = "ShareMemory"
	defer errs.RecoverTo(op, &err)
	if g == nil {
		return errs.Errorf(op, ErrGraph, "graph is nil")
	}
	for i, n := range keep {
		if n == nil || n.Graph() != g {
			return errs.Errorf(op, ErrGraph, "keep[%d] is no node of the graph", i)
		}
	}
	nodes := g.AllNodes()
	readers := make(map[*G.Node][]*G.Node) // once for each time that they read a node
	for _, n := range nodes {
		for _, child := range stock.ChildrenOf(n) {
			readers[child] = append(readers[child], n)
		}
	}
	for _, n := range nodes {
		if o, ok := n.Op().(ongpu.Op); ok {
			o.OnGPU().Reads = reads(n, readers, keep)
		}
	}
	for _, n := range nodes {
		if o, ok := n.Op().(ongpu.Op); ok {
			o.OnGPU().From = nil
			for _, child := range stock.ChildrenOf(n) {
				o.OnGPU().From = append(o.OnGPU().From, ongpu.SharedBy(child))
			}
		}
	}
	return nil
}

// reads is how often a node's value is read, with its parts; 0 where it is to stay.
func reads(n *G.Node, readers map[*G.Node][]*G.Node, keep []*G.Node) (total int) {
	if slices.Contains(keep, n) {
		return 0
	}
	for _, r := range readers[n] {
		switch r.Op().(type) {
		case ongpu.Op:
			total++
		case ongpu.PartOp:
			of := reads(r, readers, keep)
			if of == 0 {
				return 0
			}
			total += of
		default:
			return 0
		}
	}
	return total
}

// nodeValue is a new value of a node. What the inputs hold stays.
func (g *GPU) nodeValue(sub *device.Submission, n *ongpu.Node, t tensor.Dtype, shape tensor.Shape, inputs ...*DeviceTensor) (*DeviceTensor, error) {
	if n.Reads == 0 {
		return g.nextValue(sub, &n.On(g.group, slices.Index(g.members, g)).Value, t, shape, inputs...)
	}
	return g.wrap(sub, t, shape, func(bytes int64) (*device.Memory, error) { return sub.Shared(bytes, n.Reads) })
}

// scratch is memory on the way to a node's value, in a slot of the node's. free is called when the work is queued.
func (g *GPU) scratch(sub *device.Submission, n *ongpu.Node, slot *device.Slot, t tensor.Dtype, shape tensor.Shape) (d *DeviceTensor, free func(), err error) {
	if n.Reads == 0 {
		d, err = g.nextValue(sub, slot, t, shape)
		return d, func() {}, err
	}
	d, err = g.wrap(sub, t, shape, func(bytes int64) (*device.Memory, error) { return sub.Shared(bytes, 1) })
	return d, func() { _ = sub.Read(d.memory) }, err
}

// haveRead says that what reads the inputs is queued.
func haveRead(sub *device.Submission, inputs ...*DeviceTensor) error {
	for _, in := range inputs {
		if err := sub.Read(in.memory); err != nil {
			return err
		}
	}
	return nil
}
