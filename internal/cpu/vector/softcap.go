package vector

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// SoftCap is Cap without derivatives.
func SoftCap[F cpu.Real](s []F, softCap float64) {
	switch v := &tiers[cpu.InUse()]; {
	case softCap < 1e-30 || softCap > 1e30:
		Cap(s, nil, softCap)
	case unsafe.Sizeof(F(0)) == 4:
		v.softCap((*float32)(unsafe.Pointer(&s[0])), len(s), softCap)
	default:
		v.softCap64((*float64)(unsafe.Pointer(&s[0])), len(s), softCap)
	}
}

// Cap makes each s_c of s
//
//	softCap tanh(s_c/softCap)
//
// and leaves the derivatives of that, unless derivatives is nil.
func Cap[F cpu.Real](s, derivatives []F, softCap float64) {
	for c, x := range s {
		t := math.Tanh(float64(x) / softCap)
		s[c] = F(softCap * t)
		if derivatives != nil {
			derivatives[c] = F((1 - t) * (1 + t))
		}
	}
}

// softCapGo is
//
//	for i := range n {
//		dst[i] = by * tanh(dst[i]/by)
//	}
//
// for `by` from 1e-30 to 1e30. NaN stays NaN.
func softCapGo(dst *float32, n int, by float64) { Cap(unsafe.Slice(dst, n), nil, by) }

// softCap64Go is softCapGo for float64:
//
//	for i := range n {
//		dst[i] = by * tanh(dst[i]/by)
//	}
func softCap64Go(dst *float64, n int, by float64) { Cap(unsafe.Slice(dst, n), nil, by) }
