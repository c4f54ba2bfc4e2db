package nccl

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda"
)

// ID tells a communicator from all others. One rank makes it and gives it to all.
type ID [128]byte

// Type is an element type, by NCCL's number.
type Type int

const (
	Int8     Type = 0
	Int32    Type = 2
	Float16  Type = 6
	Float32  Type = 7
	BFloat16 Type = 9
)

// bytes of an element.
func (t Type) bytes() int64 {
	switch t {
	case Int8:
		return 1
	case Float16, BFloat16:
		return 2
	}
	return 4
}

// sums says whether AllReduce takes it.
func (t Type) sums() bool { return t == Float16 || t == Float32 || t == BFloat16 }

var (
	// ErrAborted is the use of a communicator that was aborted or closed.
	ErrAborted = errors.New("the communicator has ended")
	// ErrRecorded is the closing of a communicator that recordings still use: NCCL would wait for them.
	ErrRecorded = errors.New("recordings use the communicator: close them first")
)

// UniqueID makes an id. It needs no GPU.
func (l *Library) UniqueID() (id ID, err error) {
	if r := l.fn.getUniqueID.call(uintptr(unsafe.Pointer(&id))); r != 0 {
		return id, l.failed(r, &l.fn.getUniqueID)
	}
	return id, nil
}

// Comm is a rank of a communicator. Collectives may be queued by several goroutines, if all
// ranks queue them in the same order.
type Comm struct {
	lib        *Library
	dev        *cuda.Device
	rank, size int
	token      *cuda.Buffer // what Barrier sums

	handle   atomic.Uintptr // 0: aborted or closed
	inside   atomic.Int32   // calls of the library with it
	recorded atomic.Int32   // recordings that use it
}

// inLibrary is how long an Abort lets other calls end that are in the library: NCCL may wait
// there for what only the abort ends.
const inLibrary = time.Second

// Init makes a rank of a communicator on a device. It waits until all ranks have called it,
// as long as NCCL does.
func (l *Library) Init(dev *cuda.Device, size, rank int, id *ID) (*Comm, error) {
	if size < 1 || rank < 0 || rank >= size {
		return nil, fmt.Errorf("rank %d of %d: %w", rank, size, cuda.ErrRange)
	}
	c := &Comm{lib: l, dev: dev, rank: rank, size: size}
	var err error
	if c.token, err = dev.NewBuffer(256); err != nil {
		return nil, err
	}
	if err = c.token.Set(0, 0, 256); err == nil {
		err = dev.Foreign(func() error {
			var handle uintptr
			if r := l.fn.commInit.call(uintptr(unsafe.Pointer(&handle)), uintptr(size), uintptr(rank), 1, uintptr(unsafe.Pointer(id)), 0); r != 0 {
				return l.failed(r, &l.fn.commInit)
			}
			c.handle.Store(handle)
			return nil
		})
	}
	if err != nil {
		_ = c.token.Close() // the first error tells more
		return nil, err
	}
	return c, nil
}

// Rank is its number, from 0.
func (c *Comm) Rank() int { return c.rank }

// Size is how many ranks there are.
func (c *Comm) Size() int { return c.size }

// Part is a part of a buffer: so many elements from a byte on.
type Part struct {
	*cuda.Buffer
	Offset int64
	N      int
}

func (p Part) check(what string, t Type, n int) error {
	if p.Buffer == nil || p.N != n || n < 1 || p.Offset < 0 || p.Offset%t.bytes() != 0 || int64(n) > (p.Len()-p.Offset)/t.bytes() {
		return fmt.Errorf("%s: %d elements at byte %d, want %d inside the buffer: %w", what, p.N, p.Offset, n, cuda.ErrRange)
	}
	return nil
}

func (p Part) address() uintptr { return uintptr(p.Address()) + uintptr(p.Offset) }

const sum = 0 // ncclSum

// AllReduce queues the sum of the ranks' src, element by element, to dst, which may be src.
// All ranks get the same bits.
func (c *Comm) AllReduce(s *cuda.Stream, dst, src Part, t Type) error {
	if !t.sums() {
		return fmt.Errorf("AllReduce of type %d: %w", t, errors.ErrUnsupported)
	}
	if err := errors.Join(dst.check("dst", t, src.N), src.check("src", t, src.N)); err != nil {
		return err
	}
	return c.queue(s, &c.lib.fn.allReduce, dst, src, func(f *function, comm, stream uintptr) result {
		return f.call(src.address(), dst.address(), uintptr(src.N), uintptr(t), sum, comm, stream)
	})
}

// AllGather queues the copying of the ranks' src to dst, one behind the other, in the order of ranks.
func (c *Comm) AllGather(s *cuda.Stream, dst, src Part, t Type) error {
	if err := errors.Join(dst.check("dst", t, src.N*c.size), src.check("src", t, src.N)); err != nil {
		return err
	}
	return c.queue(s, &c.lib.fn.allGather, dst, src, func(f *function, comm, stream uintptr) result {
		return f.call(src.address(), dst.address(), uintptr(src.N), uintptr(t), comm, stream)
	})
}

// Broadcast queues the copying of src of one rank to dst of all. It may be src.
func (c *Comm) Broadcast(s *cuda.Stream, dst, src Part, t Type, from int) error {
	if from < 0 || from >= c.size {
		return fmt.Errorf("rank %d of %d: %w", from, c.size, cuda.ErrRange)
	}
	if err := errors.Join(dst.check("dst", t, src.N), src.check("src", t, src.N)); err != nil {
		return err
	}
	return c.queue(s, &c.lib.fn.broadcast, dst, src, func(f *function, comm, stream uintptr) result {
		return f.call(src.address(), dst.address(), uintptr(src.N), uintptr(t), uintptr(from), comm, stream)
	})
}

// Barrier queues what ends when all ranks have come to it.
func (c *Comm) Barrier(s *cuda.Stream) error {
	if c.handle.Load() == 0 {
		return ErrAborted
	}
	p := Part{c.token, 0, 1}
	return c.AllReduce(s, p, p, Float32)
}

func (c *Comm) queue(s *cuda.Stream, f *function, dst, src Part, call func(f *function, comm, stream uintptr) result) error {
	return s.Foreign(func(stream uintptr) error {
		handle, err := c.use()
		if err != nil {
			return err
		}
		defer c.inside.Add(-1)
		if !s.Of(c.dev) {
			return cuda.ErrOtherDevice
		}
		if r := call(f, handle, stream); r != 0 {
			return c.lib.failed(r, f)
		}
		return nil
	}, dst.Buffer, src.Buffer)
}

// use is the handle, for a call within which inside counts.
func (c *Comm) use() (uintptr, error) {
	c.inside.Add(1)
	if h := c.handle.Load(); h != 0 {
		return h, nil
	}
	c.inside.Add(-1)
	return 0, ErrAborted
}

// AsyncError is what went wrong in a collective that was queued before.
func (c *Comm) AsyncError() error {
	handle, err := c.use()
	if err != nil {
		return err
	}
	defer c.inside.Add(-1)
	var code int32
	f := &c.lib.fn.commGetAsyncError
	if r := f.call(handle, uintptr(unsafe.Pointer(&code))); r != 0 {
		return c.lib.failed(r, f)
	}
	const inProgress = 7
	if code != 0 && code != inProgress {
		return c.lib.failed(result(code), f)
	}
	return nil
}

// Hold keeps the communicator for a recording until the function is called that it returns.
func (c *Comm) Hold() (release func()) {
	c.recorded.Add(1)
	return sync.OnceFunc(func() { c.recorded.Add(-1) })
}

// Recorded says whether recordings hold the communicator.
func (c *Comm) Recorded() bool { return c.recorded.Load() > 0 }

// Version is the library's.
func (c *Comm) Version() string { return c.lib.Version() }

// take is the handle, which nobody gets from then on, when those who have it are done or a
// time has passed.
func (c *Comm) take(wait time.Duration) (uintptr, error) {
	h := c.handle.Swap(0)
	if h == 0 {
		return 0, ErrAborted
	}
	for until := time.Now().Add(wait); c.inside.Load() > 0 && time.Now().Before(until); {
		time.Sleep(time.Millisecond)
	}
	return h, nil
}

// Close gives the communicator back. All ranks have to call it: NCCL waits for those of the
// host, and for work that is queued. [ErrRecorded], and nothing is done, as long as
// recordings hold it.
func (c *Comm) Close() error {
	if c.Recorded() {
		return ErrRecorded
	}
	h, err := c.take(time.Minute)
	if err != nil {
		return err
	}
	return c.end(h, &c.lib.fn.commDestroy)
}

// Abort ends the communicator without the others. Collectives that wait for them end, and what
// they make is arbitrary. It returns when NCCL has given everything back, for which it waits
// for recordings that use the communicator. A second Abort is [ErrAborted].
func (c *Comm) Abort() error {
	h, err := c.take(inLibrary)
	if err != nil {
		return err
	}
	return c.end(h, &c.lib.fn.commAbort)
}

func (c *Comm) end(handle uintptr, f *function) error {
	// NCCL makes the context current that it needs; the device may be closed already.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var err error
	if r := f.call(handle); r != 0 {
		err = c.lib.failed(r, f)
	}
	if e := c.token.Close(); e != nil && !errors.Is(e, cuda.ErrClosed) {
		err = errors.Join(err, e)
	}
	return err
}
