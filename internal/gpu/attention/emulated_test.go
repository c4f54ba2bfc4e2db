//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func emulatedGPU(t testing.TB, sms int) *machine { return emulatedCrowd(t, sms, sms) }

// emulatedDriver returns emulatedGPU and its driver, whose calls can fail.
func emulatedDriver(t testing.TB, sms int) (*machine, *fakedriver.Library) {
	all, lib := enginetest.EmulatedGroup(t, 1, sms, sms)
	m := machineOf(t, all[0])
	m.engine.Eager = true
	return m, lib
}

// emulatedCrowd returns a GPU on which other work occupies some multiprocessors.
func emulatedCrowd(t testing.TB, sms, free int) *machine {
	m := machineOf(t, enginetest.Emulated(t, sms, free))
	m.engine.Eager = true
	return m
}

func TestEmulatedRandom(t *testing.T) {
	testRandom(t, emulatedGPU(t, 5), reftest.Cases(t, 8, 60), options{work: 1e5, longest: 300})
}

func TestEmulatedSpread(t *testing.T) {
	testSpread(t, emulatedGPU(t, 5), reftest.Cases(t, 6, 60), options{work: 3e5, longest: 300})
}

func TestEmulatedDirect(t *testing.T) { testDirect(t, emulatedGPU(t, 5), reftest.Cases(t, 2, 24), 300) }

// Prefill kernels that the GPU has.
func TestEmulatedPrefill(t *testing.T) {
	m := emulatedGPU(t, 5)
	testPrefill(t, m, takePrefill, reftest.Cases(t, 3, 24), 300, false)
	testPrefillPrecision(t, m, 700)
	testPrefillGrowing(t, m)
}

// Prefill kernels with masks and score modifications.
func TestEmulatedPrefillScores(t *testing.T) {
	m := emulatedGPU(t, 5)
	testPrefill(t, m, takePrefill, reftest.Cases(t, 2, 40), 300, true)
	testHiddenSteps(t, m)
}

func TestEmulatedMixed(t *testing.T) {
	m := emulatedGPU(t, 5)
	if !m.runsBeside() {
		t.Skip("the PTX of another GPU")
	}
	testMixed(t, m, 16, 200)
}

// The tests of decode kernels run prefill kernels, too, if there are enough rows.
func TestEmulatedPrefillInstead(t *testing.T) {
	m := emulatedGPU(t, 5)
	testPrefillInstead(t, m, takePrefill, reftest.Cases(t, 1, 1000), 300)
}

func TestEmulatedSchedules(t *testing.T) {
	testSchedules(t, emulatedGPU(t, 7), reftest.Cases(t, 25, 300))
}

func TestEmulatedPages(t *testing.T) { testPages(t, emulatedGPU(t, 5), 900) }

func TestEmulatedScores(t *testing.T) {
	testScores(t, emulatedGPU(t, 5), reftest.Cases(t, 4, 30), options{work: 3e6, longest: 500})
}

func TestEmulatedInvariant(t *testing.T) {
	testInvariant(t, emulatedGPU(t, 5), reftest.Cases(t, 4, 12), 700)
}

func TestEmulatedInvariantBatches(t *testing.T) {
	testInvariantBatches(t, emulatedGPU(t, 7), []int{260, 300}, 2e6)
}

func TestEmulatedInvariantGraph(t *testing.T) {
	testInvariantGraph(t, emulatedGPU(t, 4), 3, 600)
}

// The user's variants, compiled for the emulated GPU.
func TestEmulatedWritten(t *testing.T) {
	m := emulatedGPU(t, 5)
	testWritten(t, m, reftest.Cases(t, 1, 3), 4, 300)
	testWrittenTiles(t, m)
}

// The user's variants by prefill kernels.
func TestEmulatedWrittenPrefill(t *testing.T) {
	m := emulatedGPU(t, 5)
	testWrittenPrefill(t, m, takePrefill, reftest.Cases(t, 1, 4), 300)
	if m.runsBeside() {
		testWrittenPrefill(t, m, takeBoth, 0, 200)
	}
	testWrittenSteps(t, m)
	testWrittenBuiltIns(t, m, reftest.Cases(t, 0, 3))
}

func TestEmulatedTrees(t *testing.T) {
	testTrees(t, emulatedGPU(t, 5), reftest.Cases(t, 4, 30), options{work: 20000, longest: 200})
}

func TestEmulatedPrefixes(t *testing.T) {
	testPrefixes(t, emulatedGPU(t, 13), reftest.Cases(t, 3, 60), 200, true)
}

func TestEmulatedCutPrefixes(t *testing.T) {
	testCutPrefixes(t, emulatedGPU(t, 13), reftest.Cases(t, 1, 12))
}

func TestEmulatedPrefixWindows(t *testing.T) {
	testPrefixWindows(t, emulatedGPU(t, 5), reftest.Cases(t, 1, 6), 120)
}

func TestEmulatedPrefixesRecorded(t *testing.T) {
	testPrefixesRecorded(t, emulatedGPU(t, 13), 3, 150, true)
}

func TestEmulatedRepeats(t *testing.T) { testRepeats(t, emulatedGPU(t, 3), 4, 1e5, 400) }

func TestEmulatedLargeQueries(t *testing.T) { testLargeQueries(t, emulatedGPU(t, 3)) }

func TestEmulatedManyTiles(t *testing.T) { testManyTiles(t, emulatedGPU(t, 3)) }

func TestEmulatedManyRows(t *testing.T) {
	groups := slices.Clone(manyRows)
	reftest.Rand(t).Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
	testManyRows(t, emulatedGPU(t, 5), 500, groups[:reftest.Cases(t, 1, len(groups))]...)
}

func TestEmulatedRow(t *testing.T) {
	m := emulatedGPU(t, 3)
	if !m.engine.hasEpilogue() {
		t.Skip("the PTX of another GPU")
	}
	testRow(t, m, reftest.Cases(t, 4, 100), 3000)
}

func TestEmulatedLatent(t *testing.T) {
	m := emulatedGPU(t, 4)
	if !m.engine.hasEpilogue() {
		t.Skip("kernels for values in keys are those of 9.0")
	}
	testLatent(t, m, 22, 300)
	testLatentPart(t, m, 5, 300)
	testLatentSchedules(t, m, 300)
	testLatentPasses(t, m)
	testLatentNarrow(t, m, 10, 300)
	testFamilies(t, m, reftest.Rand(t), latentFamilies(), 10_000_000)
}

func TestEmulatedNarrow(t *testing.T) {
	m := emulatedGPU(t, 3)
	testNarrow(t, m, reftest.Cases(t, 18, 200), 200)
	testNarrowNaN(t, m)
	testNarrowRotary(t, m, 6)
}

func TestEmulatedNarrowScores(t *testing.T) {
	testNarrowScores(t, emulatedGPU(t, 3), reftest.Cases(t, 6, 120), 200)
}

func TestEmulatedFour(t *testing.T) {
	testFour(t, emulatedGPU(t, 3), reftest.Cases(t, 8, 200), 200, false)
}

func TestEmulatedFourScores(t *testing.T) {
	testFour(t, emulatedGPU(t, 3), reftest.Cases(t, 6, 120), 200, true)
}

func TestEmulatedNeighbours(t *testing.T) { testNeighbours(t, emulatedGPU(t, 3)) }

func TestEmulatedAppend(t *testing.T) { testAppend(t, emulatedGPU(t, 3)) }

func TestEmulatedGraph(t *testing.T) { testGraph(t, emulatedGPU(t, 4), 3, 0, 200, 4) }

func TestEmulatedRuns(t *testing.T) { testRuns(t, emulatedGPU(t, 4), 700) }

func TestEmulatedStreams(t *testing.T) {
	testStreams(t, emulatedGPU(t, 3), 2, 20, options{kv: attn.Float16, work: 1e5, longest: 2000})
}

func TestEmulatedManyLaunches(t *testing.T) { testManyLaunches(t, emulatedGPU(t, 3), 3) }

func TestEmulatedAcceptance(t *testing.T) { testAcceptance(t, emulatedGPU(t, 5), 120000) }

// Thread blocks that share output tiles need not run at the same time.
func TestEmulatedCrowd(t *testing.T) {
	const sms = 5
	free := reftest.Rand(t).Perm(sms - 1)
	for _, free := range free[:reftest.Cases(t, 1, len(free))] {
		free++
		t.Run(fmt.Sprint(free), func(t *testing.T) {
			m := emulatedCrowd(t, sms, free)
			testRandom(t, m, reftest.Cases(t, 4, 8), options{work: 1e5, longest: 300})
			testRuns(t, m, 700)
			testManyRows(t, m, 200, 16)
		})
	}
}

func TestEmulatedCopiesBefore(t *testing.T) {
	testCopiesBefore(t, emulatedGPU(t, 5), 20, options{work: 3e4, longest: 200})
}

func TestEmulatedParts(t *testing.T) { testParts(t, emulatedGPU(t, 5), 30) }

func TestEmulatedBackward(t *testing.T) {
	m := emulatedGPU(t, 5)
	testBackward(t, m, reftest.Cases(t, 4, 40), 150_000, 200)
	testBackwardBits(t, m, 2, 150)
}

func TestEmulatedBackwardScores(t *testing.T) {
	m := emulatedGPU(t, 5)
	testBackwardScores(t, m, reftest.Cases(t, 3, 34), 60_000, 150)
	testBackwardScoresBits(t, m, 2, reftest.Cases(t, 150, 400))
}

func TestEmulatedBackwardWide(t *testing.T) {
	testBackwardWide(t, emulatedGPU(t, 5), reftest.Cases(t, 2, 24), 60_000, 150)
}

// Gradients with the user's variants, compiled for the emulated GPU.
func TestEmulatedBackwardWritten(t *testing.T) {
	if os.Getenv("LEANATTENTION_PTX") == "" && !reftest.Every(t) {
		t.Skip("a case takes seconds: all of them with LEANATTENTION_TESTS=all, some with LEANATTENTION_PTX")
	}
	m := emulatedGPU(t, 5)
	testBackwardWritten(t, m, reftest.Cases(t, 2, 12), 60_000, 150)
	testBackwardWrittenBits(t, m, 2, 140)
}

// Each driver call of gradients fails once: the error is returned, nothing leaks, and a second try works.
func TestEmulatedBackwardFailures(t *testing.T) {
	m, lib := emulatedDriver(t, 3)
	s := lib.State()
	shape := reftest.Shape{Heads: 1, KVHeads: 1, Dim: 8, ValueDim: 8, Queries: []int{5}, Keys: []int{9}}
	b := m.newBackward(t, reftest.Rand(t), shape, reftest.Normal, attn.BFloat16, costs{out: true}, 1)
	m.runBackward(t, b)
	before := s.Calls
	live := func() error {
		w, err := m.engine.NewBackward(&b.shape, b.kv)
		if err != nil {
			return err
		}
		return w.Run(m.Stream, &b.ops)
	}
	noError(t, live())
	calls := s.Calls - before
	if calls < 3 {
		t.Fatalf("%d calls", calls)
	}
	for i := range calls {
		s.FailWith, s.FailAt = 700, s.Calls+1+i
		err := live()
		s.FailAt = 0
		if failed := (*cuda.Error)(nil); !errors.As(err, &failed) && (err != nil || !strings.HasPrefix(s.Failed(), "cuCtxPop")) {
			t.Errorf("call %d, %s: %v", i, s.Failed(), err)
		}
		m.runBackward(t, b)
		b.check(t)
	}
	b.close(t)
}
