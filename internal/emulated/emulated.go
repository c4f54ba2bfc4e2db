//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

// Package emulated makes the fake driver execute kernels, by package ptx: a GPU for
// tests on machines that have none.
package emulated

import (
	"cmp"
	"errors"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/ptx"
	"gorgonia.org/leanattention/internal/reftest"
)

const memoryBytes = 1 << 32

// ahead is ptx.Launch's. With 15, warps that copy for attention, and those that multiply
// for a batch, may wait for ever in 9.0's kernels: all their threads wait for a barrier,
// and one goes on alone to the next, so that it may be a round ahead of the others. A
// GPU has them go together.
const ahead = 0

// Execute turns a fake driver's GPU into one of so many multiprocessors and a compute
// capability (10*major + minor) that executes kernels. Images must be PTX: those
// that GPUs get that are newer than all that there are cubins for, 120 for example.
func Execute(t testing.TB, lib *fakedriver.Library, capability, multiprocessors int) {
	s := lib.State()
	s.Total, s.Major, s.Minor, s.SMs, s.Shared = memoryBytes, int32(capability/10), int32(capability%10), int32(multiprocessors), 232448
	lib.Execute(&emulator{t, lib, reftest.Rand(t).Uint64, map[string]*ptx.Module{}, map[string]*ptx.Kernel{}, multiprocessors, nil})
}

// emulator executes the kernels' PTX.
type emulator struct {
	t               testing.TB
	lib             *fakedriver.Library
	seed            func() uint64
	modules         map[string]*ptx.Module
	kernels         map[string]*ptx.Kernel // by name: no two units have the same
	multiprocessors int
	last            *ptx.Trace // of the last launch
}

func (e *emulator) kernel(image, name string) *ptx.Kernel {
	if k := e.kernels[name]; k != nil {
		return k
	}
	m := e.modules[image]
	if m == nil {
		var err error
		if m, err = ptx.Parse(image); err != nil {
			e.t.Error(err)
			return nil
		}
		e.modules[image] = m
	}
	k, err := m.Kernel(name)
	if err != nil {
		e.t.Error(err)
		return nil
	}
	e.kernels[name] = k
	return k
}

func (e *emulator) ArgumentBytes(image, kernel string) int {
	k := e.kernel(image, kernel)
	if k == nil {
		return -1
	}
	return k.ParamBytes()
}

func (e *emulator) Execute(c *fakedriver.Call) error {
	k := e.kernel(c.Image, c.Kernel)
	if k == nil {
		return errors.New("no kernel")
	}
	var memory ptx.Memory
	for _, b := range e.lib.Buffers() {
		memory = append(memory, ptx.Range{Address: b[0], Bytes: int64(b[1])})
	}
	slices.SortFunc(memory, func(a, b ptx.Range) int { return cmp.Compare(a.Address, b.Address) })
	var before *ptx.Trace
	if c.Overlap {
		before = e.last
	}
	e.last = new(ptx.Trace)
	err := k.Run(ptx.Launch{Before: before, Trace: e.last, Grid: c.Grid, Block: c.Block, Cluster: c.Cluster, Shared: c.Shared, Params: c.Argument(k.ParamBytes()), Resident: e.multiprocessors, Seed: e.seed(), Ahead: ahead}, memory)
	if err != nil {
		e.t.Error(err)
	}
	return err
}
