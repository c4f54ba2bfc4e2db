package reftest

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
)

// Activated is f of v.
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

// MostSlope is more than the slope of any activation anywhere.
const MostSlope = 1.13

// Slope is the derivative of f at v.
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

// GELU is v times the probability that a normal variable is below v. Its slope is never above 1.13.
func GELU(v float64) float64 { return v / 2 * math.Erfc(-v/math.Sqrt2) }

// GELUSlope is the derivative of GELU.
func GELUSlope(v float64) float64 {
	return math.Erfc(-v/math.Sqrt2)/2 + v*math.Exp(-v*v/2)/math.Sqrt(2*math.Pi)
}
