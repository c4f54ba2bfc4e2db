package vector

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/half"
)

// WidenRows widens rows of 8-bit elements of type t at src, which lie together, and multiplies each row by its scale:
//
//	dst[r*n+i] = src[r*n+i] * scales[r*step]
//
// dst has rows*n elements, and n is at least 1. A product is rounded once. WidenRows returns false, and does nothing, for
// another type.
func WidenRows(dst []float32, t attn.DType, src unsafe.Pointer, scales *float32, n, step int) bool {
	v := &tiers[cpu.InUse()]
	var from func(dst *float32, src *uint8, scales *float32, rows, n, step int)
	switch t {
	case attn.E4M3:
		from = v.fromE4M3
	case attn.Int8:
		from = v.fromInt8
	default:
		return false
	}
	if len(dst) > 0 {
		from(&dst[0], (*uint8)(src), scales, len(dst)/n, n, step)
	}
	return true
}

// fromE4M3Go is
//
//	for r := range rows {
//		for i := range n {
//			dst[r*n+i] = half.E4M3(src[r*n+i]).Float32() * scales[r*step]
//		}
//	}
//
// rows and n are at least 1.
func fromE4M3Go(dst *float32, src *uint8, scales *float32, rows, n, step int) {
	widenRows(dst, src, scales, rows, n, step, half.DecodeE4M3)
}

// fromInt8Go is
//
//	for r := range rows {
//		for i := range n {
//			dst[r*n+i] = half.Int8(src[r*n+i]).Float32() * scales[r*step]
//		}
//	}
//
// rows and n are at least 1.
func fromInt8Go(dst *float32, src *uint8, scales *float32, rows, n, step int) {
	widenRows(dst, src, scales, rows, n, step, half.DecodeInt8)
}

func widenRows(dst *float32, src *uint8, scales *float32, rows, n, step int, decode func([]float32, []uint8)) {
	to, from, by := unsafe.Slice(dst, rows*n), unsafe.Slice(src, rows*n), unsafe.Slice(scales, (rows-1)*step+1)
	for r := range rows {
		row := to[r*n:][:n]
		decode(row, from[r*n:][:n])
		for i := range row {
			row[i] *= by[r*step]
		}
	}
}
