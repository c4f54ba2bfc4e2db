package attn

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Rotary is how a rotary embedding turns heads, as engines take it. The zero Rotary is none.
//
// In a problem it turns queries, and new keys on their way to where keys are kept, by [Sequence.Position]. It is none of the
// attention to what is kept: keys there are turned.
type Rotary struct {
	HeadDim     int
	First       int      // the first element that is turned
	Interleaved bool     // pair i is elements 2i and 2i+1; else i and i + the number of pairs
	Factor      float64  // that cosines and sines are multiplied by
	Turns       Turnings // of each pair
}

// RotaryOf returns the rotary embedding of heads of dim elements whose pairs turn by w radians a position. last says that the last
// elements of a head are turned, and not the first ones.
func RotaryOf(dim int, w []float64, factor float64, interleaved, last bool) Rotary {
	r := Rotary{HeadDim: dim, Interleaved: interleaved, Factor: factor, Turns: TurningsOf(w)}
	if last {
		r.First = dim - 2*len(w)
	}
	return r
}

// Back returns the rotation back, with the same factor.
func (r Rotary) Back() Rotary {
	var b []byte
	for i := range r.Turns.Len() {
		b = binary.LittleEndian.AppendUint64(b, uint64(-r.Turns.Of(i)))
	}
	r.Turns = Turnings(b)
	return r
}

// Check reports what is wrong with r for heads of so many elements.
func (r *Rotary) Check(op string, dim int) error {
	if *r == (Rotary{}) {
		return nil
	}
	if n := r.Turns.Len(); r.HeadDim != dim || n < 1 || r.First < 0 || r.First > dim-2*n || len(r.Turns) != 8*n {
		return Errorf(op, ErrShape, "%d pairs of heads of %d elements are turned, and there are heads of %d", n, r.HeadDim, dim)
	}
	if math.IsNaN(r.Factor) || math.IsInf(r.Factor, 0) {
		return Errorf(op, ErrShape, "a rotary embedding with the factor %v", r.Factor)
	}
	return nil
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

// Turnings are those of all pairs, in a form that == compares: a Problem is looked up by it.
type Turnings string

// TurningsOf returns those of numbers of radians.
func TurningsOf(radians []float64) Turnings {
	b := make([]byte, 0, 8*len(radians))
	for _, x := range radians {
		b = binary.LittleEndian.AppendUint64(b, uint64(TurningOf(x)))
	}
	return Turnings(b)
}

// Len returns how many there are.
func (t Turnings) Len() int { return len(t) / 8 }

// String returns all of them as text.
func (t Turnings) String() string {
	all := make([]Turning, t.Len())
	for pair := range all {
		all[pair] = t.Of(pair)
	}
	return fmt.Sprintf("%x", all)
}

// Of returns that of a pair.
func (t Turnings) Of(pair int) (turn Turning) {
	for i := range 8 {
		turn |= Turning(t[8*pair+i]) << (8 * i)
	}
	return turn
}
