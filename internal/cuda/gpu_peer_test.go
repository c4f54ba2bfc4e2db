package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
)

// realPeers is the machine's first GPUs, each of which reaches all others, or the end of
// the test.
func realPeers(t testing.TB, n int) []*cuda.Device {
	t.Helper()
	drv, err := cuda.Load()
	if errors.Is(err, cuda.ErrNoDriver) || errors.Is(err, cuda.ErrNoDevice) {
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
			if err := a.Reach(b); err != nil {
				t.Skip(err)
			}
		}
	}
	return devs
}

// TestGPUPeers has two GPUs hand memory to and fro, in the order of events: queued, and as a
// graph of both. Copies are large, so that what is not ordered would be seen.
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

// BenchmarkGPUPeerFork is what it takes for work to go to another GPU and back, in
// microseconds, in a graph and queued: a kernel there reads memory of the first GPU and
// writes its own, as one here does meanwhile. With 1 GPU there is that one alone.
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
