package attention

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

// putTensors copies the variant's tensors to the machine, and makes room for their gradients.
func (b *backwardCase) putTensors(t testing.TB, m *machine) {
	for i := range b.Tensors {
		x := &b.Tensors[i]
		to, grad := Tensor{Shape: x.Shape}, gpu.Memory{}
		var shape []int
		if x.F64 == nil {
			to.Memory = m.Put(t, gpu.BytesOf(x.I32), attn.Float32)
		} else {
			data := make([]byte, len(x.F64)*b.kv.Size())
			for k, f := range x.F64 {
				enginetest.Put(data, k, b.kv, f)
			}
			to.Memory = m.Put(t, data, b.kv)
			shape, grad = x.Shape, gpu.Memory{DType: b.kv, Len: len(x.F64)}
		}
		b.ops.Tensors, b.ops.DTensors, b.shape.DTensors = append(b.ops.Tensors, to), append(b.ops.DTensors, grad), append(b.shape.DTensors, shape)
	}
}

// checkTensors compares the gradients of the variant's tensors with the reference.
func (b *backwardCase) checkTensors(t testing.TB) {
	t.Helper()
	for i := range b.ops.DTensors {
		x := &b.ops.DTensors[i]
		if x.Len == 0 {
			continue
		}
		memory, got := enginetest.Read(t, x), make([]float64, x.Len)
		for k := range got {
			got[k] = enginetest.Get(memory, k, b.kv)
		}
		if err := reftest.Compare(got, b.want.DTensors[i], b.want.DTensorsBound[i], 1, 1, len(got)); err != nil {
			t.Errorf("%v: the gradient of %s: %v", b, b.Variant.Tensors[i].Name, err)
		}
	}
}

func (b *backwardCase) closeTensors(t testing.TB) {
	for i := range b.ops.Tensors {
		noError(t, b.ops.Tensors[i].Memory.Buffer.Close())
		if d := b.ops.DTensors[i].Buffer; d != nil {
			noError(t, d.Close())
		}
	}
}

// testBackwardWritten runs n variants, of the gallery and random ones in turn, with options that go with variants.
func testBackwardWritten(t *testing.T, m *machine, n, work, longest int) {
	nvrtc.ForTest(t)
	rng := reftest.Rand(t)
	turn := rng.IntN(len(reftest.Gallery))
	for i := range n {
		s := backwardShape(rng, work, longest)
		for _, option := range backwardOptions {
			if option.name != "dropout" && option.name != "sink tokens" && rng.IntN(6) == 0 {
				s = option.set(rng, s)
			}
		}
		for k, x := range s.Bias.X {
			if math.IsInf(x, -1) { // a variant may show what a bias hides
				s.Bias.X[k] = 0
			}
		}
		if i%3 < 2 {
			turn++
			s = s.Varied(rng, turn%len(reftest.Gallery))
		} else {
			p, err := variant.New(reftest.RandomVariant(rng, false, 1+rng.IntN(2)))
			if err != nil {
				continue // too many operations
			}
			s.Variant, s.Tensors = p, reftest.RandomTensors(rng, p)
		}
		if s.Variant.Unnormalised {
			s.Sinks = nil
		}
		m.testBackwardCase(t, rng, s, gpu.Halves[rng.IntN(2)])
	}
}

// testBackwardWrittenBits runs a variant with tensors many times.
func testBackwardWrittenBits(t *testing.T, m *machine, runs, tokens int) {
	nvrtc.ForTest(t)
	rng := reftest.Rand(t)
	p, err := variant.New(variant.Source{
		Score: "3*tanh(score*gain[head]/3) + table[min(abs(query-key), 31)]", Visible: "key <= query || key < 9",
		Tensors: []variant.Declared{{Name: "gain", Rank: 1}, {Name: "table", Rank: 1}},
	})
	noError(t, err)
	types := rng.Perm(2)
	if m.Few(t) {
		types = types[:1]
	}
	for _, i := range types {
		kv := gpu.Halves[i]
		s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 64 << i, ValueDim: 64 << i, Queries: []int{tokens, tokens / 3}, Keys: []int{tokens, tokens - 1}, Variant: p}
		s.Tensors = []variant.Tensor{{Shape: []int{2}, F64: []float64{1, -.5}}, {Shape: []int{32}, F64: make([]float64, 32)}}
		for k := range s.Tensors[1].F64 {
			s.Tensors[1].F64[k] = rng.NormFloat64()
		}
		m.testBackwardRuns(t, rng, s, kv, runs)
	}
}

func TestGPUBackwardWritten(t *testing.T) {
	m := realGPU(t)
	testBackwardWritten(t, m, enginetest.OrShort(60, 5), enginetest.OrShort(6e6, 1e6), enginetest.OrShort(1500, 300))
	testBackwardWrittenBits(t, m, enginetest.OrShort(100, 3), enginetest.OrShort(2000, 300))
}

// BenchmarkGPUBackwardWritten compares gradients with variants to gradients with the built-in options that they replace: medians of 15 runs.
// of-plain is the time relative to that of plain gradients.
func BenchmarkGPUBackwardWritten(b *testing.B) {
	m := realGPU(b)
	nvrtc.ForTest(b)
	const heads = 16
	tensor := func(name string, score string, rank int) variant.Source {
		return variant.Source{Score: score, Tensors: []variant.Declared{{Name: name, Rank: rank}}}
	}
	for _, tokens := range []int{1024, 4096, 16384} {
		for _, dim := range []int{64, 128} {
			b.Run(fmt.Sprintf("%dx%d/d%d", max(1, 4096/tokens), tokens, dim), func(b *testing.B) {
				g := attn.Gradient{Batch: max(1, 4096/tokens), Heads: heads, KVHeads: heads, Queries: tokens, Keys: tokens, Dim: dim, ValueDim: dim, Scale: .1, Mask: attn.Mask{Causal: true}}
				o := m.benchmarkOperands(b, &g)
				var plain time.Duration
				for _, c := range []struct {
					name    string
					set     func(g *attn.Gradient)
					variant variant.Source
					shape   []int // of a tensor whose gradient is wanted
				}{
					{name: "plain"},
					{name: "cap", set: func(g *attn.Gradient) { g.Cap = 30 }},
					{name: "ALiBi", set: func(g *attn.Gradient) { g.Slopes = attn.NewSlopes(slices.Repeat([]float64{.25}, heads)) }},
					{name: "written causal", variant: variant.Source{Visible: "key <= query"}},
					{name: "written cap", variant: variant.Source{Score: "cap*tanh(score/cap)", Params: map[string]float64{"cap": 30}}},
					{name: "written ALiBi", variant: tensor("slope", "score + slope[head]*(key-query)", 1)},
					{name: "written dilated", variant: variant.Source{Visible: "(query-key) % 3 == 0"}},
					{name: "sigmoid", variant: variant.Source{Score: "-softplus(-(score - 8))", Unnormalised: true}},
					{name: "gradient of ALiBi", variant: tensor("slope", "score + slope[head]*(key-query)", 1), shape: []int{heads}},
					{name: "gradient of a table", variant: tensor("t", "score + t[min(abs(query-key), 127)]", 1), shape: []int{128}},
					{name: "gradient of a table by head", variant: tensor("t", "score + t[head][abs(query-key)]", 2), shape: []int{heads, tokens}},
					{name: "gradient by key", variant: tensor("t", "score + t[key]", 1), shape: []int{tokens}},
					{name: "gradient by query", variant: tensor("t", "score*t[query]", 1), shape: []int{tokens}},
					{name: "gradient by query and key", variant: tensor("t", "score + t[query + key]", 1), shape: []int{2 * tokens}},
				} {
					b.Run(c.name, func(b *testing.B) {
						s, mine := g, o
						if c.set != nil {
							c.set(&s)
						}
						var buffers []gpu.Memory
						if c.variant.Score+c.variant.Visible != "" {
							p, err := variant.New(c.variant)
							noError(b, err)
							s.Variant = p
							for range p.Tensors {
								shape := c.shape
								if shape == nil {
									shape = []int{heads}
								}
								n := attn.Product(shape...)
								x, grad := Tensor{Memory: m.Put(b, make([]byte, n*2), attn.BFloat16), Shape: shape}, gpu.Memory{}
								buffers = append(buffers, x.Memory)
								if c.shape != nil {
									grad = m.Put(b, make([]byte, n*2), attn.BFloat16)
									buffers, s.DTensors = append(buffers, grad), append(s.DTensors, shape)
								}
								mine.Tensors, mine.DTensors = append(mine.Tensors, x), append(mine.DTensors, grad)
							}
						}
						if s.Variant != nil && s.Variant.Unnormalised {
							mine.DLSE = gpu.Memory{}
						}
						w, err := m.engine.NewBackward(&s, attn.BFloat16)
						noError(b, err)
						workspace := make([]byte, w.Bytes())
						copy(workspace, w.Table())
						there := m.Put(b, workspace, attn.Float16)
						mine.Workspace = gpu.Bytes{Buffer: there.Buffer, Offset: there.Offset}
						var times []time.Duration
						for range 15 {
							begin := time.Now()
							noError(b, w.Run(m.Stream, &mine))
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
						for _, x := range append(buffers, there) {
							noError(b, x.Buffer.Close())
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
