//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

// Package emulated makes the fake driver execute kernels, by package ptx: a GPU for
// tests on machines that have none.
package emulated

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/ptx"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/kernels"
)

const memoryBytes = 1 << 32

// ahead is ptx.Launch's: all threads of a warp wait for a barrier, and one goes on alone,
// which may be a round ahead of the others if nothing holds it.
const ahead = 15

// Images is the kernels of a compute capability that can be executed: those of GPUs that
// are newer than all that there are cubins for, or, if LEANATTENTION_PTX is a directory,
// those in its files, which go -C kernels/build run . -raw -arch ptx90a makes for 9.0.
func Images(t testing.TB) (capability int, image func(unit string, capability int) ([]byte, error)) {
	dir := os.Getenv("LEANATTENTION_PTX")
	if dir == "" {
		return 120, kernels.Image
	}
	arch := Arch(t)
	if _, err := fmt.Sscanf(arch, "compute_%d", &capability); err != nil {
		t.Fatal(err)
	}
	return capability, func(unit string, _ int) ([]byte, error) { return os.ReadFile(filepath.Join(dir, unit+"."+arch+".ptx")) }
}

// Arch is the architecture of the PTX that can be executed, as compute_90a.
func Arch(t testing.TB) string {
	dir := os.Getenv("LEANATTENTION_PTX")
	if dir == "" {
		return "compute_90"
	}
	files, err := filepath.Glob(filepath.Join(dir, "lean.compute_*.ptx"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%s: %q: %v", dir, files, err)
	}
	return strings.TrimSuffix(strings.TrimPrefix(filepath.Base(files[0]), "lean."), ".ptx")
}

// Execute turns a fake driver's GPU into one of so many multiprocessors and a compute
// capability (10*major + minor) that executes kernels, which must be PTX: see [Images].
func Execute(t testing.TB, lib *fakedriver.Library, capability, multiprocessors int) {
	Crowd(t, lib, capability, multiprocessors, multiprocessors)
}

// Crowd is Execute of a GPU of whose multiprocessors no more than so many are free, while
// somebody else has the others: thread blocks begin when others have ended.
func Crowd(t testing.TB, lib *fakedriver.Library, capability, multiprocessors, free int) {
	collectLess()
	rng := reftest.Rand(t)
	s := lib.State()
	s.Turns = rng.Uint64() | 1
	s.Total, s.Major, s.Minor, s.SMs, s.Shared = memoryBytes, int32(capability/10), int32(capability%10), int32(multiprocessors), 232448
	lib.Execute(&emulator{t, lib, s, rng.Uint64, map[string]*ptx.Kernel{}, free, map[uintptr]*ptx.Trace{}, map[uintptr]*running{}})
}

// collectLess makes garbage collections rarer in the process: parsed and compiled kernels are many small
// objects, which each collection goes through.
var collectLess = sync.OnceFunc(func() { debug.SetGCPercent(max(debug.SetGCPercent(400), 400)) })

// emulator executes the kernels' PTX.
type emulator struct {
	t       testing.TB
	lib     *fakedriver.Library
	state   *fakedriver.State
	seed    func() uint64
	kernels map[string]*ptx.Kernel // by name: no two units have the same
	free    int                    // multiprocessors
	last    map[uintptr]*ptx.Trace // of the last launch in each queue
	running map[uintptr]*running   // launches that have begun, and not ended
}

// running is a launch that others run beside, and when the memory that it has was the driver's.
type running struct {
	*ptx.Running
	buffers int64
}

func (e *emulator) kernel(image, name string) *ptx.Kernel {
	if k := e.kernels[name]; k != nil {
		return k
	}
	m, err := parsed(image)
	if err != nil {
		e.t.Error(err)
		return nil
	}
	k, err := m.kernel(name)
	if err != nil {
		e.t.Error(err)
		return nil
	}
	e.kernels[name] = k
	return k
}

// modules are those of all tests of the process, by their text: one is parsed once, and
// its kernels are compiled when they are first launched.
var modules = struct {
	sync.Mutex
	of map[string]*module
}{of: map[string]*module{}}

type module struct {
	*ptx.Module
	sync.Mutex
	kernels map[string]*ptx.Kernel
}

func parsed(image string) (*module, error) {
	modules.Lock()
	defer modules.Unlock()
	m := modules.of[image]
	if m == nil {
		p, err := ptx.Parse(image)
		if err != nil {
			return nil, err
		}
		m = &module{Module: p, kernels: map[string]*ptx.Kernel{}}
		modules.of[image] = m
	}
	return m, nil
}

func (m *module) kernel(name string) (*ptx.Kernel, error) {
	m.Lock()
	defer m.Unlock()
	k := m.kernels[name]
	if k == nil {
		var err error
		if k, err = m.Kernel(name); err != nil {
			return nil, err
		}
		m.kernels[name] = k
	}
	return k, nil
}

func (e *emulator) ArgumentBytes(image, kernel string) int {
	m, err := parsed(image)
	if err == nil {
		var n int
		if n, err = m.ParamBytes(kernel); err == nil {
			return n
		}
	}
	e.t.Error(err)
	return -1
}

func (e *emulator) Execute(c *fakedriver.Call) error {
	s, err := e.start(c)
	if err == nil {
		err = s.Run(s.Launch, s.Memory)
	}
	if err != nil {
		e.t.Error(err)
	}
	return err
}

// Turn executes some of a launch beside those on other GPUs.
func (e *emulator) Turn(c *fakedriver.Call) (ended, progress bool, err error) {
	defer func() {
		if err != nil {
			e.t.Error(err)
		}
		if ended || err != nil {
			delete(e.running, c.Launch)
		}
	}()
	r := e.running[c.Launch]
	if r == nil {
		s, err := e.start(c)
		if err != nil {
			return false, false, err
		}
		run, err := s.Begin()
		if err != nil {
			return false, false, err
		}
		r = &running{run, e.state.Buffers}
		e.running[c.Launch] = r
	}
	if c.Over {
		return false, false, fmt.Errorf("GPU %d waits for what never comes: %s", c.GPU, r.Where())
	}
	if now := e.state.Buffers; now != r.buffers {
		r.Reaches(e.memory(c.GPU))
		r.buffers = now
	}
	return r.Turn()
}

// memory is what kernels on a GPU can use.
func (e *emulator) memory(gpu int) (memory ptx.Memory) {
	for _, b := range e.lib.Buffers() {
		memory = append(memory, ptx.Range{Address: b.Address, Bytes: b.Bytes, Peer: b.GPU >= 0 && b.GPU != int64(gpu)})
	}
	slices.SortFunc(memory, func(a, b ptx.Range) int { return cmp.Compare(a.Address, b.Address) })
	return memory
}

// start is a launch that begins now.
func (e *emulator) start(c *fakedriver.Call) (*ptx.Start, error) {
	k := e.kernel(c.Image, c.Kernel)
	if k == nil {
		return nil, errors.New("no kernel")
	}
	var before *ptx.Trace
	if c.Overlap {
		before = e.last[c.Queue]
	}
	trace := new(ptx.Trace)
	e.last[c.Queue] = trace
	l := ptx.Launch{Before: before, Trace: trace, Grid: c.Grid, Block: c.Block, Cluster: c.Cluster, Shared: c.Shared, Params: c.Argument(k.ParamBytes()), Resident: e.free, Seed: e.seed(), Ahead: ahead, Clock: &e.state.Clock}
	return &ptx.Start{Kernel: k, Launch: l, Memory: e.memory(c.GPU)}, nil
}
