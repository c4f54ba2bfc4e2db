package cputest

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"
)

// A Contender is something to measure beside others.
type Contender struct {
	Name string
	Work float64 // of a run: bytes, or operations
	Run  func()
	best time.Duration
}

// Compete runs the contenders in turn until the benchmark has had its time, and prints the best rate of
// each in units of 1e9, and as a share of the first's. In turn and the best: so
// what else the machine does meanwhile falls out of the comparison, as far as it can.
func Compete(b *testing.B, unit string, contenders []*Contender) {
	for b.Loop() {
		for _, c := range contenders {
			begin := time.Now()
			c.Run()
			if d := time.Since(begin); c.best == 0 || d < c.best {
				c.best = d
			}
		}
	}
	fmt.Printf("\n%s\n", b.Name())
	first := 0.0
	for i, c := range contenders {
		rate := c.Work / c.best.Seconds() / 1e9
		if i == 0 {
			first = rate
		}
		fmt.Printf("%-28s %7.1f %s  %4.0f%%\n", c.Name, rate, unit, 100*rate/first) // a log would be cut short
	}
	b.ReportMetric(0, "ns/op") // of all together: nothing to look at
}

// SetProcs sets GOMAXPROCS for the length of the test.
func SetProcs(t testing.TB, n int) {
	old := runtime.GOMAXPROCS(n)
	t.Cleanup(func() { runtime.GOMAXPROCS(old) })
}

// Allocations returns the least number of allocations that the given number of calls of f was seen to
// make: on a busy machine a helper may have been idle for long enough to leave, and its return
// allocates. (testing.AllocsPerRun measures with GOMAXPROCS=1, where no helpers run.)
func Allocations(calls int, f func()) uint64 {
	least := uint64(math.MaxUint64)
	for try := 0; try < 50 && least > 0; try++ {
		f()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range calls {
			f()
		}
		runtime.ReadMemStats(&after)
		least = min(least, after.Mallocs-before.Mallocs)
	}
	return least
}
