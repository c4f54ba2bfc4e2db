package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
)

// realPeers returns the machine's first GPUs, each of which reaches all others, or skips the test.
func realPeers(t testing.TB, n int) []*cuda.Device {
	t.Helper()
	drv, err := cuda.Load()
	if errors.Is(err, cuda.ErrNoDevice) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	var devs []*cuda.Device
	for i := range n {
		d, err := drv.Open(i)
		if errors.Is(err, cuda.ErrNoDevice) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		devs = append(devs, d)
	}
	for _, a := range devs {
		for _, b := range devs {
			if a == b {
				continue
			}
			err := a.Reach(b)
			if errors.Is(err, cuda.ErrNoPeerAccess) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return devs
}

// TestGPUPeers: two GPUs exchange memory in the order of events, queued and as a graph of both. Copies are large, so
// that a missing order would show.
func TestGPUPeers(t *testing.T) {
	devs := realPeers(t, 2)
	a, b := devs[0], devs[1]
	const n = 64 << 20
	sa, sb := must[*cuda.Stream](t)(a.NewStream()), must[*cuda.Stream](t)(b.NewStream())
	fork, join := must[*cuda.Event](t)(a.NewEvent(false)), must[*cuda.Event](t)(b.NewEvent(false))
	x, y, z := must[*cuda.Buffer](t)(a.NewBuffer(n)), must[*cuda.Buffer](t)(b.NewBuffer(n)), must[*cuda.Buffer](t)(a.NewBuffer(n))
	host := must[*cuda.Host](t)(a.NewHost(n))
	work := func() error {
		return errors.Join(sa.Copy(x, 0, z, 0, n), sa.Record(fork), sb.Wait(fork), sb.Copy(y, 0, x, 0, n),
			sb.Record(join), sa.Wait(join), sa.Set(x, 0, 0, n), sa.Copy(x, 0, y, 0, n))
	}
	graph := must[*cuda.Graph](t)(sa.Capture(work))
	for i := range byte(10) {
		for way, do := range map[string]func() error{"queued": work, "graph": func() error { return sa.Launch(graph) }} {
			value := 2*i + 1
			if way == "graph" {
				value++
			}
			if err := errors.Join(sa.Set(z, 0, value, n), do(), sa.Download(host, 0, x, 0, n), sa.Synchronize()); err != nil {
				t.Fatalf("%s: %v", way, err)
			}
			if want := bytes.Repeat([]byte{value}, n); !bytes.Equal(host.Bytes(), want) {
				t.Fatalf("%s, turn %d: it holds %d, want %d", way, i, host.Bytes()[n-1], value)
			}
		}
	}
	// From the host to a peer's memory, by a stream of this GPU, and back.
	copy(host.Bytes(), bytes.Repeat([]byte{77}, n))
	if err := errors.Join(sa.Upload(y, 0, host, 0, n), sa.Set(x, 0, 1, n), sa.Synchronize()); err != nil {
		t.Fatal(err)
	}
	clear(host.Bytes())
	if err := errors.Join(sa.Download(host, 0, y, 0, n), sa.Synchronize()); err != nil || host.Bytes()[0] != 77 || host.Bytes()[n-1] != 77 {
		t.Errorf("host to peer and back: %d, %v", host.Bytes()[0], err)
	}
}

// BenchmarkGPUPeerFork measures how long work takes to another GPU and back, in microseconds, in a graph and queued:
// a kernel there reads memory of the first GPU and writes its own memory, as a kernel here does meanwhile. With 1 GPU
// that GPU works alone.
func BenchmarkGPUPeerFork(b *testing.B) {
	const turns = 64
	for n := 1; n <= 4; n *= 2 {
		b.Run(fmt.Sprintf("gpus=%d", n), func(b *testing.B) {
			devs := realPeers(b, n)
			var streams []*cuda.Stream
			var joins []*cuda.Event
			var memory []*cuda.Buffer
			for _, d := range devs {
				streams = append(streams, must[*cuda.Stream](b)(d.NewStream()))
				joins = append(joins, must[*cuda.Event](b)(d.NewEvent(false)))
				memory = append(memory, must[*cuda.Buffer](b)(d.NewBuffer(256)))
			}
			fork := must[*cuda.Event](b)(devs[0].NewEvent(false))
			lead := streams[0]
			launch := func(i int) error {
				var a cuda.Args
				if err := errors.Join(a.Buffer(memory[i], 0), a.Buffer(memory[0], 128)); err != nil {
					return err
				}
				a.Float32(1)
				a.Uint32(1)
				return kernel(b, devs[i], "axpy").Launch(streams[i], cuda.Grid{Threads: [3]int{32}}, &a)
			}
			for i := range devs { // the kernels are there
				if err := launch(i); err != nil {
					b.Fatal(err)
				}
			}
			work := func() error {
				for range turns {
					if err := lead.Record(fork); err != nil {
						return err
					}
					for i, s := range streams[1:] {
						if err := errors.Join(s.Wait(fork), launch(i+1), s.Record(joins[i+1])); err != nil {
							return err
						}
					}
					if err := launch(0); err != nil {
						return err
					}
					for _, e := range joins[1:] {
						if err := lead.Wait(e); err != nil {
							return err
						}
					}
				}
				return nil
			}
			graph := must[*cuda.Graph](b)(lead.Capture(work))
			for name, do := range map[string]func() error{"graph": func() error { return lead.Launch(graph) }, "queued": work} {
				best := time.Hour
				for range 50 {
					if err := lead.Synchronize(); err != nil {
						b.Fatal(err)
					}
					begin := time.Now()
					if err := errors.Join(do(), lead.Synchronize()); err != nil {
						b.Fatal(err)
					}
					best = min(best, time.Since(begin))
				}
				b.ReportMetric(float64(best.Nanoseconds())/1e3/turns, "us-"+name)
			}
		})
	}
}

// flags are kernels of one thread. signal tells the other GPU that what is before it is done,
// by a number in its memory; await waits for the next number here, for some seconds at most.
// own is the number from the other GPU, how many were awaited, and how many were told.
const flags = `
.version 7.0
.target sm_80
.address_size 64

.visible .entry signal(.param .u64 ppeer, .param .u64 pown)
{
	.reg .b32 %n;
	.reg .b64 %peer, %own;
	ld.param.u64 %peer, [ppeer];
	ld.param.u64 %own, [pown];
	ld.global.u32 %n, [%own+8];
	add.u32 %n, %n, 1;
	st.global.u32 [%own+8], %n;
	fence.acq_rel.sys;
	st.relaxed.sys.global.u32 [%peer], %n;
	ret;
}

.visible .entry await(.param .u64 pown)
{
	.reg .pred %p;
	.reg .b32 %n, %x, %turn;
	.reg .b64 %own;
	ld.param.u64 %own, [pown];
	ld.global.u32 %n, [%own+4];
	add.u32 %n, %n, 1;
	st.global.u32 [%own+4], %n;
	mov.u32 %turn, 0;
look:
	ld.relaxed.sys.global.u32 %x, [%own];
	setp.ge.u32 %p, %x, %n;
	@%p bra done;
	add.u32 %turn, %turn, 1;
	setp.lt.u32 %p, %turn, 4000000;
	@%p bra look;
	trap;
done:
	fence.acq_rel.sys;
	ret;
}
`

// BenchmarkGPUPeerFlags is BenchmarkGPUPeerFork of two GPUs with a graph on each: kernels tell
// each other that they are done, instead of events.
func BenchmarkGPUPeerFlags(b *testing.B) {
	const turns = 64
	devs := realPeers(b, 2)
	var streams []*cuda.Stream
	var memory, own []*cuda.Buffer
	for _, d := range devs {
		streams = append(streams, must[*cuda.Stream](b)(d.NewStream()))
		memory = append(memory, must[*cuda.Buffer](b)(d.NewBuffer(256)))
		own = append(own, must[*cuda.Buffer](b)(d.NewBuffer(256)))
		if err := own[len(own)-1].Set(0, 0, 256); err != nil {
			b.Fatal(err)
		}
	}
	launch := func(i int, name string, buffers ...*cuda.Buffer) error {
		var a cuda.Args
		for _, x := range buffers {
			if err := a.Buffer(x, 0); err != nil {
				return err
			}
		}
		m, err := devs[i].Module("flags", func() ([]byte, error) { return []byte(flags), nil })
		if name == "axpy" {
			m, err = devs[i].Module("kernels", ptx)
			a.Float32(1)
			a.Uint32(1)
		}
		if err != nil {
			return err
		}
		f, err := m.Function(name)
		if err != nil {
			return err
		}
		return f.Launch(streams[i], cuda.Grid{Threads: [3]int{1}}, &a)
	}
	work := [2]func() error{
		func() error {
			return errors.Join(launch(0, "signal", own[1], own[0]), launch(0, "axpy", memory[0], memory[0]), launch(0, "await", own[0]))
		},
		func() error {
			return errors.Join(launch(1, "await", own[1]), launch(1, "axpy", memory[1], memory[0]), launch(1, "signal", own[0], own[1]))
		},
	}
	var graphs []*cuda.Graph
	for i, s := range streams {
		if err := launch(i, "axpy", memory[i], memory[i]); err != nil { // the kernels are there
			b.Fatal(err)
		}
		graphs = append(graphs, must[*cuda.Graph](b)(s.Capture(func() error {
			for range turns {
				if err := work[i](); err != nil {
					return err
				}
			}
			return nil
		})))
	}
	best := time.Hour
	for range 50 {
		begin := time.Now()
		for i, s := range streams {
			if err := s.Launch(graphs[i]); err != nil {
				b.Fatal(err)
			}
		}
		for _, s := range streams {
			if err := s.Synchronize(); err != nil {
				b.Fatal(err)
			}
		}
		best = min(best, time.Since(begin))
	}
	b.ReportMetric(float64(best.Nanoseconds())/1e3/turns, "us-graphs")
}
