package main

import (
	"runtime"
	"sync"
	"unsafe"
)

// readSum adds up the 64-bit words of b on all threads, in eight streams each:
// one stream does not get all that the memory gives. Bytes behind the last whole
// word of a stream are left out.
func readSum(b []byte) (sum uint64) {
	threads := runtime.GOMAXPROCS(0)
	sums, share := make([]uint64, threads), len(b)/threads/8*8 // words are not cut
	var all sync.WaitGroup
	for i := range threads {
		all.Go(func() { sums[i] = readStreams(b[i*share : (i+1)*share]) })
	}
	all.Wait()
	for _, s := range sums {
		sum += s
	}
	return sum
}

func readStreams(b []byte) (sum uint64) {
	n := len(b) / 64
	all := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), 8*n)
	s0, s1, s2, s3 := all[:n], all[n:2*n], all[2*n:3*n], all[3*n:4*n]
	s4, s5, s6, s7 := all[4*n:5*n], all[5*n:6*n], all[6*n:7*n], all[7*n:8*n]
	// For the compiler, which then checks no index in the loop.
	s1, s2, s3, s4, s5, s6, s7 = s1[:len(s0)], s2[:len(s0)], s3[:len(s0)], s4[:len(s0)], s5[:len(s0)], s6[:len(s0)], s7[:len(s0)]
	var a, c, d, e uint64
	for i := range s0 {
		a += s0[i] + s4[i]
		c += s1[i] + s5[i]
		d += s2[i] + s6[i]
		e += s3[i] + s7[i]
	}
	return a + c + d + e
}
