package gpu_test

import (
	"bytes"
	"fmt"
	"testing"

	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPUCopies(t *testing.T) {
	testCopies(t, enginetest.Real(t), enginetest.OrShort(500, 50), 64<<10)
}

// testCopies: copies that a kernel makes are those that were asked for, and no other
// byte is written. A graph makes them before anything else, and those of one launch alone.
func testCopies(t *testing.T, m *enginetest.Device, rounds, most int) {
	rng := reftest.Rand(t)
	if _, err := gpu.Image("copies", m.Dev.Info().Capability); err != nil {
		t.Fatal(err) // all would pass without the kernel
	}
	s, err := m.Dev.NewStream()
	enginetest.NoError(t, err)
	enginetest.NoError(t, gpu.PutOffCopies(s))
	size := 4 * most
	b, err := m.Dev.NewBuffer(int64(size))
	enginetest.NoError(t, err)
	h, err := m.Dev.NewHost(size)
	enginetest.NoError(t, err)
	e, err := m.Dev.NewEvent(false)
	enginetest.NoError(t, err)
	want := make([]byte, size)
	for i := range want {
		want[i] = byte(rng.Uint32())
	}
	enginetest.NoError(t, b.Upload(0, want))
	got := make([]byte, size)
	const seen = 1024 // bytes that the graph looks at
	sight, err := m.Dev.NewBuffer(seen)
	enginetest.NoError(t, err)
	graph, err := s.Capture(func() error { return s.Copy(sight, 0, b, 0, seen) })
	enginetest.NoError(t, err)
	for round := range rounds {
		for i := range h.Bytes() {
			h.Bytes()[i] = byte(rng.Uint32())
		}
		all := ""
		for range 2 + rng.IntN(9) {
			align := enginetest.Pick(rng, 4, 4, 8, 16, 16, 16, 256)
			n := 4 * (1 + rng.IntN(enginetest.Pick(rng, 5, 64, most/4)))
			if rng.IntN(2) == 0 {
				n = enginetest.Pick(rng, 4, 16, 4080, 4092, 4096, 4100, 4112, 8192, most)
			}
			place := func() int { return rng.IntN((size-n)/align+1) * align }
			to, from := place(), place()
			if rng.IntN(3) == 0 {
				from += 4 * rng.IntN(min(4, (size-n-from)/4+1)) // another alignment
			}
			if rng.IntN(2) == 0 {
				enginetest.NoError(t, s.Upload(b, int64(to), h, from, n))
				copy(want[to:][:n], h.Bytes()[from:])
			} else if to+n <= from || from+n <= to {
				enginetest.NoError(t, s.Copy(b, int64(to), b, int64(from), int64(n)))
				copy(want[to:][:n], want[from:][:n])
			}
			all += fmt.Sprintf(" %d:%d:%d", to, from, n)
		}
		enginetest.NoError(t, s.Record(e))
		if rng.IntN(2) == 0 {
			enginetest.NoError(t, s.Launch(graph))
			enginetest.NoError(t, e.Synchronize())
			enginetest.NoError(t, sight.Download(got[:seen], 0))
			if !bytes.Equal(got[:seen], want[:seen]) {
				t.Fatalf("round %d: copies to, from, bytes%s: the graph has seen others", round, all)
			}
			for i := range h.Bytes() {
				h.Bytes()[i] = byte(rng.Uint32())
			}
			enginetest.NoError(t, s.Launch(graph))
			enginetest.NoError(t, s.Synchronize())
		}
		enginetest.NoError(t, e.Synchronize())
		enginetest.NoError(t, b.Download(got, 0))
		if !bytes.Equal(got, want) {
			t.Fatalf("round %d: copies to, from, bytes%s: other bytes", round, all)
		}
	}
	for _, x := range []interface{ Close() error }{graph, s, b, sight, h, e} {
		enginetest.NoError(t, x.Close())
	}
}
