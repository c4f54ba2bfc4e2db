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

// filled is memory of random numbers that repeat: what a GPU's clock does depends on them.
func (m *machine) filled(b *testing.B, rng *rand.Rand, d attn.DType, n int, scale float64) gpu.Memory {
	const most = 1 << 20
	block := make([]byte, min(n, most)*d.Size())
	for i := range len(block) / d.Size() {
		enginetest.Put(block, i, d, rng.NormFloat64()*scale)
	}
	to, err := m.Dev.NewBuffer(int64(n * d.Size()))
	noError(b, err)
	for at := 0; at < n*d.Size(); at += len(block) {
		noError(b, to.Upload(int64(at), block[:min(len(block), n*d.Size()-at)]))
	}
	return gpu.Memory{Buffer: to, DType: d, Len: n}
}

// median is the median time of what a graph of some launches takes.
func (m *machine) median(b *testing.B, runs int, queue func() error) time.Duration {
	g, err := m.Stream.Capture(queue)
	noError(b, err)
	begin, err := m.Dev.NewEvent(true)
	noError(b, err)
	end, err := m.Dev.NewEvent(true)
	noError(b, err)
	all := make([]time.Duration, 0, runs)
	for range runs {
		noError(b, m.Stream.Record(begin))
		noError(b, m.Stream.Launch(g))
		noError(b, m.Stream.Record(end))
		noError(b, m.Stream.Synchronize())
		took, err := end.Since(begin)
		noError(b, err)
		all = append(all, took)
	}
	noError(b, g.Close())
	slices.Sort(all)
	return all[runs/2]
}

// BenchmarkGPUGEMM is linear layers of a prompt's rows: each kernel that takes them, with x
// in two parts and rounded. TFLOPS counts a product once, however many parts x has, and the
// time of the launch that makes the operands, which us/operands is by itself.
func BenchmarkGPUGEMM(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	kinds := []struct {
		name       string
		persistent []persistentTile
		slower     float64
	}{{"best", persistentTiles[:], 1}, {"256x2", persistentTiles[:1], math.Inf(1)}, {"256", persistentTiles[1:2], math.Inf(1)},
		{"128x2", persistentTiles[2:3], math.Inf(1)}, {"128", persistentTiles[3:], math.Inf(1)}, {"tiled", nil, 1}, {"skinny", nil, math.Inf(1)}}
	defer func() { d.leftOut = nil }()
	for _, s := range []struct{ rows, in, out, parts int }{
		{2048, 4096, 4096, 1}, {2048, 4096, 16384, 1}, {2048, 16384, 4096, 1}, {2048, 4096, 4096, 3},
		{2048, 2048, 2048, 1}, {2048, 2048, 8192, 1}, {2048, 8192, 2048, 1}, {2048, 2048, 2048, 3},
		{8192, 4096, 4096, 1}, {512, 4096, 4096, 1}, {512, 4096, 16384, 1}, {512, 2048, 2048, 1}, {512, 2048, 8192, 1}, {256, 4096, 4096, 1},
		{64, 4096, 4096, 3}, {64, 4096, 4096, 1}, {64, 4096, 16384, 1}, {64, 16384, 4096, 1}, {128, 4096, 4096, 3}, {128, 4096, 4096, 1}, {128, 4096, 16384, 1}, {128, 16384, 4096, 1},
	} {
		const layers = 4
		x := m.filled(b, rng, attn.Float32, s.rows*s.in, 1)
		scratch, residual, bias := m.empty(b, s.rows*(s.in+1)), m.filled(b, rng, attn.Float32, s.rows*s.out, 1), m.filled(b, rng, attn.Float32, s.out, 1)
		memory := []gpu.Memory{x, scratch, residual, bias}
		var ops [layers]Linear
		for i := range ops {
			ops[i] = Linear{Rows: s.rows, In: s.in, X: x, Early: true, Scratch: scratch}
			if s.parts == 1 && s.out <= s.in { // as in a decoder
				ops[i].Residual = residual
			}
			for range s.parts {
				p := LinearPart{W: m.filled(b, rng, attn.Float16, s.in*s.out, 1/math.Sqrt(float64(s.in))), B: bias, Y: m.empty(b, s.rows*s.out), Out: s.out}
				ops[i].Parts = append(ops[i].Parts, p)
				memory = append(memory, p.W, p.Y)
			}
		}
		for _, kind := range kinds {
			for _, round := range []bool{false, true} {
				if kind.name == "skinny" && s.rows > 128 {
					continue
				}
				d.leftOut = []int{32, 64}
				if kind.name == "skinny" {
					d.leftOut = nil
				}
				b.Run(fmt.Sprintf("%dx%dx%dx%d/%s/%s", s.rows, s.in, s.out, s.parts, kind.name, map[bool]string{false: "two_parts", true: "rounded"}[round]), func(b *testing.B) {
					d.persistent, d.slower = kind.persistent, kind.slower
					each := func(f func(o *Linear) error) time.Duration {
						return m.median(b, 15, func() error {
							for i := range ops {
								ops[i].RoundX = round
								if err := f(&ops[i]); err != nil {
									return err
								}
							}
							return nil
						}) / layers
					}
					whole := each(func(o *Linear) error { return d.Linear(m.Stream, o) })
					operands := each(func(o *Linear) error {
						l, err := d.configureGEMM(o)
						noError(b, err)
						return d.queueOperands(m.Stream, o, o.Parts[0].W.DType, &l)
					})
					b.ReportMetric(2*float64(s.rows*s.in)*float64(s.out*s.parts)/whole.Seconds()/1e12, "TFLOPS")
					b.ReportMetric(whole.Seconds()*1e6, "us")
					b.ReportMetric(operands.Seconds()*1e6, "us/operands")
					b.ReportMetric(0, "ns/op")
				})
			}
		}
		for i := range memory {
			noError(b, memory[i].Buffer.Close())
		}
	}
	d.persistent, d.slower = persistentTiles[:], 1
}
