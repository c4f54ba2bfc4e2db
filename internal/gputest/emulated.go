//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gputest

import (
	"testing"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/emulated"
)

// emulate makes the machine's driver one that executes kernels without a GPU.
func emulate(t testing.TB) { emulated.Execute(t, fakedriver.System(t), 120, 16) }
