package leanattention_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/graphtest"
)

// TestGPU runs where there is a GPU.
func TestGPU(t *testing.T) {
	system.Emulate(t)
	list, err := device.List()
	if errors.Is(err, la.ErrNoDevice) {
		if !strings.HasPrefix(err.Error(), "leanattention: device.List: ") {
			t.Errorf("got %q", err)
		}
		if _, open := device.Open(0); !errors.Is(open, la.ErrNoDevice) {
			t.Errorf("OpenGPU, where GPUs says %v: %v", err, open)
		}
		t.Skipf("no GPU: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, info := range list {
		t.Log(info)
		if info.Ordinal != i || info.Name == "" || info.MemoryBytes <= 0 {
			t.Errorf("%+v", info)
		}
		gpu, err := device.Open(i)
		if info.Capability < 80 {
			if !errors.Is(err, la.ErrNoDevice) {
				t.Errorf("%v: %v", info, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		checkGPU(t, gpu, info)
	}
	if _, err := device.Open(len(list)); !errors.Is(err, la.ErrNoDevice) {
		t.Errorf("one GPU too far: %v", err)
	}
}

// checkGPU uses an open GPU and closes it.
func checkGPU(t *testing.T, gpu *device.GPU, info device.Info) {
	t.Helper()
	if all := gpu.Members(); len(all) != 1 || all[0] != info {
		t.Errorf("%+v is %+v when open", info, all)
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
	if all := gpu.Members(); len(all) != 1 || all[0] != info {
		t.Error("a closed GPU has lost its name")
	}
}

func TestZeroGPU(t *testing.T) {
	for _, gpu := range []*device.GPU{nil, {}} {
		if _, err := gpu.Memory(); !errors.Is(err, la.ErrState) {
			t.Errorf("Memory: %v", err)
		}
		if err := gpu.Close(); !errors.Is(err, la.ErrState) {
			t.Errorf("Close: %v", err)
		}
		if all := gpu.Members(); all != nil {
			t.Errorf("%+v", all)
		}
	}
}

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
		{"no library", "libthere-is-no-such-driver.so.1", func(*fakedriver.State) {}, la.ErrNoDevice, la.ErrNoDevice, "no CUDA driver"},
		{"old driver", lib.Path, func(s *fakedriver.State) { s.Version = 11080 }, la.ErrNoDevice, la.ErrNoDevice, "CUDA 11.8: install release 525"},
		{"no device", lib.Path, func(s *fakedriver.State) { s.Init = 100 }, la.ErrNoDevice, la.ErrNoDevice,
			"CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected (cuInit)"},
		{"none shown", lib.Path, func(s *fakedriver.State) { s.Devices = 0 }, la.ErrNoDevice, la.ErrNoDevice, "no"},
		{"one only", lib.Path, func(s *fakedriver.State) { s.Devices = 1 }, nil, la.ErrNoDevice, "no GPU 1, there are 1"},
		{"old GPU", lib.Path, func(s *fakedriver.State) { s.Major, s.Minor = 7, 5 }, nil, la.ErrNoDevice, "GPU 1 (Fake 1) has compute capability 7.5, and 8.0 is needed"},
		{"no memory for a context", lib.Path, func(s *fakedriver.State) { s.FailIn("cuDevicePrimaryCtxRetain", 2) }, nil, la.ErrOutOfMemory,
			"CUDA_ERROR_OUT_OF_MEMORY: out of memory (cuDevicePrimaryCtxRetain, GPU 1)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lib := fakedriver.New(t)
			c.set(lib.State())
			la.UseDriver(t, c.path)
			list, err := device.List()
			listed := len(list) == int(lib.State().Devices) && len(list) > 0
			if !errors.Is(err, c.gpus) || listed != (c.gpus == nil) {
				t.Errorf("GPUs: %v, %v; want %v", list, err, c.gpus)
			}
			gpu, err := device.Open(1)
			if gpu != nil || !errors.Is(err, c.open) || !strings.HasPrefix(err.Error(), "leanattention: device.Open: ") || !strings.Contains(err.Error(), c.text) {
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
	list, err := device.List()
	if err != nil || len(list) != 2 {
		t.Fatal(list, err)
	}
	if got := list[1]; got.Ordinal != 1 || got.Name != "Fake 1" || got.Capability != 90 {
		t.Errorf("%+v", got)
	}
	// The driver's clock is 1036 kHz, its bus 1037 bits wide.
	if got, want := list[1].MemoryBandwidth, 2*1036e3*1037/8; got != want {
		t.Errorf("a memory bandwidth of %v, want %v", got, want)
	}
	for i := range list {
		gpu, err := device.Open(i)
		if err != nil {
			t.Fatal(err)
		}
		checkGPU(t, gpu, list[i])
	}
	if lib.Live() != 0 || lib.Defects() != 0 {
		t.Errorf("%d left, %d defects", lib.Live(), lib.Defects())
	}
}

// The tests below run where there is a GPU. With -run 'GPU|Device' they and
// those on the fake driver are all there is.

func TestGPUDevice(t *testing.T) {
	gpu := devicetest.Open(t)
	for name, test := range deviceTests(100_000) {
		t.Run(name, func(t *testing.T) { test(t, gpu) })
	}
}

func TestGPUAttend(t *testing.T) {
	gpu := devicetest.Open(t)
	at := graphtest.Place{GPU: gpu, Real: true}
	t.Run("Cases", func(t *testing.T) { testDeviceAttend(t, at) })
	t.Run("Random", func(t *testing.T) { testDeviceAttendRandom(t, at, 300) })
	t.Run("Repeats", func(t *testing.T) { testDeviceAttendRepeats(t, at, 100) })
	t.Run("HugeScores", func(t *testing.T) { testDeviceHugeScores(t, at) })
	t.Run("Recurrence", func(t *testing.T) { testDeviceRecurrence(t, at) })
	t.Run("Errors", func(t *testing.T) {
		again, err := device.Open(0)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		testDeviceAttendErrors(t, gpu, again)
	})
}

func TestGPUSequenceIO(t *testing.T) {
	testSequenceIODecodes(t, graphtest.Place{}, graphtest.Place{GPU: devicetest.Open(t), Real: true, There: true})
}

func TestGPUCachedAttention(t *testing.T) {
	gpu := devicetest.Open(t)
	for _, c := range []struct {
		name string
		test func(*testing.T, graphtest.Place)
	}{
		{"Mixed", testCachedAttention}, // takes turns by itself
		{"Long", testCachedAttentionLong},
		{"Rerun", func(t *testing.T, at graphtest.Place) { testCachedAttentionRerun(t, at, 100) }},
		{"Poison", testCachedAttentionPoison},
		{"Stores", testCachedAttentionStores},
	} {
		for _, there := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s there %v", c.name, there), func(t *testing.T) {
				c.test(t, graphtest.Place{GPU: gpu, Real: true, There: there})
			})
		}
	}
}

// TestDeviceCachedAttention runs the tests of CachedAttention on caches that are
// on a GPU: what is computed there is the CPU's work, what is around it is not.
func TestDeviceCachedAttention(t *testing.T) {
	for _, c := range []struct {
		name string
		test func(*testing.T, graphtest.Place)
		host bool // with operands in host memory too
	}{
		{"Mixed", testCachedAttention, false}, // takes turns by itself
		{"Long", testCachedAttentionLong, false},
		{"Rerun", func(t *testing.T, at graphtest.Place) { testCachedAttentionRerun(t, at, 3) }, true},
		{"Poison", testCachedAttentionPoison, true},
		{"Stores", testCachedAttentionStores, true},
	} {
		for _, there := range []bool{true, false} {
			if !there && !c.host {
				continue
			}
			t.Run(fmt.Sprintf("%s there %v", c.name, there), func(t *testing.T) {
				gpu, _ := la.FakeGPU(t)
				c.test(t, graphtest.Place{GPU: gpu, There: there})
			})
		}
	}
}

func TestDeviceLayersDiffer(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	testLayersDiffer(t, graphtest.Place{GPU: gpu})
	testLayersDiffer(t, graphtest.Place{GPU: gpu, There: true})
}

func TestDeviceLayerTwice(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	testLayerTwice(t, gpu)
}

func TestDeviceSequenceIODecodes(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	testSequenceIODecodes(t, graphtest.Place{}, graphtest.Place{GPU: gpu, There: true})
}

// TestDeviceExample runs the examples, which end the process if they are wrong.
func TestDeviceExample(t *testing.T) {
	for name, x := range map[string]struct {
		run  func()
		want string
	}{
		"device.Open": {Example_device, "(1, 256) 3 GPU 0 (Fake 0)\n"},
		"GPU_Record":  {ExampleGPU_Record, "(1, 64) 4\n"},
	} {
		t.Run(name, func(t *testing.T) {
			la.FakeGPU(t)
			if got := printed(t, x.run); got != x.want {
				t.Errorf("it prints %q, want %q", got, x.want)
			}
		})
	}
}

// printed is what f writes to standard output.
func printed(t *testing.T, f func()) string {
	file, err := os.Create(filepath.Join(t.TempDir(), "output"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	defer func(stdout *os.File) { os.Stdout = stdout }(os.Stdout)
	os.Stdout = file
	f()
	text, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
