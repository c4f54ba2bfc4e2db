package cuda

import (
	"fmt"
	"math"
	"unsafe"
)

// Buffer is memory of the GPU.
type Buffer struct {
	object
	bytes int64
}

// NewBuffer allocates memory of the GPU with arbitrary content, at an address divisible by 256. Errors: [ErrRange]
// for less than one byte, [ErrOutOfMemory], [ErrClosed].
func (v *Device) NewBuffer(bytes int64) (*Buffer, error) {
	if bytes < 1 {
		return nil, fmt.Errorf("a buffer of %d bytes: %w", bytes, ErrRange)
	}
	b := &Buffer{bytes: bytes}
	err := v.make(&b.handle, &v.drv.fn.memFree, func() (uintptr, error) {
		var addr uint64
		if r := v.drv.fn.memAlloc.call(uintptr(unsafe.Pointer(&addr)), uintptr(bytes)); r != 0 {
			return 0, v.drv.failed(r, &v.drv.fn.memAlloc, "%d bytes", bytes)
		}
		v.used.Add(bytes)
		b.gone = func() { v.used.Add(-bytes) } // here: another goroutine may close the device as soon as b is registered
		return uintptr(addr), nil
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Borrow returns a buffer on bytes >= 1 of memory in the device's context, at an address, with another owner. The
// memory must stay allocated as long as the buffer is used. Close frees nothing.
func (v *Device) Borrow(address uint64, bytes int64) (*Buffer, error) {
	if address == 0 || bytes < 1 {
		return nil, fmt.Errorf("a buffer of %d bytes at %#x: %w", bytes, address, ErrRange)
	}
	b := &Buffer{bytes: bytes}
	b.dev, b.id = v, uintptr(address)
	return b, nil
}

// Len returns the size in bytes.
func (b *Buffer) Len() int64 { return b.bytes }

// Address returns the address of b on the GPU, for structs that kernels take. A launch with such a struct also names
// b by [Args.Hold].
func (b *Buffer) Address() uint64 { return uint64(b.id) }

// Host is pinned memory of the host, for copies that run while the host continues.
type Host struct {
	object
	mem []byte
}

// NewHost allocates pinned memory with arbitrary content. Errors: [ErrRange] for less than one byte,
// [ErrOutOfMemory], [ErrClosed].
func (v *Device) NewHost(bytes int) (*Host, error) {
	if bytes < 1 {
		return nil, fmt.Errorf("pinned memory of %d bytes: %w", bytes, ErrRange)
	}
	h := &Host{}
	err := v.make(&h.handle, &v.drv.fn.memFreeHost, func() (uintptr, error) {
		const portable = 1 // pinned for every context of the process
		var p unsafe.Pointer
		if r := v.drv.fn.memHostAlloc.call(uintptr(unsafe.Pointer(&p)), uintptr(bytes), portable); r != 0 {
			return 0, v.drv.failed(r, &v.drv.fn.memHostAlloc, "%d bytes", bytes)
		}
		h.mem = unsafe.Slice((*byte)(p), bytes)
		v.pinned.Add(int64(bytes))
		h.gone = func() { v.pinned.Add(-int64(bytes)) }
		return uintptr(p), nil
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Bytes returns the memory. After Close the slice is invalid.
func (h *Host) Bytes() []byte {
	if h.enter() != nil {
		return nil
	}
	defer h.leave()
	return h.mem
}

// Write copies src to the memory at an offset. No unfinished copy to the GPU may read the same bytes.
func (h *Host) Write(at int, src []byte) error {
	if err := inside("pinned memory", int64(at), int64(len(src)), int64(len(h.mem))); err != nil {
		return err
	}
	if err := h.enter(); err != nil {
		return err
	}
	defer h.leave()
	copy(h.mem[at:], src)
	return nil
}

// inside checks that [offset, offset+n) is within size bytes.
func inside(what string, offset, n, size int64) error {
	if offset < 0 || n < 0 || offset > size-n {
		return fmt.Errorf("%d bytes at %d of %s of %d: %w", n, offset, what, size, ErrRange)
	}
	return nil
}

// Upload copies src to b at an offset and returns after the copy. Upload does not wait for work on other streams.
func (b *Buffer) Upload(offset int64, src []byte) error {
	if err := inside("a buffer", offset, int64(len(src)), b.bytes); err != nil {
		return err
	}
	own := b.dev.own
	if err := enterAll(&b.handle, &own.handle); err != nil {
		return err
	}
	defer leaveAll(&b.handle, &own.handle)
	if len(src) == 0 {
		return nil
	}
	fn := &b.dev.drv.fn
	return b.dev.with(func() error {
		// The driver stages memory that isn't pinned: the call may return before the copy has arrived, the
		// synchronization does not.
		if r := fn.memcpyHtoDAsync.call4(b.id+uintptr(offset), uintptr(unsafe.Pointer(unsafe.SliceData(src))), uintptr(len(src)), own.id); r != 0 {
			return b.dev.drv.failed(r, &fn.memcpyHtoDAsync, "%d bytes", len(src))
		}
		return own.wait()
	})
}

// Download copies from b at an offset to dst. Download does not wait for work on other streams.
func (b *Buffer) Download(dst []byte, offset int64) error {
	if err := inside("a buffer", offset, int64(len(dst)), b.bytes); err != nil {
		return err
	}
	own := b.dev.own
	if err := enterAll(&b.handle, &own.handle); err != nil {
		return err
	}
	defer leaveAll(&b.handle, &own.handle)
	if len(dst) == 0 {
		return nil
	}
	fn := &b.dev.drv.fn
	return b.dev.with(func() error {
		if r := fn.memcpyDtoHAsync.call4(uintptr(unsafe.Pointer(unsafe.SliceData(dst))), b.id+uintptr(offset), uintptr(len(dst)), own.id); r != 0 {
			return b.dev.drv.failed(r, &fn.memcpyDtoHAsync, "%d bytes", len(dst))
		}
		return own.wait()
	})
}

// Set fills n bytes of b at an offset and returns afterwards. Set does not wait for work on other streams.
func (b *Buffer) Set(offset int64, value byte, n int64) error {
	own := b.dev.own
	if err := own.Set(b, offset, value, n); err != nil {
		return err
	}
	return own.Synchronize()
}

// Upload queues a copy of n bytes from pinned memory, which must not change until the copy is done.
func (s *Stream) Upload(dst *Buffer, offset int64, src *Host, from, n int) error {
	return s.transfer(dst, offset, src, from, n, &s.dev.drv.fn.memcpyHtoDAsync)
}

// Download queues a copy of n bytes to pinned memory.
func (s *Stream) Download(dst *Host, to int, src *Buffer, offset int64, n int) error {
	return s.transfer(src, offset, dst, to, n, &s.dev.drv.fn.memcpyDtoHAsync)
}

func (s *Stream) transfer(b *Buffer, offset int64, h *Host, at, n int, f *function) error {
	if err := inside("a buffer", offset, int64(n), b.bytes); err != nil {
		return err
	}
	if err := inside("pinned memory", int64(at), int64(n), int64(len(h.mem))); err != nil {
		return err
	}
	if err := enterReached(&s.handle, &b.handle, &h.handle); err != nil {
		return err
	}
	defer leaveAll(&s.handle, &b.handle, &h.handle)
	if n == 0 {
		return nil
	}
	c := smallCopy{to: b.id + uintptr(offset), from: h.id + uintptr(at), n: n, src: &h.handle, dst: &b.handle, call: f}
	if f == &s.dev.drv.fn.memcpyDtoHAsync {
		c.to, c.from = c.from, c.to
	}
	return s.copy(c)
}

// Copy queues a copy of n bytes between buffers, also of devices that the stream's device reaches. Ranges of one
// buffer must not overlap.
func (s *Stream) Copy(dst *Buffer, to int64, src *Buffer, from, n int64) error {
	if err := inside("a buffer", to, n, dst.bytes); err != nil {
		return err
	}
	if err := inside("a buffer", from, n, src.bytes); err != nil {
		return err
	}
	if err := enterReached(&s.handle, &dst.handle, &src.handle); err != nil {
		return err
	}
	defer leaveAll(&s.handle, &dst.handle, &src.handle)
	if n == 0 {
		return nil
	}
	if dst == src && to < from+n && from < to+n {
		return fmt.Errorf("%d bytes from %d to %d of one buffer overlap: %w", n, from, to, ErrRange)
	}
	return s.copy(smallCopy{to: dst.id + uintptr(to), from: src.id + uintptr(from), n: int(n), src: &src.handle, dst: &dst.handle,
		call: &s.dev.drv.fn.memcpyDtoDAsync})
}

// Set queues the filling of n bytes.
func (s *Stream) Set(b *Buffer, offset int64, value byte, n int64) error {
	if err := inside("a buffer", offset, n, b.bytes); err != nil {
		return err
	}
	if err := enterReached(&s.handle, &b.handle); err != nil {
		return err
	}
	defer leaveAll(&s.handle, &b.handle)
	if n == 0 {
		return nil
	}
	s.off.Lock()
	defer s.off.Unlock()
	if err := s.settle(); err != nil {
		return err
	}
	f := &s.dev.drv.fn.memsetD8A
	return s.dev.with(func() error {
		if r := f.call4(b.id+uintptr(offset), uintptr(value), uintptr(n), s.id); r != 0 {
			return s.dev.drv.failed(r, f, "%d bytes", n)
		}
		return nil
	})
}

// fits reports whether n is a valid size for the driver, a C unsigned int.
func fits(n int) bool { return n >= 0 && n <= math.MaxInt32 }
