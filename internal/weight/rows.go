package weight

import (
	"math"

	"gorgonia.org/leanattention/internal/half"
)

// LeastQuantisedRows is the least number of rows of x that a layer quantises. For fewer rows, GPUs read weights once, and that takes as long
// whether or not x is quantised.
const LeastQuantisedRows = 65

// MostQuantised is the most elements of a row of x that is quantised: sums of products of INT8 stay within 32 bits.
const MostQuantised = 1 << 16

// QuantisesRows reports whether rows of x can be quantised to the elements of a format.
func QuantisesRows(f Format) bool { return f == Int8 || f == E4M3 }

// QuantiseRow writes a row of x as the numbers of a format that are nearest to x / scale, ties to even, and returns the scale: max |x| / the
// largest number of the format. If all |x| are less than 2^-80, scale and numbers are 0. If an x is not finite, the scale is NaN and numbers
// are 0.
func QuantiseRow(f Format, dst []byte, x []float32) (scale float32) {
	var most uint32
	for _, v := range x {
		most = max(most, math.Float32bits(v)&^(1<<31))
	}
	const inf, tiny = 0x7f800000, (127 - 80) << 23 // bits of infinity and of 2^-80
	dst = dst[:len(x)]
	if most >= inf || most < tiny {
		clear(dst)
		if most >= inf {
			return float32(math.NaN())
		}
		return 0
	}
	if f == E4M3 {
		scale = math.Float32frombits(most) / half.MaxE4M3
		for i, v := range x {
			dst[i] = byte(half.E4M3FromFloat32(v / scale))
		}
		return scale
	}
	scale = math.Float32frombits(most) / 127
	for i, v := range x {
		dst[i] = byte(int8(math.RoundToEven(float64(v / scale))))
	}
	return scale
}
