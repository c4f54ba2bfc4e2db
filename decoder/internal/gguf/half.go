package gguf

import "math"

// from16 returns a binary16 number as a float32, exactly.
//
// Shifted to the places of a float32's exponent and fraction, a finite number is too small by 2^112, subnormals
// included. An exponent of all ones is moved to that of a float32 first.
func from16(h uint16) float32 {
	bits := uint32(h&0x7fff) << 13
	if bits >= 0x7c00<<13 {
		bits += (255 - 31) << 23 // the product below keeps infinities and NaNs
	}
	return math.Float32frombits(uint32(h&0x8000)<<16 | math.Float32bits(math.Float32frombits(bits)*0x1p112))
}

// toFloat16 rounds src to binary16 numbers, to nearest, ties to even. It returns the first element that is finite and
// whose rounding is not, or -1.
func toFloat16(dst []uint16, src []float32) int {
	const (
		normal   = 0x38800000 // 2^-14, the smallest normal number
		overflow = 0x477ff000 // 65520, half-way from the largest number, 65504, to the next power of two
		infinity = 0x7f800000
	)
	dst = dst[:len(src)]
	for i, x := range src {
		b := math.Float32bits(x)
		sign := uint16(b >> 16 & 0x8000)
		b &= 0x7fffffff
		switch {
		case b < normal:
			// 0.5 has a unit in the last place of 2^-24, that of subnormal binary16 numbers, so that the sum rounds.
			sum := 0.5 + math.Float32frombits(b)
			dst[i] = sign | uint16(math.Float32bits(sum)-0x3f000000)
		case b < overflow:
			// A carry out of the fraction raises the exponent, as it should.
			dst[i] = sign | uint16((b-((127-15)<<23-0xfff)+b>>13&1)>>13)
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

// toBFloat16 rounds src to bfloat16 numbers, as toFloat16 does.
func toBFloat16(dst []uint16, src []float32) int {
	const (
		overflow = 0x7f7f8000 // half-way from the largest number to the next power of two
		infinity = 0x7f800000
	)
	dst = dst[:len(src)]
	largest := uint32(0)
	for i, x := range src {
		b := math.Float32bits(x)
		largest = max(largest, b&0x7fffffff)
		dst[i] = uint16((b + 0x7fff + b>>16&1) >> 16)
	}
	if largest < overflow {
		return -1
	}
	for i, x := range src {
		switch b := math.Float32bits(x) & 0x7fffffff; {
		case b < overflow:
		case b < infinity:
			return i
		case b == infinity:
			dst[i] = uint16(math.Float32bits(x) >> 16)
		default:
			dst[i] = uint16(math.Float32bits(x)>>16) | 0x40 // quiet: the upper bits of its payload may be zero
		}
	}
	return -1
}
