//go:build unix

package cputest

import (
	"syscall"
	"testing"
	"unsafe"
)

// Guarded returns n bytes of memory that end where a page begins that nobody may touch, so that an access
// behind them ends the test; the bytes in front of them are watched by free, which finds writes. Their
// address is a multiple of the largest power of two that n is one of, and no more: unaligned for vectors.
func Guarded(t testing.TB, n int) (mem unsafe.Pointer, free func()) {
	t.Helper()
	page := syscall.Getpagesize()
	size := (n+page-1)/page*page + page // at least a byte and at most a page in front, if n is no multiple
	b, err := syscall.Mmap(-1, 0, size+page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mprotect(b[size:], syscall.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	front := b[:size-n]
	for i := range front {
		front[i] = 0xff // NaN in every format
	}
	return unsafe.Pointer(&b[:size+1][size-n]), func() {
		for i, v := range front {
			if v != 0xff {
				t.Errorf("the byte %d in front of %d was written", len(front)-i, n)
				break
			}
		}
		if err := syscall.Munmap(b); err != nil {
			t.Error(err)
		}
	}
}
