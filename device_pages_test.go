package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/kernels"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// What is particular to a cache on a GPU.

func deviceConfig(gpu *device.GPU) CacheConfig {
	return CacheConfig{Layers: 3, KVHeads: 2, HeadDim: 8, PageSize: 4, Pages: 12, DType: Float16, Device: gpu}
}

// count is how often a line is in the driver's log from a place on.
func count(log, line string) int {
	return strings.Count("\n"+log, "\n"+line+"\n")
}

// A step is planned and uploaded once for all layers. A layer with operands of
// the host is one copy there, which is made together with the plan's, one back and one
// wait; with operands on the GPU it is launches alone.
func TestDeviceLayerCalls(t *testing.T) {
	gpu, lib := FakeGPU(t)
	rng := reftest.Rand(t)
	c := newTestCache(t, deviceConfig(gpu))
	s := newStepGraph(t, c, 8, 4, tensor.Float32, WithCausal())
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	s.advance(t, rng, testAppend{a, 6})
	engine := fakeOf(gpu.Internal())
	if got := strings.Join(engine.calls, " "); got != "build upload append run append run append run" {
		t.Errorf("a step of three layers: %s", got)
	}
	if engine.plans != 1 {
		t.Errorf("%d plans", engine.plans)
	}

	engine.calls = nil
	noError(t, set(s, testAppend{a, 2}))
	in := s.draw(rng, 0, newTestTokens(2, 3))
	op := s.nodes[0].Op().(*cachedOp)
	calls := func(run func()) (copies, waits int) {
		t.Helper()
		from := len(lib.Log())
		run()
		log := lib.Log()[from:]
		const engines = 13 // the engine of the tests copies to and fro, and waits each time
		copies = count(log, "cuMemcpyHtoDAsync_v2") + count(log, "cuMemcpyDtoHAsync_v2") + count(log, "kernel copy_pieces") - engines
		return copies, count(log, "cuEventSynchronize") + count(log, "cuStreamSynchronize") - engines
	}
	if copies, waits := calls(func() {
		_, err := op.Do(in.tensors[0], in.tensors[1], in.tensors[2])
		noError(t, err)
	}); copies != 2 || waits != 1 {
		t.Errorf("operands of the host: %d copies, %d waits", copies, waits)
	}
	var there [3]*device.Tensor
	for i := range there {
		var err error
		there[i], err = gpu.Upload(in.tensors[i])
		noError(t, err)
	}
	noError(t, gpu.Synchronize()) // the copies are made
	if copies, waits := calls(func() {
		_, err := op.Do(there[0], there[1], there[2])
		noError(t, err)
	}); copies != 0 || waits != 0 {
		t.Errorf("operands on the GPU: %d copies, %d waits", copies, waits)
	}
	noError(t, s.step.Rollback())

	// Runs that have the rows of sequences only are planned again in the first of them.
	for i := range there {
		var err error
		there[i], err = there[i].Rows(0, 2)
		noError(t, err)
	}
	for turn, want := range []string{"build upload build upload append run", "build upload append run", "build upload append run"} {
		engine.calls = nil
		noError(t, set(s, testAppend{a, 2}))
		_, err := op.Do(there[0], there[1], there[2])
		noError(t, err)
		if got := strings.Join(engine.calls, " "); got != want {
			t.Errorf("fewer rows, turn %d: %s, want %s", turn, got, want)
		}
		noError(t, s.step.Rollback())
	}
	noError(t, c.Close())
}

// On one GPU, and by context on three.
func TestDeviceCacheMemoryFlat(t *testing.T) {
	for n, steps := range map[int]int{1: reftest.Cases(t, 80, 500), 3: reftest.Cases(t, 25, 100)} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			gpu, _ := FakeGPUs(t, n)
			testDeviceCacheMemoryFlat(t, modelPlace{gpu: gpu}, steps)
		})
	}
}

// NewCache of more than there is says how much that was, and keeps nothing.
func TestDeviceCacheOutOfMemory(t *testing.T) {
	gpu, lib := FakeGPU(t)
	config := deviceConfig(gpu)
	small, err := NewCache(config) // the engine has been made
	noError(t, err)
	noError(t, small.Close())
	lib.State().Total = 1 << 20
	spare, err := gpu.NewTensor(tensor.Float32, 1<<17) // half of it, which then nobody has
	noError(t, err, spare.Free())
	config.Pages = (1 << 20) / (3 * 2 * 2 * 4 * 8 * 2)
	c, err := NewCache(config) // all of the memory
	noError(t, err)
	if c.bytes > 1<<20 || c.store.Where() != "GPU 0 (Fake 0)" {
		t.Errorf("%v", c)
	}
	if _, err := NewCache(config); !errors.Is(err, ErrOutOfMemory) {
		t.Errorf("a second one: %v", err)
	}
	noError(t, c.Close())
	config.Pages *= 2
	live := lib.Live()
	_, err = NewCache(config)
	if !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), fmt.Sprintf("NewCache: %d bytes asked for on GPU 0 (Fake 0), 1048576 of 1048576 free: CUDA_ERROR", 3*2*config.Pages*2*4*8*2)) {
		t.Errorf("got %v", err)
	}
	if m, _ := gpu.Memory(); m.Used != 0 || lib.Live() != live {
		t.Errorf("%+v, %d objects; %d before", m, lib.Live(), live)
	}
}

// A plan that gets no memory gets what the pool has and nobody uses.
func TestDevicePlanMemory(t *testing.T) {
	gpu, lib := FakeGPU(t)
	c := newTestCache(t, deviceConfig(gpu))
	s := newStepGraph(t, c, 4, 4, tensor.Float32)
	defer s.close()
	m, err := gpu.Memory()
	noError(t, err)
	lib.State().Total = m.Used + 1024
	d, err := gpu.NewTensor(tensor.Float32, 256)
	noError(t, err)
	a := newTestSequence(t, c)
	if err := s.step.Set([]Append{{Seq: a, Tokens: 1}}); !errors.Is(err, ErrOutOfMemory) || s.step.open {
		t.Errorf("Set without memory for a plan: %v", err)
	}
	noError(t, d.Free(), s.step.Set([]Append{{Seq: a, Tokens: 1}}), s.step.Rollback(), c.Close())
}

// Plans that nobody uses give their memory back to who gets none, and others are made
// when they are needed.
func TestDevicePlansWhenShort(t *testing.T) {
	gpu, lib := FakeGPU(t)
	_, err := gpu.Internal().Attention("test")
	noError(t, err)
	plan := func() *fakePlan {
		p := gpu.Internal().TakePlan().(*fakePlan)
		if p.there == nil {
			p.host, err = gpu.Internal().Dev.NewHost(64)
			noError(t, err)
			p.there, err = gpu.Internal().Dev.NewBuffer(64)
			noError(t, err)
		}
		return p
	}
	used, spare := plan(), plan()
	gpu.Internal().GivePlan(spare)
	m, err := gpu.Memory()
	noError(t, err)
	lib.State().Total = m.Used + 256 - 32 // of the 256 that a tensor of 64 bytes takes
	x, err := gpu.NewTensor(tensor.Float32, 16)
	noError(t, err)
	if _, err := gpu.NewTensor(tensor.Float32, 1024); !errors.Is(err, ErrOutOfMemory) {
		t.Errorf("more than there is: %v", err)
	}
	if err := spare.there.Close(); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("a plan that nobody uses keeps its memory: %v", err)
	}
	noError(t, x.Free())
	lib.State().Total += 1 << 20
	if again := plan(); again == spare || again == used {
		t.Error("a closed plan is used again")
	} else {
		gpu.Internal().GivePlan(again)
	}
	gpu.Internal().GivePlan(used)
	if plan() != used {
		t.Error("a plan is not used again")
	}
}

// A GPU and its cache may be closed in any order.
func TestDeviceCloseOrder(t *testing.T) {
	rng := reftest.Rand(t)
	for _, cacheFirst := range []bool{true, false} {
		gpu, lib := FakeGPU(t)
		c := newTestCache(t, deviceConfig(gpu))
		s := newStepGraph(t, c, 4, 4, tensor.Float32)
		defer s.close()
		a := &testContext{seq: newTestSequence(t, c)}
		s.advance(t, rng, testAppend{a, 3})
		noError(t, set(s, testAppend{a, 1}))
		in := s.draw(rng, 0, newTestTokens(1, 3))
		if cacheFirst {
			noError(t, c.Close())
		}
		engine := fakeOf(gpu.Internal())
		noError(t, gpu.Close())
		if !engine.closed {
			t.Error("the engine was not closed")
		}
		if lib.Live() != 0 {
			t.Errorf("%d objects left", lib.Live())
		}
		closed := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, ErrClosed) {
				t.Errorf("cache first %t: %s: %v", cacheFirst, what, err)
			}
		}
		closed("a run", s.runLayer(0, in))
		if !cacheFirst {
			noError(t, s.step.Rollback()) // books are kept without the GPU
			closed("Set", set(s, testAppend{a, 1}))
			if a.seq.Len() != 3 || a.seq.step != nil {
				t.Error("a Set that failed has changed something")
			}
			noError(t, c.Close())
		}
		closed("Close", c.Close())
		_, err := NewCache(deviceConfig(gpu))
		closed("NewCache", err)
	}
}

// What a cache on a GPU does not take.
func TestDeviceCacheErrors(t *testing.T) {
	gpu, _ := FakeGPU(t)
	other, err := device.Open(1)
	noError(t, err)
	defer other.Close()
	config := deviceConfig(gpu)
	config.HeadDim = 13
	_, err = NewCache(config)
	wrong(t, "head dim", err, ErrUnsupported, "NewCache", "GPU 0 (Fake 0)", "13")
	_, err = NewCache(deviceConfig(new(device.GPU)))
	wrong(t, "no GPU", err, ErrState, "NewCache", "not made by device.Open")

	none, err := device.Open(0)
	noError(t, err)
	real := ongpu.NewAttentionEngine
	ongpu.NewAttentionEngine = func(_, _ *cuda.Device) (ongpu.AttentionEngine, error) {
		return nil, fmt.Errorf("unit: %w", kernels.ErrNoImage)
	}
	_, err = NewCache(deviceConfig(none))
	wrong(t, "no kernels", err, ErrUnsupported, "NewCache", "GPU 0 (Fake 0)", "no GPU module")
	ongpu.NewAttentionEngine = real
	noError(t, none.Close())

	c, host := newTestCache(t, deviceConfig(gpu)), newTestCache(t, deviceConfig(nil))
	s, onHost := newStepGraph(t, c, 2, 4, tensor.Float32), newStepGraph(t, host, 2, 4, tensor.Float32)
	defer s.close()
	defer onHost.close()
	step, err := c.NewStep(2)
	noError(t, err)
	g := s.in[0][0].Graph()
	f64 := input3Nodes(g, tensor.Float64, 2, 4, c)
	_, err = CachedAttention(f64[0], f64[1], f64[2], step.Layer(0))
	wrong(t, "float64", err, ErrDType, "CachedAttention", "q is float64", "on a GPU")
	_, err = CachedAttention(s.in[0][0], s.in[0][1], s.in[0][2], step.Layer(0), WithWindow(3), WithSchedule(Unfused))
	wrong(t, "unfused, with a window", err, ErrUnsupported, "CachedAttention", "GPU 0 (Fake 0)", "keys of 8 elements", "unfused attention")
	half := input3Nodes(onHost.in[0][0].Graph(), Float16, 2, 4, c)
	_, err = CachedAttention(half[0], half[1], half[2], onHost.step.Layer(0))
	wrong(t, "half on the host", err, ErrDType, "CachedAttention", "q is Float16")

	a, b := newTestSequence(t, c), newTestSequence(t, host)
	noError(t, s.step.Set([]Append{{Seq: a, Tokens: 2}}), onHost.step.Set([]Append{{Seq: b, Tokens: 2}}))
	in := s.draw(rand.New(rand.NewPCG(1, 2)), 0, newTestTokens(2, 3))
	q, k, v := in.tensors[0], in.tensors[1], in.tensors[2]
	on := func(gpu *device.GPU, x *tensor.Dense) *device.Tensor {
		d, err := gpu.Upload(x)
		noError(t, err)
		return d
	}
	do := s.nodes[0].Op().Do
	_, err = do(on(gpu, q), k, v)
	wrong(t, "k and v on the host", err, ErrUnsupported, "q is on GPU 0 (Fake 0)", "k in host memory")
	_, err = do(q, k, on(gpu, v))
	wrong(t, "v on the GPU", err, ErrUnsupported, "q is in host memory", "v on GPU 0 (Fake 0)")
	_, err = do(on(gpu, q), on(gpu, k), on(other, v))
	wrong(t, "two GPUs", err, ErrUnsupported, "q is on GPU 0 (Fake 0)", "v on GPU 1 (Fake 1)")
	_, err = do(on(other, q), on(other, k), on(other, v))
	wrong(t, "another GPU", err, ErrUnsupported, "GPU 1 (Fake 1)", "cache on GPU 0 (Fake 0)")
	_, err = onHost.nodes[0].Op().Do(on(gpu, q), on(gpu, k), on(gpu, v))
	wrong(t, "cache on the host", err, ErrUnsupported, "q is on GPU 0 (Fake 0)", "cache in host memory")
	freed := on(gpu, k)
	noError(t, freed.Free())
	_, err = do(on(gpu, q), freed, on(gpu, v))
	wrong(t, "freed", err, ErrClosed, "k was freed")
	_, err = do(on(gpu, q), nil, on(gpu, v))
	wrong(t, "nil", err, ErrShape, "k is nil")
	wrong(t, "Commit", s.step.Commit(), ErrState)
	if where := host.store.Where(); where != "host memory" {
		t.Error(where)
	}
	noError(t, c.Close())
}

// Set asks the GPU for kernels for a tree before it begins a step.
func TestDeviceTreeRefused(t *testing.T) {
	gpu, _ := FakeGPU(t)
	c := newTestCache(t, deviceConfig(gpu))
	s := newStepGraph(t, c, 3, 4, tensor.Float32, WithCausal())
	defer s.close()
	seq, engine := newTestSequence(t, c), fakeOf(gpu.Internal())
	engine.trees = errors.New("no kernel for trees")
	tree := []Append{{Seq: seq, Tokens: 3, Parents: []int{-1, 0, 0}}}
	wrong(t, "a tree", s.step.Set(tree), ErrUnsupported, "Set", "GPU 0 (Fake 0)", "no kernel for trees")
	wrong(t, "no step", s.step.Commit(), ErrState)
	noError(t, s.step.Set([]Append{{Seq: seq, Tokens: 3}}), s.step.Rollback())
	engine.trees = nil
	noError(t, s.step.Set(tree), s.step.Rollback(), c.Close())
}

// A launch that fails, and every call of the driver that fails once, leaves the
// cache as it was: Rollback and another try, and all is right.
func TestDeviceCacheFaults(t *testing.T) {
	t.Run("small pages", func(t *testing.T) { testDeviceCacheFaults(t, func(*CacheConfig) {}) })
	// Of 70 bytes: no multiple of four, so that Set copies them at once, and fails itself.
	t.Run("odd pages", func(t *testing.T) {
		testDeviceCacheFaults(t, func(c *CacheConfig) { c.KVHeads, c.HeadDim, c.PageSize = 1, 7, 5 })
	})
}

func testDeviceCacheFaults(t *testing.T, change func(*CacheConfig)) {
	rng := reftest.Rand(t)
	gpu, lib := FakeGPU(t)
	config := deviceConfig(gpu)
	change(&config)
	c := newTestCache(t, config)
	fork := &testContext{seq: newTestSequence(t, c)}
	s := newStepGraph(t, c, 6, 4, tensor.Float32, WithCausal())
	defer s.close()
	s.advance(t, rng, testAppend{fork, 6})
	a := fork.fork(t) // Set has to copy a page
	unchanged := func(what string) {
		t.Helper()
		noError(t, s.step.Rollback())
		if st := c.Stats(); st.FreePages != 10 || st.Sequences != 2 || st.Tokens != 12 || st.Shared != 2 {
			t.Fatalf("%s: %+v", what, st)
		}
		noError(t, a.seq.checkTokens(a.tokens), fork.seq.checkTokens(fork.tokens))
	}
	engine := fakeOf(gpu.Internal())
	for _, there := range []bool{false, true} {
		s.there = there
		engine.fail = errors.New("no such kernel")
		noError(t, set(s, testAppend{a, 2}))
		err := s.runLayer(0, s.draw(rng, 0, newTestTokens(2, 3)))
		if !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), "layer 0: no such kernel") {
			t.Fatalf("a launch that fails: %v", err)
		}
		unchanged("a launch that fails")
		engine.limit = fmt.Errorf("too many rows: %w", attn.ErrShape)
		if err := set(s, testAppend{a, 2}); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "Set: on GPU 0 (Fake 0): too many rows") {
			t.Fatalf("a step that no launch can do: %v", err)
		}
		unchanged("a step that no launch can do")

		for call := int64(1); ; call++ {
			at := lib.State().Calls + call
			lib.State().FailAt, lib.State().FailWith = at, 1
			err := set(s, testAppend{a, 2})
			if err == nil {
				_, err = s.attempt(rng, 0, testAppend{a, 2})
			} else if s.step.open || a.seq.step != nil || c.Stats().FreePages != 10 {
				t.Fatalf("a Set that failed has changed something: %v, %+v", err, c.Stats())
			}
			if there && err == nil {
				err = s.runLayer(1, s.draw(rng, 1, newTestTokens(2, 3)))
			}
			lib.State().FailAt = 0
			if lib.State().Calls < at { // it came to its end without the fault
				noError(t, err)
				if call < 50 {
					t.Fatalf("only %d calls", call)
				}
				t.Logf("%d calls", call-1)
				break
			}
			failed := lib.State().Failed()
			if err == nil && failed != "cuCtxPopCurrent_v2" || err != nil && !strings.Contains(err.Error(), "CUDA_ERROR") {
				t.Fatalf("%s failed: %v", failed, err)
			}
			unchanged(failed)
		}
		unchanged("a run that was rolled back")
	}
	for call := int64(1); ; call++ { // Keep, of a sequence that shares all pages
		b := a.fork(t)
		lib.State().FailAt, lib.State().FailWith = lib.State().Calls+call, 1
		err := b.seq.Keep(1, []int{1, 3})
		over := lib.State().Calls < lib.State().FailAt
		lib.State().FailAt = 0
		if err == nil {
			b.tokens = []*testToken{b.tokens[0], b.tokens[2], b.tokens[4]}
		} else if over || !strings.Contains(err.Error(), "CUDA_ERROR") {
			t.Fatal(err)
		}
		noError(t, b.seq.checkTokens(b.tokens), b.seq.Release())
		unchanged("Keep")
		if over {
			t.Logf("%d calls of Keep", call-1)
			break
		}
	}
	s.advance(t, rng, testAppend{a, 3}, testAppend{fork, 1})
	noError(t, c.Close())
}

// A layer that fails in one graph is not done, though another graph on the step has
// done it in the same run: its slots may hold anything.
func TestDeviceLayerFailsBehindAnotherGraph(t *testing.T) {
	rng := reftest.Rand(t)
	gpu, _ := FakeGPU(t)
	c := newTestCache(t, deviceConfig(gpu))
	s := newStepGraph(t, c, 2, 4, tensor.Float32)
	defer s.close()
	in := input3Nodes(G.NewGraph(), tensor.Float32, 2, 4, c)
	other, err := CachedAttention(in[0], in[1], in[2], s.step.Layer(1))
	noError(t, err)
	a := &testContext{seq: newTestSequence(t, c)}
	noError(t, set(s, testAppend{a, 2}))
	_, err = s.attempt(rng, 0, testAppend{a, 2})
	noError(t, err)
	fakeOf(gpu.Internal()).fail = errors.New("no such kernel")
	x := s.draw(rng, 1, newTestTokens(2, 3)).tensors
	if _, err = other.Op().Do(x[0], x[1], x[2]); !errors.Is(err, ErrInternal) {
		t.Fatal(err)
	}
	if err := s.step.Commit(); !errors.Is(err, ErrState) || !strings.Contains(err.Error(), "layer 1 has not run") {
		t.Errorf("Commit of a layer that failed: %v", err)
	}
	if a.seq.Len() != 0 {
		t.Errorf("%d tokens", a.seq.Len())
	}
	noError(t, s.step.Rollback())
	s.advance(t, rng, testAppend{a, 2})
	noError(t, c.Close())
}

// Memory that the staging of operands does not get is an error, and no more.
func TestDeviceStagingOutOfMemory(t *testing.T) {
	for _, call := range []string{"cuMemHostAlloc", "cuMemAlloc_v2"} {
		rng := rand.New(rand.NewPCG(3, 4))
		gpu, lib := FakeGPU(t)
		c := newTestCache(t, deviceConfig(gpu))
		s := newStepGraph(t, c, 6, 4, tensor.Float32)
		defer s.close()
		a := &testContext{seq: newTestSequence(t, c)}
		noError(t, set(s, testAppend{a, 2}))
		before := Slabs(c)
		lib.State().FailIn(call, 2)
		_, err := s.attempt(rng, 0, testAppend{a, 2})
		if !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), "CachedAttention") {
			t.Errorf("%s: %v", call, err)
		}
		lib.State().FailIn("", 0)
		if !bytes.Equal(Slabs(c), before) {
			t.Errorf("%s: the cache was written", call)
		}
		noError(t, s.step.Rollback())
		s.advance(t, rng, testAppend{a, 3})
		noError(t, c.Close(), gpu.Close())
	}
}

// Plans of steps that are garbage are used again.
func TestDevicePlansComeBack(t *testing.T) {
	gpu, _ := FakeGPU(t)
	c := newTestCache(t, deviceConfig(gpu))
	most := 0
	for range 60 {
		s := newStepGraph(t, c, 2, 2, tensor.Float32)
		a := newTestSequence(t, c)
		noError(t, s.step.Set([]Append{{Seq: a, Tokens: 1}}), s.step.Rollback(), a.Release())
		s.close()
		s = nil
		collectGarbage()
		most = max(most, fakeOf(gpu.Internal()).plans)
	}
	if most > 30 {
		t.Errorf("%d plans for 60 steps, of which one is in use", most)
	}
	noError(t, c.Close())
}

// input3Nodes are q, k and v of a step of so many rows.
func input3Nodes(g *G.ExprGraph, t tensor.Dtype, tokens, heads int, c *Cache) (n [3]*G.Node) {
	cfg := c.Config()
	for i, width := range [...]int{heads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim, cfg.KVHeads * cfg.ValueDim} {
		n[i] = G.NewMatrix(g, t, G.WithShape(tokens, width), G.WithName(fmt.Sprintf("%c %v", "qkv"[i], t)))
	}
	return n
}

// collectGarbage collects garbage and gives cleanups a moment.
func collectGarbage() {
	runtime.GC()
	time.Sleep(time.Millisecond)
}
