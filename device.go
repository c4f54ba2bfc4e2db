package leanattention

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/kernels"
)

// GPU is an open NVIDIA GPU. It needs an installed driver and nothing else: no
// toolkit, no cgo.
//
// Attention runs on a GPU where its operands are: [CachedAttention] on a cache
// with [CacheConfig].Device, and [Attend] and [Attention] on operands
// that are each a [DeviceTensor].
// All work of a GPU value is done in the order in which it was asked for.
//
// The driver is looked for when [GPUs] or [OpenGPU] is called, until it is found. For that, a
// Linux program for amd64 or arm64 that imports this package needs glibc to
// start, also when it was built with CGO_ENABLED=0. The build tag nogpu leaves
// GPUs out: then it needs nothing, and every call gives [ErrNoDriver].
//
// A GPU value may also be several GPUs of one machine, see [OpenGPUs]. It goes wherever a
// single one goes.
//
// A GPU may be used by several goroutines at once. Close it when it is no longer
// needed: nothing else gives its memory back before the process ends.
//
// A GPU is used by its pointer. A copy of a GPU is [ErrState] wherever it is used.
type GPU struct {
	mark    nocopy.Mark
	dev     *cuda.Device
	id      uint64        // one GPU may be opened twice
	group   *device.Group // of all members
	queue   *device.Queue // of this one
	members []*GPU        // of the group; the first is the GPU value that was opened

	attention struct {
		sync.Mutex
		engine attentionEngine // nil before it is first needed
		plans  []attentionPlan // that nobody has
	}

	decoder struct {
		sync.Mutex
		kernels  *decoder.Engine                  // nil before they are first needed
		exchange atomic.Pointer[decoder.Exchange] // of the first of several: what they sum through; nil before that
	}
}

// GPUInfo describes a GPU.
type GPUInfo struct {
	Ordinal         int    // the driver's number of it, from 0: what [OpenGPU] takes
	Name            string // as the driver says it, such as "NVIDIA H200"
	Major, Minor    int    // compute capability
	Multiprocessors int    // streaming multiprocessors (SMs)
	MemoryBytes     int64  // all of its memory
	L2Bytes         int    // L2 cache

	// MemoryBandwidth is what the clock and the width of its memory come to, in
	// bytes a second, of which reading gets some nine tenths at best. 0 where the
	// driver does not tell.
	MemoryBandwidth float64
}

// String is the GPU in a line, for reports.
func (i GPUInfo) String() string {
	return fmt.Sprintf("GPU %d: %s, compute capability %d.%d, %d SMs, %.1f GiB", i.Ordinal, i.Name, i.Major, i.Minor,
		i.Multiprocessors, float64(i.MemoryBytes)/(1<<30))
}

// GPUMemory is the state of a GPU's memory, in bytes.
type GPUMemory struct {
	Free   int64 // for every process of the machine
	Total  int64 // that the driver can hand out
	Used   int64 // by buffers of this GPU value
	Pinned int64 // memory of the host that this GPU value holds for copies
}

// GPUs lists the GPUs that the driver shows, in the order of their ordinals,
// those that are too old for [OpenGPU] included. It opens none of them.
//
// Errors: [ErrNoDriver], [ErrDriverTooOld], and [ErrNoDevice] where the driver
// finds no GPU; so a list without an error is not empty.
func GPUs() ([]GPUInfo, error) {
	drv, err := loadDriver()
	if err != nil {
		return nil, gpuError("GPUs", err)
	}
	n, err := drv.Count()
	if err != nil {
		return nil, gpuError("GPUs", err)
	}
	if n == 0 {
		return nil, errs.Errorf("GPUs", ErrNoDevice, "the driver shows none")
	}
	list := make([]GPUInfo, n)
	for i := range list {
		info, err := drv.Info(i)
		if err != nil {
			return nil, gpuError("GPUs", err)
		}
		list[i] = gpuInfo(info)
	}
	return list, nil
}

// OpenGPU opens the GPU of this ordinal. It shares the GPU's primary context
// with whatever else in the process uses CUDA. One GPU may be opened more than
// once; each has to be closed.
//
// Errors: [ErrNoDriver], [ErrDriverTooOld] below CUDA 12.0 (driver 525),
// [ErrNoDevice] where there is no GPU of this ordinal, [ErrComputeCapability]
// below 8.0, [ErrOutOfMemory] where others left no memory for a context.
func OpenGPU(ordinal int) (*GPU, error) {
	drv, err := loadDriver()
	if err != nil {
		return nil, gpuError("OpenGPU", err)
	}
	dev, err := drv.Open(ordinal)
	if err != nil {
		return nil, gpuError("OpenGPU", err)
	}
	return newGPU("OpenGPU", dev)
}

// OpenGPUs opens several GPUs of this machine as one GPU value, which is closed as one.
// They must reach each other's memory (NVLink, or PCIe between GPUs that can). Of one
// ordinal it is [OpenGPU].
//
// The first one is where tensors are and nodes compute, as on a single GPU. The others
// share in attention and in the memory for it: a cache with these GPUs as
// [CacheConfig].Device has some KV heads on each, or some pages of each sequence
// ([CacheConfig].Shard), and a tensor from [GPU.UploadSharded] has a part on each. Each GPU attends to what it has,
// and the output is on the first. They share in linear layers whose weights are sharded. Where all inputs of nodes are on all of
// them ([GPU.UploadReplicated], [GPU.UploadSharded]), each does its part of a graph in its own order, and they meet
// where they sum: docs/devices.md.
// The result is that of one GPU, but for rounding: the schedule is another.
// From run to run it has the same bits.
//
// A tensor or cache of one of them that was opened by itself is somewhere else: using
// it here is an error that names both.
//
// Errors: those of [OpenGPU], and [ErrUnsupported] for GPUs that do not reach each other,
// the same ordinal twice, or none.
func OpenGPUs(ordinals ...int) (*GPU, error) {
	const op = "OpenGPUs"
	if len(ordinals) == 0 {
		return nil, errs.Errorf(op, ErrUnsupported, "no ordinals")
	}
	for i, o := range ordinals {
		if slices.Contains(ordinals[:i], o) {
			return nil, errs.Errorf(op, ErrUnsupported, "GPU %d twice", o)
		}
	}
	drv, err := loadDriver()
	if err != nil {
		return nil, gpuError(op, err)
	}
	var devs []*cuda.Device
	for _, o := range ordinals {
		dev, err := drv.Open(o)
		if err != nil {
			closeDevices(devs) // the first error tells more
			return nil, gpuError(op, err)
		}
		devs = append(devs, dev)
	}
	return newGPU(op, devs...)
}

// newGPU is a GPU that owns devices, which it closes if there is an error.
func newGPU(op string, devs ...*cuda.Device) (*GPU, error) {
	group, err := device.OpenGroup(devs...)
	if err != nil {
		closeDevices(devs) // the first error tells more
		return nil, gpuError(op, err)
	}
	var members []*GPU
	for i, dev := range devs {
		g := &GPU{dev: dev, id: ids.Add(1), group: group, queue: group.Member(i)}
		g.mark.Set()
		g.queue.OnShort(g.closePlans)
		members = append(members, g)
	}
	for _, g := range members {
		g.members = members
	}
	return members[0], nil
}

// closeDevices closes them, the last one first. The error is the first.
func closeDevices(devs []*cuda.Device) (first error) {
	for _, dev := range slices.Backward(devs) {
		if err := dev.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// loadDriver is a variable for tests, which put another driver there.
var loadDriver = cuda.Load

// Info describes the GPU, of several the first. It may be asked of a closed one too.
func (g *GPU) Info() GPUInfo {
	if g.made("") != nil {
		return GPUInfo{}
	}
	return gpuInfo(g.dev.Info())
}

// Members describes each of the GPUs that were opened together: one, but for [OpenGPUs].
func (g *GPU) Members() (all []GPUInfo) {
	if g.made("") != nil {
		return nil
	}
	for _, m := range g.members {
		all = append(all, m.Info())
	}
	return all
}

// Name is the GPU's name, such as "NVIDIA H200".
func (g *GPU) Name() string { return g.Info().Name }

// String says which GPU it is, as error texts do: "GPU 0 (NVIDIA H200)", or of several
// "GPU 0 (NVIDIA H200) with GPU 1 (NVIDIA H200)".
func (g *GPU) String() string {
	if g == nil {
		return errs.Host
	}
	if g.made("") != nil {
		return "a GPU that was not opened"
	}
	text := g.alone()
	if g == g.members[0] {
		for _, m := range g.members[1:] {
			text += " with " + m.alone()
		}
	}
	return text
}

// alone says which GPU it is itself.
func (g *GPU) alone() string {
	i := g.Info()
	return fmt.Sprintf("GPU %d (%s)", i.Ordinal, i.Name)
}

// Memory asks for the present state of the GPU's memory, of several GPUs the sum. Errors:
// [ErrClosed].
func (g *GPU) Memory() (sum GPUMemory, err error) {
	if err := g.made("GPU.Memory"); err != nil {
		return GPUMemory{}, err
	}
	for i := range g.members {
		m, err := g.MemoryOf(i)
		if err != nil {
			return GPUMemory{}, err
		}
		sum = GPUMemory{Free: sum.Free + m.Free, Total: sum.Total + m.Total, Used: sum.Used + m.Used, Pinned: sum.Pinned + m.Pinned}
	}
	return sum, nil
}

// MemoryOf is Memory of one of the [GPU.Members], by its place among them. Errors:
// [ErrShape] for none of them, [ErrClosed].
func (g *GPU) MemoryOf(member int) (GPUMemory, error) {
	const op = "GPU.Memory"
	if err := g.made(op); err != nil {
		return GPUMemory{}, err
	}
	if member < 0 || member >= len(g.members) {
		return GPUMemory{}, errs.Errorf(op, ErrShape, "member %d of %d", member, len(g.members))
	}
	m, err := g.members[member].dev.Memory()
	if err != nil {
		return GPUMemory{}, gpuError(op, err)
	}
	return GPUMemory{Free: m.Free, Total: m.Total, Used: m.Used, Pinned: m.Pinned}, nil
}

// Synchronize waits until all that was asked of this GPU value is done, and
// reports what went wrong in it. Only timing needs it: downloads wait by
// themselves. Errors: [ErrClosed], [ErrUnsupported] within [GPU.Record].
func (g *GPU) Synchronize() error {
	const op = "GPU.Synchronize"
	if err := g.enter(op); err != nil {
		return err
	}
	defer g.group.Leave()
	if err := g.group.Synchronize(); err != nil {
		return gpuError(op, err)
	}
	return nil
}

// Close waits for the GPU's work of this process and gives back everything that
// was made on it, the memory of caches and tensors included: their use is
// [ErrClosed] from then on, and so is a second Close. While [GPU.Record] runs, Close is [ErrState] and does nothing.
func (g *GPU) Close() error {
	const op = "GPU.Close"
	if err := g.made(op); err != nil {
		return err
	}
	switch err := g.group.Close(); {
	case errors.Is(err, device.ErrRecording):
		return withinRecord(op, g)
	case err != nil:
		return gpuError(op, err)
	}
	var first error
	var devs []*cuda.Device
	for _, m := range g.members {
		if err := m.closeEngine(); err != nil && first == nil {
			first = err
		}
		devs = append(devs, m.dev)
	}
	if err := closeDevices(devs); err != nil && first == nil {
		first = err
	}
	if first != nil {
		return gpuError(op, first)
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

// made says whether g comes from OpenGPU, and is no copy.
func (g *GPU) made(op string) error {
	const what, by = "GPU", "OpenGPU"
	if g == nil {
		return errs.Unmade(op, what, by)
	}
	return errs.Original(op, &g.mark, what, by)
}

// enter is made, and keeps the GPU open until group.Leave. Where one of several has not answered, nothing is done any more.
func (g *GPU) enter(op string) error {
	if err := g.enterToFree(op); err != nil {
		return err
	}
	if x := g.members[0].decoder.exchange.Load(); x != nil {
		if err := x.Failed(); err != nil {
			g.group.Leave()
			return gpuError(op, err)
		}
	}
	return nil
}

// enterToFree is enter for what gives memory back.
func (g *GPU) enterToFree(op string) error {
	if err := g.made(op); err != nil {
		return err
	}
	if err := g.group.Enter(); err != nil {
		return gpuError(op, err)
	}
	return nil
}

func gpuInfo(i cuda.Info) GPUInfo {
	return GPUInfo{Ordinal: i.Ordinal, Name: i.Name, Major: i.Capability / 10, Minor: i.Capability % 10,
		Multiprocessors: i.Multiprocessors, MemoryBytes: i.MemoryBytes, L2Bytes: i.L2Bytes,
		MemoryBandwidth: 2 * 1e3 * float64(i.MemoryClockKHz) * float64(i.MemoryBusBits) / 8} // two transfers a clock
}

// gpuError wraps an error of the driver, which matches the sentinels by itself
// but for those that are this package's.
func gpuError(op string, err error) error {
	switch {
	case errors.Is(err, cuda.ErrClosed):
		return errs.Errorf(op, ErrClosed, "the GPU")
	case errors.Is(err, device.ErrRecording), errors.Is(err, cuda.ErrNoPeerAccess):
		return errs.Errorf(op, ErrUnsupported, "%v", err)
	}
	return fmt.Errorf("leanattention: %s: %w", op, err)
}

// attentionEngine is what computes attention on a GPU. It is an interface so
// that tests without a GPU can have another.
type attentionEngine interface {
	// Supports refuses geometries and element types that it has no kernel for.
	Supports(g *attn.Problem) error
	NewPlan() attentionPlan
	// Merge merges the states of attention to parts of keys.
	Merge(s *cuda.Stream, p *attention.Parts, b *cuda.Buffer, to *attention.Merged) error
	Close() error
}

// attentionPlan is a schedule on a GPU.
type attentionPlan interface {
	Reserve(attention.Capacity) error
	BuildPart(g attn.Problem, seqs []attn.Sequence, rows int, slots []int) error
	Generation() uint64
	Recorded()
	Upload(*cuda.Stream) error
	Lay(query, out, lse attn.Strides)
	AppendRows(s *cuda.Stream, k, v, newK, newV deviceMemory, heads int) error
	AppendTurned(s *cuda.Stream, k, v, newK, newV, q, turned deviceMemory, heads int) error
	Run(s *cuda.Stream, o *deviceOperands) error
	Close() error
}

// The package's name is what most variables of type *GPU are called.
type (
	deviceMemory   = gpu.Memory
	deviceOperands = attention.Operands
)

// newAttentionEngine is the engine of a device, whose plans streams of another one upload.
// It is a variable for tests.
var newAttentionEngine = func(dev, uploads *cuda.Device) (attentionEngine, error) {
	e, err := attention.New(dev)
	if err != nil {
		return nil, err
	}
	e.UploadOn(uploads)
	return planner{e}, nil
}

// planner is an attention.Engine.
type planner struct{ *attention.Engine }

func (p planner) NewPlan() attentionPlan { return p.Engine.NewPlan() }

// engine is the GPU's engine, made when it is first needed.
func (g *GPU) engine(op string) (attentionEngine, error) {
	if err := g.enter(op); err != nil {
		return nil, err
	}
	defer g.group.Leave()
	g.attention.Lock()
	defer g.attention.Unlock()
	if g.attention.engine == nil {
		// A decode step's copies lie between two replays, where the GPU does nothing else.
		// The first of several GPUs makes them for all.
		if g == g.members[0] {
			if err := g.queue.Arrange(gpu.PutOffCopies); err != nil {
				return nil, gpuError(op, err)
			}
		}
		e, err := newAttentionEngine(g.dev, g.members[0].dev)
		if errors.Is(err, kernels.ErrNoImage) {
			return nil, errs.Errorf(op, ErrUnsupported, "attention on %v: %v", g, err)
		}
		if err != nil {
			return nil, gpuError(op, err)
		}
		g.attention.engine = e
	}
	return g.attention.engine, nil
}

// supports says whether attention of this geometry can run on the GPU.
func (g *GPU) supports(op string, geometry *attn.Problem) error {
	e, err := g.engine(op)
	if err != nil {
		return err
	}
	switch err := e.Supports(geometry); {
	case err == nil:
		return nil
	case errors.Is(err, attn.ErrDType):
		return errs.Errorf(op, ErrDType, "on %v: %v", g, err)
	default:
		return errs.Errorf(op, ErrUnsupported, "on %v: %v", g, err)
	}
}

// buildPlan builds a plan, with the memory that nobody uses if it has to be. slots are nil, or where new tokens go.
func (g *GPU) buildPlan(op string, p attentionPlan, geometry attn.Problem, seqs []attn.Sequence, rows int, slots []int) error {
	err := p.BuildPart(geometry, seqs, rows, slots)
	if errors.Is(err, cuda.ErrOutOfMemory) {
		if err = g.queue.Submit(func(sub *device.Submission) error { sub.Collect(); return nil }); err == nil {
			err = p.BuildPart(geometry, seqs, rows, slots)
		}
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, attn.ErrShape), errors.Is(err, attn.ErrUnsupported): // right, but more than a launch can do
		return errs.Errorf(op, ErrUnsupported, "on %v: %v", g, err)
	}
	return deviceEngineError(op, "plan", fmt.Errorf("on %s: %w", g.alone(), err))
}

// mergeParts is Merge of the engine, which is there.
func (g *GPU) mergeParts(s *cuda.Stream, p *attention.Parts, b *cuda.Buffer, to *attention.Merged) error {
	g.attention.Lock()
	e := g.attention.engine
	g.attention.Unlock()
	return e.Merge(s, p, b, to)
}

// takePlan is a plan that nobody uses. The engine is there.
func (g *GPU) takePlan() attentionPlan {
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

// givePlan takes a plan back. It may come from a cleanup, and when the GPU is
// closed.
func (g *GPU) givePlan(p attentionPlan) {
	g.attention.Lock()
	defer g.attention.Unlock()
	if g.attention.engine != nil {
		g.attention.plans = append(g.attention.plans, p)
	}
}
