package weight

import (
	"encoding/binary"
	"math"

	"gorgonia.org/leanattention/internal/half"
)

// INT4 in groups: a block is a group of 32, 64 or 128 elements, with a float16 scale, a zero of a byte, and integers of 4 bits, 32
// elements after the other as in Q4_0:
//
//	element i = scale * (integer i - zero)
//
// which is exact in float32. GPTQ and AWQ store such groups in other orders: package decoder brings them into this one.

// MaxInt4Zero is the largest zero: GPTQ stores one less in 4 bits.
const MaxInt4Zero = 16

func unpackInt4(f Format, q []int8, scales []float32, src []byte) {
	elements, bytes := f.Block(), f.Bytes()
	for i := range len(q) / elements {
		b := src[bytes*i:][:bytes]
		scale, zero := float16(b), int8(b[2])
		for j := range elements / 32 {
			scales[elements/32*i+j] = scale
			nibbles((*[32]int8)(q[elements*i+32*j:]), (*[16]byte)(b[3+16*j:]), zero)
		}
	}
}

// BadZero returns the first block of rows in a format whose zero is too large, and the zero; -1: there is none.
func (f Format) BadZero(data []byte) (block, zero int) {
	if f != Int4_32 && f != Int4_64 && f != Int4_128 {
		return -1, 0
	}
	size := f.Bytes()
	for at := 0; at < len(data); at += size {
		if data[at+2] > MaxInt4Zero {
			return at / size, int(data[at+2])
		}
	}
	return -1, 0
}

// RoundInt4 writes x, which is whole groups, in a format of INT4 groups. Of several zeros and scales it takes those with the least squared
// error. If an x is not finite, or a scale is beyond float16, ok is false.
func RoundInt4(f Format, dst []byte, x []float32) (ok bool) {
	elements, bytes := f.Block(), f.Bytes()
	for i := range len(x) / elements {
		if !roundGroup(dst[bytes*i:][:bytes], x[elements*i:][:elements]) {
			return false
		}
	}
	return true
}

const int4Most = 15 // the largest integer

// roundGroup rounds a group.
func roundGroup(b []byte, x []float32) (ok bool) {
	least, most := float32(0), float32(0) // a zero is an integer, so 0 is between them
	for _, v := range x {
		if v-v != 0 {
			return false
		}
		least, most = min(least, v), max(most, v)
	}
	width := (float64(most) - float64(least)) / int4Most
	if d := half.FromFloat32(float32(width)).Float32(); d-d != 0 {
		return false
	}
	best := int4Group{off: math.Inf(1)}
	for _, part := range [...]float64{1, 0.9, 0.8} { // a smaller scale cuts the largest elements, and is nearer to the others
		at := 0.0
		if width > 0 {
			at = -float64(least) / width
		}
		for zero := math.Floor(at); zero <= math.Ceil(at); zero++ {
			g := int4Group{scale: float32(width * part), zero: float32(min(max(zero, 0), int4Most))}
			if g.fit(x); g.off < best.off {
				best = g
			}
		}
	}
	// For given integers the best scale is known, and for a given scale the best integers.
	for range 3 {
		g := best
		g.scale = g.next
		if g.fit(x); g.off >= best.off {
			break
		}
		best = g
	}
	scale := half.FromFloat32(best.scale)
	binary.LittleEndian.PutUint16(b, uint16(scale))
	b[2] = byte(best.zero)
	by := inverse(scale.Float32())
	for j := range len(x) / 32 {
		to := b[3+16*j:][:16]
		for k := range to {
			to[k] = byte(integer4(x[32*j+k], by, best.zero)) | byte(integer4(x[32*j+16+k], by, best.zero))<<4
		}
	}
	return true
}

// int4Group is a scale and a zero, and their squared error.
type int4Group struct {
	scale, zero float32
	off         float64
	next        float32 // the best scale for the integers of this one
}

// fit rounds the scale to float16, and sets the error and the next scale.
func (g *int4Group) fit(x []float32) {
	g.scale = half.FromFloat32(g.scale).Float32()
	by := inverse(g.scale)
	g.off = 0
	var above, below float32
	for _, v := range x {
		q := integer4(v, by, g.zero) - g.zero
		off := float64(g.scale*q - v)
		g.off += off * off
		above, below = above+q*v, below+q*q
	}
	if g.next = g.scale; below > 0 {
		g.next = above / below
	}
}

func inverse(x float32) float32 {
	if x == 0 {
		return 0
	}
	return 1 / x
}

// integer4 returns the integer of v.
func integer4(v, by, zero float32) float32 {
	const magic = 3 << 22 // whose unit in the last place is 1
	return min(max((v*by+magic)-magic+zero, 0), int4Most)
}
