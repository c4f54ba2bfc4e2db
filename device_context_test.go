package leanattention

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A layer of a cache that is sharded by context is one append and one run on each member, and one merging on the first.
// Where sequences have several new tokens, there is one more of each on the first.
func TestContextLayerCalls(t *testing.T) {
	gpu, lib := FakeGPUs(t, 3)
	rng := reftest.Rand(t)
	c := newTestCache(t, groupConfig(gpu, 2))
	s := newStepGraph(t, c, 5, 6, tensor.Float32, WithCausal())
	defer s.close()
	a := &testContext{seq: newTestSequence(t, c)}
	for _, x := range []struct {
		tokens        int
		first, others string
	}{
		{5, "build build upload upload append run append run merge append run append run merge", "build upload append run append run"},
		{1, "build upload append run merge append run merge", "build upload append run append run"},
	} {
		from := len(lib.Log())
		for _, m := range gpu.Internal().Members {
			fakeOf(m).calls = nil
		}
		s.advance(t, rng, testAppend{a, x.tokens})
		for i, m := range gpu.Internal().Members {
			want := x.others
			if i == 0 {
				want = x.first
			}
			if got := strings.Join(fakeOf(m).calls, " "); got != want {
				t.Errorf("%d tokens, member %d: %s", x.tokens, i, got)
			}
		}
		if n := count(lib.Log()[from:], "cuStreamWaitEvent"); n != 2*2*2 { // there and back, of two members, for each layer
			t.Errorf("%d tokens: %d waits", x.tokens, n)
		}
	}
	if c.bytes != 2*12*2*4*(8+8)*2 || c.store.Where() != gpu.String() {
		t.Errorf("%v", c)
	}
	noError(t, c.Close())
}

// Where all members have what layers need, each appends, runs and merges in a layer, and where they have parts of it, it gathers
// before. They fork and join once a step. Where the first one alone has a sink, all is as above.
func TestContextPerGPUCalls(t *testing.T) {
	gpu, lib := FakeGPUs(t, 3)
	c := newTestCache(t, groupConfig(gpu, 2))
	step, err := c.NewStep(4)
	noError(t, err)
	seq := newTestSequence(t, c)
	const q, kv = 6 * 8, 2 * 8
	matrix := func(width int) *tensor.Dense {
		if width == 0 { // sinks
			return tensor.New(tensor.WithShape(6), tensor.Of(tensor.Float32))
		}
		return tensor.New(tensor.WithShape(4, width), tensor.Of(tensor.Float32))
	}
	everywhere := func(width int) (*device.Tensor, error) { return gpu.UploadReplicated(matrix(width)) }
	parts := func(width int) (*device.Tensor, error) { return gpu.UploadSharded(matrix(width), 1) }
	onFirst := func(width int) (*device.Tensor, error) { return gpu.Upload(matrix(width)) }
	const one, several, twice = "append run merge", "append run append run merge", "append run"
	for _, x := range []struct {
		what          string
		q, k, sinks   func(width int) (*device.Tensor, error)
		tokens, waits int
		first, others string // of both layers
	}{
		{"all on all", everywhere, everywhere, nil, 3, 2, several + " " + several, several + " " + several},
		{"one token", everywhere, everywhere, nil, 1, 2, one + " " + one, one + " " + one},
		{"sinks on all", everywhere, everywhere, everywhere, 1, 2, one + " " + one, one + " " + one},
		{"parts", parts, parts, nil, 1, 2, "gather " + one + " gather " + one, "gather " + one + " gather " + one},
		{"parts of q", parts, everywhere, nil, 3, 2, "gather " + several + " gather " + several, "gather " + several + " gather " + several},
		{"sinks on the first", everywhere, everywhere, onFirst, 3, 8, several + " " + several, twice + " " + twice},
		{"q on the first", onFirst, everywhere, nil, 3, 8, several + " " + several, twice + " " + twice},
		{"k on the first", everywhere, onFirst, nil, 1, 8, one + " " + one, twice + " " + twice},
	} {
		g := G.NewGraph()
		node := func(name string, upload func(int) (*device.Tensor, error), width int) *G.Node {
			v, err := upload(width)
			noError(t, err)
			return G.NewMatrix(g, tensor.Float32, G.WithShape(4, width), G.WithName(name), G.WithValue(v))
		}
		var opts []Option
		if x.sinks != nil {
			v, err := x.sinks(0)
			noError(t, err)
			opts = append(opts, WithSinks(G.NewVector(g, tensor.Float32, G.WithShape(6), G.WithName("sinks"), G.WithValue(v))))
		}
		at := node("q", x.q, q)
		for l := range 2 {
			at, err = CachedAttention(at, node(fmt.Sprint("k", l), x.k, kv), node(fmt.Sprint("v", l), x.k, kv), step.Layer(l), opts...)
			noError(t, err)
		}
		vm := G.NewTapeMachine(g)
		for again := range 2 {
			noError(t, step.Set([]Append{{Seq: seq, Tokens: x.tokens}}))
			for _, m := range gpu.Internal().Members {
				fakeOf(m).calls = nil
			}
			lib.Forget()
			noError(t, Cause(vm.RunAll()), gpu.Synchronize())
			vm.Reset()
			for i, m := range gpu.Internal().Members {
				want := x.others
				if i == 0 {
					want = x.first
				}
				calls := strings.Join(fakeOf(m).calls, " ")
				// What is planned is another matter.
				calls = strings.NewReplacer("build ", "", "upload ", "").Replace(calls)
				if calls != want {
					t.Errorf("%s, member %d: %s, want %s", x.what, i, calls, want)
				}
			}
			if n := count(lib.Log(), "cuStreamWaitEvent"); again > 0 && n != x.waits {
				t.Errorf("%s: %d waits", x.what, n)
			}
			noError(t, step.Rollback())
		}
		noError(t, vm.Close())
	}
	noError(t, c.Close())
}

// Parts of rows are no parts that members gather: a layer refuses them, and the step can be taken back.
func TestContextPartsOfRows(t *testing.T) {
	gpu, _ := FakeGPUs(t, 3)
	c := newTestCache(t, groupConfig(gpu, 2))
	step, err := c.NewStep(4)
	noError(t, err)
	seq := newTestSequence(t, c)
	matrix := func(width int) *tensor.Dense {
		return tensor.New(tensor.WithShape(4, width), tensor.Of(tensor.Float32))
	}
	for bad, name := range []string{"q", "k", "v"} {
		g := G.NewGraph()
		var in [3]*G.Node
		for i, width := range []int{6 * 8, 2 * 8, 2 * 8} {
			axis := 1
			if i == bad {
				axis = 0
			}
			v, err := gpu.UploadSharded(matrix(width), axis)
			noError(t, err)
			in[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(4, width), G.WithName(kvstore.LayerNames[i]), G.WithValue(v))
		}
		_, err := CachedAttention(in[0], in[1], in[2], step.Layer(0))
		noError(t, err)
		noError(t, step.Set([]Append{{Seq: seq, Tokens: 3}}))
		vm := G.NewTapeMachine(g)
		wrong(t, name+" by rows", Cause(vm.RunAll()), ErrUnsupported, "sharded")
		noError(t, vm.Close(), step.Rollback())
	}
	noError(t, c.Close())
}

// A page takes memory of one member alone.
func TestContextMemory(t *testing.T) {
	gpu, _ := FakeGPUs(t, 3)
	before := make([]int64, 3)
	for i := range before {
		m, err := gpu.Memory(i)
		noError(t, err)
		before[i] = m.Used
	}
	config := groupConfig(gpu, 1)
	config.Pages = 11
	c, err := NewCache(config)
	noError(t, err)
	for i, pages := range []int64{4, 4, 3} {
		m, err := gpu.Memory(i)
		noError(t, err)
		if got, want := m.Used-before[i], pages*2*4*(8+8)*2; got != want {
			t.Errorf("member %d has %d bytes, want %d", i, got, want)
		}
	}
	noError(t, c.Close())
}

// Sequences of any lengths, around the edges of pages and of rounds of pages, in chunks and token by token, forked and cut:
// the outputs are those of float64, and their bits the same if a layer runs again.
func testContexts(t *testing.T, at modelPlace, rounds int) {
	rng, n := reftest.Rand(t), at.members()
	for round := range rounds {
		config := at.config(CacheConfig{
			Layers: 1, KVHeads: 1 + rng.IntN(2*n), HeadDim: 4, ValueDim: 8, PageSize: []int{1, 3, 4, 16}[rng.IntN(4)],
			DType: []tensor.Dtype{tensor.Float32, Float16, BFloat16}[round%3], Shard: ShardContext,
		})
		if config.KVHeads%n > 0 && rng.IntN(2) == 0 {
			config.Shard = ShardAuto
		}
		around := n * config.PageSize
		config.Pages = 40*n + rng.IntN(n) // of 6 sequences, none of which has more than 5 rounds
		c := newTestCache(t, config)
		heads := config.KVHeads * (1 + rng.IntN(3))
		var opts []Option
		if rng.IntN(3) > 0 {
			opts = append(opts, WithCausal())
		}
		prompts, decode := newStepGraph(t, c, 30, heads, tensor.Float32, opts...), newStepGraph(t, c, 7, heads, tensor.Float32, opts...)
		for _, s := range []*stepGraph{prompts, decode} {
			s.there, s.apart, s.columns = rng.IntN(3) > 0, rng.IntN(3) > 0, rng.IntN(2) == 0
		}
		prompts.cores, decode.cores = at.real, at.real
		var all []*testContext
		for range 5 {
			a := &testContext{seq: newTestSequence(t, c)}
			to := rng.IntN(3)*around + rng.IntN(n+1)*config.PageSize + rng.IntN(3) - 1
			for left := min(max(to, 0), 50); left > 0; {
				m := min(left, 1+rng.IntN(30))
				prompts.advance(t, rng, testAppend{a, m})
				left -= m
			}
			all = append(all, a)
		}
		for turn := range 4 {
			s := decode
			var appends []testAppend
			for i, a := range all {
				if rng.IntN(4) > 0 {
					appends = append(appends, testAppend{a, 1})
				}
				if turn == 2 && i == 1 && len(appends) > 0 {
					s, appends[0].n = prompts, 4
				}
			}
			if len(appends) == 0 {
				continue
			}
			noError(t, set(s, appends...))
			var tokens []*testToken
			for _, a := range appends {
				tokens = append(tokens, newTestTokens(a.n, 1)...)
			}
			in := s.draw(rng, 0, tokens)
			var parts []stepPart
			left := tokens
			for _, a := range appends {
				parts, left = append(parts, stepPart{context: append(slices.Clone(a.tokens), left[:a.n]...), n: a.n}), left[a.n:]
			}
			var first string
			for range 2 {
				noError(t, s.runLayer(0, in), s.checkLayer(0, in.q, parts))
				if bits := fmt.Sprint(s.out[0].Data(), s.lse[0].Data()); first == "" {
					first = bits
				} else if bits != first {
					t.Fatalf("round %d, turn %d: other bits", round, turn)
				}
			}
			noError(t, s.step.Commit())
			for i, a := range appends {
				a.tokens = parts[i].context
				noError(t, a.seq.checkTokens(a.tokens))
			}
			if turn == 1 {
				all[4].truncate(t, len(all[4].tokens)/2)
				all = append(all, all[rng.IntN(5)].fork(t))
			}
		}
		prompts.close()
		decode.close()
		noError(t, c.Close())
	}
}

func TestDevicesContexts(t *testing.T) {
	for n := 2; n <= 4; n++ {
		gpu, _ := FakeGPUs(t, n)
		testContexts(t, modelPlace{gpu: gpu}, reftest.Cases(t, 3, 60))
		noError(t, gpu.Close())
	}
}

func TestGPUsContexts(t *testing.T) {
	for n := 2; n <= 4; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) { testContexts(t, gpusPlace(t, indexes(n)...), reftest.Cases(t, 1, 30)) })
	}
}

// contextChain is a graph of attention layers on a cache, each of which has the output of the one before as its query, and values of
// their inputs.
type contextChain struct {
	step *Step
	in   []*G.Node // q, and k and v of each layer
	out  *G.Node
	vm   G.VM
}

func newContextChain(t *testing.T, c *Cache, rows, heads int, opts ...Option) *contextChain {
	t.Helper()
	cfg := c.Config()
	step, err := c.NewStep(rows)
	noError(t, err)
	g, s := G.NewGraph(), &contextChain{step: step}
	input := func(width int) *G.Node {
		n := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName(fmt.Sprint("x", len(s.in))))
		s.in = append(s.in, n)
		return n
	}
	s.out = input(heads * cfg.HeadDim)
	for l := range cfg.Layers {
		s.out, err = CachedAttention(s.out, input(cfg.KVHeads*cfg.HeadDim), input(cfg.KVHeads*cfg.HeadDim), step.Layer(l), opts...)
		noError(t, err)
	}
	s.vm = G.NewTapeMachine(g)
	t.Cleanup(func() { noError(t, s.vm.Close()) })
	return s
}

func (s *contextChain) run() error { defer s.vm.Reset(); return Cause(s.vm.RunAll()) }

// onMember is what a member has of a value that all have.
func onMember(t *testing.T, v G.Value, member int) []float32 {
	t.Helper()
	of := ongpu.Must(v).On(member)
	got := make([]float32, of.Size())
	g := ongpu.Must(v).GPU
	noError(t, g.Enter("test"))
	defer g.Group.Leave()
	noError(t, g.Queue.Submit(func(sub *queue.Submission) error {
		b, offset, err := of.UseAny(sub)
		if err != nil {
			return err
		}
		return sub.Do(func(s *cuda.Stream) error {
			return errors.Join(s.Synchronize(), b.Download(unsafe.Slice((*byte)(unsafe.Pointer(&got[0])), 4*len(got)), offset))
		})
	}))
	return got
}

// Layers one behind the other, of a cache sharded by context, whose queries, keys and values all members have, or have parts of that
// they gather: the results are those of a cache in host memory, of the same bits on all members, in every run, and again in
// recordings. Members fork and join once a step.
func testContextsPerGPU(t *testing.T, at modelPlace, rounds int, waits func() int) { // waits: since it was called last; nil: they are not counted
	rng, n := reftest.Rand(t), at.members()
	seen := map[string]bool{}
	for range reftest.AtLeast(rounds, func() bool { return len(seen) == 3 }) {
		kvHeads, dim := []int{1, max(n/2, 1), n}[rng.IntN(3)], 64
		config := at.config(CacheConfig{Layers: 3, KVHeads: kvHeads, HeadDim: dim, PageSize: 4, Pages: 12 * n, DType: Float16})
		config.HeadDim, config.ValueDim = dim, dim
		if kvHeads%n == 0 {
			config.Shard = ShardContext
		}
		heads := kvHeads * (1 + rng.IntN(3))
		split := rng.IntN(2) == 0 // each member has the queries of its heads
		if split {
			heads = kvHeads * n
		}
		host := config
		host.Device, host.Shard = nil, ShardAuto
		var caches [2]*Cache
		var seqs [2][2]*Sequence
		for i, c := range []CacheConfig{host, config} {
			caches[i] = newTestCache(t, c)
			for j := range seqs[i] {
				seqs[i][j] = newTestSequence(t, caches[i])
			}
		}
		for _, rows := range []int{7, 2} {
			parts := (rows == 2 || rng.IntN(2) == 0) && kvHeads*dim%(4*n) == 0
			seen[fmt.Sprint("parts ", parts)] = true
			what := fmt.Sprintf("%d GPUs, %d/%d heads, %d rows, parts %v", n, heads, kvHeads, rows, parts)
			var chains [2]*contextChain
			for i, c := range caches {
				chains[i] = newContextChain(t, c, rows, heads, WithCausal())
			}
			var there []*device.Tensor
			let := func() {
				t.Helper()
				for i, in := range chains[0].in {
					x := make([]float32, in.Shape().TotalSize())
					for j := range x {
						x[j] = rng.Float32()*2 - 1
					}
					value := tensor.New(tensor.WithShape(in.Shape()...), tensor.WithBacking(x))
					noError(t, G.Let(in, value))
					if len(there) <= i {
						upload := at.gpu.UploadReplicated
						if parts && (i > 0 || split) {
							upload = func(x tensor.Tensor) (*device.Tensor, error) { return at.gpu.UploadSharded(x, 1) }
						}
						d, err := upload(value)
						noError(t, err, G.Let(chains[1].in[i], d))
						there = append(there, d)
						continue
					}
					noError(t, there[i].CopyFrom(value))
				}
			}
			var recording *device.Recording
			for turn := range 4 {
				let()
				for i := range chains {
					appends := []Append{{Seq: seqs[i][0], Tokens: rows - 1}, {Seq: seqs[i][1], Tokens: 1}}
					if rows == 7 {
						appends[0].Tokens = 1 + min(turn, 2)
					}
					noError(t, chains[i].step.Set(appends))
				}
				noError(t, chains[0].run())
				if waits != nil {
					waits()
				}
				switch {
				case turn < 2 || !at.real: // fake engines compute when they are told to, and not in replays
					noError(t, chains[1].run())
				case turn == 2:
					var err error
					recording, err = at.gpu.Record(chains[1].run)
					noError(t, err)
					fallthrough
				default:
					noError(t, recording.Replay())
				}
				// Each member has its heads alone, unless two groups of members share the heads.
				scattered := parts && split && (config.Shard == ShardContext || kvHeads == 1)
				result := func() (y []float32) {
					t.Helper()
					v := chains[1].out.Value()
					if !scattered {
						return onMember(t, v, 0)
					}
					seen["scattered"] = true
					for row := range rows {
						for m := range n {
							part := onMember(t, v, m)
							each := len(part) / rows
							y = append(y, part[row*each:][:each]...)
						}
					}
					return y
				}
				y, first := chains[1].out.Value(), result()
				if waits != nil {
					if w := waits(); w != 2*(n-1) { // one fork, one join
						t.Errorf("%s: %d waits", what, w)
					}
				}
				for m := 1; m < n && !scattered; m++ {
					if !slices.Equal(first, onMember(t, y, m)) {
						t.Fatalf("%s, turn %d: members 0 and %d have other bits", what, turn, m)
					}
				}
				want := chains[0].out.Value().Data().([]float32)
				for i, x := range first {
					if !(math.Abs(float64(x-want[i])) <= 2e-3) {
						t.Fatalf("%s, turn %d: element %d of %d is %v, want %v", what, turn, i, len(first), x, want[i])
					}
				}
				if turn < 2 { // the same again
					noError(t, chains[1].run())
					if again := result(); !slices.Equal(first, again) {
						t.Fatalf("%s, turn %d: other bits", what, turn)
					}
				}
				for i := range chains {
					noError(t, chains[i].step.Commit())
				}
			}
			noError(t, recording.Close()) // nil is none
			for _, d := range there {
				noError(t, d.Free())
			}
		}
		noError(t, caches[0].Close(), caches[1].Close())
	}
}

func TestDevicesContextsPerGPU(t *testing.T) {
	for n := 2; n <= 4; n++ {
		gpu, lib := FakeGPUs(t, n)
		testContextsPerGPU(t, modelPlace{gpu: gpu}, 3, func() int { defer lib.Forget(); return count(lib.Log(), "cuStreamWaitEvent") })
		noError(t, gpu.Close())
	}
}

func TestGPUsContextsPerGPU(t *testing.T) {
	for n := 2; n <= 4; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			testContextsPerGPU(t, gpusPlace(t, indexes(n)...), reftest.Cases(t, 1, 4), nil)
		})
	}
}

// losingExchange is one that a member can't be told of, or does not come to.
type losingExchange struct {
	kvstore.Exchanging
	lost   int
	silent bool
}

func (x *losingExchange) MergeParts(s *cuda.Stream, o *layers.PartStates, member int) error {
	switch {
	case member != x.lost:
		return x.Exchanging.MergeParts(s, o, member)
	case x.silent:
		return nil
	}
	return errFault
}

// A member that can't be given its part in the middle of a layer: the run fails, the cache is as before, and the next run is right. One
// that is lost: nobody waits for ever, and what comes later says who did not answer.
func TestGPUsContextLost(t *testing.T) {
	gpu := gpusPlace(t, 0, 1, 2).gpu
	real := kvstore.OpenExchange
	defer func() { kvstore.OpenExchange = real }()
	noError(t, gpu.Internal().Enter("test"))
	var engines []*layers.Engine
	for _, m := range gpu.Internal().Members {
		e, err := m.Layers("test")
		noError(t, err)
		engines = append(engines, e)
	}
	x, err := layers.NewExchange(engines, 200*time.Millisecond)
	noError(t, err)
	gpu.Internal().Queue.Check(x.Failed)
	gpu.Internal().UseExchange(x)
	gpu.Internal().Group.Leave()
	losing := &losingExchange{x, -1, false}
	kvstore.OpenExchange = func(*ongpu.GPU, string) (kvstore.Exchanging, error) { return losing, nil }
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 64, PageSize: 4, Pages: 12, DType: Float16, Device: gpu})
	chain := newContextChain(t, c, 2, 2, WithCausal())
	rng := reftest.Rand(t)
	for _, in := range chain.in {
		numbers := make([]float32, in.Shape().TotalSize())
		for i := range numbers {
			numbers[i] = rng.Float32()
		}
		d, err := gpu.UploadReplicated(tensor.New(tensor.WithShape(in.Shape()...), tensor.WithBacking(numbers)))
		noError(t, err, G.Let(in, d))
	}
	seq := newTestSequence(t, c)
	set := func() { t.Helper(); noError(t, chain.step.Set([]Append{{Seq: seq, Tokens: 2}})) }
	set()
	noError(t, chain.run())
	first := onMember(t, chain.out.Value(), 0)
	noError(t, chain.step.Rollback())
	before := c.Stats()
	same := func() {
		t.Helper()
		noError(t, chain.step.Rollback())
		if now := c.Stats(); now.Tokens != before.Tokens || now.FreePages != before.FreePages || seq.Len() != 0 {
			t.Errorf("%+v before, %+v now", before, now)
		}
	}
	losing.lost = 2 // when the second has been told, which waits for it
	set()
	if err := chain.run(); err == nil || !strings.Contains(err.Error(), errFault.Error()) {
		t.Errorf("a member that was not told: %v", err)
	}
	same()
	losing.lost = -1
	set()
	noError(t, chain.run())
	for m := range 3 {
		if !slices.Equal(first, onMember(t, chain.out.Value(), m)) {
			t.Errorf("member %d has other bits behind it", m)
		}
	}
	same()
	losing.lost, losing.silent = 1, true
	set()
	noError(t, chain.run())
	began := time.Now()
	if _, err := chain.out.Value().(*device.Tensor).Download(); !errors.Is(err, ErrNoAnswer) {
		t.Errorf("a download: %v", err)
	}
	if err := chain.run(); !errors.Is(err, ErrNoAnswer) || !strings.Contains(err.Error(), "GPU 1 did not answer") {
		t.Errorf("behind it: %v", err)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("it took %v", took)
	}
	same()
	noError(t, c.Close())
}
