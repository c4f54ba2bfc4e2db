package cuda

// Foreign has another library of NVIDIA's queue work on the stream: queue gets the driver's
// name of it, with the device's context current. The buffers are those that the work uses.
// It counts as a kernel, in captures, too.
func (s *Stream) Foreign(queue func(stream uintptr) error, buffers ...*Buffer) error {
	hs := make([]*handle, 0, 1+len(buffers))
	hs = append(hs, &s.handle)
	for _, b := range buffers {
		hs = append(hs, &b.handle)
	}
	if err := enterReached(hs...); err != nil {
		return err
	}
	defer leaveAll(hs...)
	s.off.Lock()
	defer s.off.Unlock()
	if err := s.settle(); err != nil {
		return err
	}
	if err := s.dev.with(func() error { return queue(s.id) }); err != nil {
		return err
	}
	*s.off.last() = true // its kernels know of no others: who overlaps must not overtake them
	return nil
}

// Of says whether the stream is one of a device.
func (s *Stream) Of(v *Device) bool { return s.dev == v }

// Foreign calls f, which has another library of NVIDIA's do something, with the device's
// context current.
func (v *Device) Foreign(f func() error) error {
	if err := v.enter(); err != nil {
		return err
	}
	defer v.leave()
	return v.with(f)
}

// Watch is somebody who is told of every call of the driver for a device while it lasts: what
// the GPU does may need others, and a call that waits for it may last for ever.
type Watch interface {
	Waiting()
	Waited()
}

// SetWatch gives a device's calls to a watch; nil ends that. False, and nothing is done, where
// there is another one already.
func (v *Device) SetWatch(w Watch) bool {
	if w == nil {
		v.watch.Store(nil)
		return true
	}
	return v.watch.CompareAndSwap(nil, &w)
}
