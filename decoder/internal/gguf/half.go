package gguf

import (
	"math"
	"unsafe"
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
	if f == bfloat16 {
		return toBFloat16(dst, src)
	}
	return toFloat16(dst, src)
}

// The fast rounding loops process two float32 numbers at once, in the halves of a uint64. both has the lowest bit of
// each half.
const (
	both      = 1<<32 | 1
	magnitude = (1<<31 - 1) * both
	signs     = 1 << 31 * both
)

// twos returns the leading parts of dst and src as pairs of numbers. An odd last number is left out. twos returns nil
// if dst or src is not aligned for pairs. The machine's byte order does not matter, since both slices are read in it.
func twos(dst []uint16, src []float32) ([]uint32, []uint64) {
	d, s := unsafe.Pointer(unsafe.SliceData(dst)), unsafe.Pointer(unsafe.SliceData(src))
	n := min(len(dst), len(src)) / 2
	if n == 0 || uintptr(d)%unsafe.Alignof(uint32(0)) != 0 || uintptr(s)%unsafe.Alignof(uint64(0)) != 0 {
		return nil, nil
	}
	return unsafe.Slice((*uint32)(d), n), unsafe.Slice((*uint64)(s), n)
}

const (
	normal16   = 0x38800000 // 2^-14, the smallest normal binary16 number
	overflow16 = 0x477ff000 // 65520, halfway between the largest number, 65504, and the next power of two
	infinity   = 0x7f800000
	// rebias is the difference of the exponent biases, minus the addend that rounds to nearest.
	rebias = (127-15)<<23 - 0xfff
)

// toFloat16 rounds src to binary16 numbers, to nearest, ties to even. It returns the index of the first finite element
// that rounds to infinity, or -1.
func toFloat16(dst []uint16, src []float32) int {
	d, s := twos(dst, src)
	for i, x := range s {
		a := x & magnitude
		if (a|signs-normal16*both)&signs != signs || (a+(1<<31-overflow16)*both)&signs != 0 { // out of the fast path
			if bad := toFloat16One(dst[2*i:2*i+2], src[2*i:2*i+2]); bad >= 0 {
				return 2*i + bad
			}
			continue
		}
		// A carry out of the fraction correctly increments the exponent.
		a = (a-rebias*both+a>>13&both)>>13&(0x7fff*both) | x>>16&(0x8000*both)
		d[i] = uint32(a | a>>16)
	}
	n := 2 * len(s)
	if bad := toFloat16One(dst[n:len(src)], src[n:]); bad >= 0 {
		return n + bad
	}
	return -1
}

// toFloat16One is toFloat16, one number at a time.
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

// toBFloat16 is toFloat16 for bfloat16 numbers.
func toBFloat16(dst []uint16, src []float32) int {
	d, s := twos(dst, src)
	over := uint64(0)
	for i, x := range s {
		over |= x&magnitude + (1<<31-overflowB)*both
		x += x>>16&both + 0x7fff*both
		d[i] = uint32(x>>16&0xffff | x>>32&^0xffff)
	}
	n := 2 * len(s)
	if over&signs != 0 {
		n = 0 // either number overflows, or is infinite or NaN
	}
	if bad := toBFloat16One(dst[n:len(src)], src[n:]); bad >= 0 {
		return n + bad
	}
	return -1
}

// toBFloat16One is toBFloat16, one number at a time.
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

// RoundFloat16 rounds src to the bits of binary16 numbers, to nearest, ties to even. It returns the index of the first
// finite element that rounds to infinity, or -1.
func RoundFloat16(dst []uint16, src []float32) int { return binary16.round(dst, src) }

// RoundBFloat16 is RoundFloat16 for bfloat16 numbers.
func RoundBFloat16(dst []uint16, src []float32) int { return bfloat16.round(dst, src) }
