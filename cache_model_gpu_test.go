package leanattention

import (
	"errors"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// gpuPlace is the machine's first GPU, or the end of the test.
func gpuPlace(t *testing.T) modelPlace { return gpusPlace(t, 0) }

// gpusPlace is some of its GPUs, opened as one.
func gpusPlace(t *testing.T, ordinals ...int) modelPlace {
	t.Helper()
	system.Emulate(t)
	UseEagerEngine(t) // forks attend to what they share at once, however little it is
	gpu, err := device.Open(ordinals...)
	if errors.Is(err, ErrNoDevice) {
		t.Skipf("no GPUs %v: %v", ordinals, err)
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

// Several GPUs do what one does.
func TestGPUsCacheAgainstModel(t *testing.T) {
	testCacheAgainstModel(t, gpusPlace(t, 0, 1), 3, 3000)
}

func TestGPUConcurrentSteps(t *testing.T) {
	testConcurrentSteps(t, gpuPlace(t), 150)
	testConcurrentCallsOfOneStep(t, gpuPlace(t))
	testCloseWhileRunning(t, 20, func() (modelPlace, func() error) {
		at := gpuPlace(t)
		return at, at.gpu.Close
	})
}

func TestGPUCacheMemoryFlat(t *testing.T) { testDeviceCacheMemoryFlat(t, gpuPlace(t), 33_334) } // of three layers each

// Runs take no memory after the first ones, wherever their operands are.
func testDeviceCacheMemoryFlat(t *testing.T, at modelPlace, steps int) {
	gpu, rng := at.gpu, reftest.Rand(t)
	c := newTestCache(t, at.config(CacheConfig{Layers: 3, KVHeads: 2, HeadDim: 8, PageSize: 4, Pages: 12, DType: Float16}))
	for _, there := range []bool{false, true} {
		s := newStepGraph(t, c, 4, 4, tensor.Float32)
		defer s.close()
		s.there = there
		a := newTestSequence(t, c)
		var first device.Memory
		for i := range steps {
			noError(t, s.step.Set([]Append{{Seq: a, Tokens: 1 + i%4}}))
			for l := range 3 {
				noError(t, s.runLayer(l, s.draw(rng, l, newTestTokens(1+i%4, 3))))
			}
			noError(t, s.step.Commit(), a.Truncate(i%3))
			m, err := gpu.Memory()
			noError(t, err)
			// Tensors that this test uploads are garbage at once, and come back when they are collected.
			if i <= 12 { // by then it has seen steps of all sizes
				first = m
			}
			if !there && (m.Used != first.Used || m.Pinned != first.Pinned) {
				t.Fatalf("%+v after the first steps, %+v after %d", first, m, i)
			}
		}
		noError(t, a.Release())
	}
	noError(t, c.Close())
}

// A cache on a GPU does what one in host memory does.
func TestDeviceCacheAgainstModel(t *testing.T) {
	gpu, _ := FakeGPU(t)
	testCacheAgainstModel(t, modelPlace{gpu: gpu}, reftest.Cases(t, 1, 3), reftest.Cases(t, 500, 3000))
}

func TestDevicesCacheAgainstModel(t *testing.T) {
	for n := 2; n <= reftest.Cases(t, 2, 3); n++ {
		gpu, _ := FakeGPUs(t, n)
		testCacheAgainstModel(t, modelPlace{gpu: gpu}, 1, 500)
		noError(t, gpu.Close())
	}
}

func TestDevicesConcurrentSteps(t *testing.T) {
	gpu, _ := FakeGPUs(t, 2)
	at := modelPlace{gpu: gpu}
	testConcurrentSteps(t, at, 10)
	testCloseWhileRunning(t, 5, func() (modelPlace, func() error) {
		gpu, err := device.Open(1, 0)
		noError(t, err)
		return modelPlace{gpu: gpu}, gpu.Close
	})
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
		gpu, err := device.Open(1)
		noError(t, err)
		return modelPlace{gpu: gpu}, gpu.Close
	})
}
