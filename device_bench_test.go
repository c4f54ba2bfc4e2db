package leanattention_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

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
