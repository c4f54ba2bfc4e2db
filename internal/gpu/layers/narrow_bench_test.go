package layers

import (
	"fmt"
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
		b.Run(fmt.Sprintf("%dx%d", s.in, s.out), func(b *testing.B) {
			for _, f := range []weight.Format{weight.Float16, weight.Int8, weight.E4M3, weight.Int4_128, weight.Int4_32, weight.Q4_1, weight.Q4_K, weight.Q6_K} {
				b.Run(f.String(), func(b *testing.B) { benchmarkNarrow(b, m, d, rng, s.in, s.out, f) })
			}
		})
	}
}

func benchmarkNarrow(b *testing.B, m *machine, d *Engine, rng *rand.Rand, in, out int, f weight.Format) {
	const layers, most = 4, 64
	var ops [layers]Linear
	var weights [layers]gpu.Memory
	x, y, sink := m.filled(b, rng, attn.Float32, most*in, 1), m.empty(b, most*out), m.Put(b, make([]byte, 4096), attn.Float32)
	memory := []gpu.Memory{x, y, sink}
	p := LinearPart{Y: y, Out: out}
	bytes := 2 * in * out
	for i := range ops {
		if f == weight.Float16 {
			p.W = m.filled(b, rng, attn.Float16, in*out, 1)
		} else {
			p.Packed, p.W = m.putPacked(b, rng, f, in, out)
			bytes = p.Packed.Bytes
		}
		ops[i] = Linear{In: in, X: x, Early: true, RoundX: true, Parts: []LinearPart{p}}
		weights[i] = p.W
		memory = append(memory, p.W)
	}
	read := m.median(b, 11, func() error {
		for i := range weights {
			if err := m.Ceiling(b, weights[i], sink)(); err != nil {
				return err
			}
		}
		return nil
	}) / layers
	for _, rows := range []int{1, 4, 16, 64} {
		b.Run(fmt.Sprint(rows), func(b *testing.B) {
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

// BenchmarkGPUNarrowBlock is the matrices of blocks of Llama-3-8B in order.
func BenchmarkGPUNarrowBlock(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	x, sink := m.filled(b, rng, attn.Float32, 64*14336, 1), m.Put(b, make([]byte, 4096), attn.Float32)
	y := m.empty(b, 64*28672)
	for _, f := range []weight.Format{weight.Int8, weight.E4M3, weight.Int4_128} {
		b.Run(f.String(), func(b *testing.B) {
			var ops []Linear
			var bytes int
			for bytes < 400<<20 {
				for _, s := range [][2]int{{4096, 6144}, {4096, 4096}, {4096, 28672}, {14336, 4096}} {
					p, w := m.putPacked(b, rng, f, s[0], s[1])
					ops = append(ops, Linear{In: s[0], X: x, Early: true, RoundX: true, Parts: []LinearPart{{W: w, Y: y, Out: s[1], Packed: p}}})
					bytes += p.Bytes
				}
			}
			read := m.median(b, 11, func() error {
				for i := range ops {
					if err := m.Ceiling(b, ops[i].Parts[0].W, sink)(); err != nil {
						return err
					}
				}
				return nil
			})
			for _, rows := range []int{1, 4, 16, 64} {
				b.Run(fmt.Sprint(rows), func(b *testing.B) {
					n := 1
					for i := range ops {
						ops[i].Rows = rows
						k, err := d.Scratch(&ops[i])
						noError(b, err)
						n = max(n, k)
					}
					scratch := m.empty(b, n)
					for i := range ops {
						ops[i].Scratch = scratch
					}
					took := m.median(b, 11, func() error {
						for i := range ops {
							if err := d.Linear(m.Stream, &ops[i]); err != nil {
								return err
							}
						}
						return nil
					})
					b.ReportMetric(took.Seconds()*1e6*4/float64(len(ops)), "us")
					b.ReportMetric(100*read.Seconds()/took.Seconds(), "%")
					b.ReportMetric(0, "ns/op")
					noError(b, scratch.Buffer.Close())
				})
			}
			for i := range ops {
				noError(b, ops[i].Parts[0].W.Buffer.Close())
			}
		})
	}
}
