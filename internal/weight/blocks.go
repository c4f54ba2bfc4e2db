package weight

import (
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/half"
)

// A format in blocks stores a row as blocks of elements. A block has integers and the float32 factors of runs of elements:
//
//	element i = scale of its run * integer i + minimum of its run
//
// with both operations rounded to float32, as ggml rounds them. A format without minima has no sum. Bytes are little-endian.

// RunBlock is the number of elements of the blocks that kernels read: a block of a format is one of them, or several.
const RunBlock = 32

// layout is how a format stores a block.
type layout struct {
	elements int  // of a block, a multiple of RunBlock
	run      int  // elements with one scale: RunBlock or a half of it
	minima   bool // runs have minima
}

// Run returns the number of elements with one scale, 0 if f has no blocks.
func (f Format) Run() int { return formats[f].blocks.run }

// HasMinima reports whether runs of elements have minima.
func (f Format) HasMinima() bool { return formats[f].blocks.minima }

// Unpack writes the integers of the blocks at src, and the scale and the minimum of each run. q is whole blocks. A format without
// minima has none of them.
func Unpack(f Format, q []int8, scales, minima []float32, src []byte) {
	switch f { // a table of functions would have memory escape
	case Q8_0:
		unpackQ8_0(q, scales, src)
	case Q4_0:
		unpackQ4_0(q, scales, src)
	case Q4_1:
		unpackQ4_1(q, scales, minima, src)
	case Q5_0:
		unpackQ5_0(q, scales, src)
	case Q5_1:
		unpackQ5_1(q, scales, minima, src)
	case Q4_K:
		unpackQ4_K(q, scales, minima, src)
	case Q5_K:
		unpackQ5_K(q, scales, minima, src)
	case Q6_K:
		unpackQ6_K(q, scales, src)
	case Int4_32, Int4_64, Int4_128:
		unpackInt4(f, q, scales, src)
	default:
		panic(fmt.Sprintf("blocks of %v", f))
	}
}

// decodeBlocks converts whole blocks to float32.
func decodeBlocks(f Format, dst []float32, src []byte) {
	const most = 256 // elements of a block
	var q [most]int8
	var scales, minima [most / 16]float32
	l := &formats[f].blocks
	for ; len(dst) > 0; dst, src = dst[l.elements:], src[f.Bytes():] {
		Unpack(f, q[:l.elements], scales[:], minima[:], src[:f.Bytes()])
		for i, v := range q[:l.elements] {
			dst[i] = float32(scales[i/l.run] * float32(v))
			if l.minima {
				dst[i] += minima[i/l.run]
			}
		}
	}
}

func float16(b []byte) float32 { return half.Float16(binary.LittleEndian.Uint16(b)).Float32() }

// Q8_0: a scale, and 32 signed bytes.
func unpackQ8_0(q []int8, scales []float32, src []byte) {
	for i := range len(q) / 32 {
		b, to := (*[34]byte)(src[34*i:]), (*[32]int8)(q[32*i:])
		scales[i] = float16(b[:])
		for j, v := range b[2:] {
			to[j] = int8(v)
		}
	}
}

// nibbles unpacks 32 integers of 4 bits: the lower half of byte i is integer i, and the upper half integer 16+i.
func nibbles(q *[32]int8, b *[16]byte, zero int8) {
	for i, v := range b {
		q[i], q[16+i] = int8(v&15)-zero, int8(v>>4)-zero
	}
}

// Q4_0: a scale, and 32 integers of 4 bits, from which 8 is subtracted.
func unpackQ4_0(q []int8, scales []float32, src []byte) {
	for i := range len(q) / 32 {
		b := (*[18]byte)(src[18*i:])
		scales[i] = float16(b[:])
		nibbles((*[32]int8)(q[32*i:]), (*[16]byte)(b[2:]), 8)
	}
}

// Q4_1: a scale, a minimum, and 32 integers of 4 bits.
func unpackQ4_1(q []int8, scales, minima []float32, src []byte) {
	for i := range len(q) / 32 {
		b := (*[20]byte)(src[20*i:])
		scales[i], minima[i] = float16(b[:]), float16(b[2:])
		nibbles((*[32]int8)(q[32*i:]), (*[16]byte)(b[4:]), 0)
	}
}

// fifths adds the fifth bits of 32 integers: bit i is that of integer i.
func fifths(q *[32]int8, b []byte) {
	bits := binary.LittleEndian.Uint32(b)
	for i := range q {
		q[i] += int8(bits>>i&1) << 4
	}
}

// Q5_0: a scale, the fifth bits of 32 integers, and their lower bits as in Q4_0. 16 is subtracted from each integer.
func unpackQ5_0(q []int8, scales []float32, src []byte) {
	for i := range len(q) / 32 {
		b, to := (*[22]byte)(src[22*i:]), (*[32]int8)(q[32*i:])
		scales[i] = float16(b[:])
		nibbles(to, (*[16]byte)(b[6:]), 16)
		fifths(to, b[2:])
	}
}

// Q5_1: a scale, a minimum, and integers as in Q5_0, from which nothing is subtracted.
func unpackQ5_1(q []int8, scales, minima []float32, src []byte) {
	for i := range len(q) / 32 {
		b, to := (*[24]byte)(src[24*i:]), (*[32]int8)(q[32*i:])
		scales[i], minima[i] = float16(b[:]), float16(b[2:])
		nibbles(to, (*[16]byte)(b[8:]), 0)
		fifths(to, b[4:])
	}
}

// sixBits unpacks the factors of 8 runs: a scale and a minimum of 6 bits each, which a block's scale and the scale of its minima
// multiply. The lower 6 bits of bytes 0 to 3 are scales 0 to 3, and those of bytes 4 to 7 minima 0 to 3. Byte 8+i has the lower 4 bits
// of scale 4+i and, above, of minimum 4+i. The upper 2 bits of byte i are those of scale 4+i, and of byte 4+i those of minimum 4+i.
func sixBits(scales, minima *[8]float32, b *[16]byte) {
	d, m := float16(b[:]), float16(b[2:])
	for i := range 8 {
		scale, minimum := sixBitsOf(b, i)
		scales[i], minima[i] = d*float32(scale), -(m * float32(minimum))
	}
}

// sixBitsOf returns the integers of a run's scale and minimum, without the factors of the super-block.
func sixBitsOf(b *[16]byte, run int) (scale, minimum byte) {
	x, i := (*[12]byte)(b[4:]), run%4
	if run < 4 {
		return x[i] & 63, x[4+i] & 63
	}
	return x[8+i]&15 | x[i]>>6<<4, x[8+i]>>4 | x[4+i]>>6<<4
}

// Q4_K: 256 integers of 4 bits in 8 runs: a scale, the scale of the minima, and 12 bytes (sixBits); the lower halves of 32 bytes are a
// run, and the upper halves the next run.
func unpackQ4_K(q []int8, scales, minima []float32, src []byte) {
	for i := range len(q) / 256 {
		b := (*[144]byte)(src[144*i:])
		sixBits((*[8]float32)(scales[8*i:]), (*[8]float32)(minima[8*i:]), (*[16]byte)(b[:]))
		for j := range 4 {
			to := (*[64]int8)(q[256*i+64*j:])
			for k, v := range (*[32]byte)(b[16+32*j:]) {
				to[k], to[32+k] = int8(v&15), int8(v>>4)
			}
		}
	}
}

// Q5_K: as Q4_K, with 32 bytes before the integers: bit r of byte k is the fifth bit of integer k of run r.
func unpackQ5_K(q []int8, scales, minima []float32, src []byte) {
	for i := range len(q) / 256 {
		b := (*[176]byte)(src[176*i:])
		sixBits((*[8]float32)(scales[8*i:]), (*[8]float32)(minima[8*i:]), (*[16]byte)(b[:]))
		high := (*[32]byte)(b[16:])
		for j := range 4 {
			to := (*[64]int8)(q[256*i+64*j:])
			for k, v := range (*[32]byte)(b[48+32*j:]) {
				h := high[k] >> (2 * j)
				to[k], to[32+k] = int8(v&15|h&1<<4), int8(v>>4|h>>1&1<<4)
			}
		}
	}
}

// Q6_K: 256 integers of 6 bits in two halves of four times 32, from which 32 is subtracted: 128 bytes of lower bits, 64 of upper bits,
// the signed scales of 16 runs, and a scale. In a half, 64 bytes have the lower bits of the first 64 integers in their lower halves, and
// those of the others above. 32 bytes have the upper bits of integer k of each 32, two bits each.
func unpackQ6_K(q []int8, scales []float32, src []byte) {
	for i := range len(q) / 256 {
		b := (*[210]byte)(src[210*i:])
		d := float16(b[208:])
		for r, v := range b[192:208] {
			scales[16*i+r] = d * float32(int8(v))
		}
		for half := range 2 {
			to, low, high := (*[128]int8)(q[256*i+128*half:]), (*[64]byte)(b[64*half:]), (*[32]byte)(b[128+32*half:])
			for k, h := range high {
				to[k], to[32+k] = int8(low[k]&15|h&3<<4)-32, int8(low[32+k]&15|h>>2&3<<4)-32
				to[64+k], to[96+k] = int8(low[k]>>4|h>>4&3<<4)-32, int8(low[32+k]>>4|h>>6<<4)-32
			}
		}
	}
}

// Round writes a row in a format of fewer than 16 bits. ok is false if the format lacks one of the numbers.
func Round(f Format, dst []byte, x []float32) (scale float32, ok bool) {
	switch f {
	case Int8:
		return RoundInt8(unsafe.Slice((*int8)(unsafe.Pointer(unsafe.SliceData(dst))), len(dst)), x)
	case Int4_32, Int4_64, Int4_128:
		return 1, RoundInt4(f, dst, x)
	case E4M3:
		return RoundE4M3(dst, x)
	}
	panic(fmt.Sprintf("rounding to %v", f))
}

// RoundInt8 writes x as signed bytes of one scale: the integers nearest to x / scale, ties to even, with the scale max |x| / 127. If
// all |x| are less than 2^-120, scale and integers are 0. If an x is not finite, ok is false.
func RoundInt8(q []int8, x []float32) (scale float32, ok bool) {
	var most uint32
	for _, v := range x {
		most = max(most, math.Float32bits(v)&^(1<<31))
	}
	const inf, tiny = 0x7f800000, (127 - 120) << 23 // bits of infinity and of 2^-120
	q = q[:len(x)]
	switch {
	case most >= inf:
		return 0, false
	case most < tiny:
		clear(q)
		return 0, true
	}
	largest := math.Float32frombits(most)
	by := 127 / largest
	for i, v := range x {
		q[i] = int8(math.RoundToEven(float64(float32(v * by))))
	}
	return largest / 127, true
}
