package cpu

import (
	"math"
	"runtime"
)

// How many threads a call is worth. With n of them it takes
//
//	t(n) = work/n + fork + n thread      for n > 1, work for n = 1
//
// where work is what it takes one thread. That is least for n = sqrt(work/thread): of calls that are smaller than some
// number of threads is worth, more threads would make a slower one.
//
// Everything here is a constant, measured on a Xeon of 32 cores (docs/lab/cpu.md), and nothing is measured at run
// time: how many logical workers attention is cut for decides about its bits.
const (
	// A fork and its join in ns, of two threads, and what each thread adds: see BenchmarkPool.
	forkNanos   = 1500.0
	threadNanos = 300.0

	// What one thread does in a nanosecond, about: bytes that it reads, from cache or from memory, and products that it adds
	// up. The number of threads is the root of this, so twice as many are three threads for two.
	readRate     = 16.0
	multiplyRate = 30.0
	goRate       = 8.0 // so many times as long takes what has no assembly

	// ElementNanos is an element that plain Go computes, one by one: of an activation, of a norm, or one that is rounded. VectorNanos is
	// one that vector registers compute.
	ElementNanos = 2.0
	VectorNanos  = 0.5

	// SharesPerThread is how many shares a thread's work is cut into at most, so that a thread that comes late or is held
	// up leaves a part to others. A share at whose end memory waits for arithmetic takes ShareNanos at least. One of rows
	// that know nothing of each other takes RowShareNanos.
	SharesPerThread = 4
	ShareNanos      = 64e3
	RowShareNanos   = 8e3
)

// WorkOf returns about how many nanoseconds it takes one thread to read so many bytes and add up so many products.
func WorkOf(bytes, products float64) float64 {
	t := max(bytes/readRate, products/multiplyRate)
	if InUse() == TierGo {
		t *= goRate
	}
	return t
}

// ThreadsFor returns how many threads a call is worth that takes one thread so many nanoseconds, of GOMAXPROCS.
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

// SharesFor returns how many shares each thread has, of so many nanoseconds at least.
func SharesFor(work float64, threads int, least float64) int {
	if threads == 1 {
		return 1
	}
	return min(max(int(work/float64(threads)/least), 1), SharesPerThread)
}

// Each calls f for each of some rows of n elements, on as many threads as that is worth. Rows do not wait for each
// other. A panic of f comes out here.
func Each(e *Engine, rows, n int, f func(row int)) {
	e.Each(rows, float64(rows)*float64(n)*ElementNanos, f)
}

// Each is [Each] of rows that take one thread so many nanoseconds, all of them.
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
