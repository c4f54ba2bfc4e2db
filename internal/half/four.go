package half

import (
	"encoding/binary"
	"math"
)

// Q4 is the bits of Q4Columns numbers of 4 bits: an index of 4 bits for each number, and a scale for all. A number is an integer of
// a table times the scale, which float32 has exactly:
//
//   - bytes 0 to 15: byte i has the index of number i in its lower bits, and the index of number i+16 in its upper bits
//   - bytes 16 and 17: the scale, a bfloat16 in little endian, which may be negative
//
// The integers are those that lose least of 32 numbers of a normal distribution, if the number of the largest magnitude becomes -127,
// rounded, and with 0 among them. Products with a scale of 8 bits are exact, so all engines read the same numbers.
type Q4 [18]byte

// Q4Columns is the numbers of a Q4.
const Q4Columns = 32

// Q4Largest is the largest number that is stored as a Q4.
const Q4Largest = 0x1p127

// q4Least is the smallest magnitude of a scale: the smallest normal float32.
const q4Least = 0x1p-126

// q4s has the integers of all indices.
var q4s = [16]float32{-127, -102, -82, -66, -51, -37, -25, -12, 0, 13, 26, 39, 54, 70, 88, 111}

// q4Nearest has, at 254 + the least integer that is not below 2y, the index nearest to y. Of two that are as near, the index is the
// smaller one.
var q4Nearest = func() (t [2*254 + 1]uint8) {
	for i := range t {
		twice := float32(i - 254)
		for t[i] < 15 && twice > q4s[t[i]]+q4s[t[i]+1] {
			t[i]++
		}
	}
	return t
}()

// EncodeQ4 stores numbers, of which src has Q4Columns for each element of dst:
//
//	x     = src, at most Q4Largest in magnitude (infinities, too)
//	most  = max x, or min x if -min x >= max x
//	scale = most / -127, rounded to float32, at least 2^-126 in magnitude, rounded to bfloat16
//	index = that of the integer nearest to x / scale, rounded to float32; of two the smaller index
//
// If a number is NaN, the scale is, and the indices are those of 0.
func EncodeQ4(dst []Q4, src []float32) {
	for i := range dst {
		dst[i].encode((*[Q4Columns]float32)(src[i*Q4Columns:]))
	}
}

func (q *Q4) encode(src *[Q4Columns]float32) {
	least, most := src[0], src[0]
	for _, x := range src {
		least, most = min(least, x), max(most, x) // NaN if one is
	}
	least, most = max(least, -Q4Largest), min(most, Q4Largest) // finite products: the scale may be rounded up
	if most != most {
		for i := range 16 {
			q[i] = 0x88
		}
		binary.LittleEndian.PutUint16(q[16:], uint16(BFromFloat32(most)))
		return
	}
	if -least >= most {
		most = least
	}
	scale := most / -127
	if scale < q4Least && scale > -q4Least {
		scale = float32(math.Copysign(q4Least, float64(scale)))
	}
	short := BFromFloat32(scale)
	scale = short.Float32()
	index := func(x float32) uint8 {
		y := min(max(min(max(x, -Q4Largest), Q4Largest)/scale, -127), 127)
		return q4Nearest[int(math.Ceil(float64(2*y)))+254]
	}
	for i := range 16 {
		q[i] = index(src[i]) | index(src[i+16])<<4
	}
	binary.LittleEndian.PutUint16(q[16:], uint16(short))
}

// Scale returns the scale.
func (q *Q4) Scale() float32 { return BFloat16(binary.LittleEndian.Uint16(q[16:])).Float32() }

// DecodeQ4 writes the numbers of src to dst, which has Q4Columns for each element of src. The numbers are exact.
func DecodeQ4[F ~float32 | ~float64](dst []F, src []Q4) {
	for i := range src {
		q, to := &src[i], (*[Q4Columns]F)(dst[i*Q4Columns:])
		scale := F(q.Scale())
		for j, b := range q[:16] {
			to[j], to[j+16] = F(q4s[b&15])*scale, F(q4s[b>>4])*scale
		}
	}
}

// MixQ4 adds and subtracts the numbers of each Q4Columns neighbours of x, in place, by the Hadamard matrix of Sylvester:
//
//	x[i] = sum_j (-1)^(bits that i and j share) x[j]
//
// in five steps of sums of two: numbers 1, 2, 4, 8 and 16 apart. Twice mixed, x is 32 times as large. Products of rows keep their
// values, but for a factor of 32, and outliers spread over their neighbours. x has whole elements of Q4Columns.
func MixQ4[F ~float32 | ~float64](x []F) {
	for ; len(x) >= Q4Columns; x = x[Q4Columns:] {
		x := (*[Q4Columns]F)(x)
		for h := 1; h < Q4Columns; h *= 2 {
			for i := 0; i < Q4Columns; i += 2 * h {
				for j := i; j < i+h; j++ {
					x[j], x[j+h] = x[j]+x[j+h], x[j]-x[j+h]
				}
			}
		}
	}
}
