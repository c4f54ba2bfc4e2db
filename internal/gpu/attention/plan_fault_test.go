//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// Each driver call of a plan's life fails once: the error is returned, nothing leaks, and a second try works.
func TestEveryCallFailsOnce(t *testing.T) {
	for name, c := range map[string]struct {
		unfused       bool
		take          choice
		queries, keys int
	}{
		"few rows":          {false, takePrefill, 2, 9},
		"unfused":           {true, takePrefill, 2, 9},
		"many rows":         {false, takePrefill, 20, 27}, // cut into parts
		"few and many rows": {false, takeBoth, 20, 150},
	} {
		t.Run(name, func(t *testing.T) {
			m, lib, _ := fakeGPU(t, 90, 5, 232448)
			testEveryCallFailsOnce(t, m, lib, c.unfused, c.take, c.queries, c.keys, 1, func(*problem) { m.Settle(t) })
		})
	}
}

// Results are also correct after some of the failures.
func TestEmulatedEveryCallFailsOnce(t *testing.T) {
	for _, queries := range []int{2, 20} {
		t.Run(fmt.Sprint(queries), func(t *testing.T) {
			m, lib := emulatedDriver(t, 5)
			testEveryCallFailsOnce(t, m, lib, false, takePrefill, queries, queries+7, 10, func(p *problem) {
				m.Settle(t)
				p.check(t)
			})
		})
	}
}

func testEveryCallFailsOnce(t *testing.T, m *machine, lib *fakedriver.Library, unfused bool, take choice, queries, keys, each int, check func(p *problem)) {
	live := func(t *testing.T, m *machine, p *problem, plan *Plan) error {
		big := sequenceOf(0, 1, 16*100, 0)
		if err := plan.Build(paged(8, 2, 64), []attn.Sequence{sequenceOf(0, 1, 5, 0)}, 4); err != nil {
			return err
		}
		if err := plan.Upload(m.Stream); err != nil {
			return err
		}
		if err := plan.Build(paged(8, 2, 64), []attn.Sequence{big}, 4); err != nil {
			return err
		}
		for range 3 {
			if err := plan.Build(p.geometry, p.seqs, p.rows); err != nil {
				return err
			}
			if err := plan.Upload(m.Stream); err != nil {
				return err
			}
		}
		if p.append {
			if err := plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV); err != nil {
				return err
			}
		}
		return plan.Run(m.Stream, p.operands())
	}
	m.engine.choice = take
	rng := reftest.Rand(t)
	shape := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 64, ValueDim: 64, Queries: []int{1, queries}, Keys: []int{300, keys}}
	p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: 2})
	p.geometry.Unfused = unfused
	s := lib.State()
	// A module is loaded once.
	k := m.engine.find(&want{problem: &p.geometry, features: p.geometry.Features(), rows: 4})
	for i := int64(1); unfused && k.functions == nil; i++ {
		s.FailWith, s.FailAt = 700, s.Calls+i
		var failed *cuda.Error
		if err := m.engine.load(k); err != nil && !errors.As(err, &failed) || (err == nil) != (k.functions != nil) {
			t.Errorf("call %d, %s: %v", i, s.Failed(), err)
		}
		s.FailAt = 0
	}
	first := m.engine.NewPlan() // loads the kernels that later plans find
	noError(t, live(t, m, p, first))
	if parts := first.memory.parts != nil; parts != (queries > 8) {
		t.Errorf("%d queries: parts of output tiles: %v", queries, parts)
	}
	if first.form.both != (take == takeBoth) {
		t.Errorf("decode kernels and for many: %v", first.form.both)
	}
	noError(t, first.Close())
	m.engine.maps = gpu.TensorMaps[mapKey]{}
	before := s.Calls
	lib.Forget()
	plan := m.engine.NewPlan()
	noError(t, live(t, m, p, plan))
	calls := s.Calls - before
	log := regexp.MustCompile(`(?m)^cu\w+$`).FindAllString(lib.Log(), -1)
	if calls < 60 || len(log) != int(calls) {
		t.Fatalf("%d calls, of %d in the log", calls, len(log))
	}
	noError(t, plan.Close())
	objects := lib.Live()
	gives := regexp.MustCompile("Free|Destroy")
	for i := range calls {
		if i+1 < calls && strings.HasPrefix(log[i], "cuCtxPush") && gives.MatchString(log[i+1]) {
			continue // without a context nothing can be freed
		}
		if rng.IntN(each) > 0 {
			continue
		}
		m.engine.maps = gpu.TensorMaps[mapKey]{}
		m.Poison(t, &p.o)
		m.Poison(t, &p.lse)
		lib.Forget()
		plan := m.engine.NewPlan()
		s.FailWith, s.FailAt = 700, s.Calls+1+i
		err := live(t, m, p, plan)
		s.FailAt = 0
		var failed *cuda.Error
		switch {
		case err == nil && !gives.MatchString(log[i]) && !strings.HasPrefix(log[i], "cuCtxPop"):
			t.Errorf("call %d, %s: the failure was not reported", i, s.Failed())
		case err != nil && !errors.As(err, &failed):
			t.Errorf("call %d, %s: %v", i, s.Failed(), err)
		}
		lib.Forget()
		noError(t, live(t, m, p, plan))
		check(p)
		noError(t, plan.Close())
		if n := lib.Live(); n != objects {
			t.Fatalf("call %d, %s: %d objects, %d before", i, s.Failed(), n, objects)
		}
	}
}

// A failed New leaves nothing that the device does not close, and New works when the driver works again.
func TestNewFails(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 5, 232448)
	s := lib.State()
	for _, call := range []string{"cuModuleGetFunction", "cuFuncSetAttribute"} {
		dev := reopen(t, lib.Path)
		s.FailIn(call, 999)
		var failed *cuda.Error
		if _, err := New(dev); !errors.As(err, &failed) || failed.Call != call {
			t.Errorf("%s: %v", call, err)
		}
		s.FailIn("", 0)
		_, err := New(dev)
		noError(t, err)
		noError(t, dev.Close())
	}
	gpu.Image = func(string, int) ([]byte, error) { return nil, errNone }
	dev := reopen(t, lib.Path)
	if _, err := New(dev); !errors.Is(err, errNone) {
		t.Errorf("no image: %v", err)
	}
	noError(t, dev.Close())
	_ = m
}

var errNone = errors.New("none")

func reopen(t *testing.T, path string) *cuda.Device {
	t.Helper()
	drv, err := cuda.LoadFrom(path)
	noError(t, err)
	dev, err := drv.Open(0)
	noError(t, err)
	return dev
}
