package cpu

import (
	"slices"
	"sync/atomic"
)

// An Engine computes on the CPU. It owns a pool of helper threads, and the state that packages keep between calls.
// The zero Engine is ready for use. Any number of goroutines may use an Engine at once.
type Engine struct {
	pool pool
	own  atomic.Pointer[[]any] // see Own: pointers, each of another type; nil: none
	sums Spare[sumRun]
}

var defaultEngine Engine

// Default returns the shared engine. It needs no Close: the helpers of every Engine end by themselves after some idle
// time.
func Default() *Engine { return &defaultEngine }

// Close ends the engine's helpers and frees its workspaces. Close waits for runs that have helpers. A closed engine
// is still usable: its runs stay on their callers' threads. A second Close does nothing.
func (e *Engine) Close() {
	e.pool.close()
	e.own.Store(nil)
	e.sums.Drop()
}

// Own returns e's T, in which a package keeps state between calls. The value is the zero T at first, and after Close.
// A package has its own type, with its own locks.
func Own[T any](e *Engine) *T {
	for {
		all := e.own.Load()
		var old []any
		if all != nil {
			old = *all
		}
		for _, v := range old { // a list of few entries is faster than a map
			if t, ok := v.(*T); ok {
				return t
			}
		}
		t := new(T)
		more := append(slices.Clip(old), t)
		if e.own.CompareAndSwap(all, &more) {
			return t
		}
	}
}

// Run is RunOn with the largest number of threads.
func (e *Engine) Run(t Task, n int) error { return e.pool.runOn(t, n, n) }

// RunOn calls t.Work(w, thread) once for each w in [0, n) and returns when all calls are done. min(n, threads,
// GOMAXPROCS) threads share the workers, the caller's thread included; fewer if other calls have the helpers. If a
// worker panics, workers that have not begun are left out, and RunOn returns the panic as an error, which wraps
// ErrPanic; the pool continues. After Close the caller's thread runs all workers. Once helpers run, RunOn does not
// allocate.
func (e *Engine) RunOn(t Task, n, threads int) error { return e.pool.runOn(t, n, threads) }

// Must is RunOn for a task that never fails: Must panics with a worker's panic.
func (e *Engine) Must(t Task, n, threads int) {
	if err := e.pool.runOn(t, n, threads); err != nil {
		panic(err.(*failure).value)
	}
}

// Helpers returns the number of helpers, and the number of jobs that idle helpers have had, for tests.
func (e *Engine) Helpers() (all int, jobs uint32) {
	e.pool.mu.Lock()
	defer e.pool.mu.Unlock()
	for _, h := range e.pool.idle {
		jobs += h.turn
	}
	return e.pool.helpers, jobs
}
