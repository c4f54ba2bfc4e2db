package cpu

import "unsafe"

// readSumGo returns the sum, modulo 2^64, of the 64-bit words of eight streams of n bytes: stream s
// begins at p + s*step. n is a multiple of 64.
func readSumGo(p *byte, step, n int) (sum uint64) {
	for s := range 8 {
		for _, w := range unsafe.Slice((*uint64)(unsafe.Add(unsafe.Pointer(p), s*step)), n/8) {
			sum += w
		}
	}
	return sum
}
