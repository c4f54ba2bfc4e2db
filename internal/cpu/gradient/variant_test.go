package gradient

import (
	"math"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestBackwardGradVariants: each variant of the gallery, with random shapes, masks and biases, and the gradients of its
// tensors.
func TestBackwardGradVariants(t *testing.T) {
	rng := reftest.Rand(t)
	for i, entry := range reftest.Gallery {
		for n := range cputest.Cases(t, 2, 6) {
			s := reftest.RandomShape(rng)
			if n%2 == 0 {
				s.Queries, s.Keys = []int{1 + rng.IntN(140), 3}, []int{rng.IntN(150), 20}
			}
			for i := range s.Queries {
				s.Queries[i] = max(s.Queries[0], 1)
			}
			if rng.IntN(3) == 0 {
				s.SoftCap, s.Window = []float64{0, 30}[rng.IntN(2)], []int{0, 1, 17, 100}[rng.IntN(4)]
			}
			if s = s.Varied(rng, i); rng.IntN(2) == 0 {
				s = reftest.RandomBias(rng, s, max(slices.Max(s.Keys), 1))
				for k, x := range s.Bias.X {
					if math.IsInf(x, -1) { // a variant may show what a bias hides
						s.Bias.X[k] = 0
					}
				}
			}
			of := outputs(1 + rng.IntN(3))
			if s.Variant.Unnormalised {
				of = ofOut
			}
			check := verifyBackward[float32]
			if rng.IntN(3) == 0 {
				check = verifyBackward[float64]
			}
			if err := check(rng, s, reftest.Normal, of, 0, rng.IntN(4)); err != nil {
				t.Fatalf("%s: %v", entry.Name, err)
			}
		}
	}
}
