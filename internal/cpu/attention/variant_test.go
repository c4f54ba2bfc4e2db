package attention

import (
	"testing"

	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestVariants: each variant of the gallery, with random shapes, layouts, schedules, and other masks and changes of scores.
func TestVariants(t *testing.T) {
	rng := reftest.Rand(t)
	for i, entry := range reftest.Gallery {
		for range cputest.Cases(t, 4, 24) {
			s := reftest.RandomShape(rng)
			if rng.IntN(3) == 0 {
				s.Queries, s.Keys = []int{1 + rng.IntN(200)}, []int{rng.IntN(300)}
			}
			if rng.IntN(3) == 0 {
				s.Causal, s.SoftCap = rng.IntN(2) == 0, []float64{0, 30}[rng.IntN(2)]
				s.Window = []int{0, 1, 17, 100}[rng.IntN(4)]
			}
			verifySomehow(t, rng, s.Varied(rng, i), 0, 5, 16, 64, 100)
			if t.Failed() {
				t.Fatal(entry.Name)
			}
		}
	}
}
