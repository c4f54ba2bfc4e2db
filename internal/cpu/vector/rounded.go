package vector

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/half"
)

// toFloat16Go is
//
//	for i := range n {
//		dst[i] = half.FromFloat32(src[i])
//	}
func toFloat16Go(dst *uint16, src *float32, n int) {
	half.EncodeFloat16(unsafe.Slice(dst, n), unsafe.Slice(src, n))
}

// toBFloat16Go is
//
//	for i := range n {
//		dst[i] = half.BFromFloat32(src[i])
//	}
func toBFloat16Go(dst *uint16, src *float32, n int) {
	half.EncodeBFloat16(unsafe.Slice(dst, n), unsafe.Slice(src, n))
}
