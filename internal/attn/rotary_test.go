package attn

import (
	"errors"
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

// Turnings hold what they were made of, and are equal where that is.
func TestTurnings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := rapid.SliceOfN(rapid.Float64Range(0, 4), 1, 128).Draw(t, "radians")
		turns := TurningsOf(w)
		if turns.Len() != len(w) || turns != TurningsOf(w) {
			t.Fatalf("%d turnings of %d", turns.Len(), len(w))
		}
		for i, x := range w {
			if turns.Of(i) != TurningOf(x) {
				t.Fatalf("turning %d is %d, want %d", i, turns.Of(i), TurningOf(x))
			}
		}
		r := Rotary{HeadDim: 2 * len(w), Factor: 1, Turns: turns}
		if err := r.Check("check", 2*len(w)); err != nil {
			t.Fatal(err)
		}
		for what, spoil := range map[string]func(r *Rotary){
			"heads":  func(r *Rotary) { r.HeadDim++ },
			"none":   func(r *Rotary) { r.Turns = "" },
			"more":   func(r *Rotary) { r.Turns += TurningsOf([]float64{1}) },
			"part":   func(r *Rotary) { r.Turns = r.Turns[1:] },
			"factor": func(r *Rotary) { r.Factor = math.Inf(1) },
		} {
			bad := r
			if spoil(&bad); !errors.Is(bad.Check("check", 2*len(w)), ErrShape) {
				t.Errorf("%s: %+v is right", what, bad)
			}
		}
	})
}
