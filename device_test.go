package leanattention_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
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

const (
	mostTokens = 72
	mostPinned = 8 // blocks of memory for copies, each with an event, that there may come to be
)

// decodeOnGPU loads a decoder of one layer, runs a step of it node by node,
// records the next one and replays it some times, all on a GPU, or on several, each
// of which does its part. A step that fails has changed nothing, and can be done again: the
// error is of the first one. Then it calls done, and gives everything back.
func decodeOnGPU(gpu *device.GPU, replays int, done func()) error {
	return decodeSteps(gpu, replays, func(int, *device.Tensor) error { return nil }, done)
}

// decodeSteps is decodeOnGPU that calls each behind each replay, with the tokens that the sequences have and the logits. They are
// cut when they are mostTokens long.
func decodeSteps(gpu *device.GPU, replays int, each func(tokens int, logits *device.Tensor) error, done func()) (err error) {
	const vocab, rows = 40, 2
	members := len(gpu.Members())
	width := 128 * members // as layers can be put in a chain
	var closers []func() error
	var first error // of a step that was done again
	defer func() {
		done()
		for i := len(closers) - 1; i >= 0; i-- {
			if e := closers[i](); e != nil && !errors.Is(e, la.ErrClosed) && err == nil {
				err = e
			}
		}
		if err == nil {
			err = first
		}
	}()
	g := G.NewGraph()
	let := func(name string, d *device.Tensor) *G.Node {
		closers = append(closers, d.Free)
		return G.NewTensor(g, d.Dtype(), len(d.Shape()), G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
	}
	var failed error
	seed := uint32(1)
	const everywhere = -1 // else the axis that is dealt out
	weight := func(name string, axis int, shape ...int) *G.Node {
		if failed != nil {
			return nil
		}
		of := la.Float16
		if len(shape) == 1 {
			of = tensor.Float32
		}
		var d *device.Tensor
		switch {
		case members == 1:
			d, failed = gpu.NewTensor(of, shape...)
		case axis == everywhere:
			d, failed = gpu.UploadReplicated(tensor.New(tensor.Of(of), tensor.WithShape(shape...)))
		default:
			x := tensor.New(tensor.Of(of), tensor.WithShape(shape...))
			data := x.Data().([]la.F16)
			for i := range data { // between 1/32 and 1/16, of both signs
				seed = seed*1664525 + 1013904223
				data[i] = la.F16(0x2800 | seed>>16&0x83ff)
			}
			d, failed = gpu.UploadSharded(x, axis)
		}
		if failed != nil {
			return nil
		}
		return let(name, d)
	}
	table, wq, wk, wv := weight("table", everywhere, vocab, width), weight("wq", 0, width, width), weight("wk", 0, width, width), weight("wv", 0, width, width)
	wo, wh := weight("wo", 1, width, width), weight("wh", 0, width, width)
	gamma, bias := weight("gamma", everywhere, width), weight("bias", everywhere, width)
	head, wd := table, wh
	if members > 1 {
		head, wd = weight("head", 0, vocab, width), weight("wd", 1, width, width)
	}
	if failed != nil {
		return failed
	}
	tokens, err := gpu.UploadReplicated(tensor.New(tensor.Of(tensor.Int32), tensor.WithShape(rows)))
	if err != nil {
		return err
	}
	ids := let("tokens", tokens)

	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: members, HeadDim: width / members, DType: la.Float16, PageSize: 4, Pages: 40, Device: gpu})
	if err != nil {
		return err
	}
	closers = append(closers, cache.Close)
	step, err := cache.NewStep(rows)
	if err != nil {
		return err
	}
	var appends []la.Append
	for range rows {
		seq, err := cache.NewSequence()
		if err != nil {
			return err
		}
		appends = append(appends, la.Append{Seq: seq, Tokens: 1})
	}

	h, err := nn.Embedding(table, ids, nil)
	if err != nil {
		return err
	}
	qkv, err := nn.Linears(h, []*G.Node{wq, wk, wv}, nil, nn.WithNorm(gamma, nil, 1e-5))
	if err != nil {
		return err
	}
	a, err := la.CachedAttention(qkv[0], qkv[1], qkv[2], step.Layer(0), la.WithCausal())
	if err != nil {
		return err
	}
	if members == 1 {
		h, err = nn.Linear(a, wo, bias, nn.WithActivation(nn.ReLU), nn.WithResidual(h))
	} else if h, err = nn.Linear(a, wo, bias, nn.WithResidual(h)); err == nil {
		h, err = nn.Linear(h, wh, nil, nn.WithActivation(nn.ReLU))
	}
	if err != nil {
		return err
	}
	if h, err = nn.Linear(h, wd, nil); err != nil {
		return err
	}
	if h, err = nn.LayerNorm(h, gamma, nil, 1e-5); err != nil {
		return err
	}
	logits, err := nn.Linear(h, head, nil)
	if err != nil {
		return err
	}
	chosen, err := nn.ArgMax(logits)
	if err != nil {
		return err
	}
	vm := G.NewTapeMachine(g)
	closers = append(closers, vm.Close)
	run := func() error { defer vm.Reset(); return vm.RunAll() }
	try := func(run func() error) error {
		if err := tokens.CopyFrom(tensor.New(tensor.WithShape(rows), tensor.WithBacking([]int32{3, 5}))); err != nil {
			return err
		}
		return step.Run(appends, run)
	}
	steps := 0
	turn := func(run func() error) error {
		err := try(run)
		if err != nil && first == nil {
			first = err
			for _, a := range appends {
				if n := a.Seq.Len(); n != steps {
					return fmt.Errorf("%d tokens after %d steps and one that failed: %w", n, steps, err)
				}
			}
			if err = try(run); err != nil {
				return fmt.Errorf("a step failed, %w, and again: %w", first, err)
			}
		}
		steps++
		return err
	}
	if err := turn(run); err != nil {
		return err
	}
	var rec *device.Recording
	closers = append(closers, func() error { return rec.Close() })
	if err := turn(func() (err error) {
		if err := rec.Close(); err != nil {
			return err
		}
		if rec, err = gpu.Record(run); err != nil {
			return err
		}
		return rec.Replay()
	}); err != nil {
		return err
	}
	for range replays {
		if steps == mostTokens {
			for _, a := range appends {
				if err := a.Seq.Truncate(0); err != nil {
					return err
				}
			}
			steps = 0
		}
		if err := turn(rec.Replay); err != nil {
			return err
		}
		if err := each(steps, logits.Value().(*device.Tensor)); err != nil {
			return err
		}
	}
	if _, err := chosen.Value().(*device.Tensor).Download(); err != nil {
		return err
	}
	for _, a := range appends {
		if n := a.Seq.Len(); n != steps {
			return fmt.Errorf("%d tokens after %d steps", n, steps)
		}
	}
	return nil
}

// Whatever call of the driver fails, a load and a step of a decoder are an error,
// and nothing of them stays.
func TestDecoderFaults(t *testing.T) {
	if testing.Short() || reftest.RaceEnabled {
		t.Skip("hundreds of decoders")
	}
	deviceFaults(t, func(t *testing.T, gpu *device.GPU, lib *fakedriver.Library) error {
		// What is closed counts as closed whatever the driver says, and then it is
		// the context's.
		return decodeOnGPU(gpu, 2, func() { lib.State().FailAt = 0 })
	})
}

// So it is on two GPUs that do their parts of a step apart, whichever of them a call is for.
func TestGroupDecoderFaults(t *testing.T) {
	if testing.Short() || reftest.RaceEnabled {
		t.Skip("hundreds of decoders")
	}
	deviceFaultsOn(t, 2, 70, func(t *testing.T, gpu *device.GPU, lib *fakedriver.Library) error {
		return decodeOnGPU(gpu, 2, func() { lib.State().FailAt = 0 })
	})
}

// Steps take no memory, and are one launch each.
func TestDecoderStepsTakeNoMemory(t *testing.T) {
	gpu, lib := la.FakeGPU(t)
	used := func() int64 {
		m, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		return m.Used + m.Pinned
	}
	if err := decodeOnGPU(gpu, 1, func() {}); err != nil {
		t.Fatal(err)
	}
	first := used()
	// Two layers behind each other are one launch; the engine that tests have here
	// knows of no chains.
	if n := strings.Count(lib.Log(), "kernel megakernel_f16_64"); n != 1 {
		t.Errorf("%d chains in a recording", n)
	}
	lib.Forget()
	if err := decodeOnGPU(gpu, 70, func() {}); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(lib.Log(), "cuGraphLaunch"); n != 71 {
		t.Errorf("%d graph launches in 71 steps", n)
	}
	if now := used(); now > 3*first {
		t.Errorf("%d bytes used after 72 steps, %d after 3", now, first)
	}
}

// Steps that two GPUs do apart take no memory of either, however many there are.
func TestGroupStepsTakeNoMemory(t *testing.T) {
	gpu, lib := la.FakeGPUs(t, 2)
	replays := 2000
	if reftest.Every(t) {
		replays = 1e5
	}
	live := 0
	testStepsTakeNoMemory(t, gpu, replays, func(step int) error {
		lib.Forget()
		if step == mostTokens {
			live = lib.Live()
		}
		if n := lib.Live(); step > mostTokens && n > live+2*mostPinned {
			return fmt.Errorf("%d objects of the driver behind %d steps, %d before", n, step, live)
		}
		return nil
	})
}

// So it is on real ones, in half a minute; and equal steps have equal bits.
func TestGPUsStepsTakeNoMemory(t *testing.T) {
	if os.Getenv("LEANATTENTION_GPU") == "emulated" {
		t.Skip("100000 steps on an emulated GPU")
	}
	gpu := devicetest.OpenSome(t, 2)
	for range 2 { // what is loaded once
		if err := decodeOnGPU(gpu, 1, func() {}); err != nil {
			t.Fatal(err)
		}
	}
	testStepsTakeNoMemory(t, gpu, 1e5, func(int) error { return nil })
}

func testStepsTakeNoMemory(t *testing.T, gpu *device.GPU, replays int, each func(step int) error) {
	t.Helper()
	used := make([]device.Memory, len(gpu.Members()))
	expected := make(map[int][]float32)
	var heap runtime.MemStats
	step, host := 0, uint64(0)
	if err := decodeSteps(gpu, replays, func(tokens int, logits *device.Tensor) error {
		step++
		if err := each(step); err != nil {
			return err
		}
		if tokens%12 != 0 || step < mostTokens {
			return nil
		}
		x, err := logits.Download()
		if err != nil {
			return err
		}
		// The first two steps were others.
		now := x.Data().([]float32)
		if want := expected[tokens]; want == nil {
			expected[tokens] = now
		} else if !slices.Equal(now, want) {
			return fmt.Errorf("step %d, %d tokens: other logits than before", step, tokens)
		}
		for i := range used {
			m, err := gpu.Memory(i)
			if err != nil {
				return err
			}
			if step < 2*mostTokens { // pinned memory for copies is there
				used[i] = m
			} else if m.Used != used[i].Used || m.Pinned > used[i].Pinned+mostPinned<<16 {
				return fmt.Errorf("step %d: GPU %d has %v, %v before", step, i, m, used[i])
			}
		}
		if step == replays/4/12*12 || step+12 > replays {
			runtime.GC()
			runtime.ReadMemStats(&heap)
			if host == 0 {
				host = heap.HeapAlloc
			} else if heap.HeapAlloc > host+4<<20 {
				return fmt.Errorf("step %d: %d bytes of the host's memory, %d before", step, heap.HeapAlloc, host)
			}
		}
		return nil
	}, func() {}); err != nil {
		t.Fatal(err)
	}
	if len(expected) != mostTokens/12 {
		t.Errorf("logits of %d lengths", len(expected))
	}
}

// testDeviceShared: a value is overwritten when its readers have run, but those that stay; the
// memory does not depend on how many nodes there are.
func testDeviceShared(t *testing.T, gpu *device.GPU) {
	const rows, width = 64, 256
	up := func(n ...int) *device.Tensor {
		x := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(n...))
		for i := range x.Float32s() {
			x.Float32s()[i] = float32(i%13-6) / 64
		}
		return graphtest.Upload(t, gpu, x)
	}
	weight, gamma, x := up(width, width), up(width), up(rows, width)
	used := func() int64 {
		runtime.GC()
		m, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		return m.Used
	}
	// run is layers of which each reads the value before it twice, as parts and as a residual.
	run := func(layers int, share bool) (nodes []*G.Node, out *tensor.Dense, grown int64) {
		g := G.NewGraph()
		in := func(name string, d *device.Tensor) *G.Node {
			return G.NewTensor(g, tensor.Float32, len(d.Shape()), G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
		}
		w, h, norm := in("w", weight), in("x", x), in("gamma", gamma)
		for range layers {
			parts, err := nn.Linears(h, []*G.Node{w, w}, nil, nn.WithNorm(norm, nil, 1e-5))
			if err != nil {
				t.Fatal(err)
			}
			sum := only(t)(nn.Linear(parts[0], w, nil, nn.WithResidual(parts[1])))
			h = only(t)(nn.Linear(sum, w, nil, nn.WithResidual(h)))
			nodes = append(nodes, h)
		}
		if share {
			if err := rewrite.ShareMemory(g, nodes[1]); err != nil {
				t.Fatal(err)
			}
		}
		before := used()
		vm := G.NewTapeMachine(g)
		defer vm.Close()
		graphtest.Again(t, vm)
		graphtest.Again(t, vm) // what stays is there from the beginning now
		grown = used() - before
		graphtest.Again(t, vm)
		if again := used() - before; again != grown {
			t.Errorf("%d layers: %d bytes taken, and after another run %d", layers, grown, again)
		}
		if share {
			rec, err := gpu.Record(vm.RunAll)
			if err == nil {
				err = errors.Join(rec.Replay(), rec.Close())
			}
			if err != nil {
				t.Errorf("a recording: %v", err)
			}
			graphtest.Again(t, vm)
		}
		return nodes, graphtest.Download(t, h.Value()), grown
	}
	nodes, got, few := run(12, true)
	_, want, all := run(12, false)
	if err := sameElements(got, want); err != nil {
		t.Errorf("with shared memory: %v", err)
	}
	if _, err := nodes[0].Value().(*device.Tensor).Download(); !errors.Is(err, la.ErrState) {
		t.Errorf("a value whose readers have run: %v", err)
	}
	if _, err := nodes[1].Value().(*device.Tensor).Download(); err != nil {
		t.Errorf("a value that is kept: %v", err)
	}
	if _, _, more := run(24, true); more > few || few > all/2 {
		t.Errorf("12 layers take %d bytes, with shared memory %d, and 24 layers %d", all, few, more)
	}
	g := G.NewGraph()
	for name, err := range map[string]error{"no graph": rewrite.ShareMemory(nil), "no node": rewrite.ShareMemory(g, nil), "another graph's": rewrite.ShareMemory(g, nodes[0])} {
		if !errors.Is(err, la.ErrGraph) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// only is a value without an error.
func only(t testing.TB) func(*G.Node, error) *G.Node {
	return func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}
