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

// task is work for logical workers, numbered from 0. Workers run in any order, on any thread, and never
// wait for each other.
type task interface{ work(worker int) }

// pool runs tasks on the caller's thread and on up to GOMAXPROCS-1 helper goroutines. The zero pool is
// ready for use. Any number of goroutines may call run at once: each takes the helpers that are free,
// and makes do with its own thread if none is.
type pool struct {
	mu      sync.Mutex
	idle    []*helper // without work; the last one has been so for the shortest time
	jobs    []*job    // not in use
	helpers int       // that exist
	closed  bool
	ending  sync.WaitGroup // counts the helpers that exist

	procs atomic.Int32 // GOMAXPROCS as of the last run
}

// job is one call of run that has helpers.
type job struct {
	task    task
	workers int64
	next    atomic.Int64 // the next worker to run
	failure atomic.Pointer[failure]

	helpers []*helper
	pending atomic.Int32 // helpers that were given the job and have not left it
	parked  atomic.Bool  // the caller waits on done, or is about to
	done    chan struct{}
}

// quit is the job that ends a helper.
var quit job

// helper is a goroutine with a mailbox for one job. A job is taken out of it by whoever swaps it for
// nil: the helper, to work on it, or the job's owner, to call it off.
type helper struct {
	box    atomic.Pointer[job]
	parked atomic.Bool // waits on wake, or is about to
	wake   chan struct{}
}

// run calls t.work(w) once for each w in [0, n) and returns when all are done. min(n, GOMAXPROCS)
// threads share the workers, the caller's among them, or fewer when other calls have the helpers.
// If a worker panics, workers that have not begun are left out and the panic is returned as an error,
// which wraps ErrPanic; the pool goes on. After close the caller's thread runs all workers. Once
// helpers run, run does not allocate.
func (p *pool) run(t task, n int) error {
	procs := runtime.GOMAXPROCS(0)
	p.procs.Store(int32(procs))
	if min(n, procs) < 2 {
		return runAlone(t, n)
	}
	j := p.hire(t, n, procs)
	j.work()
	err := p.join(j)
	return err
}

func runAlone(t task, n int) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = &failure{r, debug.Stack()}
		}
	}()
	for w := range n {
		t.work(w)
	}
	return nil
}

// hire makes a job of t and gives it to helpers: idle ones first, then new ones as far as GOMAXPROCS
// allows.
func (p *pool) hire(t task, n, procs int) *job {
	p.mu.Lock()
	var j *job
	if k := len(p.jobs) - 1; k >= 0 {
		j = p.jobs[k]
		p.jobs = p.jobs[:k]
	} else {
		j = &job{done: make(chan struct{}, 1)}
	}
	for len(j.helpers) < min(n, procs)-1 && !p.closed {
		if k := len(p.idle) - 1; k >= 0 {
			j.helpers = append(j.helpers, p.idle[k])
			p.idle = p.idle[:k]
			continue
		}
		if p.helpers >= procs-1 {
			break
		}
		h := &helper{wake: make(chan struct{}, 1)}
		p.helpers++
		p.ending.Add(1)
		go p.help(h)
		j.helpers = append(j.helpers, h)
	}
	p.mu.Unlock()

	j.task, j.workers = t, int64(n)
	j.next.Store(0)
	j.failure.Store(nil)
	j.pending.Store(int32(len(j.helpers)))
	for _, h := range j.helpers {
		h.give(j)
	}
	return j
}

// give puts j into the empty mailbox of h.
func (h *helper) give(j *job) {
	h.box.Store(j)
	if h.parked.CompareAndSwap(true, false) {
		h.wake <- struct{}{}
	}
}

// work runs workers until none is left to begin.
func (j *job) work() {
	defer func() {
		if r := recover(); r != nil {
			j.failure.CompareAndSwap(nil, &failure{r, debug.Stack()})
			j.next.Store(j.workers)
		}
	}()
	for {
		w := j.next.Add(1) - 1
		if w >= j.workers {
			return
		}
		j.task.work(int(w))
	}
}

// join calls the job off where it was not taken up yet (nothing is left to do, and the thread of a
// helper that slept may be long in coming), waits for the helpers that work on it, and puts it away.
func (p *pool) join(j *job) error {
	p.mu.Lock()
	for _, h := range j.helpers {
		if h.box.CompareAndSwap(j, nil) {
			j.pending.Add(-1)
			p.release(h)
		}
	}
	p.mu.Unlock()

	for s := p.spinner(); j.pending.Load() != 0 && s.spin(); {
	}
	for j.pending.Load() != 0 {
		// A helper that finds parked set clears it and sends one token. It may do so late, for a
		// pending of this job's earlier use; the loop makes nothing of that.
		j.parked.Store(true)
		if j.pending.Load() != 0 || !j.parked.CompareAndSwap(true, false) {
			<-j.done
		}
	}

	var err error
	if f := j.failure.Load(); f != nil {
		err = f
	}
	clear(j.helpers)
	j.helpers, j.task = j.helpers[:0], nil
	p.mu.Lock()
	p.jobs = append(p.jobs, j)
	p.mu.Unlock()
	return err
}

// release makes h idle, or ends it when the pool is closed. p.mu is held; the mailbox of h is empty.
func (p *pool) release(h *helper) {
	if p.closed {
		h.give(&quit)
		return
	}
	p.idle = append(p.idle, h)
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
		j.work()
		p.mu.Lock()
		p.release(h)
		p.mu.Unlock()
		if j.pending.Add(-1) == 0 && j.parked.CompareAndSwap(true, false) {
			j.done <- struct{}{}
		}
	}
}

// await returns the next job of h: it looks for a while, then parks, and quits after idleTime.
func (p *pool) await(h *helper, idle *time.Timer) *job {
	for {
		for s := p.spinner(); s.spin(); {
			if h.box.Load() != nil {
				break
			}
		}
		if j := h.box.Swap(nil); j != nil {
			return j
		}
		h.parked.Store(true)
		if h.box.Load() != nil && h.parked.CompareAndSwap(true, false) {
			continue
		}
		idle.Reset(idleTime)
		select {
		case <-h.wake:
		case <-idle.C:
			if !h.parked.CompareAndSwap(true, false) {
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
	turns int
	since time.Time
}

// spinner returns a new spinner; on a single thread it does not spin, since what it would wait for
// could not happen meanwhile.
func (p *pool) spinner() spinner {
	if p.procs.Load() < 2 {
		return spinner{turns: -1}
	}
	return spinner{}
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
	if s.turns%1024 == 0 {
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

func (f *failure) Unwrap() error { return ErrPanic }
