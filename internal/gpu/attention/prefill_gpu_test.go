//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/emulated"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// otherGPU returns a GPU of compute capability 9.0 with those kernels of other GPUs that are asked for: of units whose names begin so. Its
// driver compiles them from PTX, see [emulated.Images].
func otherGPU(t testing.TB, units string, asked func(k kernel) bool) *machine {
	m := realGPU(t)
	if m.engine.info.Capability != 90 {
		t.Skip("the GPU has these kernels anyway, or none")
	}
	capability, image := emulated.Images(t)
	real := gpu.Image
	gpu.Image = func(unit string, of int) ([]byte, error) {
		if strings.HasPrefix(unit, units) { // and the units with scores
			of = capability
			return image(unit, of)
		}
		return real(unit, of)
	}
	t.Cleanup(func() { gpu.Image = real })
	others := slices.DeleteFunc(kernelsOf(capability), func(k kernel) bool { return !asked(k) })
	m.engine.kernels = append(others, slices.DeleteFunc(m.engine.kernels, asked)...)
	return m
}

// prefillMma returns a GPU of 9.0 with the prefill kernels of GPUs without products of warp groups.
func prefillMma(t testing.TB) *machine {
	return otherGPU(t, prefillUnit, func(k kernel) bool { return k.parts > 0 })
}

func TestGPUPrefillMma(t *testing.T) {
	m := prefillMma(t)
	for _, scored := range []bool{false, true} {
		testPrefill(t, m, takePrefill, enginetest.OrShort(300, 20), enginetest.OrShort(3000, 500), scored)
	}
	testPrefillPrecision(t, m, enginetest.OrShort(16384, 2000))
	testHiddenSteps(t, m)
}

func TestGPUPrefillMmaInstead(t *testing.T) {
	testPrefillInstead(t, prefillMma(t), takePrefill, 1000, enginetest.OrShort(3000, 500))
}

func BenchmarkGPUPrefillMma(b *testing.B) { benchmarkPrefills(b, prefillMma(b)) }
