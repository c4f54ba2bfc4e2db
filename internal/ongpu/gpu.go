package ongpu

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/kernels"

	"gorgonia.org/tensor"
)

// GPU is an open GPU, or one of several that were opened together. Package device documents it for users.
type GPU struct {
	Public  any            // the GPU of package device that has this one; nil: none
	fresh   func() *Tensor // makes tensors
	mark    nocopy.Mark
	Dev     *cuda.Device
	ID      uint64       // unique: one GPU may be opened twice
	Group   *queue.Group // all members
	Queue   *queue.Queue // this GPU's queue
	Members []*GPU       // the group's GPUs; the first is the opened GPU value
	Engines sync.Mutex   // held by an engine of package decoder that uses the GPU

	attention struct {
		sync.Mutex
		engine AttentionEngine // nil before first use
		plans  []AttentionPlan // unused plans
	}

	decoder struct {
		sync.Mutex
		kernels  *layers.Engine                  // nil before first use
		exchange atomic.Pointer[layers.Exchange] // on the first of several GPUs: the memory for sums; nil before first use
	}
}

// List describes the GPUs that the driver finds, at least one.
func List(op string) ([]cuda.Info, error) {
	drv, err := LoadDriver()
	if err != nil {
		return nil, Error(op, err)
	}
	n, err := drv.Count()
	if err != nil {
		return nil, Error(op, err)
	}
	if n == 0 {
		return nil, errs.Errorf(op, cuda.ErrNoDevice, "the driver shows none")
	}
	list := make([]cuda.Info, n)
	for i := range list {
		if list[i], err = drv.Info(i); err != nil {
			return nil, Error(op, err)
		}
	}
	return list, nil
}

// Open opens the GPUs of these ordinals as one, in g. fresh makes its tensors.
func Open(g *GPU, fresh func() *Tensor, op string, ordinals ...int) error {
	if len(ordinals) == 0 {
		return errs.Errorf(op, errs.ErrUnsupported, "no ordinals")
	}
	for i, o := range ordinals {
		if slices.Contains(ordinals[:i], o) {
			return errs.Errorf(op, errs.ErrUnsupported, "GPU %d twice", o)
		}
	}
	drv, err := LoadDriver()
	if err != nil {
		return Error(op, err)
	}
	var devs []*cuda.Device
	for _, o := range ordinals {
		dev, err := drv.Open(o)
		if err != nil {
			closeDevices(devs) // the first error has more detail
			return Error(op, err)
		}
		devs = append(devs, dev)
	}
	return OpenDevices(g, fresh, op, devs...)
}

// OpenDevices is Open for devices, which g then owns. After an error the devices are closed.
func OpenDevices(g *GPU, fresh func() *Tensor, op string, devs ...*cuda.Device) error {
	group, err := queue.OpenGroup(devs...)
	if err != nil {
		closeDevices(devs) // the first error has more detail
		return Error(op, err)
	}
	var members []*GPU
	for i, dev := range devs {
		m := g
		if i > 0 {
			m = new(GPU)
		}
		m.fresh, m.Dev, m.ID, m.Group, m.Queue = fresh, dev, gpus.Add(1), group, group.Member(i)
		m.mark.Set()
		m.Queue.OnShort(m.closePlans)
		members = append(members, m)
	}
	for _, m := range members {
		m.Members = members
	}
	return nil
}

// gpus counts GPU values.
var gpus atomic.Uint64

// closeDevices closes the devices, the last one first, and returns the first error.
func closeDevices(devs []*cuda.Device) (first error) {
	for _, dev := range slices.Backward(devs) {
		if err := dev.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// LoadDriver is a variable for tests with another driver.
var LoadDriver = cuda.Load

// String returns the GPU's name in error texts: "GPU 0 (NVIDIA H200)", or of several "GPU 0 (NVIDIA H200) with GPU 1
// (NVIDIA H200)".
func (g *GPU) String() string {
	if g == nil {
		return errs.Host
	}
	if g.Check("") != nil {
		return "a GPU that was not opened"
	}
	text := g.Alone()
	if g == g.Members[0] {
		for _, m := range g.Members[1:] {
			text += " with " + m.Alone()
		}
	}
	return text
}

// Alone returns the name of this GPU without the other members.
func (g *GPU) Alone() string {
	i := g.Dev.Info()
	return fmt.Sprintf("GPU %d (%s)", i.Ordinal, i.Name)
}

// Synchronize waits until all queued work of the GPU is done.
func (g *GPU) Synchronize() error {
	const op = "GPU.Synchronize"
	if err := g.Enter(op); err != nil {
		return err
	}
	defer g.Group.Leave()
	if err := g.Group.Synchronize(); err != nil {
		return Error(op, err)
	}
	return nil
}

// Close waits for the GPU's work and frees all objects of the GPU.
func (g *GPU) Close() error {
	const op = "GPU.Close"
	if err := g.Check(op); err != nil {
		return err
	}
	switch err := g.Group.Close(); {
	case errors.Is(err, queue.ErrRecording):
		return WithinRecord(op, g)
	case err != nil:
		return Error(op, err)
	}
	var first error
	var devs []*cuda.Device
	for _, m := range g.Members {
		if err := m.closeEngine(); err != nil && first == nil {
			first = err
		}
		devs = append(devs, m.Dev)
	}
	if err := closeDevices(devs); err != nil && first == nil {
		first = err
	}
	if first != nil {
		return Error(op, first)
	}
	return nil
}

// closeEngine closes the attention engine and the memory for sums, if they exist.
func (g *GPU) closeEngine() (err error) {
	g.decoder.Lock()
	x := g.decoder.exchange.Swap(nil)
	g.decoder.Unlock()
	if x != nil {
		defer func() { err = errors.Join(err, x.Close()) }()
	}
	g.attention.Lock()
	defer g.attention.Unlock()
	if g.attention.engine != nil {
		err = g.attention.engine.Close()
	}
	g.attention.engine, g.attention.plans = nil, nil
	return err
}

// Check returns an error if g does not come from device.Open, or is a copy.
func (g *GPU) Check(op string) error {
	const what, by = "GPU", "device.Open"
	if g == nil {
		return errs.Unmade(op, what, by)
	}
	return errs.Original(op, &g.mark, what, by)
}

// Enter is [GPU.Check], and keeps the GPU open until Group.Leave. If one of several GPUs has not answered, Enter is
// an error.
func (g *GPU) Enter(op string) error {
	if err := g.enterToFree(op); err != nil {
		return err
	}
	if x := g.Members[0].decoder.exchange.Load(); x != nil {
		if err := x.Failed(); err != nil {
			g.Group.Leave()
			return Error(op, err)
		}
	}
	return nil
}

// enterToFree is [GPU.Enter] for calls that free memory.
func (g *GPU) enterToFree(op string) error {
	if err := g.Check(op); err != nil {
		return err
	}
	if err := g.Group.Enter(); err != nil {
		return Error(op, err)
	}
	return nil
}

// AttentionEngine computes attention on a GPU. Tests without a GPU have another implementation.
type AttentionEngine interface {
	// Supports refuses geometries and element types without a kernel.
	Supports(g *attn.Problem) error
	NewPlan() AttentionPlan
	// Merge merges the states of attention to parts of keys.
	Merge(s *cuda.Stream, p *attention.Parts, b *cuda.Buffer, to *attention.Merged) error
	NewBackward(g *attn.Gradient, kv attn.DType) (*attention.Backward, error)
	Close() error
}

// AttentionPlan is a schedule on a GPU.
type AttentionPlan interface {
	Reserve(attention.Capacity) error
	BuildPart(g attn.Problem, seqs []attn.Sequence, rows int, slots []int) error
	Generation() uint64
	Recorded()
	Upload(*cuda.Stream) error
	Lay(query, out, lse attn.Strides)
	AppendRows(s *cuda.Stream, to attention.Pages, newK, newV Mem, heads int) error
	AppendRotated(s *cuda.Stream, to attention.Pages, newK, newV, q, rotated Mem, heads int) error
	Run(s *cuda.Stream, o *AttentionOperands) error
	Close() error
}

// The package's name is what most variables of type *GPU are called.
type (
	Mem               = gpu.Memory
	AttentionOperands = attention.Operands
)

// NewAttentionEngine returns the engine of a device. Streams of another device upload its plans. NewAttentionEngine
// is a variable for tests.
var NewAttentionEngine = func(dev, uploads *cuda.Device) (AttentionEngine, error) {
	e, err := attention.New(dev)
	if err != nil {
		return nil, err
	}
	e.UploadOn(uploads)
	return Planner{e}, nil
}

// Planner is an attention.Engine.
type Planner struct{ *attention.Engine }

func (p Planner) NewPlan() AttentionPlan { return p.Engine.NewPlan() }

// Attention returns the GPU's engine, made at first use.
func (g *GPU) Attention(op string) (AttentionEngine, error) {
	if err := g.Enter(op); err != nil {
		return nil, err
	}
	defer g.Group.Leave()
	g.attention.Lock()
	defer g.attention.Unlock()
	if g.attention.engine == nil {
		// A decode step's copies are between two replays, where the GPU has no other work. The first of several GPUs
		// makes the copies for all.
		if g == g.Members[0] {
			if err := g.Queue.Arrange(gpu.PutOffCopies); err != nil {
				return nil, Error(op, err)
			}
		}
		e, err := NewAttentionEngine(g.Dev, g.Members[0].Dev)
		if errors.Is(err, kernels.ErrNoImage) {
			return nil, errs.Errorf(op, errs.ErrUnsupported, "attention on %v: %v", g, err)
		}
		if err != nil {
			return nil, Error(op, err)
		}
		g.attention.engine = e
	}
	return g.attention.engine, nil
}

// Supports reports whether the GPU has a kernel for attention of this geometry.
func (g *GPU) Supports(op string, geometry *attn.Problem) error {
	e, err := g.Attention(op)
	if err != nil {
		return err
	}
	switch err := e.Supports(geometry); {
	case err == nil:
		return nil
	case errors.Is(err, attn.ErrDType):
		return errs.Errorf(op, errs.ErrDType, "on %v: %v", g, err)
	default:
		return errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", g, err)
	}
}

// Backward returns gradients of attention with operands of type t.
func (g *GPU) Backward(op string, of *attn.Gradient, t tensor.Dtype) (*attention.Backward, error) {
	e, err := g.Attention(op)
	if err != nil {
		return nil, err
	}
	kv, _ := operand.StorageType(t)
	b, err := e.NewBackward(of, kv)
	switch {
	case err == nil:
		return b, nil
	case errors.Is(err, attn.ErrDType), errors.Is(err, attn.ErrUnsupported), errors.Is(err, kernels.ErrNoImage):
		return nil, errs.Errorf(op, errs.ErrUnsupported, "on %v: %v; in %s there are gradients of float32 and float64", g, err, errs.Host)
	}
	return nil, EngineError(op, "gradients", err)
}

// BuildPlan builds a plan, in freed memory if memory is short. slots are the slots of new tokens, or nil.
func (g *GPU) BuildPlan(op string, p AttentionPlan, geometry attn.Problem, seqs []attn.Sequence, rows int, slots []int) error {
	err := p.BuildPart(geometry, seqs, rows, slots)
	if errors.Is(err, cuda.ErrOutOfMemory) {
		if err = g.Queue.Submit(func(sub *queue.Submission) error { sub.Collect(); return nil }); err == nil {
			err = p.BuildPart(geometry, seqs, rows, slots)
		}
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, attn.ErrShape), errors.Is(err, attn.ErrUnsupported): // a valid request beyond a launch's limits
		return errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", g, err)
	}
	return EngineError(op, "plan", fmt.Errorf("on %s: %w", g.Alone(), err))
}

// MergeParts is Merge of the engine, which must exist.
func (g *GPU) MergeParts(s *cuda.Stream, p *attention.Parts, b *cuda.Buffer, to *attention.Merged) error {
	g.attention.Lock()
	e := g.attention.engine
	g.attention.Unlock()
	return e.Merge(s, p, b, to)
}

// TakePlan returns an unused plan. The engine must exist.
func (g *GPU) TakePlan() AttentionPlan {
	g.attention.Lock()
	defer g.attention.Unlock()
	if last := len(g.attention.plans) - 1; last >= 0 {
		p := g.attention.plans[last]
		g.attention.plans = g.attention.plans[:last]
		return p
	}
	return g.attention.engine.NewPlan()
}

// closePlans frees the memory of unused plans.
func (g *GPU) closePlans() {
	g.attention.Lock()
	plans := g.attention.plans
	g.attention.plans = nil
	g.attention.Unlock()
	for _, p := range plans {
		_ = p.Close() // the plan counts as closed whatever the driver returns
	}
}

// GivePlan takes a plan back. A cleanup may call GivePlan, also after the GPU is closed.
func (g *GPU) GivePlan(p AttentionPlan) {
	g.attention.Lock()
	defer g.attention.Unlock()
	if g.attention.engine != nil {
		g.attention.plans = append(g.attention.plans, p)
	}
}
