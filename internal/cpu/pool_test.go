package cpu

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// counts is a task that counts how often each worker ran.
type counts struct {
	ran  []atomic.Int32
	then func(worker int)
}

func newCounts(n int, then func(int)) *counts {
	return &counts{ran: make([]atomic.Int32, n), then: then}
}

func (c *counts) work(w int) {
	c.ran[w].Add(1)
	if c.then != nil {
		c.then(w)
	}
}

// check reports an error unless each worker has run the given number of times.
func (c *counts) check(t *testing.T, times int32) {
	t.Helper()
	for w := range c.ran {
		if n := c.ran[w].Load(); n != times {
			t.Errorf("worker %d of %d ran %d times, want %d", w, len(c.ran), n, times)
		}
	}
}

// setProcs sets GOMAXPROCS for the length of the test.
func setProcs(t testing.TB, n int) {
	old := runtime.GOMAXPROCS(n)
	t.Cleanup(func() { runtime.GOMAXPROCS(old) })
}

// helpersOf returns how many helpers p has.
func helpersOf(p *pool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.helpers
}

// eventually waits until ok, for longer than any machine should need.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for start := time.Now(); !ok(); time.Sleep(time.Millisecond) {
		if time.Since(start) > 20*time.Second {
			t.Fatal("never happened: ", what)
		}
	}
}

func TestPoolRunsEveryWorkerOnce(t *testing.T) {
	defer goleak.VerifyNone(t)
	var p pool
	defer p.close()
	for _, procs := range []int{1, 2, 5, 3, 1, 4} { // follows what changes between runs
		setProcs(t, procs)
		for _, n := range []int{0, 1, 2, 3, 8, 100} {
			c := newCounts(n, nil)
			for range 20 {
				if err := p.run(c, n); err != nil {
					t.Fatal(err)
				}
			}
			c.check(t, 20)
		}
	}
}

// Workers that wait for each other's threads show that there are as many threads as there should be.
func TestPoolThreads(t *testing.T) {
	defer goleak.VerifyNone(t)
	var p pool
	defer p.close()
	for _, procs := range []int{2, 4, 3} {
		setProcs(t, procs)
		var arrived sync.WaitGroup
		arrived.Add(procs)
		c := newCounts(procs, func(int) {
			arrived.Done()
			arrived.Wait()
		})
		if err := p.run(c, procs); err != nil {
			t.Fatal(err)
		}
		c.check(t, 1)
	}
	if n := helpersOf(&p); n > 3 {
		t.Errorf("%d helpers for at most 4 threads", n)
	}
}

func TestPoolNeedsNoHelperForOneThread(t *testing.T) {
	var p pool
	setProcs(t, 1)
	c := newCounts(8, nil)
	if err := p.run(c, 8); err != nil {
		t.Fatal(err)
	}
	c.check(t, 1)
	if n := helpersOf(&p); n != 0 {
		t.Errorf("%d helpers", n)
	}
	s := p.spinner()
	if s.spin() {
		t.Error("spins where only one thread runs")
	}
}

func TestPoolHelpersLeaveWhenIdle(t *testing.T) {
	defer goleak.VerifyNone(t)
	setProcs(t, 4)
	var p pool
	for range 3 { // and come back
		if err := p.run(newCounts(8, nil), 8); err != nil {
			t.Fatal(err)
		}
		if helpersOf(&p) == 0 {
			t.Fatal("no helpers")
		}
		eventually(t, "all helpers left", func() bool { return helpersOf(&p) == 0 })
	}
}

func TestPoolSleepsBetweenRuns(t *testing.T) {
	setProcs(t, 3)
	var p pool
	defer p.close()
	c := newCounts(3, nil)
	for i := range 5 {
		if err := p.run(c, 3); err != nil {
			t.Fatal(err)
		}
		eventually(t, fmt.Sprint("helpers parked after run ", i), func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			for _, h := range p.idle {
				if !h.parked.Load() {
					return false
				}
			}
			return true
		})
	}
	c.check(t, 5)
}

func TestPoolConcurrentCallers(t *testing.T) {
	defer goleak.VerifyNone(t)
	setProcs(t, 4)
	var p pool
	defer p.close()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			c := newCounts(5, func(int) { runtime.Gosched() })
			for i := range 500 {
				if err := p.run(c, 5); err != nil {
					t.Error(err)
				}
				for w := range c.ran { // all done, and none running, when run returns
					if n := c.ran[w].Load(); n != int32(i+1) {
						t.Errorf("worker %d ran %d times after %d runs", w, n, i+1)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if n := helpersOf(&p); n > 3 {
		t.Errorf("%d helpers for at most 4 threads", n)
	}
}

func TestPoolPanic(t *testing.T) {
	defer goleak.VerifyNone(t)
	var p pool
	defer p.close()
	for _, procs := range []int{1, 4} {
		setProcs(t, procs)
		for bad := range 6 {
			c := newCounts(6, func(w int) {
				if w == bad {
					panic(fmt.Sprint("worker ", w, " fell over"))
				}
			})
			err := p.run(c, 6)
			if !errors.Is(err, ErrPanic) {
				t.Fatalf("error %v", err)
			}
			if s := err.Error(); !strings.Contains(s, fmt.Sprint("worker ", bad, " fell over")) || !strings.Contains(s, "pool_test.go") {
				t.Fatalf("the error does not say what or where: %v", s)
			}
			c = newCounts(6, nil)
			if err := p.run(c, 6); err != nil {
				t.Fatal("after a panic: ", err)
			}
			c.check(t, 1)
		}
	}
}

// A panic ends the run: of many workers, those that have not begun are left out.
func TestPoolPanicLeavesOutTheRest(t *testing.T) {
	var p pool
	defer p.close()
	for _, procs := range []int{1, 4} {
		setProcs(t, procs)
		const n = 100_000
		c := newCounts(n, func(w int) {
			if w == 2 {
				panic("fell over")
			}
			time.Sleep(10 * time.Microsecond)
		})
		if err := p.run(c, n); !errors.Is(err, ErrPanic) {
			t.Fatalf("error %v", err)
		}
		if c.ran[n-1].Load() != 0 {
			t.Error("the run went on to its end")
		}
	}
}

func TestPoolClose(t *testing.T) {
	defer goleak.VerifyNone(t)
	setProcs(t, 4)
	var p pool
	c := newCounts(8, nil)
	if err := p.run(c, 8); err != nil {
		t.Fatal(err)
	}
	p.close()
	if n := helpersOf(&p); n != 0 {
		t.Errorf("%d helpers after close", n)
	}
	p.close()
	if err := p.run(c, 8); err != nil {
		t.Fatal(err)
	}
	c.check(t, 2)
	if n := helpersOf(&p); n != 0 {
		t.Errorf("%d helpers after close", n)
	}
	var unused pool
	unused.close()
}

func TestPoolCloseWhileRunning(t *testing.T) {
	defer goleak.VerifyNone(t)
	setProcs(t, 4)
	for range 50 {
		var p pool
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				c := newCounts(7, nil)
				for range 20 {
					if err := p.run(c, 7); err != nil {
						t.Error(err)
					}
				}
				c.check(t, 20)
			})
		}
		wg.Go(p.close)
		wg.Go(p.close)
		wg.Wait()
		if n := helpersOf(&p); n != 0 {
			t.Errorf("%d helpers after close", n)
		}
	}
}

// allocations returns the least number of allocations that the given number of calls of f was seen to
// make: on a busy machine a helper may have been idle for long enough to leave, and its return
// allocates. (testing.AllocsPerRun measures with GOMAXPROCS=1, where no helpers run.)
func allocations(calls int, f func()) uint64 {
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

func TestPoolDoesNotAllocate(t *testing.T) {
	setProcs(t, 3)
	var p pool
	defer p.close()
	c := newCounts(8, nil)
	if n := allocations(200, func() {
		if err := p.run(c, 8); err != nil {
			t.Error(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations in 200 runs", n)
	}
}

// BenchmarkPool is what a fork and join costs: work of the given length for each of some workers, each on a thread.
func BenchmarkPool(b *testing.B) {
	for _, workers := range []int{2, 4, 8, 16, 32} {
		if workers > max(2, runtime.NumCPU()) {
			break
		}
		for _, us := range []int{0, 5, 25, 125} {
			spin := func() {
				for start := time.Now(); time.Since(start) < time.Duration(us)*time.Microsecond; {
				}
			}
			b.Run(fmt.Sprintf("%dworkers/%dus", workers, us), func(b *testing.B) {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(workers))
				var p pool
				defer p.close()
				c := newCounts(workers, func(int) { spin() })
				b.ReportAllocs()
				for b.Loop() {
					if err := p.run(c, workers); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
