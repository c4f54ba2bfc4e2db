package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Memory that the second GPU alone has not is an error, and the cache is as before.
func TestGroupOutOfMemory(t *testing.T) {
	for _, kvHeads := range []int{2, 1} {
		t.Run(fmt.Sprintf("%d KV heads", kvHeads), func(t *testing.T) { testGroupOutOfMemory(t, kvHeads) })
	}
}

func testGroupOutOfMemory(t *testing.T, kvHeads int) {
	rng := rand.New(rand.NewPCG(3, 4))
	gpu, lib := FakeGPUs(t, 2)
	small, err := NewCache(groupConfig(gpu, kvHeads)) // the engines have been made
	noError(t, err, small.Close())
	lib.State().FailOn(1, "cuMemAlloc_v2", 2)
	live := lib.Live()
	_, err = NewCache(groupConfig(gpu, kvHeads))
	if !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), "bytes asked for on GPU 1 (Fake 1)") {
		t.Errorf("NewCache: %v", err)
	}
	if m, _ := gpu.Memory(); m.Used != 0 || lib.Live() != live {
		t.Errorf("%+v, %d objects; %d before", m, lib.Live(), live)
	}
	lib.State().FailIn("", 0)

	c := newTestCache(t, groupConfig(gpu, kvHeads))
	s := newStepGraph(t, c, 4, 4, tensor.Float32)
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	before := Slabs(c)
	noError(t, gpu.Internal().Queue.Submit(collect))
	for member := range 2 {
		lib.State().FailOn(member, "cuMemAlloc_v2", 2)
		if err := set(s, testAppend{a, 2}); !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), fmt.Sprintf("GPU %d", member)) || s.step.open {
			t.Errorf("Set without memory for a plan on GPU %d: %v", member, err)
		}
		if got := c.Stats(); got.FreePages != 12 || got.Tokens != 0 || !bytes.Equal(before, Slabs(c)) {
			t.Errorf("%+v", got)
		}
		lib.State().FailIn("", 0)
	}
	s.advance(t, rng, testAppend{a, 3})
	s.advance(t, rng, testAppend{a, 1})
	noError(t, c.Close())
}

// groupFaults runs a test again and again, with every driver call of it failing once.
func groupFaults(t *testing.T, test func(gpu *device.GPU, lib *fakedriver.Library) error) {
	groupFaultsOf(t, 100, test)
}

// groupFaultsOf is groupFaults of a test that makes so many calls at least. By default every eighth one fails, others in every run.
func groupFaultsOf(t *testing.T, least int64, test func(gpu *device.GPU, lib *fakedriver.Library) error) {
	every := int64(8)
	if reftest.Every(t) {
		every = 1
	}
	for call := 1 + reftest.Rand(t).Int64N(every); ; call += every {
		gpu, lib := FakeGPUs(t, 2)
		lib.State().FailAt, lib.State().FailWith = lib.State().Calls+call, 2
		err := test(gpu, lib)
		failed := lib.State().Failed()
		lib.State().FailAt = 0
		if failed == "" {
			noError(t, err, gpu.Close())
			t.Logf("%d calls", call-every)
			if call-every+1 < least {
				t.Fatalf("only %d calls", call)
			}
			return
		}
		if e := gpu.Close(); e != nil {
			t.Fatalf("call %d, %s, failed (%v): Close: %v", call, failed, err, e)
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Fatalf("call %d, %s, failed (%v): %d left, %d defects", call, failed, err, lib.Live(), lib.Defects())
		}
		if err != nil && !errors.Is(err, ErrOutOfMemory) {
			t.Fatalf("call %d, %s, failed: %v", call, failed, err)
		}
	}
}

// A step that fails on either GPU, at any call, can be set again, and then is right.
func TestGroupFaults(t *testing.T) {
	t.Run("heads", func(t *testing.T) { testGroupFaults(t, 2, 2, false) })
	t.Run("context", func(t *testing.T) { testGroupFaults(t, 1, 2, false) })
	t.Run("context, one token", func(t *testing.T) { testGroupFaults(t, 1, 1, false) })
	t.Run("context, apart", func(t *testing.T) { testGroupFaults(t, 1, 2, true) })
	t.Run("context, apart, one token", func(t *testing.T) { testGroupFaults(t, 1, 1, true) })
}

func testGroupFaults(t *testing.T, kvHeads, n int, apart bool) {
	groupFaults(t, func(gpu *device.GPU, lib *fakedriver.Library) (failed error) {
		rng := rand.New(rand.NewPCG(5, 6))
		note := func(err error) bool {
			if failed == nil {
				failed = err
			}
			return err == nil
		}
		config := groupConfig(gpu, kvHeads)
		config.Layers = 1
		c, err := NewCache(config)
		if !note(err) {
			if c, err = NewCache(config); err != nil {
				t.Fatalf("again: %v", err)
			}
		}
		defer func() {
			lib.State().FailAt = 0 // what can't be given back is left
			noError(t, c.Close())
		}()
		step := newStepGraph(t, c, 3, 4, tensor.Float32)
		defer step.close()
		step.there, step.apart, step.columns = apart, apart, apart
		a := &testContext{seq: newTestSequence(t, c)}
		for range 2 {
			for try := 0; ; try++ {
				if try > 1 {
					t.Fatalf("it failed twice: %v", failed)
				}
				if !note(set(step, testAppend{a, n})) {
					continue
				}
				tokens := newTestTokens(n, 1)
				in := step.draw(rng, 0, tokens)
				if !note(step.runLayer(0, in)) {
					noError(t, step.step.Rollback())
					if got := c.Stats(); got.FreePages != 12-(len(a.tokens)+3)/4 || got.Tokens != len(a.tokens) {
						t.Fatalf("behind %v: %+v", failed, got)
					}
					continue
				}
				noError(t, step.checkLayer(0, in.q, []stepPart{{context: append(slices.Clone(a.tokens), tokens...), n: n}}))
				if !note(step.step.Commit()) {
					t.Fatalf("Commit: %v", failed)
				}
				a.tokens = append(a.tokens, tokens...)
				break
			}
		}
		return failed
	})
}

// A sum that one of the GPUs could not be given is an error, and all of them begin anew before the next one.
func TestGroupSumFails(t *testing.T) {
	gpu, lib := FakeGPUs(t, 2)
	x, err := gpu.UploadReplicated(tensor.New(tensor.WithShape(4, 4), tensor.Of(tensor.Float32)))
	noError(t, err)
	node := new(ongpu.Node)
	sum := func() error {
		_, err := ongpu.Compute(&ongpu.Call{
			Op: "test", Node: node, Names: []string{"x"}, In: []G.Value{x}, DType: tensor.Float32, Shape: tensor.Shape{4, 4},
			PerGPU: func([]ongpu.Layout) (*ongpu.PerGPU, error) {
				return &ongpu.PerGPU{Layout: ongpu.Layout{Replicated: true}, Shape: tensor.Shape{4, 4}, Sum: true}, nil
			},
		})
		return err
	}
	noError(t, sum())
	lib.Forget()
	noError(t, sum())
	launch := "cuLaunchKernel"
	if strings.Contains(lib.Log(), launch+"Ex") {
		launch += "Ex"
	}
	cleared := func() int { return strings.Count(lib.Log(), "cuMemsetD8Async") }
	for member := range 2 {
		lib.State().FailOn(member, launch, 2)
		lib.Forget()
		if err := sum(); !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), fmt.Sprintf("GPU %d", member)) {
			t.Errorf("member %d: %v", member, err)
		}
		lib.State().FailIn("", 0)
		if n := cleared(); n != 2 {
			t.Errorf("member %d: what %d GPUs sum through was cleared:\n%s", member, n, lib.Log())
		}
		lib.Forget()
		noError(t, sum(), gpu.Synchronize())
		if log := lib.Log(); len(fakedriver.Kernels(log)) != 2 || cleared() != 0 {
			t.Errorf("behind it: %s", log)
		}
	}
	noError(t, x.Free())
}

// Where a GPU has not answered, whatever is asked of the group says so, but for giving memory back and closing.
func TestGroupNoAnswer(t *testing.T) {
	gpu, lib := FakeGPUs(t, 2)
	rng := reftest.Rand(t)
	c := newTestCache(t, groupConfig(gpu, 2))
	s := newStepGraph(t, c, 3, 4, tensor.Float32)
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	s.advance(t, rng, testAppend{a, 3})
	x := tensor.New(tensor.WithShape(4, 4), tensor.Of(tensor.Float32))
	whole, err := gpu.Upload(x)
	noError(t, err)
	parts, err := gpu.UploadSharded(x, 0)
	noError(t, err)
	all, err := gpu.UploadReplicated(x)
	noError(t, err)
	rows, err := whole.Rows(0, 1)
	noError(t, err)
	q, err := gpu.NewTensor(tensor.Float32, 1, 2, 3, 64)
	noError(t, err)
	out, err := gpu.NewTensor(tensor.Float32, 1, 2, 3, 64)
	noError(t, err, Attend(Args{Q: q, K: q, V: q, Out: out}))
	g := G.NewGraph()
	up, err := device.ToGPU(G.NewMatrix(g, tensor.Float32, G.WithShape(4, 4), G.WithName("x"), G.WithValue(x)), gpu)
	noError(t, err)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	rec, err := gpu.Record(func() error { return nil })
	noError(t, err)
	noError(t, set(s, testAppend{a, 2}))
	in := s.draw(rng, 0, newTestTokens(2, 1))

	var engines []*layers.Engine
	for _, m := range gpu.Internal().Members {
		e, err := m.Layers("test")
		noError(t, err)
		engines = append(engines, e)
	}
	exchange, err := gpu.Internal().Exchange("test", engines)
	noError(t, err)
	lost := errors.New("GPU 1 is lost")
	if err := exchange.Realign(func() error { return lost }); !errors.Is(err, lost) {
		t.Fatal(err)
	}
	lib.Forget()
	computes := func() error {
		_, err := ongpu.Compute(&ongpu.Call{Op: "test", Node: new(ongpu.Node), Names: []string{"x"}, In: []G.Value{all}, DType: tensor.Float32, Shape: tensor.Shape{4, 4},
			Queue: func(*ongpu.Work) error { return errors.New("it was queued") }})
		return err
	}
	for name, err := range map[string]error{
		"Upload": second(gpu.Upload(x)), "UploadSharded": second(gpu.UploadSharded(x, 0)), "UploadReplicated": second(gpu.UploadReplicated(x)),
		"NewTensor": second(gpu.NewTensor(tensor.Float32, 3)), "Synchronize": gpu.Synchronize(), "Record": second(gpu.Record(func() error { return nil })), "Replay": rec.Replay(),
		"Download": second(whole.Download()), "Download of shards": second(parts.Download()), "CopyFrom": whole.CopyFrom(x), "Clone": second(all.Clone()), "Rows": second(whole.Rows(1, 2)),
		"ToDevice": Cause(vm.RunAll()), "a node": computes(), "a layer": Cause(s.runLayer(0, in)), "NewCache": second(NewCache(groupConfig(gpu, 2))),
		"Attend": Attend(Args{Q: q, K: q, V: q, Out: out}),
	} {
		if !errors.Is(err, ErrNoAnswer) {
			t.Errorf("%s: %v", name, err)
		}
	}
	noError(t, s.step.Rollback())
	if err := s.step.Set([]Append{{Seq: a.seq, Tokens: 1}}); !errors.Is(err, ErrNoAnswer) || a.seq.Len() != 3 {
		t.Errorf("Set: %v, %d tokens", err, a.seq.Len())
	}
	if up.Value() != nil {
		t.Errorf("a value: %v", up.Value())
	}
	if log := lib.Log(); strings.Contains(log, "cuLaunchKernel") || strings.Contains(log, "cuMemcpy") || strings.Contains(log, "cuGraphLaunch") {
		t.Errorf("something was queued: %s", log)
	}
	_, err = rows.GPU().Memory()
	noError(t, err, whole.Free(), parts.Free(), all.Free(), rec.Close(), c.Close(), gpu.Close())
}
