package rendezvous

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// outcome is a rank's result of a job: of Join, a barrier and Close.
type outcome struct {
	err error
	met bool // Join has succeeded
}

var jobs atomic.Int32

// jobName returns a name that no other job has. All names are of the same length.
func jobName() string { return fmt.Sprintf("%010d %06d", os.Getpid(), jobs.Add(1)) }

// job makes ranks join, come to a barrier and leave. Rank 1 is behind a proxy.
func job(t *testing.T, c Config, each func(conn int) (up, down pump)) []outcome {
	t.Helper()
	for {
		c.Address = free(t)
		c.Job = jobName() // another job may get the same port, and its ranks must be turned away
		all := make([]outcome, c.Size)
		address := proxy(t, c.Address, each)
		var work sync.WaitGroup
		for rank := range all {
			c := c
			if c.Rank = rank; rank == 1 {
				c.Address = address
			}
			work.Go(func() {
				s, made, err := Join(t.Context(), c, func() ([]byte, error) { return []byte("made"), nil })
				o := &all[rank]
				if o.err = err; err != nil {
					return
				}
				o.met = true
				if string(made) != "made" {
					t.Errorf("rank %d: rank 0 has made %q", rank, made)
				}
				o.err = s.Barrier()
				if err := s.Close(); err != nil {
					t.Errorf("rank %d: Close: %v", rank, err)
				}
			})
		}
		work.Wait()
		if err := all[0].err; err == nil || !strings.Contains(err.Error(), "can't listen") {
			return all
		} // else the port is another connection's meanwhile
	}
}

// together calls f for 0 to n-1, some at the same time: most of them wait.
func together(n int, f func(i int)) {
	const most = 64
	var work sync.WaitGroup
	slots := make(chan struct{}, most)
	for i := range n {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			f(i)
		})
	}
	work.Wait()
}

// sound checks that ranks have met, or have errors that name a rank, within their time limits.
func sound(t *testing.T, what string, c Config, all []outcome, took time.Duration, mustMeet bool) {
	t.Helper()
	failed, met := 0, 0
	for rank, o := range all {
		if o.met {
			met++
		}
		if o.err == nil {
			continue
		}
		failed++
		var e *Error
		if !errors.As(o.err, &e) || e.Rank < 0 || e.Rank >= c.Size || e.Reason == "" {
			t.Errorf("%s: rank %d: %v, want an error of a rank", what, rank, o.err)
		}
		if mustMeet {
			t.Errorf("%s: rank %d: %v", what, rank, o.err)
		}
	}
	if failed == 0 && met < c.Size {
		t.Errorf("%s: %d of %d ranks have met, and there is no error", what, met, c.Size)
	}
	if met < c.Size && failed < c.Size {
		t.Errorf("%s: %d of %d ranks have met, and %d have an error: %v", what, met, c.Size, failed, all)
	}
	// A rank waits for Join, once more for rank 0's message, for the barrier, and for a message in transit.
	if most := 2*c.Timeout + 4*c.Silence + linger + 15*time.Second; took > most {
		t.Errorf("%s: it took %v, more than %v", what, took, most)
	}
}

// quick returns limits that a fault of a test exceeds, and a busy machine does not.
func quick(size int) Config {
	c := config("", size)
	c.Timeout, c.Silence, c.Beat = 3*time.Second, time.Second, 50*time.Millisecond
	return c
}

// fault is what a proxy does to a message.
type fault struct {
	name     string
	delay    time.Duration
	cut      int  // bytes of the message that get through before the connection is cut; -1: it is not cut
	again    bool // to the connections after the first one, too
	mustMeet bool
}

// Cuts and delays at every message between rank 0 and rank 1, in both directions, once and again and again: the job meets,
// or every rank ends with an error that names a rank.
func TestFaultAtEveryMessage(t *testing.T) {
	t.Parallel()
	const messages = 14 // of a connection with a barrier: 4 of the greeting, welcome, arrived, passed, bye or left, and beats
	faults := []fault{
		{"a short delay", 30 * time.Millisecond, -1, true, true},
		{"a long delay", 1400 * time.Millisecond, -1, false, false},
		{"a longer delay", 4500 * time.Millisecond, -1, false, false},
		{"long delays", 1400 * time.Millisecond, -1, true, false},
		{"a cut", 0, 0, false, false},
		{"cuts", 0, 0, true, false},
		{"a cut in the head", 0, 2, false, false},
		{"a cut in the content", 0, 5, false, false},
		{"cuts in the content", 0, 5, true, false},
	}
	together(len(faults)*messages, func(i int) {
		f, at := faults[i/messages], i%messages
		c := quick(3)
		if f.mustMeet {
			c.Timeout, c.Silence = time.Minute, 20*time.Second
		}
		began := time.Now()
		all := job(t, c, func(conn int) (up, down pump) {
			var count atomic.Int32
			if conn > 0 && !f.again {
				return copyAll, copyAll
			}
			both := func(w io.Writer, r io.Reader) bool {
				for {
					k, content, err := read(r)
					if err != nil {
						return false
					}
					m := append([]byte{byte(k), byte(len(content) >> 8), byte(len(content))}, content...)
					if int(count.Add(1))-1 == at {
						time.Sleep(f.delay)
						if f.cut >= 0 {
							_, _ = w.Write(m[:min(f.cut, len(m))])
							return true
						}
					}
					if _, err := w.Write(m); err != nil {
						return false
					}
				}
			}
			return both, both
		})
		sound(t, fmt.Sprint(f.name, " at message ", at), c, all, time.Since(began), f.mustMeet)
	})
}

// TestCutAtEveryByte cuts connections after every byte of the greeting and of the welcome, in both directions.
func TestCutAtEveryByte(t *testing.T) {
	t.Parallel()
	c := quick(2)
	c.Job = jobName()
	c.Timeout, c.Silence = 3500*time.Millisecond, 3*time.Second // a cut is noticed at once: no rank is silent but by a busy machine
	const head = 3
	up := head + len(c.hello()) + head + sha256.Size
	down := head + nonceSize + head + sha256.Size + head + len("made")
	together(up+1+down+1, func(i int) {
		direction, n := 0, i
		if i > up {
			direction, n = 1, i-up-1
		}
		began := time.Now()
		all := job(t, c, func(conn int) (up, down pump) {
			if conn > 0 {
				return copyAll, copyAll
			}
			both := [2]pump{copyAll, copyAll}
			both[direction] = func(w io.Writer, r io.Reader) bool { _, _ = io.CopyN(w, r, int64(n)); return true }
			return both[0], both[1]
		})
		sound(t, fmt.Sprint("direction ", direction, ", byte ", n), c, all, time.Since(began), false)
	})
}

// TestDrip: a message that arrives byte by byte, each in time, ends at the limit of the whole message. Bytes that a
// head only claims take no memory.
func TestDrip(t *testing.T) {
	t.Parallel()
	cfg := config("", 2)
	cfg.Silence = 300 * time.Millisecond
	zero, stranger := pipe(t)
	go func() {
		for _, b := range append([]byte{1, most >> 8, most & 0xff}, make([]byte, most)...) {
			if _, err := stranger.Write([]byte{b}); err != nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
	began := time.Now()
	if got := cfg.greet(t.Context(), zero); got != (arrival{}) || time.Since(began) > 10*time.Second {
		t.Errorf("%+v after %v", got, time.Since(began))
	}
	for _, head := range [][]byte{{1, 0xff, 0xff}, {1, most >> 8, most&0xff + 1}} {
		r := bytes.NewReader(append(head, make([]byte, 1<<16)...))
		if _, _, err := read(r); err == nil || r.Len() != 1<<16 {
			t.Errorf("%x: %v, %d bytes left", head, err, r.Len())
		}
	}
	// A list without an end.
	one, other := pipe(t)
	go func() {
		p := &peer{conn: other, limit: time.Second}
		for p.send(differs, make([]byte, most)) == nil {
		}
	}()
	cfg.Silence = time.Minute
	named(t, "a list without an end", cfg.differ(&peer{conn: one, limit: time.Minute}, make([]byte, most)), 0, "kind 12")
	one.Close()
}
