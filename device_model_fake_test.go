//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention

import "testing"

// A cache on a GPU does what one in host memory does.
func TestDeviceCacheAgainstModel(t *testing.T) {
	gpu, _ := FakeGPU(t)
	testCacheAgainstModel(t, modelPlace{gpu: gpu}, 3, 3000)
}
