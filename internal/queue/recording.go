package queue

import (
	"slices"

	"gorgonia.org/leanattention/internal/cuda"
)

// Recording is work that was captured from the queues of a group, to be queued again
// as one: on the first, where that of the others begins and ends. It keeps the memory
// that the work uses.
type Recording struct {
	states []Recorded
	graph  *cuda.Graph
	parts  []*part // of each member
}

// part is what a recording has of a member.
type part struct {
	of       *Recording
	queue    *Queue
	used     map[*Memory]bool // while it is being made
	held     []held
	deferred []Deferred
	open     Deferred // the last of them, if it may still grow
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

// Deferred is work that is put off while a recording is made, to be queued with what
// follows as one.
type Deferred interface {
	// Queue queues it, within the capture.
	Queue(*cuda.Stream) error
	// Upload brings what it needs, when the capture has ended.
	Upload() error
	Close() error
}

// Record makes a recording of what f queues on the members instead of having it done.
// f may queue it on any goroutine; nothing else may be queued meanwhile. Copies from
// and to the host are refused. It must not be within Enter, which what f calls needs.
func (g *Group) Record(f func() error) (*Recording, error) {
	r := &Recording{}
	defer func() {
		for _, p := range r.parts {
			p.used = nil
			_ = p.queue.record(nil)
		}
	}()
	if err := g.members[0].Submit((*Submission).together); err != nil {
		return nil, err
	}
	for _, q := range g.members {
		p := &part{of: r, queue: q, used: make(map[*Memory]bool)}
		if err := q.record(p); err != nil {
			return nil, err
		}
		r.parts = append(r.parts, p)
	}
	if err := r.make(f); err != nil {
		_ = r.close() // the first error tells more
		return nil, err
	}
	return r, nil
}

// record has the queue record to a part, or, with nil, no longer.
func (q *Queue) record(to *part) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case to != nil && q.closed:
		return cuda.ErrClosed
	case to != nil && q.recording != nil:
		return ErrRecording
	}
	q.recording = to
	return nil
}

func (r *Recording) make(f func() error) (err error) {
	first := r.parts[0].queue
	if r.graph, err = first.stream.Capture(func() error {
		if err := f(); err != nil {
			_ = first.Submit((*Submission).abandon)
			return err
		}
		return first.Submit((*Submission).settle)
	}); err != nil {
		return err
	}
	for _, p := range r.parts {
		for _, l := range p.deferred {
			if err := l.Upload(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Deferred is the work that is put off at the moment, nil for none. What a member has put off of what it does apart
// from the others is no beginning of other work.
func (t *Submission) Deferred() Deferred {
	if t.recording == nil || t.mustMeet() {
		return nil
	}
	return t.recording.open
}

// PutOff queues what is put off already, and has l be that which grows. It needs
// a recording.
func (t *Submission) PutOff(l Deferred) error {
	if err := t.settle(); err != nil {
		return err
	}
	r := t.recording
	r.deferred, r.open = append(r.deferred, l), l
	return nil
}

// Replace has l be what is put off instead of Deferred, whose work it does as well.
func (t *Submission) Replace(l Deferred) {
	r := t.recording
	r.deferred[len(r.deferred)-1], r.open = l, l
}

// settle queues what is put off, and has the members that work apart come together before what follows.
func (t *Submission) settle() error {
	if t.mustMeet() {
		return t.together()
	}
	r := t.recording
	if r == nil || r.open == nil {
		return nil
	}
	l := r.open
	r.open = nil
	return l.Queue(t.stream)
}

// close gives back what the driver has of the parts, and what was put off.
func (r *Recording) close() (first error) {
	note := func(err error) {
		if err != nil && first == nil {
			first = err
		}
	}
	if r.graph != nil {
		note(r.graph.Close())
	}
	for _, p := range r.parts {
		p.held = nil
		for _, l := range p.deferred {
			note(l.Close())
		}
		p.deferred, p.open = nil, nil
	}
	return first
}

// note keeps m for the recording that is being made.
func (t *Submission) note(m *Memory) {
	if r := t.recording; r != nil && m != nil && !r.used[m] {
		r.used[m] = true
		r.held = append(r.held, held{m, m.buffer})
	}
}

// Recording says whether a recording is being made.
func (t *Submission) Recording() bool { return t.recording != nil }

// Depend has the recording that is being made depend on a state. fresh makes it;
// one that is there already and that same accepts is taken instead. It is nil
// where nothing is recorded.
func (t *Submission) Depend(same func(Recorded) bool, fresh func() Recorded) Recorded {
	if t.recording == nil {
		return nil
	}
	r := t.recording.of
	if i := slices.IndexFunc(r.states, same); i >= 0 {
		return r.states[i]
	}
	s := fresh()
	r.states = append(r.states, s)
	return s
}

// Replay queues the work again. It must not be within Enter: states are ready before the group is entered, which is the order
// in which others take their locks.
func (r *Recording) Replay() error {
	for i, s := range r.states {
		if err := s.Ready(); err != nil {
			for _, s := range r.states[:i] {
				s.Done(false)
			}
			return err
		}
	}
	group := r.parts[0].queue.group
	err := group.Enter()
	if err == nil {
		err = r.queueAll(r.parts)
		group.Leave()
	}
	for _, s := range r.states {
		s.Done(err == nil)
	}
	return err
}

// queueAll queues the graph, when nothing of the members in some parts hinders it.
func (r *Recording) queueAll(parts []*part) error {
	if len(parts) == 0 {
		return r.parts[0].queue.stream.Launch(r.graph)
	}
	p := parts[0]
	return p.queue.Submit(func(t *Submission) error {
		if err := t.together(); err != nil {
			return err
		}
		if t.recording != nil {
			return ErrRecording
		}
		for _, h := range p.held {
			if h.Memory.buffer != h.buffer {
				return ErrFreed
			}
		}
		return r.queueAll(parts[1:])
	})
}

// Close gives back what the driver has of the recording, and lets the memory go.
func (r *Recording) Close() error {
	r.states = nil
	return r.close()
}
