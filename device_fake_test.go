//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention_test

import (
	"errors"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
)

// TestGPUSentinels goes through every way in which there can be no GPU, on a
// driver that needs none.
func TestGPUSentinels(t *testing.T) {
	lib := fakedriver.New(t)
	for _, c := range []struct {
		name string
		path string
		set  func(*fakedriver.State)
		gpus error // nil: they are listed
		open error // of GPU 1
		text string
	}{
		{"no library", "libthere-is-no-such-driver.so.1", func(*fakedriver.State) {}, la.ErrNoDriver, la.ErrNoDriver, "no CUDA driver"},
		{"old driver", lib.Path, func(s *fakedriver.State) { s.Version = 11080 }, la.ErrDriverTooOld, la.ErrDriverTooOld, "11.8"},
		{"no device", lib.Path, func(s *fakedriver.State) { s.Init = 100 }, la.ErrNoDevice, la.ErrNoDevice,
			"CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected (cuInit)"},
		{"none shown", lib.Path, func(s *fakedriver.State) { s.Devices = 0 }, la.ErrNoDevice, la.ErrNoDevice, "no"},
		{"one only", lib.Path, func(s *fakedriver.State) { s.Devices = 1 }, nil, la.ErrNoDevice, "no GPU 1, there are 1"},
		{"old GPU", lib.Path, func(s *fakedriver.State) { s.Major, s.Minor = 7, 5 }, nil, la.ErrComputeCapability, "GPU 1 (Fake 1) has compute capability 7.5"},
		{"no memory for a context", lib.Path, func(s *fakedriver.State) { s.FailIn("cuDevicePrimaryCtxRetain", 2) }, nil, la.ErrOutOfMemory,
			"CUDA_ERROR_OUT_OF_MEMORY: out of memory (cuDevicePrimaryCtxRetain, GPU 1)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lib := fakedriver.New(t)
			c.set(lib.State())
			la.UseDriver(t, c.path)
			list, err := la.GPUs()
			listed := len(list) == int(lib.State().Devices) && len(list) > 0
			if !errors.Is(err, c.gpus) || listed != (c.gpus == nil) {
				t.Errorf("GPUs: %v, %v; want %v", list, err, c.gpus)
			}
			gpu, err := la.OpenGPU(1)
			if gpu != nil || !errors.Is(err, c.open) || !strings.HasPrefix(err.Error(), "leanattention: OpenGPU: ") || !strings.Contains(err.Error(), c.text) {
				t.Errorf("OpenGPU: %v; want %v with %q", err, c.open, c.text)
			}
			if lib.Live() != 0 || lib.Defects() != 0 {
				t.Errorf("%d left, %d defects", lib.Live(), lib.Defects())
			}
		})
	}
}

func TestGPUOnFakeDriver(t *testing.T) {
	lib := fakedriver.New(t)
	la.UseDriver(t, lib.Path)
	list, err := la.GPUs()
	if err != nil || len(list) != 2 {
		t.Fatal(list, err)
	}
	const want = "GPU 1: Fake 1, compute capability 9.0, 1016 SMs, 0.0 GiB"
	if list[1].String() != want {
		t.Errorf("got %s, want %s", list[1], want)
	}
	// The driver's clock is 1036 kHz, its bus 1037 bits wide.
	if got, want := list[1].MemoryBandwidth, 2*1036e3*1037/8; got != want {
		t.Errorf("a memory bandwidth of %v, want %v", got, want)
	}
	for i := range list {
		gpu, err := la.OpenGPU(i)
		if err != nil {
			t.Fatal(err)
		}
		checkGPU(t, gpu, list[i])
	}
	if lib.Live() != 0 || lib.Defects() != 0 {
		t.Errorf("%d left, %d defects", lib.Live(), lib.Defects())
	}
}
