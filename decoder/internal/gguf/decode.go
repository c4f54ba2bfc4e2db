package gguf

import (
	"encoding/binary"
	"math"
)

// decoder decodes whole blocks: src has the bytes of len(dst) elements. Products and sums are rounded to float32 each,
// in ggml's order, so that results have ggml's bits. The conversions keep compilers from fusing them.
type decoder func(dst []float32, src []byte)

func load16(b []byte) float32 { return from16(binary.LittleEndian.Uint16(b)) }

func decodeF32(dst []float32, src []byte) {
	for i := range dst {
		dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
	}
}

func decodeF16(dst []float32, src []byte) {
	for i := range dst {
		dst[i] = load16(src[2*i:])
	}
}

func decodeBF16(dst []float32, src []byte) {
	for i := range dst {
		dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
	}
}

// Q8_0: a scale d, and 32 signed bytes q. An element is d*q.
func decodeQ8_0(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[34:] {
		y, b := (*[32]float32)(dst), (*[34]byte)(src)
		d := load16(b[:])
		for i := range y {
			y[i] = d * float32(int8(b[2+i]))
		}
	}
}

// Q4_0: a scale d, and 16 bytes. Byte i has q of element i in its lower half, and of element 16+i in its upper half.
// An element is d*(q-8).
func decodeQ4_0(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[18:] {
		y, b := (*[32]float32)(dst), (*[18]byte)(src)
		d := load16(b[:])
		var of [16]float32
		for q := range of {
			of[q] = d * float32(q-8)
		}
		for i, x := range b[2:] {
			y[i], y[16+i] = of[x&15], of[x>>4]
		}
	}
}

// Q4_1: a scale d, a minimum m, and 16 bytes as in Q4_0. An element is d*q + m.
func decodeQ4_1(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[20:] {
		y, b := (*[32]float32)(dst), (*[20]byte)(src)
		d, m := load16(b[:]), load16(b[2:])
		var of [16]float32
		for q := range of {
			of[q] = float32(d*float32(q)) + m
		}
		for i, x := range b[4:] {
			y[i], y[16+i] = of[x&15], of[x>>4]
		}
	}
}

// Q5_0: a scale d, 4 bytes with the fifth bits of 32 elements, and 16 bytes as in Q4_0. An element is d*(q-16).
func decodeQ5_0(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[22:] {
		y, b := (*[32]float32)(dst), (*[22]byte)(src)
		d, high := load16(b[:]), binary.LittleEndian.Uint32(b[2:])
		for i, x := range b[6:] {
			low := int32(x&15) | int32(high>>i<<4&16)
			upper := int32(x>>4) | int32(high>>(i+12)&16)
			y[i], y[16+i] = d*float32(low-16), d*float32(upper-16)
		}
	}
}

// Q5_1: a scale d, a minimum m, and 4 and 16 bytes as in Q5_0. An element is d*q + m.
func decodeQ5_1(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[24:] {
		y, b := (*[32]float32)(dst), (*[24]byte)(src)
		d, m, high := load16(b[:]), load16(b[2:]), binary.LittleEndian.Uint32(b[4:])
		for i, x := range b[8:] {
			low := int32(x&15) | int32(high>>i<<4&16)
			upper := int32(x>>4) | int32(high>>(i+12)&16)
			y[i], y[16+i] = float32(d*float32(low))+m, float32(d*float32(upper))+m
		}
	}
}

// scalesK has the scales and minima of the 8 sub-blocks of Q4_K and Q5_K, of 6 bits each. Bytes 0 to 3 have the lower 6
// bits of scales 0 to 3, bytes 4 to 7 of minima 0 to 3. Of sub-block 4+i, byte 8+i has the lower 4 bits of both, the
// scale's below, and the upper bits of bytes i and 4+i have the rest.
func scalesK(b *[12]byte, i int) (scale, minimum uint8) {
	if i < 4 {
		return b[i] & 63, b[4+i] & 63
	}
	i -= 4
	return b[8+i]&15 | b[i]>>6<<4, b[8+i]>>4 | b[4+i]>>6<<4
}

// Q4_K: 256 elements in 8 sub-blocks: a scale d, a scale m of minima, 12 bytes of scales and minima, and 128 bytes.
// Bytes 32*j to 32*j+31 have sub-block 2*j in their lower halves, and 2*j+1 in their upper. An element is
// (d*scale)*q - m*minimum.
func decodeQ4_K(dst []float32, src []byte) {
	for ; len(dst) >= 256; dst, src = dst[256:], src[144:] {
		b := (*[144]byte)(src)
		d, m := load16(b[:]), load16(b[2:])
		scales := (*[12]byte)(b[4:])
		for j := range 4 {
			y, qs := (*[64]float32)(dst[64*j:]), (*[32]byte)(b[16+32*j:])
			var low, upper [16]float32
			tableK(&low, d, m, scales, 2*j)
			tableK(&upper, d, m, scales, 2*j+1)
			for i, x := range qs {
				y[i], y[32+i] = low[x&15], upper[x>>4]
			}
		}
	}
}

// tableK fills of with the elements of sub-block i for each q.
func tableK(of *[16]float32, d, m float32, scales *[12]byte, i int) {
	scale, minimum := scalesK(scales, i)
	d, m = d*float32(scale), m*float32(minimum)
	for q := range of {
		of[q] = float32(d*float32(q)) - m
	}
}

// Q5_K: as Q4_K, with 32 bytes before the 128. Bit j of byte i has the fifth bit of element i of sub-block j.
func decodeQ5_K(dst []float32, src []byte) {
	for ; len(dst) >= 256; dst, src = dst[256:], src[176:] {
		b := (*[176]byte)(src)
		d, m := load16(b[:]), load16(b[2:])
		scales, high := (*[12]byte)(b[4:]), (*[32]byte)(b[16:])
		for j := range 4 {
			y, qs := (*[64]float32)(dst[64*j:]), (*[32]byte)(b[48+32*j:])
			s1, m1 := scalesK(scales, 2*j)
			s2, m2 := scalesK(scales, 2*j+1)
			dLow, mLow := d*float32(s1), m*float32(m1)
			dUpper, mUpper := d*float32(s2), m*float32(m2)
			for i, x := range qs {
				h := uint32(high[i]) >> (2 * j)
				low, upper := int32(x&15)|int32(h<<4&16), int32(x>>4)|int32(h<<3&16)
				y[i], y[32+i] = float32(dLow*float32(low))-mLow, float32(dUpper*float32(upper))-mUpper
			}
		}
	}
}

// Q6_K: 256 elements in 16 sub-blocks: 128 bytes of lower 4 bits, 64 bytes of upper 2 bits, 16 signed scales, and a
// scale d. An element is (d*scale)*(q-32). Each half of the elements has half of the bytes of the first three: four
// runs of 32 elements, with the lower bits of runs 0 and 1 in the lower halves of bytes, and of runs 2 and 3 in the
// upper, and the upper bits of run r at bit 2*r.
func decodeQ6_K(dst []float32, src []byte) {
	for ; len(dst) >= 256; dst, src = dst[256:], src[210:] {
		b := (*[210]byte)(src)
		d := load16(b[208:])
		for half := range 2 {
			y, ql, qh := (*[128]float32)(dst[128*half:]), (*[64]byte)(b[64*half:]), (*[32]byte)(b[128+32*half:])
			var scales [8]float32
			for i := range scales {
				scales[i] = d * float32(int8(b[192+8*half+i]))
			}
			for part := range 2 {
				d0, d1, d2, d3 := scales[part], scales[part+2], scales[part+4], scales[part+6]
				for k := range 16 {
					i := 16*part + k
					a, c, h := int32(ql[i]), int32(ql[32+i]), int32(qh[i])
					y[i] = d0 * float32(a&15|h<<4&48-32)
					y[32+i] = d1 * float32(c&15|h<<2&48-32)
					y[64+i] = d2 * float32(a>>4|h&48-32)
					y[96+i] = d3 * float32(c>>4|h>>2&48-32)
				}
			}
		}
	}
}
