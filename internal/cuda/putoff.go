package cuda

import (
	"fmt"
	"slices"
	"sync"
)

// A small copy takes the GPU some 3 us, by its copy engine or by a kernel, and one
// kernel that makes several of them hardly longer. So a stream may put small copies
// off until other work is queued on it, or somebody asks for them. They are in the
// stream here and not where they are queued because every call that could tell the
// difference comes by here.

const (
	// mostCopies is how many the kernel makes at once.
	mostCopies = 8
	// mostCopyBytes is where a copy is no small one any more. The schedule of a
	// decode step has some 16 KB, and more with long sequences.
	mostCopyBytes = 64 << 10
	// copyUnit is what addresses and sizes must be multiples of.
	copyUnit = 4

	// The kernel's launch (kernels/copies.cu).
	copyThreads    = 256
	copyBlockBytes = 4096
)

// Copies is struct Copies, what the kernel takes that [Stream.PutOff] is for.
type Copies struct {
	To, From [mostCopies]uint64
	Bytes    [mostCopies]int32
	Blocks   int32 // of each copy
	_        [4]byte
}

// putOff is what a stream puts off.
type putOff struct {
	sync.Mutex           // held while work is queued on the stream
	kernel     *Function // nil: nothing is put off
	capturing  bool      // nor is it now
	copies     []smallCopy
	marks      []*Event // behind the copies
	lost       error    // why a copy was not made, or an event not recorded, for the next call that queues something
	behind     bool     // the kernel was launched, and nothing else since
	front      bool     // so is it in the capture

	args Args
}

// smallCopy is one that is put off, or could be.
type smallCopy struct {
	to, from uintptr
	n        int
	dst, src *handle   // whose memory it is
	call     *function // makes it alone
}

// PutOff has the stream put off small copies to the GPU's memory: from there, and from
// pinned memory, which kernels read at the address that the host has it at. load gives
// the kernel that makes them.
//
// Everything else that is queued on the stream queues them first, and so does what asks
// about the stream or about an event that is recorded behind them, and the closing of
// what they need. So all is done in the order of the calls, as ever. But an error in
// queuing copies is that of the call that has them queued; they are there still, for
// the next one.
//
// A graph that is captured from the stream from now on begins with that kernel, so that
// [Stream.Launch] queues nothing else for them. Then the events are recorded behind the
// graph, if none of them tells the time.
//
// In a context of someone else it does nothing: the owner's work waits for what is
// queued, and does not come by here.
func (s *Stream) PutOff(load func(*Device) (*Function, error)) error {
	v := s.dev
	if v.alive != nil {
		return nil
	}
	f, err := load(v)
	if err != nil {
		return err
	}
	// In the device's gate: its Close ends this before the kernel goes.
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

// copy queues a copy, or puts it off. What it needs is entered.
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

// small says whether a copy may be put off.
func (s *Stream) small(c *smallCopy) bool {
	return s.off.kernel != nil && !s.off.capturing && c.call != &s.dev.drv.fn.memcpyDtoHAsync &&
		c.n <= mostCopyBytes && (c.to|c.from|uintptr(c.n))%copyUnit == 0
}

// depends says whether c and one that comes before it can't be made at once.
func (c *smallCopy) depends(before smallCopy) bool {
	meet := func(a uintptr, an int, b uintptr, bn int) bool { return a < b+uintptr(bn) && b < a+uintptr(an) }
	return meet(c.to, c.n, before.to, before.n) || meet(c.to, c.n, before.from, before.n) || meet(c.from, c.n, before.to, before.n)
}

// needs says whether a copy has to do with h.
func (c *smallCopy) needs(h *handle) bool { return c.dst == h || c.src == h }

func (s *Stream) copyNow(c *smallCopy) error {
	return s.dev.with(func() error {
		if r := c.call.call4(c.to, c.from, uintptr(c.n), s.id); r != 0 {
			return s.dev.drv.failed(r, c.call, "%d bytes", c.n)
		}
		return nil
	})
}

// settle comes before everything that is queued on the stream.
func (s *Stream) settle() error {
	if err := s.flush(); err != nil {
		return err
	}
	err := s.off.lost
	s.off.lost = nil
	return err
}

// flush queues what is put off. On error it is put off still. The stream's lock is held;
// its gate need not be entered, since closing the stream flushes it.
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

// made says that the copies are queued.
func (o *putOff) made() {
	clear(o.copies)
	o.copies = o.copies[:0]
}

// mark records the events behind them.
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

// copies makes a what the kernel takes to make copies, or none, and returns its grid.
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

// queueFront begins a capture with the kernel, which makes no copies yet, if the stream
// puts copies off: nil if it does not.
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

// settled is settle for calls that wait: they must not hold the lock.
func (s *Stream) settled() error {
	s.off.Lock()
	defer s.off.Unlock()
	return s.settle()
}

// last says whether the last thing that was queued, or captured, is the kernel.
func (o *putOff) last() *bool {
	if o.capturing {
		return &o.front
	}
	return &o.behind
}

// mayOverlap says whether a launch may overlap what is before it: not the kernel that
// makes copies, since kernels take it that none overtakes a copy, but for those that wait
// before they read anything. (The first launch behind a graph overlaps nothing.) The
// stream's lock is held.
func (o *putOff) mayOverlap(g *Grid) bool { return g.Waits || !*o.last() }

// launched notes that something was launched behind the kernel.
func (o *putOff) launched() { *o.last() = false }

// capture says that a capture begins or ends.
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

// marked says whether an event is to be recorded behind what is put off.
func (s *Stream) marked(h *handle) bool {
	return slices.ContainsFunc(s.off.marks, func(e *Event) bool { return &e.handle == h })
}

// IsPutOff says whether the event, as last recorded, is put off with the copies before
// it. It has not been passed then; Done would queue them.
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

// settle queues what streams other than one have put off behind which e is recorded.
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

// letGo queues what is put off and needs h, which is shut and goes. What can't be
// queued is not put off any longer.
func (v *Device) letGo(h *handle) (first error) {
	for _, of := range append([]*Device{v}, listed(&v.peers.reaching)...) {
		if err := of.putOff.letGo(h); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// putOffs are the streams of a device that put copies off.
type putOffs struct {
	sync.Mutex // taken before the streams'
	streams    []*Stream
}

// flush queues all that is put off.
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

// letAllGo ends the putting off on all streams, before anything on the device goes.
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
