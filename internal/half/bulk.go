package half

import "math"

// DecodeFloat16 is
//
//	for i, h := range src { dst[i] = Float16(h).Float32() }
//
// It panics if dst is shorter than src.
func DecodeFloat16[T ~uint16](dst []float32, src []T) {
	dst = dst[:len(src)]
	for i, h := range src {
		dst[i] = Float16(h).Float32()
	}
}

// DecodeBFloat16 is
//
//	for i, b := range src { dst[i] = BFloat16(b).Float32() }
//
// It panics if dst is shorter than src.
func DecodeBFloat16[T ~uint16](dst []float32, src []T) {
	dst = dst[:len(src)]
	for i, b := range src {
		dst[i] = math.Float32frombits(uint32(b) << 16)
	}
}

// EncodeFloat16 is
//
//	for i, f := range src { dst[i] = FromFloat32(f) }
//
// It panics if dst is shorter than src.
func EncodeFloat16[T ~uint16](dst []T, src []float32) {
	dst = dst[:len(src)]
	for i, f := range src {
		dst[i] = T(FromFloat32(f))
	}
}

// EncodeBFloat16 is
//
//	for i, f := range src { dst[i] = BFromFloat32(f) }
//
// It panics if dst is shorter than src.
func EncodeBFloat16[T ~uint16](dst []T, src []float32) {
	dst = dst[:len(src)]
	for i, f := range src {
		dst[i] = T(BFromFloat32(f))
	}
}
