package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
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
		{"parts of q", parts, everywhere, nil, 3, 2, "gather " + several + " " + several, "gather " + several + " " + several},
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
	for range reftest.AtLeast(rounds, func() bool { return len(seen) == 2 }) {
		kvHeads, dim := []int{1, max(n/2, 1), n}[rng.IntN(3)], 64
		config := at.config(CacheConfig{Layers: 3, KVHeads: kvHeads, HeadDim: dim, PageSize: 4, Pages: 12 * n, DType: Float16})
		config.HeadDim, config.ValueDim = dim, dim
		if kvHeads%n == 0 {
			config.Shard = ShardContext
		}
		heads := kvHeads * (1 + rng.IntN(3))
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
						if parts && i > 0 {
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
				y := chains[1].out.Value()
				first := onMember(t, y, 0)
				if waits != nil {
					if w := waits(); w != 2*(n-1) { // one fork, one join
						t.Errorf("%s: %d waits", what, w)
					}
				}
				for m := 1; m < n; m++ {
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
					if !slices.Equal(first, onMember(t, chains[1].out.Value(), 0)) {
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
