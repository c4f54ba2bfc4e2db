package cuda

// Foreign calls queue, which makes another NVIDIA library queue work on the stream. queue gets the stream's CUstream,
// with the device's context current. The work uses the given buffers. The work counts as a kernel, in captures too.
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
	*s.off.last() = true // the library's kernels know no other kernels: an overlapping kernel must not overtake them
	return nil
}

// Of reports whether the stream is one of a device.
func (s *Stream) Of(v *Device) bool { return s.dev == v }

// Foreign calls f, which calls another NVIDIA library, with the device's context current.
func (v *Device) Foreign(f func() error) error {
	if err := v.enter(); err != nil {
		return err
	}
	defer v.leave()
	return v.with(f)
}

// Watch is told of every driver call for a device while the call lasts. Work of the GPU may need other GPUs, so a
// call that waits for it may never return.
type Watch interface {
	Waiting()
	Waited()
}

// SetWatch registers the watch of a device; nil removes it. SetWatch changes nothing and returns false if there
// already is another watch.
func (v *Device) SetWatch(w Watch) bool {
	if w == nil {
		v.watch.Store(nil)
		return true
	}
	return v.watch.CompareAndSwap(nil, &w)
}
