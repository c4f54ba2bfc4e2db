//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gputest

import (
	"testing"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/emulated"
	"gorgonia.org/leanattention/internal/gpu"
)

// emulate makes the machine's driver one that executes kernels without a GPU.
func emulate(t testing.TB) {
	real := gpu.Image
	var capability int
	capability, gpu.Image = emulated.Images(t)
	t.Cleanup(func() { gpu.Image = real })
	emulated.Execute(t, fakedriver.System(t), capability, 16)
}
