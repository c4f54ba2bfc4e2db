//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package emulated

import (
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/reftest"
)

// meeting is a kernel that tells another GPU that it is here, waits for the same, and counts.
const meeting = `.version 8.0
.target sm_90
.address_size 64
.visible .entry meet_16(.param .align 8 .b8 p[16])
{
.reg .pred %p<2>;
.reg .b32 %r<4>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [p];
ld.param.u64 %rd2, [p+8];
ld.global.u32 %r1, [%rd1+4];
add.s32 %r1, %r1, 1;
st.relaxed.sys.global.u32 [%rd2], %r1;
LOOK:
ld.relaxed.sys.global.u32 %r2, [%rd1];
setp.lt.u32 %p1, %r2, %r1;
@%p1 bra LOOK;
st.global.u32 [%rd1+4], %r1;
ret;
}
`

// errorsOf keeps what the emulator says of launches that fail.
type errorsOf struct {
	testing.TB
	said []string
}

func (e *errorsOf) Error(args ...any) { e.said = append(e.said, fmt.Sprint(args...)) }

// Kernels of two GPUs that wait for each other end, in streams and in branches of a graph; one whose
// other never comes ends with an error that names it.
func TestEmulatedTogether(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("kernels run in one goroutine")
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	lib := fakedriver.New(t)
	e := &errorsOf{TB: t}
	Execute(e, lib, 90, 4)
	drv, err := cuda.LoadFrom(lib.Path)
	check(err)
	var devs [2]*cuda.Device
	var streams [2]*cuda.Stream
	var memory [2]*cuda.Buffer
	var meet [2]*cuda.Function
	var events [2]*cuda.Event
	for i := range devs {
		devs[i], err = drv.Open(i)
		check(err)
		defer devs[i].Close()
		streams[i], err = devs[i].NewStream()
		check(err)
		memory[i], err = devs[i].NewBuffer(8)
		check(err)
		check(memory[i].Set(0, 0, 8))
		events[i], err = devs[i].NewEvent(false)
		check(err)
		m, err := devs[i].Module("meeting", func() ([]byte, error) { return []byte(meeting), nil })
		check(err)
		meet[i], err = m.Function("meet_16")
		check(err)
	}
	check(devs[0].Reach(devs[1]))
	check(devs[1].Reach(devs[0]))
	launch := func(i int) error {
		var args cuda.Args
		cuda.Struct(&args, &[2]uint64{memory[i].Address(), memory[1-i].Address()})
		args.Hold(memory[0])
		args.Hold(memory[1])
		return meet[i].Launch(streams[i], cuda.Grid{Threads: [3]int{32}}, &args)
	}
	met := func(n byte) {
		t.Helper()
		for i, b := range memory {
			check(streams[i].Synchronize())
			var got [8]byte
			check(b.Download(got[:], 0))
			if got[4] != n || len(e.said) > 0 {
				t.Fatalf("GPU %d has met %d times, not %d: %q", i, got[4], n, e.said)
			}
		}
	}
	for range 3 { // GPU 0 may have all its launches first
		check(launch(0))
	}
	for range 3 {
		check(launch(1))
	}
	met(3)
	graph, err := streams[0].Capture(func() error {
		check(streams[0].Record(events[0]))
		check(streams[1].Wait(events[0]))
		for range 2 {
			check(launch(0))
			check(launch(1))
		}
		check(streams[1].Record(events[1]))
		return streams[0].Wait(events[1])
	})
	check(err)
	check(streams[0].Launch(graph))
	check(streams[0].Launch(graph))
	met(7)
	check(launch(1))
	if err := streams[1].Synchronize(); err == nil || len(e.said) != 1 || !strings.Contains(e.said[0], "GPU 1 waits for what never comes") || !strings.Contains(e.said[0], "meet_16") {
		t.Errorf("%v, %q", err, e.said)
	}
}
