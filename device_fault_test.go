package leanattention_test

import (
	"errors"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// deviceFaults runs a test again and again, with every driver call of it failing
// once. By default every eighth one fails, others in every run.
func deviceFaults(t *testing.T, test func(t *testing.T, gpu *device.GPU, lib *fakedriver.Library) error) {
	deviceFaultsOn(t, 1, 8, test)
}

// deviceFaultsOn is deviceFaults of several GPUs, of whose calls one of so many fails by default.
func deviceFaultsOn(t *testing.T, gpus int, every int64, test func(t *testing.T, gpu *device.GPU, lib *fakedriver.Library) error) {
	if reftest.Every(t) {
		every = (every + 24) / 25
	}
	for call := 1 + reftest.Rand(t).Int64N(every); ; call += every {
		gpu, lib := la.FakeGPUs(t, gpus)
		lib.State().FailAt, lib.State().FailWith = lib.State().Calls+call, 1
		err := test(t, gpu, lib)
		failed := lib.State().Failed()
		lib.State().FailAt = 0
		if failed == "" {
			if err != nil {
				t.Fatalf("without a fault: %v", err)
			}
			t.Logf("%d calls", call-every)
			if call-every+1 < 10 {
				t.Fatalf("only %d calls", call)
			}
			return
		}
		if err := gpu.Close(); err != nil {
			t.Fatalf("%s failed: Close: %v", failed, err)
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Fatalf("%s failed (%v): %d left, %d defects", failed, err, lib.Live(), lib.Defects())
		}
		// Popping a context tells of earlier failures only, and nothing depends on a
		// graph that others were made of.
		if err == nil && failed != "cuCtxPopCurrent_v2" && failed != "cuGraphDestroy" {
			t.Fatalf("call %d, %s, failed and nobody has noticed", call, failed)
		}
		if err != nil && (!strings.Contains(err.Error(), "CUDA_ERROR") || !strings.Contains(err.Error(), "GPU ")) { // which of them
			t.Fatalf("%s failed: %v", failed, err)
		}
	}
}

func TestDeviceFaults(t *testing.T) {
	deviceFaults(t, func(t *testing.T, gpu *device.GPU, lib *fakedriver.Library) error {
		x := f32(3, 4).tensor()
		d, err := gpu.Upload(x)
		if err != nil {
			return err
		}
		c, err := d.Clone()
		if err != nil {
			return err
		}
		y, err := c.(*device.Tensor).Download()
		if err != nil {
			return err
		}
		if err := errors.Join(d.Free(), c.(*device.Tensor).Free()); err != nil {
			return err
		}
		g := G.NewGraph()
		r := newDeviceRelay(t, g, gpu, tensor.Float32, 3, 4)
		there, err := r.there.Op().Do(y)
		if err != nil {
			return err
		}
		z, err := r.back.Op().Do(there)
		if err != nil {
			return err
		}
		if err := sameElements(z.(*tensor.Dense), x); err != nil {
			t.Error(err)
		}
		if zero := there.(*device.Tensor).ZeroValue(); zero != nil {
			if _, err := zero.(*device.Tensor).Download(); err != nil {
				return err
			}
		}
		return gpu.Synchronize()
	})
}
