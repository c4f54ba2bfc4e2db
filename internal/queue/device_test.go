//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package queue_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/queue"
)

// open opens a queue on the fake driver, and checks for leaks at the end.
func open(t *testing.T) (*queue.Queue, *fakedriver.Library) {
	t.Helper()
	lib := fakedriver.New(t)
	lib.State().Total = 1 << 30
	drv, err := cuda.LoadFrom(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	dev, err := drv.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	g, err := queue.OpenGroup(dev)
	if err != nil {
		t.Fatal(err)
	}
	q := g.Member(0)
	groups.Store(q, g)
	t.Cleanup(func() {
		groups.Delete(q)
		if err := errors.Join(g.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d left, %d defects", lib.Live(), lib.Defects())
		}
		if err := q.Enter(); !errors.Is(err, cuda.ErrClosed) {
			t.Errorf("Enter after Close: %v", err)
		}
		if err := g.Close(); !errors.Is(err, cuda.ErrClosed) {
			t.Errorf("second Close: %v", err)
		}
	})
	if err := q.Enter(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(q.Leave)
	return q, lib
}

// groups has the group of each queue of open.
var groups sync.Map

// record makes a recording of a group of one.
func record(q *queue.Queue, f func() error) (*queue.Recording, error) {
	g, _ := groups.Load(q)
	return g.(*queue.Group).Record(f)
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func count(lib *fakedriver.Library, call string) int {
	return strings.Count("\n"+lib.Log(), "\n"+call+"\n")
}

// send queues a copy of p, with or without its event.
func send(t *testing.T, q *queue.Queue, p *queue.Pinned, mark bool) {
	t.Helper()
	if err := q.Submit(func(sub *queue.Submission) error {
		m, err := sub.Alloc(64)
		if err != nil {
			return err
		}
		b, err := sub.Use(m, sub.Generation(m))
		if err != nil {
			return err
		}
		if err := sub.Upload(b, 0, p, 0, 64); err != nil || !mark {
			return err
		}
		return sub.Mark(p)
	}); err != nil {
		t.Fatal(err)
	}
}

// TestCheck: among several failures after a wait, a rank's failure comes first.
func TestCheck(t *testing.T) {
	q, _ := open(t)
	other, rank := errors.New("another"), fmt.Errorf("rank 1: %w", queue.ErrRank)
	var failed [2]error
	var stop [2]func()
	for i := range failed {
		stop[i] = q.Check(func() error { return failed[i] })
	}
	for _, c := range []struct{ first, second, want error }{{nil, nil, nil}, {other, nil, other}, {nil, other, other}, {other, rank, rank}, {rank, other, rank}} {
		failed = [2]error{c.first, c.second}
		if err := q.Synchronize(); err != c.want {
			t.Errorf("%v and %v: %v", c.first, c.second, err)
		}
	}
	failed = [2]error{rank, other}
	stop[0]()
	if err := q.Synchronize(); err != other {
		t.Errorf("one has stopped: %v", err)
	}
	stop[1]()
	stop[1]()
	if err := q.Synchronize(); err != nil {
		t.Errorf("all have stopped: %v", err)
	}
}

// TestPinned: pinned memory in use is not handed out; at the limit of blocks the block with the oldest copies is
// waited for.
func TestPinned(t *testing.T) {
	q, lib := open(t)
	take := func(n int) *queue.Pinned { t.Helper(); return must[*queue.Pinned](t)(q.TakePinned(n)) }
	p := take(100)
	q.GivePinned(p) // no copy uses p
	if again := take(100); again != p {
		t.Error("a block that is not in use is not used again")
	}
	send(t, q, p, true)
	q.GivePinned(p)
	if again := take(100); again != p {
		t.Error("a block whose copies are done is not used again")
	}
	lib.State().Busy = 1 // the GPU makes no progress
	send(t, q, p, true)
	q.GivePinned(p)
	blocks := []*queue.Pinned{p}
	for range 7 {
		b := take(100)
		for _, other := range blocks {
			if b == other {
				t.Fatal("a block that a copy uses was handed out")
			}
		}
		blocks = append(blocks, b)
	}
	for _, b := range blocks[1:] {
		send(t, q, b, true)
		q.GivePinned(b)
	}
	if n := count(lib, "cuEventSynchronize"); n != 0 {
		t.Fatalf("%d waits", n)
	}
	for _, want := range blocks[:3] {
		if b := take(100); b != want {
			t.Error("not the block that has been on its way for longest")
		} else {
			send(t, q, b, true)
			q.GivePinned(b)
		}
	}
	if n := count(lib, "cuEventSynchronize"); n != 3 {
		t.Errorf("%d waits for three blocks", n)
	}
	// A larger block replaces the oldest one.
	big := take(1 << 20)
	if n := count(lib, "cuMemFreeHost"); n != 1 || len(big.Bytes) < 1<<20 {
		t.Errorf("%d blocks given up for one of %d bytes", n, len(big.Bytes))
	}
	if n := count(lib, "cuMemHostAlloc"); n != 9 {
		t.Errorf("%d blocks were made", n)
	}
	q.GivePinned(big)
}

// TestPinnedCutShort: a block whose copies failed, so that no event covers them, is waited for as well; if the driver
// returns an error, the block is not handed out again.
func TestPinnedCutShort(t *testing.T) {
	q, lib := open(t)
	p := must[*queue.Pinned](t)(q.TakePinned(10))
	send(t, q, p, false)
	q.GivePinned(p)
	if n := count(lib, "cuEventRecord"); n != 1 {
		t.Errorf("%d events", n)
	}
	p = must[*queue.Pinned](t)(q.TakePinned(10))
	send(t, q, p, false)
	lib.State().FailIn("cuEventRecord", 1)
	q.GivePinned(p)
	if n := count(lib, "cuStreamSynchronize"); n != 1 {
		t.Errorf("%d waits for the stream", n)
	}
	again := must[*queue.Pinned](t)(q.TakePinned(10))
	if again != p {
		t.Error("a block that was waited for is not used again")
	}
	send(t, q, p, false)
	lib.State().FailIn("cuEventRecord", 1)
	at := lib.State().Calls
	lib.State().FailAt = at + 5 // push, record, pop, push, synchronize
	q.GivePinned(p)
	lib.State().FailIn("", 0)
	lib.State().FailAt = 0
	if must[*queue.Pinned](t)(q.TakePinned(10)) == p {
		t.Error("a block whose copies nobody knows of was handed out")
	}
}

// TestMemory: memory is reused without the driver, within a size class.
func TestMemory(t *testing.T) {
	q, lib := open(t)
	for _, n := range []int64{1, 255, 256, 257, 1024, 1025, 1280, 1281, 5000, 1 << 20, 1<<20 + 1, 12345678} {
		if err := q.Submit(func(sub *queue.Submission) error {
			m, err := sub.Alloc(n)
			if err != nil {
				return err
			}
			b, err := sub.Use(m, sub.Generation(m))
			if err != nil {
				return err
			}
			if b.Len() < n || b.Len() > max(256, n+n/4+256) || b.Len()%256 != 0 {
				t.Errorf("%d bytes for %d", b.Len(), n)
			}
			if err := sub.Free(m); err != nil {
				return err
			}
			if err := sub.Free(m); !errors.Is(err, queue.ErrFreed) {
				t.Errorf("second Free: %v", err)
			}
			if _, err := sub.Use(m, sub.Generation(m)); !errors.Is(err, queue.ErrFreed) {
				t.Errorf("Use after Free: %v", err)
			}
			calls := lib.State().Calls
			again, err := sub.Alloc(b.Len())
			if err != nil {
				return err
			}
			if c, err := sub.Use(again, 0); err != nil || c != b || lib.State().Calls != calls {
				t.Errorf("%d bytes are not used again: %v", n, err)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSlot: a slot returns the same memory at every run, except memory of the node's inputs.
func TestSlot(t *testing.T) {
	q, _ := open(t)
	var s queue.Slot
	if err := q.Submit(func(sub *queue.Submission) error {
		next := func(n int64, inputs ...*queue.Memory) *queue.Memory {
			return must[*queue.Memory](t)(sub.Next(&s, n, inputs...))
		}
		a := next(1000)
		old := sub.Generation(a)
		if b := next(1000); b != a {
			t.Error("other memory at the second run")
		}
		if _, err := sub.Use(a, old); !errors.Is(err, queue.ErrOverwritten) {
			t.Errorf("the old value: %v", err)
		}
		b := next(1000, a)
		if b == a {
			t.Error("an input is overwritten")
		}
		if _, err := sub.Use(a, sub.Generation(a)); err != nil {
			t.Errorf("the input: %v", err)
		}
		if c := next(1000, b); c != a {
			t.Error("a third memory where two do")
		}
		if err := sub.Free(a); err != nil {
			return err
		}
		if c := next(1000, b); c == a {
			t.Error("freed memory")
		}
		if c := next(100_000); c == a || c == b {
			t.Error("memory of another size")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestOtherQueue: memory of one queue is refused by another.
func TestOtherQueue(t *testing.T) {
	q, lib := open(t)
	drv, err := cuda.LoadFrom(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	dev, err := drv.Open(1)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	single, err := queue.OpenGroup(dev)
	if err != nil {
		t.Fatal(err)
	}
	other := single.Member(0)
	var m *queue.Memory
	if err := q.Submit(func(sub *queue.Submission) error { m, err = sub.Alloc(1); return err }); err != nil {
		t.Fatal(err)
	}
	err = other.Submit(func(sub *queue.Submission) error {
		if err := sub.Free(m); !errors.Is(err, queue.ErrOtherQueue) {
			t.Errorf("Free: %v", err)
		}
		_, err := sub.Use(m, 0)
		return err
	})
	if !errors.Is(err, queue.ErrOtherQueue) {
		t.Errorf("Use: %v", err)
	}
}

// late is deferred work, and a record of its calls.
type late struct {
	name    string
	to      *[]string
	queue   error
	uploads error
}

func (l *late) note(what string) { *l.to = append(*l.to, l.name+" "+what) }

func (l *late) Queue(*cuda.Stream) error { l.note("queued"); return l.queue }
func (l *late) Upload() error            { l.note("uploaded"); return l.uploads }
func (l *late) Close() error             { l.note("closed"); return nil }

// TestRecordingPutsOff: work that a recording defers is queued before later work, uploaded after the capture, and
// closed with the recording or its failure.
func TestRecordingPutsOff(t *testing.T) {
	failure := errors.New("a failure")
	for _, c := range []struct {
		name           string
		queue, uploads error
		run            error
		want           string
	}{
		{name: "all is well", want: "b put off, a queued, other work, b queued, a uploaded, b uploaded, recorded, a closed, b closed"},
		{name: "the first can't be queued", queue: failure, want: "b put off, a queued, a closed"},
		{name: "the second can't be uploaded", uploads: failure, want: "b put off, a queued, other work, b queued, a uploaded, b uploaded, a closed, b closed"},
		{name: "the run fails", run: failure, want: "b put off, a queued, other work, a closed, b closed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			q, _ := open(t)
			var got []string
			a, b := &late{name: "a", to: &got, queue: c.queue}, &late{name: "b", to: &got, uploads: c.uploads}
			r, err := record(q, func() error {
				if err := q.Submit(func(sub *queue.Submission) error {
					if sub.Deferred() != nil {
						t.Error("something is put off from the start")
					}
					return sub.PutOff(a)
				}); err != nil {
					return err
				}
				if err := q.Submit(func(sub *queue.Submission) error {
					if sub.Deferred() != queue.Deferred(a) {
						t.Error("what was put off can't be found")
					}
					got = append(got, "b put off")
					if err := sub.PutOff(b); err != nil {
						return err
					}
					got = append(got, "other work")
					return nil
				}); err != nil {
					return err
				}
				return c.run
			})
			if first := errors.Join(c.queue, c.uploads, c.run); (err != nil) != (first != nil) || err != nil && !errors.Is(err, failure) {
				t.Fatalf("Record: %v, want %v", err, first)
			}
			if err == nil {
				got = append(got, "recorded")
				if err := r.Close(); err != nil {
					t.Error(err)
				}
			}
			if s := strings.Join(got, ", "); s != c.want {
				t.Errorf("%s; want %s", s, c.want)
			}
			// Without a recording nothing is deferred.
			if err := q.Submit(func(sub *queue.Submission) error {
				if sub.Deferred() != nil {
					t.Error("something is put off without a recording")
				}
				return sub.Do(func(*cuda.Stream) error { return nil })
			}); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestRecordingReplaces: deferred work may be replaced by work that contains it.
func TestRecordingReplaces(t *testing.T) {
	q, _ := open(t)
	var got []string
	a, b := &late{name: "a", to: &got}, &late{name: "b", to: &got}
	r, err := record(q, func() error {
		return q.Submit(func(sub *queue.Submission) error {
			if err := sub.PutOff(a); err != nil {
				return err
			}
			sub.Replace(b)
			if sub.Deferred() != queue.Deferred(b) {
				t.Error("what was put off has not been replaced")
			}
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if s, want := strings.Join(got, ", "), "b queued, b uploaded, b closed"; s != want {
		t.Errorf("%s; want %s", s, want)
	}
}
