package cputest

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// lowerTier says that the tier in use is not the best one, in a run of all.
var lowerTier bool

// Cases is [reftest.Cases], of which lower tiers have half: the code around their kernels is the same.
func Cases(t testing.TB, few, every int) int {
	t.Helper()
	if !reftest.Every(t) && lowerTier {
		few = max(1, few/2)
	}
	return reftest.Cases(t, few, every)
}

// Long returns s with one sequence of random length: at most `queries` queries, and fewer than `keys` keys. Unless slow tests run all
// cases, the number of queries is bounded, so that the float64 reference of the widest shape takes less than a second, not 6 s.
func Long(t testing.TB, rng *rand.Rand, s reftest.Shape, queries, keys int) reftest.Shape {
	t.Helper()
	keys = rng.IntN(keys)
	if !reftest.Every(t) {
		const most = 1 << 26 // products
		queries = min(queries, 1+most/((1+keys)*s.Heads*(s.Dim+s.ValueDim)))
	}
	s.Queries, s.Keys = []int{1 + rng.IntN(queries)}, []int{keys}
	return s
}

// A Tier is an instruction set that kernels exist for: a cpu.Tier.
type Tier interface {
	~uint8
	String() string
}

// EveryTier returns a run of the tests with the kernels of every tier up to the best one, which force has them use; if the environment
// chooses one, or there are benchmarks to run or inputs to be found, with the tier in use only.
func EveryTier[T Tier](m *testing.M, best T, force func(name string) (restore func())) interface{ Run() int } {
	return everyTier[T]{m, best, force}
}

type everyTier[T Tier] struct {
	m     *testing.M
	best  T
	force func(name string) (restore func())
}

func (e everyTier[T]) Run() int {
	flag.Parse()
	for _, name := range []string{"test.bench", "test.fuzz", "test.list"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" {
			return e.m.Run()
		}
	}
	// The race detector does not see assembly, and makes everything else slow.
	if os.Getenv("LEANATTENTION_CPU") != "" || reftest.RaceEnabled {
		return e.m.Run()
	}
	code := 0
	for t := range e.best + 1 {
		restore := e.force(t.String())
		lowerTier = t < e.best
		fmt.Println("kernels:", t)
		code = max(code, e.m.Run())
		restore()
	}
	return code
}
