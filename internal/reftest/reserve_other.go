//go:build !linux || (!amd64 && !arm64)

package reftest

import "testing"

// Reserve skips the test: only Linux on amd64 and arm64 has the address space.
func Reserve(t testing.TB, bytes int) []byte {
	t.Helper()
	t.Skipf("no address space for %d bytes: Linux on amd64 and arm64 has it", bytes)
	return nil
}
