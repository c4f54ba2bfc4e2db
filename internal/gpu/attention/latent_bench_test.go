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
	for _, c := range []latentRun{
		{16, 1, 16, 8192, 64, false}, {64, 1, 16, 8192, 64, false}, {1, 1, 16, 131072, 64, false}, {16, 1, 64, 32768, 64, false}, {64, 1, 16, 8192, 16, false}, {64, 1, 32, 8192, 64, false},
		{64, 2, 16, 8192, 64, false}, {64, 4, 16, 8192, 64, false}, {1, 1, 16, 8192, 64, false}, {1, 1, 128, 8192, 64, false}, {1, 1, 128, 65536, 64, false}, {16, 1, 128, 8192, 64, false},
		{64, 1, 128, 4096, 64, false}, {128, 1, 128, 4096, 64, false},
	} {
		c.measure(b, m, attn.BFloat16, attn.Mask{Causal: true})
	}
}

// BenchmarkGPULatentPart measures the kernel for half of a latent vector in the same way, and the one for whole vectors beside it.
func BenchmarkGPULatentPart(b *testing.B) {
	m := realGPU(b)
	for _, c := range []latentRun{{8, 1, 128, 32768, 64, true}, {8, 1, 128, 32768, 64, false}, {1, 1, 128, 262144, 64, true}, {1, 1, 128, 262144, 64, false}, {64, 1, 16, 8192, 64, true}} {
		b.Run(fmt.Sprintf("part_%v", c.part), func(b *testing.B) { c.measure(b, m, attn.BFloat16, attn.Mask{Causal: true}) })
	}
}

// BenchmarkGPULatentAny measures the kernels for all types and masks in the same way. A window that no context fills leaves the other
// kernel out.
func BenchmarkGPULatentAny(b *testing.B) {
	m := realGPU(b)
	for _, kv := range []attn.DType{attn.BFloat16, attn.Float32, attn.E4M3} {
		for _, c := range []latentRun{{64, 1, 16, 8192, 64, false}, {16, 1, 64, 32768, 64, false}, {64, 4, 16, 8192, 64, false}, {1, 1, 128, 65536, 64, false}} {
			b.Run(kv.String(), func(b *testing.B) { c.measure(b, m, kv, attn.Mask{Causal: true, Window: 1 << 30}) })
		}
	}
}

// BenchmarkGPULatentNarrow measures the kernels for latents of E4M3 in the same way.
func BenchmarkGPULatentNarrow(b *testing.B) {
	m := realGPU(b)
	if !m.engine.hasEpilogue() {
		b.Skip("kernels for values in keys are those of 9.0")
	}
	for _, c := range []latentRun{
		{64, 1, 16, 8192, 64, false}, {16, 1, 16, 8192, 64, false}, {1, 1, 16, 131072, 64, false}, {64, 1, 16, 8192, 16, false}, {16, 1, 64, 32768, 64, false}, {64, 2, 16, 8192, 64, false}, {64, 4, 16, 8192, 64, false}, {1, 1, 128, 65536, 64, false}, {64, 1, 128, 4096, 64, false},
	} {
		c.measure(b, m, attn.E4M3, attn.Mask{Causal: true})
	}
}

// latentRun is a shape of BenchmarkGPULatent.
type latentRun struct {
	batch, queries, heads, keys, page int
	part                              bool // half of a latent vector
}

func (c latentRun) measure(b *testing.B, m *machine, kv attn.DType, mask attn.Mask) {
	b.Run(fmt.Sprintf("b%d_q%d_h%d_n%d_p%d", c.batch, c.queries, c.heads, c.keys, c.page), func(b *testing.B) {
		const launches = 8
		d, v := latentDim, latentValue
		if c.part {
			d, v = latentPartDim, latentPartValue
		}
		g := attn.Problem{
			Heads: c.heads, KVHeads: 1, Dim: d, ValueDim: v, PageTokens: c.page, Scale: 0.07, Mask: mask,
			Pages: latentPages(kv, d, v), Query: attn.Strides{Row: c.heads * d, Head: d}, Out: attn.Strides{Row: c.heads * v, Head: v}, LSE: attn.Strides{Row: c.heads, Head: 1},
		}
		operand := kv
		if kv == attn.E4M3 {
			g.Pages, operand = groupedPages(d, v), attn.BFloat16
		}
		g.QueryType = operand
		g.Pages = g.Pages.Packed(1, c.page)
		rng := rand.New(rand.NewPCG(1, 2))
		memory := func(n int, dtype attn.DType) gpu.Memory {
			x := m.noise(b, rng, n, dtype)
			b.Cleanup(func() { noError(b, x.Buffer.Close()) })
			return x
		}
		pages := attn.Ceil(c.keys, c.page)
		tokens := c.batch * pages * c.page
		bytes := c.batch * c.keys * g.Pages.TokenBytes()
		layers := min(max(1, attn.Ceil(300<<20, bytes)), launches)
		var all []Pages
		for range layers {
			var x Pages
			for s := range g.Pages.Slabs {
				n := tokens * s.Row
				if s.DType.Size() > 1 {
					*x.At(s) = memory(n, s.DType)
				} else { // any bits
					of := memory(n/2, operand)
					of.DType, of.Len = s.DType, n
					*x.At(s) = of
				}
			}
			all = append(all, x)
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
		q, out, sink := memory(rows*c.heads*d, operand), memory(rows*c.heads*v, operand), memory(2048, operand)
		plan := m.engine.NewPlan()
		noError(b, plan.Build(g, seqs, rows))
		noError(b, plan.Upload(m.Stream))
		b.Cleanup(func() { noError(b, plan.Close()) })
		var reads []func() error
		for i := range all {
			of := all[i][0].Data
			if kv == attn.E4M3 { // as many bytes in one plane
				of = memory(tokens*g.Pages.TokenBytes()/2, operand)
			}
			reads = append(reads, m.Ceiling(b, of, sink))
		}
		runs := []func() time.Duration{
			m.timed(b, launches, func(i int) error {
				return plan.Run(m.Stream, &Operands{Q: q, Out: out, Pages: all[i%layers]})
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
		fmt.Printf("%-40s %8.2f us %5.0f GB/s %5.0f TFLOP/s, ceiling %8.2f us: %.3f\n", b.Name()[len("BenchmarkGPU"):], mine/1e3, float64(bytes)/mine, float64(rows*c.heads*c.keys*(d+v)*2)/mine/1e3, ceiling/1e3, ceiling/mine)
		b.ReportMetric(0, "ns/op")
	})
}
