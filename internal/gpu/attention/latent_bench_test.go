package attention

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
)

// BenchmarkGPULatent measures decode attention to keys of 576 numbers whose first 512 are the values, beside a kernel that
// only reads as many bytes, in turn: the medians of 15 graphs of 8 launches. The launches read different keys, more than the
// L2 cache holds.
func BenchmarkGPULatent(b *testing.B) {
	m := realGPU(b)
	if !m.engine.hasEpilogue() {
		b.Skip("kernels for values in keys are those of 9.0")
	}
	for _, c := range []struct{ batch, queries, heads, keys, page int }{
		{16, 1, 16, 8192, 64}, {64, 1, 16, 8192, 64}, {1, 1, 16, 131072, 64}, {16, 1, 64, 32768, 64}, {64, 1, 16, 8192, 16}, {64, 1, 32, 8192, 64},
		{64, 2, 16, 8192, 64}, {64, 4, 16, 8192, 64}, {1, 1, 16, 8192, 64}, {1, 1, 128, 8192, 64}, {1, 1, 128, 65536, 64}, {16, 1, 128, 8192, 64},
		{64, 1, 128, 4096, 64}, {128, 1, 128, 4096, 64},
	} {
		b.Run(fmt.Sprintf("b%d_q%d_h%d_n%d_p%d", c.batch, c.queries, c.heads, c.keys, c.page), func(b *testing.B) {
			const d, v, launches = 576, 512, 8
			kv := attn.BFloat16
			g := attn.Problem{
				Heads: c.heads, KVHeads: 1, Dim: d, ValueDim: v, PageTokens: c.page, Scale: 0.07, Mask: attn.Mask{Causal: true},
				Pages: latentPages(kv, d, v).Packed(1, c.page),
				Query: attn.Strides{Row: c.heads * d, Head: d}, Out: attn.Strides{Row: c.heads * v, Head: v}, LSE: attn.Strides{Row: c.heads, Head: 1},
			}
			rng := rand.New(rand.NewPCG(1, 2))
			memory := func(n int, dtype attn.DType) gpu.Memory {
				x := m.noise(b, rng, n, dtype)
				b.Cleanup(func() { noError(b, x.Buffer.Close()) })
				return x
			}
			pages := attn.Ceil(c.keys, c.page)
			bytes := c.batch * c.keys * d * 2
			layers := min(max(1, attn.Ceil(300<<20, bytes)), launches)
			var all []gpu.Memory
			for range layers {
				all = append(all, memory(c.batch*pages*c.page*d, kv))
			}
			var seqs []attn.Sequence
			order := rng.Perm(c.batch * pages)
			for i := range c.batch {
				s := attn.Sequence{Row: i * c.queries, Queries: c.queries, Keys: c.keys}
				for j := range pages {
					s.Pages = append(s.Pages, int32(order[i*pages+j]))
				}
				seqs = append(seqs, s)
			}
			rows := c.batch * c.queries
			q, out, sink := memory(rows*c.heads*d, kv), memory(rows*c.heads*v, kv), memory(2048, kv)
			plan := m.engine.NewPlan()
			noError(b, plan.Build(g, seqs, rows))
			noError(b, plan.Upload(m.Stream))
			b.Cleanup(func() { noError(b, plan.Close()) })
			var reads []func() error
			for i := range all {
				reads = append(reads, m.Ceiling(b, all[i], sink))
			}
			runs := []func() time.Duration{
				m.timed(b, launches, func(i int) error {
					return plan.Run(m.Stream, &Operands{Q: q, Out: out, Pages: attn.InPlanes(all[i%layers])})
				}),
				m.timed(b, launches, func(i int) error { return reads[i%layers]() }),
			}
			took := make([][]time.Duration, len(runs))
			for range 15 {
				for i, run := range runs {
					took[i] = append(took[i], run())
				}
			}
			median := func(i int) float64 { slices.Sort(took[i]); return float64(took[i][7].Nanoseconds()) }
			mine, ceiling := median(0), median(1)
			fmt.Printf("%-40s %8.2f us %5.0f GB/s %5.0f TFLOP/s, ceiling %8.2f us: %.3f\n", b.Name()[len("BenchmarkGPULatent/"):], mine/1e3, float64(bytes)/mine, float64(rows*c.heads*c.keys*(d+v)*2)/mine/1e3, ceiling/1e3, ceiling/mine)
			b.ReportMetric(0, "ns/op")
		})
	}
}
