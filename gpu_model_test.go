package leanattention

import (
	"errors"
	"testing"
)

// gpuPlace is the machine's first GPU, or the end of the test.
func gpuPlace(t *testing.T) modelPlace {
	t.Helper()
	gpu, err := OpenGPU(0)
	if errors.Is(err, ErrNoDriver) || errors.Is(err, ErrNoDevice) {
		t.Skipf("no GPU: %v", err)
	}
	noError(t, err)
	t.Cleanup(func() {
		if err := gpu.Close(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
	return modelPlace{gpu: gpu, real: true}
}

func TestGPUCacheAgainstModel(t *testing.T) { testCacheAgainstModel(t, gpuPlace(t), 3, 3000) }

func TestGPUConcurrentSteps(t *testing.T) {
	testConcurrentSteps(t, gpuPlace(t), 150)
	testConcurrentCallsOfOneStep(t, gpuPlace(t))
	testCloseWhileRunning(t, 20, func() (modelPlace, func() error) {
		at := gpuPlace(t)
		return at, at.gpu.Close
	})
}
