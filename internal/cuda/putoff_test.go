//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/reftest"
)

// copyKernel returns the kernel that makes copies: the fake driver knows its name.
func copyKernel(dev *cuda.Device) (*cuda.Function, error) {
	m, err := dev.Module("copies", image)
	if err != nil {
		return nil, err
	}
	return m.Function("copy_pieces")
}

// late is a stream that defers copies, and the objects of copies.
type late struct {
	s      *cuda.Stream
	a, b   *cuda.Buffer // of 64 and 80 KB
	h      *cuda.Host   // of 128 KB; byte i is i%251
	e      *cuda.Event
	kernel *cuda.Function
	graph  *cuda.Graph
}

func tryLate(dev *cuda.Device) (l *late, err error) {
	l = new(late)
	step := func(f func() error) {
		if err == nil {
			err = f()
		}
	}
	step(func() (err error) { l.s, err = dev.NewStream(); return })
	step(func() error { return l.s.PutOff(copyKernel) })
	step(func() (err error) { l.a, err = dev.NewBuffer(64 << 10); return })
	step(func() (err error) { l.b, err = dev.NewBuffer(80 << 10); return })
	step(func() (err error) { l.h, err = dev.NewHost(128 << 10); return })
	step(func() (err error) { l.e, err = dev.NewEvent(false); return })
	step(func() error {
		m, err := dev.Module("m", image)
		if err == nil {
			l.kernel, err = m.Function("k_8")
		}
		return err
	})
	step(func() (err error) { l.graph, err = l.s.Capture(l.launch); return })
	if err != nil {
		return nil, err
	}
	for i := range l.h.Bytes() {
		l.h.Bytes()[i] = byte(i % 251)
	}
	return l, nil
}

func newLate(t testing.TB, dev *cuda.Device) *late {
	t.Helper()
	l, err := tryLate(dev)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func args() *cuda.Args {
	a := &cuda.Args{}
	a.Int64(1)
	return a
}

func (l *late) launch() error { return l.kernel.Launch(l.s, cuda.Grid{Overlap: true}, args()) }

// patient is a launch that waits before it reads.
func (l *late) patient() error {
	return l.kernel.Launch(l.s, cuda.Grid{Overlap: true, Waits: true}, args())
}

// calls returns the lines of a log about work on the GPU.
func calls(log string) string {
	var list []string
	for line := range strings.Lines(log) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "kernel ") || strings.HasPrefix(line, "cuMemcpy") || strings.HasPrefix(line, "cuMemset") || strings.HasPrefix(line, "overlap") ||
			strings.HasPrefix(line, "cuEvent") || strings.HasPrefix(line, "cuStream") || line == "cuGraphLaunch" || line == "cuGraphExecKernelNodeSetParams" || line == "cuMemFree_v2" || line == "cuModuleUnload" {
			list = append(list, line)
		}
	}
	return strings.Join(list, ", ")
}

// queued compares the calls since the last check.
func queued(t testing.TB, lib *fakedriver.Library, what, want string) {
	t.Helper()
	if got := calls(lib.Log()); got != want {
		t.Errorf("%s: %s; want %s", what, got, want)
	}
	lib.Forget()
}

func noErrors(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// content returns the present content of a buffer without the deferred copies.
func content(t testing.TB, b *cuda.Buffer, at, n int64) []byte {
	t.Helper()
	x := make([]byte, n)
	noErrors(t, b.Download(x, at))
	return x
}

// TestPutOffIsNotSeen: every call that could see missing copies queues them first.
func TestPutOffIsNotSeen(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	for _, c := range []struct {
		name string
		do   func(*late) error
		made bool
	}{
		{"a launch", (*late).launch, true},
		{"a graph", func(l *late) error { return l.s.Launch(l.graph) }, true},
		{"setting memory", func(l *late) error { return l.s.Set(l.b, 0, 1, 4) }, true},
		{"a large copy", func(l *late) error { return l.s.Upload(l.b, 0, l.h, 0, 64<<10+4) }, true},
		{"a copy of odd size", func(l *late) error { return l.s.Upload(l.b, 0, l.h, 0, 5) }, true},
		{"a copy to an odd place", func(l *late) error { return l.s.Upload(l.b, 2, l.h, 0, 4) }, true},
		{"a copy from an odd place", func(l *late) error { return l.s.Copy(l.b, 0, l.a, 32770, 4) }, true},
		{"a download", func(l *late) error { return l.s.Download(l.h, 0, l.b, 0, 4) }, true},
		{"a copy of what is copied", func(l *late) error { return l.s.Copy(l.b, 0, l.a, 60, 8) }, true},
		{"a copy to where one goes", func(l *late) error { return l.s.Upload(l.a, 60, l.h, 0, 8) }, true},
		{"a copy to where one comes from", func(l *late) error { return l.s.Upload(l.b, 32764, l.h, 0, 8) }, true},
		{"waiting for the stream", func(l *late) error { return l.s.Synchronize() }, true},
		{"asking the stream", func(l *late) error { return second(l.s.Done()) }, true},
		{"waiting for the event", func(l *late) error { return l.e.Synchronize() }, true},
		{"asking the event", func(l *late) error { return second(l.e.Done()) }, true},
		{"the time to the event", func(l *late) error { return second(l.e.Since(l.e)) }, true},
		{"another stream waits for the event", func(l *late) error {
			s, err := dev.NewStream()
			return errors.Join(err, s.Wait(l.e))
		}, true},
		{"another stream takes the event", func(l *late) error {
			s, err := dev.NewStream()
			return errors.Join(err, s.Record(l.e))
		}, true},
		{"waiting for another event", func(l *late) error {
			e, err := dev.NewEvent(false)
			return errors.Join(err, l.s.Wait(e))
		}, true},
		{"a capture", func(l *late) error { return second(l.s.Capture(func() error { return nil })) }, true},
		{"closing the source", func(l *late) error { return l.b.Close() }, true},
		{"closing pinned memory", func(l *late) error { return l.h.Close() }, true},
		{"closing the event", func(l *late) error { return l.e.Close() }, true},
		{"closing the stream", func(l *late) error { return l.s.Close() }, true},

		{"the event again", func(l *late) error { return l.s.Record(l.e) }, false},
		{"another event", func(l *late) error {
			e, err := dev.NewEvent(false)
			return errors.Join(err, l.s.Record(e), second(e.IsPutOff(), nil))
		}, false},
		{"another small copy", func(l *late) error { return l.s.Upload(l.a, 80, l.h, 0, 64) }, false},
		{"a copy between those that are made", func(l *late) error { return l.s.Copy(l.a, 76, l.b, 32764, 4) }, false},
		{"no bytes", func(l *late) error { return l.s.Upload(l.a, 0, l.h, 1, 0) }, false},
		{"a copy without a stream", func(l *late) error { return l.b.Upload(0, []byte{1}) }, false},
		{"another stream", func(l *late) error {
			s, err := dev.NewStream()
			return errors.Join(err, s.Copy(l.b, 0, l.b, 8, 8), s.Synchronize())
		}, false},
		{"memory that comes and goes", func(l *late) error {
			b, err := dev.NewBuffer(64)
			return errors.Join(err, b.Close())
		}, false},
		{"a refused copy", func(l *late) error {
			if err := l.s.Copy(l.b, 0, l.b, 2, 4); !errors.Is(err, cuda.ErrRange) {
				return fmt.Errorf("a copy within itself: %v", err)
			}
			return nil
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLate(t, dev)
			noErrors(t, l.a.Set(0, 0, 128))
			noErrors(t, l.s.Upload(l.a, 0, l.h, 4, 64), l.s.Copy(l.a, 68, l.b, 32768, 8), l.s.Record(l.e))
			if !bytes.Equal(content(t, l.a, 0, 128), make([]byte, 128)) {
				t.Fatal("the copies are made already")
			}
			want := append(slices.Clone(l.h.Bytes()[4:64]), make([]byte, 8)...)
			copy(want[60:], l.h.Bytes()[64:68])
			want = append(want, bytes.Repeat([]byte{0xa5}, 8)...)
			noErrors(t, c.do(l))
			if !c.made {
				want = make([]byte, len(want))
			}
			// no other copy writes these 60 bytes
			if got := content(t, l.a, 0, 76); !bytes.Equal(got[:60], want[:60]) || !bytes.Equal(got[68:], want[68:]) {
				t.Errorf("the memory is %x, want %x", got, want)
			}
			for _, x := range []interface{ Close() error }{l.s, l.a, l.b, l.h, l.e, l.graph} {
				if err := x.Close(); err != nil && !errors.Is(err, cuda.ErrClosed) {
					t.Error(err)
				}
			}
		})
	}
}

// TestNotPutOff: copies that can't be deferred are made at once.
func TestNotPutOff(t *testing.T) {
	lib, dev := openFake(t)
	l := newLate(t, dev)
	lib.Forget()
	noErrors(t, second(l.s.Capture(func() error { return l.s.Copy(l.a, 0, l.b, 0, 64) })))
	queued(t, lib, "in a capture", "cuStreamBeginCapture_v2, kernel copy_pieces, cuMemcpyDtoDAsync_v2, cuStreamEndCapture")
	bad := errors.New("bad")
	if _, err := l.s.Capture(func() error { return bad }); !errors.Is(err, bad) {
		t.Error(err)
	}
	lib.Forget()
	noErrors(t, l.s.Copy(l.a, 0, l.b, 0, 64))
	if lib.Log() != "" {
		t.Errorf("after a capture:\n%s", lib.Log())
	}

	// Nine copies: eight are one launch.
	for i := range int64(8) {
		noErrors(t, l.s.Copy(l.a, 64*(i+1), l.b, 0, 64))
	}
	queued(t, lib, "nine copies", "kernel copy_pieces")
	noErrors(t, l.s.Synchronize())

	drv, err := cuda.LoadFrom(lib.Path)
	noErrors(t, err)
	theirs, err := drv.Adopt(0, dev.Context(), func() bool { return true })
	noErrors(t, err)
	s, err := theirs.NewStream()
	noErrors(t, err, s.PutOff(func(*cuda.Device) (*cuda.Function, error) {
		t.Error("the kernel is loaded in a context of someone else")
		return nil, nil
	}))
	b, err := theirs.NewBuffer(64)
	noErrors(t, err)
	lib.Forget()
	noErrors(t, s.Copy(b, 0, b, 32, 32))
	queued(t, lib, "in a context of someone else", "cuMemcpyDtoDAsync_v2")
	noErrors(t, theirs.Close())

	other, err := drv.Open(1)
	noErrors(t, err)
	if err := l.s.PutOff(func(*cuda.Device) (*cuda.Function, error) { return copyKernel(other) }); !errors.Is(err, cuda.ErrOtherDevice) {
		t.Errorf("a kernel of another device: %v", err)
	}
	if err := l.s.PutOff(func(*cuda.Device) (*cuda.Function, error) { return nil, bad }); !errors.Is(err, bad) {
		t.Errorf("no kernel: %v", err)
	}
	noErrors(t, other.Close())
	nothingLeft(t, lib, dev)
	if err := l.s.PutOff(copyKernel); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// TestPutOffBeforeOverlap: the launch after the kernel does not overlap it, since kernels assume finished copies
// before they wait for the launch before. Later launches, and those of a graph, overlap.
func TestPutOffBeforeOverlap(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	l := newLate(t, dev)
	two := func() { noErrors(t, l.s.Copy(l.a, 0, l.b, 0, 8), l.s.Copy(l.a, 8, l.b, 8, 8)) }
	lib.Forget()
	noErrors(t, l.launch())
	queued(t, lib, "no copies", "kernel k_8, overlap 1")
	two()
	noErrors(t, l.launch(), l.launch())
	queued(t, lib, "behind copies", "kernel copy_pieces, kernel k_8, kernel k_8, overlap 1")
	two()
	noErrors(t, l.patient(), l.launch())
	queued(t, lib, "one that waits behind copies", "kernel copy_pieces, kernel k_8, overlap 1, kernel k_8, overlap 1")
	noErrors(t, second(l.s.Capture(func() error { return errors.Join(l.patient(), l.launch()) })))
	queued(t, lib, "one that waits in a capture", "cuStreamBeginCapture_v2, kernel copy_pieces, kernel k_8, overlap 1, kernel k_8, overlap 1, cuStreamEndCapture")
	two()
	noErrors(t, l.s.Record(l.e), second(l.s.Capture(func() error { return errors.Join(l.launch(), l.launch()) })))
	queued(t, lib, "a capture", "kernel copy_pieces, cuEventRecord, cuStreamBeginCapture_v2, kernel copy_pieces, kernel k_8, kernel k_8, overlap 1, cuStreamEndCapture")
	lib.State().FailIn("cuLaunchKernel", 1)
	if l.launch() == nil {
		t.Error("no failure")
	}
	lib.State().FailIn("", 0)
	lib.Forget()
	noErrors(t, l.launch())
	queued(t, lib, "behind copies, a capture and a failure", "kernel k_8")
	two()
	noErrors(t, l.s.Launch(l.graph), l.launch())
	queued(t, lib, "behind a graph", "cuGraphExecKernelNodeSetParams, cuGraphLaunch, kernel k_8, overlap 1")
	noErrors(t, l.s.Wait(l.e), l.launch(), l.launch())
	queued(t, lib, "behind another stream's copies, perhaps", "cuStreamWaitEvent, kernel k_8, kernel k_8, overlap 1")
	noErrors(t, l.s.Copy(l.a, 0, l.b, 0, 8), l.launch())
	queued(t, lib, "behind one copy", "cuMemcpyDtoDAsync_v2, kernel k_8, overlap 1")
}

// TestPutOffFails: copies that can't be queued stay deferred, with their events, and the call that queues them
// returns the error.
func TestPutOffFails(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	for _, n := range []int{1, 3} {
		for _, fails := range []string{"the copies", "the event"} {
			l := newLate(t, dev)
			noErrors(t, l.graph.Close())
			plain, err := dev.NewStream()
			noErrors(t, err, l.a.Set(0, 0, 64))
			l.graph, err = plain.Capture(func() error { return nil }) // has no copies of its own
			noErrors(t, err)
			for i := range n {
				noErrors(t, l.s.Upload(l.a, int64(4*i), l.h, 4*i, 4))
			}
			noErrors(t, l.s.Record(l.e))
			function := map[bool]string{true: "cuMemcpyHtoDAsync", false: "cuLaunchKernel"}[n == 1]
			fail := function + map[bool]string{true: "_v2"}[n == 1]
			if fails == "the event" {
				function, fail = "cuEventRecord", "cuEventRecord"
			}
			lib.State().FailIn(fail, 2)
			for name, call := range map[string]func() error{
				"a graph":               func() error { return l.s.Launch(l.graph) },
				"waiting":               l.s.Synchronize,
				"waiting for the event": l.e.Synchronize,
				"an odd copy":           func() error { return l.s.Upload(l.b, 0, l.h, 0, 1) },
			} {
				if err := call(); !errors.Is(err, cuda.ErrOutOfMemory) || !strings.Contains(err.Error(), "put off: CUDA_ERROR_OUT_OF_MEMORY") || !strings.Contains(err.Error(), function) {
					t.Errorf("%d copies, %s fails, then %s: %v", n, fails, name, err)
				}
			}
			if !l.e.IsPutOff() {
				t.Error("the event is gone")
			}
			noErrors(t, l.s.Upload(l.a, 32, l.h, 32, 4))
			lib.State().FailIn("", 0)
			lib.Forget()
			noErrors(t, l.s.Launch(l.graph))
			if got := calls(lib.Log()); !strings.HasSuffix(got, ", cuEventRecord, cuGraphLaunch") {
				t.Errorf("%d copies, %s failed: %s", n, fails, got)
			}
			want := make([]byte, 36)
			copy(want, l.h.Bytes()[:4*n])
			copy(want[32:], l.h.Bytes()[32:36])
			if got := content(t, l.a, 0, 36); !bytes.Equal(got, want) {
				t.Errorf("%d copies, %s failed: %x, want %x", n, fails, got, want)
			}
			noErrors(t, l.a.Close(), l.b.Close())
		}
	}
}

// TestPutOffLost: closing memory whose deferred copies can't be queued drops these copies. The error is returned
// twice: by Close, whose error callers may ignore, and by the next call.
func TestPutOffLost(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	l := newLate(t, dev)
	gone, err := dev.NewBuffer(64)
	noErrors(t, err, l.a.Set(0, 0, 64))
	from, err := dev.NewBuffer(64)
	noErrors(t, err)
	noErrors(t, l.s.Upload(l.a, 0, l.h, 4, 4), l.s.Upload(gone, 0, l.h, 8, 4), l.s.Upload(l.a, 4, l.h, 4, 4), l.s.Record(l.e))
	failing := func(f func() error) {
		t.Helper()
		lib.State().FailIn("cuLaunchKernel", 2)
		if err := f(); !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("Close: %v", err)
		}
		lib.State().FailIn("", 0)
	}
	failing(gone.Close)
	failing(l.e.Close)
	noErrors(t, l.s.Launch(l.graph)) // nothing is lost: nobody can see that
	if got := content(t, l.a, 0, 8); !bytes.Equal(got[:4], l.h.Bytes()[4:8]) || !bytes.Equal(got[4:], l.h.Bytes()[4:8]) {
		t.Errorf("%x", got)
	}
	noErrors(t, l.s.Copy(l.a, 0, from, 0, 8), l.s.Upload(l.a, 8, l.h, 4, 4))
	failing(from.Close)
	if err := l.s.Launch(l.graph); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("a graph that may need what is lost: %v", err)
	}
	noErrors(t, l.s.Launch(l.graph))
	if got := content(t, l.a, 8, 4); !bytes.Equal(got, l.h.Bytes()[4:8]) {
		t.Errorf("the other copy: %x", got)
	}
	// Deferred copies are tried once when the device closes.
	noErrors(t, l.s.Copy(l.a, 0, l.b, 0, 8), l.s.Copy(l.a, 8, l.b, 0, 8))
}

// TestPutOffAndCloseDevice: the device's Close makes the deferred copies, or returns the error, before it unloads the
// kernel: newer objects are closed first.
func TestPutOffAndCloseDevice(t *testing.T) {
	for _, fails := range []bool{false, true} {
		lib, dev := openFake(t)
		s, err := dev.NewStream()
		noErrors(t, err)
		b, err := dev.NewBuffer(64)
		noErrors(t, err)
		e, err := dev.NewEvent(false)
		noErrors(t, err)
		noErrors(t, s.PutOff(copyKernel), s.Copy(b, 0, b, 8, 8), s.Copy(b, 16, b, 8, 8), s.Record(e))
		if fails {
			lib.State().FailIn("cuLaunchKernel", 2)
		}
		lib.Forget()
		if err := dev.Close(); errors.Is(err, cuda.ErrOutOfMemory) != fails || err != nil && !fails {
			t.Errorf("Close: %v", err)
		}
		if got := calls(lib.Log()); !fails && got != "kernel copy_pieces, cuEventRecord, cuModuleUnload, cuEventDestroy_v2, cuMemFree_v2, cuStreamDestroy_v2, cuStreamDestroy_v2" {
			t.Errorf("Close: %s", got)
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d left, %d defects", lib.Live(), lib.Defects())
		}
	}
}

// scenario makes copies of all kinds and repeats a call after an error. It returns the final content of memory.
func scenario(l *late) (memory []byte, errs []error) {
	try := func(f func() error) {
		if err := f(); err != nil {
			errs = append(errs, err)
			if err := f(); err != nil {
				errs = append(errs, fmt.Errorf("again: %w", err))
			}
		}
	}
	try(func() error { return l.a.Set(0, 0, l.a.Len()) })
	for round := range 3 {
		at := int64(1000 * round)
		try(func() error { return l.s.Upload(l.a, at, l.h, 10*round, 20) })
		try(func() error { return l.s.Copy(l.a, at+40, l.a, at+3000, 20) })
		try(func() error { return l.s.Record(l.e) })
		try(func() error { return l.s.Copy(l.a, at+100, l.a, at+8, 20) })
		try(func() error { return l.s.Upload(l.a, at+200, l.h, 1, 3) })
		try(func() error { return l.s.Upload(l.a, at+3000, l.h, 8*round, 16) })
		try(func() error { return l.s.Upload(l.a, at+3032, l.h, 8*round, 16) })
		try(func() error { return l.s.Launch(l.graph) })
		try(func() error { return l.s.Upload(l.a, at+3060, l.h, 8*round, 16) })
		try(l.e.Synchronize)
	}
	try(l.s.Synchronize)
	memory = make([]byte, l.a.Len())
	try(func() error { return l.a.Download(memory, 0) })
	return memory, errs
}

// TestPutOffEveryCallFails makes each driver call fail once: some call returns the error, and after a retry all
// copies are made in order.
func TestPutOffEveryCallFails(t *testing.T) {
	lib, dev := openFake(t)
	l := newLate(t, dev)
	from := lib.State().Calls
	want, errs := scenario(l)
	calls := lib.State().Calls - from
	if errs != nil || !strings.Contains(lib.Log(), "kernel copy_pieces") {
		t.Fatalf("%v\n%s", errs, lib.Log())
	}
	nothingLeft(t, lib, dev)
	for n := range calls {
		lib, dev := openFake(t)
		l := newLate(t, dev)
		lib.State().FailAt, lib.State().FailWith = lib.State().Calls+1+n, 2
		got, errs := scenario(l)
		failed := lib.State().Failed()
		if pop := failed == "cuCtxPopCurrent_v2"; len(errs) != map[bool]int{false: 1}[pop] || !pop && !errors.Is(errs[0], cuda.ErrOutOfMemory) {
			t.Errorf("call %d (%s): %v", n, failed, errs)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("call %d (%s): other bytes", n, failed)
		}
		nothingLeft(t, lib, dev)
	}
}

// TestPutOffRandom: random calls on streams with deferral give the same results as without.
func TestPutOffRandom(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	lib.State().Total = 1 << 30
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 40 {
		randomCopies(t, lib, dev, rng)
	}
}

func randomCopies(t *testing.T, lib *fakedriver.Library, dev *cuda.Device, rng *rand.Rand) {
	const size = 1 << 10
	var l [2]*late // streams; memory and the graph are the first one's, events each one's own
	for i := range l {
		l[i] = newLate(t, dev)
	}
	var buffers [3]*cuda.Buffer
	var model [len(buffers)][]byte
	fresh := func(i int) {
		var err error
		buffers[i], err = dev.NewBuffer(size)
		model[i] = bytes.Repeat([]byte{byte(rng.Uint32())}, size)
		noErrors(t, err, buffers[i].Upload(0, model[i]))
	}
	for i := range buffers {
		fresh(i)
	}
	same := func(what string) {
		t.Helper()
		for i, b := range buffers {
			if !bytes.Equal(content(t, b, 0, size), model[i]) {
				t.Fatalf("after %s buffer %d is another", what, i)
			}
		}
	}
	// A stream's work is done when it is queued, so that one stream has to hand over to the
	// other by an event, as on a GPU.
	now := 0
	place := func(n int) int64 {
		at := rng.IntN(size - n + 1)
		if rng.IntN(8) > 0 {
			at &^= 3
		}
		return int64(at)
	}
	for range 200 {
		s, h := l[now].s, l[now].h
		n := 4 * (1 + rng.IntN(12))
		if rng.IntN(10) == 0 {
			n = 1 + rng.IntN(size/4)
		}
		i, j := rng.IntN(len(buffers)), rng.IntN(len(buffers))
		to, from := place(n), place(n)
		switch what := rng.IntN(30); {
		case what < 10:
			if i == j && to < from+int64(n) && from < to+int64(n) {
				continue
			}
			noErrors(t, s.Copy(buffers[i], to, buffers[j], from, int64(n)))
			copy(model[i][to:][:n], bytes.Clone(model[j][from:][:n]))
		case what < 20:
			at := rng.IntN(16<<10) * 4
			noErrors(t, s.Upload(buffers[i], to, h, at, n))
			copy(model[i][to:], h.Bytes()[at:][:n])
		case what == 20:
			noErrors(t, s.Set(buffers[i], to, 7, int64(n)))
			copy(model[i][to:], bytes.Repeat([]byte{7}, n))
		case what < 24:
			noErrors(t, s.Record(l[now].e))
		case what == 24:
			noErrors(t, s.Record(l[now].e), l[1-now].s.Wait(l[now].e))
			same("an event")
			now = 1 - now
		case what == 25:
			noErrors(t, l[now].launch())
			same("a launch")
		case what == 26:
			noErrors(t, s.Launch(l[0].graph))
			same("a graph")
		case what == 27:
			there := 64<<10 + 4*rng.IntN(1000) // that no upload reads
			noErrors(t, s.Download(h, there, buffers[i], from, n))
			if !bytes.Equal(h.Bytes()[there:][:n], model[i][from:][:n]) {
				t.Fatal("another download")
			}
		case what == 28:
			// closes it on behalf of the other streams
			noErrors(t, buffers[i].Close())
			fresh(i)
		default:
			noErrors(t, s.Synchronize())
			same("waiting")
		}
	}
	noErrors(t, l[now].s.Synchronize())
	same("the end")
	for _, b := range buffers {
		noErrors(t, b.Close())
	}
	for _, l := range l {
		noErrors(t, l.graph.Close(), l.e.Close(), l.h.Close(), l.a.Close(), l.b.Close(), l.s.Close())
	}
	lib.Forget()
}

// TestPutOffAllocates: a step's copies allocate nothing on the host.
func TestPutOffAllocates(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the race detector's instrumentation allocates")
	}
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	l := newLate(t, dev)
	step := func() {
		noErrors(t, l.s.Copy(l.a, 0, l.b, 0, 8), l.s.Upload(l.a, 8, l.h, 0, 8), l.s.Record(l.e), l.s.Launch(l.graph))
	}
	step()
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
