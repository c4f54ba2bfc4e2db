//go:build cuda

package leanattention

import (
	"sync"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/attention"

	G "gorgonia.org/gorgonia"
)

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
func MachineGPU() *GPU { return machineGPU }

var machineGPU = new(GPU)

// machinePages are pages in the context of a machine.
type machinePages struct {
	cache                      *Cache
	storage                    attn.DType
	keyElements, valueElements int

	mu    sync.Mutex   // taken after the cache's
	there *devicePages // nil before a layer has run
}

func newMachinePages(op string, c *Cache, storage attn.DType, keyElements, valueElements int) (*machinePages, error) {
	p := &machinePages{cache: c, storage: storage, keyElements: keyElements, valueElements: valueElements}
	// The query heads are not known yet; the least there can be.
	g := (&tokenRows{heads: c.config.KVHeads}).geometry(&c.config, &config{})
	return p, p.supports(op, &g)
}

func (p *machinePages) where() string { return "the GPU of Gorgonia's machine" }

// supports sees what no GPU has kernels for; the rest shows in a run.
func (p *machinePages) supports(op string, g *attn.Problem) error {
	if err := attention.HasKernel(g); err != nil {
		return errorf(op, ErrUnsupported, "on %s: %v", p.where(), err)
	}
	return nil
}

// operands refuses: the values of Do are on the CPU, as on a lisp machine.
func (p *machinePages) operands(op string, _ []G.Value) (o [3]operand, err error) {
	return o, errorf(op, ErrUnsupported, "the cache is on %s and the node runs on the CPU: it needs a tape machine", p.where())
}

func (p *machinePages) copyPages(op string, copies []pageCopy) error {
	if len(copies) == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.there == nil || p.there.gpu.dev.Lost() {
		return errorf(op, ErrClosed, "the machine that the cache's tokens were on")
	}
	return p.there.copyPages(op, copies)
}

// transfer refuses where the pages are not: nobody knows yet which machine will run
// the layers.
func (p *machinePages) transfer(op string, t *pageTransfer, in bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.there == nil:
		return errorf(op, ErrUnsupported, "no layer has run on a machine yet, so the cache has no memory there")
	case p.there.gpu.dev.Lost():
		return errorf(op, ErrClosed, "the machine that the cache was on")
	}
	return p.there.transfer(op, t, in)
}

func (p *machinePages) newPlan(step *Step, g attn.Problem) layerPlan {
	return &machinePlan{pages: p, step: step, geometry: g}
}

func (p *machinePages) close() error {
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
	return there.close()
}

// on is the pages on the machine whose GPU is given, for a layer of a step that
// is open. They are made there if nobody but the step holds any: what it writes
// it writes again.
func (p *machinePages) on(op string, step *Step, gpu *GPU) (*devicePages, error) {
	if there := p.now(); there != nil && there.gpu == gpu {
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
		case held > 0 && p.there.gpu.dev.Lost():
			return nil, errorf(op, ErrClosed, "the machine that the cache's %d tokens were on", c.tokens)
		case held > 0:
			return nil, errorf(op, ErrUnsupported, "the cache's %d tokens are on another machine; one machine runs all graphs of a cache", c.tokens)
		}
		if err := p.giveBack(); err != nil {
			return nil, gpuError(op, err)
		}
	}
	config := c.config
	config.Device = gpu
	there, err := newDevicePages(op, &config, p.storage, p.keyElements, p.valueElements)
	if err != nil {
		return nil, err
	}
	p.there = there
	return there, nil
}

func (p *machinePages) now() *devicePages {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.there
}

// machinePlan is a layerPlan that is built in the first layer of a turn: before,
// nobody knows on which machine.
type machinePlan struct {
	pages    *machinePages
	step     *Step
	geometry attn.Problem
	seqs     []attn.Sequence
	rows     int
	plan     *devicePlan // nil before the first layer
	built    bool        // for seqs
}

func (p *machinePlan) build(_ string, seqs []attn.Sequence, rows int) error {
	p.seqs, p.rows, p.built = seqs, rows, false
	return nil
}

func (p *machinePlan) attend(op string, c *layerCall) (out, lse G.Value, err error) {
	there, err := p.pages.on(op, p.step, c.qkv[0].(*DeviceTensor).gpu)
	if err != nil {
		return nil, nil, err
	}
	if p.plan == nil || p.plan.pages != there {
		p.plan, p.built = &devicePlan{pages: there, step: p.step, geometry: p.geometry}, false
	}
	if !p.built {
		if err := p.plan.build(op, p.seqs, p.rows); err != nil {
			return nil, nil, err
		}
		p.built = true
	}
	return p.plan.attend(op, c)
}
