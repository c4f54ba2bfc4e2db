//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu_test

import (
	"testing"

	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

func TestEmulatedCopies(t *testing.T) { testCopies(t, enginetest.Emulated(t, 3, 3), 60, 20<<10) }
