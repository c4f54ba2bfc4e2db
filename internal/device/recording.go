package device

import (
	"slices"

	"gorgonia.org/leanattention/internal/cuda"
)

// Recording is work that was captured from a queue, to be queued again as one.
// It keeps the memory that the work uses.
type Recording struct {
	queue  *Queue
	graph  *cuda.Graph
	used   map[*Memory]bool // while it is being made
	held   []held
	states []Recorded
	late   []Late
	open   Late // the last of them, if it may still grow
}

// held is memory, and the buffer that it was.
type held struct {
	*Memory
	buffer *cuda.Buffer
}

// Recorded is what recorded work depends on besides memory.
type Recorded interface {
	// Ready says why the work can't be done again. If it can, what it depends on
	// stays as it is until Done.
	Ready() error
	Done(queued bool)
}

// Late is work that is put off while a recording is made, to be queued with what
// follows as one.
type Late interface {
	// Queue queues it, within the capture.
	Queue(*cuda.Stream) error
	// Upload brings what it needs, when the capture has ended.
	Upload() error
	Close() error
}

// Record makes a recording of what f queues instead of having it done. f may
// queue it on any goroutine; nothing else may be queued meanwhile. Copies from
// and to the host are refused. It must not be within Enter, which what f calls needs.
func (q *Queue) Record(f func() error) (*Recording, error) {
	r := &Recording{queue: q, used: make(map[*Memory]bool)}
	set := func(to *Recording) error {
		q.mu.Lock()
		defer q.mu.Unlock()
		if to != nil && q.recording != nil {
			return ErrRecording
		}
		q.recording = to
		return nil
	}
	if err := set(r); err != nil {
		return nil, err
	}
	defer set(nil)
	if err := r.make(f); err != nil {
		if r.graph != nil {
			_ = r.graph.Close() // the first error tells more
		}
		_ = r.closeLate()
		return nil, err
	}
	r.used = nil
	return r, nil
}

func (r *Recording) make(f func() error) (err error) {
	r.graph, err = r.queue.stream.Capture(func() error {
		if err := f(); err != nil {
			return err
		}
		return r.queue.Submit((*Turn).settle)
	})
	if err != nil {
		return err
	}
	for _, l := range r.late {
		if err := l.Upload(); err != nil {
			return err
		}
	}
	return nil
}

// Late is the work that is put off at the moment, nil for none.
func (t *Turn) Late() Late {
	if t.recording == nil {
		return nil
	}
	return t.recording.open
}

// PutOff queues what is put off already, and has l be that which grows. It needs
// a recording.
func (t *Turn) PutOff(l Late) error {
	if err := t.settle(); err != nil {
		return err
	}
	r := t.recording
	r.late, r.open = append(r.late, l), l
	return nil
}

// Replace has l be what is put off instead of Late, whose work it does as well.
func (t *Turn) Replace(l Late) {
	r := t.recording
	r.late[len(r.late)-1], r.open = l, l
}

// settle queues what is put off.
func (t *Turn) settle() error {
	r := t.recording
	if r == nil || r.open == nil {
		return nil
	}
	l := r.open
	r.open = nil
	return l.Queue(t.stream)
}

func (r *Recording) closeLate() (first error) {
	for _, l := range r.late {
		if err := l.Close(); err != nil && first == nil {
			first = err
		}
	}
	r.late, r.open = nil, nil
	return first
}

// note keeps m for the recording that is being made.
func (t *Turn) note(m *Memory) {
	if r := t.recording; r != nil && m != nil && !r.used[m] {
		r.used[m] = true
		r.held = append(r.held, held{m, m.buffer})
	}
}

// Recording says whether a recording is being made.
func (t *Turn) Recording() bool { return t.recording != nil }

// Depend has the recording that is being made depend on a state. fresh makes it;
// one that is there already and that same accepts is taken instead. It is nil
// where nothing is recorded.
func (t *Turn) Depend(same func(Recorded) bool, fresh func() Recorded) Recorded {
	if t.recording == nil {
		return nil
	}
	if i := slices.IndexFunc(t.recording.states, same); i >= 0 {
		return t.recording.states[i]
	}
	s := fresh()
	t.recording.states = append(t.recording.states, s)
	return s
}

// Replay queues the work again. It needs Enter.
func (r *Recording) Replay() error {
	for i, s := range r.states {
		if err := s.Ready(); err != nil {
			for _, s := range r.states[:i] {
				s.Done(false)
			}
			return err
		}
	}
	err := r.queue.Submit(func(t *Turn) error {
		if t.recording != nil {
			return ErrRecording
		}
		for _, h := range r.held {
			if h.Memory.buffer != h.buffer {
				return ErrFreed
			}
		}
		return t.stream.Launch(r.graph)
	})
	for _, s := range r.states {
		s.Done(err == nil)
	}
	return err
}

// Close gives back what the driver has of the recording, and lets the memory go.
func (r *Recording) Close() error {
	r.held, r.states = nil, nil
	err := r.graph.Close()
	if late := r.closeLate(); err == nil {
		err = late
	}
	return err
}
