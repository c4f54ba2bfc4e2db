//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"fmt"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/emulated"
)

// emulatedGPU is a machine without a GPU that executes the kernels, slowly.
func emulatedGPU(t testing.TB, sms int) *machine {
	t.Helper()
	return emulatedCrowd(t, sms, sms)
}

// emulatedCrowd is one where somebody else has some multiprocessors.
func emulatedCrowd(t testing.TB, sms, free int) *machine {
	t.Helper()
	if raceEnabled {
		t.Skip("kernels run in one goroutine, many times as slowly under the race detector")
	}
	lib := fakedriver.New(t)
	real := Image
	var capability int
	capability, Image = emulated.Images(t)
	t.Cleanup(func() { Image = real })
	emulated.Crowd(t, lib, capability, sms, free)
	drv, err := cuda.LoadFrom(lib.Path)
	noError(t, err)
	dev, err := drv.Open(0)
	noError(t, err)
	t.Cleanup(func() {
		noError(t, dev.Close())
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d objects left in the driver, %d calls that would have crashed", lib.Live(), lib.Defects())
		}
	})
	m := machineOf(t, dev)
	m.engine.eager = true
	return m
}

func emulatedDecoder(t testing.TB, sms int) (*machine, *Decoder) {
	return decoderOf(t, emulatedGPU(t, sms))
}

func TestEmulatedRandom(t *testing.T) {
	testRandom(t, emulatedGPU(t, 5), 60, options{work: 1e5, longest: 300})
}

// The kernels for many rows are for 9.0 alone.
func TestEmulatedPrefill(t *testing.T) {
	m := emulatedGPU(t, 5)
	if !m.engine.finishes() {
		t.Skip("the PTX of another GPU")
	}
	testPrefill(t, m, 24, 300)
}
func TestEmulatedSchedules(t *testing.T)    { testSchedules(t, emulatedGPU(t, 7), 300) }
func TestEmulatedPages(t *testing.T)        { testPages(t, emulatedGPU(t, 5), 900) }
func TestEmulatedRepeats(t *testing.T)      { testRepeats(t, emulatedGPU(t, 3), 4, 1e5, 400) }
func TestEmulatedLargeQueries(t *testing.T) { testLargeQueries(t, emulatedGPU(t, 3)) }
func TestEmulatedManyTiles(t *testing.T)    { testManyTiles(t, emulatedGPU(t, 3)) }
func TestEmulatedManyRows(t *testing.T)     { testManyRows(t, emulatedGPU(t, 5), 500, manyRows...) }
func TestEmulatedNeighbours(t *testing.T)   { testNeighbours(t, emulatedGPU(t, 3)) }
func TestEmulatedAppend(t *testing.T)       { testAppend(t, emulatedGPU(t, 3)) }
func TestEmulatedGraph(t *testing.T)        { testGraph(t, emulatedGPU(t, 4), 3, 200) }
func TestEmulatedRuns(t *testing.T)         { testRuns(t, emulatedGPU(t, 4), 700) }
func TestEmulatedStreams(t *testing.T) {
	testStreams(t, emulatedGPU(t, 3), 2, 20, options{kv: attn.Float16, work: 1e5, longest: 2000})
}
func TestEmulatedManyLaunches(t *testing.T) { testManyLaunches(t, emulatedGPU(t, 3), 3) }
func TestEmulatedAcceptance(t *testing.T)   { testAcceptance(t, emulatedGPU(t, 5), 120000) }

// Thread blocks that share output tiles need not run at the same time.
func TestEmulatedCrowd(t *testing.T) {
	for free := 1; free < 5; free++ {
		t.Run(fmt.Sprint(free), func(t *testing.T) {
			m := emulatedCrowd(t, 5, free)
			testRandom(t, m, 8, options{work: 1e5, longest: 300})
			testRuns(t, m, 700)
			testManyRows(t, m, 200, 16)
		})
	}
}

func TestEmulatedSample(t *testing.T) {
	m := emulatedGPU(t, 16)
	testSample(t, m, 6, 1000)
	testSampleGreedy(t, m, 1, 2, 3, 5, 500)
}
func TestEmulatedSampleSets(t *testing.T)    { testSampleSets(t, emulatedGPU(t, 16), 3, 100) }
func TestEmulatedSampleRepeats(t *testing.T) { testSampleRepeats(t, emulatedGPU(t, 16), 2, 100) }
func TestEmulatedSampleChain(t *testing.T)   { testSampleChain(t, emulatedGPU(t, 16), 2, 5, 100) }
func TestEmulatedSampleGraph(t *testing.T)   { testSampleGraph(t, emulatedGPU(t, 16), 3, 700) }

func TestEmulatedLinear(t *testing.T) {
	m, d := emulatedDecoder(t, 16)
	testLinear(t, m, d, 60, 264, 200)
	testLinear(t, m, d, 12, 3072, 40) // slices of x that are wide ones, and ones that registers cannot hold
}

func TestEmulatedNorm(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testNorm(t, m, d, 20)
}

func TestEmulatedGather(t *testing.T) {
	m, d := emulatedDecoder(t, 3)
	testGather(t, m, d, 20)
}

func TestEmulatedChain(t *testing.T) {
	m, d := emulatedDecoder(t, 4)
	testChain(t, m, d, 4, 130, 640, false)
}

func TestEmulatedChainLinear(t *testing.T) {
	m, d := emulatedDecoder(t, 4)
	testChain(t, m, d, 4, 130, 640, true)
}

func TestEmulatedCopies(t *testing.T) { testCopies(t, emulatedGPU(t, 3), 60, 20<<10) }
func TestEmulatedCopiesBefore(t *testing.T) {
	testCopiesBefore(t, emulatedGPU(t, 5), 20, options{work: 3e4, longest: 200})
}

func TestEmulatedProjection(t *testing.T) {
	m, d := emulatedDecoder(t, 16)
	testProjection(t, m, d, 4, 130, 520)
}
