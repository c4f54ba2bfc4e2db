package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// peers are the devices that one has to do with.
type peers struct {
	sync.Mutex                           // of changes
	reached    atomic.Pointer[[]*Device] // whose memory its copies and kernels can use
	reaching   atomic.Pointer[[]*Device] // whose copies and kernels can use its memory
}

func listed(list *atomic.Pointer[[]*Device]) []*Device {
	if all := list.Load(); all != nil {
		return *all
	}
	return nil
}

func (p *peers) add(list *atomic.Pointer[[]*Device], v *Device) {
	p.Lock()
	defer p.Unlock()
	if all := listed(list); !slices.Contains(all, v) {
		all = append(slices.Clone(all), v)
		list.Store(&all)
	}
}

func (p *peers) remove(list *atomic.Pointer[[]*Device], v *Device) {
	p.Lock()
	defer p.Unlock()
	all := slices.DeleteFunc(slices.Clone(listed(list)), func(x *Device) bool { return x == v })
	list.Store(&all)
}

// Reach has the copies, kernels and streams of v use memory of another device, and wait
// for its events. One direction alone: ask both for both. It stays until one of them is
// closed; a second call changes nothing.
//
// Errors: [ErrNoPeerAccess] where the machine has no way from one to the other,
// [ErrOtherDevice] for a device of another driver or in a context that is someone else's.
func (v *Device) Reach(peer *Device) error {
	if v.drv != peer.drv || v.alive != nil || peer.alive != nil {
		return fmt.Errorf("GPU %d and GPU %d: %w", v.info.Ordinal, peer.info.Ordinal, ErrOtherDevice)
	}
	for _, d := range [...]*Device{v, peer} {
		if err := d.enter(); err != nil {
			return err
		}
		defer d.leave()
	}
	if v.ctx != peer.ctx { // else one GPU was opened twice
		if err := v.enable(peer); err != nil {
			return err
		}
	}
	v.peers.add(&v.peers.reached, peer)
	peer.peers.add(&peer.peers.reaching, v)
	return nil
}

func (v *Device) enable(peer *Device) error {
	var can int32
	ask := &v.drv.fn.deviceCanAccessPeer
	if r := ask.call(uintptr(unsafe.Pointer(&can)), uintptr(v.dev), uintptr(peer.dev)); r != 0 {
		return v.drv.failed(r, ask, "GPU %d, GPU %d", v.info.Ordinal, peer.info.Ordinal)
	}
	if can == 0 {
		return fmt.Errorf("GPU %d (%s) has no access to the memory of GPU %d (%s): %w",
			v.info.Ordinal, v.info.Name, peer.info.Ordinal, peer.info.Name, ErrNoPeerAccess)
	}
	call := &v.drv.fn.ctxEnablePeerAccess
	return v.with(func() error {
		switch r := call.call(peer.ctx, 0); r {
		case 0, resultPeerAccessAlreadyEnabled: // others share the primary context
			return nil
		default:
			return v.drv.failed(r, call, "GPU %d, GPU %d", v.info.Ordinal, peer.info.Ordinal)
		}
	})
}

// reaches says whether what runs on v may use memory of another device.
func (v *Device) reaches(other *Device) bool {
	return v == other || slices.Contains(listed(&v.peers.reached), other)
}

// waitForPeers waits for all that others do with v's memory, or may do.
func (v *Device) waitForPeers() (first error) {
	for _, other := range listed(&v.peers.reaching) {
		if other.enter() != nil {
			continue // it is closed: that has waited
		}
		err := errors.Join(other.putOff.flush(), other.wait())
		other.leave()
		if err != nil && first == nil {
			first = err
		}
	}
	return first
}

// closeGraphsOfPeers closes the graphs of devices that reach v, and may have work on it: once
// the context is gone the driver would wait for that for ever.
func (v *Device) closeGraphsOfPeers() (first error) {
	for _, other := range listed(&v.peers.reaching) {
		if other == v || other.enter() != nil {
			continue
		}
		var graphs []*handle
		other.list.Lock()
		for h := other.list.last; h != nil; h = h.older {
			if d := h.destroy; d == &v.drv.fn.graphExecDestroy || d == &v.drv.fn.graphDestroy {
				graphs = append(graphs, h)
			}
		}
		other.list.Unlock()
		for _, h := range graphs {
			if err := h.close(); err != nil && !errors.Is(err, ErrClosed) && first == nil {
				first = err
			}
		}
		other.leave()
	}
	return first
}

// forget ends all that v has to do with others.
func (v *Device) forget() {
	for _, other := range listed(&v.peers.reaching) {
		other.peers.remove(&other.peers.reached, v)
	}
	for _, other := range listed(&v.peers.reached) {
		other.peers.remove(&other.peers.reaching, v)
	}
	v.peers.reached.Store(nil)
	v.peers.reaching.Store(nil)
}

// enterReached is enterAll for handles that may also be of devices that the first one's
// reaches.
func enterReached(hs ...*handle) error {
	for i, h := range hs {
		err := h.enter()
		if err == nil && !hs[0].dev.reaches(h.dev) {
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
