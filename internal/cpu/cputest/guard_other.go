//go:build !unix

package cputest

import (
	"testing"
	"unsafe"
)

// Guarded returns n bytes of memory between others, of which free finds out whether they were written.
func Guarded(t testing.TB, n int) (mem unsafe.Pointer, free func()) {
	const margin = 64
	words := make([]uint64, (n+2*margin+7)/8)
	b := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*8)
	for i := range b {
		b[i] = 0xff // NaN in every format
	}
	return unsafe.Pointer(&b[margin]), func() {
		for i, v := range b {
			if (i < margin || i >= margin+n) && v != 0xff {
				t.Errorf("byte %d of %d was written", i-margin, n)
				break
			}
		}
	}
}
