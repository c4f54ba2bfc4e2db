package gguf

import (
	"encoding/binary"
	"math"
	"unsafe"
)

// decoder decodes whole blocks: src has the bytes of len(dst) elements. Each product and each sum is rounded to
// float32, in ggml's order, so that results have ggml's bits. The explicit float32 conversions keep compilers from
// fusing a product with a sum.
type decoder func(dst []float32, src []byte)

// whole and signed have the float32 value of each byte, as uint8 and as int8. Loading a value is faster than converting
// one.
var whole, signed = func() (w, s [256]float32) {
	for i := range w {
		w[i], s[i] = float32(i), float32(int8(i))
	}
	return w, s
}()

func load16(b []byte) float32 { return from16(binary.LittleEndian.Uint16(b)) }

func decodeF32(dst []float32, src []byte) {
	if littleEndian && len(dst) > 0 {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), 4*len(dst)), src)
		return
	}
	for i := range dst {
		dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
	}
}

func decodeF16(dst []float32, src []byte) {
	for ; len(dst) >= 4 && len(src) >= 8; dst, src = dst[4:], src[8:] {
		y, x := (*[4]float32)(dst), binary.LittleEndian.Uint64(src)
		y[0], y[1], y[2], y[3] = from16(uint16(x)), from16(uint16(x>>16)), from16(uint16(x>>32)), from16(uint16(x>>48))
	}
	for i := range dst {
		dst[i] = load16(src[2*i:])
	}
}

func decodeBF16(dst []float32, src []byte) {
	for ; len(dst) >= 4 && len(src) >= 8; dst, src = dst[4:], src[8:] {
		y, x := (*[4]float32)(dst), binary.LittleEndian.Uint64(src)
		y[0], y[1] = math.Float32frombits(uint32(x)<<16), math.Float32frombits(uint32(x)&^0xffff)
		y[2], y[3] = math.Float32frombits(uint32(x>>32)<<16), math.Float32frombits(uint32(x>>32)&^0xffff)
	}
	for i := range dst {
		dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
	}
}

// Q8_0: a scale d, and 32 signed bytes q. An element is d*q.
func decodeQ8_0(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[34:] {
		y, b := (*[32]float32)(dst), (*[34]byte)(src)
		d := load16(b[:])
		for i := 0; i < 32; i += 4 {
			z, q := (*[4]float32)(y[i:]), (*[4]byte)(b[2+i:])
			z[0], z[1], z[2], z[3] = d*signed[q[0]], d*signed[q[1]], d*signed[q[2]], d*signed[q[3]]
		}
	}
}

// Q4_0: a scale d, and 16 bytes. The lower half of byte i has q of element i, and the upper half has q of element 16+i.
// An element is d*(q-8).
func decodeQ4_0(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[18:] {
		y, b := (*[32]float32)(dst), (*[18]byte)(src)
		d := load16(b[:])
		for i, x := range b[2:] {
			y[i], y[16+i] = d*signed[x&15-8], d*signed[x>>4-8]
		}
	}
}

// Q4_1: a scale d, a minimum m, and 16 bytes as in Q4_0. An element is d*q + m.
func decodeQ4_1(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[20:] {
		y, b := (*[32]float32)(dst), (*[20]byte)(src)
		d, m := load16(b[:]), load16(b[2:])
		for i, x := range b[4:] {
			y[i], y[16+i] = float32(d*whole[x&15])+m, float32(d*whole[x>>4])+m
		}
	}
}

// Q5_0: a scale d, 4 bytes with the fifth bits of 32 elements, and 16 bytes with the lower bits as in Q4_0. An element
// is d*(q-16).
func decodeQ5_0(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[22:] {
		y, b := (*[32]float32)(dst), (*[22]byte)(src)
		d, high := load16(b[:]), binary.LittleEndian.Uint32(b[2:])
		for i, x := range b[6:] {
			y[i], y[16+i] = d*signed[x&15|byte(high<<4)&16-16], d*signed[x>>4|byte(high>>12)&16-16]
			high >>= 1
		}
	}
}

// Q5_1: a scale d, a minimum m, and 4 and 16 bytes as in Q5_0. An element is d*q + m.
func decodeQ5_1(dst []float32, src []byte) {
	for ; len(dst) >= 32; dst, src = dst[32:], src[24:] {
		y, b := (*[32]float32)(dst), (*[24]byte)(src)
		d, m, high := load16(b[:]), load16(b[2:]), binary.LittleEndian.Uint32(b[4:])
		for i, x := range b[8:] {
			y[i], y[16+i] = float32(d*whole[x&15|byte(high<<4)&16])+m, float32(d*whole[x>>4|byte(high>>12)&16])+m
			high >>= 1
		}
	}
}

// scalesK returns the scale and the minimum of sub-block i of Q4_K and Q5_K. 12 bytes have 8 scales and 8 minima of 6
// bits each, for i from 0 to 3:
//
//   - Byte i: lower 6 bits, scale i. Upper 2 bits, the upper bits of scale 4+i.
//   - Byte 4+i: lower 6 bits, minimum i. Upper 2 bits, the upper bits of minimum 4+i.
//   - Byte 8+i: lower 4 bits of scale 4+i in the lower half, and of minimum 4+i in the upper half.
func scalesK(b *[12]byte, i int) (scale, minimum float32) {
	if i < 4 {
		return whole[b[i]&63], whole[b[4+i]&63]
	}
	i -= 4
	return whole[b[8+i]&15|b[i]>>6<<4], whole[b[8+i]>>4|b[4+i]>>6<<4]
}

// Q4_K: 256 elements in 8 sub-blocks: a scale d, a scale m of the minima, 12 bytes of scales and minima, and 128 bytes.
// The lower halves of bytes 32*j to 32*j+31 have sub-block 2*j, and the upper halves have sub-block 2*j+1. An element
// is (d*scale)*q - m*minimum.
func decodeQ4_K(dst []float32, src []byte) {
	for ; len(dst) >= 256; dst, src = dst[256:], src[144:] {
		b := (*[144]byte)(src)
		d, m, scales := load16(b[:]), load16(b[2:]), (*[12]byte)(b[4:])
		for j := range 4 {
			y, qs := (*[64]float32)(dst[64*j:]), (*[32]byte)(b[16+32*j:])
			d1, m1 := scalesK(scales, 2*j)
			d2, m2 := scalesK(scales, 2*j+1)
			d1, m1, d2, m2 = d*d1, m*m1, d*d2, m*m2
			for i, x := range qs {
				y[i], y[32+i] = float32(d1*whole[x&15])-m1, float32(d2*whole[x>>4])-m2
			}
		}
	}
}

// Q5_K: like Q4_K, with 32 more bytes before the 128. Bit j of byte i has the fifth bit of element i of sub-block j.
func decodeQ5_K(dst []float32, src []byte) {
	for ; len(dst) >= 256; dst, src = dst[256:], src[176:] {
		b := (*[176]byte)(src)
		d, m := load16(b[:]), load16(b[2:])
		scales, high := (*[12]byte)(b[4:]), (*[32]byte)(b[16:])
		for j := range 4 {
			y, qs := (*[64]float32)(dst[64*j:]), (*[32]byte)(b[48+32*j:])
			d1, m1 := scalesK(scales, 2*j)
			d2, m2 := scalesK(scales, 2*j+1)
			d1, m1, d2, m2 = d*d1, m*m1, d*d2, m*m2
			for i, x := range qs {
				h := high[i] >> (2 * j & 7)
				y[i], y[32+i] = float32(d1*whole[x&15|h<<4&16])-m1, float32(d2*whole[x>>4|h<<3&16])-m2
			}
		}
	}
}

// Q6_K: 256 elements in 16 sub-blocks: 128 bytes of lower 4 bits, 64 bytes of upper 2 bits, 16 signed scales, and a
// scale d. An element is (d*scale)*(q-32).
//
// The first half of each of the three arrays has the first 128 elements, in four runs of 32:
//
//   - The lower bits of runs 0 and 1 are in the lower halves of the bytes, and those of runs 2 and 3 in the upper
//     halves.
//   - The upper bits of run r are at bit 2*r.
func decodeQ6_K(dst []float32, src []byte) {
	for ; len(dst) >= 256; dst, src = dst[256:], src[210:] {
		b := (*[210]byte)(src)
		d := load16(b[208:])
		for part := range 4 { // 16 elements of each of the four runs
			half, at := part/2, part%2*16
			y := (*[112]float32)(dst[128*half+at:])
			ql, qh := (*[48]byte)(b[64*half+at:]), (*[16]byte)(b[128+32*half+at:])
			scales := (*[7]byte)(b[192+8*half+part%2:])
			d0, d1, d2, d3 := d*signed[scales[0]], d*signed[scales[2]], d*signed[scales[4]], d*signed[scales[6]]
			for i, h := range qh {
				l, m := ql[i], ql[32+i]
				y[i], y[32+i] = d0*signed[l&15|h<<4&48-32], d1*signed[m&15|h<<2&48-32]
				y[64+i], y[96+i] = d2*signed[l>>4|h&48-32], d3*signed[m>>4|h>>2&48-32]
			}
		}
	}
}
