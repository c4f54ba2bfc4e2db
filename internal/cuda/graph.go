package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"unsafe"
)

// Graph is work that was captured from a stream, to be launched as one.
type Graph struct {
	object
	front front
}

// front is a graph's first node, before all others: the kernel that makes copies, if the graph was captured from a
// stream that defers copies. A launch makes the node do the copies that are deferred at that time.
type front struct {
	sync.Mutex           // held by launches: a node has one parameter block
	template   object    // the node's graph; closed after the graph that is launched
	node       uintptr   // 0: none
	kernel     *Function // nil if node is 0
	busy       bool      // the parameter block has copies that were already made

	args Args
	text kernelNode
}

// kernelNode is CUDA_KERNEL_NODE_PARAMS_v1.
type kernelNode struct {
	function        uintptr
	blocks, threads [3]uint32
	shared          uint32
	params, extra   uintptr
}

// Close destroys the graph, after the calls that use it.
func (g *Graph) Close() error {
	err := g.object.Close()
	if g.front.node != 0 && !errors.Is(err, ErrClosed) {
		err = errors.Join(err, g.front.template.Close())
	}
	return err
}

// Capture records what f queues on the stream, instead of running it. f may use other streams that fork from this
// stream and join it by events. f must queue on its caller's goroutine. f must not make, close or wait for objects,
// except through [Device.Relaxed]: the driver refuses much of that on this thread, and fails the capture. Arguments
// of kernels, addresses of buffers included, are those of the capture. Buffers must stay open as long as the graph is
// launched.
func (s *Stream) Capture(f func() error) (*Graph, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	v, fn := s.dev, &s.dev.drv.fn
	// A capture has to end on the thread on which it began.
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
		return v.with(func() error {
			ended = true
			var template uintptr
			if r := fn.streamEndCapture.call(s.id, uintptr(unsafe.Pointer(&template))); r != 0 {
				return v.drv.failed(r, &fn.streamEndCapture, "")
			}
			if !keep || g.front.kernel == nil {
				defer fn.graphDestroy.call(template) // nothing depends on the template
			} else if err := g.front.find(v, template); err != nil {
				return err
			}
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
		if !ended { // f panicked, or the driver did not come to the end
			end(false)
		}
	}()
	if g.front.kernel, err = s.queueFront(); err != nil {
		end(false)
		return nil, err
	}
	if err := f(); err != nil {
		end(false) // the error of f has more detail
		return nil, fmt.Errorf("capture: %w", err)
	}
	if err := end(true); err != nil {
		if g.front.node != 0 {
			g.front.template.Close()
		}
		return nil, err
	}
	return g, nil
}

// find keeps the captured graph, and finds the node in it. After an error nothing is kept.
func (f *front) find(v *Device, template uintptr) error {
	fn := &v.drv.fn
	err := v.make(&f.template.handle, &fn.graphDestroy, func() (uintptr, error) {
		var nodes [64]uintptr
		n := uintptr(len(nodes))
		if r := fn.graphGetRootNodes.call(template, uintptr(unsafe.Pointer(&nodes)), uintptr(unsafe.Pointer(&n))); r != 0 {
			return 0, v.drv.failed(r, &fn.graphGetRootNodes, "")
		}
		for _, node := range nodes[:n] {
			if n == 1 || f.makes(v, node) {
				f.node = node
				return template, nil
			}
		}
		return 0, fmt.Errorf("capture: none of %d first nodes makes the copies: %w", n, ErrRange)
	})
	if err != nil {
		f.node = 0
		fn.graphDestroy.call(template)
	}
	return err
}

// makes reports whether a node is the kernel that makes copies. Work of other libraries in a capture may also begin
// with nodes that wait for nothing.
func (f *front) makes(v *Device, node uintptr) bool {
	var p kernelNode
	return v.drv.fn.graphGetKernel.call(node, uintptr(unsafe.Pointer(&p))) == 0 && p.function == f.kernel.id
}

// set makes the node do the given copies, or none.
func (f *front) set(g *Graph, copies []smallCopy) error {
	grid := f.args.copies(copies)
	f.args.point()
	f.text = kernelNode{function: f.kernel.id, params: uintptr(unsafe.Pointer(unsafe.SliceData(f.args.params)))}
	for i := range 3 {
		f.text.blocks[i], f.text.threads[i] = uint32(grid.Blocks[i]), uint32(grid.Threads[i])
	}
	v := g.dev
	call := &v.drv.fn.graphSetKernel
	err := v.with(func() error {
		if r := call.call4(g.id, f.node, uintptr(unsafe.Pointer(&f.text)), 0); r != 0 {
			return v.drv.failed(r, call, "%d copies", len(copies))
		}
		return nil
	})
	// After a failure the driver may have either parameter block.
	f.busy = err != nil || len(copies) > 0
	return err
}

// Relaxed calls f, which may make and close buffers while its goroutine captures. Nothing of f becomes part of the
// capture.
func (v *Device) Relaxed(f func() error) error {
	const relaxed = 2
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	exchange := &v.drv.fn.exchangeCaptureMode
	mode := int32(relaxed)
	if r := exchange.call(uintptr(unsafe.Pointer(&mode))); r != 0 {
		return v.drv.failed(r, exchange, "GPU %d", v.info.Ordinal)
	}
	err := f()
	if r := exchange.call(uintptr(unsafe.Pointer(&mode))); r != 0 && err == nil {
		return v.drv.failed(r, exchange, "GPU %d", v.info.Ordinal)
	}
	return err
}

// Launch queues the graph. The graph's first node makes the copies that the stream has deferred. Events behind the
// copies are recorded after the graph, unless one of the events is timed.
func (s *Stream) Launch(g *Graph) error {
	if err := enterAll(&s.handle, &g.handle); err != nil {
		return err
	}
	defer leaveAll(&s.handle, &g.handle)
	f, o := &g.front, &s.off
	f.Lock()
	defer f.Unlock()
	o.Lock()
	defer o.Unlock()
	together := f.node != 0 && len(o.copies) > 0 && o.lost == nil && !slices.ContainsFunc(o.marks, func(e *Event) bool { return e.timed })
	if !together {
		if err := s.settle(); err != nil {
			return err
		}
	}
	if len(o.copies) > 0 || f.busy {
		if err := f.set(g, o.copies); err != nil {
			return fmt.Errorf("copies that were put off: %w", err)
		}
	}
	call := &s.dev.drv.fn.graphLaunch
	err := s.dev.with(func() error {
		if r := call.call4(g.id, s.id, 0, 0); r != 0 {
			return s.dev.drv.failed(r, call, "")
		}
		return nil
	})
	if err != nil {
		return err
	}
	o.launched()
	o.made()
	if err := s.mark(); err != nil {
		o.lost = err // for the next call: the graph is launched
	}
	return nil
}
