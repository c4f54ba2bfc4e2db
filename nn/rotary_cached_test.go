package nn_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// turnedDecoder is a decoder of one layer on two caches: one whose attention turns q and k, and one behind nodes that do.
type turnedDecoder struct {
	at       graphtest.Place
	rows     int
	x        [3]*G.Node // q, k and v, of both
	position *G.Node
	steps    [2]*la.Step
	out, lse [2]G.Value
	vm       graphtest.TapeMachine
}

func newTurnedDecoder(t *testing.T, at graphtest.Place, caches [2]*la.Cache, rows, heads int, query tensor.Dtype, rotary rope.Config, opts ...la.Option) *turnedDecoder {
	t.Helper()
	cfg, r, g := caches[0].Config(), &turnedDecoder{at: at, rows: rows}, G.NewGraph()
	there := func(n *G.Node) *G.Node {
		if !at.There {
			return n
		}
		return graphtest.Move(t, n, func(n *G.Node) (*G.Node, error) { return device.ToGPU(n, at.GPU) })
	}
	var in [3]*G.Node
	for i, width := range []int{heads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim, cfg.KVHeads * cfg.ValueDim} {
		r.x[i] = G.NewMatrix(g, query, G.WithShape(rows, width), G.WithName("qkv"[i:i+1]))
		in[i] = there(r.x[i])
	}
	r.position = G.NewVector(g, tensor.Int32, G.WithShape(rows), G.WithName("positions"))
	rotary.HeadDim = cfg.HeadDim
	for i, cache := range caches {
		step, err := cache.NewStep(rows)
		if err != nil {
			t.Fatal(err)
		}
		r.steps[i] = step
		q, k, own := in[0], in[1], slices.Clone(opts)
		if i == 0 {
			own = append(own, la.WithRotary(rotary))
		} else {
			for _, x := range []**G.Node{&q, &k} {
				if *x, err = nn.Rotary(*x, there(r.position), rotary); err != nil {
					t.Fatal(err)
				}
			}
		}
		out, err := la.CachedAttention(q, k, in[2], step.Layer(0), own...)
		if err != nil {
			t.Fatal(err)
		}
		lse := graphtest.LogSumExp(t, out)
		if at.There {
			out, lse = graphtest.Move(t, out, device.ToHost), graphtest.Move(t, lse, device.ToHost)
		}
		G.Read(out, &r.out[i])
		G.Read(lse, &r.lse[i])
	}
	if err := rewrite.Check(g); err != nil {
		t.Fatal(err)
	}
	r.vm = graphtest.NewTapeMachine(g)
	t.Cleanup(func() { r.vm.Close() })
	return r
}

// run appends to both caches, and says by how much their outputs differ at most.
func (r *turnedDecoder) run(t *testing.T, rng *rand.Rand, appends [2][]la.Append) (off float64) {
	t.Helper()
	err := r.steps[0].Run(appends[0], func() error {
		return r.steps[1].Run(appends[1], func() error {
			off = r.compute(t, rng)
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return off
}

// compute runs the graph on random inputs, and returns the largest difference of its outputs.
func (r *turnedDecoder) compute(t *testing.T, rng *rand.Rand) (off float64) {
	t.Helper()
	for _, n := range r.x {
		x := make([]float64, n.Shape().TotalSize())
		for i := range x {
			x[i] = rng.NormFloat64()
		}
		graphtest.Let(t, n, graphtest.TensorOf(n.Dtype(), x, n.Shape()...))
	}
	positions := make([]int32, r.rows)
	for i, p := range r.steps[1].Positions() {
		positions[i] = int32(p)
	}
	graphtest.Let(t, r.position, tensor.New(tensor.WithShape(r.rows), tensor.WithBacking(positions)))
	graphtest.Again(t, r.vm)
	for _, x := range [][2]G.Value{r.out, r.lse} {
		a, b := graphtest.Floats(t, x[0]), graphtest.Floats(t, x[1])
		for i := range a {
			if a[i] != b[i] {
				off = max(off, math.Abs(a[i]-b[i]))
			}
		}
	}
	return off
}

// testTurnedAttention: attention that turns q and k is what it is behind nodes that do, bit by bit on the CPU.
func testTurnedAttention(t *testing.T, at graphtest.Place, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		config := la.CacheConfig{Layers: 1, KVHeads: 1 + rng.IntN(3), HeadDim: 2 + rng.IntN(70), PageSize: 1 + rng.IntN(20), Pages: 200, Device: at.GPU}
		config.DType = []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}[i%3]
		if at.Real {
			config.HeadDim, at.There = []int{64, 80, 128}[i%3], true // the node is for what is on the GPU
		}
		config.ValueDim = config.HeadDim
		bound := 0.0
		if at.Real { // a turned key may be rounded to the neighbour
			bound = []float64{1e-5, 2e-3, 1.6e-2}[i%3]
		}
		opts := []la.Option{la.WithCausal()}
		if i%2 == 0 {
			config.Window, config.SinkTokens = 20, i%4
			opts = append(opts, la.WithWindow(1+rng.IntN(20)), la.WithSinkTokens(config.SinkTokens))
		}
		var caches [2]*la.Cache
		var seqs [2][2]*la.Sequence
		for j := range caches {
			caches[j] = graphtest.NewCache(t, config)
			for s := range seqs[j] {
				seq, err := caches[j].NewSequence()
				if err != nil {
					t.Fatal(err)
				}
				seqs[j][s] = seq
			}
		}
		query := tensor.Float32
		if !at.Real && i%4 == 3 {
			query = tensor.Float64
		}
		rotary := graphtest.RandomRotary(rng, config.HeadDim)
		heads := config.KVHeads * (1 + rng.IntN(3))
		prompt := newTurnedDecoder(t, at, caches, 40, heads, query, *rotary, opts...)
		decode := newTurnedDecoder(t, at, caches, 3, heads, query, *rotary, opts...)
		for turn := range 12 {
			r, tokens := decode, [2]int{1, 1}
			if turn%6 == 0 {
				r, tokens = prompt, [2]int{1 + rng.IntN(30), 1 + rng.IntN(9)}
			}
			var parents []int
			if config.Window == 0 {
				for p := range tokens[1] {
					parents = append(parents, rng.IntN(p+1)-1)
				}
			}
			var positions [2][]int // in no order
			for j := range positions {
				if rng.IntN(2) == 0 {
					continue
				}
				most := []int{1, 50, 5000, math.MaxInt32}[rng.IntN(4)]
				for range tokens[j] {
					positions[j] = append(positions[j], rng.IntN(most)+rng.IntN(2))
				}
			}
			var appends [2][]la.Append
			for j := range appends {
				appends[j] = []la.Append{{Seq: seqs[j][0], Tokens: tokens[0], Positions: positions[0]}, {Seq: seqs[j][1], Tokens: tokens[1], Parents: parents, Positions: positions[1]}}
			}
			if off := r.run(t, rng, appends); !(off <= bound) {
				t.Fatalf("case %d, turn %d, %+v, rotary %+v: off by %v", i, turn, config, *rotary, off)
			}
		}
		for _, c := range caches {
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestTurnedAttention(t *testing.T) { testTurnedAttention(t, graphtest.Place{}, 24) }

func TestGPUTurnedAttention(t *testing.T) {
	testTurnedAttention(t, graphtest.Place{GPU: devicetest.Open(t), Real: true}, reftest.Cases(t, 3, 24))
}

// Recorded steps are replayed with other positions: each is what nn.Rotary makes of them.
func TestGPURecordedPositions(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const rows, heads, dim = 4, 2, 64
	g := G.NewGraph()
	input := func(name string, dtype tensor.Dtype, shape ...int) (*G.Node, *device.Tensor) {
		x, err := gpu.NewTensor(dtype, shape...)
		must(err)
		return G.NewTensor(g, dtype, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(x)), x
	}
	var in [3]*G.Node
	var there [3]*device.Tensor
	for i, width := range []int{heads * dim, dim, dim} {
		in[i], there[i] = input("qkv"[i:i+1], tensor.Float32, rows, width)
	}
	at, positions := input("positions", tensor.Int32, rows)
	rotary := rope.Config{HeadDim: dim}
	var steps [2]*la.Step
	var seqs [2][2]*la.Sequence
	var outs [2]*G.Node
	for i := range steps {
		cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: dim, Pages: 20, Device: gpu})
		var err error
		steps[i], err = cache.NewStep(rows)
		must(err)
		for j := range seqs[i] {
			seqs[i][j], err = cache.NewSequence()
			must(err)
		}
		q, k, opts := in[0], in[1], []la.Option{la.WithCausal(), la.WithRotary(rotary)}
		if i == 1 {
			opts = opts[:1]
			for _, x := range []**G.Node{&q, &k} {
				*x, err = nn.Rotary(*x, at, rotary)
				must(err)
			}
		}
		outs[i], err = la.CachedAttention(q, k, in[2], steps[i].Layer(0), opts...)
		must(err)
	}
	vm := graphtest.NewTapeMachine(g)
	defer vm.Close()
	run := func() error { defer vm.Reset(); return la.Cause(vm.RunAll()) }
	var recording *device.Recording
	defer func() { must(recording.Close()) }()
	for turn := range 6 {
		var given [2][]int
		for j, n := range []int{3, 1} {
			for range n {
				given[j] = append(given[j], rng.IntN(1<<20))
			}
		}
		if turn == 3 {
			given[0] = nil // where they stand
		}
		appends := func(i int) []la.Append {
			return []la.Append{{Seq: seqs[i][0], Tokens: 3, Positions: given[0]}, {Seq: seqs[i][1], Tokens: 1, Positions: given[1]}}
		}
		compute := func() error {
			for _, x := range there {
				f := make([]float32, x.Size())
				for i := range f {
					f[i] = float32(rng.NormFloat64())
				}
				must(x.CopyFrom(tensor.New(tensor.WithShape(x.Shape()...), tensor.WithBacking(f))))
			}
			now := make([]int32, rows)
			for i, p := range steps[1].Positions() {
				now[i] = int32(p)
			}
			if turn != 3 && (int(now[1]) != given[0][1] || int(now[3]) != given[1][0]) || turn == 3 && now[1] != 3*3+1 {
				t.Fatalf("turn %d: positions %v, given %v", turn, now, given)
			}
			must(positions.CopyFrom(tensor.New(tensor.WithShape(rows), tensor.WithBacking(now))))
			switch turn {
			case 0:
				must(run())
			case 1:
				var err error
				recording, err = gpu.Record(run)
				must(err)
				fallthrough
			default:
				must(recording.Replay())
			}
			var got [2][]float64
			for i, n := range outs {
				got[i] = graphtest.Floats(t, graphtest.Download(t, n.Value()))
			}
			for i, v := range got[0] {
				if !(math.Abs(v-got[1][i]) <= 1e-5*(1+math.Abs(v))) {
					t.Fatalf("turn %d: element %d is %v, behind nodes %v", turn, i, v, got[1][i])
				}
			}
			return nil
		}
		must(steps[0].Run(appends(0), func() error { return steps[1].Run(appends(1), compute) }))
	}
}
