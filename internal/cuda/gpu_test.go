package cuda_test

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
)

// axpy computes y[i] = a*x[i] + y[i] for i < n. rows writes its block's number
// to every word of a dynamic shared buffer and the last word to out[block].
const kernels = `
.version 7.0
.target sm_80
.address_size 64

.visible .entry axpy(.param .u64 py, .param .u64 px, .param .f32 pa, .param .u32 pn)
{
	.reg .pred %p;
	.reg .f32 %a, %x, %y;
	.reg .b32 %i, %n, %b, %t;
	.reg .b64 %py, %px, %o;
	ld.param.u64 %py, [py];
	ld.param.u64 %px, [px];
	ld.param.f32 %a, [pa];
	ld.param.u32 %n, [pn];
	mov.u32 %b, %ctaid.x;
	mov.u32 %t, %ntid.x;
	mov.u32 %i, %tid.x;
	mad.lo.u32 %i, %b, %t, %i;
	setp.ge.u32 %p, %i, %n;
	@%p bra done;
	mul.wide.u32 %o, %i, 4;
	add.u64 %py, %py, %o;
	add.u64 %px, %px, %o;
	ld.global.f32 %x, [%px];
	ld.global.f32 %y, [%py];
	fma.rn.f32 %y, %a, %x, %y;
	st.global.f32 [%py], %y;
done:
	ret;
}

.extern .shared .align 16 .b8 buffer[];

.visible .entry rows(.param .u64 pout, .param .u32 pwords)
{
	.reg .pred %p;
	.reg .b32 %i, %n, %b, %v, %s;
	.reg .b64 %out, %o;
	ld.param.u64 %out, [pout];
	ld.param.u32 %n, [pwords];
	mov.u32 %b, %ctaid.x;
	mov.u32 %i, 0;
	mov.u32 %s, buffer;
loop:
	st.shared.u32 [%s], %b;
	add.u32 %s, %s, 4;
	add.u32 %i, %i, 1;
	setp.lt.u32 %p, %i, %n;
	@%p bra loop;
	ld.shared.u32 %v, [%s+-4];
	mul.wide.u32 %o, %b, 4;
	add.u64 %out, %out, %o;
	st.global.u32 [%out], %v;
	ret;
}
`

func ptx() ([]byte, error) { return []byte(kernels), nil }

func openGPU(t testing.TB) *cuda.Device {
	t.Helper()
	drv, err := cuda.Load()
	if errors.Is(err, cuda.ErrNoDevice) {
		t.Skipf("no GPU: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	dev, err := drv.Open(0)
	if errors.Is(err, cuda.ErrNoDevice) {
		t.Skipf("no GPU that will do: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

func closeGPU(t testing.TB, dev *cuda.Device) {
	t.Helper()
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

func kernel(t testing.TB, dev *cuda.Device, name string) *cuda.Function {
	t.Helper()
	m, err := dev.Module("kernels", ptx)
	if err != nil {
		t.Fatal(err)
	}
	f, err := m.Function(name)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestGPUAttributes(t *testing.T) {
	dev := openGPU(t)
	defer closeGPU(t, dev)
	i := dev.Info()
	t.Logf("%+v", i)
	for name, ok := range map[string]bool{
		"name":            i.Name != "" && !strings.ContainsRune(i.Name, 0),
		"capability":      i.Capability >= 80 && i.Capability < 1000,
		"multiprocessors": i.Multiprocessors >= 1 && i.Multiprocessors < 1000,
		"memory":          i.MemoryBytes > 1<<30 && i.MemoryBytes < 1<<44,
		"bus":             i.MemoryBusBits >= 32 && i.MemoryBusBits%32 == 0,
		"L2":              i.L2Bytes >= 1<<19 && i.L2Bytes < 1<<30,
		"shared memory":   i.SharedPerBlock == 48<<10 && i.SharedPerBlockMost > i.SharedPerBlock && i.SharedPerBlockMost < i.SharedPerSM,
		"registers":       i.RegistersPerSM == 65536,
		"threads":         i.ThreadsPerSM >= 1024 && i.ThreadsPerSM <= 2048,
		"clock":           i.ClockKHz >= 0 && i.ClockKHz < 1e8,
		"memory clock":    i.MemoryClockKHz >= 0 && i.MemoryClockKHz < 1e9,
	} {
		if !ok {
			t.Errorf("%s makes no sense", name)
		}
	}
	m := must[cuda.Memory](t)(dev.Memory())
	t.Logf("%+v", m)
	if m.Free <= 0 || m.Free > m.Total || m.Total > i.MemoryBytes {
		t.Errorf("%+v", m)
	}
}

func TestGPUMemory(t *testing.T) {
	dev := openGPU(t)
	defer closeGPU(t, dev)
	roundTrips(t, dev, must[*cuda.Stream](t)(dev.NewStream()), 3<<20)
}

// vectors makes y and x of n random numbers on the device.
func vectors(t testing.TB, dev *cuda.Device, n int) (y, x *cuda.Buffer, hostY, hostX []float32) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	make1 := func() (*cuda.Buffer, []float32) {
		b := must[*cuda.Buffer](t)(dev.NewBuffer(int64(4 * n)))
		host, bits := make([]float32, n), []byte(nil)
		for i := range host {
			host[i] = float32(r.NormFloat64())
			bits = binary.LittleEndian.AppendUint32(bits, math.Float32bits(host[i]))
		}
		if err := b.Upload(0, bits); err != nil {
			t.Fatal(err)
		}
		return b, host
	}
	y, hostY = make1()
	x, hostX = make1()
	return y, x, hostY, hostX
}

func words(t testing.TB, b *cuda.Buffer) []uint32 {
	t.Helper()
	raw := make([]byte, b.Len())
	if err := b.Download(raw, 0); err != nil {
		t.Fatal(err)
	}
	w := make([]uint32, len(raw)/4)
	for i := range w {
		w[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return w
}

// A kernel is launched, then captured and replayed; the results are those of
// fused multiply-adds on the host, bit for bit.
func TestGPULaunchAndGraph(t *testing.T) {
	dev := openGPU(t)
	defer closeGPU(t, dev)
	s := must[*cuda.Stream](t)(dev.NewStream())
	f := kernel(t, dev, "axpy")
	info := must[cuda.FunctionInfo](t)(f.Info())
	if info.MaxThreads < 128 || info.Registers < 1 || info.LocalBytes != 0 {
		t.Errorf("%+v", info)
	}
	if n := must[int](t)(f.Occupancy(128, 0)); n < 1 || n*128 > dev.Info().ThreadsPerSM {
		t.Errorf("occupancy %d", n)
	}

	const n, a = 100003, 0.37
	y, x, hostY, hostX := vectors(t, dev, n)
	args := &cuda.Args{}
	if err := errors.Join(args.Buffer(y, 0), args.Buffer(x, 0)); err != nil {
		t.Fatal(err)
	}
	args.Float32(a)
	args.Uint32(n)
	grid := cuda.Grid{Blocks: [3]int{(n + 127) / 128}, Threads: [3]int{128}}
	expect := func(what string, launches int) {
		t.Helper()
		if err := s.Synchronize(); err != nil {
			t.Fatal(err)
		}
		for range launches {
			for i := range hostY {
				hostY[i] = float32(math.FMA(float64(float32(a)), float64(hostX[i]), float64(hostY[i])))
			}
		}
		for i, got := range words(t, y) {
			// The product is exact in float64, so the sum is rounded twice at
			// most: a last bit may differ once a launch.
			if d := math.Abs(float64(math.Float32frombits(got)) - float64(hostY[i])); !(d <= float64(launches)*1e-6) {
				t.Fatalf("%s: y[%d] = %v, want %v", what, i, math.Float32frombits(got), hostY[i])
			}
			hostY[i] = math.Float32frombits(got)
		}
	}
	if err := f.Launch(s, grid, args); err != nil {
		t.Fatal(err)
	}
	expect("launch", 1)
	grid.Cooperative = true
	grid.Blocks[0] = (n + 1023) / 1024
	grid.Threads[0] = 1024
	if err := f.Launch(s, grid, args); err != nil {
		t.Fatal(err)
	}
	expect("cooperative launch", 1)
	grid.Blocks[0] = 1 << 20 // more than can run at once
	if err := f.Launch(s, grid, args); err == nil || !strings.Contains(err.Error(), "COOPERATIVE_LAUNCH_TOO_LARGE") {
		t.Errorf("a grid too large to run at once: %v", err)
	}
	if dev.Info().Capability >= 90 {
		if err := f.Launch(s, cuda.Grid{Blocks: [3]int{(n + 255) / 256 * 2}, Threads: [3]int{128}, Cluster: [3]int{2}}, args); err != nil {
			t.Fatal(err)
		}
		expect("launch of clusters", 1)
	}

	grid = cuda.Grid{Blocks: [3]int{(n + 127) / 128}, Threads: [3]int{128}}
	graph := must[*cuda.Graph](t)(s.Capture(func() error {
		return errors.Join(f.Launch(s, grid, args), f.Launch(s, grid, args))
	}))
	expect("capture alone", 0)
	args.Reset() // the graph has its own
	for range 3 {
		if err := s.Launch(graph); err != nil {
			t.Fatal(err)
		}
	}
	expect("graph", 6)
	if err := graph.Close(); err != nil {
		t.Error(err)
	}
}

func TestGPUDynamicSharedMemory(t *testing.T) {
	dev := openGPU(t)
	defer closeGPU(t, dev)
	s := must[*cuda.Stream](t)(dev.NewStream())
	f := kernel(t, dev, "rows")
	most := dev.Info().SharedPerBlockMost
	const blocks = 333
	out := must[*cuda.Buffer](t)(dev.NewBuffer(4 * blocks))
	args := &cuda.Args{}
	if err := args.Buffer(out, 0); err != nil {
		t.Fatal(err)
	}
	args.Uint32(uint32(most / 4))
	grid := cuda.Grid{Blocks: [3]int{blocks}, Shared: most}
	if err := f.Launch(s, grid, args); err == nil || !strings.HasPrefix(err.Error(), "CUDA_ERROR_INVALID_VALUE: ") {
		t.Errorf("more than was asked for: %v", err)
	}
	if err := f.SetDynamicShared(most + 1); err == nil {
		t.Error("more than there is was granted")
	}
	if err := f.SetDynamicShared(most); err != nil {
		t.Fatal(err)
	}
	if got := must[cuda.FunctionInfo](t)(f.Info()).DynamicShared; got != most {
		t.Errorf("%d bytes, want %d", got, most)
	}
	if n := must[int](t)(f.Occupancy(1, most)); n != 1 {
		t.Errorf("%d blocks with all of the shared memory", n)
	}
	if err := errors.Join(f.Launch(s, grid, args), s.Synchronize()); err != nil {
		t.Fatal(err)
	}
	for i, w := range words(t, out) {
		if int(w) != i {
			t.Fatalf("block %d wrote %d", i, w)
		}
	}
}

// Work on one stream waits for an event of another, and the time between two
// events is positive and below that of the host around them.
func TestGPUEvents(t *testing.T) {
	dev := openGPU(t)
	defer closeGPU(t, dev)
	s1, s2 := must[*cuda.Stream](t)(dev.NewStream()), must[*cuda.Stream](t)(dev.NewStream())
	start, end := must[*cuda.Event](t)(dev.NewEvent(true)), must[*cuda.Event](t)(dev.NewEvent(true))
	const n = 64 << 20
	a, b := must[*cuda.Buffer](t)(dev.NewBuffer(n)), must[*cuda.Buffer](t)(dev.NewBuffer(n))
	h := must[*cuda.Host](t)(dev.NewHost(1))
	for round := range 5 {
		value := byte(round + 1)
		before := time.Now()
		err := errors.Join(
			s1.Record(start),
			s1.Set(a, 0, value, n),
			s1.Copy(b, 0, a, 0, n),
			s1.Record(end),
			s2.Wait(end),
			s2.Download(h, 0, b, n-1, 1),
			s2.Synchronize())
		if err != nil {
			t.Fatal(err)
		}
		if got := h.Bytes()[0]; got != value {
			t.Fatalf("round %d: read %d before it was written", round, got)
		}
		if done := must[bool](t)(end.Done()); !done {
			t.Error("the event was not passed")
		}
		if done := must[bool](t)(s1.Done()); !done {
			t.Error("the stream is not done")
		}
		if d, host := must[time.Duration](t)(end.Since(start)), time.Since(before); d <= 0 || d > host {
			t.Errorf("%v on the device, %v on the host", d, host)
		}
	}
}

func TestGPUOutOfMemory(t *testing.T) {
	dev := openGPU(t)
	defer closeGPU(t, dev)
	m := must[cuda.Memory](t)(dev.Memory())
	// More than the card has, by a plain allocation, which the driver refuses
	// at once.
	_, err := dev.NewBuffer(m.Total + 1<<30)
	if !errors.Is(err, cuda.ErrOutOfMemory) || !strings.HasPrefix(err.Error(), "CUDA_ERROR_OUT_OF_MEMORY: ") {
		t.Errorf("more than there is: %v", err)
	}
	t.Log(err)
	roundTrips(t, dev, must[*cuda.Stream](t)(dev.NewStream()), 5000)
}

func TestGPUUseAfterClose(t *testing.T) {
	dev := openGPU(t)
	other := openGPU(t) // shares the primary context
	s := must[*cuda.Stream](t)(dev.NewStream())
	b := must[*cuda.Buffer](t)(dev.NewBuffer(10))
	f := kernel(t, dev, "axpy")
	closeGPU(t, dev)
	for name, err := range map[string]error{
		"device": dev.Close(),
		"stream": s.Synchronize(),
		"buffer": b.Upload(0, []byte{1}),
		"close":  b.Close(),
		"launch": f.Launch(s, cuda.Grid{}, &cuda.Args{}),
		"memory": second(dev.Memory()),
	} {
		if !errors.Is(err, cuda.ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	roundTrips(t, other, must[*cuda.Stream](t)(other.NewStream()), 5000)
	closeGPU(t, other)
	again := openGPU(t) // the context was destroyed with its last user
	roundTrips(t, again, must[*cuda.Stream](t)(again.NewStream()), 5000)
	closeGPU(t, again)
}

// Goroutines launch and capture on streams of their own.
func TestGPUConcurrentUse(t *testing.T) {
	dev := openGPU(t)
	defer closeGPU(t, dev)
	f := kernel(t, dev, "rows")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			err := func() error {
				s, err := dev.NewStream()
				if err != nil {
					return err
				}
				const blocks = 50
				out, err := dev.NewBuffer(4 * blocks)
				if err != nil {
					return err
				}
				args := &cuda.Args{}
				if err := args.Buffer(out, 0); err != nil {
					return err
				}
				args.Uint32(64)
				graph, err := s.Capture(func() error {
					return f.Launch(s, cuda.Grid{Blocks: [3]int{blocks}, Shared: 256}, args)
				})
				if err != nil {
					return err
				}
				raw := make([]byte, 4*blocks)
				for range 50 {
					if err := errors.Join(s.Set(out, 0, 0xff, 4*blocks), s.Launch(graph), s.Synchronize(), out.Download(raw, 0)); err != nil {
						return err
					}
					for i := range blocks {
						if got := binary.LittleEndian.Uint32(raw[4*i:]); got != uint32(i) {
							t.Errorf("block %d wrote %d", i, got)
						}
					}
				}
				return errors.Join(graph.Close(), out.Close(), s.Close())
			}()
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func BenchmarkGPU(b *testing.B) {
	dev := openGPU(b)
	defer closeGPU(b, dev)
	s := must[*cuda.Stream](b)(dev.NewStream())
	f := kernel(b, dev, "axpy")
	y, x, _, _ := vectors(b, dev, 128)
	args := &cuda.Args{}
	grid := cuda.Grid{Blocks: [3]int{1}, Threads: [3]int{128}}
	launch := func() error {
		args.Reset()
		err := errors.Join(args.Buffer(y, 0), args.Buffer(x, 0))
		args.Float32(0)
		args.Uint32(128)
		if err != nil {
			return err
		}
		return f.Launch(s, grid, args)
	}
	graph := must[*cuda.Graph](b)(s.Capture(launch))
	host := must[*cuda.Host](b)(dev.NewHost(8192))
	buf := must[*cuda.Buffer](b)(dev.NewBuffer(8192))
	for _, c := range []struct {
		name string
		f    func() error
	}{
		{"Done", func() error { _, err := s.Done(); return err }},
		{"Launch", launch},
		{"Graph", func() error { return s.Launch(graph) }},
		{"LaunchSynchronize", func() error { return errors.Join(launch(), s.Synchronize()) }},
		{"UploadLaunchDownload8K", func() error {
			return errors.Join(s.Upload(buf, 0, host, 0, 8192), launch(), s.Download(host, 0, buf, 0, 8192), s.Synchronize())
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.f(); err != nil {
					b.Fatal(err)
				}
			}
			if err := s.Synchronize(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
