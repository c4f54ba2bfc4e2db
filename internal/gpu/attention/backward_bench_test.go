package attention

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// BenchmarkGPUBackwardScores compares gradients with options, and attention with dropout, to plain causal gradients: the median of 15
// runs. of-plain is the time relative to that of plain gradients.
func BenchmarkGPUBackwardScores(b *testing.B) {
	m := realGPU(b)
	for _, tokens := range []int{1024, 4096, 16384} {
		for _, dim := range []int{64, 128} {
			b.Run(fmt.Sprintf("%dx%d/d%d", max(1, 16384/tokens/4), tokens, dim), func(b *testing.B) {
				const heads = 16
				g := attn.Gradient{Batch: max(1, 16384/tokens/4), Heads: heads, KVHeads: heads, Queries: tokens, Keys: tokens, Dim: dim, ValueDim: dim, Scale: .1, Mask: attn.Mask{Causal: true}}
				o := m.benchmarkOperands(b, &g)
				var plain time.Duration
				for _, c := range []struct {
					name    string
					set     func(g *attn.Gradient)
					forward bool
				}{
					{"plain", func(*attn.Gradient) {}, false},
					{"window that hides one key", func(g *attn.Gradient) { g.Window = tokens - 1 }, false},
					{"window of a quarter", func(g *attn.Gradient) { g.Window, g.SinkTokens = tokens/4, 4 }, false},
					{"cap", func(g *attn.Gradient) { g.Cap = 30 }, false},
					{"ALiBi", func(g *attn.Gradient) { g.Slopes = attn.NewSlopes(slices.Repeat([]float64{.25}, heads)) }, false},
					{"bias", func(g *attn.Gradient) {
						g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: tokens, Keys: tokens}
					}, false},
					{"bias and its gradient", func(g *attn.Gradient) {
						g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: tokens, Keys: tokens, Scale: 2}
					}, false},
					{"sinks", func(g *attn.Gradient) { g.Sinks = true }, false},
					{"dropout", func(g *attn.Gradient) { g.Dropout = .1 }, false},
					{"forward, dropout", func(g *attn.Gradient) { g.Dropout = .1 }, true},
				} {
					b.Run(c.name, func(b *testing.B) {
						s, mine := g, o
						c.set(&s)
						w, err := m.engine.NewBackward(&s, attn.BFloat16)
						noError(b, err)
						if n := s.Bias.Size(); n > 0 {
							mine.Bias = gpu.Memory{DType: attn.BFloat16, Len: n}
							m.Poison(b, &mine.Bias)
							if s.Bias.Scale != 0 {
								mine.DBias = gpu.Memory{DType: attn.BFloat16, Len: n}
								m.Poison(b, &mine.DBias)
							}
						}
						if s.Score.Sinks {
							mine.Sinks = m.Put(b, make([]byte, heads*4), attn.Float32)
							mine.DSinks = m.Put(b, make([]byte, heads*4), attn.Float32)
						}
						workspace := make([]byte, w.Bytes())
						copy(workspace, w.Table())
						there := m.Put(b, workspace, attn.Float16)
						mine.Workspace = gpu.Bytes{Buffer: there.Buffer, Offset: there.Offset}
						run := func() error { return w.Run(m.Stream, &mine) }
						if c.forward {
							run = func() error {
								return w.Forward(m.Stream, &DropoutOperands{Q: o.Q, K: o.K, V: o.V, Out: o.DQ, LSE: o.DLSE, Workspace: mine.Workspace, Seed: mine.Seed})
							}
						}
						var times []time.Duration
						for range 15 {
							begin := time.Now()
							noError(b, run())
							m.Settle(b)
							times = append(times, time.Since(begin))
						}
						slices.Sort(times)
						if plain == 0 {
							plain = times[7]
						}
						for range b.N {
						}
						b.ReportMetric(float64(times[7].Microseconds()), "us")
						b.ReportMetric(float64(times[7])/float64(plain), "of-plain")
						for _, x := range []*gpu.Memory{&mine.Bias, &mine.DBias, &mine.Sinks, &mine.DSinks, &there} {
							if x.Buffer != nil {
								noError(b, x.Buffer.Close())
							}
						}
					})
				}
				for _, x := range []*gpu.Memory{&o.Q, &o.K, &o.V, &o.Out, &o.LSE, &o.DOut, &o.DLSE, &o.DQ, &o.DK, &o.DV} {
					noError(b, x.Buffer.Close())
				}
			})
		}
	}
}

// benchmarkOperands returns operands of small numbers.
func (m *machine) benchmarkOperands(b *testing.B, g *attn.Gradient) (o BackwardOperands) {
	n := attn.Product(g.Batch, g.Heads, g.Queries, g.Dim)
	memory := make([]byte, n*2)
	for i := range n {
		enginetest.Put(memory, i, attn.BFloat16, float64(i*7919%1021)/1021-.5)
	}
	for _, x := range []*gpu.Memory{&o.Q, &o.K, &o.V, &o.Out, &o.DOut, &o.DQ, &o.DK, &o.DV} {
		*x = m.Put(b, memory, attn.BFloat16)
	}
	logs := make([]byte, n/g.Dim*4)
	for i := range n / g.Dim {
		enginetest.Put(logs, i, attn.Float32, 8)
	}
	o.LSE, o.DLSE, o.Seed = m.Put(b, logs, attn.Float32), m.Put(b, logs, attn.Float32), 3
	return o
}
