package attn

import "math"

// Rotary is how a rotary embedding turns heads, as engines take it.
type Rotary struct {
	HeadDim     int
	Interleaved bool      // pair i is elements 2i and 2i+1; else i and i + the number of pairs
	Factor      float64   // that cosines and sines are multiplied by
	Turns       []Turning // of each pair
}

// Turning is what a pair turns by from one position to the next: so many 2^64th parts of a turn.
// A position times it is how far the pair has turned there, and whole turns are what overflows: nothing
// is rounded before they are left out.
type Turning uint64

// TurningOf is that of a number of radians.
func TurningOf(radians float64) Turning {
	turns := radians / (2 * math.Pi)
	return Turning(math.Ldexp(turns-math.Floor(turns), 64))
}

// Angle is how far a pair has turned at a position, in radians from -pi to pi.
func (t Turning) Angle(position int) float64 {
	return math.Ldexp(float64(int64(uint64(position)*uint64(t))), -63) * math.Pi
}
