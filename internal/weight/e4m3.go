package weight

import (
	"math"

	"gorgonia.org/leanattention/internal/half"
)

// BadE4M3 returns the first byte that is NaN; -1: there is none.
func BadE4M3(data []byte) int {
	for i, b := range data {
		if half.E4M3(b).IsNaN() {
			return i
		}
	}
	return -1
}

// BadE4M3Scale returns the first scale that is NaN, or with which the largest E4M3 is beyond float32; -1: there is none.
func BadE4M3Scale(scales []float32) int {
	for i, x := range scales {
		if !(math.Abs(float64(x))*half.MaxE4M3 <= math.MaxFloat32) { // exact: arm64 would fuse a product and a difference
			return i
		}
	}
	return -1
}

// RoundE4M3 writes x as numbers of E4M3 of one scale: those nearest to x / scale, ties to even, with the scale max |x| / 448. If all |x|
// are less than 2^-110, scale and numbers are 0. If an x is not finite, ok is false.
func RoundE4M3(dst []byte, x []float32) (scale float32, ok bool) {
	most := float32(0)
	for _, v := range x {
		if v-v != 0 {
			return 0, false
		}
		most = max(most, float32(math.Abs(float64(v))))
	}
	if scale = most / half.MaxE4M3; most < 0x1p-110 {
		scale = 0
	}
	for i, v := range x {
		if scale == 0 {
			v = 0
		} else {
			v /= scale
		}
		dst[i] = byte(half.E4M3FromFloat32(v))
	}
	return scale, true
}
