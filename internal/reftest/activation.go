package reftest

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
)

// Activated returns f(v).
func Activated(f attn.Activation, v float64) float64 {
	switch f {
	case attn.ReLU:
		return max(v, 0)
	case attn.GELU:
		return GELU(v)
	case attn.GELUTanh:
		return v / 2 * (1 + math.Tanh(tanhOf*(v+tanhCube*v*v*v)))
	case attn.SiLU:
		return v / (1 + math.Exp(-v))
	}
	return v
}

const (
	tanhOf   = math.Sqrt2 / math.SqrtPi
	tanhCube = 0.044715
)

// MostSlope is an upper bound of the slope of every activation.
const MostSlope = 1.13

// Slope returns the derivative of f at v.
func Slope(f attn.Activation, v float64) float64 {
	switch f {
	case attn.ReLU:
		if v > 0 {
			return 1
		}
		return 0
	case attn.GELU:
		return GELUSlope(v)
	case attn.GELUTanh:
		t := math.Tanh(tanhOf * (v + tanhCube*v*v*v))
		return (1+t)/2 + v/2*(1-t*t)*tanhOf*(1+3*tanhCube*v*v)
	case attn.SiLU:
		s := 1 / (1 + math.Exp(-v))
		return s + v*s*(1-s)
	}
	return 1
}

// GELU returns v times the probability that a standard normal variable is below v. The slope of GELU is at
// most 1.13.
func GELU(v float64) float64 { return v / 2 * math.Erfc(-v/math.Sqrt2) }

// GELUSlope returns the derivative of GELU at v.
func GELUSlope(v float64) float64 {
	return math.Erfc(-v/math.Sqrt2)/2 + v*math.Exp(-v*v/2)/math.Sqrt(2*math.Pi)
}
