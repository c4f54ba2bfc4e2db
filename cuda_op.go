//go:build cuda

package leanattention

import (
	"encoding/binary"
	"runtime"
	"sync"
	"time"
	"unsafe"
	"weak"

	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/kvstore"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/queue"

	"gorgonia.org/cu"
	cublas "gorgonia.org/cu/blas"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/gorgonia/cuda"
	"gorgonia.org/tensor"
)

// With the build tag cuda, Gorgonia's tape machine computes on a GPU. The machine runs a node on its GPU if the type of the
// node's op has the method CUDADo: the machine copies the node's inputs to the GPU, passes memory for the output, and calls CUDADo
// in place of Do. So this package wraps an op in a type with CUDADo, or does not, when the node is made.
//
// A wrapper only finds the operands. The engine that serves every GPU computes, in the context of the machine (type machine, below).

// machineAttention is [Attention] on Gorgonia's machine.
type machineAttention struct{ *attentionOp }

// placeAttention puts attention on the machine if there are kernels for the problem. Other attention stays on the CPU, as stock
// ops without kernels do. Attention to tensors of a GPU that the user has opened is not wrapped either: Do computes on that GPU.
func placeAttention(op *attentionOp, q, k, v *G.Node) G.Op {
	g := op.problem.geometry(&op.config)
	modified := op.mask.Window != 0 || op.score != attn.Score{} || op.hasSeed() || op.hasQueryLengths() || op.invariant // not tested on the machine
	if op.query != tensor.Float32 || modified || attention.HasKernel(&g) != nil {
		return op
	}
	seen := make(map[int64]bool)
	if getsDeviceTensors(q, seen) || getsDeviceTensors(k, seen) || getsDeviceTensors(v, seen) {
		return op
	}
	return &machineAttention{op}
}

// getsDeviceTensors reports whether a node's value is a [device.Tensor], as far as the graph shows. Such a value comes from an input
// that has one now, or from device.ToGPU, and passes through every op but ToHost.
func getsDeviceTensors(n *G.Node, seen map[int64]bool) bool {
	if seen[n.ID()] {
		return false
	}
	seen[n.ID()] = true
	if c, ok := n.Op().(ongpu.CopyOp); ok {
		return c.ToGPU()
	}
	if ongpu.PlaceOf(n.Value()) != nil {
		return true
	}
	for children := n.Graph().From(n.ID()); children.Next(); {
		if child, ok := children.Node().(*G.Node); ok && getsDeviceTensors(child, seen) {
			return true
		}
	}
	return false
}

// CallsExtern and ReturnsPtr make the machine give memory for the output.
func (*machineAttention) CallsExtern() bool { return true }
func (*machineAttention) ReturnsPtr() bool  { return true }

// CUDADo queues the work and returns prealloc.
func (op *machineAttention) CUDADo(ext G.External, dev G.Device, prealloc G.Value, in ...G.Value) (out G.Value, err error) {
	const name = "Attention"
	defer errs.RecoverTo(name, &err)
	if len(in) != op.Arity() {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has %d", len(in), op.Arity())
	}
	if err := op.fresh(name); err != nil {
		return nil, err
	}
	if op.entropy.asked() != nil {
		return nil, errs.Errorf(name, ErrUnsupported, "the entropy of weights, on Gorgonia's CUDA machine: tensors in host memory have it")
	}
	if op.mass.asked() != nil {
		return nil, errs.Errorf(name, ErrUnsupported, "attention mass, on Gorgonia's CUDA machine: tensors in host memory have it")
	}
	m, err := machineOf(name, ext, dev)
	if err != nil {
		return nil, err
	}
	p := &op.problem
	values, to, err := m.borrowAll(name, prealloc, operand.New("out", p.outShape(), p.query), in[:3],
		operand.New("q", p.dims(p.dim), p.query), operand.New("k", p.keyShape(p.dim), p.storage), operand.New("v", p.keyShape(p.valueDim), p.storage))
	if err != nil {
		return nil, err
	}
	r := denseRuns.Get().(*denseRun)
	defer denseRuns.Put(r)
	r.whole(p)
	if op.hasLengths() {
		if r.lengths, err = m.readLengths(name, r.lengths[:0], in[3], p); err != nil {
			return nil, err
		}
	}
	_, lse, err := op.doDevice(name, r, m.gpu, values, furtherThere{}, to)
	if err != nil {
		return nil, err
	}
	op.logs().put(logs, prealloc, lse.Value())
	return prealloc, nil
}

// DoDiff is refused. The CPU computes the gradient, and the lisp machine would pass values on the GPU; the tape machine copies them.
func (op *machineAttention) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf("Attention.DoDiff", ErrUnsupported, "gradient on the lisp machine under the build tag cuda")
}

// machineCached is [CachedAttention] with a cache on Gorgonia's machine.
type machineCached struct{ *cachedOp }

// placeCached puts the op on the machine if the cache is on the machine.
func placeCached(op *cachedOp) G.Op {
	if _, ok := op.step.cache.store.(*machinePages); ok {
		return &machineCached{op}
	}
	return op
}

func (*machineCached) CallsExtern() bool { return true }
func (*machineCached) ReturnsPtr() bool  { return true }

// CUDADo queues the work and returns prealloc.
func (op *machineCached) CUDADo(ext G.External, dev G.Device, prealloc G.Value, in ...G.Value) (out G.Value, err error) {
	const name = "CachedAttention"
	defer errs.RecoverTo(name, &err)
	if len(in) != 3 {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has 3", len(in))
	}
	if op.entropy.asked() != nil {
		return nil, errs.Errorf(name, ErrUnsupported, "the entropy of weights, on Gorgonia's CUDA machine: caches in host memory have it")
	}
	if op.mass.asked() != nil {
		return nil, errs.Errorf(name, ErrUnsupported, "attention mass, on Gorgonia's CUDA machine: caches in host memory have it")
	}
	m, err := machineOf(name, ext, dev)
	if err != nil {
		return nil, err
	}
	r, c := &op.rows, &op.step.cache.config
	rows := func(name string, width int) operand.Operand {
		return operand.New(name, tensor.Shape{r.Tokens, width}, r.Query)
	}
	values, to, err := m.borrowAll(name, prealloc, rows("out", r.Heads*c.ValueDim), in,
		rows("q", r.Heads*c.HeadDim), rows("k", c.KVHeads*c.HeadDim), rows("v", c.KVHeads*c.ValueDim))
	if err != nil {
		return nil, err
	}
	_, lse, err := op.step.attend(name, &op.node, op.layerCall(op.rows, values, to))
	if err != nil {
		return nil, err
	}
	op.keepLSE(prealloc, lse)
	return prealloc, nil
}

// machineLSE is [LogSumExp] of attention on the machine.
type machineLSE struct{ *outputOp }

// placeLSE puts the op on the machine if the attention is on the machine.
func placeLSE(op *outputOp, out *G.Node) G.Op {
	switch out.Op().(type) {
	case *machineAttention, *machineCached:
		return &machineLSE{op}
	}
	return op
}

func (*machineLSE) CallsExtern() bool { return true }
func (*machineLSE) ReturnsPtr() bool  { return true }

// CUDADo copies the log-sum-exps that the attention left to prealloc.
func (op *machineLSE) CUDADo(ext G.External, dev G.Device, prealloc G.Value, in ...G.Value) (out G.Value, err error) {
	name := op.of
	defer errs.RecoverTo(name, &err)
	if len(in) != op.Arity() {
		return nil, errs.Errorf(name, ErrShape, "%d inputs of the log-sum-exp; it has %d", len(in), op.Arity())
	}
	m, err := machineOf(name, ext, dev)
	if err != nil {
		return nil, err
	}
	from, ok := ongpu.Of(op.from.take(op.kind, in[0]))
	if !ok {
		return nil, errs.Errorf(name, ErrState, "the log-sum-exp was asked for before the attention ran")
	}
	to, err := m.borrow(name, prealloc, operand.New("lse", op.shape, op.dtype))
	if err != nil {
		return nil, err
	}
	if err := m.gpu.Enter(name); err != nil {
		return nil, err
	}
	defer m.gpu.Group.Leave()
	if err := to.CopyFrom(from.Value()); err != nil {
		return nil, err
	}
	runtime.KeepAlive(in)
	return prealloc, nil
}

// DoDiff is refused, as [machineAttention.DoDiff] is.
func (op *machineLSE) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf(op.of+".DoDiff", ErrUnsupported, "gradient on the lisp machine under the build tag cuda")
}

// placePages makes the pages of a cache that is not in host memory.
func placePages(op string, c *Cache, l *cacheLayout) (kvstore.Store, error) {
	if c.config.Device == machineGPU {
		p := &machinePages{cache: c, layout: *l}
		g := geometryOf(&kvstore.Rows{Heads: c.config.KVHeads}, &c.config, &config{}, c.config.EdgeLayers) // as few query heads as there can be
		return p, p.Supports(op, &g)
	}
	return kvstore.NewDevice(op, &l.store, l.least())
}

var (
	_ G.CUDADoer = (*machineAttention)(nil)
	_ G.CUDADoer = (*machineCached)(nil)
	_ G.CUDADoer = (*machineLSE)(nil)
	_ G.SDOp     = (*machineAttention)(nil)
	_ G.ADOp     = (*machineAttention)(nil)
	_ G.SDOp     = (*machineCached)(nil)
	_ G.ADOp     = (*machineCached)(nil)
	_ G.SDOp     = (*machineLSE)(nil)
	_ G.ADOp     = (*machineLSE)(nil)
)

// machine is the GPU of a machine of Gorgonia, in the machine's own context. When the machine is closed, the context ends with all
// its memory, and this package calls the driver no more.
type machine struct {
	gpu *ongpu.GPU

	mu        sync.Mutex
	lengths   []int                      // the content of lengthsOf
	lengthsOf weak.Pointer[tensor.Dense] // the last tensor of lengths that was read
}

// machines are the machines on which nodes have run. The key is Gorgonia's context object, which each machine has for itself; the
// driver uses handles of contexts again.
var machines struct {
	sync.Mutex
	of map[cu.Context]*machine
}

// machineOf returns the machine that runs a node, after the machine has copied the node's inputs.
//
// The slice Engines has the machine's engines; the methods DoWork and Contexts return copies. A call that waits for its batch,
// such as MemAlloc, may wait for ever, so this package adds nothing to a batch.
func machineOf(name string, ext G.External, dev G.Device) (*machine, error) {
	host, ok := ext.(G.CUDAMachine)
	if !ok {
		return nil, errs.Errorf(name, ErrUnsupported, "a %T runs it; under the build tag cuda it needs Gorgonia's tape machine", ext)
	}
	engines := host.Engines()
	if dev < 0 || int(dev) >= len(engines) || engines[dev].Context().Context == nil {
		return nil, errs.Errorf(name, ErrState, "Gorgonia's machine has no engine for GPU %d of %d: it is closed, or its set-up failed", dev, len(engines))
	}
	engine := &engines[dev]
	if err := engine.DoWork(); err != nil {
		return nil, errs.Errorf(name, ErrState, "Gorgonia's machine can't compute: an earlier copy or launch on GPU %d failed: %v", dev, err)
	}
	ctx := engine.Context().Context
	machines.Lock()
	defer machines.Unlock()
	if m := machines.of[ctx]; m != nil {
		return m, nil
	}
	for c, m := range machines.of {
		if m.gpu.Dev.Lost() {
			delete(machines.of, c)
			_ = m.gpu.Close() // asks the driver for nothing
		}
	}
	m, err := newMachine(name, engine, ctx, int(dev))
	if err != nil {
		return nil, err
	}
	if machines.of == nil {
		machines.of = make(map[cu.Context]*machine)
	}
	machines.of[ctx] = m
	return m, nil
}

// A cu.CUContext is a handle of the driver and has no other fields.
var _ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.CUContext{})]struct{}{}

func newMachine(name string, engine *cuda.Engine, ctx cu.Context, ordinal int) (*machine, error) {
	handle := ctx.CUDAContext()
	if err := settleBLAS(name, engine, handle, ordinal); err != nil {
		return nil, err
	}
	drv, err := ongpu.LoadDriver()
	if err != nil {
		return nil, ongpu.Error(name, err)
	}
	// A closed context has no handle.
	alive := func() bool { return ctx.CUDAContext() == handle }
	dev, err := drv.Adopt(ordinal, *(*uintptr)(unsafe.Pointer(&handle)), alive)
	if err != nil {
		return nil, ongpu.Error(name, err)
	}
	gpu := new(ongpu.GPU)
	if err := ongpu.OpenDevices(gpu, ongpu.NewValue, name, dev); err != nil {
		return nil, err
	}
	return &machine{gpu: gpu}, nil
}

// patience is the longest wait for an engine. An engine answers at once, unless it has ended.
const patience = 30 * time.Second

// settleBLAS moves cuBLAS to the machine's context. Gorgonia makes the handle of cuBLAS on a thread with any context: another
// machine's, or the primary one. Products would then run beside the work that this package queues, and read or write operands
// too early.
//
// The engine's thread calls cuBLAS. The thread ends at the first call that fails, and later requests to the thread wait for ever.
func settleBLAS(name string, engine *cuda.Engine, ctx cu.CUContext, ordinal int) error {
	done := make(chan error, 1)
	go func() {
		var failed error
		if err := engine.Context().Do(func() error { // an error returned here would end the engine
			failed = moveBLAS(engine, ctx)
			return nil
		}); err != nil {
			failed = err
		}
		done <- failed
	}()
	select {
	case err := <-done:
		if err != nil {
			return errs.Errorf(name, ErrState, "Gorgonia's machine can't compute: cuBLAS on GPU %d: %v", ordinal, err)
		}
		return nil
	case <-time.After(patience):
		return errs.Errorf(name, ErrState, "the engine of GPU %d has not answered for %v: a call of cuBLAS or of a kernel failed before", ordinal, patience)
	}
}

func moveBLAS(engine *cuda.Engine, ctx cu.CUContext) error {
	blas := engine.BLASContext()
	_ = blas.Close() // waits for the work of cuBLAS; the error is of a context that may have ended
	if err := cu.SetCurrentContext(ctx); err != nil {
		return err
	}
	return blas.Init(cublas.WithContext(engine.Context()))
}

// borrow returns a tensor for a value in the machine's memory.
//
// The value may have another shape with as many elements: Gorgonia's Reshape on a GPU changes the shape of its input.
func (m *machine) borrow(name string, v G.Value, want operand.Operand) (*ongpu.Tensor, error) {
	t, ok := v.(*tensor.Dense)
	switch {
	case v == nil || ok && t == nil:
		return nil, errs.Errorf(name, ErrUnsupported, "the machine gave no memory for %s: run the node on Gorgonia's tape machine", want.Name)
	case !ok:
		return nil, errs.Errorf(name, ErrUnsupported, "%s is a %T; it must be a *tensor.Dense", want.Name, v)
	case t.Dtype() != want.DType:
		return nil, errs.Errorf(name, ErrDType, "%s is %v; the graph was built for %v", want.Name, t.Dtype(), want.DType)
	case t.Shape().TotalSize() != want.Shape.TotalSize():
		return nil, errs.Errorf(name, ErrShape, "%s has shape %v; the graph was built for %v", want.Name, t.Shape(), want.Shape)
	case !dense.RowMajor(t):
		return nil, errs.Errorf(name, ErrUnsupported, "%s is not row-major: strides %v for shape %v", want.Name, t.Strides(), t.Shape())
	}
	d := m.gpu.TensorOf(ongpu.Content{Shape: want.Shape, DType: want.DType})
	b, err := m.gpu.Dev.Borrow(uint64(t.Uintptr()), d.Bytes())
	if err != nil {
		return nil, errs.Errorf(name, ErrState, "%s: %v", want.Name, err)
	}
	d.Memory = m.gpu.Queue.Borrow(b)
	return d, nil
}

// borrowAll borrows inputs and the output.
func (m *machine) borrowAll(name string, out G.Value, wantOut operand.Operand, in []G.Value, want ...operand.Operand) (values []G.Value, to *ongpu.Tensor, err error) {
	if to, err = m.borrow(name, out, wantOut); err != nil {
		return nil, nil, err
	}
	values = make([]G.Value, 0, len(in)+1)
	for i, v := range in {
		d, err := m.borrow(name, v, want[i])
		if err != nil {
			return nil, nil, err
		}
		values = append(values, d.Value())
	}
	return values, to, nil
}

// readLengths appends the live lengths of p to dst. The host needs lengths for the schedule, and the machine has copied them to the
// GPU, as every input. All nodes of a run get the same copy, and only the first node waits for the download.
func (m *machine) readLengths(name string, dst []int, v G.Value, p *problem) ([]int, error) {
	t, ok := v.(*tensor.Dense)
	if !ok || t == nil {
		return dst, errs.Errorf(name, ErrUnsupported, "lengths is a %T; it must be a *tensor.Dense", v)
	}
	l := operand.OfTensor("lengths", t)
	if err := checkLengths(name, l, p.batch); err != nil {
		return dst, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lengthsOf.Value() != t {
		d, err := m.borrow(name, v, l)
		if err != nil {
			return dst, err
		}
		if m.lengths, err = m.downloadInts(name, m.lengths[:0], d); err != nil {
			m.lengthsOf = weak.Pointer[tensor.Dense]{}
			return dst, err
		}
		m.lengthsOf = weak.Make(t)
	}
	return operand.AppendLengths(name, roleLengths.String(), dst, m.lengths, p.keys)
}

// downloadInts appends the integers of a tensor to dst.
func (m *machine) downloadInts(name string, dst []int, d *ongpu.Tensor) ([]int, error) {
	if err := m.gpu.Enter(name); err != nil {
		return dst, err
	}
	q := m.gpu.Queue
	defer q.Leave()
	n := int(d.Bytes())
	pinned, err := q.TakePinned(n)
	if err != nil {
		return dst, ongpu.Error(name, err)
	}
	defer q.GivePinned(pinned)
	err = q.Submit(func(sub *queue.Submission) error {
		b, _, err := d.UseAny(sub)
		if err != nil {
			return err
		}
		if err := sub.Download(pinned, 0, b, 0, n); err != nil {
			return err
		}
		return sub.Mark(pinned)
	})
	if err == nil {
		err = q.Wait(pinned)
	}
	runtime.KeepAlive(d)
	if err != nil {
		return dst, ongpu.Error(name, err)
	}
	for i, size := 0, int(d.DType.Size()); i < n; i += size {
		if size == 4 {
			dst = append(dst, int(int32(binary.LittleEndian.Uint32(pinned.Bytes[i:]))))
		} else {
			dst = append(dst, int(int64(binary.LittleEndian.Uint64(pinned.Bytes[i:]))))
		}
	}
	return dst, nil
}

// MachineGPU, as [CacheConfig.Device], stands for the GPU of the machine that runs a graph. Layers of such a cache run on Gorgonia's
// own CUDA machine, between Gorgonia's ops. The function exists under the build tag cuda only.
//
//   - Each machine has a context of its own, whose memory other machines can't use. The first run of a layer allocates the pages on
//     its machine.
//   - A cache with tokens belongs to that machine. On another machine a layer is [ErrUnsupported]. After the machine is closed, the
//     tokens are gone, and a layer is [ErrClosed].
//   - A cache moves to the next machine if all its sequences are released or truncated to nothing.
//   - A goroutine that makes or closes such a machine must be locked to its thread by runtime.LockOSThread (docs/cuda.md).
//   - MachineGPU is not an opened GPU: its methods are [ErrState].
func MachineGPU() *device.GPU { return machineGPU }

var machineGPU = new(device.GPU)

// machinePages are pages in the context of a machine.
type machinePages struct {
	cache  *Cache
	layout cacheLayout

	mu    sync.Mutex           // taken after the cache's
	there *kvstore.DevicePages // nil before the first run of a layer
}

func (p *machinePages) Shards() int   { return 1 }
func (p *machinePages) Where() string { return "the GPU of Gorgonia's machine" }

// Supports refuses a problem for which no GPU has kernels. A run may refuse others.
func (p *machinePages) Supports(op string, g *attn.Problem) error {
	if err := attention.HasKernel(g); err != nil {
		return errs.Errorf(op, ErrUnsupported, "on %s: %v", p.Where(), err)
	}
	switch { // not tested on the machine
	case g.Sinks:
		return errs.Errorf(op, ErrUnsupported, "on %s: attention sinks", p.Where())
	case g.Rotary != attn.Rotary{}:
		return errs.Errorf(op, ErrUnsupported, "on %s: a rotary embedding", p.Where())
	case g.Features()&attn.Scaled != 0:
		return errs.Errorf(op, ErrUnsupported, "on %s: %v with %v", p.Where(), g.Pages.Key().DType, g.Pages.Key().Scales)
	case g.Features()&attn.MixedKeys != 0:
		return errs.Errorf(op, ErrUnsupported, "on %s: mixed keys of %v", p.Where(), g.Pages.Key().DType)
	}
	return nil
}

// Operands refuses: Do has values on the CPU, as a lisp machine calls it.
func (p *machinePages) Operands(op string, _ []G.Value) (o [4]operand.Operand, err error) {
	return o, errs.Errorf(op, ErrUnsupported, "the cache is on %s and the node runs on the CPU: it needs a tape machine", p.Where())
}

func (p *machinePages) CopyPages(op string, copies []kvstore.Copy) error {
	if len(copies) == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.there == nil || p.there.GPU.Dev.Lost() {
		return errs.Errorf(op, ErrClosed, "the machine that the cache's tokens were on")
	}
	return p.there.CopyPages(op, copies)
}

// MoveSlots moves keys and values of layers, so a machine has run.
func (p *machinePages) MoveSlots(op string, moves []kvstore.Move) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.there == nil || p.there.GPU.Dev.Lost() {
		return errs.Errorf(op, ErrClosed, "the machine that the cache's tokens were on")
	}
	return p.there.MoveSlots(op, moves)
}

// Transfer refuses before the first run of a layer: the machine is not known yet, and there are no pages.
func (p *machinePages) Transfer(op string, t *kvstore.Transfer, in bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.there == nil:
		return errs.Errorf(op, ErrUnsupported, "no layer has run on a machine yet, so the cache has no memory there")
	case p.there.GPU.Dev.Lost():
		return errs.Errorf(op, ErrClosed, "the machine that the cache was on")
	}
	return p.there.Transfer(op, t, in)
}

func (p *machinePages) NewPlan(rows int, g attn.Problem) kvstore.Plan {
	return &machinePlan{pages: p, most: rows, geometry: g}
}

func (p *machinePages) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.giveBack()
}

func (p *machinePages) giveBack() error {
	if p.there == nil {
		return nil
	}
	there := p.there
	p.there = nil
	return there.Close()
}

// on returns the pages on a machine's GPU, for a layer of an open step. If no pages but the step's fresh ones are held, on makes new
// pages: the step writes its own again.
func (p *machinePages) on(op string, step *Step, gpu *ongpu.GPU) (*kvstore.DevicePages, error) {
	if there := p.now(); there != nil && there.GPU == gpu {
		return there, nil
	}
	c := p.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.there != nil {
		held := c.pool.Count() - c.pool.Free()
		for i := range step.reservations {
			held -= len(step.reservations[i].Fresh())
		}
		switch {
		case held > 0 && p.there.GPU.Dev.Lost():
			return nil, errs.Errorf(op, ErrClosed, "the machine that the cache's %d tokens were on", c.tokens)
		case held > 0:
			return nil, errs.Errorf(op, ErrUnsupported, "the cache's %d tokens are on another machine; one machine runs all graphs of a cache", c.tokens)
		}
		if err := p.giveBack(); err != nil {
			return nil, ongpu.Error(op, err)
		}
	}
	config := p.layout.store
	config.Device = gpu
	there, err := kvstore.NewDevice(op, &config, p.layout.least())
	if err != nil {
		return nil, err
	}
	p.there = there
	return there, nil
}

func (p *machinePages) now() *kvstore.DevicePages {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.there
}

// machinePlan is a plan that the first layer of a run builds. The machine is not known before.
type machinePlan struct {
	pages    *machinePages
	most     int // rows of a step
	geometry attn.Problem
	seqs     []attn.Sequence
	rows     int
	plan     *kvstore.DevicePlan // nil before the first layer
	built    bool                // for seqs
}

func (p *machinePlan) Build(_ string, seqs []attn.Sequence, rows int) error {
	p.seqs, p.rows, p.built = seqs, rows, false
	return nil
}

func (p *machinePlan) Attend(op string, c *kvstore.Call) (out, lse G.Value, err error) {
	there, err := p.pages.on(op, c.Node.(nodeOf).step, ongpu.Must(c.QKV[0]).GPU)
	if err != nil {
		return nil, nil, err
	}
	if p.plan == nil || !p.plan.Of(there) {
		p.plan, p.built = there.NewPlan(p.most, p.geometry).(*kvstore.DevicePlan), false
	}
	if !p.built {
		if err := p.plan.Build(op, p.seqs, p.rows); err != nil {
			return nil, nil, err
		}
		p.built = true
	}
	return p.plan.Attend(op, c)
}
