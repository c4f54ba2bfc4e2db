package attn

import (
	"math"
	"math/big"
	"testing"

	"pgregory.net/rapid"
)

// An angle is that of a product without rounding, but for what the turn itself was rounded by.
func TestTurning(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		radians := rapid.Float64Range(0, 20).Draw(t, "radians")
		p := rapid.IntRange(math.MinInt32, math.MaxInt32).Draw(t, "position")
		turns := big.NewFloat(radians / (2 * math.Pi))
		turns.SetPrec(200).Mul(turns, big.NewFloat(float64(p)))
		whole, _ := turns.Int64()
		part, _ := turns.Sub(turns, new(big.Float).SetInt64(whole)).Float64()
		got := TurningOf(radians).Angle(p)
		if got < -math.Pi || got > math.Pi {
			t.Fatalf("%v", got)
		}
		off := math.Remainder(got-2*math.Pi*part, 2*math.Pi)
		if math.Abs(off) > 1e-15+math.Abs(float64(p))*0x1p-61 {
			t.Fatalf("%v radians at position %d: %v, want %v, off by %v", radians, p, got, 2*math.Pi*part, off)
		}
	})
}
