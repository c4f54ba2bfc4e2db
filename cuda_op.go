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

// Built with the tag cuda, Gorgonia's tape machine computes on a GPU. It asks an
// op's type alone whether a node runs there: if it has CUDADo, the machine copies
// the node's inputs to its GPU, hands it memory for the output, and calls that
// method instead of Do. So an op is put into a wrapper with the method, or is
// not, when its node is made.
//
// The wrappers compute with the engine of any other GPU, in the machine's
// context, which is at the end. What follows here only says what is an operand.

// machineAttention is [Attention] on Gorgonia's machine.
type machineAttention struct{ *attentionOp }

// placeAttention puts attention on the machine where there are kernels for it.
// Everything else stays on the CPU, as stock ops without kernels do. So does
// what gets tensors of a GPU that the user has opened: it computes there.
func placeAttention(op *attentionOp, q, k, v *G.Node) G.Op {
	g := op.problem.geometry(&op.config)
	modified := op.mask.Window != 0 || op.score != attn.Score{} || op.hasSeed() || op.hasQueryLengths() || op.invariant // has not been tried there
	if op.query != tensor.Float32 || modified || attention.HasKernel(&g) != nil {
		return op
	}
	seen := make(map[int64]bool)
	if getsDeviceTensors(q, seen) || getsDeviceTensors(k, seen) || getsDeviceTensors(v, seen) {
		return op
	}
	return &machineAttention{op}
}

// getsDeviceTensors says whether a node's values are [device.Tensor]s, as far as
// the graph shows: one comes from an input that has such a value now, or from
// device.ToGPU, and passes through every op but ToHost.
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

// CallsExtern and ReturnsPtr are what the machine goes by when it gives memory
// for the output.
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
	op.logs().put(prealloc, lse.Value())
	return prealloc, nil
}

// DoDiff is refused: the lisp machine would have the values on the GPU, and the
// gradient is computed on the CPU. The tape machine copies them.
func (op *machineAttention) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf("Attention.DoDiff", ErrUnsupported, "gradient on the lisp machine under the build tag cuda")
}

// machineCached is [CachedAttention] on a cache that is on Gorgonia's machine.
type machineCached struct{ *cachedOp }

// placeCached puts the op where its cache is.
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

// machineLSE is the node of [LogSumExp] where the attention is on the machine.
type machineLSE struct{ *lseOp }

// placeLSE puts the op where the attention is.
func placeLSE(op *lseOp, out *G.Node) G.Op {
	switch out.Op().(type) {
	case *machineAttention, *machineCached:
		return &machineLSE{op}
	}
	return op
}

func (*machineLSE) CallsExtern() bool { return true }
func (*machineLSE) ReturnsPtr() bool  { return true }

// CUDADo copies what the attention left to prealloc.
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
	from, ok := ongpu.Of(op.from.take(in[0]))
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

// machine is a machine of Gorgonia as ops here see it: a [GPU] in the machine's
// own context. The context goes when the machine is closed, and all of this with
// it; the driver is asked for nothing then.
type machine struct {
	gpu *ongpu.GPU

	mu        sync.Mutex
	lengths   []int                      // the last that were read,
	lengthsOf weak.Pointer[tensor.Dense] // from here
}

// machines are those that nodes have run on, by the object that stands for the
// context: a new one for each machine, while handles of the driver come again.
var machines struct {
	sync.Mutex
	of map[cu.Context]*machine
}

// machineOf is the machine that runs a node, when it has done what was queued
// before: the copies of the node's inputs.
//
// Of the machine's engines the slice has the real ones. Those of its methods
// DoWork and Contexts are copies; and a call that waits for its batch, such as
// MemAlloc, may wait for ever. So nothing is put into a batch here.
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

// A context is a handle of the driver, and nothing else.
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
	// A closed one has no handle.
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

// patience is for an engine that answers at once, unless it has ended.
const patience = 30 * time.Second

// settleBLAS has cuBLAS work in the machine's context. Gorgonia makes its handle
// on a thread with whatever context that thread had before: another machine's,
// or the primary one. Its products would then run beside what is queued here,
// and read or write operands too early.
//
// The engine's thread is the one that calls cuBLAS. It ends at the first call
// that fails, and whoever asks it for something then waits for ever.
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
	_ = blas.Close() // waits for its work; what it was on may be gone already
	if err := cu.SetCurrentContext(ctx); err != nil {
		return err
	}
	return blas.Init(cublas.WithContext(engine.Context()))
}

// borrow is a value in the machine's memory as a tensor there.
//
// Its shape may be another of as many elements: Gorgonia's Reshape on a GPU
// changes that of its input.
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

// borrowAll is borrow of inputs and the output.
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

// readLengths appends the live lengths of p to dst: they plan the schedule, on
// the host, but the machine has copied them to the GPU like every input. All
// nodes of a run get the same copy, and only the first one waits for it.
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

// MachineGPU stands for the GPU of the machine that runs a graph, as
// [CacheConfig.Device]: it is there under the build tag cuda only. Layers of such
// a cache run on Gorgonia's own CUDA machine, between its own ops.
//
// Each of those machines has a context of its own, and memory of one can't be
// used in another. So the pages are made when a layer first runs, on the machine
// that runs it, and a cache that holds tokens belongs to that machine: on
// another, a layer is [ErrUnsupported]; when the machine is closed, its tokens
// are gone, and a layer is [ErrClosed]. A cache whose sequences are all released,
// or truncated to nothing, goes along to the next machine.
//
// A goroutine that makes or closes such a machine has to be locked to its thread,
// by runtime.LockOSThread: docs/cuda.md says why.
//
// It is no GPU that was opened: its methods are [ErrState].
func MachineGPU() *device.GPU { return machineGPU }

var machineGPU = new(device.GPU)

// machinePages are pages in the context of a machine.
type machinePages struct {
	cache  *Cache
	layout cacheLayout

	mu    sync.Mutex           // taken after the cache's
	there *kvstore.DevicePages // nil before a layer has run
}

func (p *machinePages) Shards() int   { return 1 }
func (p *machinePages) Where() string { return "the GPU of Gorgonia's machine" }

// supports sees what no GPU has kernels for; the rest shows in a run.
func (p *machinePages) Supports(op string, g *attn.Problem) error {
	if err := attention.HasKernel(g); err != nil {
		return errs.Errorf(op, ErrUnsupported, "on %s: %v", p.Where(), err)
	}
	switch { // it has not been tried there
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

// operands refuses: the values of Do are on the CPU, as on a lisp machine.
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

// moveSlots moves what layers have made, so that a machine has run.
func (p *machinePages) MoveSlots(op string, moves []kvstore.Move) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.there == nil || p.there.GPU.Dev.Lost() {
		return errs.Errorf(op, ErrClosed, "the machine that the cache's tokens were on")
	}
	return p.there.MoveSlots(op, moves)
}

// transfer refuses where the pages are not: nobody knows yet which machine will run
// the layers.
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

// on is the pages on the machine whose GPU is given, for a layer of a step that
// is open. They are made there if nobody but the step holds any: what it writes
// it writes again.
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

// machinePlan is a layerPlan that is built in the first layer of a turn: before,
// nobody knows on which machine.
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
