package cpu

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

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
		fmt.Println("kernels:", t)
		code = max(code, e.m.Run())
		restore()
	}
	return code
}
