package cpu

import (
	"math"
	"runtime"
)

// The number of threads that a call is worth. With n threads a call takes
//
//	t(n) = work/n + fork + n thread      for n > 1, work for n = 1
//
// where work is the time on one thread. The least is at n = sqrt(work/thread): smaller calls would be slower with
// more threads.
//
// All numbers are constants, measured on a Xeon of 32 cores (docs/lab/cpu.md). Nothing is measured at run time: the
// bits of attention depend on the number of its logical workers.
const (
	// A fork and its join in ns for two threads, and the cost of each thread: see BenchmarkPool.
	forkNanos   = 1500.0
	threadNanos = 300.0

	// The approximate work of one thread in a nanosecond: bytes read, from cache or memory, and products added. The
	// number of threads is the root of this, so a factor of two makes three threads of two.
	readRate     = 16.0
	multiplyRate = 30.0
	goRate       = 8.0 // factor of the time without assembly

	// ElementNanos is the time of an element in plain Go, one by one: an activation, a norm, a rounding. VectorNanos
	// is the time of an element in vector registers.
	ElementNanos = 2.0
	VectorNanos  = 0.5

	// SharesPerThread is the largest number of shares of a thread's work, so that a late or delayed thread leaves a
	// part to others. A share takes at least ShareNanos if memory waits for arithmetic at its end, and at least
	// RowShareNanos if its rows are independent.
	SharesPerThread = 4
	ShareNanos      = 64e3
	RowShareNanos   = 8e3
)

// WorkOf returns the approximate nanoseconds of one thread to read the bytes and to add the products.
func WorkOf(bytes, products float64) float64 {
	t := max(bytes/readRate, products/multiplyRate)
	if InUse() == TierGo {
		t *= goRate
	}
	return t
}

// ThreadsFor returns the number of threads, up to GOMAXPROCS, for a call that takes one thread the given nanoseconds.
func ThreadsFor(work float64) int {
	if threadsOf(work, 2) < 2 {
		return 1
	}
	return threadsOf(work, runtime.GOMAXPROCS(0))
}

func threadsOf(work float64, procs int) int {
	if procs < 2 || work < work/2+forkNanos+2*threadNanos {
		return 1
	}
	return min(max(int(math.Sqrt(work/threadNanos)), 2), procs)
}

// SharesFor returns the number of shares of each thread, of at least the given nanoseconds each.
func SharesFor(work float64, threads int, least float64) int {
	if threads == 1 {
		return 1
	}
	return min(max(int(work/float64(threads)/least), 1), SharesPerThread)
}

// Each calls f for each of some rows of n elements, on as many threads as the call is worth. Rows do not wait for
// each other. Each panics with a panic of f.
func Each(e *Engine, rows, n int, f func(row int)) {
	e.Each(rows, float64(rows)*float64(n)*ElementNanos, f)
}

// Each is [Each] for rows that take one thread the given nanoseconds in total.
func (e *Engine) Each(rows int, work float64, f func(row int)) {
	threads := min(ThreadsFor(work), rows)
	if threads < 2 {
		for row := range rows {
			f(row)
		}
		return
	}
	shares := min(threads*SharesFor(work, threads, RowShareNanos), rows)
	e.Must(&eachRun{rows, shares, f}, shares, threads)
}

// eachRun is a call of Each: each worker has as many rows.
type eachRun struct {
	rows, workers int
	f             func(row int)
}

func (r *eachRun) Work(w, _ int) {
	for row := w * r.rows / r.workers; row < (w+1)*r.rows/r.workers; row++ {
		r.f(row)
	}
}
