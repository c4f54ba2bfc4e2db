package gpu

import (
	"math"
	"math/bits"
)

// Ceil returns ceil(n/size) for n >= 0.
func Ceil(n, size int) int {
	if n == 0 {
		return 0
	}
	return (n-1)/size + 1
}

// Reach is n plus two products of numbers >= 0, and MaxInt if that is no int.
func Reach(n int, products [2][2]int) int {
	for _, x := range products {
		hi, lo := bits.Mul64(uint64(x[0]), uint64(x[1]))
		if hi != 0 || lo > uint64(math.MaxInt-n) {
			return math.MaxInt
		}
		n += int(lo)
	}
	return n
}
