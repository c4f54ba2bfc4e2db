package gguf

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention"
)

// from16 returns a binary16 number as a float32, exactly.
//
// The exponent and the fraction are shifted to their places in a float32. The result of a finite number, subnormal or
// not, is then too small by a factor of 2^112. An exponent of all ones is first replaced by that of a float32.
func from16(h uint16) float32 {
	bits := uint32(h&0x7fff) << 13
	if bits >= 0x7c00<<13 {
		bits += (255 - 31) << 23 // the product below keeps infinities and NaNs
	}
	return math.Float32frombits(uint32(h&0x8000)<<16 | math.Float32bits(math.Float32frombits(bits)*0x1p112))
}

// format is a 16-bit floating-point type.
type format bool

const (
	binary16 format = false
	bfloat16 format = true
)

// round rounds src to nearest, ties to even. It returns the index of the first finite element that rounds to infinity,
// or -1.
func (f format) round(dst []uint16, src []float32) int {
	p := unsafe.Pointer(unsafe.SliceData(dst))
	if f == bfloat16 {
		if leanattention.Convert(unsafe.Slice((*leanattention.BF16)(p), len(dst)), src) == nil {
			return -1
		}
		return toBFloat16One(dst, src)
	}
	if leanattention.Convert(unsafe.Slice((*leanattention.F16)(p), len(dst)), src) == nil {
		return -1
	}
	return toFloat16One(dst, src)
}

const (
	normal16   = 0x38800000 // 2^-14, the smallest normal binary16 number
	overflow16 = 0x477ff000 // 65520, halfway between the largest number, 65504, and the next power of two
	infinity   = 0x7f800000
	// rebias is the difference of the exponent biases, minus the addend that rounds to nearest.
	rebias = (127-15)<<23 - 0xfff
)

// toFloat16One is round to binary16, one number at a time.
func toFloat16One(dst []uint16, src []float32) int {
	for i, x := range src {
		b := math.Float32bits(x)
		sign := uint16(b >> 16 & 0x8000)
		b &= 0x7fffffff
		switch {
		case b < normal16:
			// The unit in the last place of 0.5 is 2^-24, that of subnormal binary16 numbers, so the sum rounds
			// correctly.
			sum := 0.5 + math.Float32frombits(b)
			dst[i] = sign | uint16(math.Float32bits(sum)-0x3f000000)
		case b < overflow16:
			dst[i] = sign | uint16((b-rebias+b>>13&1)>>13)
		case b < infinity:
			return i
		case b == infinity:
			dst[i] = sign | 0x7c00
		default:
			dst[i] = sign | 0x7e00 | uint16(b>>13&0x3ff)
		}
	}
	return -1
}

// overflowB is halfway between the largest bfloat16 number and the next power of two.
const overflowB = 0x7f7f8000

// toBFloat16One is round to bfloat16, one number at a time.
func toBFloat16One(dst []uint16, src []float32) int {
	for i, x := range src {
		b := math.Float32bits(x)
		switch a := b & 0x7fffffff; {
		case a < overflowB:
			dst[i] = uint16((b + 0x7fff + b>>16&1) >> 16)
		case a < infinity:
			return i
		case a == infinity:
			dst[i] = uint16(b >> 16)
		default:
			dst[i] = uint16(b>>16) | 0x40 // make the NaN quiet: the upper bits of its payload may be zero
		}
	}
	return -1
}
