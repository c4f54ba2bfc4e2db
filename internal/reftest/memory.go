package reftest

import (
	"iter"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// Rand returns a generator with a fresh seed and logs the seed. The environment variable REFTEST_SEED sets
// the seed, to repeat a run.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("REFTEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("REFTEST_SEED: %v", err)
		}
	}
	t.Logf("REFTEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// AtLeast yields the indexes of n random cases. If seen is then still false, it yields further indexes until
// seen is true, up to 50*n+500 cases in all. A fixed number of random cases would sometimes miss a condition
// that a test must see.
func AtLeast(n int, seen func() bool) iter.Seq[int] {
	return func(yield func(int) bool) {
		for i := 0; i < n || i < 50*n+500 && !seen(); i++ {
			if !yield(i) {
				return
			}
		}
	}
}

// Cases returns the number of cases of a slow test: every if [Every] is true, and few otherwise.
func Cases(t testing.TB, few, every int) int {
	t.Helper()
	if Every(t) {
		return every
	}
	return few
}

// Every reports whether slow tests run all of their cases. They do if the environment variable
// LEANATTENTION_TESTS is all, as in CI.
func Every(t testing.TB) bool {
	t.Helper()
	s := os.Getenv("LEANATTENTION_TESTS")
	if s != "" && s != "all" {
		t.Fatalf("LEANATTENTION_TESTS is %q; there is all, or nothing", s)
	}
	return s == "all"
}

// Poison fills x with NaN. It marks memory that must not be read, or that must be written.
func Poison[T ~float32 | ~float64](x []T) {
	nan := T(math.NaN())
	for i := range x {
		x[i] = nan
	}
}

// Poison16 fills x with all ones, which is NaN in float16 and in bfloat16.
func Poison16[T ~uint16](x []T) {
	for i := range x {
		x[i] = 0xffff
	}
}

// Convert returns x in another type. The conversion is exact for a case's numbers and the type that they were
// rounded to.
func Convert[T ~float32 | ~float64](x []float64) []T {
	y := make([]T, len(x))
	for i, v := range x {
		y[i] = T(v)
	}
	return y
}

// DenseQ returns the queries as (sequences, Heads, capacity, Dim), with NaN in the rows after a sequence's
// queries.
func (c *Case) DenseQ(capacity int) []float64 {
	return dense(c.Q, c.Queries, c.Heads, c.Dim, capacity)
}

// DenseK returns the keys as (sequences, KVHeads, capacity, Dim), with NaN in the rows after a sequence's
// keys and in keys that no query sees.
func (c *Case) DenseK(capacity int) []float64 {
	return c.hide(dense(c.K, c.Keys, c.KVHeads, c.Dim, capacity), capacity*c.Dim, c.Dim)
}

// DenseV returns the values as (sequences, KVHeads, capacity, ValueDim), with NaN in the rows after a
// sequence's keys and in values that no query sees.
func (c *Case) DenseV(capacity int) []float64 {
	return c.hide(dense(c.V, c.Keys, c.KVHeads, c.ValueDim, capacity), capacity*c.ValueDim, c.ValueDim)
}

// hide puts NaN into the keys or values that a window hides from all queries.
func (c *Case) hide(x []float64, headSize, dim int) []float64 {
	for s := range c.Keys {
		if c.Queries[s] == 0 {
			continue
		}
		for h := range c.KVHeads {
			Poison(x[(s*c.KVHeads+h)*headSize:][c.SinkKeys(s, 0)*dim : c.First(s, 0)*dim])
		}
	}
	return x
}

func dense(x []float64, lengths []int, heads, dim, capacity int) []float64 {
	y := make([]float64, len(lengths)*heads*capacity*dim)
	Poison(y)
	at := 0
	for s, n := range lengths {
		for pos := range n {
			for h := range heads {
				copy(row(y, (s*heads+h)*capacity+pos, 1, 0, dim), row(x, at, heads, h, dim))
			}
			at++
		}
	}
	return y
}
