package leanattention_test

import (
	"errors"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/emulated/system"
)

// TestGPU runs where there is a GPU.
func TestGPU(t *testing.T) {
	system.Emulate(t)
	list, err := la.GPUs()
	if errors.Is(err, la.ErrNoDriver) || errors.Is(err, la.ErrNoDevice) {
		if !strings.HasPrefix(err.Error(), "leanattention: GPUs: ") {
			t.Errorf("got %q", err)
		}
		if _, open := la.OpenGPU(0); !errors.Is(open, la.ErrNoDriver) && !errors.Is(open, la.ErrNoDevice) {
			t.Errorf("OpenGPU, where GPUs says %v: %v", err, open)
		}
		t.Skipf("no GPU: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, info := range list {
		t.Log(info)
		if info.Ordinal != i || info.Name == "" || info.MemoryBytes <= 0 || info.Multiprocessors <= 0 {
			t.Errorf("%+v", info)
		}
		gpu, err := la.OpenGPU(i)
		if info.Major < 8 {
			if !errors.Is(err, la.ErrComputeCapability) {
				t.Errorf("%v: %v", info, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		checkGPU(t, gpu, info)
	}
	if _, err := la.OpenGPU(len(list)); !errors.Is(err, la.ErrNoDevice) {
		t.Errorf("one GPU too far: %v", err)
	}
}

// checkGPU uses an open GPU and closes it.
func checkGPU(t *testing.T, gpu *la.GPU, info la.GPUInfo) {
	t.Helper()
	if gpu.Name() != info.Name || gpu.Info() != info {
		t.Errorf("%+v is %+v when open", info, gpu.Info())
	}
	m, err := gpu.Memory()
	if err != nil || m.Free <= 0 || m.Free > m.Total || m.Used != 0 || m.Pinned != 0 {
		t.Errorf("%+v, %v", m, err)
	}
	if err := gpu.Close(); err != nil {
		t.Error(err)
	}
	if err := gpu.Close(); !errors.Is(err, la.ErrClosed) || !strings.HasPrefix(err.Error(), "leanattention: GPU.Close: ") {
		t.Errorf("second Close: %v", err)
	}
	if _, err := gpu.Memory(); !errors.Is(err, la.ErrClosed) {
		t.Errorf("Memory after Close: %v", err)
	}
	if gpu.Name() != info.Name {
		t.Error("a closed GPU has lost its name")
	}
}

func TestZeroGPU(t *testing.T) {
	for _, gpu := range []*la.GPU{nil, {}} {
		if _, err := gpu.Memory(); !errors.Is(err, la.ErrState) {
			t.Errorf("Memory: %v", err)
		}
		if err := gpu.Close(); !errors.Is(err, la.ErrState) {
			t.Errorf("Close: %v", err)
		}
		if gpu.Name() != "" || gpu.Info() != (la.GPUInfo{}) {
			t.Errorf("%+v", gpu.Info())
		}
	}
}
