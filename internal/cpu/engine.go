package cpu

import (
	"slices"
	"sync/atomic"
)

// An Engine computes on the CPU. It owns a pool of helper threads, and what packages keep for their next call. The zero Engine is
// ready for use. Any number of goroutines may use it at once.
type Engine struct {
	pool pool
	own  atomic.Pointer[[]any] // see Own: pointers, each of another type; nil: none
	sums Spare[sumRun]
}

var defaultEngine Engine

// Default returns the engine that is shared by all who do not need their own. It needs no Close: its
// helpers end by themselves when they have been idle for a moment, as those of every Engine do.
func Default() *Engine { return &defaultEngine }

// Close ends the engine's helpers and frees its workspaces. It waits for runs that have helpers. The
// engine can still be used: runs stay on their callers' threads. Closing again does nothing.
func (e *Engine) Close() {
	e.pool.close()
	e.own.Store(nil)
	e.sums.Drop()
}

// Own returns e's T, which a package keeps there from one call to the next. It is the zero T at first, and after Close. A package has a
// type of its own for that, with locks of its own.
func Own[T any](e *Engine) *T {
	for {
		all := e.own.Load()
		var old []any
		if all != nil {
			old = *all
		}
		for _, v := range old { // few, and faster than a map
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

// Run is RunOn with as many threads as there may be.
func (e *Engine) Run(t Task, n int) error { return e.pool.runOn(t, n, n) }

// RunOn calls t.Work(w, thread) once for each w in [0, n) and returns when all are done. min(n, threads, GOMAXPROCS)
// threads share the workers, the caller's among them, or fewer when other calls have the helpers.
// If a worker panics, workers that have not begun are left out and the panic is returned as an error,
// which wraps ErrPanic; the pool goes on. After Close the caller's thread runs all workers. Once
// helpers run, RunOn does not allocate.
func (e *Engine) RunOn(t Task, n, threads int) error { return e.pool.runOn(t, n, threads) }

// Must is RunOn of a task that never fails: a panic of a worker comes out here.
func (e *Engine) Must(t Task, n, threads int) {
	if err := e.pool.runOn(t, n, threads); err != nil {
		panic(err.(*failure).value)
	}
}

// Helpers returns how many helpers there are, and how many jobs those without work have had. It is for tests.
func (e *Engine) Helpers() (all int, jobs uint32) {
	e.pool.mu.Lock()
	defer e.pool.mu.Unlock()
	for _, h := range e.pool.idle {
		jobs += h.turn
	}
	return e.pool.helpers, jobs
}
