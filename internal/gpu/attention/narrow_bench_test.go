//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/half"
)

// BenchmarkGPUNarrow measures decode attention to keys and values of 8 and of 4 bits beside that to float16, in turn: the medians of 15
// graphs of 8 launches. The launches read different keys, more than the L2 cache holds.
func BenchmarkGPUNarrow(b *testing.B) {
	m := realGPU(b)
	noise := map[attn.DType][]byte{}
	for _, c := range []struct{ batch, heads, kv, keys, dim, page, window int }{
		{16, 32, 8, 8192, 128, 16, 0}, {16, 32, 8, 8192, 128, 64, 0}, {4, 32, 32, 8192, 128, 16, 0}, {64, 64, 8, 4096, 128, 16, 0}, {6, 48, 48, 16384, 64, 16, 0}, {6, 48, 48, 16384, 64, 64, 0},
		{8, 32, 8, 8192, 128, 16, 0}, {4, 32, 8, 8192, 128, 16, 0}, {2, 32, 8, 8192, 128, 16, 0}, {1, 48, 48, 16384, 64, 16, 0}, {1, 32, 8, 131072, 128, 16, 0}, {2, 32, 32, 8192, 128, 64, 0}, {16, 64, 8, 4096, 128, 16, 0}, {16, 64, 4, 8192, 128, 16, 0},
		// A window of all keys hides none: what kernels with masks cost. Heads of 256 have no others.
		{16, 32, 8, 8192, 128, 16, 8192}, {6, 48, 48, 16384, 64, 16, 16384}, {16, 32, 8, 16384, 128, 16, 4096}, {16, 16, 8, 8192, 256, 16, 0},
	} {
		b.Run(fmt.Sprintf("b%d_h%d/%d_n%d_d%d_p%d_w%d", c.batch, c.heads, c.kv, c.keys, c.dim, c.page, c.window), func(b *testing.B) {
			const launches = 8
			rng := rand.New(rand.NewPCG(1, 2))
			pages := attn.Ceil(c.keys, c.page)
			var seqs []attn.Sequence
			order := rng.Perm(c.batch * pages)
			for i := range c.batch {
				s := attn.Sequence{Row: i, Queries: 1, Keys: c.keys}
				for j := range pages {
					s.Pages = append(s.Pages, int32(order[i*pages+j]))
				}
				seqs = append(seqs, s)
			}
			keep := func(x gpu.Memory) gpu.Memory {
				b.Cleanup(func() { noError(b, x.Buffer.Close()) })
				return x
			}
			q, out := keep(m.noise(b, rng, c.batch*c.heads*c.dim, attn.Float16)), keep(m.noise(b, rng, c.batch*c.heads*c.dim, attn.Float16))
			elements := c.batch * pages * c.page * c.kv * c.dim
			var runs []func() time.Duration
			var bytes []int
			contender := func(kv attn.DType, kind attn.Scales) {
				g := attn.Problem{Heads: c.heads, KVHeads: c.kv, Dim: c.dim, ValueDim: c.dim, Scale: 0.09, Mask: attn.Mask{Causal: true, Window: c.window}, PageTokens: c.page,
					Query: attn.PackedRows(c.heads, c.dim), Out: attn.PackedRows(c.heads, c.dim), LSE: attn.PackedRows(c.heads, 1)}
				g.Pages = attn.Separate(kv, c.dim, c.dim, attn.PageStrides{}, attn.PageStrides{}).Packed(c.kv, c.page)
				g.Pages.Planes[0].Scales, g.Pages.Planes[1].Scales = kind, kind
				g.Pages.Planes[0].Mixed = kv == attn.Q4
				n := c.batch * c.keys * c.kv * tokenBytes(&g)
				if c.window > 0 {
					n = c.batch * min(c.keys, c.window) * c.kv * tokenBytes(&g)
				}
				layers := min(attn.Ceil(300<<20, n)+1, launches)
				var all []Pages
				for range layers {
					var pages Pages
					for i := range 2 {
						if kv == attn.Float16 {
							pages[i].Data = keep(m.noise(b, rng, elements, kv))
							continue
						}
						if kv == attn.Q4 {
							pages[i].Data = keep(m.bytes(b, rng, elements/half.Q4Columns, kv, noise))
							continue
						}
						pages[i].Data = keep(m.bytes(b, rng, elements, kv, noise))
						scales := make([]byte, 4*g.Pages.Planes[i].ScaleLen(c.batch*attn.Ceil(c.keys, c.page), c.kv, c.page))
						for j := range len(scales) / 4 {
							enginetest.Put(scales, j, attn.Float32, 0.01+0.01*rng.Float64())
						}
						pages[i].Scales = keep(m.Put(b, scales, attn.Float32))
					}
					all = append(all, pages)
				}
				plan := m.engine.NewPlan()
				noError(b, plan.Build(g, seqs, c.batch))
				noError(b, plan.Upload(m.Stream))
				b.Cleanup(func() { noError(b, plan.Close()) })
				bytes = append(bytes, n)
				runs = append(runs, m.timed(b, launches, func(i int) error {
					return plan.Run(m.Stream, &Operands{Q: q, Out: out, Pages: all[i%layers]})
				}))
			}
			contender(attn.Float16, attn.NoScales)
			for _, kv := range gpu.Eights {
				for _, kind := range []attn.Scales{attn.ScalesByToken, attn.ScalesByHead} {
					contender(kv, kind)
				}
			}
			contender(attn.Q4, attn.NoScales)
			took := make([][]time.Duration, len(runs))
			for range 15 {
				for i, run := range runs {
					took[i] = append(took[i], run())
				}
			}
			line := fmt.Sprintf("%-30s", b.Name()[len("BenchmarkGPUNarrow/"):])
			first := 0.0
			for i := range runs {
				slices.Sort(took[i])
				ns := float64(took[i][7].Nanoseconds())
				if i == 0 {
					first = ns
				}
				line += fmt.Sprintf(" | %7.2f us %4.0f GB/s %.3f", ns/1e3, float64(bytes[i])/ns, first/ns)
			}
			fmt.Println(line)
			b.ReportMetric(0, "ns/op")
		})
	}
}

// bytes takes memory for elements of 8 or 4 bits, which repeat after a while.
func (m *machine) bytes(b *testing.B, rng *rand.Rand, n int, kv attn.DType, noise map[attn.DType][]byte) gpu.Memory {
	x := noise[kv]
	if x == nil {
		x = make([]byte, 18<<18)
		for i := range x {
			if kv == attn.Q4 {
				if x[i] = byte(rng.Uint32()); i%18 == 16 {
					x[i] = 0
				} else if i%18 == 17 {
					x[i] = 0x3c // a scale of 2^-7
				}
				continue
			}
			if x[i] = bitsOf(kv, 30*rng.NormFloat64()); kv == attn.E4M3 {
				x[i] = bitsOf(kv, 112*rng.NormFloat64())
			}
		}
		noise[kv] = x
	}
	size := n * kv.Size()
	buffer, err := m.Dev.NewBuffer(int64(size))
	noError(b, err)
	for at := 0; at < size; at += len(x) {
		noError(b, buffer.Upload(int64(at), x[:min(len(x), size-at)]))
	}
	return gpu.Memory{Buffer: buffer, DType: kv, Len: n}
}
