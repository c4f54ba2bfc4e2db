package cpu

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// Waking a parked goroutine takes tens of microseconds, as long as a whole decode step over a short context, and a
// machine's other threads are scheduled between steps (Gorgonia's tape machine uses two for each run). So an idle
// helper polls for a while before it parks. If the while is shorter than a step without the helper, some 50 us, most
// steps run without it: the helper wakes up after the work and parks before the next. A millisecond is no better, and
// some steps begin as much later, since the system gives a polling thread its processor to the end. Pools need no
// Close, so an unused helper ends.
const (
	spinTime = 200 * time.Microsecond
	idleTime = 100 * time.Millisecond
)

// A Task is work for logical workers, numbered from 0. Workers run in any order, on any thread, and never wait for
// each other. The workers of one thread run one after the other, so scratch memory belongs to the thread. The
// caller's thread is 0.
type Task interface{ Work(worker, thread int) }

// pool runs tasks on the caller's thread and on up to GOMAXPROCS-1 helper goroutines. The zero pool is ready for use.
// Any number of goroutines may call run at once: each takes the free helpers, and runs on its own thread if there is
// none.
//
// The cost of a fork and a join is cache lines that move between cores, one by one if all threads write the same
// line. So a job costs each helper one line in either direction, and no common line: the caller alone takes and
// returns helpers, each thread has its first worker without asking, and a counter hands out only the remaining
// workers.
type pool struct {
	mu      sync.Mutex
	idle    []*helper // without work; the most recently idle ones last
	jobs    []*job    // not in use
	helpers int       // existing helpers
	closed  bool
	ending  sync.WaitGroup // counts the existing helpers

	procs atomic.Int32 // GOMAXPROCS as of the last run
}

// job is a call of run that has helpers. Thread 0 is the caller's, thread i that of helpers[i-1].
type job struct {
	task    Task
	workers int64
	helpers []*helper
	failure atomic.Pointer[failure]
	parked  atomic.Bool // the caller waits on done, or is about to
	done    chan struct{}

	_    [CacheLine]byte
	next atomic.Int64 // the next worker that is not a thread's first
	_    [CacheLine]byte
}

// Values of a helper's mailbox: quit ends the helper, asleep means that it has parked.
var quit, asleep job

// helper is a goroutine with a mailbox for one job. The mailbox's owner is the one who swaps the job for nil: the
// helper, or another thread of the job, which then does the helper's part.
type helper struct {
	// Written by a job's owner.
	box    atomic.Pointer[job]
	thread int    // number of the thread in the job
	turn   uint32 // another number with each job
	slept  bool   // the helper was parked when the job was given

	_ [2 * CacheLine]byte // processors fetch lines in pairs

	left atomic.Uint32 // the last turn that the helper, or the thread that took its job, has finished
	_    [2 * CacheLine]byte

	ahead Prefetch // memory that the idle helper prefetches

	wake chan struct{} // a token for each job that was put into the mailbox while it held asleep
}

// run is runOn with the largest number of threads.
func (p *pool) run(t Task, n int) error { return p.runOn(t, n, n) }

// runOn is [Engine.RunOn].
func (p *pool) runOn(t Task, n, threads int) error {
	if min(n, threads) < 2 {
		return runAlone(t, n)
	}
	procs := runtime.GOMAXPROCS(0) // takes a lock that all threads share
	p.procs.Store(int32(procs))
	if threads = min(n, threads, procs); threads < 2 {
		return runAlone(t, n)
	}
	j := p.hire(t, n, threads, procs)
	j.work(0)
	return p.join(j)
}

func runAlone(t Task, n int) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = &failure{r, debug.Stack()}
		}
	}()
	for w := range n {
		t.Work(w, 0)
	}
	return nil
}

// hire makes a job of t and gives it to helpers: idle helpers first, then new ones up to GOMAXPROCS. Similar jobs
// give the same helpers the same threads, for the sake of their caches.
func (p *pool) hire(t Task, n, threads, procs int) *job {
	p.mu.Lock()
	var j *job
	if k := len(p.jobs) - 1; k >= 0 {
		j = p.jobs[k]
		p.jobs = p.jobs[:k]
	} else {
		j = &job{done: make(chan struct{}, 1)}
	}
	if want := threads - 1; !p.closed {
		k := max(len(p.idle)-want, 0)
		j.helpers = append(j.helpers, p.idle[k:]...)
		clear(p.idle[k:])
		p.idle = p.idle[:k]
		for len(j.helpers) < want && p.helpers < procs-1 {
			h := &helper{wake: make(chan struct{}, 1)}
			p.helpers++
			p.ending.Add(1)
			go p.help(h)
			j.helpers = append(j.helpers, h)
		}
	}
	p.mu.Unlock()

	j.task, j.workers = t, int64(n)
	j.next.Store(int64(len(j.helpers) + 1))
	j.failure.Store(nil)
	slept := 0
	for i, h := range j.helpers {
		h.thread = i + 1
		h.turn++
		if h.slept = h.box.Swap(j) == &asleep; h.slept {
			slept++
		}
	}
	for i := 0; slept > 0; i++ { // a token takes longer than a mailbox: polling helpers begin first
		if h := j.helpers[i]; h.slept {
			h.wake <- struct{}{}
			slept--
		}
	}
	return j
}

// give puts j into the empty mailbox of h.
func (h *helper) give(j *job) {
	if h.box.Swap(j) == &asleep {
		h.wake <- struct{}{}
	}
}

// work runs a thread's first worker, and then others until none is left.
func (j *job) work(thread int) {
	defer func() {
		if r := recover(); r != nil {
			j.failure.CompareAndSwap(nil, &failure{r, debug.Stack()})
			j.next.Store(j.workers)
		}
	}()
	if j.failure.Load() != nil {
		return
	}
	j.task.Work(thread, thread)
	for j.next.Load() < j.workers {
		w := j.next.Add(1) - 1
		if w >= j.workers {
			return
		}
		j.task.Work(int(w), thread)
	}
}

// takeOver does the part of a thread's helper if the helper has not begun. (Its processor may be busy, or the helper
// may be slow to wake.)
func (j *job) takeOver(thread int) bool {
	h := j.helpers[thread-1]
	if h.box.Load() != j || !h.box.CompareAndSwap(j, nil) {
		return false
	}
	j.work(thread)
	h.left.Store(h.turn)
	return true
}

// allLeft reports whether all helpers have finished the job.
func (j *job) allLeft() bool {
	for _, h := range j.helpers {
		if h.left.Load() != h.turn {
			return false
		}
	}
	return true
}

// join does the parts of helpers that have not begun, waits for the others, returns the helpers, and keeps the job
// for reuse.
func (p *pool) join(j *job) error {
	for i := range j.helpers {
		j.takeOver(i + 1)
	}
	for s := p.spinner(); !j.allLeft() && s.spin(); {
	}
	for !j.allLeft() {
		// A helper that finds parked set clears it and sends one token, perhaps late, for an earlier use of this job.
		// The loop ignores such a token.
		j.parked.Store(true)
		if !j.allLeft() || !j.parked.CompareAndSwap(true, false) {
			<-j.done
		}
	}

	var err error
	if f := j.failure.Load(); f != nil {
		err = f
	}
	j.task = nil
	p.mu.Lock()
	if p.closed {
		for _, h := range j.helpers {
			h.give(&quit)
		}
	} else {
		p.idle = append(p.idle, j.helpers...)
	}
	clear(j.helpers)
	j.helpers = j.helpers[:0]
	p.jobs = append(p.jobs, j)
	p.mu.Unlock()
	return err
}

// help is the loop of a helper.
func (p *pool) help(h *helper) {
	defer p.ending.Done()
	idle := time.NewTimer(idleTime)
	defer idle.Stop()
	for {
		j := p.await(h, idle)
		if j == &quit {
			p.mu.Lock()
			p.helpers--
			p.mu.Unlock()
			return
		}
		j.work(h.thread)
		// An idle thread takes over for the next thread.
		for next := h.thread + 1; next <= len(j.helpers) && j.takeOver(next); next++ {
		}
		if t, ok := j.task.(Prefetcher); ok {
			h.ahead = t.Prefetch(h.thread)
		}
		h.left.Store(h.turn)
		if j.parked.Load() && j.parked.CompareAndSwap(true, false) {
			j.done <- struct{}{}
		}
	}
}

// await returns the next job of h: await polls for a while, then parks, and quits after idleTime.
func (p *pool) await(h *helper, idle *time.Timer) *job {
	for {
		for s := p.spinner(); ; {
			if j := h.box.Load(); j != nil && h.box.CompareAndSwap(j, nil) {
				return j
			}
			if !h.ahead.some() && !s.spin() {
				break
			}
		}
		if !h.box.CompareAndSwap(nil, &asleep) {
			continue
		}
		idle.Reset(idleTime)
		select {
		case <-h.wake:
		case <-idle.C:
			if !h.box.CompareAndSwap(&asleep, nil) {
				<-h.wake
			} else if p.leave(h) {
				return &quit
			}
		}
	}
}

// leave removes h from the idle helpers. It returns false if a caller has hired h meanwhile.
func (p *pool) leave(h *helper) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, other := range p.idle {
		if other == h {
			p.idle = append(p.idle[:i], p.idle[i+1:]...)
			return true
		}
	}
	return false
}

// close ends the helpers and waits for them, and so for the runs that have helpers. Later runs stay on their callers'
// threads. close may be called more than once.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	for _, h := range p.idle {
		h.give(&quit)
	}
	p.idle = nil
	p.mu.Unlock()
	p.ending.Wait()
}

// spinner bounds a polling loop.
type spinner struct {
	turns, yield int
	since        time.Time
}

// yieldTurns is the number of polls of two threads between two yields. A yield takes a lock that all threads share:
// with more threads each yields less often.
const yieldTurns = 512

// spinner returns a new spinner. On a single thread it does not spin, since the awaited event could not happen
// meanwhile.
func (p *pool) spinner() spinner {
	procs := int(p.procs.Load())
	if procs < 2 {
		return spinner{turns: -1}
	}
	return spinner{yield: yieldTurns * procs}
}

// spin reports whether to poll again.
func (s *spinner) spin() bool {
	if s.turns < 0 {
		return false
	}
	s.turns++
	if s.turns%64 != 0 { // a poll takes a nanosecond or two, asking for the time fifty
		return true
	}
	if s.turns == 64 {
		s.since = time.Now()
		return true
	}
	if time.Since(s.since) > spinTime {
		return false
	}
	if s.turns%s.yield == 0 {
		runtime.Gosched() // another goroutine may need the thread
	}
	return true
}

// failure is the panic of a worker, as an error.
type failure struct {
	value any
	stack []byte
}

func (f *failure) Error() string {
	return fmt.Sprintf("leanattention: run: %v: %v\n%s", f.value, ErrPanic, f.stack)
}

func (f *failure) Unwrap() []error {
	if err, ok := f.value.(error); ok {
		return []error{ErrPanic, err}
	}
	return []error{ErrPanic}
}
