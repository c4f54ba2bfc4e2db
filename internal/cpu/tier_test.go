package cpu

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// lowerTier says that the tier in use is not the best one, in a run of all.
var lowerTier bool

// cases is [reftest.Cases], of which lower tiers have half: the code around their kernels is the same.
func cases(t testing.TB, few, every int) int {
	t.Helper()
	if !reftest.Every(t) && lowerTier {
		few = max(1, few/2)
	}
	return reftest.Cases(t, few, every)
}

// everyTier runs the tests with the kernels of every tier that this machine has; if the environment
// chooses one, or there are benchmarks to run or inputs to be found, with the tier in use only.
type everyTier struct{ m *testing.M }

func (e everyTier) Run() int {
	flag.Parse()
	for _, name := range []string{"test.bench", "test.fuzz"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" {
			return e.m.Run()
		}
	}
	// The race detector does not see assembly, and makes everything else slow.
	if os.Getenv(TierVariable) != "" || reftest.RaceEnabled {
		return e.m.Run()
	}
	code := 0
	for t := range tier(tiers) {
		if t > bestTier() {
			break
		}
		restore := forceTier(t)
		lowerTier = t < bestTier()
		fmt.Println("kernels:", t)
		code = max(code, e.m.Run())
		restore()
	}
	return code
}
