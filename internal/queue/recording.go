package queue

import (
	"slices"

	"gorgonia.org/leanattention/internal/cuda"
)

// Recording is work that was captured from the queues of a group. A replay queues the work as one graph on the first
// queue, where the work of the others forks and joins. A Recording keeps the memory that its work uses.
type Recording struct {
	states []Recorded
	graph  *cuda.Graph
	parts  []*part // one of each member
}

// part is the part of a recording that belongs to a member.
type part struct {
	of       *Recording
	queue    *Queue
	used     map[*Memory]bool // while the recording is being made
	held     []held
	deferred []Deferred
	open     Deferred // the last one, if it may still grow

	// Buffers of values that share memory. While the recording is being made, some are free (spare) or free behind deferred work (waiting).
	own     []*cuda.Buffer
	spare   map[int64][]*cuda.Buffer
	waiting []*cuda.Buffer
}

// shared is [Submission.Shared] in a recording.
func (p *part) shared(t *Submission, n int64, reads int) (*Memory, error) {
	if len(t.group.members) > 1 {
		return nil, ErrShared
	}
	class := classOf(n)
	b := pop(p.spare, class)
	if b == nil {
		if err := t.dev.Relaxed(func() (err error) {
			b, err = t.take(n, class)
			return err
		}); err != nil {
			return nil, err
		}
		p.own = append(p.own, b)
	}
	return &Memory{queue: (*Queue)(t), buffer: b, class: class, written: true, shared: true, reads: reads, recorded: p}, nil
}

// free gives the memory of a value without further readers to other values. Deferred readers are queued later: the memory waits for them.
func (p *part) free(m *Memory) {
	p.waiting = append(p.waiting, m.buffer)
	m.buffer = nil
	p.collect()
}

// collect makes waiting buffers spare, if no work is deferred.
func (p *part) collect() {
	if p.open != nil {
		return
	}
	for _, b := range p.waiting {
		p.spare[b.Len()] = append(p.spare[b.Len()], b)
	}
	p.waiting = nil
}

// held is a Memory, and its buffer at the time of recording.
type held struct {
	*Memory
	buffer *cuda.Buffer
}

// Recorded is a state, besides memory, on which recorded work depends.
type Recorded interface {
	// Ready returns why the work can't be repeated. If Ready returns nil, the state does not change until Done.
	Ready() error
	Done(queued bool)
}

// Deferred is work that is deferred while a recording is made, so that it is queued as one with the work after it.
type Deferred interface {
	// Queue queues the work, within the capture.
	Queue(*cuda.Stream) error
	// Upload uploads the work's data, after the capture has ended.
	Upload() error
	Close() error
}

// Record captures the work that f queues on the members, which is not run. f may queue work on any goroutine; nothing
// else may be queued meanwhile. Copies from and to the host are refused. Record must not be called within Enter,
// which the calls of f need.
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
		p := &part{of: r, queue: q, used: make(map[*Memory]bool), spare: make(map[int64][]*cuda.Buffer)}
		if err := q.record(p); err != nil {
			return nil, err
		}
		r.parts = append(r.parts, p)
	}
	if err := r.make(f); err != nil {
		_ = r.close() // the first error has more detail
		return nil, err
	}
	return r, nil
}

// record makes the queue record to a part, or stops recording if to is nil.
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

// Deferred returns the deferred work, or nil. Per-GPU work that a member has deferred does not count: other work
// can't join it.
func (t *Submission) Deferred() Deferred {
	if t.recording == nil || t.mustMeet() {
		return nil
	}
	return t.recording.open
}

// PutOff queues the work that is already deferred, and defers l. PutOff needs a recording.
func (t *Submission) PutOff(l Deferred) error {
	if err := t.settle(); err != nil {
		return err
	}
	r := t.recording
	r.deferred, r.open = append(r.deferred, l), l
	return nil
}

// Replace defers l in place of Deferred, whose work l contains.
func (t *Submission) Replace(l Deferred) {
	r := t.recording
	r.deferred[len(r.deferred)-1], r.open = l, l
}

// settle queues the deferred work, and joins the members' per-GPU work before later work.
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
	err := l.Queue(t.stream)
	r.collect()
	return err
}

// close frees the driver's resources of the parts, and the deferred work.
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
		p.queue.takeBack(p.own)
		p.own = nil
		for _, l := range p.deferred {
			note(l.Close())
		}
		p.deferred, p.open = nil, nil
	}
	return first
}

// takeBack frees buffers of a closed recording. Earlier queued work may still use the buffers.
func (q *Queue) takeBack(all []*cuda.Buffer) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, b := range all {
		if !q.closed { // with the device all its buffers are closed
			q.spare[b.Len()] = append(q.spare[b.Len()], b)
		}
	}
}

// note keeps m for the recording that is being made.
func (t *Submission) note(m *Memory) {
	if r := t.recording; r != nil && m != nil && !m.shared && !r.used[m] {
		r.used[m] = true
		r.held = append(r.held, held{m, m.buffer})
	}
}

// Recording reports whether a recording is being made.
func (t *Submission) Recording() bool { return t.recording != nil }

// Depend makes the current recording depend on a state: one that is already there and that same accepts, and
// otherwise the result of fresh. Depend returns nil outside a recording.
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

// Replay queues the work again. Replay must not be called within Enter: states get ready before the group is entered,
// in the order in which other callers take their locks.
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

// queueAll queues the graph, unless a member of one of the parts prevents it.
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

// Close frees the driver's resources of the recording, and releases the memory.
func (r *Recording) Close() error {
	r.states = nil
	return r.close()
}
