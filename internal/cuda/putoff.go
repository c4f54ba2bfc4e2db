package cuda

import (
	"fmt"
	"slices"
	"sync"
)

// A small copy takes the GPU some 3 us, by its copy engine or by a kernel. One kernel makes several copies in little
// more time. So a stream may defer small copies until other work is queued on it, or a caller asks for them. The
// stream defers them, not its callers, because every call that could see a difference comes through the stream.

const (
	// mostCopies is the number of copies that the kernel makes at once.
	mostCopies = 8
	// mostCopyBytes is the largest size of a small copy. The schedule of a decode step has some 16 KB, and more with
	// long sequences.
	mostCopyBytes = 64 << 10
	// copyUnit divides addresses and sizes of small copies.
	copyUnit = 4

	// The kernel's launch (kernels/copies.cu).
	copyThreads    = 256
	copyBlockBytes = 4096
)

// Copies is struct Copies, the argument of the kernel of [Stream.PutOff].
type Copies struct {
	To, From [mostCopies]uint64
	Bytes    [mostCopies]int32
	Blocks   int32 // thread blocks of each copy
	_        [4]byte
}

// putOff has the deferred work of a stream.
type putOff struct {
	sync.Mutex           // held while work is queued on the stream
	kernel     *Function // nil: nothing is deferred
	capturing  bool      // nothing is deferred during a capture
	copies     []smallCopy
	marks      []*Event // after the copies
	lost       error    // why a copy was not made, or an event not recorded, for the next call that queues work
	behind     bool     // the kernel was the last launch
	front      bool     // the same, within the capture

	args Args
}

// smallCopy is a copy that is deferred, or could be.
type smallCopy struct {
	to, from uintptr
	n        int
	dst, src *handle   // owners of the memory
	call     *function // makes the copy alone
}

// PutOff makes the stream defer small copies to the GPU's memory: from GPU memory, and from pinned memory, which
// kernels read at the host's address. load returns the kernel that makes the copies.
//
// All other work on the stream first queues the deferred copies. So do calls that ask about the stream or about an
// event recorded behind the copies, and the closing of objects that the copies need. So the order stays the order of
// the calls. But an error of queueing copies is returned by the call that queues them; the copies stay deferred for
// the next call.
//
// A graph that is captured from the stream afterwards begins with the kernel, so that [Stream.Launch] queues nothing
// else for the copies. Then the events are recorded after the graph, unless one of them is timed.
//
// In an adopted context PutOff does nothing: the owner's work waits for queued work, and does not come through the
// stream.
func (s *Stream) PutOff(load func(*Device) (*Function, error)) error {
	v := s.dev
	if v.alive != nil {
		return nil
	}
	f, err := load(v)
	if err != nil {
		return err
	}
	// Within the device's gate: Close ends the deferral before the kernel is unloaded.
	if err := v.enter(); err != nil {
		return err
	}
	defer v.leave()
	if err := enterAll(&s.handle, &f.module.handle); err != nil {
		return err
	}
	defer leaveAll(&s.handle, &f.module.handle)
	v.putOff.Lock()
	defer v.putOff.Unlock()
	s.off.Lock()
	defer s.off.Unlock()
	s.off.kernel = f
	if !slices.Contains(v.putOff.streams, s) {
		v.putOff.streams = append(v.putOff.streams, s)
	}
	return nil
}

// copy queues a copy, or defers it. The copy's handles are entered.
func (s *Stream) copy(c smallCopy) error {
	o := &s.off
	o.Lock()
	defer o.Unlock()
	if !s.small(&c) {
		if err := s.settle(); err != nil {
			return err
		}
		return s.copyNow(&c)
	}
	if len(o.copies) == mostCopies || slices.ContainsFunc(o.copies, c.depends) {
		if err := s.settle(); err != nil {
			return err
		}
	}
	o.copies = append(o.copies, c)
	return nil
}

// small reports whether a copy may be deferred.
func (s *Stream) small(c *smallCopy) bool {
	return s.off.kernel != nil && !s.off.capturing && c.call != &s.dev.drv.fn.memcpyDtoHAsync &&
		c.n <= mostCopyBytes && (c.to|c.from|uintptr(c.n))%copyUnit == 0
}

// depends reports whether c and an earlier copy can't be made at once.
func (c *smallCopy) depends(before smallCopy) bool {
	meet := func(a uintptr, an int, b uintptr, bn int) bool { return a < b+uintptr(bn) && b < a+uintptr(an) }
	return meet(c.to, c.n, before.to, before.n) || meet(c.to, c.n, before.from, before.n) || meet(c.from, c.n, before.to, before.n)
}

// needs reports whether a copy uses h.
func (c *smallCopy) needs(h *handle) bool { return c.dst == h || c.src == h }

func (s *Stream) copyNow(c *smallCopy) error {
	return s.dev.with(func() error {
		if r := c.call.call4(c.to, c.from, uintptr(c.n), s.id); r != 0 {
			return s.dev.drv.failed(r, c.call, "%d bytes", c.n)
		}
		return nil
	})
}

// settle queues deferred copies. settle precedes all other work on the stream.
func (s *Stream) settle() error {
	if err := s.flush(); err != nil {
		return err
	}
	err := s.off.lost
	s.off.lost = nil
	return err
}

// flush queues the deferred copies, which stay deferred after an error. The stream's lock is held. Its gate need not
// be entered, since closing the stream flushes.
func (s *Stream) flush() error {
	o := &s.off
	if len(o.copies) > 0 {
		if err := s.makeCopies(); err != nil {
			return fmt.Errorf("copies that were put off: %w", err)
		}
		o.made()
	}
	return s.mark()
}

// made records that the copies are queued.
func (o *putOff) made() {
	clear(o.copies)
	o.copies = o.copies[:0]
}

// mark records the events behind the copies.
func (s *Stream) mark() error {
	o := &s.off
	for len(o.marks) > 0 {
		if err := s.record(o.marks[0]); err != nil {
			return fmt.Errorf("an event behind copies that were put off: %w", err)
		}
		o.marks = slices.Delete(o.marks, 0, 1)
	}
	return nil
}

func (s *Stream) makeCopies() error {
	o := &s.off
	if len(o.copies) == 1 { // the kernel gains nothing
		return s.copyNow(&o.copies[0])
	}
	g := o.args.copies(o.copies)
	if err := o.kernel.queue(s, &g, &o.args); err != nil {
		return err
	}
	o.behind = true
	return nil
}

// copies makes a the argument of the kernel for a list of copies, which may be empty, and returns the kernel's grid.
func (a *Args) copies(list []smallCopy) Grid {
	var params Copies
	most := 1
	for i := range list {
		c := &list[i]
		params.To[i], params.From[i], params.Bytes[i] = uint64(c.to), uint64(c.from), int32(c.n)
		most = max(most, c.n)
	}
	blocks := (most + copyBlockBytes - 1) / copyBlockBytes
	params.Blocks = int32(blocks)
	a.Reset()
	Struct(a, &params)
	return Grid{Blocks: [3]int{max(1, len(list)) * blocks, 1, 1}, Threads: [3]int{copyThreads, 1, 1}}
}

// queueFront begins a capture with the kernel, without copies yet, if the stream defers copies; otherwise queueFront
// returns nil.
func (s *Stream) queueFront() (*Function, error) {
	o := &s.off
	o.Lock()
	defer o.Unlock()
	if o.kernel == nil {
		return nil, nil
	}
	g := o.args.copies(nil)
	if err := o.kernel.queue(s, &g, &o.args); err != nil {
		return nil, err
	}
	o.front = true
	return o.kernel, nil
}

// settled is settle for calls that wait: such calls must not hold the lock.
func (s *Stream) settled() error {
	s.off.Lock()
	defer s.off.Unlock()
	return s.settle()
}

// last reports whether the last queued, or captured, work is the kernel.
func (o *putOff) last() *bool {
	if o.capturing {
		return &o.front
	}
	return &o.behind
}

// mayOverlap reports whether a launch may overlap the work before it. A launch must not overlap the kernel that makes
// copies, since kernels assume that none overtakes a copy, unless the launch waits before it reads anything. The
// first launch after a graph overlaps nothing. The stream's lock is held.
func (o *putOff) mayOverlap(g *Grid) bool { return g.Waits || !*o.last() }

// launched records a launch after the kernel.
func (o *putOff) launched() { *o.last() = false }

// capture records the begin or the end of a capture.
func (s *Stream) capture(begins bool) error {
	s.off.Lock()
	defer s.off.Unlock()
	if begins {
		if err := s.settle(); err != nil {
			return err
		}
	}
	s.off.capturing, s.off.front = begins, false
	return nil
}

// marked reports whether an event is to be recorded after the deferred copies.
func (s *Stream) marked(h *handle) bool {
	return slices.ContainsFunc(s.off.marks, func(e *Event) bool { return &e.handle == h })
}

// IsPutOff reports whether the event's last record is deferred with the copies before it. Such an event has not
// passed; Done would queue the copies.
func (e *Event) IsPutOff() bool {
	p := &e.dev.putOff
	p.Lock()
	defer p.Unlock()
	return slices.ContainsFunc(p.streams, func(s *Stream) bool {
		s.off.Lock()
		defer s.off.Unlock()
		return s.marked(&e.handle)
	})
}

// settle queues the copies that streams other than the given one have deferred, if e is recorded behind them.
func (e *Event) settle(other *Stream) error {
	p := &e.dev.putOff
	p.Lock()
	defer p.Unlock()
	for _, s := range p.streams {
		if s == other {
			continue
		}
		s.off.Lock()
		var err error
		if s.marked(&e.handle) {
			err = s.settle()
		}
		s.off.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// letGo queues the deferred copies that need h, which is closing. Copies that can't be queued are dropped.
func (v *Device) letGo(h *handle) (first error) {
	for _, of := range append([]*Device{v}, listed(&v.peers.reaching)...) {
		if err := of.putOff.letGo(h); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// putOffs are the streams of a device that defer copies.
type putOffs struct {
	sync.Mutex // taken before the streams' locks
	streams    []*Stream
}

// flush queues all deferred copies.
func (p *putOffs) flush() (first error) {
	p.Lock()
	defer p.Unlock()
	for _, s := range p.streams {
		s.off.Lock()
		err := s.flush()
		s.off.Unlock()
		if err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (p *putOffs) letGo(h *handle) (first error) {
	p.Lock()
	defer p.Unlock()
	for _, s := range p.streams {
		if err := s.letGo(h); err != nil && first == nil {
			first = err
		}
	}
	p.streams = slices.DeleteFunc(p.streams, func(s *Stream) bool { return &s.handle == h })
	return first
}

func (s *Stream) letGo(h *handle) error {
	o := &s.off
	o.Lock()
	defer o.Unlock()
	all := h == &s.handle
	if all {
		defer func() { o.kernel, o.copies, o.marks, o.lost = nil, nil, nil, nil }()
	}
	needs := func(c smallCopy) bool { return c.needs(h) }
	if !all && !s.marked(h) && !slices.ContainsFunc(o.copies, needs) {
		return nil
	}
	err := s.flush()
	if err == nil {
		return nil
	}
	if slices.ContainsFunc(o.copies, func(c smallCopy) bool { return c.src == h && c.dst != h }) {
		o.lost = err
	}
	o.copies = slices.DeleteFunc(o.copies, needs)
	o.marks = slices.DeleteFunc(o.marks, func(e *Event) bool { return &e.handle == h })
	return err
}

// letAllGo ends the deferral on all streams, before any object of the device is closed.
func (v *Device) letAllGo() (first error) {
	p := &v.putOff
	p.Lock()
	defer p.Unlock()
	for _, s := range p.streams {
		if err := s.letGo(&s.handle); err != nil && first == nil {
			first = err
		}
	}
	p.streams = nil
	return first
}
