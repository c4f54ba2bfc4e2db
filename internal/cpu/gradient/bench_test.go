package gradient

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
)

// BenchmarkBackward is a backward pass of 12 heads. Gop/s counts the products of its five matrix products,
// 2*(3*Dim+2*ValueDim) operations for each query and key that it sees.
func BenchmarkBackward(b *testing.B) {
	for _, dim := range []int{64, 128} {
		for _, n := range []int{128, 1024, 2048} {
			for _, causal := range []bool{false, true} {
				b.Run(fmt.Sprintf("n%d/d%d/causal=%t/float32", n, dim, causal), func(b *testing.B) { benchmarkBackward[float32](b, n, dim, causal, 0) })
				b.Run(fmt.Sprintf("n%d/d%d/causal=%t/float64", n, dim, causal), func(b *testing.B) { benchmarkBackward[float64](b, n, dim, causal, 0) })
			}
		}
	}
}

// BenchmarkBackwardDropout is a backward pass with dropout and without.
func BenchmarkBackwardDropout(b *testing.B) {
	for _, p := range []float64{0, 0.1, 0.5} {
		b.Run(fmt.Sprintf("float32/dropout=%v", p), func(b *testing.B) { benchmarkBackward[float32](b, 1024, 64, true, p) })
		b.Run(fmt.Sprintf("float64/dropout=%v", p), func(b *testing.B) { benchmarkBackward[float64](b, 1024, 64, true, p) })
	}
}

func benchmarkBackward[F cpu.Real](b *testing.B, n, dim int, causal bool, dropout float64) {
	const heads = 12
	s := Shape{
		Batch: 1, Heads: heads, KVHeads: heads, Queries: n, Keys: n, Dim: dim, ValueDim: dim, Scale: 0.125, Mask: attn.Mask{Causal: causal},
		Score: attn.Score{Dropout: dropout},
	}
	rows := func(n int) []F {
		x := make([]F, heads*n)
		for i := range x {
			x[i] = F(rand.NormFloat64())
		}
		return x
	}
	o := Operands[F]{
		Q: rows(n * dim), K: rows(n * dim), V: rows(n * dim), Out: rows(n * dim), DOut: rows(n * dim), LSE: make([]F, heads*n),
		DQ: rows(n * dim), DK: rows(n * dim), DV: rows(n * dim),

		Seed: 1,
	}
	for i := range o.LSE {
		o.LSE[i] = 10
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := Run(cpu.Default(), &s, &o); err != nil {
			b.Fatal(err)
		}
	}
	pairs := float64(n) * float64(n)
	if causal {
		pairs = float64(n) * float64(n+1) / 2
	}
	b.ReportMetric(heads*pairs*2*5*float64(dim)*float64(b.N)/b.Elapsed().Seconds()/1e9, "Gop/s")
}
