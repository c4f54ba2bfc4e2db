package queue

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
)

// Memory is memory of the GPU that somebody has. When nothing refers to a
// Memory any more, it is given back by itself, if somewhat later than by Free.
type Memory struct {
	queue      *Queue
	buffer     *cuda.Buffer // nil: given back
	class      int64        // 0: borrowed
	generation uint64
	written    bool // by kernels
	reads      int  // that are still to come, of a value that shares memory
	shared     bool
	cleanup    runtime.Cleanup
}

// smallest is the least that the pool hands out, and what all sizes of it are
// multiples of.
const smallest = 256

// classOf is the size of buffer that n bytes get: one of four between powers of
// two, so that at most a quarter is not used.
func classOf(n int64) int64 {
	step := int64(smallest)
	if n > 4*smallest {
		step = 1 << (bits.Len64(uint64(n-1)) - 3)
	}
	return (n + step - 1) / step * step
}

// Alloc takes n bytes, n > 0, of arbitrary content. Work that was queued before
// may still use them. What the driver does not have is [cuda.ErrOutOfMemory],
// with the numbers.
func (t *Submission) Alloc(n int64) (m *Memory, err error) {
	defer func() { t.note(m) }()
	class := classOf(n)
	t.dropped.moveTo(t.spare)
	list := t.spare[class]
	var b *cuda.Buffer
	if last := len(list) - 1; last >= 0 {
		b, t.spare[class] = list[last], list[:last]
	} else {
		if b, err = t.NewBuffer(class); err != nil {
			if m, e := t.dev.Memory(); e == nil && errors.Is(err, cuda.ErrOutOfMemory) {
				err = fmt.Errorf("%d bytes asked for, %d of %d free: %w", n, m.Free, m.Total, err)
			}
			return nil, err
		}
	}
	m = &Memory{queue: (*Queue)(t), buffer: b, class: class}
	m.cleanup = runtime.AddCleanup(m, t.dropped.add, b)
	return m, nil
}

// NewBuffer takes a buffer from the driver, to be closed by the caller. If the
// driver has too little, it gets back first what the pool keeps.
func (t *Submission) NewBuffer(n int64) (*cuda.Buffer, error) {
	b, err := t.dev.NewBuffer(n)
	if !errors.Is(err, cuda.ErrOutOfMemory) {
		return b, err
	}
	t.Collect()
	return t.dev.NewBuffer(n)
}

// Collect gives the driver all that nobody has, what garbage still has, and what the
// queue's owner can do without: for who could not get memory.
func (t *Submission) Collect() {
	if t.whenShort != nil {
		t.whenShort()
	}
	runtime.GC()
	// Cleanups run on a goroutine of their own, soon.
	for range 10 {
		if t.dropped.moveTo(t.spare) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	for class, list := range t.spare {
		for _, b := range list {
			_ = b.Close() // it counts as closed whatever the driver says
		}
		delete(t.spare, class)
	}
}

// Free gives m back. Work that was queued before may still use it.
func (t *Submission) Free(m *Memory) error {
	if m.queue != (*Queue)(t) {
		return ErrOtherQueue
	}
	if m.buffer == nil {
		return ErrFreed
	}
	m.cleanup.Stop()
	if m.class > 0 {
		t.spare[m.class] = append(t.spare[m.class], m.buffer)
	}
	m.buffer = nil
	return nil
}

// Borrow is memory that is someone else's, see [cuda.Device.Borrow]: Free gives
// it to nobody.
func (q *Queue) Borrow(b *cuda.Buffer) *Memory { return &Memory{queue: q, buffer: b} }

// Generation is what Use needs later.
func (t *Submission) Generation(m *Memory) uint64 { return m.generation }

// Use is the buffer of m as it was in a generation, to queue work on. The
// caller keeps m alive until that is queued.
func (t *Submission) Use(m *Memory, generation uint64) (*cuda.Buffer, error) {
	switch {
	case m.queue != (*Queue)(t):
		return nil, ErrOtherQueue
	case m.buffer == nil && m.shared:
		return nil, ErrOverwritten
	case m.buffer == nil:
		return nil, ErrFreed
	case m.generation != generation:
		return nil, ErrOverwritten
	}
	t.note(m)
	return m.buffer, nil
}

// UseAny is Use of memory of any member of the group, for work of its first one, whose
// submission t is.
func (t *Submission) UseAny(m *Memory, generation uint64) (*cuda.Buffer, error) {
	q := m.queue
	if q == (*Queue)(t) || q.group != t.group {
		return t.Use(m, generation)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return (*Submission)(q).Use(m, generation)
}

// Written notes that kernels write m.
func (t *Submission) Written(m *Memory) { m.written = true }

// Fixed says whether no kernel that was queued writes m: only copies do, which
// no kernel overtakes.
func (t *Submission) Fixed(m *Memory) bool { return !m.written }

// Slot is the memory that a node of a graph fills at every run.
type Slot struct{ list []*Memory }

// Next is n bytes for a new value. The value before it is overwritten, unless
// it is among the inputs of the node.
func (t *Submission) Next(s *Slot, n int64, inputs ...*Memory) (*Memory, error) {
	class := classOf(n)
	for i, m := range s.list {
		if m == nil || m.queue != (*Queue)(t) || m.buffer == nil || m.class != class {
			s.list[i] = nil
			continue
		}
		if !among(m, inputs) {
			m.generation++
			t.note(m)
			return m, nil
		}
	}
	m, err := t.Alloc(n)
	if err != nil {
		return nil, err
	}
	m.written = true
	for i := range s.list {
		if s.list[i] == nil {
			s.list[i] = m
			return m, nil
		}
	}
	s.list = append(s.list, m)
	return m, nil
}

// Shared is n bytes for a new value that so many nodes will read: the last of them gives
// the memory to other values. A recording can't have it, since its memory stays.
func (t *Submission) Shared(n int64, reads int) (*Memory, error) {
	if t.recording != nil {
		return nil, ErrShared
	}
	m, err := t.Alloc(n)
	if err != nil {
		return nil, err
	}
	m.written, m.shared, m.reads = true, true, reads
	return m, nil
}

// Read is told by a node that has queued what reads m.
func (t *Submission) Read(m *Memory) error {
	if !m.shared || m.buffer == nil {
		return nil
	}
	if m.reads--; m.reads > 0 {
		return nil
	}
	return t.Free(m)
}

func among(m *Memory, list []*Memory) bool {
	for _, x := range list {
		if x == m {
			return true
		}
	}
	return false
}

// droppedBuffers is what cleanups give back: they must not wait for a queue.
type droppedBuffers struct {
	mu   sync.Mutex
	list []*cuda.Buffer
}

func (l *droppedBuffers) add(b *cuda.Buffer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, b)
}

func (l *droppedBuffers) moveTo(spare map[int64][]*cuda.Buffer) (any bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.list {
		spare[b.Len()] = append(spare[b.Len()], b)
		any = true
	}
	clear(l.list)
	l.list = l.list[:0]
	return any
}
