//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package cuda_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/reftest"
)

func openFake(t testing.TB) (*fakedriver.Library, *cuda.Device) {
	t.Helper()
	lib := fakedriver.New(t)
	drv, err := cuda.LoadFrom(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	dev, err := drv.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	return lib, dev
}

// nothingLeft closes the device and checks that the driver has no object left.
func nothingLeft(t *testing.T, lib *fakedriver.Library, dev *cuda.Device) {
	t.Helper()
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
	if n := lib.Live(); n != 0 {
		t.Errorf("%d objects and contexts left", n)
	}
	if n := lib.Defects(); n != 0 {
		t.Errorf("%d calls that a real driver would crash on:\n%s", n, lib.Log())
	}
}

func image() ([]byte, error) { return []byte("image"), nil }

func TestSentinelsOfLoading(t *testing.T) {
	lib := fakedriver.New(t)
	if _, err := cuda.LoadFrom("libthere-is-no-such-driver.so.1"); !errors.Is(err, cuda.ErrNoDevice) || !strings.Contains(err.Error(), "no CUDA driver") {
		t.Errorf("no library: %v", err)
	}
	if _, err := cuda.LoadFrom("libc.so.6"); !errors.Is(err, cuda.ErrNoDevice) || !strings.Contains(err.Error(), "no CUDA driver") {
		t.Errorf("another library: %v", err)
	}
	for _, c := range []struct {
		set  func(*fakedriver.State)
		want error
		text string
	}{
		{func(s *fakedriver.State) { s.Version = 11080 }, cuda.ErrNoDevice, "11.8"},
		{func(s *fakedriver.State) { s.Init = 100 }, cuda.ErrNoDevice, "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected (cuInit)"},
		{func(s *fakedriver.State) { s.Init = 34 }, cuda.ErrNoDevice, "CUDA_ERROR_34: unknown to this driver (cuInit)"},
		{func(s *fakedriver.State) { s.Init = 35 }, cuda.ErrNoDevice, "CUDA_ERROR_35"},
	} {
		lib = fakedriver.New(t)
		c.set(lib.State())
		if _, err := cuda.LoadFrom(lib.Path); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("got %v, want %v with %q", err, c.want, c.text)
		}
	}
	lib = fakedriver.New(t)
	lib.State().Version = 12000
	drv, err := cuda.LoadFrom(lib.Path)
	if err != nil {
		t.Fatalf("the oldest driver that will do: %v", err)
	}
	if v := drv.Version(); v != "12.0" {
		t.Errorf("version %s", v)
	}
	for _, ordinal := range []int{-1, 2, 1 << 40} {
		if _, err := drv.Open(ordinal); !errors.Is(err, cuda.ErrNoDevice) {
			t.Errorf("GPU %d: %v", ordinal, err)
		}
	}
	lib.State().Major, lib.State().Minor = 7, 5
	if _, err := drv.Open(1); !errors.Is(err, cuda.ErrNoDevice) || !strings.Contains(err.Error(), "7.5") {
		t.Errorf("capability 7.5: %v", err)
	}
	lib.State().Major, lib.State().Minor = 8, 0
	dev, err := drv.Open(1)
	if err != nil {
		t.Fatalf("capability 8.0: %v", err)
	}
	nothingLeft(t, lib, dev)
}

func TestInfoTakesTheRightAttributes(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	got := dev.Info()
	want := cuda.Info{Ordinal: 0, Name: "Fake 0", Capability: 90, Multiprocessors: 1016, ClockKHz: 1013, MemoryBytes: 1 << 20,
		MemoryClockKHz: 1036, MemoryBusBits: 1037, L2Bytes: 1038, SharedPerBlock: 1008, SharedPerBlockMost: 1097,
		SharedPerSM: 1081, RegistersPerSM: 1082, ThreadsPerSM: 1039, Cooperative: true}
	if got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestMemory(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	roundTrips(t, dev, s, 4096)

	for _, n := range []int64{0, -1} {
		if _, err := dev.NewBuffer(n); !errors.Is(err, cuda.ErrRange) {
			t.Errorf("a buffer of %d bytes: %v", n, err)
		}
		if _, err := dev.NewHost(int(n)); !errors.Is(err, cuda.ErrRange) {
			t.Errorf("pinned memory of %d bytes: %v", n, err)
		}
	}
	b, _ := dev.NewBuffer(100)
	h, _ := dev.NewHost(100)
	const most = 1<<63 - 1
	for name, err := range map[string]error{
		"upload":       b.Upload(1, make([]byte, 100)),
		"negative":     b.Upload(-1, make([]byte, 1)),
		"download":     b.Download(make([]byte, 101), 0),
		"far":          b.Download(make([]byte, 1), most),
		"set":          b.Set(50, 0, 51),
		"set overflow": b.Set(most, 0, most),
		"async":        s.Upload(b, 0, h, 1, 100),
		"async n":      s.Download(h, 0, b, 0, -1),
		"copy":         s.Copy(b, 0, b, 100, 1),
		"overlap":      s.Copy(b, 0, b, 9, 10),
	} {
		if !errors.Is(err, cuda.ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := s.Copy(b, 0, b, 10, 10); err != nil {
		t.Error(err)
	}
	if m, err := dev.Memory(); err != nil || m.Used != 100 || m.Pinned != 100 || m.Free != 1<<20-100 || m.Total != 1<<20 {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestOutOfMemoryLeavesTheDeviceUsable(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	_, err := dev.NewBuffer(1<<20 + 1)
	const want = "CUDA_ERROR_OUT_OF_MEMORY: out of memory (cuMemAlloc, 1048577 bytes, GPU 0)"
	if !errors.Is(err, cuda.ErrOutOfMemory) || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	var e *cuda.Error
	if !errors.As(err, &e) || e.Code != 2 || e.Call != "cuMemAlloc" {
		t.Errorf("%+v", e)
	}
	if m, err := dev.Memory(); err != nil || m.Used != 0 {
		t.Errorf("%+v, %v", m, err)
	}
	b, err := dev.NewBuffer(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Set(0, 1, 1<<20); err != nil {
		t.Error(err)
	}
}

func TestUseAfterClose(t *testing.T) {
	lib, dev := openFake(t)
	u := newUse(t, dev)
	for _, c := range []struct {
		name  string
		close func() error
		use   func() error
	}{
		{"graph", u.graph.Close, func() error { return u.s.Launch(u.graph) }},
		{"event", u.event.Close, func() error { return u.s.Record(u.event) }},
		{"pinned memory", u.host.Close, func() error { return u.s.Upload(u.buf, 0, u.host, 0, 1) }},
		{"buffer argument", u.buf.Close, func() error { return u.f.Launch(u.s, cuda.Grid{}, u.args) }},
		{"buffer", func() error { return nil }, func() error { return u.buf.Upload(0, []byte{1}) }},
		{"stream", u.s.Close, u.s.Synchronize},
	} {
		if c.name != "buffer" {
			if err := c.use(); err != nil {
				t.Errorf("%s, open: %v", c.name, err)
			}
			if err := c.close(); err != nil {
				t.Errorf("%s: Close: %v", c.name, err)
			}
			if err := c.close(); !errors.Is(err, cuda.ErrClosed) {
				t.Errorf("%s: second Close: %v", c.name, err)
			}
		}
		if err := c.use(); !errors.Is(err, cuda.ErrClosed) {
			t.Errorf("%s, closed: %v", c.name, err)
		}
	}
	if u.host.Bytes() != nil {
		t.Error("closed pinned memory is still given out")
	}

	b, _ := dev.NewBuffer(8)
	nothingLeft(t, lib, dev)
	for name, err := range map[string]error{
		"device":   dev.Close(),
		"buffer":   b.Close(),
		"upload":   b.Upload(0, []byte{1}),
		"launch":   u.f.Launch(u.s, cuda.Grid{}, &cuda.Args{}),
		"memory":   second(dev.Memory()),
		"new":      second(dev.NewBuffer(1)),
		"module":   second(dev.Module("m", image)),
		"function": second(u.m.Function("k_8")),
	} {
		if !errors.Is(err, cuda.ErrClosed) {
			t.Errorf("%s of a closed device: %v", name, err)
		}
	}
	if lib.Defects() != 0 {
		t.Error(lib.Log())
	}
}

// use is one object of each kind.
type use struct {
	s     *cuda.Stream
	event *cuda.Event
	buf   *cuda.Buffer
	host  *cuda.Host
	m     *cuda.Module
	f     *cuda.Function
	args  *cuda.Args
	graph *cuda.Graph
}

func newUse(t *testing.T, dev *cuda.Device) *use {
	t.Helper()
	u, err := tryUse(dev)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func tryUse(dev *cuda.Device) (u *use, err error) {
	u = &use{args: &cuda.Args{}}
	step := func(f func() error) {
		if err == nil {
			err = f()
		}
	}
	step(func() (err error) { u.s, err = dev.NewStream(); return })
	step(func() (err error) { u.event, err = dev.NewEvent(true); return })
	step(func() (err error) { u.buf, err = dev.NewBuffer(64); return })
	step(func() (err error) { u.host, err = dev.NewHost(64); return })
	step(func() (err error) { u.m, err = dev.Module("m", image); return })
	step(func() (err error) { u.f, err = u.m.Function("k_8"); return })
	step(func() error { return u.f.SetDynamicShared(100000) })
	step(func() error { return second(u.f.Info()) })
	step(func() error { return second(u.f.Occupancy(128, 0)) })
	step(func() error { return second(dev.Memory()) })
	step(func() error { return u.args.Buffer(u.buf, 0) })
	step(func() error { return u.host.Write(0, make([]byte, 64)) })
	step(func() error { return second(dev.TensorMap(u.buf, 0, someTiles)) })
	step(func() error { return u.buf.Upload(0, make([]byte, 64)) })
	step(func() error { return u.buf.Set(0, 7, 64) })
	step(func() error { return u.s.Upload(u.buf, 0, u.host, 0, 64) })
	step(func() error { return u.s.Copy(u.buf, 0, u.buf, 32, 32) })
	step(func() error { return u.f.Launch(u.s, cuda.Grid{}, u.args) })
	step(func() error { return u.f.Launch(u.s, cuda.Grid{Cooperative: true}, u.args) })
	step(func() error { return u.s.Record(u.event) })
	step(func() error { return u.s.Wait(u.event) })
	step(func() error { return u.event.Synchronize() })
	step(func() error { return second(u.event.Since(u.event)) })
	step(func() error { return second(u.s.Done()) })
	step(func() (err error) {
		u.graph, err = u.s.Capture(func() error { return u.f.Launch(u.s, cuda.Grid{}, u.args) })
		return
	})
	step(func() error { return u.s.Launch(u.graph) })
	step(func() error { return u.s.Download(u.host, 0, u.buf, 0, 64) })
	step(func() error { return u.s.Synchronize() })
	step(func() error { return u.buf.Download(make([]byte, 64), 0) })
	return u, err
}

// TestEveryCallFailsOnce makes every call of a long run fail once. The failure is returned as the driver's, nothing
// leaks, and the device works afterwards.
func TestEveryCallFailsOnce(t *testing.T) {
	lib, dev := openFake(t)
	newUse(t, dev)
	nothingLeft(t, lib, dev)
	calls := lib.State().Calls
	if calls < 100 {
		t.Fatalf("only %d calls", calls)
	}
	for n := int64(1); n <= calls; n++ {
		lib := fakedriver.New(t)
		lib.State().FailAt, lib.State().FailWith = n, 2
		err := func() error {
			drv, err := cuda.LoadFrom(lib.Path)
			if err != nil {
				return err
			}
			dev, err := drv.Open(0)
			if err != nil {
				return err
			}
			_, err = tryUse(dev)
			_, again := tryUse(dev)
			if err != nil && again != nil {
				t.Errorf("call %d (%s) failed, and then %v", n, lib.State().Failed(), again)
			}
			return errors.Join(err, again, dev.Close())
		}()
		switch failed := lib.State().Failed(); failed {
		case "":
			t.Errorf("call %d was never made", n)
		case "cuDriverGetVersion":
			if !errors.Is(err, cuda.ErrNoDevice) {
				t.Errorf("call %d (%s): %v", n, failed, err)
			}
		case "cuCtxPopCurrent_v2", "cuGraphDestroy": // these report nothing of their own
			if err != nil {
				t.Errorf("call %d (%s): %v", n, failed, err)
			}
		default:
			name, _, _ := strings.Cut(failed, "_")
			if !errors.Is(err, cuda.ErrOutOfMemory) || !strings.Contains(err.Error(), name) {
				t.Errorf("call %d (%s): %v", n, failed, err)
			}
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("call %d (%s): %d left, %d defects", n, lib.State().Failed(), lib.Live(), lib.Defects())
		}
	}
}

func TestArgumentPacking(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	s, _ := dev.NewStream()
	m, err := dev.Module("m", image)
	if err != nil {
		t.Fatal(err)
	}
	f, err := m.Function("k_4_4_8_8_4_8_8_12_8_1")
	if err != nil {
		t.Fatal(err)
	}
	b, _ := dev.NewBuffer(64)
	type three struct{ a, b, c uint32 }
	type one struct{ a byte }
	a := &cuda.Args{}
	fill := func() {
		a.Reset()
		a.Int32(-2)
		a.Uint32(0x01020304)
		a.Int64(-3)
		a.Uint64(0x0102030405060708)
		a.Float32(1)
		a.Float64(-2)
		if err := a.Buffer(b, 0); err != nil {
			t.Fatal(err)
		}
		cuda.Struct(a, &three{1, 2, 3})
		a.Null()
		cuda.Struct(a, &one{0xfe})
	}
	const want = "args feffffff 04030201 fdffffffffffffff 0807060504030201 0000803f 00000000000000c0 "
	const rest = " 010000000200000003000000 0000000000000000 fe\n"
	for _, g := range []struct {
		grid cuda.Grid
		text string
	}{
		{cuda.Grid{Blocks: [3]int{7, 2}, Threads: [3]int{128}, Shared: 99}, "grid 7 2 1 block 128 1 1 shared 99\n"},
		{cuda.Grid{Blocks: [3]int{8, 2, 3}, Threads: [3]int{4, 5, 6}, Cluster: [3]int{2}, Cooperative: true},
			"grid 8 2 3 block 4 5 6 shared 0\ncooperative 1\ncluster 2 1 1\n"},
		{cuda.Grid{Overlap: true}, "grid 1 1 1 block 1 1 1 shared 0\noverlap 1\n"},
	} {
		before := len(lib.Log())
		fill()
		if err := f.Launch(s, g.grid, a); err != nil {
			t.Fatal(err)
		}
		log := lib.Log()[before:]
		if !strings.Contains(log, g.text) || !strings.Contains(log, want) || !strings.Contains(log, rest) {
			t.Errorf("%+v: got\n%s\nwant %s%s", g.grid, log, g.text, want)
		}
	}
	for _, g := range []cuda.Grid{{Blocks: [3]int{-1}}, {Threads: [3]int{1, 1 << 31}}, {Shared: -1}, {Cluster: [3]int{0, -2}}} {
		if err := f.Launch(s, g, a); !errors.Is(err, cuda.ErrRange) {
			t.Errorf("%+v: %v", g, err)
		}
	}
	if err := a.Buffer(b, 65); !errors.Is(err, cuda.ErrRange) {
		t.Errorf("past the buffer: %v", err)
	}
	if _, err := m.Function("nosuchkernel"); err == nil || err.Error() != "CUDA_ERROR_NOT_FOUND: named symbol not found (cuModuleGetFunction, nosuchkernel of module m, GPU 0)" {
		t.Errorf("no such kernel: %v", err)
	}
	if !reftest.RaceEnabled { // whose instrumentation allocates
		if n := testing.AllocsPerRun(100, func() {
			fill()
			if err := f.Launch(s, cuda.Grid{Blocks: [3]int{7}}, a); err != nil {
				t.Fatal(err)
			}
			if err := f.Launch(s, cuda.Grid{Cooperative: true, Overlap: true}, a); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%v allocations for a launch", n)
		}
	}
}

func TestModulesAreLoadedOnce(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	asked := 0
	bad := errors.New("bad")
	get := func(code string, err error) (*cuda.Module, error) {
		return dev.Module("m", func() ([]byte, error) { asked++; return []byte(code), err })
	}
	if _, err := get("", bad); !errors.Is(err, bad) {
		t.Errorf("no image: %v", err)
	}
	if _, err := get("no code", nil); err == nil {
		t.Error("a bad image was loaded")
	}
	m1, err := get("image", nil)
	if err != nil {
		t.Fatalf("a good image after bad ones: %v", err)
	}
	m2, err := get("image", nil)
	if err != nil || m1 != m2 || asked != 3 {
		t.Errorf("%p %p %v, asked %d times", m1, m2, err, asked)
	}
	f1, err1 := m1.Function("k_4")
	f2, err2 := m1.Function("k_4")
	if err1 != nil || err2 != nil || f1 != f2 {
		t.Errorf("%p %v, %p %v", f1, err1, f2, err2)
	}
	if n := strings.Count(lib.Log(), "cuModuleLoadData\n"); n != 2 {
		t.Errorf("%d loads", n)
	}
}

func TestTwoDevicesDoNotMix(t *testing.T) {
	lib, dev := openFake(t)
	drv, err := cuda.LoadFrom(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	other, err := drv.Open(1)
	if err != nil {
		t.Fatal(err)
	}
	u, v := newUse(t, dev), newUse(t, other)
	for name, err := range map[string]error{
		"copy":     u.s.Copy(u.buf, 0, v.buf, 0, 1),
		"upload":   u.s.Upload(u.buf, 0, v.host, 0, 1),
		"event":    u.s.Wait(v.event),
		"stream":   u.f.Launch(v.s, cuda.Grid{}, u.args),
		"argument": u.f.Launch(u.s, cuda.Grid{}, v.args),
		"graph":    u.s.Launch(v.graph),
	} {
		if !errors.Is(err, cuda.ErrOtherDevice) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	if err := u.s.Copy(u.buf, 0, u.buf, 32, 1); err != nil {
		t.Errorf("after the other device was closed: %v", err)
	}
	nothingLeft(t, lib, dev)
}

func TestCapture(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	s, _ := dev.NewStream()
	bad := errors.New("bad")
	if g, err := s.Capture(func() error { return bad }); g != nil || !errors.Is(err, bad) {
		t.Errorf("%v, %v", g, err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was lost")
			}
		}()
		s.Capture(func() error { panic("bad") })
	}()
	// Neither may leave the stream capturing: the driver would see the next one.
	if _, err := s.Capture(func() error { return nil }); err != nil {
		t.Error(err)
	}
	if b, e := strings.Count(lib.Log(), "cuStreamBeginCapture"), strings.Count(lib.Log(), "cuStreamEndCapture"); b != 3 || e != 3 {
		t.Errorf("%d captures began, %d ended", b, e)
	}
}

func TestQueriesAndElapsedTime(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	u := newUse(t, dev)
	for _, busy := range []int32{1, 0} {
		lib.State().Busy = busy
		for name, ask := range map[string]func() (bool, error){"stream": u.s.Done, "event": u.event.Done} {
			if done, err := ask(); err != nil || done == (busy == 1) {
				t.Errorf("%s, busy %d: %v, %v", name, busy, done, err)
			}
		}
	}
	if d, err := u.event.Since(u.event); err != nil || d != 1500*time.Microsecond {
		t.Errorf("%v, %v", d, err)
	}
}

// BenchmarkLaunchFake measures a launch in Go: the driver's part is negligible.
func BenchmarkLaunchFake(b *testing.B) {
	lib, dev := openFake(b)
	defer dev.Close()
	s, _ := dev.NewStream()
	m, _ := dev.Module("m", image)
	f, err := m.Function("k_8")
	if err != nil {
		b.Fatal(err)
	}
	a := &cuda.Args{}
	b.ReportAllocs()
	for b.Loop() {
		a.Reset()
		a.Int64(1)
		if err := f.Launch(s, cuda.Grid{}, a); err != nil {
			b.Fatal(err)
		}
	}
	_ = lib
}

// TestAdopt: the streams of a device in an adopted context wait for the owner's. Close destroys the device's objects,
// not the context. After the context is gone there is no driver call.
func TestAdopt(t *testing.T) {
	lib, owner := openFake(t)
	drv, err := cuda.LoadFrom(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	alive := true
	adopt := func() *cuda.Device {
		t.Helper()
		lib.Forget()
		dev, err := drv.Adopt(0, owner.Context(), func() bool { return alive })
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(lib.Log(), "cuStreamCreate\nblocking\n") || strings.Contains(lib.Log(), "cuDevicePrimaryCtxRetain") {
			t.Errorf("adopted with:\n%s", lib.Log())
		}
		return dev
	}
	before := lib.Live()
	dev := adopt()
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	roundTrips(t, dev, s, 4096)

	theirs, err := owner.NewBuffer(64)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := dev.Borrow(theirs.Address(), 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := ours.Upload(0, []byte("in memory of someone else")); err != nil {
		t.Error(err)
	}
	got := make([]byte, 6)
	if err := theirs.Download(got, 3); err != nil || string(got) != "memory" {
		t.Errorf("%q, %v", got, err)
	}
	for _, err := range []error{ours.Close(), theirs.Close()} {
		if err != nil {
			t.Error(err)
		}
	}
	if err := ours.Upload(0, got); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("a borrowed buffer that is closed: %v", err)
	}
	for _, n := range []int64{0, -1} {
		if _, err := dev.Borrow(4096, n); !errors.Is(err, cuda.ErrRange) {
			t.Errorf("%d bytes borrowed: %v", n, err)
		}
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
	if n := lib.Live(); n != before {
		t.Errorf("%d objects and contexts, %d before", n, before)
	}
	if _, err := drv.Adopt(2, owner.Context(), nil); !errors.Is(err, cuda.ErrNoDevice) {
		t.Errorf("GPU 2: %v", err)
	}

	dev = adopt()
	b, err := dev.NewBuffer(64)
	if err != nil {
		t.Fatal(err)
	}
	alive = false
	calls := lib.State().Calls
	if !dev.Lost() {
		t.Error("not lost")
	}
	if err := b.Upload(0, got); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("Upload: %v", err)
	}
	if _, err := dev.NewStream(); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("NewStream: %v", err)
	}
	for name, err := range map[string]error{"of a buffer": b.Close(), "of the device": dev.Close()} {
		if err != nil {
			t.Errorf("Close %s: %v", name, err)
		}
	}
	if n := lib.State().Calls - calls; n != 0 {
		t.Errorf("%d calls of the driver for a context that is gone", n)
	}
	if err := owner.Close(); err != nil || lib.Defects() != 0 {
		t.Errorf("%v, %d defects", err, lib.Defects())
	}
}
