package leanattention

import (
	"errors"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/kernels"
)

// attentionEngine is what computes attention on a GPU. It is an interface so
// that tests without a GPU can have another.
type attentionEngine interface {
	// Supports refuses geometries and element types that it has no kernel for.
	Supports(g *attn.Problem) error
	NewPlan() attentionPlan
	Close() error
}

// attentionPlan is a schedule on a GPU.
type attentionPlan interface {
	Reserve(attention.Capacity) error
	Build(g attn.Problem, seqs []attn.Sequence, rows int) error
	Generation() uint64
	Upload(*cuda.Stream) error
	AppendRows(s *cuda.Stream, k, v, newK, newV deviceMemory, heads int) error
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
			return nil, errorf(op, ErrUnsupported, "attention on %v: %v", g, err)
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
		return errorf(op, ErrDType, "on %v: %v", g, err)
	default:
		return errorf(op, ErrUnsupported, "on %v: %v", g, err)
	}
}

// buildPlan builds a plan, with the memory that nobody uses if it has to be.
func (g *GPU) buildPlan(op string, p attentionPlan, geometry attn.Problem, seqs []attn.Sequence, rows int) error {
	err := p.Build(geometry, seqs, rows)
	if errors.Is(err, cuda.ErrOutOfMemory) {
		if err = g.queue.Submit(func(sub *device.Submission) error { sub.Collect(); return nil }); err == nil {
			err = p.Build(geometry, seqs, rows)
		}
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, attn.ErrShape), errors.Is(err, attn.ErrUnsupported): // right, but more than a launch can do
		return errorf(op, ErrUnsupported, "on %v: %v", g, err)
	}
	return deviceEngineError(op, "plan", err)
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
