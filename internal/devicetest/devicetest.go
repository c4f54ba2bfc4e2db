// Package devicetest opens the GPU that the tests of the public packages run on.
package devicetest

import (
	"errors"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/emulated/system"
)

// Open is the machine's first GPU, closed when the test ends, or, where there is
// none or no driver, the end of the test. A driver that is too old fails it.
// With LEANATTENTION_GPU=emulated in the environment it is one that needs none, and is
// slow: give the tests -short.
func Open(t testing.TB) *device.GPU {
	t.Helper()
	return OpenSome(t, 1)
}

// OpenSome is Open of the machine's first GPUs as one: of so many, where there are as many.
func OpenSome(t testing.TB, n int) *device.GPU {
	t.Helper()
	system.Emulate(t)
	ordinals := make([]int, n)
	for i := range ordinals {
		ordinals[i] = i
	}
	gpu, err := device.Open(ordinals...)
	if errors.Is(err, la.ErrNoDevice) {
		t.Skipf("no %d GPUs: %v", n, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := gpu.Close(); err != nil {
			t.Error(err)
		}
	})
	return gpu
}
