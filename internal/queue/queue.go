package queue

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/cuda"
)

var (
	// ErrFreed is returned for a use of freed memory.
	ErrFreed = errors.New("memory was freed")
	// ErrOverwritten is returned for a use of a value whose node has run again.
	ErrOverwritten = errors.New("the node that made the value has run again since")
	// ErrOtherQueue is returned for memory of another queue.
	ErrOtherQueue = errors.New("memory of another GPU")
	// ErrShared is returned for a recording of values that share memory.
	ErrShared = errors.New("values that share memory can't be recorded on several GPUs, or in a part of a run")
	// ErrRank is returned for work of several processes after one of them has failed.
	ErrRank = errors.New("a rank has failed")
	// ErrRecording is returned for work that can't be recorded, and for a recording within another.
	ErrRecording = errors.New("a recording is being made")
)

// Queue is the ordered work of a GPU, and the memory for the work. A Queue may be used by several goroutines at once.
type Queue struct {
	dev    *cuda.Device
	stream *cuda.Stream
	group  *Group
	join   *cuda.Event // after the work of a member that is not the first; nil elsewhere

	// life is held for reading between Enter and Leave, and for writing by Close: pinned memory must not be freed
	// while the host uses it.
	life   sync.RWMutex
	closed bool // written with life and mu held

	mu     sync.Mutex // held while work is queued; guards the fields below, and every Memory and Slot
	spare  map[int64][]*cuda.Buffer
	pinned []*Pinned // free blocks, the oldest first
	made   int       // number of existing pinned blocks

	recording *part // part of the recording that is being made

	dropped droppedBuffers

	whenShort func() // set by OnShort

	failed atomic.Pointer[[]*check] // set by Check
}

// check is a function of Check.
type check struct{ failed func() error }

// Check registers failed, until stop is called. Whenever the host has waited for the queue, failed returns why the
// results are invalid, or nil. Check is for work in which other processes have a part. Of several failures a rank's
// failure is returned: others may follow from it.
func (q *Queue) Check(failed func() error) (stop func()) {
	mine := &check{failed}
	change := func(to func([]*check) []*check) {
		for {
			now := q.failed.Load()
			var all []*check
			if now != nil {
				all = *now
			}
			if all = to(slices.Clone(all)); q.failed.CompareAndSwap(now, &all) {
				return
			}
		}
	}
	change(func(all []*check) []*check { return append(all, mine) })
	return func() {
		change(func(all []*check) []*check {
			return slices.DeleteFunc(all, func(c *check) bool { return c == mine })
		})
	}
}

// waits calls wait and then the registered checks.
func (q *Queue) waits(wait func() error) error {
	err := wait()
	all := q.failed.Load()
	if all == nil {
		return err
	}
	var first error
	for _, c := range *all {
		if e := c.failed(); e != nil && (first == nil || errors.Is(e, ErrRank)) {
			first = e
		}
	}
	if first != nil { // the failure has more detail
		return first
	}
	return err
}

// open makes a queue on an open device, for a group: see [OpenGroup].
func open(dev *cuda.Device) (*Queue, error) {
	s, err := dev.NewStream()
	if err != nil {
		return nil, err
	}
	return &Queue{dev: dev, stream: s, spare: make(map[int64][]*cuda.Buffer)}, nil
}

// OnShort registers f, which frees what its owner can drop. The queue calls f when memory is short, while the queue
// waits. OnShort is called before the first work.
func (q *Queue) OnShort(f func()) { q.whenShort = f }

// Close waits for running calls, and refuses later calls. The queue's resources on the device are freed when the
// device is closed. During a recording Close returns [ErrRecording] and does nothing: the caller may be the recorded
// function.
func (q *Queue) Close() error {
	q.life.Lock()
	defer q.life.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.closed:
		return cuda.ErrClosed
	case q.recording != nil:
		return ErrRecording
	}
	q.closed, q.spare, q.pinned = true, nil, nil
	return nil
}

// Closed reports whether the queue is closed.
func (q *Queue) Closed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.closed
}

func (q *Queue) isRecording() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.recording != nil
}

// Enter keeps the queue open until Leave. Calls must not be nested.
func (q *Queue) Enter() error {
	q.life.RLock()
	if q.closed {
		q.life.RUnlock()
		return cuda.ErrClosed
	}
	return nil
}

// Leave ends Enter.
func (q *Queue) Leave() { q.life.RUnlock() }

// Submit calls f, which queues work without other callers' work in between. Submit needs Enter.
func (q *Queue) Submit(f func(*Submission) error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return f((*Submission)(q))
}

// Synchronize waits for all queued work. Synchronize needs Enter. During a recording Synchronize returns
// [ErrRecording]: recorded work is not queued.
func (q *Queue) Synchronize() error {
	if q.isRecording() {
		return ErrRecording
	}
	return q.waits(q.stream.Synchronize)
}

// Arrange calls f with the stream, to configure the stream: f queues nothing. Arrange needs Enter.
func (q *Queue) Arrange(f func(*cuda.Stream) error) error { return f(q.stream) }

// Submission is a Queue within Submit: no other caller queues work meanwhile.
type Submission Queue

// Do calls f with the stream to queue work on. Deferred work is queued first.
func (t *Submission) Do(f func(*cuda.Stream) error) error {
	if err := t.settle(); err != nil {
		return err
	}
	return f(t.stream)
}
