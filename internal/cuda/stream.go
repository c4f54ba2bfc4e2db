package cuda

import (
	"time"
	"unsafe"
)

// Stream is a queue of work, which runs in order.
type Stream struct {
	object
	off putOff
}

// NewStream makes a stream.
func (v *Device) NewStream() (*Stream, error) {
	s := &Stream{}
	err := v.make(&s.handle, &v.drv.fn.streamDestroy, func() (id uintptr, err error) {
		const blocking, nonBlocking = 0, 1
		flags := uintptr(nonBlocking)
		if v.alive != nil {
			flags = blocking
		}
		if r := v.drv.fn.streamCreate.call(uintptr(unsafe.Pointer(&id)), flags); r != 0 {
			return 0, v.drv.failed(r, &v.drv.fn.streamCreate, "")
		}
		return id, nil
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Synchronize waits for all queued work, and returns its failure.
func (s *Stream) Synchronize() error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	if err := s.settled(); err != nil {
		return err
	}
	return s.dev.with(s.wait)
}

func (s *Stream) wait() error {
	if r := s.dev.drv.fn.streamSynchronize.call4(s.id, 0, 0, 0); r != 0 {
		return s.dev.drv.failed(r, &s.dev.drv.fn.streamSynchronize, "")
	}
	return nil
}

// Done reports whether all queued work is done.
func (s *Stream) Done() (bool, error) {
	if err := s.settled(); err != nil {
		return false, err
	}
	return s.done(&s.dev.drv.fn.streamQuery)
}

func (h *handle) done(query *function) (done bool, err error) {
	if err := h.enter(); err != nil {
		return false, err
	}
	defer h.leave()
	err = h.dev.with(func() error {
		switch r := query.call4(h.id, 0, 0, 0); r {
		case 0:
			done = true
		case resultNotReady:
		default:
			return h.dev.drv.failed(r, query, "")
		}
		return nil
	})
	return done, err
}

// Event is a mark in a stream.
type Event struct {
	object
	timed bool
}

// NewEvent makes an event. A timed event costs a little more.
func (v *Device) NewEvent(timed bool) (*Event, error) {
	e := &Event{timed: timed}
	err := v.make(&e.handle, &v.drv.fn.eventDestroy, func() (id uintptr, err error) {
		var flags uintptr
		if !timed {
			const disableTiming = 2
			flags = disableTiming
		}
		if r := v.drv.fn.eventCreate.call(uintptr(unsafe.Pointer(&id)), flags); r != 0 {
			return 0, v.drv.failed(r, &v.drv.fn.eventCreate, "")
		}
		return id, nil
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// Record marks the present end of the stream.
func (s *Stream) Record(e *Event) error {
	if err := enterAll(&s.handle, &e.handle); err != nil {
		return err
	}
	defer leaveAll(&s.handle, &e.handle)
	if err := e.settle(s); err != nil {
		return err
	}
	o := &s.off
	o.Lock()
	defer o.Unlock()
	if len(o.copies) > 0 { // the event would split the copies
		if !s.marked(&e.handle) {
			o.marks = append(o.marks, e)
		}
		return nil
	}
	if err := s.settle(); err != nil {
		return err
	}
	return s.record(e)
}

// record is Record without deferral.
func (s *Stream) record(e *Event) error { return s.onEvent(&s.dev.drv.fn.eventRecord, e.id, s.id) }

// Wait makes later work wait until e, as last recorded, has passed. e may be of a device that the stream's device
// reaches; later work can read the results of the work before e.
func (s *Stream) Wait(e *Event) error {
	if err := enterReached(&s.handle, &e.handle); err != nil {
		return err
	}
	defer leaveAll(&s.handle, &e.handle)
	if err := e.settle(nil); err != nil {
		return err
	}
	s.off.Lock()
	defer s.off.Unlock()
	if err := s.settle(); err != nil {
		return err
	}
	if err := s.onEvent(&s.dev.drv.fn.streamWaitEvent, s.id, e.id); err != nil {
		return err
	}
	*s.off.last() = true // copies may precede e
	return nil
}

func (s *Stream) onEvent(f *function, first, second uintptr) error {
	return s.dev.with(func() error {
		if r := f.call4(first, second, 0, 0); r != 0 {
			return s.dev.drv.failed(r, f, "")
		}
		return nil
	})
}

// Synchronize waits until e, as last recorded, has passed.
func (e *Event) Synchronize() error {
	if err := e.enter(); err != nil {
		return err
	}
	defer e.leave()
	if err := e.settle(nil); err != nil {
		return err
	}
	f := &e.dev.drv.fn.eventSynchronize
	return e.dev.with(func() error {
		if r := f.call4(e.id, 0, 0, 0); r != 0 {
			return e.dev.drv.failed(r, f, "")
		}
		return nil
	})
}

// Done reports whether e, as last recorded, has passed.
func (e *Event) Done() (bool, error) {
	if err := e.settle(nil); err != nil {
		return false, err
	}
	return e.done(&e.dev.drv.fn.eventQuery)
}

// Since returns the GPU's time from one timed event to another; both must have passed. The resolution is about half a
// microsecond.
func (e *Event) Since(start *Event) (time.Duration, error) {
	if err := enterAll(&e.handle, &start.handle); err != nil {
		return 0, err
	}
	defer leaveAll(&e.handle, &start.handle)
	for _, e := range [...]*Event{start, e} {
		if err := e.settle(nil); err != nil {
			return 0, err
		}
	}
	var ms float32
	f := &e.dev.drv.fn.eventElapsedTime
	err := e.dev.with(func() error {
		if r := f.call(uintptr(unsafe.Pointer(&ms)), start.id, e.id); r != 0 {
			return e.dev.drv.failed(r, f, "")
		}
		return nil
	})
	return time.Duration(float64(ms) * float64(time.Millisecond)), err
}
