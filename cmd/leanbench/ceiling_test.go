package main

import (
	"encoding/binary"
	"runtime"
	"testing"
)

// TestReadSum: every word is read once.
func TestReadSum(t *testing.T) {
	words := 64 * runtime.GOMAXPROCS(0) * 5
	b, want := make([]byte, 8*words), uint64(0)
	for i := range words {
		binary.NativeEndian.PutUint64(b[8*i:], 1<<40+uint64(i))
		want += 1<<40 + uint64(i)
	}
	if got := readSum(b); got != want {
		t.Errorf("sum %d, want %d", got, want)
	}
	if got := readSum(b[:7]); got != 0 {
		t.Errorf("sum of no word is %d", got)
	}
}
