package half

import "math"

// E4M3 is the bit pattern of an 8-bit floating-point number of the OCP specification: 4 bits of exponent with a bias of 7, and 3 bits of
// fraction. The largest number is 448. There are no infinities: 0x7f and 0xff are NaN.
type E4M3 uint8

// Int8 is an integer from -127 to 127. -128 is NaN.
type Int8 int8

// The largest numbers of both types.
const (
	MaxE4M3 = 448
	MaxInt8 = 127
)

const (
	e4m3NaN    = 0x7f
	e4m3Most   = 0x7e
	int8NaN    = -128
	e4m3Bias   = (127 - 7) << 23 // between the exponents of float32 and of E4M3
	e4m3Normal = 0x3c800000      // 2^-6, the smallest normal E4M3, as a float32
	e4m3Last   = 0x43e00000      // MaxE4M3 as a float32
	e4m3Magic  = 0x46800000      // 2^14, whose unit in the last place is the unit of subnormal E4M3 numbers
)

// E4M3FromFloat32 returns the E4M3 nearest to f, ties to even. Numbers beyond ±448, and infinities, become ±448. NaN stays NaN.
func E4M3FromFloat32(f float32) E4M3 {
	b := math.Float32bits(f)
	sign := b >> 24 & 0x80
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000:
		return E4M3(sign | e4m3NaN)
	case b >= e4m3Last:
		return E4M3(sign | e4m3Most)
	case b >= e4m3Normal:
		return E4M3(sign | (b+0x7ffff+b>>20&1-e4m3Bias)>>20)
	}
	return E4M3(sign | math.Float32bits(math.Float32frombits(b)+math.Float32frombits(e4m3Magic)) - e4m3Magic)
}

// E4M3FromFloat64 is E4M3FromFloat32 of a float64, rounded once.
func E4M3FromFloat64(f float64) E4M3 { return E4M3FromFloat32(toOdd(f)) }

// Float32 returns x as a float32, exactly.
func (x E4M3) Float32() float32 { return e4m3s[x] }

// IsNaN reports whether x is not a number.
func (x E4M3) IsNaN() bool { return x&0x7f == e4m3NaN }

// Int8FromFloat32 returns the integer nearest to f, ties to even. Numbers beyond ±127, and infinities, become ±127. NaN stays NaN.
func Int8FromFloat32(f float32) Int8 {
	switch {
	case f >= MaxInt8:
		return MaxInt8
	case f <= -MaxInt8:
		return -MaxInt8
	case f != f:
		return int8NaN
	}
	const magic = 0x1.8p23 // its unit in the last place is 1
	return Int8(math.Float32bits(f + magic))
}

// Int8FromFloat64 is Int8FromFloat32 of a float64.
func Int8FromFloat64(f float64) Int8 {
	if f != f {
		return int8NaN
	}
	return Int8(math.RoundToEven(min(max(f, -MaxInt8), MaxInt8)))
}

// Float32 returns x as a float32, exactly.
func (x Int8) Float32() float32 { return int8s[uint8(x)] }

// IsNaN reports whether x is not a number.
func (x Int8) IsNaN() bool { return x == int8NaN }

// The numbers of all bit patterns.
var e4m3s, int8s = func() (e, i [256]float32) {
	for b := range 256 {
		fraction, exponent := float32(b&7), b>>3&15
		if exponent > 0 {
			fraction, exponent = fraction+8, exponent-1
		}
		e[b] = float32(math.Ldexp(float64(fraction), exponent-9))
		if b >= 128 {
			e[b] = -e[b]
		}
		i[b] = float32(int8(b))
	}
	nan := float32(math.NaN())
	e[e4m3NaN], e[0x80|e4m3NaN], i[0x80] = nan, nan, nan
	return e, i
}()

// DecodeE4M3 is
//
//	for i, x := range src { dst[i] = E4M3(x).Float32() }
//
// It panics if dst is shorter than src.
func DecodeE4M3(dst []float32, src []uint8) { decode(dst, src, &e4m3s) }

// DecodeInt8 is
//
//	for i, x := range src { dst[i] = Int8(x).Float32() }
//
// It panics if dst is shorter than src.
func DecodeInt8(dst []float32, src []uint8) { decode(dst, src, &int8s) }

func decode(dst []float32, src []uint8, table *[256]float32) {
	dst = dst[:len(src)]
	for i, x := range src {
		dst[i] = table[x]
	}
}
