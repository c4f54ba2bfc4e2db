//go:build linux && (amd64 || arm64)

package reftest

import (
	"syscall"
	"testing"
)

// Reserve returns address space that uses memory only where it is written. It is released when the test ends.
// If the space is not available, the test is skipped.
func Reserve(t testing.TB, bytes int) []byte {
	t.Helper()
	m, err := syscall.Mmap(-1, 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	if err != nil {
		t.Skipf("no address space for %d bytes: %v", bytes, err)
	}
	t.Cleanup(func() {
		if err := syscall.Munmap(m); err != nil {
			t.Error(err)
		}
	})
	return m
}
