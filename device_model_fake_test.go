//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention

import "testing"

// A cache on a GPU does what one in host memory does.
func TestDeviceCacheAgainstModel(t *testing.T) {
	gpu, _ := FakeGPU(t)
	testCacheAgainstModel(t, modelPlace{gpu: gpu}, 3, 3000)
}

// Goroutines share a cache on a GPU, and one of them closes it, or the GPU.
func TestDeviceConcurrentSteps(t *testing.T) {
	gpu, _ := FakeGPU(t)
	at := modelPlace{gpu: gpu}
	steps := 40
	if testing.Short() {
		steps = 10
	}
	testConcurrentSteps(t, at, steps)
	testConcurrentCallsOfOneStep(t, at)
	testCloseWhileRunning(t, 5, func() (modelPlace, func() error) { return at, nil })
	testCloseWhileRunning(t, 10, func() (modelPlace, func() error) {
		gpu, err := OpenGPU(1)
		noError(t, err)
		return modelPlace{gpu: gpu}, gpu.Close
	})
}
