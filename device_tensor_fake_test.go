//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention_test

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func TestDeviceOnFakeDriver(t *testing.T) {
	runs := 20_000
	if raceEnabled {
		runs = 500
	}
	for name, test := range deviceTests(runs) {
		t.Run(name, func(t *testing.T) {
			gpu, _ := la.FakeGPU(t)
			test(t, gpu)
		})
	}
}

// TestDeviceClosed: everything of a closed GPU says so.
func TestDeviceClosed(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	x := f32(2, 2).tensor()
	d := upload(t, gpu, x)
	g := G.NewGraph()
	r := newDeviceRelay(t, g, gpu, tensor.Float32, 2, 2)
	let(t, r.x, x)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	again(t, vm)
	if err := gpu.Close(); err != nil {
		t.Fatal(err)
	}
	_, clone := d.Clone()
	for name, err := range map[string]error{
		"Download":    second(d.Download()),
		"Free":        d.Free(),
		"Clone":       clone,
		"CopyFrom":    d.CopyFrom(d),
		"Upload":      second(gpu.Upload(x)),
		"NewTensor":   second(gpu.NewTensor(tensor.Float32, 1)),
		"Synchronize": gpu.Synchronize(),
		"ToDevice":    second(la.ToDevice(r.x, gpu)),
		"a run":       second(r.there.Op().Do(x)),
		"ToHost":      second(r.back.Op().Do(d)),
		"node value":  second(r.there.Value().(*la.DeviceTensor).Download()),
	} {
		if !errors.Is(err, la.ErrClosed) || !strings.Contains(err.Error(), "the GPU") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if d.ZeroValue() != G.Value(d) || d.GPU() != gpu {
		t.Error("a tensor of a closed GPU is another")
	}
}

// TestDeviceOutOfMemory: what nobody has any more is given back to the driver
// before a request fails, and a request that fails changes nothing.
func TestDeviceOutOfMemory(t *testing.T) {
	gpu, lib := la.FakeGPU(t)
	lib.State().Total = 1 << 20
	for n := range 40 { // all sizes, so that no buffer serves twice
		d, err := gpu.NewTensor(tensor.Float32, 1000*(n+60))
		if err != nil {
			t.Fatal(err)
		}
		if n%2 == 0 { // the others are garbage
			if err := d.Free(); err != nil {
				t.Fatal(err)
			}
		}
	}
	kept := upload(t, gpu, f32(1000).tensor())
	before, _ := gpu.Memory()
	_, err := gpu.NewTensor(tensor.Float32, 1<<18)
	if !errors.Is(err, la.ErrOutOfMemory) || !strings.Contains(err.Error(), "1048576 bytes asked for") || !strings.Contains(err.Error(), "of 1048576 free") {
		t.Errorf("got %v", err)
	}
	if after, err := gpu.Memory(); err != nil || after.Used > before.Used {
		t.Errorf("%+v before, %+v after: %v", before, after, err)
	}
	if err := sameElements(download(t, kept), f32(1000).tensor()); err != nil {
		t.Error(err)
	}
}

// TestDeviceLargeUpload: several goroutines bring the pieces of a large tensor, all of
// them, and none is left where one fails.
func TestDeviceLargeUpload(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	pieces := 5 // of a million elements
	if raceEnabled {
		pieces = 2
	}
	data := make([]float32, pieces<<20+3) // and some
	for i := range data {
		data[i] = float32(i * 7 % 1000003)
	}
	x := tensor.New(tensor.WithBacking(data), tensor.WithShape(len(data)))
	before := runtime.NumGoroutine()
	there := func(gpu *la.GPU) error {
		d, err := gpu.Upload(x)
		if err != nil {
			return err
		}
		y, err := d.Download()
		if err != nil {
			return errors.Join(err, d.Free())
		}
		if !slices.Equal(y.Data().([]float32), data) {
			t.Error("something else has come down")
		}
		return d.Free()
	}
	deviceFaults(t, func(t *testing.T, gpu *la.GPU, lib *fakedriver.Library) error {
		err := there(gpu)
		if err == nil {
			return nil
		}
		if err := there(gpu); err != nil { // a fault is no end
			t.Errorf("again: %v", err)
		}
		return err
	})
	// A goroutine whose work has been waited for is counted until it has run to its
	// end, which a busy machine may put off.
	for began := time.Now(); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Since(began) > 20*time.Second {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}

// deviceFaults runs a test again and again, with every driver call of it failing
// once.
func deviceFaults(t *testing.T, test func(t *testing.T, gpu *la.GPU, lib *fakedriver.Library) error) {
	for call := int64(1); ; call++ {
		gpu, lib := la.FakeGPU(t)
		lib.State().FailAt, lib.State().FailWith = lib.State().Calls+call, 1
		err := test(t, gpu, lib)
		failed := lib.State().Failed()
		lib.State().FailAt = 0
		if failed == "" {
			if err != nil {
				t.Fatalf("without a fault: %v", err)
			}
			t.Logf("%d calls", call-1)
			if call < 10 {
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
		if err != nil && !strings.Contains(err.Error(), "CUDA_ERROR") {
			t.Fatalf("%s failed: %v", failed, err)
		}
	}
}

func TestDeviceFaults(t *testing.T) {
	deviceFaults(t, func(t *testing.T, gpu *la.GPU, lib *fakedriver.Library) error {
		x := f32(3, 4).tensor()
		d, err := gpu.Upload(x)
		if err != nil {
			return err
		}
		c, err := d.Clone()
		if err != nil {
			return err
		}
		y, err := c.(*la.DeviceTensor).Download()
		if err != nil {
			return err
		}
		if err := errors.Join(d.Free(), c.(*la.DeviceTensor).Free()); err != nil {
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
		if zero := there.(*la.DeviceTensor).ZeroValue(); zero != nil {
			if _, err := zero.(*la.DeviceTensor).Download(); err != nil {
				return err
			}
		}
		return gpu.Synchronize()
	})
}
