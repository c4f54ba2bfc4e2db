package weight

import (
	"encoding/binary"
	"fmt"
	"math"

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
