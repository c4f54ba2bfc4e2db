package enginetest

import (
	"bytes"
	"math/rand/v2"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// Format is what rounding to a type does.
func Format(d attn.DType) reftest.Format {
	return map[attn.DType]reftest.Format{attn.Float32: reftest.Float32, attn.Float16: reftest.Float16, attn.BFloat16: reftest.BFloat16}[d]
}

// Put sets element i of memory of a type.
func Put(b []byte, i int, d attn.DType, x float64) {
	p := unsafe.Pointer(&b[i*d.Size()])
	switch d {
	case attn.Float16:
		*(*half.Float16)(p) = half.FromFloat64(x)
	case attn.BFloat16:
		*(*half.BFloat16)(p) = half.BFromFloat64(x)
	default:
		*(*float32)(p) = float32(x)
	}
}

// Get is element i of memory of a type.
func Get(b []byte, i int, d attn.DType) float64 {
	p := unsafe.Pointer(&b[i*d.Size()])
	switch d {
	case attn.Float16:
		return float64((*(*half.Float16)(p)).Float32())
	case attn.BFloat16:
		return float64((*(*half.BFloat16)(p)).Float32())
	}
	return float64(*(*float32)(p))
}

// Poisoned is NaN in every type.
func Poisoned(elements int, d attn.DType) []byte {
	return bytes.Repeat([]byte{0xff}, elements*d.Size())
}

// Pick draws one of some.
func Pick[T any](rng *rand.Rand, x ...T) T { return x[rng.IntN(len(x))] }

// PointerOf is where x lies.
func PointerOf[T any](x []T) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(x)) }
