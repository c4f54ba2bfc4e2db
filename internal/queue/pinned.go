package queue

import (
	"fmt"
	"math/bits"

	"gorgonia.org/leanattention/internal/cuda"
)

// Pinned is a block of pinned host memory for copies to or from the GPU. The caller owns the block from TakePinned to
// GivePinned.
type Pinned struct {
	Bytes  []byte
	host   *cuda.Host
	done   *cuda.Event // after the last copy
	queued bool        // copies may be running
	marked bool        // done is after all copies
}

const (
	smallestPinned = 1 << 16
	// mostPinned is the number of blocks from which on TakePinned waits for a block in use.
	mostPinned = 8
)

// TakePinned returns a block of at least n bytes that no copy uses. TakePinned needs Enter.
func (q *Queue) TakePinned(n int) (*Pinned, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, p := range q.pinned {
		if len(p.Bytes) < n {
			continue
		}
		if done, err := p.passed(); err != nil {
			return nil, err
		} else if done {
			return q.takeAt(i), nil
		}
	}
	if q.made < mostPinned || len(q.pinned) == 0 {
		return q.newPinned(n)
	}
	// The block with the oldest copies; of the right size if there is one.
	oldest := 0
	for i, p := range q.pinned {
		if len(p.Bytes) >= n {
			oldest = i
			break
		}
	}
	if err := q.waits(q.pinned[oldest].wait); err != nil {
		return nil, err
	}
	p := q.takeAt(oldest)
	if len(p.Bytes) >= n {
		return p, nil
	}
	q.drop(p)
	return q.newPinned(n)
}

func (q *Queue) takeAt(i int) *Pinned {
	p := q.pinned[i]
	q.pinned = append(q.pinned[:i], q.pinned[i+1:]...)
	return p
}

func (q *Queue) newPinned(n int) (*Pinned, error) {
	size := max(smallestPinned, 1<<bits.Len(uint(n-1)))
	h, err := q.dev.NewHost(size)
	if err != nil {
		return nil, err
	}
	e, err := q.dev.NewEvent(false)
	if err != nil {
		_ = h.Close() // the first error has more detail
		return nil, err
	}
	q.made++
	return &Pinned{Bytes: h.Bytes(), host: h, done: e}, nil
}

func (q *Queue) drop(p *Pinned) {
	q.made--
	_, _ = p.host.Close(), p.done.Close() // both count as closed whatever the driver returns
	p.Bytes = nil
}

// passed reports whether no copy uses p any more.
func (p *Pinned) passed() (bool, error) {
	if !p.queued {
		return true, nil
	}
	if p.done.IsPutOff() { // more copies may come, to be queued together with those of p
		return false, nil
	}
	done, err := p.done.Done()
	p.queued = !done || err != nil
	return done, err
}

// wait waits until no copy uses p.
func (p *Pinned) wait() error {
	if !p.queued {
		return nil
	}
	if err := p.done.Synchronize(); err != nil {
		return err
	}
	p.queued = false
	return nil
}

// Wait waits for the queued copies of p. Wait needs Enter.
func (q *Queue) Wait(p *Pinned) error { return q.waits(p.wait) }

// GivePinned returns p to the queue. GivePinned needs Enter. If copies of p are running, and no event shows their
// end, p is unused until the device is closed.
func (q *Queue) GivePinned(p *Pinned) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if p.queued && !p.marked && (*Submission)(q).Mark(p) != nil {
		if q.stream.Synchronize() != nil {
			q.made--
			return
		}
		p.queued = false
	}
	q.pinned = append(q.pinned, p)
}

// Upload queues a copy of n bytes of p to dst.
func (t *Submission) Upload(dst *cuda.Buffer, to int64, p *Pinned, from, n int) error {
	if t.recording != nil {
		return fmt.Errorf("a copy from the host: %w", ErrRecording)
	}
	if err := t.together(); err != nil {
		return err
	}
	p.queued, p.marked = true, false
	return t.stream.Upload(dst, to, p.host, from, n)
}

// Download queues a copy of n bytes of src to p.
func (t *Submission) Download(p *Pinned, to int, src *cuda.Buffer, from int64, n int) error {
	if t.recording != nil {
		return fmt.Errorf("a copy to the host: %w", ErrRecording)
	}
	if err := t.together(); err != nil {
		return err
	}
	p.queued, p.marked = true, false
	return t.stream.Download(p.host, to, src, from, n)
}

// Mark ends the copies of p that are queued together.
func (t *Submission) Mark(p *Pinned) error {
	if err := t.stream.Record(p.done); err != nil {
		return err
	}
	p.marked = true
	return nil
}
