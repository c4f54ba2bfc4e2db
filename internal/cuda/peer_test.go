//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package cuda_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/reftest"
)

// peers opens the fake driver's two GPUs, which reach each other. Streams run as late as possible.
func peers(t *testing.T) (lib *fakedriver.Library, a, b *cuda.Device) {
	t.Helper()
	lib = fakedriver.New(t)
	lib.State().Late = reftest.Rand(t).Uint64() | 1
	drv := must[*cuda.Driver](t)(cuda.LoadFrom(lib.Path))
	a, b = must[*cuda.Device](t)(drv.Open(0)), must[*cuda.Device](t)(drv.Open(1))
	t.Cleanup(func() {
		for _, d := range []*cuda.Device{b, a} {
			if err := d.Close(); err != nil && !errors.Is(err, cuda.ErrClosed) {
				t.Error(err)
			}
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d objects left, %d defects:\n%s", lib.Live(), lib.Defects(), lib.Log())
		}
	})
	for _, err := range []error{a.Reach(b), b.Reach(a), a.Reach(b)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return lib, a, b
}

// filled returns a buffer of bytes of one value.
func filled(t *testing.T, d *cuda.Device, n int64, value byte) *cuda.Buffer {
	t.Helper()
	b := must[*cuda.Buffer](t)(d.NewBuffer(n))
	if err := b.Set(0, value, n); err != nil {
		t.Fatal(err)
	}
	return b
}

func holds(t *testing.T, b *cuda.Buffer, value byte) {
	t.Helper()
	got := make([]byte, b.Len())
	if err := b.Download(got, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, bytes.Repeat([]byte{value}, len(got))) {
		t.Errorf("it holds %x, want %d", got[:8], value)
	}
}

// TestNoPeers: a device that reaches no other GPU can't use its memory, or wait for its events.
func TestNoPeers(t *testing.T) {
	lib := fakedriver.New(t)
	drv := must[*cuda.Driver](t)(cuda.LoadFrom(lib.Path))
	a, b := must[*cuda.Device](t)(drv.Open(0)), must[*cuda.Device](t)(drv.Open(1))
	s := must[*cuda.Stream](t)(a.NewStream())
	x, y := filled(t, a, 16, 1), filled(t, b, 16, 2)
	e := must[*cuda.Event](t)(b.NewEvent(false))
	try := func(what string) {
		t.Helper()
		for _, err := range []error{s.Copy(x, 0, y, 0, 16), s.Copy(y, 0, x, 0, 16), s.Set(y, 0, 0, 16), s.Wait(e), s.Record(e)} {
			if !errors.Is(err, cuda.ErrOtherDevice) {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	try("two GPUs")
	lib.State().NoPeers = 1
	if err := a.Reach(b); !errors.Is(err, cuda.ErrNoPeerAccess) || !strings.Contains(err.Error(), "GPU 0 (Fake 0)") || !strings.Contains(err.Error(), "GPU 1 (Fake 1)") {
		t.Errorf("no way: %v", err)
	}
	try("no way")
	lib.State().NoPeers = 0
	for _, call := range []string{"cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess"} {
		lib.State().FailIn(call, 2)
		if err := a.Reach(b); !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("%s fails: %v", call, err)
		}
		try(call)
	}
	lib.State().FailIn("", 0)
	if err := b.Reach(a); err != nil { // the other way
		t.Error(err)
	}
	try("the other way")
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := a.Reach(b); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("a closed one: %v", err)
	}
	nothingLeft(t, lib, a)
}

// TestPeerOrder: copies, fills and waits between the GPUs run in the order of events.
func TestPeerOrder(t *testing.T) {
	_, a, b := peers(t)
	sa, sb := must[*cuda.Stream](t)(a.NewStream()), must[*cuda.Stream](t)(b.NewStream())
	ea, eb := must[*cuda.Event](t)(a.NewEvent(false)), must[*cuda.Event](t)(b.NewEvent(false))
	x, y := filled(t, a, 64, 1), filled(t, b, 64, 2)
	for i := range byte(50) {
		for _, err := range []error{
			sa.Set(x, 0, i, 64), sa.Record(ea), sb.Wait(ea),
			sb.Copy(y, 0, x, 0, 64), // from a peer
			sb.Set(x, 0, i+1, 32),   // and to one
			sb.Record(eb), sa.Wait(eb),
			sa.Copy(x, 32, x, 0, 32), sa.Set(y, 0, i+1, 32), sa.Copy(x, 0, y, 32, 32),
			sa.Synchronize(),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		got := make([]byte, 64)
		if err := x.Download(got, 0); err != nil {
			t.Fatal(err)
		}
		if got[0] != i || got[40] != i+1 {
			t.Fatalf("turn %d: %d, %d", i, got[0], got[40])
		}
	}
	if err := sa.Record(eb); !errors.Is(err, cuda.ErrOtherDevice) {
		t.Errorf("an event of the other GPU is recorded: %v", err)
	}
}

// TestPeerCapture: a capture spreads over streams of both GPUs and joins, and its graph has all of the work.
func TestPeerCapture(t *testing.T) {
	lib, a, b := peers(t)
	sa, sb := must[*cuda.Stream](t)(a.NewStream()), must[*cuda.Stream](t)(b.NewStream())
	fork, join := must[*cuda.Event](t)(a.NewEvent(false)), must[*cuda.Event](t)(b.NewEvent(false))
	x, y, z := filled(t, a, 16, 1), filled(t, b, 16, 2), filled(t, a, 16, 3)
	work := func() error {
		return errors.Join(sa.Copy(x, 0, z, 0, 16), sa.Record(fork), sb.Wait(fork), sb.Copy(y, 0, x, 0, 16),
			sb.Record(join), sa.Set(x, 0, 0, 16), sa.Wait(join), sa.Copy(x, 0, y, 0, 16))
	}
	// Set and the copy from x run at once: what is in y may be 0.
	g := must[*cuda.Graph](t)(sa.Capture(func() error {
		return errors.Join(sa.Copy(x, 0, z, 0, 16), sa.Record(fork), sb.Wait(fork), sb.Copy(y, 0, x, 0, 16),
			sb.Record(join), sa.Wait(join), sa.Set(x, 0, 0, 16), sa.Copy(x, 0, y, 0, 16))
	}))
	holds(t, x, 1)
	holds(t, y, 2)
	for i := range byte(20) {
		if err := errors.Join(sa.Set(z, 0, i, 16), sa.Launch(g), sa.Synchronize()); err != nil {
			t.Fatal(err)
		}
		holds(t, x, i)
		holds(t, y, i)
	}

	// The fake driver detects missing order: therefore it runs late.
	wrong := must[*cuda.Graph](t)(sa.Capture(work))
	seen := map[byte]bool{}
	for range 100 {
		if err := errors.Join(sa.Set(z, 0, 9, 16), sa.Launch(wrong), sa.Synchronize()); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 16)
		if err := x.Download(got, 0); err != nil {
			t.Fatal(err)
		}
		seen[got[0]] = true
	}
	if len(seen) != 2 {
		t.Errorf("an unordered pair gave %v", seen)
	}

	// A stream that does not join is an error, and so is one outside the capture.
	if _, err := sa.Capture(func() error { return errors.Join(sa.Record(fork), sb.Wait(fork), sb.Set(y, 0, 0, 16)) }); err == nil || !strings.Contains(err.Error(), "904") {
		t.Errorf("unjoined: %v", err)
	}
	if err := errors.Join(sb.Record(join), sb.Synchronize()); err != nil {
		t.Errorf("after it: %v", err)
	}
	if _, err := sa.Capture(func() error { return sa.Wait(join) }); err == nil || !strings.Contains(err.Error(), "905") {
		t.Errorf("an event of before: %v", err)
	}
	failed := errors.New("no")
	if _, err := sa.Capture(func() error { return errors.Join(work(), failed) }); !errors.Is(err, failed) {
		t.Errorf("Capture: %v", err)
	}
	for _, call := range []string{"cuEventRecord", "cuStreamWaitEvent"} {
		for gpu := range 2 {
			lib.State().FailOn(gpu, call, 2)
			if _, err := sa.Capture(work); !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Errorf("%s on GPU %d: %v", call, gpu, err)
			}
			lib.State().FailIn("", 0)
		}
	}
}

// TestPeerClose: Close waits for the others' uses of the memory, which they no longer reach afterwards.
func TestPeerClose(t *testing.T) {
	_, a, b := peers(t)
	sa := must[*cuda.Stream](t)(a.NewStream())
	if err := sa.PutOff(func(d *cuda.Device) (*cuda.Function, error) {
		m, err := d.Module("copies", func() ([]byte, error) { return []byte("image"), nil })
		if err != nil {
			return nil, err
		}
		return m.Function("copy_pieces")
	}); err != nil {
		t.Fatal(err)
	}
	x, y, z := filled(t, a, 64, 1), filled(t, b, 64, 2), filled(t, b, 64, 3)
	// Deferred copies reach the peer before its memory is freed.
	if err := errors.Join(sa.Copy(x, 0, y, 0, 64), sa.Copy(z, 0, y, 0, 32)); err != nil {
		t.Fatal(err)
	}
	if err := y.Close(); err != nil {
		t.Fatal(err)
	}
	holds(t, x, 2)
	if err := sa.Copy(x, 0, z, 32, 32); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 64)
	if err := x.Download(got, 0); err != nil || got[0] != 3 || got[63] != 2 {
		t.Errorf("%d %d, %v", got[0], got[63], err)
	}
	if err := sa.Copy(x, 0, z, 0, 16); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("memory of a closed GPU: %v", err)
	}
	if err := sa.Synchronize(); err != nil {
		t.Error(err)
	}
}

// TestPeerGraphCloses: a graph that may have work on a GPU is closed with the GPU: after the context is gone a driver
// would wait for such work forever.
func TestPeerGraphCloses(t *testing.T) {
	lib, a, b := peers(t)
	sa, sb := must[*cuda.Stream](t)(a.NewStream()), must[*cuda.Stream](t)(b.NewStream())
	fork, join := must[*cuda.Event](t)(a.NewEvent(false)), must[*cuda.Event](t)(b.NewEvent(false))
	x, y := filled(t, a, 16, 1), filled(t, b, 16, 2)
	g := must[*cuda.Graph](t)(sa.Capture(func() error {
		return errors.Join(sa.Record(fork), sb.Wait(fork), sb.Copy(y, 0, x, 0, 16), sb.Record(join), sa.Wait(join))
	}))
	if err := errors.Join(sa.Launch(g), sa.Synchronize()); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	log := lib.Log()
	if gone, released := strings.Index(log, "cuGraphExecDestroy"), strings.Index(log, "cuDevicePrimaryCtxRelease"); gone < 0 || released >= 0 && released < gone {
		t.Errorf("the graph went at %d, the context at %d", gone, released)
	}
	if err := sa.Launch(g); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("Launch: %v", err)
	}
	if err := g.Close(); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("Close: %v", err)
	}
	if err := sa.Synchronize(); err != nil {
		t.Error(err)
	}
}
