package leanattention_test

import (
	"fmt"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/gputest"
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
	gpu := gputest.Open(b)
	const layers = 12
	for _, ctx := range []int{1 << 10, 1 << 14, 1 << 17} {
		for _, batch := range []int{1, 8} {
			if ctx*batch > 1<<18 {
				continue
			}
			cache := newCache(b, la.CacheConfig{
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

func benchmarkStep(b *testing.B, cache *la.Cache, gpu *la.GPU, batch, ctx int, there bool) {
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
			in[i] = upload(b, gpu, x)
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
	gpu := gputest.Open(b)
	const heads, tokens = 32, 1 << 14
	for _, dim := range []int{64, 128} {
		for _, causal := range []bool{true, false} {
			for _, batch := range []int{16, 4, 1} {
				n := tokens / batch
				b.Run(fmt.Sprintf("d=%d/causal=%v/%dx%d", dim, causal, batch, n), func(b *testing.B) {
					rng := reftest.Rand(b)
					var x [4]*la.DeviceTensor
					for i := range x {
						numbers := make([]float64, tokens*heads*dim)
						for j := range numbers {
							numbers[j] = rng.NormFloat64()
						}
						x[i] = upload(b, gpu, tensorOf(la.Float16, numbers, batch, heads, n, dim))
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
