//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package emulated

import (
	"os"
	"testing"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
)

// Machine makes the machine's driver one that executes kernels without a GPU, until
// the test ends, if LEANATTENTION_GPU=emulated is in the environment. The test that
// opens a GPU calls it first.
func Machine(t testing.TB) {
	t.Helper()
	if os.Getenv("LEANATTENTION_GPU") != "emulated" {
		return
	}
	real := gpu.Image
	var capability int
	capability, gpu.Image = Images(t)
	t.Cleanup(func() { gpu.Image = real })
	Execute(t, fakedriver.System(t), capability, 16)
}
