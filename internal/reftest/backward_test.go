package reftest

import (
	"math"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
)

// cost is sum(wO * o) + sum(wLSE * lse) of a case.
func cost(c *Case, wO, wLSE []float64) float64 {
	r := c.Reference(Precision{})
	var sum float64
	for i, o := range r.O {
		sum += wO[i] * o
	}
	for i, l := range r.LSE {
		if !math.IsInf(l, -1) {
			sum += wLSE[i] * l
		}
	}
	return sum
}

// TestGradBackward checks the gradients against central differences of the cost.
func TestGradBackward(t *testing.T) {
	rng := Rand(t)
	random := func(sequences, heads, queries, keys int) Bias {
		b := Bias{Sequences: sequences, Heads: heads, Queries: queries, Keys: keys, X: make([]float64, sequences*heads*queries*keys)}
		for i := range b.X {
			b.X[i] = rng.NormFloat64()
		}
		return b
	}
	scaled := func(b Bias, by float64) Bias { b.Scale = by; return b }
	for _, s := range []Shape{
		{Heads: 1, KVHeads: 1, Dim: 3, ValueDim: 2, Queries: []int{1}, Keys: []int{1}},
		{Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 5, Queries: []int{2, 0, 3}, Keys: []int{4, 3, 0}},
		{Heads: 3, KVHeads: 1, Dim: 2, ValueDim: 2, Queries: []int{4, 3}, Keys: []int{2, 7}, Mask: attn.Mask{Causal: true}},
		{Heads: 2, KVHeads: 2, Dim: 4, ValueDim: 3, Queries: []int{3}, Keys: []int{5}, Scale: -0.7},
		{Heads: 2, KVHeads: 2, Dim: 4, ValueDim: 3, Queries: []int{3, 4}, Keys: []int{7, 3}, Mask: attn.Mask{Causal: true, Window: 2}},
		{Heads: 2, KVHeads: 1, Dim: 4, ValueDim: 3, Queries: []int{3}, Keys: []int{5}, SoftCap: 0.8},
		{Heads: 2, KVHeads: 1, Dim: 4, ValueDim: 3, Queries: []int{3}, Keys: []int{7}, Mask: attn.Mask{Window: 4}, SoftCap: 1.5, Slopes: []float64{0.5, -0.3}},
		{Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 3, Queries: []int{3, 2}, Keys: []int{4, 5}, SoftCap: 1.2, Bias: random(2, 4, 3, 5)},
		{Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 3, Queries: []int{3, 2}, Keys: []int{4, 5}, Mask: attn.Mask{Causal: true}, Bias: scaled(random(1, 4, 1, 6), -0.4)},
		{Heads: 4, KVHeads: 1, Dim: 3, ValueDim: 3, Queries: []int{3, 3}, Keys: []int{4, 2}, Bias: random(2, 1, 3, 4)},
		{Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 5, Queries: []int{2, 0, 3}, Keys: []int{9, 3, 0}, Dropout: 0.4, Seed: 3},
		{Heads: 4, KVHeads: 1, Dim: 3, ValueDim: 3, Queries: []int{3, 3}, Keys: []int{4, 2}, Mask: attn.Mask{Causal: true}, SoftCap: 2, Bias: random(2, 1, 3, 4), Dropout: 0.7, Seed: -1},
		{Heads: 2, KVHeads: 1, Dim: 3, ValueDim: 3, Queries: []int{3}, Keys: []int{4}, Sinks: []float64{0.3, -1}},
		{Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 2, Queries: []int{4, 2, 1}, Keys: []int{2, 5, 0}, Mask: attn.Mask{Causal: true, Window: 3},
			SoftCap: 1.2, Slopes: []float64{0.5, 0.1, 0, -0.2}, Bias: random(1, 4, 1, 5), Sinks: []float64{1, -0.5, 2, 0}},
	} {
		c := New(rng, s, Normal, Float64, Float64)
		random := func(n int) []float64 {
			x := make([]float64, n)
			for i := range x {
				x[i] = rng.NormFloat64()
			}
			return x
		}
		wO, wLSE := random(c.QueryRows()*c.Heads*c.ValueDim), random(c.QueryRows()*c.Heads)
		p := Precision{Acc: Float64}
		g := c.Backward(p, c.Reference(p), wO, wLSE)
		for _, x := range []struct {
			name              string
			of, got, gotBound []float64
		}{{"q", c.Q, g.DQ, g.DQBound}, {"k", c.K, g.DK, g.DKBound}, {"v", c.V, g.DV, g.DVBound}, {"bias", c.Bias.X, g.DBias, g.DBiasBound}, {"sinks", c.Sinks, g.DSinks, g.DSinksBound}} {
			for i, old := range x.of {
				const h = 1e-5
				x.of[i] = old + h
				up := cost(c, wO, wLSE)
				x.of[i] = old - h
				down := cost(c, wO, wLSE)
				x.of[i] = old
				if want := (up - down) / (2 * h); math.Abs(x.got[i]-want) > 1e-7*(1+math.Abs(want)) {
					t.Fatalf("%v: d%s[%d] is %v, by differences %v", s, x.name, i, x.got[i], want)
				}
				if b := x.gotBound[i]; !(b >= 0 && b < 1e-10) {
					t.Fatalf("%v: d%s[%d] has the bound %v", s, x.name, i, b)
				}
			}
		}
		// Parts add up: the gradient is linear in dO and dLSE.
		a, b := c.Backward(p, c.Reference(p), wO, nil), c.Backward(p, c.Reference(p), nil, wLSE)
		for i := range g.DK {
			if math.Abs(a.DK[i]+b.DK[i]-g.DK[i]) > 1e-12 {
				t.Fatalf("%v: dk[%d] is %v of dO and %v of dLSE, %v of both", s, i, a.DK[i], b.DK[i], g.DK[i])
			}
		}
	}
}
