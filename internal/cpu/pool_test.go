package cpu

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cpu/cputest"

	"go.uber.org/goleak"
)

// tally is an atomic that shares its cache line with nothing.
type tally struct {
	atomic.Int32
	_ [CacheLine - 4]byte
}

// counts is a task that counts how often each worker ran.
type counts struct {
	ran  []tally
	then func(worker int)
}

func newCounts(n int, then func(int)) *counts {
	return &counts{ran: make([]tally, n), then: then}
}

func (c *counts) Work(w, _ int) {
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
		cputest.SetProcs(t, procs)
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
		cputest.SetProcs(t, procs)
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
	cputest.SetProcs(t, 1)
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
	cputest.SetProcs(t, 4)
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
	cputest.SetProcs(t, 3)
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
				if h.box.Load() != &asleep {
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
	cputest.SetProcs(t, 4)
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
		cputest.SetProcs(t, procs)
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

// What a helper was to do is done once, by the helper or by who has taken it over, whoever comes first.
func TestPoolTakesOver(t *testing.T) {
	defer goleak.VerifyNone(t)
	cputest.SetProcs(t, 4)
	var p pool
	defer p.close()
	warm := newCounts(4, nil)
	if err := p.run(warm, 4); err != nil {
		t.Fatal(err)
	}
	for range 200 {
		c := newCounts(4, nil)
		j := p.hire(c, 4, 4, 4)
		if len(j.helpers) != 3 {
			t.Fatalf("%d helpers", len(j.helpers))
		}
		for i := range j.helpers { // before, while or after helpers take their own
			j.takeOver(i + 1)
		}
		j.work(0)
		if err := p.join(j); err != nil {
			t.Fatal(err)
		}
		c.check(t, 1)
		p.mu.Lock()
		for _, h := range p.idle {
			if j := h.box.Load(); j != nil && j != &asleep {
				t.Error("a helper without work has a job")
			}
		}
		p.mu.Unlock()
	}
}

// Threads have the same first workers in each run: what a worker has read is in its thread's cache.
func TestPoolKeepsThreads(t *testing.T) {
	cputest.SetProcs(t, 4)
	var p pool
	defer p.close()
	var before []*helper
	for range 50 {
		j := p.hire(newCounts(4, nil), 4, 4, 4)
		if before == nil {
			before = slices.Clone(j.helpers)
		} else if !slices.Equal(before, j.helpers) {
			for _, h := range before { // a helper that was idle for long has left, and another one is there for it
				if !slices.Contains(j.helpers, h) {
					before = nil
				}
			}
			if before != nil {
				t.Error("the same helpers in another order")
			}
			before = slices.Clone(j.helpers)
		}
		for i, h := range j.helpers {
			if h.thread != i+1 {
				t.Errorf("helper %d is thread %d", i, h.thread)
			}
		}
		j.work(0)
		if err := p.join(j); err != nil {
			t.Fatal(err)
		}
	}
}

// A panic ends the run: of many workers, those that have not begun are left out.
func TestPoolPanicLeavesOutTheRest(t *testing.T) {
	var p pool
	defer p.close()
	for _, procs := range []int{1, 4} {
		cputest.SetProcs(t, procs)
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
	cputest.SetProcs(t, 4)
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
	cputest.SetProcs(t, 4)
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

func TestPoolDoesNotAllocate(t *testing.T) {
	cputest.SetProcs(t, 3)
	var p pool
	defer p.close()
	c := newCounts(8, nil)
	if n := cputest.Allocations(200, func() {
		if err := p.run(c, 8); err != nil {
			t.Error(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations in 200 runs", n)
	}
}

// BenchmarkPool is what a fork and a join cost, beyond the work of each worker, which has a thread of its own: one behind
// the other, and where helpers have parked meanwhile.
//
//	go test -run '^$' -bench Pool -benchtime 2000x ./internal/cpu
func BenchmarkPool(b *testing.B) {
	for _, workers := range []int{1, 2, 4, 8, 16, 32} {
		if workers > max(2, runtime.NumCPU()) {
			break
		}
		for _, c := range []struct {
			work  time.Duration
			parks bool
		}{{0, false}, {5 * time.Microsecond, false}, {25 * time.Microsecond, false}, {125 * time.Microsecond, false}, {25 * time.Microsecond, true}} {
			spin := func(d time.Duration) {
				for start := time.Now(); time.Since(start) < d; {
				}
			}
			name := fmt.Sprintf("%dworkers/%v", workers, c.work)
			if c.parks {
				name += "/parked"
			}
			b.Run(name, func(b *testing.B) {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(workers))
				var p pool
				defer p.close()
				task := newCounts(workers, func(int) { spin(c.work) })
				b.ReportAllocs()
				var took []time.Duration
				for b.Loop() {
					if c.parks {
						spin(2 * spinTime)
					}
					began := time.Now()
					if err := p.run(task, workers); err != nil {
						b.Fatal(err)
					}
					took = append(took, time.Since(began))
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2]-c.work)/1e3, "us-median")
				b.ReportMetric(float64(took[len(took)*9/10]-c.work)/1e3, "us-90%")
			})
		}
	}
}
