//go:build !(linux && !android && !faketime && (amd64 || arm64) && !nogpu)

// Package system makes a GPU for tests on machines that have none, where there are
// C libraries that can be called without cgo: not here.
package system

import (
	"os"
	"testing"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
)

// Emulate ends a test that asks for an emulated GPU.
func Emulate(t testing.TB) *fakedriver.Library {
	t.Helper()
	if os.Getenv("LEANATTENTION_GPU") == "emulated" {
		t.Skip("no GPU is emulated here")
	}
	return nil
}
