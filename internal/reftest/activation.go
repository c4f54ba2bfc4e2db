package reftest

import "math"

// GELU is v times the probability that a normal variable is below v. Its slope is never above 1.13.
func GELU(v float64) float64 { return v / 2 * math.Erfc(-v/math.Sqrt2) }

// GELUSlope is the derivative of GELU.
func GELUSlope(v float64) float64 {
	return math.Erfc(-v/math.Sqrt2)/2 + v*math.Exp(-v*v/2)/math.Sqrt(2*math.Pi)
}
