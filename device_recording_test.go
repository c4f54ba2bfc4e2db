package leanattention

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// recorded is a decoding graph on a GPU: one layer of attention on a cache, and
// what the machine is told of it.
type recorded struct {
	gpu   *device.GPU
	lib   *fakedriver.Library
	cache *Cache
	seq   *Sequence
	step  *Step
	q     *device.Tensor
	vm    G.VM
}

func newRecorded(t *testing.T) *recorded {
	t.Helper()
	r := &recorded{}
	r.gpu, r.lib = FakeGPU(t)
	var err error
	r.cache, err = NewCache(CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, DType: Float16, PageSize: 4, Pages: 8, Device: r.gpu})
	noError(t, err)
	r.seq, err = r.cache.NewSequence()
	noError(t, err)
	r.step, err = r.cache.NewStep(1)
	noError(t, err)
	r.q, err = r.gpu.Upload(tensor.New(tensor.WithShape(1, 64), tensor.WithBacking(make([]float32, 64))))
	noError(t, err)
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(1, 64), G.WithName("x"), G.WithValue(r.q))
	_, err = CachedAttention(x, x, x, r.step.Layer(0))
	noError(t, err)
	r.vm = G.NewTapeMachine(g)
	t.Cleanup(func() { r.vm.Close() })
	r.set(t)
	noError(t, r.run())
	noError(t, r.step.Commit())
	return r
}

func (r *recorded) set(t *testing.T) {
	t.Helper()
	noError(t, r.step.Set([]Append{{Seq: r.seq, Tokens: 1}}))
}

func (r *recorded) run() error {
	defer r.vm.Reset()
	return r.vm.RunAll()
}

func (r *recorded) record(t *testing.T) *device.Recording {
	t.Helper()
	r.set(t)
	rec, err := r.gpu.Record(r.run)
	noError(t, err)
	return rec
}

// A replay is a run of the graph: its step can be committed, and nothing else.
func TestRecording(t *testing.T) {
	r := newRecorded(t)
	rec := r.record(t)
	launches := strings.Count(r.lib.Log(), "cuGraphLaunch")
	for i := range 20 {
		if i > 0 {
			r.set(t)
		}
		noError(t, rec.Replay())
		noError(t, r.step.Commit())
		if n := r.seq.Len(); n != i+2 {
			t.Fatalf("%d tokens after replay %d", n, i)
		}
	}
	if n := strings.Count(r.lib.Log(), "cuGraphLaunch") - launches; n != 20 {
		t.Errorf("%d launches of 20", n)
	}
	if n := r.step.layers; n < 21 {
		t.Errorf("%d runs of layers", n)
	}
	if err := rec.Replay(); !errors.Is(err, ErrState) {
		t.Errorf("without Set: %v", err)
	}
	r.set(t)
	noError(t, rec.Replay())
	noError(t, rec.Replay())
	noError(t, r.step.Rollback())
	if n := r.seq.Len(); n != 21 {
		t.Errorf("%d tokens after Rollback", n)
	}

	// A launch that fails is no run.
	r.set(t)
	r.lib.State().FailIn("cuGraphLaunch", 1)
	if err := rec.Replay(); err == nil {
		t.Error("a launch that fails")
	}
	r.lib.State().FailIn("", 0)
	if err := r.step.Commit(); !errors.Is(err, ErrState) {
		t.Errorf("Commit after a replay that failed: %v", err)
	}
	noError(t, rec.Replay())
	noError(t, r.step.Commit())
	noError(t, rec.Close())
	noError(t, rec.Close())
	if err := rec.Replay(); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// The small copies between two replays are made by one kernel: the schedule and the
// positions that come from the host, and the tokens that were chosen, which are the next
// step's and are kept.
func TestRecordingCopies(t *testing.T) {
	r := newRecorded(t)
	rec := r.record(t)
	ids := func(n int) *device.Tensor {
		t.Helper()
		d, err := r.gpu.NewTensor(tensor.Int32, n)
		noError(t, err)
		return d
	}
	const steps = 6
	chosen, tokens, positions, history := ids(1), ids(1), ids(1), ids(steps)
	put := func(d *device.Tensor, x int32) {
		t.Helper()
		noError(t, d.CopyFrom(tensor.New(tensor.WithShape(1), tensor.WithBacking([]int32{x}))))
	}
	for i := range steps {
		if i > 0 {
			r.set(t)
		}
		put(chosen, int32(100+i)) // no copy in a model
		noError(t, r.gpu.Synchronize())
		r.lib.Forget()
		noError(t, tokens.CopyFrom(chosen))
		put(positions, int32(i))
		noError(t, rec.Replay(), r.step.Commit())
		row, err := history.Rows(i, i+1)
		noError(t, err, row.CopyFrom(chosen))
		log := r.lib.Log()
		if n := strings.Count(log, "cuGraphExecKernelNodeSetParams\n"); n != 1 || strings.Contains(log, "cuMemcpy") {
			t.Errorf("step %d: %d times copies of a replay, %d copies beside", i, n, strings.Count(log, "cuMemcpy"))
		}
	}
	for d, want := range map[*device.Tensor][]int32{tokens: {105}, positions: {5}, history: {100, 101, 102, 103, 104, 105}} {
		got, err := d.Download()
		noError(t, err)
		if !slices.Equal(got.Data().([]int32), want) {
			t.Errorf("%v, want %v", got.Data(), want)
		}
	}
	// A copy that fails is the next replay's failure, and is made with the one after it.
	r.set(t)
	put(positions, 9)
	r.lib.State().FailIn("cuGraphExecKernelNodeSetParams", 1)
	noError(t, tokens.CopyFrom(chosen))
	if err := rec.Replay(); err == nil || !strings.HasPrefix(err.Error(), "leanattention: Recording.Replay: copies that were put off: ") {
		t.Errorf("a replay whose copies fail: %v", err)
	}
	r.lib.State().FailIn("", 0)
	noError(t, rec.Replay(), r.step.Commit())
	got, err := positions.Download()
	noError(t, err)
	if got.Data().([]int32)[0] != 9 {
		t.Errorf("position %v, want 9", got.Data())
	}
	noError(t, rec.Close())
}

// What has changed under a recording is found out before anything is queued.
func TestRecordingStale(t *testing.T) {
	for name, c := range map[string]struct {
		change func(t *testing.T, r *recorded)
		want   error
	}{
		"other memory of the schedule": {func(t *testing.T, r *recorded) {
			r.step.plans[0].plan.(*kvstore.DevicePlan).Plans()[0].(*fakePlan).generation++
		}, ErrState},
		"a freed input":  {func(t *testing.T, r *recorded) { noError(t, r.q.Free()) }, ErrClosed},
		"a closed cache": {func(t *testing.T, r *recorded) { noError(t, r.cache.Close()) }, ErrClosed},
		"a closed GPU":   {func(t *testing.T, r *recorded) { noError(t, r.gpu.Close()) }, ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRecorded(t)
			rec := r.record(t)
			c.change(t, r)
			before := strings.Count(r.lib.Log(), "cuGraphLaunch")
			if err := rec.Replay(); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if strings.Count(r.lib.Log(), "cuGraphLaunch") != before {
				t.Error("it was queued nevertheless")
			}
			if err := rec.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// What can't be recorded is an error, and the GPU goes on afterwards.
func TestRecordRefuses(t *testing.T) {
	r := newRecorded(t)
	host := tensor.New(tensor.WithShape(1, 64), tensor.WithBacking(make([]float32, 64)))
	failed := errors.New("not today")
	for name, c := range map[string]struct {
		run  func() error
		want error
	}{
		"an upload":             {func() error { return second(r.gpu.Upload(host)) }, ErrUnsupported},
		"a download":            {func() error { return second(r.q.Download()) }, ErrUnsupported},
		"a new value":           {func() error { return r.q.CopyFrom(host) }, ErrUnsupported},
		"another recording":     {func() error { return second(r.gpu.Record(r.run)) }, ErrState},
		"a run that fails":      {func() error { return failed }, failed},
		"a step that's not set": {r.run, ErrState},
	} {
		rec, err := r.gpu.Record(c.run)
		if rec != nil || !errors.Is(Cause(err), c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		noError(t, r.q.CopyFrom(host))
		if _, err := r.q.Download(); err != nil {
			t.Errorf("after %s: %v", name, err)
		}
	}
	if _, err := r.gpu.Record(nil); !errors.Is(err, ErrState) {
		t.Errorf("nil: %v", err)
	}
	if err := (*device.Recording)(nil).Replay(); !errors.Is(err, ErrState) {
		t.Errorf("nil recording: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }
