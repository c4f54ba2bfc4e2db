package layers

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// BenchmarkGPUProducts is a linear layer of float32 and its gradients with products of bfloat16, and a layer with weights of bfloat16 in
// mixed precision, also as a gated unit, by the kernels of hopper.go and by the others. TFLOP/s count a multiplication and an addition for each product.
func BenchmarkGPUProducts(b *testing.B) {
	m, d := realDecoder(b)
	defer func(least int) { d.leastHopper = least }(d.leastHopper)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, s := range []struct{ rows, in, out int }{
		{8192, 768, 2304}, {8192, 768, 768}, {8192, 768, 3072}, {8192, 3072, 768},
		{8192, 4096, 6144}, {8192, 4096, 4096}, {8192, 4096, 14336}, {8192, 14336, 4096},
		{144, 4096, 4096}, {192, 14336, 4096}, {192, 4096, 28672}, {256, 14336, 4096}, {320, 4096, 6144}, {320, 14336, 4096}, {384, 4096, 28672},
		{512, 4096, 4096}, {512, 4096, 14336}, {512, 14336, 4096}, {2048, 4096, 4096}, {2048, 4096, 14336}, {2048, 14336, 4096},
	} {
		x, w, dy := m.filled(b, rng, attn.Float32, s.rows*s.in, 1), m.filled(b, rng, attn.Float32, s.out*s.in, 1), m.filled(b, rng, attn.Float32, s.rows*s.out, 1)
		half := m.filled(b, rng, attn.BFloat16, s.out*s.in, 1)
		y, dx, dw := m.filled(b, rng, attn.Float32, s.rows*s.out, 1), m.filled(b, rng, attn.Float32, s.rows*s.in, 1), m.filled(b, rng, attn.Float32, s.out*s.in, 1)
		layer := Linear{Rows: s.rows, In: s.in, X: x, Parts: []LinearPart{{W: w, Y: y, Out: s.out}}, Products: attn.BFloat16}
		mixed := Linear{Rows: s.rows, In: s.in, X: x, Parts: []LinearPart{{W: half, Y: y, Out: s.out}}, RoundX: true, Early: true}
		gated := mixed // half of the columns for each part
		gated.Gate, gated.Activation = true, attn.SiLU
		gate, up := half, half
		up.Offset, up.Len, gate.Len = half.Offset+int64(half.Len), half.Len/2, half.Len/2
		gated.Parts = []LinearPart{{W: gate, Y: y, Out: s.out / 2}, {W: up, Out: s.out / 2}}
		toX := Product{M: s.rows, N: s.in, K: s.out, A: dy, B: w, C: dx, Products: attn.BFloat16}
		toW := Product{M: s.out, N: s.in, K: s.rows, Transposed: true, A: dy, B: x, C: dw, Products: attn.BFloat16}
		// Below 8192 rows, each layer of a run has weights of its own, which are not in the L2 cache.
		copies := 1
		if s.rows < 8192 {
			copies = 300_000_000/(2*s.in*s.out) + 1
		}
		bits := enginetest.Read(b, &half)
		weights, err := m.Dev.NewBuffer(int64(copies * len(bits)))
		noError(b, err)
		for i := range copies {
			noError(b, weights.Upload(int64(i*len(bits)), bits))
		}
		each := func(o Linear) func() error {
			return func() error {
				l := o
				for i := range copies {
					l.Parts = slices.Clone(o.Parts)
					for j := range l.Parts {
						w := &l.Parts[j].W
						w.Buffer, w.Offset = weights, int64(i*len(bits))+w.Offset-half.Offset
					}
					if err := d.Linear(m.Stream, &l); err != nil {
						return err
					}
				}
				return nil
			}
		}
		for _, c := range []struct {
			name  string
			least int
		}{{"before", math.MaxInt}, {"now", leastHopper}} {
			d.leastHopper = c.least
			most := 0
			for _, o := range []*Linear{&layer, &mixed, &gated} {
				n, err := d.Scratch(o)
				noError(b, err)
				most = max(most, n)
			}
			for _, o := range []*Product{&toX, &toW} {
				n, err := d.ProductScratch(o)
				noError(b, err)
				most = max(most, n)
			}
			scratch := m.filled(b, rng, attn.Float32, most, 1) // as others, at a multiple of 256 bytes
			layer.Scratch, mixed.Scratch, gated.Scratch, toX.Scratch, toW.Scratch = scratch, scratch, scratch, scratch, scratch
			for _, p := range []struct {
				name string
				run  func() error
			}{
				{"mixed", each(mixed)},
				{"gated", each(gated)},
				{"layer", func() error { return d.Linear(m.Stream, &layer) }},
				{"dx", func() error { return d.Product(m.Stream, &toX) }},
				{"dw", func() error { return d.Product(m.Stream, &toW) }},
			} {
				if s.rows < 8192 && p.name != "mixed" && p.name != "gated" {
					continue
				}
				b.Run(fmt.Sprintf("%dx%dx%d/%s/%s", s.rows, s.in, s.out, p.name, c.name), func(b *testing.B) {
					took := m.median(b, 7, p.run)
					if p.name == "mixed" || p.name == "gated" {
						took /= time.Duration(copies)
					}
					b.ReportMetric(took.Seconds()*1e6, "us")
					b.ReportMetric(2*float64(s.rows)*float64(s.in)*float64(s.out)/took.Seconds()/1e12, "TFLOP/s")
					b.ReportMetric(0, "ns/op")
				})
			}
			noError(b, scratch.Buffer.Close())
		}
		noError(b, weights.Close())
		for _, x := range []gpu.Memory{x, w, dy, half, y, dx, dw} {
			noError(b, x.Buffer.Close())
		}
	}
}
