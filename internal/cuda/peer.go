package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// peers are the devices that share memory access with one device.
type peers struct {
	sync.Mutex                           // held for changes
	reached    atomic.Pointer[[]*Device] // devices whose memory this device can use
	reaching   atomic.Pointer[[]*Device] // devices that can use this device's memory
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

// Reach lets the copies, kernels and streams of v use memory of another device, and wait for its events. Reach works
// in one direction: call it for both. The access lasts until one of the devices is closed; a second call changes
// nothing.
//
// Errors: [ErrNoPeerAccess] if the machine has no connection from v to peer, [ErrOtherDevice] for a device of another
// driver or in an adopted context.
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
	if v.ctx != peer.ctx { // otherwise one GPU was opened twice
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

// reaches reports whether work on v may use memory of another device.
func (v *Device) reaches(other *Device) bool {
	return v == other || slices.Contains(listed(&v.peers.reached), other)
}

// waitForPeers waits for all work of other devices that uses v's memory, or may use it.
func (v *Device) waitForPeers() (first error) {
	for _, other := range listed(&v.peers.reaching) {
		if other.enter() != nil {
			continue // a closed device has waited already
		}
		err := errors.Join(other.putOff.flush(), other.wait())
		other.leave()
		if err != nil && first == nil {
			first = err
		}
	}
	return first
}

// closeGraphsOfPeers closes the graphs of devices that reach v: such graphs may have work on v, and after the context
// is destroyed the driver would wait for them forever.
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

// forget removes v from the peers of all other devices.
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

// enterReached is enterAll for handles that may also be of devices that the first handle's device reaches.
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
