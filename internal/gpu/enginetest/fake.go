//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package enginetest

import (
	"errors"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/emulated"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// Emulated is a GPU of so many multiprocessors that there is none of: it executes the
// kernels, slowly. Somebody else has all but so many of them.
func Emulated(t testing.TB, sms, free int) *Device {
	t.Helper()
	all, _ := EmulatedGroup(t, 1, sms, free)
	return all[0]
}

// EmulatedGroup is some GPUs as [Emulated], and their driver.
func EmulatedGroup(t testing.TB, n, sms, free int) ([]*Device, *fakedriver.Library) {
	t.Helper()
	if reftest.RaceEnabled {
		t.Skip("kernels run in one goroutine, many times as slowly under the race detector")
	}
	lib := fakedriver.New(t)
	lib.State().Devices = int32(n)
	real := gpu.Image
	var capability int
	capability, gpu.Image = emulated.Images(t)
	gpu.Virtual = emulated.Arch(t)
	t.Cleanup(func() { gpu.Image, gpu.Virtual = real, "" })
	emulated.Crowd(t, lib, capability, sms, free)
	drv, err := cuda.LoadFrom(lib.Path)
	NoError(t, err)
	t.Cleanup(func() {
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d objects left in the driver, %d calls that would have crashed:\n%s", lib.Live(), lib.Defects(), lib.Log())
		}
	})
	var all []*Device
	for i := range n {
		dev, err := drv.Open(i)
		NoError(t, err)
		t.Cleanup(func() { NoError(t, dev.Close()) })
		d := deviceOf(t, dev)
		d.emulated = true
		all = append(all, d)
	}
	return all, lib
}

// Fake is a GPU that there is none of, whose launches do nothing, and are given to run when a test
// waits for them. When the test ends nothing may be left of it.
func Fake(t testing.TB, capability, sms, shared int, run func(Launch)) (*Device, *fakedriver.Library) {
	t.Helper()
	lib := fakedriver.New(t)
	s := lib.State()
	s.Total, s.Major, s.Minor, s.SMs, s.Shared = 1<<32, int32(capability/10), int32(capability%10), int32(sms), int32(shared)
	real := gpu.Image
	gpu.Image = func(string, int) ([]byte, error) { return []byte("image"), nil }
	drv, err := cuda.LoadFrom(lib.Path)
	NoError(t, err)
	dev, err := drv.Open(0)
	NoError(t, err)
	stream, err := dev.NewStream()
	NoError(t, err)
	m := &Device{Dev: dev, Stream: stream}
	m.Settle = func(t testing.TB) {
		t.Helper()
		for _, l := range Launches(lib.Log()) {
			run(l)
		}
		lib.Forget()
	}
	m.Capture = func(t testing.TB, f func() error) func() error {
		t.Helper()
		lib.Forget()
		g, err := stream.Capture(f)
		NoError(t, err)
		captured := Launches(lib.Log())
		lib.Forget()
		return func() error {
			for _, l := range captured {
				run(l)
			}
			return stream.Launch(g)
		}
	}
	t.Cleanup(func() {
		gpu.Image = real
		if err := dev.Close(); err != nil && !errors.Is(err, cuda.ErrClosed) {
			t.Error(err)
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d objects left in the driver, %d calls that would have crashed", lib.Live(), lib.Defects())
		}
	})
	return m, lib
}

// Fakes are GPUs of each kind that kernels tell apart.
var Fakes = []struct {
	Name                    string
	Capability, SMs, Shared int
}{
	{"9.0", 90, 13, 232448},
	{"8.0", 80, 7, 166912},
	{"8.6", 86, 1, 101376},
	{"12.0", 120, 31, 101376},
}

// Fewer is n, or what the race detector leaves time for.
func Fewer(n int) int {
	if reftest.RaceEnabled {
		return n / 10
	}
	return n
}
