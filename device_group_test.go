package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// What is particular to several GPUs.

func groupConfig(gpu *device.GPU, kvHeads int) CacheConfig {
	return CacheConfig{Layers: 2, KVHeads: kvHeads, HeadDim: 8, PageSize: 4, Pages: 12, DType: Float16, Device: gpu}
}

func TestOpenGPUs(t *testing.T) {
	gpu, lib := FakeGPUs(t, 3)
	if got := gpu.String(); got != "GPU 0 (Fake 0) with GPU 1 (Fake 1) with GPU 2 (Fake 2)" {
		t.Error(got)
	}
	if m := gpu.Members(); len(m) != 3 || m[2].Name != "Fake 2" || m[0].Name != "Fake 0" {
		t.Errorf("%+v", m)
	}
	lib.State().Totals[1] = 1 << 20
	sum, err := gpu.Memory()
	noError(t, err)
	if sum.Total != 2<<36+1<<20 {
		t.Errorf("%+v", sum)
	}
	if m, err := gpu.Memory(1); err != nil || m.Total != 1<<20 {
		t.Errorf("%+v, %v", m, err)
	}
	for _, i := range []int{-1, 3} {
		if _, err := gpu.Memory(i); !errors.Is(err, ErrShape) {
			t.Errorf("member %d: %v", i, err)
		}
	}
	for _, c := range []struct {
		ordinals []int
		want     error
		text     string
	}{
		{nil, ErrUnsupported, "no ordinals"},
		{[]int{1, 0, 1}, ErrUnsupported, "GPU 1 twice"},
		{[]int{0, 3}, ErrNoDevice, "no GPU 3, there are 3"},
	} {
		if _, err := device.Open(c.ordinals...); !errors.Is(err, c.want) || !strings.HasPrefix(err.Error(), "leanattention: device.Open: ") || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%v: %v", c.ordinals, err)
		}
	}
	lib.State().NoPeers = 1
	if _, err := device.Open(0, 1); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "GPU 0 (Fake 0) has no access to the memory of GPU 1 (Fake 1)") {
		t.Errorf("no way: %v", err)
	}
	one, err := device.Open(2)
	noError(t, err)
	if one.String() != "GPU 2 (Fake 2)" || len(one.Members()) != 1 {
		t.Errorf("%v, %v", one, one.Members())
	}
	noError(t, one.Close(), gpu.Close())
	if err := gpu.Close(); !errors.Is(err, ErrClosed) {
		t.Errorf("second Close: %v", err)
	}
}

// What can't be dealt out is refused, with what it is.
func TestShardRefused(t *testing.T) {
	gpu, _ := FakeGPUs(t, 3)
	for name, x := range map[string]struct {
		change func(*CacheConfig)
		want   error
		text   string
	}{
		"too few heads":       {func(c *CacheConfig) { c.Shard = ShardHeads }, ErrUnsupported, "ShardHeads, and 2 KV heads on GPU 0 (Fake 0) with GPU 1 (Fake 1)"},
		"heads, for a window": {func(c *CacheConfig) { c.Window = 9 }, ErrUnsupported, "2 KV heads and a Window of 9 keys on GPU 0 (Fake 0)"},
		"a window":            {func(c *CacheConfig) { c.Shard, c.Window = ShardContext, 9 }, ErrUnsupported, "ShardContext, and a Window of 9 keys"},
		"too few pages":       {func(c *CacheConfig) { c.Pages = 2 }, ErrUnsupported, "2 pages on GPU 0 (Fake 0) with GPU 1 (Fake 1) with GPU 2 (Fake 2), sharded by context"},
		"no such way":         {func(c *CacheConfig) { c.Shard = 3 }, ErrOption, "Shard is Shard(3)"},
		"none, on the host":   {func(c *CacheConfig) { c.Shard, c.Device = 7, nil }, ErrOption, "Shard is Shard(7)"},
	} {
		config := groupConfig(gpu, 2)
		x.change(&config)
		_, err := NewCache(config)
		wrong(t, name, err, x.want, "NewCache", x.text)
	}
	// With one GPU, or none, there is nothing to choose.
	one, err := device.Open(1)
	noError(t, err)
	defer one.Close()
	for _, at := range []*device.GPU{nil, one} {
		for shard := ShardAuto; shard <= ShardContext; shard++ {
			config := groupConfig(at, 1)
			config.Shard = shard
			c, err := NewCache(config)
			noError(t, err)
			if c.Config().Shard != shard {
				t.Errorf("%v", c.Config())
			}
			noError(t, c.Close())
		}
	}
	// Layers take what byContext lists.
	c := newTestCache(t, groupConfig(gpu, 2))
	step, err := c.NewStep(2)
	noError(t, err)
	in := input3Nodes(G.NewGraph(), tensor.Float32, 2, 4, c)
	for text, opt := range map[string]Option{
		"a window of 3 keys": WithWindow(3), "slopes of scores (ALiBi)": WithALiBi([]float64{1, 2, 3, 4}),
		"batch invariance": WithBatchInvariance(), "unfused": WithSchedule(Unfused),
	} {
		_, err := CachedAttention(in[0], in[1], in[2], step.Layer(0), WithCausal(), opt)
		wrong(t, text, err, ErrUnsupported, "CachedAttention", "GPU 2 (Fake 2): ", "a cache sharded by context: "+text)
	}
	noError(t, c.Close())
}

// A layer is one append and one run on each member, and begins and ends on the first.
func TestGroupLayerCalls(t *testing.T) {
	gpu, lib := FakeGPUs(t, 2)
	rng := reftest.Rand(t)
	config := groupConfig(gpu, 3)
	config.Shard = ShardHeads
	c := newTestCache(t, config)
	s := newStepGraph(t, c, 5, 6, tensor.Float32, WithCausal())
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	from := len(lib.Log())
	s.advance(t, rng, testAppend{a, 5})
	for i, m := range gpu.Internal().Members {
		if got := strings.Join(fakeOf(m).calls, " "); got != "build upload append run append run" {
			t.Errorf("member %d: %s", i, got)
		}
	}
	if n := count(lib.Log()[from:], "cuStreamWaitEvent"); n != 2*2 { // there and back, for each layer
		t.Errorf("%d waits", n)
	}
	if c.bytes != 2*12*3*4*(8+8)*2 || c.store.Where() != gpu.String() {
		t.Errorf("%v", c)
	}
	noError(t, c.Close())
}

// A saved sequence is the same bytes wherever it was, and is loaded anywhere.
func TestGroupSavedSequences(t *testing.T) {
	rng := reftest.Rand(t)
	var places []*device.GPU
	gpu, _ := FakeGPUs(t, 3)
	two, err := device.Open(2, 0)
	noError(t, err)
	defer two.Close()
	places = append(places, nil, gpu, two)
	var first []byte
	for i, at := range append(places, places...) {
		for _, size := range []int{1, 3, 4, 16} {
			config := groupConfig(at, 5)
			if i >= len(places) {
				config.Shard = ShardHeads
			}
			config.PageSize, config.Pages = size, 40/size+2
			c := newTestCache(t, config)
			var s *Sequence
			if first == nil {
				g := newStepGraph(t, c, 8, 5, tensor.Float32)
				a := &testContext{seq: newTestSequence(t, c)}
				g.advance(t, rng, testAppend{a, 8})
				g.advance(t, rng, testAppend{a, 5})
				g.close()
				s = a.seq
			} else if s, err = c.ReadSequence(bytes.NewReader(first)); err != nil {
				t.Fatal(err)
			}
			var b bytes.Buffer
			_, err := s.WriteTo(&b)
			noError(t, err)
			if first == nil {
				first = b.Bytes()
			}
			if !bytes.Equal(b.Bytes(), first) {
				t.Errorf("place %d, pages of %d: other bytes", i, size)
			}
			noError(t, c.Close())
		}
	}
}

// Tensors and caches of one GPU and of several that have it are in different places.
func TestGroupMixed(t *testing.T) {
	gpu, _ := FakeGPUs(t, 2)
	alone, err := device.Open(0)
	noError(t, err)
	defer alone.Close()
	c := newTestCache(t, groupConfig(gpu, 2))
	s := newStepGraph(t, c, 1, 2, tensor.Float32)
	defer s.close()
	noError(t, s.step.Set([]Append{{Seq: newTestSequence(t, c), Tokens: 1}}))
	in := s.draw(reftest.Rand(t), 0, newTestTokens(1, 2))
	var there [3]G.Value
	for i := range there {
		there[i], err = alone.Upload(in.tensors[i])
		noError(t, err)
	}
	_, err = s.nodes[0].Op().(*cachedOp).Do(there[0], there[1], there[2])
	if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "q is on GPU 0 (Fake 0) and the cache on GPU 0 (Fake 0) with GPU 1 (Fake 1)") {
		t.Errorf("operands of a GPU alone: %v", err)
	}
	there[1], err = gpu.Upload(in.tensors[1])
	noError(t, err)
	_, err = s.nodes[0].Op().(*cachedOp).Do(there[0], there[1], there[2])
	if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "q is on GPU 0 (Fake 0) and k on GPU 0 (Fake 0) with GPU 1 (Fake 1)") {
		t.Errorf("operands of both: %v", err)
	}
	noError(t, s.step.Rollback(), c.Close())
}

// attentionOfRows runs a graph whose q, k and v are the same rows of zeros on the GPU of a step.
func attentionOfRows(t *testing.T, step *Step, rows, width int, opts ...Option) (run func() error) {
	t.Helper()
	x, err := step.cache.config.Device.Upload(tensor.New(tensor.WithShape(rows, width), tensor.WithBacking(make([]float32, rows*width))))
	noError(t, err)
	g := G.NewGraph()
	n := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("x"), G.WithValue(x))
	_, err = CachedAttention(n, n, n, step.Layer(0), opts...)
	noError(t, err)
	vm := G.NewTapeMachine(g)
	t.Cleanup(func() { noError(t, vm.Close()) })
	return func() error { defer vm.Reset(); return vm.RunAll() }
}

// A recording is one graph of all members; a replay is a run.
func TestGroupRecorded(t *testing.T) {
	gpu, lib := FakeGPUs(t, 2)
	c, err := NewCache(CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, DType: Float16, PageSize: 4, Pages: 8, Device: gpu})
	noError(t, err)
	step, err := c.NewStep(1)
	noError(t, err)
	run := attentionOfRows(t, step, 1, 128)
	seq := newTestSequence(t, c)
	set := func() { t.Helper(); noError(t, step.Set([]Append{{Seq: seq, Tokens: 1}})) }
	set()
	noError(t, run(), step.Commit())
	set()
	rec, err := gpu.Record(run)
	noError(t, err)
	for i := range 10 {
		if i > 0 {
			set()
		}
		lib.Forget()
		noError(t, rec.Replay(), step.Commit())
		if n := count(lib.Log(), "cuGraphLaunch"); n != 1 {
			t.Errorf("%d graphs", n)
		}
	}
	// A schedule that looks different on the second GPU alone is another one.
	set()
	step.plans[0].plan.(*kvstore.DevicePlan).Plans()[1].(*fakePlan).generation++
	if err := rec.Replay(); !errors.Is(err, ErrState) {
		t.Errorf("another schedule: %v", err)
	}
	noError(t, rec.Close(), step.Rollback(), c.Close())
}

// A recording of a step whose sequences have one new token each is for such steps, where the cache is sharded by context.
func TestGroupRecordedContext(t *testing.T) {
	gpu, lib := FakeGPUs(t, 2)
	c, err := NewCache(CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, DType: Float16, PageSize: 4, Pages: 20, Device: gpu})
	noError(t, err)
	step, err := c.NewStep(3)
	noError(t, err)
	run := attentionOfRows(t, step, 3, 64, WithCausal())
	a, b := newTestSequence(t, c), newTestSequence(t, c)
	set := func(tokens int, tree []int) {
		t.Helper()
		noError(t, step.Set([]Append{{Seq: a, Tokens: tokens, Parents: tree}, {Seq: b, Tokens: 1}}))
	}
	turn := func(tokens int, tree []int, run func() error) {
		t.Helper()
		set(tokens, tree)
		noError(t, run(), step.Commit())
	}
	record := func(tokens int, tree []int) *device.Recording {
		t.Helper()
		turn(tokens, tree, run)
		set(tokens, tree)
		rec, err := gpu.Record(run)
		noError(t, err, rec.Replay(), step.Commit())
		return rec
	}
	forest := []int{-1, -1}
	one, two, trees := record(1, nil), record(2, nil), record(2, forest)
	for range 3 {
		lib.Forget()
		turn(1, nil, one.Replay)
		turn(1, nil, two.Replay)
		turn(1, nil, trees.Replay)
		turn(2, nil, two.Replay)
		turn(2, nil, trees.Replay)
		turn(2, forest, trees.Replay)
		if n := count(lib.Log(), "cuGraphLaunch"); n != 6 {
			t.Errorf("%d graphs", n)
		}
		set(2, nil)
		wrong(t, "several tokens", one.Replay(), ErrState, "Recording.Replay", "several new tokens")
		noError(t, step.Rollback())
		set(2, forest)
		wrong(t, "a tree", one.Replay(), ErrState, "a tree")
		wrong(t, "a tree", two.Replay(), ErrState, "a sequence has a tree, and none had one then")
		noError(t, step.Rollback())
	}
	noError(t, one.Close(), two.Close(), trees.Close(), c.Close())
}

// A sharded tensor holds what it was given, whatever its axis, and a part of it on each GPU.
func TestGroupSharded(t *testing.T) {
	gpu, lib := FakeGPUs(t, 3)
	rng := reftest.Rand(t)
	for range 60 {
		var shape []int
		for range 1 + rng.IntN(4) {
			shape = append(shape, 3+rng.IntN(6))
		}
		axis := rng.IntN(len(shape))
		numbers := func() *tensor.Dense {
			x := make([]float32, tensor.Shape(shape).TotalSize())
			for i := range x {
				x[i] = rng.Float32()
			}
			return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
		}
		x := numbers()
		d, err := gpu.UploadSharded(x, axis)
		noError(t, err)
		same := func(want *tensor.Dense) {
			t.Helper()
			got, err := d.Download()
			noError(t, err)
			if !slices.Equal(got.Data().([]float32), want.Data().([]float32)) || !slices.Equal(got.Shape(), want.Shape()) {
				t.Fatalf("shape %v, axis %d: something else has come down", shape, axis)
			}
		}
		same(x)
		for i, s := range d.Internal().Shards {
			if _, n := ongpu.Share(shape[axis], 3, i); s.GPU != gpu.Internal().Members[i] || s.Shape[axis] != n {
				t.Errorf("axis %d of %v: member %d has %v", axis, shape, i, s.Shape)
			}
		}
		y := numbers()
		noError(t, d.CopyFrom(y))
		same(y)
		noError(t, d.Free())
		if _, err := d.Download(); !errors.Is(err, ErrClosed) {
			t.Errorf("a freed one: %v", err)
		}
		if err := d.Free(); !errors.Is(err, ErrClosed) {
			t.Errorf("second Free: %v", err)
		}
	}
	x := tensor.New(tensor.WithShape(2, 6), tensor.WithBacking(make([]float32, 12)))
	for _, axis := range []int{-1, 0, 2} {
		if _, err := gpu.UploadSharded(x, axis); !errors.Is(err, ErrShape) {
			t.Errorf("axis %d: %v", axis, err)
		}
	}
	if _, err := gpu.UploadSharded(nil, 0); err == nil {
		t.Error("no tensor")
	}
	// More than one member has: nothing is left of it.
	used, err := gpu.Memory()
	noError(t, err)
	lib.State().FailOn(2, "cuMemAlloc_v2", 2)
	big := tensor.New(tensor.WithShape(3, 1<<20), tensor.Of(tensor.Float32))
	if _, err := gpu.UploadSharded(big, 0); !errors.Is(err, ErrOutOfMemory) {
		t.Errorf("the third GPU has no memory: %v", err)
	}
	lib.State().FailIn("", 0)
	noError(t, gpu.Internal().Members[0].Queue.Submit(collect), gpu.Internal().Members[1].Queue.Submit(collect))
	if now, err := gpu.Memory(); err != nil || now.Used > used.Used {
		t.Errorf("%+v before, %+v now: %v", used, now, err)
	}
}

func collect(sub *queue.Submission) error { sub.Collect(); return nil }

// Whatever needs a whole tensor says that one is sharded.
func TestGroupShardedRefused(t *testing.T) {
	gpu, _ := FakeGPUs(t, 2)
	x := tensor.New(tensor.WithShape(2, 4, 6, 8), tensor.Of(tensor.Float32))
	whole, err := gpu.Upload(x)
	noError(t, err)
	byHeads, err := gpu.UploadSharded(x, 1)
	noError(t, err)
	byKeys, err := gpu.UploadSharded(x, 2)
	noError(t, err)
	lse, err := gpu.NewTensor(tensor.Float32, 2, 4, 6)
	noError(t, err)
	out, err := gpu.NewTensor(tensor.Float32, 2, 4, 6, 8)
	noError(t, err)
	noError(t, Attend(Args{Q: whole, K: byHeads, V: byHeads, Out: out, LSE: lse}))
	to := func(d *device.Tensor) error { return whole.CopyFrom(d) }
	for name, err := range map[string]error{
		"q":            Attend(Args{Q: byHeads, K: byHeads, V: byHeads, Out: out}),
		"out":          Attend(Args{Q: whole, K: byHeads, V: byHeads, Out: byHeads}),
		"whole values": Attend(Args{Q: whole, K: byHeads, V: whole, Out: out}),
		"whole keys":   Attend(Args{Q: whole, K: whole, V: byHeads, Out: out}),
		"by keys":      Attend(Args{Q: whole, K: byKeys, V: byKeys, Out: out}),
		"Clone":        second(byHeads.Clone()),
		"Rows":         second(byHeads.Rows(0, 1)),
		"CopyFrom":     to(byHeads),
		"into it":      byHeads.CopyFrom(whole),
		"a part":       second(ongpu.Part("test", byHeads, 0, tensor.Shape{1})),
		"ZeroValue":    second(byKeys.ZeroValue().(*device.Tensor).Download()),
	} {
		if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "sharded") {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Of one GPU it is Upload.
	one, err := device.Open(1)
	noError(t, err)
	defer one.Close()
	d, err := one.UploadSharded(x, 1)
	noError(t, err)
	if _, err := d.Clone(); err != nil || d.Internal().Shards != nil {
		t.Errorf("on one GPU: %v", err)
	}
}

// spreadCalls is work on sharded inputs that writes down what is asked of it.
type spreadCalls struct {
	sizes   []int // of what it needs
	scratch []ongpu.Mem
	calls   []string
}

func (s *spreadCalls) Needs(member int, _ *layers.Engine) (int, error) { return s.sizes[member], nil }
func (s *spreadCalls) Take(scratch []ongpu.Mem)                        { s.scratch = scratch }
func (s *spreadCalls) Before(*ongpu.Work) error                        { return s.call("before") }
func (s *spreadCalls) After(*ongpu.Work) error                         { return s.call("after") }

func (s *spreadCalls) On(member int, w *ongpu.Work) error {
	s.call(fmt.Sprint("on ", member))
	mine := s.scratch[member]
	return w.Do(func(stream *cuda.Stream) error { return stream.Set(mine.Buffer, mine.Offset, 0, int64(mine.Len)*4) })
}

// A replicated tensor is whole on each GPU, whatever is done to it.
func TestGroupReplicated(t *testing.T) {
	gpu, lib := FakeGPUs(t, 3)
	rng := reftest.Rand(t)
	numbers := func() *tensor.Dense {
		x := make([]float32, 6*5)
		for i := range x {
			x[i] = rng.Float32()
		}
		return tensor.New(tensor.WithShape(6, 5), tensor.WithBacking(x))
	}
	same := func(d *device.Tensor, want []float32) {
		t.Helper()
		if len(d.Internal().Replicas) != 2 {
			t.Fatalf("%d replicas", len(d.Internal().Replicas))
		}
		for i := range 3 {
			of := d.Internal().On(i)
			if of.GPU != gpu.Internal().Members[i] {
				t.Errorf("member %d has what is on %v", i, of.GPU)
			}
			got := make([]float32, len(want))
			noError(t, gpu.Internal().Enter("test"))
			err := gpu.Internal().Queue.Submit(func(sub *queue.Submission) error {
				b, offset, err := of.UseAny(sub)
				if err != nil {
					return err
				}
				return sub.Do(func(s *cuda.Stream) error {
					return errors.Join(s.Synchronize(), b.Download(unsafe.Slice((*byte)(unsafe.Pointer(&got[0])), 4*len(got)), offset))
				})
			})
			gpu.Internal().Group.Leave()
			noError(t, err)
			if !slices.Equal(got, want) {
				t.Fatalf("member %d has %v, want %v", i, got, want)
			}
		}
	}
	floats := func(x *tensor.Dense) []float32 { return x.Data().([]float32) }
	x, y := numbers(), numbers()
	d, err := gpu.UploadReplicated(x)
	noError(t, err)
	same(d, floats(x))
	noError(t, d.CopyFrom(y))
	same(d, floats(y))
	rows, err := d.Rows(2, 4)
	noError(t, err)
	same(rows, floats(y)[10:20])
	clone, err := d.Clone()
	noError(t, err)
	c := clone.(*device.Tensor)
	same(c, floats(y))
	other, err := gpu.Upload(x)
	noError(t, err, c.CopyFrom(other))
	same(c, floats(x))
	same(d, floats(y))
	c.ZeroValue()
	same(c, make([]float32, 30))
	if got, err := d.Download(); err != nil || !slices.Equal(floats(got), floats(y)) {
		t.Errorf("%v, %v", got, err)
	}
	noError(t, d.Free(), c.Free())
	if err := d.Free(); !errors.Is(err, ErrClosed) {
		t.Errorf("second Free: %v", err)
	}
	if err := rows.CopyFrom(y); !errors.Is(err, ErrShape) && !errors.Is(err, ErrClosed) {
		t.Errorf("rows of a freed one: %v", err)
	}
	// More than one member has: nothing is left of it.
	used, err := gpu.Memory()
	noError(t, err)
	lib.State().FailOn(2, "cuMemAlloc_v2", 2)
	if _, err := gpu.UploadReplicated(tensor.New(tensor.WithShape(1<<20), tensor.Of(tensor.Float32))); !errors.Is(err, ErrOutOfMemory) {
		t.Errorf("the third GPU has no memory: %v", err)
	}
	lib.State().FailIn("", 0)
	noError(t, gpu.Internal().Members[0].Queue.Submit(collect), gpu.Internal().Members[1].Queue.Submit(collect))
	if now, err := gpu.Memory(); err != nil || now.Used > used.Used {
		t.Errorf("%+v before, %+v now: %v", used, now, err)
	}
	// Results are on the first GPU.
	q, err := gpu.Upload(tensor.New(tensor.WithShape(1, 3, 2, 64), tensor.Of(tensor.Float32)))
	noError(t, err)
	k, err := gpu.Upload(tensor.New(tensor.WithShape(1, 3, 4, 64), tensor.Of(Float16)))
	noError(t, err)
	out, err := gpu.UploadReplicated(tensor.New(tensor.WithShape(1, 3, 2, 64), tensor.Of(tensor.Float32)))
	noError(t, err)
	wrong(t, "out", Attend(Args{Q: q, K: k, V: k, Out: out}), ErrUnsupported, "Attend", "out is replicated over GPU 0 (Fake 0)")
	lse, err := gpu.UploadReplicated(tensor.New(tensor.WithShape(1, 3, 2), tensor.Of(tensor.Float32)))
	noError(t, err)
	s := State{Out: q, LSE: lse}
	wrong(t, "a merged state", Merge(State{Out: out, LSE: lse}, s), ErrUnsupported, "Merge", "dst.Out is replicated over GPU 0 (Fake 0)")
	one, err := device.Open(1)
	noError(t, err)
	defer one.Close()
	if d, err := one.UploadReplicated(x); err != nil || d.Internal().Replicas != nil {
		t.Errorf("%v, %v", d, err)
	}
}

func (s *spreadCalls) call(name string) error { s.calls = append(s.calls, name); return nil }

// Work on sharded inputs has memory on all GPUs before any of it is queued, begins and ends on the first one, and
// leaves nothing behind where a call of the driver fails.
func TestGroupSpread(t *testing.T) {
	real := ongpu.NewDecoder
	ongpu.NewDecoder = func(*cuda.Device) (*layers.Engine, error) { return new(layers.Engine), nil }
	defer func() { ongpu.NewDecoder = real }()
	x := tensor.New(tensor.WithShape(5, 64), tensor.Of(tensor.Float32))
	compute := func(gpu *device.GPU, reads int) (*spreadCalls, error) {
		w, err := gpu.UploadSharded(x, 0)
		if err != nil {
			return nil, err
		}
		defer w.Free()
		calls := &spreadCalls{sizes: []int{300, 5000}}
		_, err = ongpu.Compute(&ongpu.Call{
			Op: "test", Node: &ongpu.Node{Reads: reads}, Names: []string{"w"}, In: []G.Value{w}, DType: tensor.Float32, Shape: tensor.Shape{100},
			Spread: func(in []ongpu.Operand, out ongpu.Mem) (ongpu.Spread, error) {
				if s := in[0].Shards; len(s) != 2 || in[0].Axis != 0 || s[1].First != 2 || s[1].N != 3 || s[1].Len != 3*64 || out.Len != 100 {
					t.Errorf("%+v, out %+v", in, out)
				}
				return calls, nil
			},
		})
		return calls, err
	}
	for _, reads := range []int{0, 2} {
		gpu, _ := FakeGPUs(t, 2)
		calls, err := compute(gpu, reads)
		noError(t, err)
		if got := strings.Join(calls.calls, ", "); got != "before, on 1, on 0, after" {
			t.Error(got)
		}
		noError(t, gpu.Internal().Members[0].Queue.Submit(collect), gpu.Internal().Members[1].Queue.Submit(collect))
		before, err := gpu.Memory()
		noError(t, err)
		big := &spreadCalls{sizes: []int{300, min(1<<40, math.MaxInt)}} // more than the second has
		w, err := gpu.UploadSharded(x, 0)
		noError(t, err)
		_, err = ongpu.Compute(&ongpu.Call{
			Op: "test", Node: &ongpu.Node{Reads: reads}, Names: []string{"w"}, In: []G.Value{w}, DType: tensor.Float32, Shape: tensor.Shape{100},
			Spread: func([]ongpu.Operand, ongpu.Mem) (ongpu.Spread, error) { return big, nil },
		})
		if !errors.Is(err, ErrOutOfMemory) || len(big.calls) > 0 {
			t.Errorf("%v, after %v", err, big.calls)
		}
		noError(t, w.Free(), gpu.Internal().Members[0].Queue.Submit(collect), gpu.Internal().Members[1].Queue.Submit(collect))
		if after, err := gpu.Memory(); err != nil || after.Used > before.Used {
			t.Errorf("%d bytes used, %d before: %v", after.Used, before.Used, err)
		}
		// Whoever has no word for sharded inputs refuses them.
		w, err = gpu.UploadSharded(x, 0)
		noError(t, err)
		_, err = ongpu.Compute(&ongpu.Call{Op: "test", Node: new(ongpu.Node), Names: []string{"w"}, In: []G.Value{w}, DType: tensor.Float32, Shape: tensor.Shape{100}})
		if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "w is sharded on axis 0") {
			t.Error(err)
		}
		noError(t, gpu.Close())
	}
	groupFaultsOf(t, 20, func(gpu *device.GPU, _ *fakedriver.Library) error {
		_, err := compute(gpu, 0)
		if _, again := compute(gpu, 0); again != nil && err != nil {
			t.Fatalf("it failed twice: %v, %v", err, again)
		} else if err == nil {
			err = again
		}
		return err
	})
}
