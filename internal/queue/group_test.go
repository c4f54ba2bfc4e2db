//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package queue_test

import (
	"errors"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/internal/reftest"
)

// pair opens a group of two devices, and checks for leaks at the end.
func pair(t *testing.T) (*queue.Group, *fakedriver.Library, []*cuda.Device) {
	t.Helper()
	lib := fakedriver.New(t)
	lib.State().Total = 1 << 30
	lib.State().Late = reftest.Rand(t).Uint64() | 1
	drv, err := cuda.LoadFrom(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	devs := []*cuda.Device{must[*cuda.Device](t)(drv.Open(0)), must[*cuda.Device](t)(drv.Open(1))}
	g := must[*queue.Group](t)(queue.OpenGroup(devs...))
	t.Cleanup(func() {
		if err := g.Close(); err != nil && !errors.Is(err, cuda.ErrClosed) {
			t.Error(err)
		}
		for _, d := range devs {
			if err := d.Close(); err != nil && !errors.Is(err, cuda.ErrClosed) {
				t.Error(err)
			}
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d left, %d defects", lib.Live(), lib.Defects())
		}
	})
	return g, lib, devs
}

// TestGroupOrder: work of a member begins after the work queued on the first member, and later work of the first
// member after the member's, whatever fails.
func TestGroupOrder(t *testing.T) {
	g, lib, _ := pair(t)
	if err := g.Enter(); err != nil {
		t.Fatal(err)
	}
	defer g.Leave()
	const n = 64
	_, first := alloc(t, g.Member(0), n)
	_, second := alloc(t, g.Member(1), n)
	pinned := must[*queue.Pinned](t)(g.Member(0).TakePinned(n))
	defer g.Member(0).GivePinned(pinned)
	set := func(b *cuda.Buffer, x byte) func(*cuda.Stream) error {
		return func(s *cuda.Stream) error { return s.Set(b, 0, x, n) }
	}
	turn := func(x byte) error {
		return g.Member(0).Submit(func(t *queue.Submission) error {
			err := errors.Join(
				t.Do(set(first, x)),
				t.Each(func(member int, t *queue.Submission) error {
					if member == 0 {
						return nil
					}
					return t.Do(func(s *cuda.Stream) error {
						return errors.Join(s.Copy(second, 0, first, 0, n), s.Set(first, 0, x+1, n/2))
					})
				}),
				t.Do(func(s *cuda.Stream) error { return s.Copy(first, n/2, first, 0, n/4) }),
				t.On(1, func(t *queue.Submission) error { return t.Do(set(second, x+2)) }),
				t.On(0, func(t *queue.Submission) error {
					return t.Do(func(s *cuda.Stream) error { return s.Copy(first, 3*n/4, second, 0, n/4) })
				}),
			)
			if err != nil {
				return err
			}
			return errors.Join(t.Download(pinned, 0, first, 0, n), t.Mark(pinned))
		})
	}
	check := func(x byte) {
		t.Helper()
		if err := g.Member(0).Wait(pinned); err != nil {
			t.Fatal(err)
		}
		for i, want := range []byte{x + 1, x + 1, x + 1, x + 2} {
			if at := pinned.Bytes[i*n/4]; at != want {
				t.Errorf("turn %d, quarter %d: %d, want %d", x, i, at, want)
			}
		}
	}
	for x := range byte(100) {
		if err := turn(x); err != nil {
			t.Fatal(err)
		}
		check(x)
	}
	for gpu := range 2 {
		for _, call := range []string{"cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async"} {
			lib.State().FailOn(gpu, call, 2)
			if err := turn(7); !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Errorf("%s on GPU %d: %v", call, gpu, err)
			}
			lib.State().FailIn("", 0)
			if err := turn(9); err != nil {
				t.Fatal(err)
			}
			check(9)
		}
	}
}

// TestGroupPerGPU: per-GPU work is in the order of each member, after earlier work of the first member and before its
// later work, whatever fails; no member waits between two such parts.
func TestGroupPerGPU(t *testing.T) {
	g, lib, _ := pair(t)
	if err := g.Enter(); err != nil {
		t.Fatal(err)
	}
	defer g.Leave()
	const n = 64
	var own [2]*cuda.Buffer
	for i := range own {
		_, own[i] = alloc(t, g.Member(i), n)
	}
	_, from := alloc(t, g.Member(0), n)
	pinned := must[*queue.Pinned](t)(g.Member(0).TakePinned(n))
	defer g.Member(0).GivePinned(pinned)
	none := func(int, *queue.Submission) error { return nil }
	set := func(b *cuda.Buffer, at int64, x byte) func(*cuda.Stream) error {
		return func(s *cuda.Stream) error { return s.Set(b, at, x, n/4) }
	}
	turn := func(x byte) error {
		return g.Member(0).Submit(func(t *queue.Submission) error {
			return errors.Join(
				t.Do(set(from, 0, x)),
				t.PerGPU(none, func(i int, t *queue.Submission) error { // all read the first member's results
					return t.Do(func(s *cuda.Stream) error { return s.Copy(own[i], 0, from, 0, n/4) })
				}),
				t.PerGPU(none, func(i int, t *queue.Submission) error { // in the order of each member
					return errors.Join(
						t.Do(func(s *cuda.Stream) error { return s.Copy(own[i], n/4, own[i], 0, n/4) }),
						t.Do(set(own[i], 0, x+1)),
					)
				}),
				t.Do(func(s *cuda.Stream) error { return s.Copy(from, n/4, own[1], 0, n/2) }),
				t.Each(func(i int, t *queue.Submission) error {
					return t.Do(set(from, int64(n/4*3*(1-i)), x+2+byte(i))) // 3 quarters in of member 0, the beginning of member 1
				}),
				t.Download(pinned, 0, from, 0, n),
				t.Mark(pinned),
			)
		})
	}
	check := func(x byte) {
		t.Helper()
		if err := g.Member(0).Wait(pinned); err != nil {
			t.Fatal(err)
		}
		for i, want := range []byte{x + 3, x + 1, x, x + 2} {
			if at := pinned.Bytes[i*n/4]; at != want {
				t.Errorf("turn %d, quarter %d: %d, want %d", x, i, at, want)
			}
		}
	}
	for x := range byte(50) {
		if err := turn(x); err != nil {
			t.Fatal(err)
		}
		check(x)
	}
	for gpu := range 2 {
		for _, call := range []string{"cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async"} {
			lib.State().FailOn(gpu, call, 2)
			if err := turn(7); !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Errorf("%s on GPU %d: %v", call, gpu, err)
			}
			lib.State().FailIn("", 0)
			if err := turn(9); err != nil {
				t.Fatal(err)
			}
			check(9)
		}
	}

	// One fork and one join for any number of parts, and nothing if one can't get ready.
	failure := errors.New("a failure")
	lib.Forget()
	if err := g.Member(0).Submit(func(sub *queue.Submission) error {
		if err := sub.PerGPU(func(i int, _ *queue.Submission) error {
			if i == 0 {
				return failure
			}
			return nil
		}, func(int, *queue.Submission) error { t.Error("queued"); return nil }); !errors.Is(err, failure) {
			t.Errorf("PerGPU: %v", err)
		}
		for range 5 {
			if err := sub.PerGPU(none, func(i int, sub *queue.Submission) error { return sub.Do(set(own[i], 0, 1)) }); err != nil {
				return err
			}
		}
		return sub.Do(set(from, 0, 1))
	}); err != nil {
		t.Fatal(err)
	}
	if log := lib.Log(); strings.Count(log, "cuStreamWaitEvent") != 2 || strings.Count(log, "cuMemsetD8Async") != 11 {
		t.Errorf("calls: %s", log)
	}

	// A recording begins and ends on all members, also a failing one.
	record := func(failure error) (*queue.Recording, error) {
		return g.Record(func() error {
			return errors.Join(g.Member(0).Submit(func(sub *queue.Submission) error {
				return sub.PerGPU(none, func(i int, sub *queue.Submission) error { return sub.Do(set(own[i], 0, byte(40+i))) })
			}), failure)
		})
	}
	if _, err := record(failure); !errors.Is(err, failure) {
		t.Errorf("Record: %v", err)
	}
	r, err := record(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := errors.Join(turn(3), r.Replay(), g.Synchronize()); err != nil {
		t.Fatal(err)
	}
	for i := range own {
		got := make([]byte, n)
		if err := own[i].Download(got, 0); err != nil || got[0] != byte(40+i) {
			t.Errorf("member %d: %d, %v", i, got[0], err)
		}
	}
}

// TestGroupRecording: a recording has the work of each member; a replay queues all of it or, if a member can't,
// nothing.
func TestGroupRecording(t *testing.T) {
	g, lib, _ := pair(t)
	if err := g.Enter(); err != nil {
		t.Fatal(err)
	}
	defer g.Leave()
	var memory [2]*queue.Memory
	var from, to [2]*cuda.Buffer
	for i := range g.Len() {
		_, from[i] = alloc(t, g.Member(i), 64)
		memory[i], to[i] = alloc(t, g.Member(i), 64)
	}
	copies := func() error {
		return g.Member(0).Submit(func(sub *queue.Submission) error {
			return sub.Each(func(i int, sub *queue.Submission) error {
				if _, err := sub.Use(memory[i], sub.Generation(memory[i])); err != nil { // the recording keeps the memory
					return err
				}
				if !sub.Recording() {
					t.Errorf("member %d records nothing", i)
				}
				return sub.Do(func(s *cuda.Stream) error { return s.Copy(to[i], 0, from[1-i], 0, 64) })
			})
		})
	}
	r, err := g.Record(copies)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	launched := func(want int) {
		t.Helper()
		if n := strings.Count(lib.Log(), "cuGraphLaunch"); n != want {
			t.Errorf("%d graphs were launched, want %d", n, want)
		}
	}
	lib.Forget()
	if err := r.Replay(); err != nil {
		t.Fatal(err)
	}
	launched(1)
	for i := range g.Len() {
		if err := from[i].Set(0, byte(5+i), 64); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(r.Replay(), g.Synchronize()); err != nil {
		t.Fatal(err)
	}
	for i := range g.Len() {
		got := make([]byte, 64)
		if err := to[i].Download(got, 0); err != nil || got[0] != byte(6-i) {
			t.Errorf("member %d: %d, %v", i, got[0], err)
		}
	}

	// A failure leaves no member recording.
	failure := errors.New("a failure")
	if _, err := g.Record(func() error { return errors.Join(copies(), failure) }); !errors.Is(err, failure) {
		t.Errorf("Record: %v", err)
	}
	for i := range g.Len() {
		if err := g.Member(i).Submit(func(sub *queue.Submission) error {
			if sub.Recording() {
				t.Errorf("member %d still records", i)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	if _, err := g.Record(func() error { _, err := g.Record(copies); return err }); !errors.Is(err, queue.ErrRecording) {
		t.Errorf("a recording within another: %v", err)
	}

	// Freed memory of the second member stops the first one as well.
	if err := g.Member(1).Submit(func(sub *queue.Submission) error { return sub.Free(memory[1]) }); err != nil {
		t.Fatal(err)
	}
	lib.Forget()
	if err := r.Replay(); !errors.Is(err, queue.ErrFreed) {
		t.Errorf("Replay: %v", err)
	}
	launched(0)
}

// TestGroupClose: a group with a closed member refuses calls, and closes the rest.
func TestGroupClose(t *testing.T) {
	g, _, _ := pair(t)
	if g.Len() != 2 || g.Closed() {
		t.Errorf("%d members, closed: %v", g.Len(), g.Closed())
	}
	if err := g.Member(1).Close(); err != nil {
		t.Fatal(err)
	}
	if err := g.Enter(); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("Enter: %v", err)
	}
	if err := g.Close(); err != nil || !g.Member(0).Closed() {
		t.Errorf("Close: %v", err) // waits for no one: Enter has released the first member
	}
	if err := g.Close(); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("second Close: %v", err)
	}
}

// TestGroupOpen: a failed open leaves nothing.
func TestGroupOpen(t *testing.T) {
	_, lib, devs := pair(t)
	for _, call := range []string{"cuStreamCreate", "cuEventCreate"} {
		for gpu := range devs {
			lib.State().FailOn(gpu, call, 2)
			if _, err := queue.OpenGroup(devs...); !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Errorf("OpenGroup, %s on GPU %d: %v", call, gpu, err)
			}
		}
	}
	lib.State().FailIn("", 0)
}
