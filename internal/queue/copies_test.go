//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package queue_test

import (
	"bytes"
	"errors"
	"runtime"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/queue"
)

// openLate is open for a queue that defers small copies.
func openLate(t *testing.T) (*queue.Queue, *fakedriver.Library) {
	t.Helper()
	q, lib := open(t)
	if err := q.Arrange(func(s *cuda.Stream) error {
		return s.PutOff(func(dev *cuda.Device) (*cuda.Function, error) {
			m, err := dev.Module("copies", func() ([]byte, error) { return []byte("image"), nil })
			if err != nil {
				return nil, err
			}
			return m.Function("copy_pieces")
		})
	}); err != nil {
		t.Fatal(err)
	}
	lib.Forget()
	return q, lib
}

func submit(t *testing.T, q *queue.Queue, f func(*queue.Submission) error) {
	t.Helper()
	if err := q.Submit(f); err != nil {
		t.Fatal(err)
	}
}

// alloc returns memory and its buffer.
func alloc(t *testing.T, q *queue.Queue, n int64) (m *queue.Memory, b *cuda.Buffer) {
	t.Helper()
	submit(t, q, func(sub *queue.Submission) (err error) {
		if m, err = sub.Alloc(n); err == nil {
			b, err = sub.Use(m, sub.Generation(m))
		}
		return err
	})
	return m, b
}

// TestPinnedPutOff: a block with deferred copies is not handed out, and the search for another block does not queue
// the copies. At the limit of blocks the oldest block's copies are queued and waited for.
func TestPinnedPutOff(t *testing.T) {
	q, lib := openLate(t)
	var blocks []*queue.Pinned
	for range 8 {
		p := must[*queue.Pinned](t)(q.TakePinned(100))
		for _, other := range blocks {
			if p == other {
				t.Fatal("a block whose copy is put off was handed out")
			}
		}
		blocks = append(blocks, p)
		send(t, q, p, true)
		q.GivePinned(p)
	}
	if count(lib, "kernel copy_pieces")+count(lib, "cuMemcpyHtoDAsync_v2")+count(lib, "cuEventQuery")+count(lib, "cuEventRecord") != 0 {
		t.Errorf("something was queued:\n%s", lib.Log())
	}
	if p := must[*queue.Pinned](t)(q.TakePinned(100)); p != blocks[0] {
		t.Error("not the block that has been on its way for longest")
	}
	if count(lib, "kernel copy_pieces") != 1 || count(lib, "cuEventRecord") != 8 || count(lib, "cuEventSynchronize") != 1 {
		t.Errorf("eight copies and a wait:\n%s", lib.Log())
	}
	if p := must[*queue.Pinned](t)(q.TakePinned(100)); p != blocks[1] {
		t.Error("a block whose copy is made is not handed out")
	}
}

// TestPinnedPutOffCutShort: the event of a block that returns without one is deferred with its copies; if they can't
// be queued, the block stays out of use until they are.
func TestPinnedPutOffCutShort(t *testing.T) {
	q, lib := openLate(t)
	p := must[*queue.Pinned](t)(q.TakePinned(10))
	send(t, q, p, false)
	send(t, q, p, false)
	q.GivePinned(p)
	if count(lib, "kernel copy_pieces")+count(lib, "cuEventRecord") != 0 {
		t.Errorf("something was queued:\n%s", lib.Log())
	}
	lib.State().FailIn("cuLaunchKernel", 2)
	if err := q.Synchronize(); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("Synchronize: %v", err)
	}
	other := must[*queue.Pinned](t)(q.TakePinned(10))
	if other == p {
		t.Error("a block whose copies are not made was handed out")
	}
	lib.State().FailIn("", 0)
	if err := q.Synchronize(); err != nil {
		t.Error(err)
	}
	if again := must[*queue.Pinned](t)(q.TakePinned(10)); again != p {
		t.Error("a block whose copies are made is not handed out")
	}
	q.GivePinned(p)
	q.GivePinned(other)
}

// TestMemoryPutOff: earlier copies write freed memory before the new owner's copies; the driver gets the memory after
// both.
func TestMemoryPutOff(t *testing.T) {
	q, lib := openLate(t)
	p := must[*queue.Pinned](t)(q.TakePinned(256))
	copy(p.Bytes, bytes.Repeat([]byte{1, 2, 3, 4, 5, 6, 7, 8}, 32))
	upload := func(b *cuda.Buffer, to int64, from, n int) {
		t.Helper()
		submit(t, q, func(sub *queue.Submission) error { return sub.Upload(b, to, p, from, n) })
	}
	holds := func(b *cuda.Buffer, want ...byte) {
		t.Helper()
		if err := q.Synchronize(); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		if err := b.Download(got, 0); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%x, %v; want %x", got, err, want)
		}
	}
	m, b := alloc(t, q, 64)
	kept, c := alloc(t, q, 64)
	upload(b, 0, 0, 8)
	submit(t, q, func(sub *queue.Submission) error {
		if err := sub.Do(func(s *cuda.Stream) error { return s.Copy(c, 0, b, 0, 8) }); err != nil {
			return err
		}
		return sub.Free(m)
	})
	m, again := alloc(t, q, 64)
	if again != b {
		t.Fatal("memory is not used again")
	}
	upload(again, 0, 4, 4)
	holds(again, 5, 6, 7, 8, 5, 6, 7, 8)
	holds(c, 1, 2, 3, 4, 5, 6, 7, 8)

	// Collect.
	upload(b, 0, 0, 4)
	submit(t, q, func(sub *queue.Submission) error {
		return sub.Do(func(s *cuda.Stream) error { return s.Copy(c, 4, b, 4, 4) })
	})
	upload(c, 8, 0, 4)
	lib.Forget()
	submit(t, q, func(sub *queue.Submission) error {
		if err := sub.Free(m); err != nil {
			return err
		}
		sub.Collect()
		return nil
	})
	if count(lib, "kernel copy_pieces") != 1 || count(lib, "cuMemFree_v2") != 1 {
		t.Errorf("memory went back:\n%s", lib.Log())
	}
	holds(c, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4)
	q.GivePinned(p)
	runtime.KeepAlive(kept)
}

// TestRecordingAndPutOff: a recording queues earlier deferred copies and contains its own; a replay first queues
// deferred copies.
func TestRecordingAndPutOff(t *testing.T) {
	q, lib := openLate(t)
	m, b := alloc(t, q, 1024)
	p := must[*queue.Pinned](t)(q.TakePinned(64))
	two := func() {
		t.Helper()
		submit(t, q, func(sub *queue.Submission) error {
			if err := sub.Upload(b, 0, p, 0, 64); err != nil {
				return err
			}
			return sub.Upload(b, 64, p, 0, 64)
		})
	}
	two()
	lib.Forget()
	r, err := record(q, func() error {
		return q.Submit(func(sub *queue.Submission) error {
			if err := sub.Upload(b, 0, p, 0, 64); !errors.Is(err, queue.ErrRecording) {
				t.Errorf("a copy from the host: %v", err)
			}
			return sub.Do(func(s *cuda.Stream) error { return s.Copy(b, 256, b, 0, 64) })
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	at := func(call string) int { return bytes.Index([]byte(lib.Log()), []byte(call+"\n")) }
	if k, begin, c, end := at("kernel copy_pieces"), at("cuStreamBeginCapture_v2"), at("cuMemcpyDtoDAsync_v2"), at("cuStreamEndCapture"); k < 0 || k > begin || begin > c || c > end {
		t.Errorf("recorded:\n%s", lib.Log())
	}
	two()
	lib.Forget()
	if err := r.Replay(); err != nil {
		t.Fatal(err)
	}
	if k, g := at("cuGraphExecKernelNodeSetParams"), at("cuGraphLaunch"); k < 0 || k > g {
		t.Errorf("replayed:\n%s", lib.Log())
	}
	two()
	lib.State().FailIn("cuGraphExecKernelNodeSetParams", 2)
	if err := r.Replay(); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("a replay whose copies fail: %v", err)
	}
	lib.State().FailIn("", 0)
	lib.Forget()
	if err := r.Replay(); err != nil {
		t.Fatal(err)
	}
	if k, g := at("cuGraphExecKernelNodeSetParams"), at("cuGraphLaunch"); k < 0 || k > g {
		t.Errorf("replayed after a failure:\n%s", lib.Log())
	}
	q.GivePinned(p)
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	submit(t, q, func(sub *queue.Submission) error { return sub.Free(m) })
}
