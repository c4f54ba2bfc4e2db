package gpu_test

import (
	"fmt"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// Types have the numbers that kernels know them by, and package cuda launches the copies as their kernel is made.
func TestTypesAreTheKernels(t *testing.T) {
	for file, lines := range map[string][]string{
		"types.cuh": {fmt.Sprintf("enum : int { F32 = %d, F16 = %d, BF16 = %d };", attn.Float32, attn.Float16, attn.BFloat16)},
		"copies.cu": {"constexpr int COPIES_MOST = 8; constexpr int COPIES_THREADS = 256; constexpr int COPIES_BLOCK = 4096;"}, // putoff.go of package cuda
	} {
		enginetest.Says(t, file, lines...)
	}
}

// The Go structs are those of the kernels, field by field.
func TestStructs(t *testing.T) {
	for _, c := range []struct {
		file, name string
		here       any
	}{
		{"kernels/copies.cu", "Copies", cuda.Copies{}},
		{"internal/cuda/fakedriver/testdata/driver.c", "copies", cuda.Copies{}},
	} {
		enginetest.SameStruct(t, c.file, c.name, c.here)
	}
}
