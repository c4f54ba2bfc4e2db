package queue

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/cuda"
)

var (
	// ErrFreed is the use of memory that was given back.
	ErrFreed = errors.New("memory was freed")
	// ErrOverwritten is the use of a value whose node has run again.
	ErrOverwritten = errors.New("the node that made the value has run again since")
	// ErrOtherQueue is the use of memory of another queue.
	ErrOtherQueue = errors.New("memory of another GPU")
	// ErrShared is a recording of values that share memory.
	ErrShared = errors.New("values of a graph that shares memory can't be recorded")
	// ErrRank is work that other processes have a part in, and one of them has failed.
	ErrRank = errors.New("a rank has failed")
	// ErrRecording is work that can't be recorded, or a recording within another.
	ErrRecording = errors.New("a recording is being made")
)

// Queue is the work that is done on a GPU, in order, and the memory for it. It
// may be used by several goroutines at once.
type Queue struct {
	dev    *cuda.Device
	stream *cuda.Stream
	group  *Group
	join   *cuda.Event // behind the work of a member that is not the first; nil elsewhere

	// life is held for reading between Enter and Leave, and for writing by
	// Close: pinned memory must not go while the host uses it.
	life   sync.RWMutex
	closed bool // written with life and mu held

	mu     sync.Mutex // held while work is queued; guards what follows, and every Memory and Slot
	spare  map[int64][]*cuda.Buffer
	pinned []*Pinned // that nobody has, the one that was given back first in front
	made   int       // pinned blocks that there are

	recording *part // of a recording that is being made

	dropped droppedBuffers

	whenShort func() // of OnShort

	failed atomic.Pointer[[]*check] // of Check
}

// check is one of those that tell why what was waited for is no good.
type check struct{ failed func() error }

// Check has failed tell, whenever the host has waited for the queue, why what it waited for is
// no good, until stop is called. It is for work that others have a part in. Of several failures that of a rank is told: others may
// follow from it.
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

// waits calls what waits for the queue.
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
	if first != nil { // it tells more
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

// OnShort has f give back what its owner can do without when memory is short, while
// the queue waits. It is called before the first work.
func (q *Queue) OnShort(f func()) { q.whenShort = f }

// Close waits for calls, and lets nobody in again. What the queue has on the
// device goes when the device is closed. While a recording is being made Close is [ErrRecording] and does nothing: the
// caller may be the function that is recorded.
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

// Closed says whether the queue is closed.
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

// Submit calls f, which queues work that nobody else's comes between. It needs
// Enter.
func (q *Queue) Submit(f func(*Submission) error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return f((*Submission)(q))
}

// Synchronize waits for all that was queued. It needs Enter. While a recording is being made it is [ErrRecording]: what
// is recorded is not queued.
func (q *Queue) Synchronize() error {
	if q.isRecording() {
		return ErrRecording
	}
	return q.waits(q.stream.Synchronize)
}

// Arrange calls f with the stream itself, to say how it is to work: f queues nothing. It
// needs Enter.
func (q *Queue) Arrange(f func(*cuda.Stream) error) error { return f(q.stream) }

// Submission is a Queue within Submit: nobody else queues work meanwhile.
type Submission Queue

// Do calls f with what work is queued on. What was put off is queued first.
func (t *Submission) Do(f func(*cuda.Stream) error) error {
	if err := t.settle(); err != nil {
		return err
	}
	return f(t.stream)
}
