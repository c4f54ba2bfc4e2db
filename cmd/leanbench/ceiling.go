package main

import (
	"encoding/binary"
	"runtime"
	"sync"
)

// readSum adds up the 64-bit words of b on all threads, in eight streams each:
// one stream does not get all that the memory gives. Bytes behind the last whole
// word of a stream are left out.
func readSum(b []byte) (sum uint64) {
	threads := runtime.GOMAXPROCS(0)
	sums, share := make([]uint64, threads), len(b)/threads
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
	n := len(b) / 64 * 8
	s0, s1, s2, s3 := b[:n], b[n:2*n], b[2*n:3*n], b[3*n:4*n]
	s4, s5, s6, s7 := b[4*n:5*n], b[5*n:6*n], b[6*n:7*n], b[7*n:8*n]
	var t [4]uint64
	word := binary.LittleEndian.Uint64
	for i := 0; i+8 <= n; i += 8 {
		t[0] += word(s0[i:]) + word(s4[i:])
		t[1] += word(s1[i:]) + word(s5[i:])
		t[2] += word(s2[i:]) + word(s6[i:])
		t[3] += word(s3[i:]) + word(s7[i:])
	}
	return t[0] + t[1] + t[2] + t[3]
}
