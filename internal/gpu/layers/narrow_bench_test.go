package layers

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// BenchmarkGPUNarrow is linear layers with weights of 16, 8 and 4 bits: four matrices in turn, so that no weight is in the L2 cache. GB/s are
// of the bytes of the weights, and GB/s/read those of a kernel that only reads as many bytes.
func BenchmarkGPUNarrow(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, s := range []struct{ in, out int }{{8192, 8192}, {4096, 14336}, {28672, 4096}, {16384, 4096}} {
		const layers = 4
		most := 64
		x, residual := m.filled(b, rng, attn.Float32, most*s.in, 1), m.filled(b, rng, attn.Float32, most*s.out, 1)
		y := m.empty(b, most*s.out)
		sink := m.Put(b, make([]byte, 4096), attn.Float32)
		for _, f := range []weight.Format{weight.Float16, weight.Int8, weight.E4M3, weight.Int4_128, weight.Int4_32, weight.Q4_1} {
			var ops [layers]Linear
			memory := []gpu.Memory{}
			var bytes int
			for i := range ops {
				ops[i] = Linear{In: s.in, X: x, Early: true, RoundX: true}
				p := LinearPart{Y: y, Out: s.out}
				if f == weight.Float16 {
					p.W = m.filled(b, rng, attn.Float16, s.in*s.out, 1/math.Sqrt(float64(s.in)))
					bytes = 2 * s.in * s.out
				} else {
					w := weight.Matrix{Format: f, Len: s.in * s.out}
					packed, err := weight.Packing(&w, s.in)
					noError(b, err)
					p.W, p.Packed = m.filled(b, rng, attn.Float32, packed.Bytes/4, 1), &packed
					bytes = packed.Bytes
				}
				ops[i].Parts = []LinearPart{p}
				memory = append(memory, p.W)
			}
			read := m.median(b, 11, func() error {
				for i := range ops {
					if err := m.Ceiling(b, memory[i], sink)(); err != nil {
						return err
					}
				}
				return nil
			}) / layers
			for _, rows := range []int{1, 4, 16, 64} {
				b.Run(fmt.Sprintf("%dx%d/%v/%d", s.in, s.out, f, rows), func(b *testing.B) {
					var scratch gpu.Memory
					for i := range ops {
						ops[i].Rows = rows
						n, err := d.Scratch(&ops[i])
						noError(b, err)
						if scratch.Len < n {
							scratch = m.empty(b, n)
						}
						ops[i].Scratch = scratch
					}
					took := m.median(b, 15, func() error {
						for i := range ops {
							if err := d.Linear(m.Stream, &ops[i]); err != nil {
								return err
							}
						}
						return nil
					}) / layers
					b.ReportMetric(took.Seconds()*1e6, "us")
					b.ReportMetric(float64(bytes)/took.Seconds()/1e9, "GB/s")
					b.ReportMetric(float64(bytes)/read.Seconds()/1e9, "GB/s/read")
					b.ReportMetric(0, "ns/op")
					if scratch.Buffer != nil {
						noError(b, scratch.Buffer.Close())
					}
				})
			}
			for i := range memory {
				noError(b, memory[i].Buffer.Close())
			}
		}
		for _, x := range []gpu.Memory{x, residual, y, sink} {
			noError(b, x.Buffer.Close())
		}
	}
}
