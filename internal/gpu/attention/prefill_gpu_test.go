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

// otherGPU returns a GPU of compute capability 9.0 with the prefill kernels of GPUs without products of warp groups.
// Its driver compiles them from PTX, see [emulated.Images].
func otherGPU(t testing.TB) *machine {
	m := realGPU(t)
	if m.engine.info.Capability != 90 {
		t.Skip("the GPU has these kernels anyway, or none")
	}
	capability, image := emulated.Images(t)
	real := gpu.Image
	gpu.Image = func(unit string, of int) ([]byte, error) {
		if strings.HasPrefix(unit, prefillUnit) { // and the units with scores
			of = capability
			return image(unit, of)
		}
		return real(unit, of)
	}
	t.Cleanup(func() { gpu.Image = real })
	isPrompt := func(k kernel) bool { return k.parts > 0 }
	prompts := slices.DeleteFunc(kernelsOf(capability), func(k kernel) bool { return !isPrompt(k) })
	m.engine.kernels = append(prompts, slices.DeleteFunc(m.engine.kernels, isPrompt)...)
	return m
}

func TestGPUPrefillMma(t *testing.T) {
	m := otherGPU(t)
	for _, scored := range []bool{false, true} {
		testPrefill(t, m, takePrefill, enginetest.OrShort(300, 20), enginetest.OrShort(3000, 500), scored)
	}
	testPrefillPrecision(t, m, enginetest.OrShort(16384, 2000))
}

func TestGPUPrefillMmaInstead(t *testing.T) {
	testPrefillInstead(t, otherGPU(t), takePrefill, 1000, enginetest.OrShort(3000, 500))
}

func BenchmarkGPUPrefillMma(b *testing.B) { benchmarkPrefills(b, otherGPU(b)) }
