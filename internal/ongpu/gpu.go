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
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/kernels"
)

// GPU is an open GPU, or one of several that were opened together. What users are told of it is in package device.
type GPU struct {
	Public  any            // the GPU of package device that this is a part of; nil: of none
	fresh   func() *Tensor // makes tensors
	mark    nocopy.Mark
	Dev     *cuda.Device
	ID      uint64       // one GPU may be opened twice
	Group   *queue.Group // of all members
	Queue   *queue.Queue // of this one
	Members []*GPU       // of the group; the first is the GPU value that was opened

	attention struct {
		sync.Mutex
		engine AttentionEngine // nil before it is first needed
		plans  []AttentionPlan // that nobody has
	}

	decoder struct {
		sync.Mutex
		kernels  *decoder.Engine                  // nil before they are first needed
		exchange atomic.Pointer[decoder.Exchange] // of the first of several: what they sum through; nil before that
	}
}

// List describes the GPUs that the driver shows, of which there is one at least.
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

// Open opens the GPUs of these ordinals as one, which is g. fresh makes its tensors.
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
			closeDevices(devs) // the first error tells more
			return Error(op, err)
		}
		devs = append(devs, dev)
	}
	return OpenDevices(g, fresh, op, devs...)
}

// OpenDevices is Open of devices, which g owns from then on. They are closed if there is an error.
func OpenDevices(g *GPU, fresh func() *Tensor, op string, devs ...*cuda.Device) error {
	group, err := queue.OpenGroup(devs...)
	if err != nil {
		closeDevices(devs) // the first error tells more
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

// closeDevices closes them, the last one first. The error is the first.
func closeDevices(devs []*cuda.Device) (first error) {
	for _, dev := range slices.Backward(devs) {
		if err := dev.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// LoadDriver is a variable for tests, which put another driver there.
var LoadDriver = cuda.Load

// String says which GPU it is, as error texts do: "GPU 0 (NVIDIA H200)", or of several
// "GPU 0 (NVIDIA H200) with GPU 1 (NVIDIA H200)".
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

// Alone says which GPU it is itself.
func (g *GPU) Alone() string {
	i := g.Dev.Info()
	return fmt.Sprintf("GPU %d (%s)", i.Ordinal, i.Name)
}

// Synchronize waits until all work that was asked of the GPU is done.
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

// Close waits for the GPU's work and gives back all that was made on the GPU.
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

// closeEngine ends the use of the attention engine, if there is one, and of what GPUs sum through.
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

// Enter is [GPU.Check], and keeps the GPU open until Group.Leave. If one of several GPUs has not answered, Enter is an error.
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

// enterToFree is [GPU.Enter] for what gives memory back.
func (g *GPU) enterToFree(op string) error {
	if err := g.Check(op); err != nil {
		return err
	}
	if err := g.Group.Enter(); err != nil {
		return Error(op, err)
	}
	return nil
}

// AttentionEngine is what computes attention on a GPU. It is an interface so
// that tests without a GPU can have another.
type AttentionEngine interface {
	// Supports refuses geometries and element types that it has no kernel for.
	Supports(g *attn.Problem) error
	NewPlan() AttentionPlan
	// Merge merges the states of attention to parts of keys.
	Merge(s *cuda.Stream, p *attention.Parts, b *cuda.Buffer, to *attention.Merged) error
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
	AppendRows(s *cuda.Stream, k, v, newK, newV Mem, heads int) error
	AppendTurned(s *cuda.Stream, k, v, newK, newV, q, turned Mem, heads int) error
	Run(s *cuda.Stream, o *AttentionOperands) error
	Close() error
}

// The package's name is what most variables of type *GPU are called.
type (
	Mem               = gpu.Memory
	AttentionOperands = attention.Operands
)

// NewAttentionEngine is the engine of a device, whose plans streams of another one upload.
// It is a variable for tests.
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

// Attention is the GPU's engine, made when it is first needed.
func (g *GPU) Attention(op string) (AttentionEngine, error) {
	if err := g.Enter(op); err != nil {
		return nil, err
	}
	defer g.Group.Leave()
	g.attention.Lock()
	defer g.attention.Unlock()
	if g.attention.engine == nil {
		// A decode step's copies lie between two replays, where the GPU does nothing else.
		// The first of several GPUs makes them for all.
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

// Supports says whether attention of this geometry can run on the GPU.
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

// BuildPlan builds a plan, with the memory that nobody uses if it has to be. slots are nil, or where new tokens go.
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
	case errors.Is(err, attn.ErrShape), errors.Is(err, attn.ErrUnsupported): // right, but more than a launch can do
		return errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", g, err)
	}
	return EngineError(op, "plan", fmt.Errorf("on %s: %w", g.Alone(), err))
}

// MergeParts is Merge of the engine, which is there.
func (g *GPU) MergeParts(s *cuda.Stream, p *attention.Parts, b *cuda.Buffer, to *attention.Merged) error {
	g.attention.Lock()
	e := g.attention.engine
	g.attention.Unlock()
	return e.Merge(s, p, b, to)
}

// TakePlan is a plan that nobody uses. The engine is there.
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

// closePlans gives back the memory of plans that nobody uses.
func (g *GPU) closePlans() {
	g.attention.Lock()
	plans := g.attention.plans
	g.attention.plans = nil
	g.attention.Unlock()
	for _, p := range plans {
		_ = p.Close() // it counts as closed whatever the driver says
	}
}

// GivePlan takes a plan back. It may come from a cleanup, and when the GPU is
// closed.
func (g *GPU) GivePlan(p AttentionPlan) {
	g.attention.Lock()
	defer g.attention.Unlock()
	if g.attention.engine != nil {
		g.attention.plans = append(g.attention.plans, p)
	}
}
