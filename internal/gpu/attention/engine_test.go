//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"sync"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// After a warm-up nothing is allocated.
func TestAllocations(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the race detector's instrumentation allocates")
	}
	m, lib, _ := fakeGPU(t, 90, 132, 232448)
	p := decodeStep(t, m)
	plan := m.engine.NewPlan()
	o := p.operands()
	step := func() {
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		noError(t, plan.Upload(m.Stream))
		for range 3 {
			noError(t, plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV))
			noError(t, plan.Run(m.Stream, o))
		}
	}
	step()
	if n := testing.AllocsPerRun(20, step); n != 0 {
		t.Errorf("%v allocations a step", n)
	}
	lib.Forget()
}

// Launches that follow an append to the same memory may read older keys early.
func TestEarly(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	plan := m.engine.NewPlan()
	other := m.Put(t, make([]byte, p.k.Len*2), p.kv)
	early := func(k gpu.Memory) int32 {
		o := p.operands()
		o.Pages[0].Data = k
		noError(t, plan.Run(m.Stream, o))
		return plan.params.early
	}
	for range 2 {
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		noError(t, plan.Upload(m.Stream))
		if early(p.k) != 0 {
			t.Error("early without an append")
		}
		noError(t, plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV))
		if early(p.k) != 1 || early(other) != 0 {
			t.Error("an append to these keys, or to others, makes no difference")
		}
	}
}

// Keys and values of more than half of the L2 cache are streamed through it.
func TestStreamed(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	plan := m.engine.NewPlan()
	bytes := 0
	for _, s := range p.seqs {
		bytes += 2 * s.Keys * p.KVHeads * p.Dim * p.kv.Size()
	}
	for _, c := range []struct {
		cache int
		want  int32
	}{{2 * bytes, 0}, {2*bytes - 2, 1}} {
		m.engine.info.L2Bytes = c.cache
		m.run(t, plan, p)
		if plan.params.streamed != c.want {
			t.Errorf("%d bytes, cache of %d: %d", bytes, c.cache, plan.params.streamed)
		}
	}
}

// A tensor map is made once for all equal keys.
func TestTensorMaps(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 13, 232448)
	b, err := m.Dev.NewBuffer(16 * 300)
	noError(t, err)
	s := m.engine.shape(attn.Float16, 64)
	for i := range 100 {
		x := gpu.Memory{Buffer: b, Offset: int64(16 * i), DType: attn.Float16, Len: 640}
		first, err := m.engine.tensorMap(&x, &s, whole(64), 16)
		noError(t, err)
		lib.Forget()
		again, err := m.engine.tensorMap(&x, &s, whole(64), 16)
		noError(t, err)
		if first != again || lib.Log() != "" {
			t.Fatalf("%v, and then %v\n%s", first, again, lib.Log())
		}
		for _, other := range []struct{ n, box int }{{641, 16}, {704, 16}, {640, 8}} {
			y := x
			y.Len = other.n
			z, err := m.engine.tensorMap(&y, &s, whole(64), other.box)
			noError(t, err)
			if (z == first) != (other.n == 641) {
				t.Fatalf("%d elements, boxes of %d: %v", other.n, other.box, z)
			}
		}
	}
}

// Plans in several goroutines.
func TestConcurrent(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	shared := m.engine.NewPlan()
	noError(t, shared.Build(p.geometry, p.seqs, p.rows))
	noError(t, shared.Upload(m.Stream))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			plan := m.engine.NewPlan()
			for range 10 {
				for _, err := range []error{
					plan.Build(p.geometry, p.seqs, p.rows), plan.Upload(m.Stream),
					plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV), plan.Run(m.Stream, p.operands()),
					shared.Run(m.Stream, p.operands()), m.engine.Supports(&p.geometry),
				} {
					if err != nil {
						t.Error(err)
					}
				}
			}
			if err := plan.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	lib.Forget()
}
