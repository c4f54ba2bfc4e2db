// Package half holds the two 16-bit floating-point formats that keys and values are stored in.
//
//	Float16   1 sign, 5 exponent, 10 fraction bits   IEEE 754 binary16
//	BFloat16  1 sign, 8 exponent,  7 fraction bits   the upper half of a float32
//
// Widening to float32 is exact. Narrowing rounds to the nearest value, ties to even, overflows to
// infinity and keeps subnormals, infinities and the sign of zero. NaN stays NaN, made quiet, with the upper
// bits of its payload. Nothing is computed in 16 bits: arithmetic widens first.
package half

import "math"

// Float16 is the bit pattern of an IEEE 754 binary16 number.
type Float16 uint16

// BFloat16 is the bit pattern of a bfloat16 number: the upper 16 bits of a float32.
type BFloat16 uint16

const (
	f16Exponent = 0x7c00
	f16QuietNaN = 0x7e00

	// rebias moves a binary16 exponent (bias 15), already shifted to its place in a float32, to
	// float32's bias of 127.
	rebias = (127 - 15) << 23

	// f16Overflow is the float32 halfway between the largest finite binary16, 65504, and the next
	// power of two: it and everything above round to infinity.
	f16Overflow = 0x477ff000
	// f16Normal is 2^-14, the smallest normal binary16, as a float32.
	f16Normal = 0x38800000
)

// FromFloat32 returns the Float16 nearest to f, ties to even.
func FromFloat32(f float32) Float16 {
	b := math.Float32bits(f)
	sign := b >> 16 & 0x8000
	b &= 0x7fffffff
	switch {
	case b-f16Normal < f16Overflow-f16Normal:
		// Rounding adds just under half a unit, or a full half if the last kept bit is odd. A carry
		// out of the fraction raises the exponent, which is the right neighbour.
		b += 0xfff + b>>13&1
		return Float16(sign | (b-rebias)>>13)
	case b < f16Normal:
		// The sum 0.5 + |f| has a unit in the last place of 2^-24, that of binary16's subnormals:
		// the hardware's own rounding leaves the rounded multiple in the fraction.
		s := math.Float32bits(0.5 + math.Float32frombits(b))
		return Float16(sign | s - 0x3f000000)
	case b > 0x7f800000:
		return Float16(sign | f16QuietNaN | b>>13&0x3ff) // what processors leave of the payload
	}
	return Float16(sign | f16Exponent)
}

// FromFloat64 returns the Float16 nearest to f, ties to even. It rounds once: going through the
// nearest float32 would round twice.
func FromFloat64(f float64) Float16 { return FromFloat32(toOdd(f)) }

// Float32 returns h as a float32, exactly.
//
// Shifted to where a float32 has its exponent and fraction, the number is 2^112 too small, the sign is
// in the wrong place, and infinities and NaNs look like finite numbers: a table by sign and exponent
// puts the latter two right. The product is exact, subnormals and the sign of zero included.
func (h Float16) Float32() float32 {
	return math.Float32frombits(uint32(h)<<13+corrections[h>>10]) * 0x1p112
}

var corrections = func() (c [64]uint32) {
	for i := range c {
		if i&32 != 0 { // negative
			c[i] = 1<<31 - 1<<28
		}
		if i&31 == 31 {
			c[i] += (255 - 31) << 23
		}
	}
	return c
}()

// IsNaN reports whether h is not a number.
func (h Float16) IsNaN() bool { return h&0x7fff > f16Exponent }

// BFromFloat32 returns the BFloat16 nearest to f, ties to even.
func BFromFloat32(f float32) BFloat16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return BFloat16(b>>16 | 0x40) // the quiet bit, as the payload's upper bits may be zero
	}
	return BFloat16((b + 0x7fff + b>>16&1) >> 16)
}

// BFromFloat64 returns the BFloat16 nearest to f, ties to even, rounding once.
func BFromFloat64(f float64) BFloat16 { return BFromFloat32(toOdd(f)) }

// Float32 returns b as a float32, exactly.
func (b BFloat16) Float32() float32 { return math.Float32frombits(uint32(b) << 16) }

// IsNaN reports whether b is not a number.
func (b BFloat16) IsNaN() bool { return b&0x7fff > 0x7f80 }

// toOdd rounds f to float32 towards the odd neighbour when it is not exact, so that a second rounding
// to a shorter format gives what one rounding would have given (Boldo and Melquiond, 2008). It needs
// the shorter format to be at least two bits shorter, which both of these are.
func toOdd(f float64) float32 {
	n := float32(f)
	if float64(n) == f || f != f {
		return n
	}
	b := math.Float32bits(n)
	if b&1 == 1 {
		return n
	}
	// n is the even neighbour (infinity counts as even); the odd one lies on f's other side.
	if (float64(n) < f) == (b>>31 == 0) {
		return math.Float32frombits(b + 1)
	}
	return math.Float32frombits(b - 1)
}
