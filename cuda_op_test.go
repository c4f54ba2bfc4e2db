//go:build cuda

package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/gputest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The tests below run Gorgonia's own CUDA machine, and need a GPU, or the driver
// without one that .ci/run builds: else gorgonia.org/cu ends the process before
// any of them could skip. docs/cuda.md says how they are built and run. Run them
// by their name, -run '^TestMachine': most other tests look at the machine of the
// default build.

// onMachine is the place of caches on the machine.
func onMachine() place { return place{gpu: la.MachineGPU(), real: true} }

func isOnMachine(n *G.Node) bool {
	_, ok := n.Op().(G.CUDADoer)
	return ok
}

// Attention: every acceptance case that there is a kernel for, with all types of
// keys, schedules and inputs, against the reference.
func TestMachineAttention(t *testing.T) {
	rng := reftest.Rand(t)
	kvs := []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
	at := onMachine()
	turn := 0
	for _, c := range acceptanceCases() {
		if !at.hasKernel(c.shape) || work(c.shape) > 3_000_000 {
			continue
		}
		turn++
		x := spec{inputs: reftest.AllInputs[turn%len(reftest.AllInputs)], capacity: c.capacity, kv: kvs[turn%3]}
		opts := append([]la.Option{la.WithSchedule(schedules[turn/3%3])}, c.opts...)
		t.Run(fmt.Sprintf("%s %v %v", c.name, x.inputs, x.kv), func(t *testing.T) {
			p := newProblem(rng, c.shape, x)
			g := p.attention(t, opts...)
			if !isOnMachine(g.out) || !isOnMachine(g.lse) {
				t.Fatal("not on the machine")
			}
			vm := newTapeMachine(g.g)
			defer vm.Close()
			again(t, vm)
			p.check(t, p.referenceThere(at), g.outV, g.lseV)
			first := bits(t, g.outV)
			again(t, vm)
			if !slices.Equal(bits(t, g.outV), first) {
				t.Error("other bits in a second run")
			}
			if p.ragged() { // lengths are data
				let(t, g.lengths, lengthsOf(tensor.Int, make([]int, len(p.Keys))))
				again(t, vm)
				if slices.ContainsFunc(floats(t, g.outV), func(f float64) bool { return f != 0 }) {
					t.Error("output for no keys is not 0")
				}
			}
		})
	}
	if turn < 5 {
		t.Errorf("only %d cases", turn)
	}
}

// What there is no kernel for stays on the CPU, with the same results.
func TestMachineLeavesOnCPU(t *testing.T) {
	rng := reftest.Rand(t)
	for name, p := range map[string]*problem{
		"head dim 24":     newProblem(rng, dense(2, 1, 24, 24, 1, 9), spec{}),
		"float64":         newProblem(rng, dense(2, 1, 64, 64, 1, 9), spec{query: tensor.Float64}),
		"a wider value":   newProblem(rng, dense(2, 1, 64, 128, 1, 9), spec{}),
		"keys in float64": newProblem(rng, dense(2, 1, 64, 64, 1, 9), spec{kv: tensor.Float64}),
		"a window":        newProblem(rng, bent(dense(2, 1, 64, 64, 1, 9), 3, 0), spec{}),
		"a soft cap":      newProblem(rng, bent(dense(2, 1, 64, 64, 1, 9), 0, 2), spec{}),
		"a bias":          newProblem(rng, reftest.RandomBias(rng, dense(2, 1, 64, 64, 1, 9), 9), spec{}),
		"ALiBi":           newProblem(rng, bent(dense(2, 1, 64, 64, 1, 9), 0, 0, 1, 0.5), spec{}),
	} {
		g := p.build(t)
		if isOnMachine(g.out) || isOnMachine(g.lse) {
			t.Fatalf("%s: on the machine", name)
		}
		vm := newTapeMachine(g.g) // without Read, see below
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		p.check(t, p.Reference(p.precision(0)), g.out.Value(), g.lse.Value())
		vm.Close()
		if err := la.CheckGraph(g.g); err != nil {
			t.Error(err)
		}
		G.Read(g.out, &g.outV)
		if err := la.CheckGraph(g.g); !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), "no node on Gorgonia's CUDA machine") {
			t.Errorf("a Read, where Gorgonia panics: %v", err)
		}
	}
}

// CachedAttention, with prompts and single tokens beside each other.
func TestMachineCachedAttention(t *testing.T) {
	geometries := [][3]int{{2, 2, 64}, {6, 2, 80}, {7, 1, 96}, {12, 3, 128}, {5, 1, 256}}
	pageSizes := []int{1, 3, 16, 64}
	const long = 60
	rng := reftest.Rand(t)
	at, turn := onMachine(), 0
	for _, storage := range cacheTypes {
		for _, query := range at.queries() {
			g := geometries[turn%len(geometries)]
			pageSize := pageSizes[turn%len(pageSizes)]
			schedule, causal := schedules[turn%3], turn%4 != 0
			turn++
			t.Run(fmt.Sprintf("page %d %v in %v h%d/%d d%d %v causal %v", pageSize, query, storage, g[0], g[1], g[2], schedule, causal), func(t *testing.T) {
				cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: g[1], HeadDim: g[2], DType: storage, PageSize: pageSize, Pages: 8*long/pageSize + 24, Device: at.gpu})
				d := newDecoderAt(t, at, cache, long+50, g[0], query, causal, la.WithSchedule(schedule))
				decodeMix(t, rng, cache, d, d, long) // one graph: each machine has memory of its own
				closeCache(t, cache)
			})
		}
	}
	t.Run("Rerun", func(t *testing.T) { testCachedAttentionRerun(t, at, 20) })
	t.Run("Poison", func(t *testing.T) { testCachedAttentionPoison(t, at) })
}

// Several machines, by turns: each has its own context.
func TestMachineSeveral(t *testing.T) {
	rng := reftest.Rand(t)
	at := onMachine()
	type user struct {
		d *decoder
		s *stored
	}
	var users []user
	for range 3 {
		cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 64, DType: la.Float16, PageSize: 8, Pages: 30, Device: at.gpu})
		users = append(users, user{newDecoderAt(t, at, cache, 5, 4, tensor.Float32, true), newStored(t, cache)})
	}
	for i := range 30 {
		u := users[rng.IntN(len(users))]
		u.d.do(t, rng, reftest.Normal, appended{u.s, 1 + i%5})
	}
	for _, u := range users {
		closeCache(t, u.d.cache)
	}
}

// Sequences are saved and loaded where a layer has run.
func TestMachineSequenceIO(t *testing.T) {
	at := onMachine()
	testSequenceIODecodes(t, at)

	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, PageSize: 4, Pages: 30, Device: at.gpu})
	rng := reftest.Rand(t)
	d := newDecoderAt(t, at, cache, 2, 1, tensor.Float32, true)
	var file bytes.Buffer
	empty := newStored(t, cache)
	if _, err := empty.seq.WriteTo(&file); err != nil {
		t.Errorf("an empty sequence: %v", err)
	}
	if _, err := cache.ReadSequence(&file); err != nil {
		t.Errorf("an empty sequence: %v", err)
	}
	s := newStored(t, cache)
	d.do(t, rng, reftest.Normal, appended{s, 2})
	if _, err := s.seq.WriteTo(&file); err != nil {
		t.Error(err)
	}
	saved := file.Bytes()

	fresh := newCache(t, cache.Config())
	if _, err := fresh.ReadSequence(bytes.NewReader(saved)); !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("before a layer has run: %v", err)
	}
	if st := fresh.Stats(); st.FreePages != st.Pages || st.Sequences != 0 {
		t.Errorf("%+v", st)
	}
	d.vm.Close()
	if n, err := s.seq.WriteTo(io.Discard); n != 0 || !errors.Is(err, la.ErrClosed) {
		t.Errorf("behind its machine: %d bytes, %v", n, err)
	}
	if _, err := cache.ReadSequence(bytes.NewReader(saved)); !errors.Is(err, la.ErrClosed) {
		t.Errorf("behind its machine: %v", err)
	}
	closeCache(t, cache)
	closeCache(t, fresh)
}

// The gradient is computed on the CPU, of what the machine left.
func TestMachineGradient(t *testing.T) {
	cudagen(t)
	rng := reftest.Rand(t)
	for _, of := range costs {
		p := newProblem(rng, causal(dense(4, 2, 64, 64, 3, 20, 11)), spec{capacity: 20})
		g := p.differentiate(t, rng, of)
		vm := newTapeMachine(g.g)
		for range 2 {
			again(t, vm)
		}
		if err := g.compareGrads(t, g.want()); err != nil {
			t.Errorf("%v: %v", of, err)
		}
		vm.Close()
	}
}

// Every wrong set-up is one sentence that says what is wrong, and no run hangs.
func TestMachineErrors(t *testing.T) {
	rng := reftest.Rand(t)
	at := onMachine()
	config := la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, PageSize: 4, Pages: 30, Device: at.gpu}
	check := func(t *testing.T, err, want error, text string) {
		t.Helper()
		if err = la.Cause(err); !errors.Is(err, want) || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v; want %v with %q", err, want, text)
		}
	}
	t.Run("No kernel", func(t *testing.T) {
		c := config
		c.HeadDim = 24
		_, err := la.NewCache(c)
		check(t, err, la.ErrUnsupported, "NewCache: on the GPU of Gorgonia's machine: ")
		c = config
		c.HeadDim, c.ValueDim = 64, 128
		_, err = la.NewCache(c)
		check(t, err, la.ErrUnsupported, "value dim 128")
	})
	t.Run("No GPU of its own", func(t *testing.T) {
		_, err := at.gpu.Memory()
		check(t, err, la.ErrState, "not made by OpenGPU")
		_, err = at.gpu.Upload(tensorOf(tensor.Float32, []float64{1}, 1))
		check(t, err, la.ErrState, "not made by OpenGPU")
	})
	t.Run("Step not set", func(t *testing.T) {
		cache := newCache(t, config)
		d := newDecoderAt(t, at, cache, 2, 1, tensor.Float32, true)
		d.draw(t, rng, reftest.Normal)
		err := d.vm.RunAll()
		d.vm.Reset()
		check(t, err, la.ErrState, "CachedAttention: layer 0: step is not open")
		d.do(t, rng, reftest.Normal, appended{newStored(t, cache), 2}) // the machine is as good as before
		closeCache(t, cache)
		d.draw(t, rng, reftest.Normal)
		check(t, d.vm.RunAll(), la.ErrClosed, "cache")
	})
	t.Run("Another machine", func(t *testing.T) {
		cache := newCache(t, config)
		a := newDecoderAt(t, at, cache, 2, 1, tensor.Float32, true)
		b := newDecoderAt(t, at, cache, 2, 1, tensor.Float32, true)
		s := newStored(t, cache)
		a.do(t, rng, reftest.Normal, appended{s, 2})
		fails := func(want error, text string) {
			t.Helper()
			b.set(t, rng, reftest.Normal, appended{s, 1})
			err := b.vm.RunAll()
			b.vm.Reset()
			check(t, err, want, text)
			if err := b.step.Rollback(); err != nil {
				t.Fatal(err)
			}
		}
		fails(la.ErrUnsupported, "the cache's 2 tokens are on another machine")
		a.do(t, rng, reftest.Normal, appended{s, 1})
		a.vm.Close()
		fails(la.ErrClosed, "the machine that the cache's 3 tokens were on")
		if err := s.seq.Release(); err != nil {
			t.Fatal(err)
		}
		b.do(t, rng, reftest.Normal, appended{newStored(t, cache), 2}) // an empty cache goes along
		b.vm.Close()
		closeCache(t, cache) // after its machine
	})
	t.Run("Memory", func(t *testing.T) {
		c := config
		c.KVHeads, c.HeadDim, c.PageSize, c.Pages = 64, 256, 4096, 100_000 // 53 TB
		cache := newCache(t, c)
		d := newDecoderAt(t, at, cache, 2, 64, tensor.Float32, true)
		d.set(t, rng, reftest.Normal, appended{newStored(t, cache), 1})
		check(t, d.vm.RunAll(), la.ErrOutOfMemory, "bytes asked for on GPU 0")
		closeCache(t, cache)
	})
	t.Run("Tensor of an opened GPU", func(t *testing.T) {
		gpu := gputest.Open(t)
		p := newProblem(rng, dense(1, 1, 64, 64, 1, 9), spec{})
		g := p.graph()
		out, err := la.Attention(g.q, g.k, g.v)
		if err != nil {
			t.Fatal(err)
		}
		G.Read(out, &g.outV)
		vm := newTapeMachine(g.g)
		defer vm.Close()
		let(t, g.q, upload(t, gpu, p.q))
		if err := vm.RunAll(); err == nil {
			t.Error("a DeviceTensor was taken for a tensor of the host")
		} else {
			t.Log(la.Cause(err))
		}
		vm.Reset()
		let(t, g.q, p.q)
		again(t, vm)
		p.check(t, p.referenceThere(at), g.outV, nil)
	})
}

// TestMachineManyLayers: hundreds of layers, thousands of steps, machine after
// machine: the results are those of the default build, bit for bit those of its
// GPUs, and no memory is lost.
func TestMachineManyLayers(t *testing.T) {
	layers, steps := 400, 200
	if testing.Short() {
		layers, steps = 40, 20
	}
	const heads, kvHeads, dim, rows = 4, 2, 64, 2
	gpu := gputest.Open(t)
	rng := reftest.Rand(t)
	q := randomMatrix(rng, steps*rows, heads*dim, 1)
	k, v := randomMatrix(rng, steps*rows, kvHeads*dim, 1), randomMatrix(rng, steps*rows, kvHeads*dim, 1)
	look := []int{0, layers / 2, layers - 1} // layers whose output is compared

	// chain runs all layers, each on the output of the one before, and hands over
	// the outputs of some.
	chain := func(device *la.GPU, each func(step int, outs []G.Value)) {
		cache := newCache(t, la.CacheConfig{Layers: layers, KVHeads: kvHeads, HeadDim: dim, DType: la.Float16, PageSize: 16, Pages: 2 * (steps/16 + 2), Device: device})
		defer closeCache(t, cache)
		step, err := cache.NewStep(rows)
		if err != nil {
			t.Fatal(err)
		}
		g := G.NewGraph()
		in := [3]*G.Node{}
		for i, width := range []int{heads * dim, kvHeads * dim, kvHeads * dim} {
			in[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("qkv"[i:i+1]))
		}
		outs := make([]G.Value, len(look))
		nodes := make([]*G.Node, 0, layers)
		x := in[0]
		for l := range layers {
			if x, err = la.CachedAttention(x, in[1], in[2], step.Layer(l), la.WithCausal()); err != nil {
				t.Fatal(err)
			}
			nodes = append(nodes, x)
		}
		if isOnMachine(x) {
			for i, l := range look {
				G.Read(nodes[l], &outs[i])
			}
		}
		vm := newTapeMachine(g)
		defer vm.Close()
		seqs := []*stored{newStored(t, cache), newStored(t, cache)}
		var spent time.Duration
		defer func() { t.Logf("%v: %v a step", device, spent/time.Duration(steps)) }()
		for s := range steps {
			for i, m := range []matrix{q, k, v} {
				let(t, in[i], tensorOf(tensor.Float32, m.x[s*rows*m.columns:(s+1)*rows*m.columns], rows, m.columns))
			}
			if err := step.Set([]la.Append{{Seq: seqs[0].seq, Tokens: 1}, {Seq: seqs[1].seq, Tokens: 1}}); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			if err := vm.RunAll(); err != nil {
				t.Fatalf("step %d: %v", s, err)
			}
			spent += time.Since(begin)
			if !isOnMachine(x) { // see TestMachineLeavesOnCPU
				for i, l := range look {
					outs[i] = nodes[l].Value()
				}
			}
			each(s, outs)
			if err := step.Commit(); err != nil {
				t.Fatal(err)
			}
			vm.Reset()
		}
	}

	var want [][]uint64 // of the default build's GPU
	chain(gpu, func(_ int, outs []G.Value) {
		for _, o := range outs {
			want = append(want, bits(t, o))
		}
	})
	chain(nil, func(s int, outs []G.Value) { // and they are near the CPU's
		for i, o := range outs {
			x := floats(t, o)
			for j, w := range want[s*len(look)+i] {
				if d := math.Abs(x[j] - math.Float64frombits(w)); !(d < 1e-4) {
					t.Fatalf("step %d, layer %d: element %d is %v on a GPU, %v on the CPU", s, look[i], j, math.Float64frombits(w), x[j])
				}
			}
		}
	})

	free := func() int64 {
		t.Helper()
		m, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		return m.Free
	}
	const slack = 8 << 20 // what a driver may keep
	var afterFirst, early int64
	var resident [2]int64
	for machine := range 3 {
		chain(la.MachineGPU(), func(s int, outs []G.Value) {
			for i, o := range outs {
				if !slices.Equal(bits(t, o), want[s*len(look)+i]) {
					t.Fatalf("machine %d, step %d, layer %d: other bits than the default build's", machine, s, look[i])
				}
			}
			switch s {
			case steps / 10:
				early, resident[0] = free(), residentBytes()
			case steps - 1:
				resident[1] = residentBytes()
				if lost := early - free(); lost > slack {
					t.Errorf("machine %d: %d bytes of the GPU lost in %d steps", machine, lost, s)
				}
				if grown := resident[1] - resident[0]; grown > 64<<20 {
					t.Errorf("machine %d: %d bytes of the host lost in %d steps", machine, grown, s)
				}
				t.Logf("machine %d: GPU memory free after step %d: %d, after step %d: %d; resident %d, %d", machine, steps/10, early, s, free(), resident[0], resident[1])
			}
		})
		runtime.GC()
		now := free()
		t.Logf("machine %d closed: GPU memory free %d, resident %d", machine, now, residentBytes())
		if machine == 0 {
			afterFirst = now
		} else if lost := afterFirst - now; lost > slack {
			t.Errorf("machine %d: %d bytes of the GPU lost since the first", machine, lost)
		}
	}
}

// residentBytes is the process's memory, 0 where it can't be told.
func residentBytes() int64 {
	var size, resident int64
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	if _, err := fmt.Sscan(string(text), &size, &resident); err != nil {
		return 0
	}
	return resident * int64(os.Getpagesize())
}
