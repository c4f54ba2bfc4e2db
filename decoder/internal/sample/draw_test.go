package sample

import (
	"math"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// TestDraw: draw chooses what one pass over all weights chooses, also if the last parts have no weight.
func TestDraw(t *testing.T) {
	rng := reftest.Rand(t)
	m := new(memory)
	for range 300 {
		logits := make([]float32, 1+rng.IntN(5*drawPart))
		size := math.Exp(4 * rng.Float64())
		for i := range logits {
			logits[i] = float32(size * rng.NormFloat64())
		}
		for i := len(logits) - rng.IntN(len(logits)); i < len(logits); i++ {
			logits[i] = float32(math.Inf(-1))
		}
		w := newWeights(logits[largest(logits)], 0.5+rng.Float64())
		for _, u := range []float64{0, rng.Float64(), rng.Float64(), math.Nextafter(1, 0)} {
			want, _ := w.pick(0, logits, w.sum(logits)*u)
			if got := m.draw(w, logits, u); got != want {
				t.Fatalf("%d logits, %v: token %d, want %d", len(logits), u, got, want)
			}
		}
	}
	// Rounding leaves the sum at most x: the last token with a weight.
	logits := make([]float32, 3*drawPart)
	for i := range logits[drawPart:] {
		logits[drawPart+i] = float32(math.Inf(-1))
	}
	if got := m.draw(newWeights(0, 1), logits, 1); got != drawPart-1 {
		t.Errorf("token %d, want %d", got, drawPart-1)
	}
}
