package expression

import (
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

// TestRandomExpressions compares random expressions with float64.
func TestRandomExpressions(t *testing.T) {
	rng := reftest.Rand(t)
	for range cputest.Cases(t, 300, 5000) {
		compareExpression[float64](t, rng)
		compareExpression[float32](t, rng)
	}
}

func compareExpression[F cpu.Real](t *testing.T, rng *rand.Rand) {
	t.Helper()
	p, err := variant.New(reftest.RandomVariant(rng, false, 1+rng.IntN(3)))
	if err != nil {
		return // too many operations
	}
	tensors := reftest.RandomTensors(rng, p)
	var v Run[F]
	v.Prepare(p, p.Slope)
	at := variant.At{Sequence: rng.IntN(4), Tensors: tensors}
	v.Open(cputest.TensorsOf[F](tensors), at.Sequence)
	n := 1 + rng.IntN(Most)
	keys := make([]int32, n)
	v.Keys(n, func(dst []int32) {
		for i := range dst {
			keys[i] = rng.Int32N(100)
			dst[i] = keys[i]
		}
	})
	u := cputest.AccOf[F]().Unit()
	for range 2 {
		at.Query, at.Head = rng.IntN(100), rng.IntN(8)
		scores, before := make([]F, 1+rng.IntN(n)), make([]F, n)
		for i := range scores {
			scores[i] = F(2 * rng.NormFloat64())
		}
		copy(before, scores)
		v.Row(at.Query, at.Head, scores, true)
		slopes := v.Floats(p.Slope, len(scores))
		for i, got := range scores {
			at.Score, at.Key = float64(before[i])*lean.Ln4, int(keys[i])
			values, errors, seen := reftest.VariantAt(p, &at, u*math.Abs(at.Score), u)
			if !seen {
				if !math.IsInf(float64(got), -1) {
					t.Fatalf("%v at %+v: %v, want -Inf: the key is hidden", p, at, got)
				}
				continue
			}
			want, off := values[p.Score]*lean.Log4E, errors[p.Score]*lean.Log4E
			if d := math.Abs(float64(got) - want); d > off+8*u*math.Abs(want)+1e-30 {
				t.Fatalf("%v at %+v: %v, want %v within %v", p, at, got, want, off)
			}
			if d := math.Abs(float64(slopes[i]) - values[p.Slope]); d > errors[p.Slope]+8*u*math.Abs(values[p.Slope])+1e-30 {
				t.Fatalf("%v at %+v: the slope is %v, want %v within %v", p, at, slopes[i], values[p.Slope], errors[p.Slope])
			}
		}
	}
}
