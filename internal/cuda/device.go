package cuda

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"
)

// gate admits calls until it is shut. Shutting waits for the calls inside.
type gate struct {
	mu     sync.Mutex
	idle   sync.Cond // signals that inside is 0; made by shut
	inside int
	closed bool
}

func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return ErrClosed
	}
	g.inside++
	return nil
}

func (g *gate) leave() {
	g.mu.Lock()
	g.inside--
	if g.closed && g.inside == 0 {
		g.idle.Signal() // only shut waits, and shut runs once
	}
	g.mu.Unlock()
}

func (g *gate) shut() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return ErrClosed
	}
	g.closed = true
	g.idle.L = &g.mu
	for g.inside > 0 {
		g.idle.Wait()
	}
	return nil
}

// Device is an open GPU.
type Device struct {
	gate // entered by calls that make or close an object, and by calls on the device itself
	drv  *Driver
	info Info
	dev  int32   // the driver's handle
	ctx  uintptr // the primary context, or another owner's
	own  *Stream // for calls without a stream

	alive func() bool // reports whether the context still exists; nil: the primary context

	used, pinned atomic.Int64 // bytes of open buffers

	peers peers
	watch atomic.Pointer[Watch] // nil: none

	list struct {
		sync.Mutex
		last *handle // the open objects, newest first
	}
	modules struct {
		sync.Mutex
		byKey map[string]*Module
	}
	putOff putOffs
}

// handle is the common part of all objects of a device.
type handle struct {
	gate
	dev          *Device
	id           uintptr   // the driver's handle
	destroy      *function // takes id alone; nil: nothing to destroy
	gone         func()    // called after destroy; may be nil
	older, newer *handle   // neighbours in the device's list
}

// Open retains the primary context of a GPU. Errors: [ErrNoDevice], and the driver's.
func (d *Driver) Open(ordinal int) (*Device, error) {
	v, err := d.device(ordinal)
	if err != nil {
		return nil, err
	}
	var ctx uintptr
	if r := d.fn.primaryCtxRetain.call(uintptr(unsafe.Pointer(&ctx)), uintptr(v.dev)); r != 0 {
		return nil, d.failed(r, &d.fn.primaryCtxRetain, "GPU %d", ordinal)
	}
	v.ctx = ctx
	if v.own, err = v.NewStream(); err != nil {
		d.fn.primaryCtxRelease.call(uintptr(v.dev)) // the first error has more detail
		return nil, err
	}
	return v, nil
}

// Adopt is Open in a context that another owner made on this GPU and will destroy. ctx is its CUcontext, and alive
// reports whether the context still exists. After the owner has destroyed the context, all objects in it are gone:
// calls return [ErrClosed], and Close makes no driver call.
//
// The streams of such a device and the legacy default stream of the context, which has the owner's work, wait for
// each other.
func (d *Driver) Adopt(ordinal int, ctx uintptr, alive func() bool) (*Device, error) {
	v, err := d.device(ordinal)
	if err != nil {
		return nil, err
	}
	v.ctx, v.alive = ctx, alive
	if v.own, err = v.NewStream(); err != nil {
		return nil, err
	}
	return v, nil
}

// device returns a Device without a context.
func (d *Driver) device(ordinal int) (*Device, error) {
	info, dev, err := d.info(ordinal)
	if err != nil {
		return nil, err
	}
	if info.Capability < oldestCapability {
		return nil, fmt.Errorf("GPU %d (%s) has compute capability %d.%d, and 8.0 is needed: %w",
			ordinal, info.Name, info.Capability/10, info.Capability%10, ErrNoDevice)
	}
	return &Device{drv: d, info: info, dev: dev}, nil
}

// Lost reports whether the owner has destroyed the context, see [Driver.Adopt].
func (v *Device) Lost() bool { return v.alive != nil && !v.alive() }

// Close waits for the GPU, closes all open objects of the device, the newest first, and releases the context, unless
// another owner has it. Close also closes graphs of devices that reach v: their work may be on v. After a failure
// Close continues; the error is the first.
func (v *Device) Close() error {
	if err := v.shut(); err != nil {
		return fmt.Errorf("GPU %d: %w", v.info.Ordinal, err)
	}
	// A failed kernel is reported here, and by every later call.
	first := v.letAllGo()
	if !v.Lost() {
		if err := v.wait(); first == nil {
			first = err
		}
	}
	if err := v.waitForPeers(); first == nil {
		first = err
	}
	if err := v.closeGraphsOfPeers(); first == nil {
		first = err
	}
	defer v.forget()
	for {
		v.list.Lock()
		h := v.list.last
		v.list.Unlock()
		if h == nil {
			break
		}
		if err := h.close(); first == nil {
			first = err
		}
	}
	if v.alive != nil {
		return first
	}
	if r := v.drv.fn.primaryCtxRelease.call(uintptr(v.dev)); r != 0 && first == nil {
		first = v.drv.failed(r, &v.drv.fn.primaryCtxRelease, "GPU %d", v.info.Ordinal)
	}
	return first
}

// wait waits for all work of the context.
func (v *Device) wait() error {
	return v.with(func() error {
		if r := v.drv.fn.ctxSynchronize.call(); r != 0 {
			return v.drv.failed(r, &v.drv.fn.ctxSynchronize, "GPU %d", v.info.Ordinal)
		}
		return nil
	})
}

// Info returns the result of Driver.Info at the time of opening.
func (v *Device) Info() Info { return v.info }

// Driver returns the driver of the device.
func (v *Device) Driver() *Driver { return v.drv }

// Memory is the state of a GPU's memory, in bytes.
type Memory struct {
	Free   int64 // for all processes of the machine
	Total  int64
	Used   int64 // by this Device's buffers
	Pinned int64 // host memory of this Device's host buffers
}

// Memory asks the driver.
func (v *Device) Memory() (Memory, error) {
	if err := v.enter(); err != nil {
		return Memory{}, err
	}
	defer v.leave()
	var free, total uint64
	err := v.with(func() error {
		if r := v.drv.fn.memGetInfo.call(uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total))); r != 0 {
			return v.drv.failed(r, &v.drv.fn.memGetInfo, "GPU %d", v.info.Ordinal)
		}
		return nil
	})
	if err != nil {
		return Memory{}, err
	}
	return Memory{Free: int64(free), Total: int64(total), Used: v.used.Load(), Pinned: v.pinned.Load()}, nil
}

// with runs f on a thread for which the device's context is current.
//
// with costs two driver calls, which only change a stack of the thread; BenchmarkWith measures them.
func (v *Device) with(f func() error) error {
	if v.Lost() { // a destroyed context must not reach the driver
		return fmt.Errorf("the context of GPU %d was destroyed: %w", v.info.Ordinal, ErrClosed)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if r := v.drv.fn.ctxPushCurrent.call4(v.ctx, 0, 0, 0); r != 0 {
		return v.drv.failed(r, &v.drv.fn.ctxPushCurrent, "GPU %d", v.info.Ordinal)
	}
	// Popping a pushed context can't fail by itself. The call may report the failure of a running kernel, which the
	// next call reports too. The results of f are valid, and such an error must not drop them.
	defer v.drv.fn.ctxPopCurrent.call4(0, 0, 0, 0)
	if w := v.watch.Load(); w != nil {
		(*w).Waiting()
		defer (*w).Waited()
	}
	err := f()
	if e, ok := err.(*Error); ok && !strings.Contains(e.Arguments, "GPU ") { // several devices may be in use
		e.Arguments = strings.TrimPrefix(fmt.Sprintf("%s, GPU %d", e.Arguments, v.info.Ordinal), ", ")
	}
	return err
}

// make adds h to the device, with the result of create.
func (v *Device) make(h *handle, destroy *function, create func() (uintptr, error)) error {
	if err := v.enter(); err != nil {
		return err
	}
	defer v.leave()
	err := v.with(func() (err error) {
		h.id, err = create()
		return err
	})
	if err != nil {
		return err
	}
	h.dev, h.destroy = v, destroy
	v.list.Lock()
	defer v.list.Unlock()
	if h.older = v.list.last; h.older != nil {
		h.older.newer = h
	}
	v.list.last = h
	return nil
}

// object is a handle that users close.
type object struct{ handle }

// Close destroys the object after the calls that use it. After a failure the object counts as closed, too.
func (o *object) Close() error {
	// Within the device's gate, so that the device stays open meanwhile.
	if err := o.dev.enter(); err != nil {
		return err
	}
	defer o.dev.leave()
	return o.close()
}

func (h *handle) close() error {
	if err := h.shut(); err != nil {
		return err
	}
	v := h.dev
	first := v.letGo(h)
	if h.destroy == nil {
		return first
	}
	if h.destroy == &v.drv.fn.memFree { // the driver waits for the work of v alone
		if err := v.waitForPeers(); first == nil {
			first = err
		}
	}
	if !v.Lost() {
		err := v.with(func() error {
			if r := h.destroy.call(h.id); r != 0 {
				return v.drv.failed(r, h.destroy, "")
			}
			return nil
		})
		if first == nil {
			first = err
		}
	}
	if h.gone != nil {
		h.gone()
	}
	v.list.Lock()
	defer v.list.Unlock()
	if h.newer != nil {
		h.newer.older = h.older
	} else {
		v.list.last = h.older
	}
	if h.older != nil {
		h.older.newer = h.newer
	}
	return first
}

// enterAll enters every handle or none. All handles are of one device.
func enterAll(hs ...*handle) error {
	for i, h := range hs {
		err := h.enter()
		if err == nil && h.dev != hs[0].dev {
			h.leave()
			err = ErrOtherDevice
		}
		if err != nil {
			leaveAll(hs[:i]...)
			return err
		}
	}
	return nil
}

func leaveAll(hs ...*handle) {
	for _, h := range hs {
		h.leave()
	}
}
