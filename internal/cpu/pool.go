package cpu

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// Waking a parked goroutine takes tens of microseconds, as long as a whole decode step over a short context,
// and a machine's other threads come and go between steps (Gorgonia's tape machine uses two of them for each
// run). So a helper that has run out of work looks for more for a while before it parks. If the while is
// shorter than a step that has to do without the helper, 50 us say, most steps have to: it wakes up when the
// work is done, and parks before the next. A millisecond is no better than this, and some steps begin as much
// later, since the system lets a thread that looks for work have its processor to the end. As nobody has to
// close a pool, a helper that nobody needs ends.
const (
	spinTime = 200 * time.Microsecond
	idleTime = 100 * time.Millisecond
)

// A Task is work for logical workers, numbered from 0. Workers run in any order, on any thread, and never
// wait for each other. Those of one thread, of which the caller's is 0, run one behind the other: scratch is the thread's.
type Task interface{ Work(worker, thread int) }

// pool runs tasks on the caller's thread and on up to GOMAXPROCS-1 helper goroutines. The zero pool is
// ready for use. Any number of goroutines may call run at once: each takes the helpers that are free,
// and makes do with its own thread if none is.
//
// What a fork and a join cost is cache lines that go from one core to another, one by one where all threads write
// the same. So a job costs each helper a line of its own in either direction, and all of them none in common:
// the caller alone takes helpers and gives them back, each thread has its first worker without asking,
// and only what workers are left then are drawn from a counter.
type pool struct {
	mu      sync.Mutex
	idle    []*helper // without work; the last ones have been so for the shortest time
	jobs    []*job    // not in use
	helpers int       // that exist
	closed  bool
	ending  sync.WaitGroup // counts the helpers that exist

	procs atomic.Int32 // GOMAXPROCS as of the last run
}

// job is one call of run that has helpers. Thread 0 is the caller's, thread i that of helpers[i-1].
type job struct {
	task    Task
	workers int64
	helpers []*helper
	failure atomic.Pointer[failure]
	parked  atomic.Bool // the caller waits on done, or is about to
	done    chan struct{}

	_    [CacheLine]byte
	next atomic.Int64 // the next worker to run that is no thread's first
	_    [CacheLine]byte
}

// In a helper's mailbox: quit ends it, asleep says that it has parked.
var quit, asleep job

// helper is a goroutine with a mailbox for one job. A job is taken out of it by whoever swaps it for
// nil: the helper, or another thread of the job, which then does what the helper was to do.
type helper struct {
	// What a job's owner writes.
	box    atomic.Pointer[job]
	thread int    // of the job
	turn   uint32 // of the helper: another one with each job
	slept  bool   // when the job was given

	_ [2 * CacheLine]byte // processors fetch lines in pairs

	left atomic.Uint32 // the last turn that the helper, or who took its job, is done with
	_    [2 * CacheLine]byte

	ahead Prefetch // what it asks for while it has no work

	wake chan struct{} // a token for each job that was put into the mailbox while it said asleep
}

// run is runOn with as many threads as there may be.
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

// hire makes a job of t and gives it to helpers: idle ones first, then new ones as far as GOMAXPROCS
// allows. The same helpers have the same threads in jobs that are alike, so that their caches have what they had.
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
	for i := 0; slept > 0; i++ { // a token takes longer than a mailbox: those that look begin first
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

// work runs the worker that is a thread's first, and then others until none is left to begin.
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

// takeOver does what the helper of a thread was to do, if it has not begun. (Its processor may be at something else, or
// it sleeps and may be long in coming.)
func (j *job) takeOver(thread int) bool {
	h := j.helpers[thread-1]
	if h.box.Load() != j || !h.box.CompareAndSwap(j, nil) {
		return false
	}
	j.work(thread)
	h.left.Store(h.turn)
	return true
}

// allLeft reports whether all helpers are done with the job.
func (j *job) allLeft() bool {
	for _, h := range j.helpers {
		if h.left.Load() != h.turn {
			return false
		}
	}
	return true
}

// join does what helpers have not begun, waits for those that work on the job, gives them back, and puts the job away.
func (p *pool) join(j *job) error {
	for i := range j.helpers {
		j.takeOver(i + 1)
	}
	for s := p.spinner(); !j.allLeft() && s.spin(); {
	}
	for !j.allLeft() {
		// A helper that finds parked set clears it and sends one token. It may do so late, for an
		// earlier use of this job; the loop makes nothing of that.
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

// help is the life of a helper.
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
		// Who has nothing left to do looks at the next thread.
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

// await returns the next job of h: it looks for a while, then parks, and quits after idleTime.
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

// leave takes h out of the idle helpers. It reports false if somebody has hired h meanwhile.
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

// close ends the helpers and waits for that, and so for the runs that have helpers. Runs go on being
// right, on their callers' threads. It may be called more than once.
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

// spinner bounds a loop that looks for something to happen.
type spinner struct {
	turns, yield int
	since        time.Time
}

// yieldTurns is how often two threads look between two times that they offer their thread to others. A thread that offers
// its own takes a lock that all threads share: with more of them each does so less often.
const yieldTurns = 512

// spinner returns a new spinner; on a single thread it does not spin, since what it would wait for
// could not happen meanwhile.
func (p *pool) spinner() spinner {
	procs := int(p.procs.Load())
	if procs < 2 {
		return spinner{turns: -1}
	}
	return spinner{yield: yieldTurns * procs}
}

// spin reports whether to look again.
func (s *spinner) spin() bool {
	if s.turns < 0 {
		return false
	}
	s.turns++
	if s.turns%64 != 0 { // a look takes a nanosecond or two, asking the time takes fifty
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
		runtime.Gosched() // somebody else may have use for the thread
	}
	return true
}

// failure is a panic of a worker, as an error.
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
