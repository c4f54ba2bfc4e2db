package leanattention

import (
	"errors"
	"testing"
)

// TestGPUCacheAgainstModel runs where there is a GPU.
func TestGPUCacheAgainstModel(t *testing.T) {
	gpu, err := OpenGPU(0)
	if errors.Is(err, ErrNoDriver) || errors.Is(err, ErrNoDevice) {
		t.Skipf("no GPU: %v", err)
	}
	noError(t, err)
	defer gpu.Close()
	testCacheAgainstModel(t, modelPlace{gpu: gpu, real: true}, 3, 3000)
}
