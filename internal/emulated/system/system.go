//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

// Package system makes the GPU of package emulated the one that the whole process finds.
package system

import (
	"os"
	"testing"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/emulated"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// Emulate makes the machine's driver one that executes kernels without a GPU, until
// the test ends, if LEANATTENTION_GPU=emulated is in the environment. It has four, which
// reach each other, and do what is queued at any time that its order allows. The test that
// opens a GPU calls it first. It returns that driver, or nil.
func Emulate(t testing.TB) *fakedriver.Library {
	t.Helper()
	if os.Getenv("LEANATTENTION_GPU") != "emulated" {
		return nil
	}
	real := gpu.Image
	var capability int
	capability, gpu.Image = emulated.Images(t)
	gpu.Virtual = emulated.Arch(t)
	t.Cleanup(func() { gpu.Image, gpu.Virtual = real, "" })
	lib := fakedriver.System(t)
	lib.State().Devices = 4
	lib.State().Late = reftest.Rand(t).Uint64() | 1
	emulated.Execute(t, lib, capability, 16)
	return lib
}
