package cuda

import (
	"fmt"
	"runtime"
	"unsafe"
)

// Graph is work that was captured from a stream, to be launched as one.
type Graph struct{ object }

// Capture records what f queues on the stream instead of running it. f may use
// other streams by events that fork from this one and come back to it. It must
// queue on the goroutine that calls it, and make, close or wait for nothing but
// what [Device.Relaxed] is for: the driver refuses much of that on this thread, and
// the capture with it. Arguments of kernels, addresses of buffers included, are
// those of the capture; buffers must stay open as long as the graph is launched.
func (s *Stream) Capture(f func() error) (*Graph, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	v, fn := s.dev, &s.dev.drv.fn
	// A capture has to end on the thread that it began on.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := s.capture(true); err != nil {
		return nil, err
	}
	defer s.capture(false)

	const threadLocal = 1 // other goroutines' calls don't disturb the capture
	err := v.with(func() error {
		if r := fn.streamBeginCapture.call(s.id, threadLocal); r != 0 {
			return v.drv.failed(r, &fn.streamBeginCapture, "")
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	g := &Graph{}
	ended := false
	end := func(keep bool) error {
		ended = true
		return v.with(func() error {
			var template uintptr
			if r := fn.streamEndCapture.call(s.id, uintptr(unsafe.Pointer(&template))); r != 0 {
				return v.drv.failed(r, &fn.streamEndCapture, "")
			}
			defer fn.graphDestroy.call(template) // nothing depends on it
			if !keep {
				return nil
			}
			return v.make(&g.handle, &fn.graphExecDestroy, func() (id uintptr, err error) {
				if r := fn.graphInstantiate.call(uintptr(unsafe.Pointer(&id)), template, 0); r != 0 {
					return 0, v.drv.failed(r, &fn.graphInstantiate, "")
				}
				return id, nil
			})
		})
	}
	defer func() {
		if !ended { // f panicked
			end(false)
		}
	}()
	if err := f(); err != nil {
		end(false) // what f says tells more
		return nil, fmt.Errorf("capture: %w", err)
	}
	if err := end(true); err != nil {
		return nil, err
	}
	return g, nil
}

// Relaxed calls f, which may make and close buffers while its goroutine captures.
// Nothing that it does becomes part of the capture.
func (v *Device) Relaxed(f func() error) error {
	const relaxed = 2
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	exchange := &v.drv.fn.exchangeCaptureMode
	mode := int32(relaxed)
	if r := exchange.call(uintptr(unsafe.Pointer(&mode))); r != 0 {
		return v.drv.failed(r, exchange, "")
	}
	err := f()
	if r := exchange.call(uintptr(unsafe.Pointer(&mode))); r != 0 && err == nil {
		return v.drv.failed(r, exchange, "")
	}
	return err
}

// Launch queues the graph.
func (s *Stream) Launch(g *Graph) error {
	if err := enterAll(&s.handle, &g.handle); err != nil {
		return err
	}
	defer leaveAll(&s.handle, &g.handle)
	s.off.Lock()
	defer s.off.Unlock()
	if err := s.settle(); err != nil {
		return err
	}
	f := &s.dev.drv.fn.graphLaunch
	return s.dev.with(func() error {
		if r := f.call4(g.id, s.id, 0, 0); r != 0 {
			return s.dev.drv.failed(r, f, "")
		}
		s.off.launched()
		return nil
	})
}
