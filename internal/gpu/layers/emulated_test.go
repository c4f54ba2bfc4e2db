//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"fmt"
	"os"
	"testing"

	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func emulatedGPU(t testing.TB, sms int) *machine {
	m := machineOf(t, enginetest.Emulated(t, sms, sms))
	m.engine.Eager = true
	return m
}

func emulatedDecoder(t testing.TB, sms int) (*machine, *Engine) {
	return decoderOf(t, emulatedGPU(t, sms))
}

func TestEmulatedSample(t *testing.T) {
	m := emulatedGPU(t, 16)
	testSample(t, m, reftest.Cases(t, 1, 6), 1000)
	testSampleGreedy(t, m, reftest.Cases(t, 1, 6), 1, 2, 3, 5, 500)
}

// Rows so long that each of 128 warps goes through a whole round of loads, and begins a second one.
func TestEmulatedSampleLong(t *testing.T) {
	m, rng := emulatedGPU(t, 16), reftest.Rand(t)
	const vocab = 70_001
	logits := [][]float32{sampleLogits(rng, vocab), sampleLogits(rng, vocab)}
	m.sampleRows(t, logits, nil, nil, rng.IntN(8))
	settings := []Setting{sampleSetting(rng, vocab), sampleSetting(rng, vocab)}
	m.sampleRows(t, logits, settings, []float64{rng.Float64(), rng.Float64()}, rng.IntN(8))
}

func TestEmulatedSampleSets(t *testing.T) {
	testSampleSets(t, emulatedGPU(t, 16), reftest.Cases(t, 1, 3), 100)
}

func TestEmulatedSampleRepeats(t *testing.T) {
	testSampleRepeats(t, emulatedGPU(t, 16), 2, reftest.Cases(t, 4, 32), 100)
}

func TestEmulatedSampleChain(t *testing.T) { testSampleChain(t, emulatedGPU(t, 16), 2, 5, 100) }

func TestEmulatedSampleGraph(t *testing.T) { testSampleGraph(t, emulatedGPU(t, 16), 3, 700) }

func TestEmulatedLinear(t *testing.T) {
	m, d := emulatedDecoder(t, 16)
	testLinear(t, m, d, reftest.Cases(t, 8, 60), 264, 200, someRows...)
	testLinear(t, m, d, reftest.Cases(t, 2, 12), 3072, 40, someRows...) // slices of x that are wide ones, and ones that registers cannot hold
	testLinear(t, m, d, reftest.Cases(t, 4, 24), 520, 200, 17, 32, 33, 64, 65, 128)
}

// Clusters have several tiles each, and rings go round.
func TestEmulatedLinearRounded(t *testing.T) {
	m, d := emulatedDecoder(t, 8)
	testRounded(t, m, d, reftest.Cases(t, 6, 48), 1544, 130)
}

// Blocks have several tiles each, and rings go round.
func TestEmulatedLinearManyRows(t *testing.T) {
	m, d := emulatedDecoder(t, 4)
	if d.info.Capability != groupCapability {
		t.Skip("there are no kernels for hundreds of rows")
	}
	testLinear(t, m, d, 12, 400, 300, manyRows...)
}

// Gated units on every way that there is: few rows, batches, tiles.
func TestEmulatedGates(t *testing.T) {
	m, d := emulatedDecoder(t, 16)
	testLayers(t, m, d, layersOf{gates: true}, reftest.Cases(t, 10, 20), 264, 200, someRows...)
	testLayers(t, m, d, layersOf{gates: true}, reftest.Cases(t, 2, 4), 3072, 40, someRows...)
}

func TestEmulatedGatesManyRows(t *testing.T) {
	m, d := emulatedDecoder(t, 4)
	if d.info.Capability != groupCapability {
		t.Skip("there are no kernels for hundreds of rows")
	}
	testLayers(t, m, d, layersOf{gates: true}, 6, 264, 300, manyRows...)
}

func TestEmulatedNorm(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testNorm(t, m, d, 20)
}

func TestEmulatedNodes(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testRMSNorm(t, m, d, 20)
	testRotary(t, m, d, 16)
	testElements(t, m, d, 20)
	testMergeStates(t, m, d, 20)
	testNodesRefuse(t, m, d)
}

func TestEmulatedTraining(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testProduct(t, m, d, reftest.Cases(t, 6, 30), 150)
	testTrainingRefuses(t, m, d)
}

func TestEmulatedRows(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testColumnSums(t, m, d, 8)
	testSlopes(t, m, d, 10)
	testNormGradient(t, m, d, 10)
	testMove(t, m, d, 20)
	testRounding(t, m, d, reftest.Cases(t, 4, 20))
}

// Clusters have several tiles each, share others, and rings go round.
func TestEmulatedProducts(t *testing.T) {
	for _, sms := range []int{2, 6} {
		t.Run(fmt.Sprint(sms), func(t *testing.T) {
			m, d := emulatedDecoder(t, sms)
			if d.info.Capability != groupCapability {
				t.Skip("the GPU has no kernels of hopper.go")
			}
			testProduct(t, m, d, reftest.Cases(t, 8, 100), 500)
			testLayers(t, m, d, layersOf{product: map[hopperLayout]int{}}, 3, 1000, 400, manyRows...)
		})
	}
}

func TestEmulatedLoss(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testLoss(t, m, d, reftest.Cases(t, 5, 24), 200)
	testLossRows(t, m, d, reftest.Cases(t, 3, 24))
	testTableGradient(t, m, d, 6)
	testLossRefuses(t, m, d)
}

func TestEmulatedSolver(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testSolver(t, m, d, reftest.Cases(t, 2, 10))
}

func TestEmulatedGather(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testGather(t, m, d, 20)
}

func TestEmulatedMegakernel(t *testing.T) {
	m, d := emulatedDecoder(t, 4)
	testMegakernel(t, m, d, reftest.Cases(t, 1, 2), 130, 640, false, false)
}

func TestEmulatedMegakernelLinear(t *testing.T) {
	m, d := emulatedDecoder(t, 4)
	testMegakernel(t, m, d, reftest.Cases(t, 1, 2), 130, 640, true, false)
}

func TestEmulatedMegakernelLlama(t *testing.T) {
	if os.Getenv("LEANATTENTION_PTX") == "" && !reftest.Every(t) {
		t.Skip("a case takes seconds: all of them with LEANATTENTION_TESTS=all, some with LEANATTENTION_PTX")
	}
	m, d := emulatedDecoder(t, 4)
	testMegakernel(t, m, d, reftest.Cases(t, 1, 3), 130, 640, false, true)
}

func TestEmulatedMegakernelPacked(t *testing.T) {
	m, d := emulatedDecoder(t, 4)
	testMegakernelPacked(t, m, d, reftest.Cases(t, 1, 4), 130, 640)
}

func TestEmulatedProjection(t *testing.T) {
	m, d := emulatedDecoder(t, 16)
	testProjection(t, m, d, 4, 130, 520)
}

// Blocks share tiles, tiles have missing rows, and rings go round.
// Clusters have several tiles each, and rings go round.
func TestEmulatedNarrowRows(t *testing.T) {
	m, d := emulatedDecoder(t, 4)
	testRowsRefuses(t, m, d)
	if d.info.Capability != groupCapability {
		t.Skip("there are no kernels")
	}
	testRows(t, m, d, reftest.Cases(t, 6, 60), 1000, 300, 65, 129, 257)
	testNarrow(t, m, d, reftest.Cases(t, 8, 40), 320, 300, 129, 200, 257)
}

func TestEmulatedNarrow(t *testing.T) {
	m, d := emulatedDecoder(t, 5)
	testNarrowNotFinite(t, m, d)
	testNarrow(t, m, d, reftest.Cases(t, 16, 64), 600, 300, 1, 2, 3, 4, 5, 9, 17, 20, 33)
	testNarrow(t, m, d, reftest.Cases(t, 1, 4), 128, 40, 40, 65)
	testNarrowGather(t, m, d)
}

func TestEmulatedHeadLinear(t *testing.T) {
	m, d := emulatedDecoder(t, 16)
	testHeadLinear(t, m, d, reftest.Cases(t, 5, 60), 72)
}

func TestEmulatedNarrowChain(t *testing.T) {
	m, d := emulatedDecoder(t, 5)
	testNarrowChain(t, m, d, 1, [][2]int{{224, 72}}, 1, 33)
}
