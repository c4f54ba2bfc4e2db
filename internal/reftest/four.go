package reftest

import "math"

// q4Integers are the integers of Q4, in the order of their indices.
var q4Integers = [16]float64{-127, -102, -82, -66, -51, -37, -25, -12, 0, 13, 26, 39, 54, 70, 88, 111}

// StoreQ4 replaces the elements of a row by what a cache of Q4 returns of them, and returns the elements that are stored: 18 bytes for
// each 32 columns. mixed says that rows are mixed; acc is the arithmetic of the rows.
func StoreQ4(row []float64, mixed bool, acc Format) (stored []byte) {
	if mixed {
		for i, x := range row {
			row[i] = math.Max(-0x1p122, math.Min(0x1p122, x))
		}
		MixQ4(row, acc)
	}
	for ; len(row) > 0; row = row[32:] {
		stored = append(stored, storeQ4(row[:32])...)
	}
	return stored
}

func storeQ4(row []float64) []byte {
	least, most := math.Inf(1), math.Inf(-1)
	for i, x := range row {
		row[i] = math.Max(-0x1p127, math.Min(0x1p127, Float32.Round(x)))
		least, most = math.Min(least, row[i]), math.Max(most, row[i])
	}
	if -least >= most {
		most = least
	}
	scale := Float32.Round(-most / 127)
	if math.Abs(scale) < 0x1p-126 {
		scale = math.Copysign(0x1p-126, scale)
	}
	scale = BFloat16.Round(scale)
	b := make([]byte, 18)
	for i, x := range row {
		index := 8
		if scale == scale {
			index = 0
			y := Float32.Round(x / scale)
			for j, q := range q4Integers {
				if math.Abs(y-q) < math.Abs(y-q4Integers[index]) {
					index = j
				}
			}
		}
		row[i] = q4Integers[index] * scale
		b[i%16] |= byte(index << (i / 16 * 4))
	}
	bits := math.Float32bits(float32(scale))
	b[16], b[17] = byte(bits>>16), byte(bits>>24)
	return b
}

// MixQ4 multiplies each 32 neighbours of a row by the Hadamard matrix of Sylvester, in arithmetic acc.
func MixQ4(row []float64, acc Format) {
	for ; len(row) > 0; row = row[32:] {
		for bit := 1; bit < 32; bit *= 2 {
			for i := range 32 {
				if i&bit == 0 {
					a, b := row[i], row[i|bit]
					row[i], row[i|bit] = acc.Round(a+b), acc.Round(a-b)
				}
			}
		}
	}
}
