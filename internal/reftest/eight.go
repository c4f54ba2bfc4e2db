package reftest

import "math"

// Eight is a type of 8 bits. Elements of a row have a common scale: an element x with scale s stands for x*s.
type Eight uint8

const (
	NoEight Eight = iota
	E4M3          // floating point, with 4 bits of exponent and 3 bits of fraction
	Int8          // integers
)

// Most returns the largest number of e.
func (e Eight) Most() float64 { return [...]float64{1, 448, 127}[e] }

// Round returns the number of e that is nearest to x, with ties to even, and ±Most beyond these.
func (e Eight) Round(x float64) float64 {
	if x != x {
		return x
	}
	x = math.Max(-e.Most(), math.Min(e.Most(), x))
	unit := 1.0
	if e == E4M3 && x != 0 {
		_, exponent := math.Frexp(x) // |x| is 2^exponent * [1/2, 1)
		unit = math.Ldexp(1, max(exponent-1, -6)-3)
	}
	return math.RoundToEven(x/unit) * unit
}

// Scale returns the scale of a row: the float32 that brings its largest element to Most, at least 2^-126. It is NaN if an element is.
func (e Eight) Scale(row []float64) float64 {
	largest := 0.0
	for _, x := range row {
		if x != x {
			return x
		}
		largest = math.Max(largest, math.Abs(x))
	}
	return math.Max(float64(float32(math.Min(largest, math.MaxFloat32)/e.Most())), 0x1p-126)
}

// PageScale returns the scale of a page whose first token has a row: its largest element that is a number becomes a 16th of Most, or a
// quarter for Int8. It is 1 for zeros.
func (e Eight) PageScale(row []float64) float64 {
	headroom := map[Eight]float64{E4M3: 16, Int8: 4}[e]
	largest := 0.0
	for _, x := range row {
		if x == x {
			largest = math.Max(largest, math.Abs(x))
		}
	}
	if largest == 0 {
		return 1
	}
	return math.Max(float64(float32(math.Min(largest, math.MaxFloat32)/(e.Most()/headroom))), 0x1p-126)
}

// Store replaces the elements of a row by what a cache returns of them: elements of e times the scale. acc is the arithmetic of the
// division and of the product.
func (e Eight) Store(row []float64, scale float64, acc Format) {
	for i, x := range row {
		row[i] = acc.Round(e.Round(acc.Round(x/scale)) * scale)
	}
}
