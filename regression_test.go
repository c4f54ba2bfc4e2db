package leanattention_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The tests here hold results to the last bit. A change that is to alter no result
// must pass them as they are; one that is to alter results writes the file again:
//
//	for tier in go avx2 avx512 amx; do LEANATTENTION_CPU=$tier go test -count=1 -run TestDigests . -digests; done # on a machine that has them
//	LEANATTENTION_GPU=emulated go test -count=1 -run TestGPUDigests . -digests

const digestFile = "testdata/digests.json"

var writeDigests = flag.Bool("digests", false, "write "+digestFile+" in place of comparing with it")

// digests are of the results of problems, in the order in which they are computed.
// All numbers come from a fixed seed.
type digests struct {
	rng   *rand.Rand
	found []string
}

func newDigests() *digests { return &digests{rng: rand.New(rand.NewPCG(2405, 10480))} }

// add adds the digest of some results.
func (d *digests) add(t testing.TB, results ...G.Value) {
	t.Helper()
	h := fnv.New32a()
	for _, r := range results {
		for _, b := range graphtest.Bits(t, r) {
			h.Write(binary.LittleEndian.AppendUint64(nil, b))
		}
	}
	d.found = append(d.found, hex.EncodeToString(h.Sum(nil)))
}

// compare compares the digests with those of the file, by the name of what computed them.
func (d *digests) compare(t *testing.T, name string) {
	t.Helper()
	file := map[string][]string{}
	if data, err := os.ReadFile(digestFile); err == nil {
		if err := json.Unmarshal(data, &file); err != nil {
			t.Fatal(err)
		}
	} else if !*writeDigests {
		t.Fatal(err)
	}
	if *writeDigests {
		file[name] = d.found
		data, err := json.MarshalIndent(file, "", "")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(digestFile, append(data, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, ok := file[name]
	if !ok {
		t.Skipf("%s has no digests of %s", digestFile, name)
	}
	if len(want) != len(d.found) {
		t.Fatalf("%s: %d results; the file has %d", name, len(d.found), len(want))
	}
	var differ []int
	for i, w := range want {
		if d.found[i] != w {
			differ = append(differ, i)
		}
	}
	if differ != nil {
		t.Errorf("%s: %d of %d results have other bits: %v", name, len(differ), len(want), differ)
	}
}

// TestDigests: what the CPU computes has the same bits as when the file was written.
func TestDigests(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the detector looks for races, of which one run more shows no others")
	}
	d := newDigests()
	for i := range 300 {
		p, opts := d.problem(i)
		a := p.Args()
		if err := la.Attend(a, opts...); err != nil {
			t.Fatalf("%v: %v", p.Shape, err)
		}
		d.add(t, a.Out, a.LSE)
	}
	for i := range 100 {
		d.gradients(t, i)
	}
	for i := range 25 { // of four steps
		d.decode(t, i, graphtest.Place{})
	}
	if err := cpu.CheckTier(); err != nil {
		t.Fatal(err)
	}
	d.compare(t, runtime.GOARCH+" "+cpu.InUse().String())
}

// problem draws a problem for [la.Attend], and its options.
func (d *digests) problem(i int) (*graphtest.Problem, []la.Option) {
	s := reftest.RandomShape(d.rng)
	s.Queries = graphtest.Repeated(len(s.Keys), max(s.Queries[0], 1))
	if i%2 == 1 {
		s = reftest.RandomWindowCapSlopes(d.rng, s)
	}
	x := graphtest.Spec{Inputs: reftest.AllInputs[i%4], QueryType: elementTypes[i%8][0], KVType: elementTypes[i%8][1], Capacity: max(slices.Max(s.Keys)+d.rng.IntN(3), 1)}
	if i%3 == 2 {
		s = reftest.RandomBias(d.rng, s, x.Capacity)
	}
	p := graphtest.NewProblem(d.rng, s, x)
	return p, append(p.Options(), d.options(i)...)
}

// options draws a schedule. The workers are given, since bits depend on their number.
func (d *digests) options(i int) []la.Option {
	return []la.Option{la.WithTileTokens(d.rng.IntN(100)), la.WithWorkers(1 + d.rng.IntN(8)), la.WithSchedule(graphtest.Schedules[i%3])}
}

// gradients adds the gradients of a problem whose cost is the sum of its output.
func (d *digests) gradients(t *testing.T, i int) {
	t.Helper()
	s := reftest.RandomShape(d.rng)
	s.Queries = graphtest.Repeated(len(s.Keys), max(s.Queries[0], 1))
	if i%2 == 1 {
		s = reftest.RandomWindowCapSlopes(d.rng, s)
	}
	types := elementTypes[i%2*4] // float32 and float64
	p := graphtest.NewProblem(d.rng, s, graphtest.Spec{Inputs: reftest.AllInputs[i%4], QueryType: types[0], KVType: types[1]})
	g := p.Attention(t, d.options(i)...)
	wrt := G.Nodes{g.Q, g.K, g.V}
	grads, err := G.Grad(G.Must(G.Sum(g.Out)), wrt...)
	if err != nil {
		t.Fatal(err)
	}
	values := make([]G.Value, len(grads))
	for j, n := range grads {
		G.Read(n, &values[j])
	}
	g.Run(t)
	d.add(t, values...)
}

// decode adds the outputs of some steps of a cache.
func (d *digests) decode(t *testing.T, i int, at graphtest.Place) {
	t.Helper()
	const prompt = 40
	geometries := [][4]int{{2, 2, 16, 16}, {6, 2, 8, 20}, {7, 1, 40, 24}, {4, 4, 3, 1}, {12, 3, 59, 59}, {5, 1, 80, 64}}
	if at.Real {
		geometries = [][4]int{{2, 2, 64, 64}, {6, 2, 80, 80}, {7, 1, 96, 96}, {12, 3, 128, 128}, {16, 1, 64, 64}, {3, 3, 256, 256}}
	}
	g := geometries[i%len(geometries)]
	pageSize := []int{1, 3, 16, 64}[i%4]
	queries := at.Queries()
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: g[1], HeadDim: g[2], ValueDim: g[3], DType: cacheTypes[i%3], PageSize: pageSize, Pages: 4*prompt/pageSize + 16, Device: at.GPU})
	la.PoisonFree(cache)
	prefill := graphtest.NewDecoderAt(t, at, cache, prompt+2, g[0], queries[i%len(queries)], true, d.options(i)...)
	decode := graphtest.NewDecoderAt(t, at, cache, 2, g[0], queries[i%len(queries)], true, d.options(i)...)
	a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
	prefill.Do(t, d.rng, reftest.AllInputs[i%4], graphtest.Appended{To: a, Tokens: prompt - i}, graphtest.Appended{To: b, Tokens: 1 + i})
	d.add(t, prefill.OutValues[0], prefill.LSEValues[0])
	for range 3 {
		decode.Do(t, d.rng, reftest.AllInputs[i%4], graphtest.Appended{To: b, Tokens: 1}, graphtest.Appended{To: a, Tokens: 1})
		d.add(t, decode.OutValues[0], decode.LSEValues[0])
	}
	closeCache(t, cache)
}

// TestGPUDigests: what an emulated GPU computes has the same bits as when the file was
// written. A GPU's own exponentials differ from those of the emulator.
func TestGPUDigests(t *testing.T) {
	if os.Getenv("LEANATTENTION_GPU") != "emulated" {
		t.Skip("the file has digests of the emulator's results alone")
	}
	gpu := devicetest.Open(t)
	d, at := newDigests(), graphtest.Place{GPU: gpu, Real: true}
	dims := []int{64, 80, 96, 128, 256}
	for i := range 100 {
		s := reftest.RandomShape(d.rng)
		s.Queries = graphtest.Repeated(len(s.Keys), max(min(s.Queries[0], 5), 1))
		s.Dim = dims[i%5]
		s.ValueDim = s.Dim
		s.Heads = s.KVHeads * (1 + d.rng.IntN(16))
		x := graphtest.Spec{Inputs: reftest.AllInputs[i%4], Capacity: max(slices.Max(s.Keys), 1)}
		x.QueryType, x.KVType = deviceElements(i)
		p := graphtest.NewProblem(d.rng, s, x)
		out, lse := p.AttendThere(t, gpu, d.options(i)...)
		d.add(t, out, lse)
	}
	for i := range 12 {
		at.There = i%2 == 0
		d.decode(t, i, at)
	}
	d.compare(t, fmt.Sprint("emulated GPU, PTX ", os.Getenv("LEANATTENTION_PTX")))
}

// random is a tensor of N(0,1) numbers that repeat after a while: benchmarks
// need hundreds of megabytes of them.
func random(of tensor.Dtype, shape ...int) *tensor.Dense {
	rng := rand.New(rand.NewPCG(1, 2))
	numbers := make([]float64, 8191)
	for i := range numbers {
		numbers[i] = rng.NormFloat64()
	}
	x := tensor.New(tensor.Of(of), tensor.WithShape(shape...))
	switch m := x.Data().(type) {
	case []float64:
		fill(m, numbers, func(f float64) float64 { return f })
	case []float32:
		fill(m, numbers, func(f float64) float32 { return float32(f) })
	case []la.F16:
		fill(m, numbers, half.FromFloat64)
	case []la.BF16:
		fill(m, numbers, half.BFromFloat64)
	}
	return x
}

func fill[T any](x []T, numbers []float64, convert func(float64) T) {
	for i := range min(len(x), len(numbers)) {
		x[i] = convert(numbers[i])
	}
	for n := len(numbers); n < len(x); n *= 2 {
		copy(x[n:], x[:n])
	}
}

// BenchmarkDecode is one step of decoding: one query of 12 heads of 64, over
// contexts of n tokens. MB/s is the keys and values that the step has to read.
//
//	default   a run of the graph of Default, on the tape machine
//	lean      a run of the graph of Attention, with K and V in float32
//	lean-f16  the same, in Float16
//	lean-bf16 the same, in BFloat16
//	attend    Attend on what lean has: the engine without the graph
func BenchmarkDecode(b *testing.B) {
	const heads, dim = 12, 64
	graphRun := func(build func(q, k, v *G.Node) (*G.Node, error)) func(*testing.B, *tensor.Dense, *tensor.Dense, *tensor.Dense) {
		return func(b *testing.B, q, k, v *tensor.Dense) {
			g := G.NewGraph()
			out, err := build(graphtest.Input(g, "q", q), graphtest.Input(g, "k", k), graphtest.Input(g, "v", v))
			if err != nil {
				b.Fatal(err)
			}
			var outV G.Value
			G.Read(out, &outV)
			vm := G.NewTapeMachine(g)
			defer vm.Close()
			for b.Loop() {
				if err := vm.RunAll(); err != nil {
					b.Fatal(err)
				}
				vm.Reset()
			}
		}
	}
	lean := graphRun(func(q, k, v *G.Node) (*G.Node, error) { return la.Attention(q, k, v) })
	for _, c := range []struct {
		name string
		kv   tensor.Dtype
		run  func(b *testing.B, q, k, v *tensor.Dense)
	}{
		{"default", tensor.Float32, graphRun(func(q, k, v *G.Node) (*G.Node, error) { return la.Default(q, k, v) })},
		{"lean", tensor.Float32, lean},
		{"lean-f16", la.Float16, lean},
		{"lean-bf16", la.BFloat16, lean},
		{"attend", tensor.Float32, func(b *testing.B, q, k, v *tensor.Dense) {
			a := la.Args{Q: q, K: k, V: v, Out: tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(q.Shape()...))}
			if err := la.Attend(a); err != nil { // its memory grows once
				b.Fatal(err)
			}
			for b.Loop() {
				if err := la.Attend(a); err != nil {
					b.Fatal(err)
				}
			}
		}},
	} {
		for _, n := range []int{128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536} {
			b.Run(fmt.Sprintf("%s/h%dn%dd%d", c.name, heads, n, dim), func(b *testing.B) {
				q := random(tensor.Float32, 1, heads, 1, dim)
				k, v := random(c.kv, 1, heads, n, dim), random(c.kv, 1, heads, n, dim)
				b.SetBytes(int64(k.MemSize() + v.MemSize()))
				b.ReportAllocs()
				c.run(b, q, k, v)
			})
		}
	}
}

// BenchmarkScoreMods is attention with what changes scores, or hides keys, beside the same without, in turn: a
// query of each head and of 8 at the end of a text, with keys of all types in the cache and in memory, and a
// prompt. It reports how many times as long each takes, the median of the ratios of the turns.
func BenchmarkScoreMods(b *testing.B) {
	const heads, dim = 12, 64
	slopes := make([]float64, heads)
	for h := range slopes {
		slopes[h] = math.Exp2(-8 * float64(h+1) / heads)
	}
	for _, kv := range []tensor.Dtype{tensor.Float64, tensor.Float32, la.Float16, la.BFloat16} {
		for _, n := range [][2]int{{1, 1024}, {1, 16384}, {8, 1024}, {8, 16384}, {512, 512}} {
			b.Run(fmt.Sprintf("%v/q%dn%d", kv, n[0], n[1]), func(b *testing.B) {
				dt := tensor.Float32
				if kv == tensor.Float64 {
					dt = kv
				}
				q := random(dt, 1, heads, n[0], dim)
				plain := la.Args{
					Q: q, K: random(kv, 1, heads, n[1], dim), V: random(kv, 1, heads, n[1], dim),
					Out: tensor.New(tensor.Of(dt), tensor.WithShape(q.Shape()...)),
				}
				biased, sinks, tree := plain, plain, plain
				biased.Bias, sinks.Sinks = random(dt, 1, heads, n[0], n[1]), random(dt, heads)
				tree.Parents = [][]int{make([]int, n[0])}
				for i := range n[0] { // a binary tree
					tree.Parents[0][i] = (i+1)/2 - 1
				}
				type change struct {
					name string
					args la.Args
					opts []la.Option
				}
				changes := []change{
					{"plain", plain, nil}, {"again", plain, nil}, {"alibi", plain, []la.Option{la.WithALiBi(slopes)}}, {"bias", biased, nil},
					{"cap", plain, []la.Option{la.WithSoftCap(30)}}, {"sinks", sinks, nil}, {"tree", tree, nil},
				}
				if n[0] > 64 {
					changes = changes[:len(changes)-1]
				}
				times := make([][]float64, len(changes)) // of each, the ratios
				for b.Loop() {
					least := 0.0
					for i, c := range changes {
						opts := append([]la.Option{la.WithCausal()}, c.opts...)
						runs := max(1, 1<<22/(n[0]*n[1]*heads))
						begin := time.Now()
						for range runs {
							if err := la.Attend(c.args, opts...); err != nil {
								b.Fatal(err)
							}
						}
						took := time.Since(begin).Seconds()
						if i == 0 {
							least = took
						}
						times[i] = append(times[i], took/least)
					}
				}
				for i, c := range changes[1:] {
					slices.Sort(times[i+1])
					b.ReportMetric(times[i+1][len(times[i+1])/2], "x/"+c.name)
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkWindow is a query of each head that sees the last 1024 of 65536 keys, beside one that has no others, in turn:
// how many times as long it takes, the median of the ratios of the turns.
func BenchmarkWindow(b *testing.B) {
	const heads, kvHeads, dim, window = 32, 8, 128, 1024
	for _, kv := range []tensor.Dtype{tensor.Float32, la.Float16} {
		b.Run(fmt.Sprint(kv), func(b *testing.B) {
			q := random(tensor.Float32, 1, heads, 1, dim)
			args := func(keys int) la.Args {
				return la.Args{
					Q: q, K: random(kv, 1, kvHeads, keys, dim), V: random(kv, 1, kvHeads, keys, dim),
					Out: tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(q.Shape()...)),
				}
			}
			calls := [2]la.Args{args(window), args(64 * window)}
			var ratios []float64
			for b.Loop() {
				var took [2]time.Duration
				for i, a := range calls {
					begin := time.Now()
					for range 50 {
						if err := la.Attend(a, la.WithCausal(), la.WithWindow(window)); err != nil {
							b.Fatal(err)
						}
					}
					took[i] = time.Since(begin)
				}
				ratios = append(ratios, took[1].Seconds()/took[0].Seconds())
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "x/window")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkGPUStep is a decode step of 12 layers, one token of each sequence:
// Set, the nodes, and the wait for the GPU. With operands of the host each layer
// waits by itself; with operands on the GPU they are queued. It reports the time
// of a layer. Layers are called as a machine would, without one: what Gorgonia
// takes is not in it.
func BenchmarkGPUStep(b *testing.B) {
	gpu := devicetest.Open(b)
	const layers = 12
	for _, ctx := range []int{1 << 10, 1 << 14, 1 << 17} {
		for _, batch := range []int{1, 8} {
			if ctx*batch > 1<<18 {
				continue
			}
			cache := graphtest.NewCache(b, la.CacheConfig{
				Layers: layers, KVHeads: 8, HeadDim: 128, DType: la.Float16, PageSize: 64, Pages: batch * (ctx/64 + 1), Device: gpu,
			})
			la.ZeroPages(cache)
			for _, there := range []bool{false, true} {
				b.Run(fmt.Sprintf("ctx=%d/batch=%d/there=%v", ctx, batch, there), func(b *testing.B) {
					benchmarkStep(b, cache, gpu, batch, ctx, there)
				})
			}
			closeCache(b, cache)
		}
	}
}

func benchmarkStep(b *testing.B, cache *la.Cache, gpu *device.GPU, batch, ctx int, there bool) {
	const heads = 32
	cfg := cache.Config()
	step, err := cache.NewStep(batch)
	if err != nil {
		b.Fatal(err)
	}
	g := G.NewGraph()
	var in []G.Value
	var nodes [3]*G.Node
	for i, width := range []int{heads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim} {
		x := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(batch, width))
		nodes[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(batch, width), G.WithName(fmt.Sprint("x", i)))
		in = append(in, x)
		if there {
			in[i] = graphtest.Upload(b, gpu, x)
		}
	}
	var ops []G.Op
	for l := range cfg.Layers {
		n, err := la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(l), la.WithCausal())
		if err != nil {
			b.Fatal(err)
		}
		ops = append(ops, n.Op())
	}
	appends := growContexts(b, cache, batch, ctx)
	b.ReportAllocs()
	for b.Loop() {
		if err := step.Set(appends); err != nil {
			b.Fatal(err)
		}
		for _, op := range ops {
			if _, err := op.Do(in...); err != nil {
				b.Fatal(err)
			}
		}
		if err := gpu.Synchronize(); err != nil {
			b.Fatal(err)
		}
		if err := step.Rollback(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*cfg.Layers), "ns/layer")
	for _, a := range appends {
		if err := a.Seq.Release(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkGPUsScale is attention of a decode step, a token of each sequence, with the heads, or, of a KV head, the context
// on one GPU and on more, in turn: recorded, and queued layer by layer. A run has layers of
// 1 GB of keys and values together, or 8, so that they come from memory. It reports
// microseconds of a layer on each number of GPUs and how many times as fast as one they are;
// give it -test.benchtime 1x.
func BenchmarkGPUsScale(b *testing.B) {
	list, err := device.List()
	if err != nil {
		b.Skip(err)
	}
	var counts []int
	for n := 1; n <= len(list); n *= 2 {
		counts = append(counts, n)
	}
	for _, s := range []scaleShape{
		{1, 64, 8, 128, 64}, // what forking and joining costs
		{6, 48, 48, 64, 65536}, {1, 64, 8, 128, 131072}, {4, 64, 8, 128, 131072},
		{4, 64, 64, 64, 1 << 10}, {4, 64, 64, 64, 1 << 14}, {4, 64, 64, 64, 1 << 17},
		{4, 128, 128, 64, 1 << 14}, {4, 256, 256, 64, 1 << 14}, {4, 256, 256, 64, 1 << 16},
		{1, 8, 1, 64, 64}, // by context: what merging costs, too
		{1, 1, 1, 64, 1 << 20}, {1, 8, 1, 64, 1 << 20}, {16, 32, 1, 128, 1 << 16},
		{1, 1, 1, 64, 1 << 19}, {16, 32, 1, 128, 1 << 15}, // halves of these: what no two GPUs are faster than
	} {
		b.Run(fmt.Sprintf("b%d/heads=%d:%d/dim=%d/ctx=%d", s.batch, s.heads, s.kvHeads, s.dim, s.ctx), func(b *testing.B) { s.measure(b, counts) })
	}
}

// scaleShape is the shape of attention of a decode step.
type scaleShape struct{ batch, heads, kvHeads, dim, ctx int }

func (s *scaleShape) measure(b *testing.B, counts []int) {
	var layers []*scaleLayers
	for _, n := range counts {
		layers = append(layers, s.open(b, n))
	}
	ways := []struct {
		name string
		run  func(*scaleLayers) error
	}{{"us", func(r *scaleLayers) error { return r.recording.Replay() }}, {"us-queued", (*scaleLayers).queue}}
	for _, way := range ways {
		best := make([]float64, len(layers))
		for range 9 {
			for i, r := range layers {
				t := r.time(b, way.run)
				if best[i] == 0 || t < best[i] {
					best[i] = t
				}
			}
		}
		for i, t := range best {
			b.ReportMetric(t, fmt.Sprintf("%s@%d", way.name, counts[i]))
			if i > 0 {
				b.ReportMetric(best[0]/t, fmt.Sprintf("x-%s@%d", way.name, counts[i]))
			}
		}
	}
}

// scaleLayers is layers on some GPUs.
type scaleLayers struct {
	gpu       *device.GPU
	ops       []G.Op
	in        []G.Value
	recording *device.Recording
}

func (s *scaleShape) open(b *testing.B, gpus int) *scaleLayers {
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	r := &scaleLayers{gpu: devicetest.OpenSome(b, gpus)}
	const page = 64
	layers := min(8, max(1, 1<<30/(4*s.batch*s.kvHeads*s.dim*s.ctx)))
	cache := graphtest.NewCache(b, la.CacheConfig{Layers: layers, KVHeads: s.kvHeads, HeadDim: s.dim, DType: la.Float16, PageSize: page, Pages: max(s.batch*(s.ctx/page+1), gpus), Device: r.gpu})
	block := make([]byte, 16<<20)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < len(block); i += 2 { // halves below 2
		block[i], block[i+1] = byte(rng.Uint32()), byte(rng.Uint32())&0xbf
	}
	must(la.FillPages(cache, block))
	step, err := cache.NewStep(s.batch)
	must(err)
	g := G.NewGraph()
	var nodes [3]*G.Node
	for i, width := range []int{s.heads * s.dim, s.kvHeads * s.dim, s.kvHeads * s.dim} {
		nodes[i] = G.NewMatrix(g, la.Float16, G.WithShape(s.batch, width), G.WithName(fmt.Sprint("x", i)))
		upload := r.gpu.Upload
		if gpus > 1 && s.kvHeads < gpus { // by context, apart
			upload = r.gpu.UploadReplicated
		}
		x, err := upload(random(la.Float16, s.batch, width))
		must(err)
		r.in = append(r.in, x)
	}
	for l := range layers {
		n, err := la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(l), la.WithCausal())
		must(err)
		r.ops = append(r.ops, n.Op())
	}
	must(step.Set(growContexts(b, cache, s.batch, s.ctx)))
	must(r.queue())
	r.recording, err = r.gpu.Record(r.queue)
	must(err)
	b.Cleanup(func() {
		for _, err := range []error{r.recording.Close(), step.Rollback(), cache.Close()} {
			if err != nil {
				b.Error(err)
			}
		}
	})
	return r
}

func (r *scaleLayers) queue() error {
	for _, op := range r.ops {
		if _, err := op.Do(r.in...); err != nil {
			return err
		}
	}
	return nil
}

// time is the microseconds of a layer, over 20 ms or more.
func (r *scaleLayers) time(b *testing.B, run func(*scaleLayers) error) float64 {
	for n := 4; ; n *= 2 {
		if err := r.gpu.Synchronize(); err != nil {
			b.Fatal(err)
		}
		begin := time.Now()
		for range n {
			if err := run(r); err != nil {
				b.Fatal(err)
			}
		}
		if err := r.gpu.Synchronize(); err != nil {
			b.Fatal(err)
		}
		if t := time.Since(begin); t > 20*time.Millisecond {
			return float64(t.Nanoseconds()) / 1e3 / float64(n*len(r.ops))
		}
	}
}

// growContexts makes sequences of ctx-1 tokens, of whatever lies in their pages,
// and the appends of one token to each.
func growContexts(b *testing.B, cache *la.Cache, batch, ctx int) (appends []la.Append) {
	for range batch {
		seq, err := cache.NewSequence()
		if err != nil {
			b.Fatal(err)
		}
		la.Lengthen(seq, ctx-1)
		appends = append(appends, la.Append{Seq: seq, Tokens: 1})
	}
	return appends
}

// BenchmarkGPUPrefill is attention of whole prompts, 32 heads and 16384 tokens in all, in
// TFLOP/s: 4*Nq*Nk*d a head and sequence, half of it where causal.
func BenchmarkGPUPrefill(b *testing.B) {
	gpu := devicetest.Open(b)
	const heads, tokens = 32, 1 << 14
	for _, dim := range []int{64, 128} {
		for _, causal := range []bool{true, false} {
			for _, batch := range []int{16, 4, 1} {
				n := tokens / batch
				b.Run(fmt.Sprintf("d=%d/causal=%v/%dx%d", dim, causal, batch, n), func(b *testing.B) {
					rng := reftest.Rand(b)
					var x [4]*device.Tensor
					for i := range x {
						numbers := make([]float64, tokens*heads*dim)
						for j := range numbers {
							numbers[j] = rng.NormFloat64()
						}
						x[i] = graphtest.Upload(b, gpu, graphtest.TensorOf(la.Float16, numbers, batch, heads, n, dim))
					}
					var opts []la.Option
					work := 4 * float64(heads) * float64(tokens) * float64(n) * float64(dim)
					if causal {
						opts, work = append(opts, la.WithCausal()), work/2
					}
					const each = 10
					for b.Loop() {
						for range each {
							if err := la.Attend(la.Args{Q: x[0], K: x[1], V: x[2], Out: x[3]}, opts...); err != nil {
								b.Fatal(err)
							}
						}
						if err := gpu.Synchronize(); err != nil {
							b.Fatal(err)
						}
					}
					b.ReportMetric(each*work*float64(b.N)/b.Elapsed().Seconds()/1e12, "TFLOP/s")
					for _, t := range x {
						if err := t.Free(); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

// BenchmarkFuse runs graphs as they were written and as Fuse made them, and
// measures Fuse itself on a graph of 48 layers.
func BenchmarkFuse(b *testing.B) {
	for _, c := range []struct {
		name          string
		queries, keys int
		causal        bool
	}{
		{"decode 1024", 1, 1024, false},
		{"prefill 128", 128, 128, true},
		{"prefill 512", 512, 512, true},
	} {
		w := graphtest.NewWriter(b, rand.New(rand.NewPCG(1, 2)), tensor.Float32)
		x := w.Stack(1, c.queries, c.keys, c.causal)
		f, err := rewrite.Fuse(x)
		if err != nil || len(f.Matches) != 1 {
			b.Fatal(f, err)
		}
		for name, g := range map[string]*G.ExprGraph{"written": w.G, "fused": f.Graph} {
			b.Run(c.name+"/"+name, func(b *testing.B) {
				vm := G.NewTapeMachine(g)
				defer vm.Close()
				b.ReportAllocs()
				for b.Loop() {
					graphtest.Again(b, vm)
				}
			})
		}
	}
	w := graphtest.NewWriter(b, rand.New(rand.NewPCG(1, 2)), tensor.Float32)
	x := w.Stack(48, 8, 8, true)
	b.Run("rewrite.Fuse", func(b *testing.B) {
		for b.Loop() {
			if f, err := rewrite.Fuse(x); err != nil || len(f.Matches) != 48 {
				b.Fatal(f, err)
			}
		}
	})
}
