package reftest

import (
	"math"

	"gorgonia.org/leanattention/internal/half"
)

// Format is a floating-point format.
type Format uint8

// Float64 is the zero value. In a Precision it means "no rounding beyond that of the arithmetic".
const (
	Float64 Format = iota
	Float32
	Float16
	BFloat16
)

// String returns the format's name.
func (f Format) String() string {
	return [...]string{"float64", "float32", "float16", "bfloat16"}[f]
}

// Unit returns the unit roundoff u: rounding x to nearest has an error of at most u*|x|, if x is in the
// format's normal range.
func (f Format) Unit() float64 {
	return math.Ldexp(1, -[...]int{53, 24, 11, 8}[f])
}

// Tiny returns the smallest normal number of the format. Below it, rounding to nearest has an error of at
// most Unit*Tiny, and arithmetic that flushes to zero an error of at most Tiny.
func (f Format) Tiny() float64 {
	return math.Ldexp(1, -[...]int{1022, 126, 14, 126}[f])
}

// Largest returns the largest finite number of the format.
func (f Format) Largest() float64 {
	return [...]float64{math.MaxFloat64, math.MaxFloat32, 65504, 0x1.fep127}[f]
}

// Round returns the number of the format that is nearest to x, with ties to even.
func (f Format) Round(x float64) float64 {
	switch f {
	case Float32:
		return float64(float32(x))
	case Float16:
		if y := roundBits(x, 53-11); math.Abs(x) >= 0x1p-14 && math.Abs(y) <= 65504 {
			return y
		}
		return float64(half.FromFloat64(x).Float32())
	case BFloat16:
		if y := roundBits(x, 53-8); math.Abs(x) >= 0x1p-126 && math.Abs(y) <= 0x1.fep127 {
			return y
		}
		return float64(half.BFromFloat64(x).Float32())
	}
	return x
}

// roundBits rounds off n bits of x's fraction, with ties to even. The result is that of a format in its range of normal numbers.
func roundBits(x float64, n uint) float64 {
	b := math.Float64bits(x)
	return math.Float64frombits((b + 1<<(n-1) - 1 + b>>n&1) &^ (1<<n - 1))
}
