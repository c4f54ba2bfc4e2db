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

// Memory is an allocation on the GPU. An unreachable Memory is freed by a cleanup, somewhat later than by Free.
type Memory struct {
	queue      *Queue
	buffer     *cuda.Buffer // nil after Free
	class      int64        // size class; 0: borrowed
	generation uint64
	written    bool // by kernels
	reads      int  // reads still to come of a value that shares memory
	shared     bool
	recorded   *part // of a value that shares memory: the recording that has the memory; nil: none
	cleanup    runtime.Cleanup
}

// smallest is the least size of an allocation; all sizes are multiples of smallest.
const smallest = 256

// classOf returns the buffer size for n bytes: one of four sizes between powers of two, so that at most a quarter is
// unused.
func classOf(n int64) int64 {
	step := int64(smallest)
	if n > 4*smallest {
		step = 1 << (bits.Len64(uint64(n-1)) - 3)
	}
	return (n + step - 1) / step * step
}

// Alloc allocates n > 0 bytes with arbitrary content. Earlier queued work may still use the bytes. Too little memory
// is [cuda.ErrOutOfMemory], with the numbers.
func (t *Submission) Alloc(n int64) (m *Memory, err error) {
	defer func() { t.note(m) }()
	class := classOf(n)
	b, err := t.take(n, class)
	if err != nil {
		return nil, err
	}
	m = &Memory{queue: (*Queue)(t), buffer: b, class: class}
	m.cleanup = runtime.AddCleanup(m, t.dropped.add, b)
	return m, nil
}

// take takes a free buffer of a size class, or allocates one, for n bytes.
func (t *Submission) take(n, class int64) (*cuda.Buffer, error) {
	t.dropped.moveTo(t.spare)
	if b := pop(t.spare, class); b != nil {
		return b, nil
	}
	b, err := t.NewBuffer(class)
	if err == nil {
		return b, nil
	}
	if m, e := t.dev.Memory(); e == nil && errors.Is(err, cuda.ErrOutOfMemory) {
		err = fmt.Errorf("%d bytes asked for, %d of %d free: %w", n, m.Free, m.Total, err)
	}
	return nil, err
}

// pop takes a buffer of a size class from lists; nil: there is none.
func pop(spare map[int64][]*cuda.Buffer, class int64) *cuda.Buffer {
	list := spare[class]
	last := len(list) - 1
	if last < 0 {
		return nil
	}
	spare[class] = list[:last]
	return list[last]
}

// NewBuffer allocates a buffer from the driver; the caller closes the buffer. If the driver has too little memory,
// the pool's free buffers are returned to the driver first.
func (t *Submission) NewBuffer(n int64) (*cuda.Buffer, error) {
	b, err := t.dev.NewBuffer(n)
	if !errors.Is(err, cuda.ErrOutOfMemory) {
		return b, err
	}
	t.Collect()
	return t.dev.NewBuffer(n)
}

// Collect returns to the driver all free memory, memory of garbage, and what the queue's owner can drop. A caller
// whose allocation failed calls Collect.
func (t *Submission) Collect() {
	if t.whenShort != nil {
		t.whenShort()
	}
	runtime.GC()
	// Cleanups run on another goroutine, soon.
	for range 10 {
		if t.dropped.moveTo(t.spare) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	for class, list := range t.spare {
		for _, b := range list {
			_ = b.Close() // the buffer counts as closed whatever the driver returns
		}
		delete(t.spare, class)
	}
}

// Free frees m. Earlier queued work may still use m.
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

// Borrow returns a Memory of a buffer with another owner, see [cuda.Device.Borrow]. Free does not reuse the buffer.
func (q *Queue) Borrow(b *cuda.Buffer) *Memory { return &Memory{queue: q, buffer: b} }

// Generation returns the number that a later Use needs.
func (t *Submission) Generation(m *Memory) uint64 { return m.generation }

// Use returns the buffer of m if m still has the given generation. The caller keeps m alive until its work is queued.
func (t *Submission) Use(m *Memory, generation uint64) (*cuda.Buffer, error) {
	switch {
	case m.queue != (*Queue)(t):
		return nil, ErrOtherQueue
	case m.buffer == nil && m.shared, m.recorded != nil && m.recorded != t.recording:
		return nil, ErrOverwritten
	case m.shared && m.recorded == nil && t.recording != nil:
		return nil, ErrShared
	case m.buffer == nil:
		return nil, ErrFreed
	case m.generation != generation:
		return nil, ErrOverwritten
	}
	t.note(m)
	return m.buffer, nil
}

// UseAny is Use for memory of any member of the group, for work of the first member, whose submission t is.
func (t *Submission) UseAny(m *Memory, generation uint64) (*cuda.Buffer, error) {
	q := m.queue
	if q == (*Queue)(t) || q.group != t.group {
		return t.Use(m, generation)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return (*Submission)(q).Use(m, generation)
}

// Written records that kernels write m.
func (t *Submission) Written(m *Memory) { m.written = true }

// Fixed reports whether no queued kernel writes m. Copies alone write m then, and no kernel overtakes a copy.
func (t *Submission) Fixed(m *Memory) bool { return !m.written }

// Slot is the memory that a node of a graph fills at every run.
type Slot struct{ list []*Memory }

// Next returns n bytes for a new value. The node's previous value is overwritten, unless it is among the inputs of
// the node.
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

// Shared returns n bytes for a new value with the given number of readers. The last reader frees the memory for other
// values; memory of a recording is freed for values of the recording alone. A recording of several members is ErrShared.
func (t *Submission) Shared(n int64, reads int) (*Memory, error) {
	if t.recording != nil {
		return t.recording.shared(t, n, reads)
	}
	m, err := t.Alloc(n)
	if err != nil {
		return nil, err
	}
	m.written, m.shared, m.reads = true, true, reads
	return m, nil
}

// Read is called by a node that has queued a read of m.
func (t *Submission) Read(m *Memory) error {
	if !m.shared || m.buffer == nil {
		return nil
	}
	if m.reads--; m.reads > 0 {
		return nil
	}
	if m.recorded != nil {
		m.recorded.free(m)
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

// droppedBuffers has the buffers that cleanups free: cleanups must not wait for a queue.
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
