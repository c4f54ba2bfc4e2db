package leanattention_test

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

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
