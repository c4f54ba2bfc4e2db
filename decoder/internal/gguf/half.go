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
		case b-normal < overflow-normal:
			// A carry out of the fraction raises the exponent, as it should.
			b += 0xfff + b>>13&1
			dst[i] = sign | uint16((b-(127-15)<<23)>>13)
		case b < normal:
			// 0.5 has a unit in the last place of 2^-24, that of subnormal binary16 numbers, so that the sum rounds.
			sum := 0.5 + math.Float32frombits(b)
			dst[i] = sign | uint16(math.Float32bits(sum)-0x3f000000)
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
	dst = dst[:len(src)]
	for i, x := range src {
		b := math.Float32bits(x)
		r := (b + 0x7fff + b>>16&1) >> 16
		if b&0x7f800000 == 0x7f800000 { // an infinity stays, and a NaN becomes quiet
			r = b >> 16
			if b&0x7fffff != 0 {
				r |= 0x40
			}
		} else if r&0x7f80 == 0x7f80 {
			return i
		}
		dst[i] = uint16(r)
	}
	return -1
}
