package rendezvous

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// ErrClosed is returned for a use of a closed session.
var ErrClosed = errors.New("the session is closed")

// Session is a process that has joined.
type Session struct {
	config Config
	peers  []*peer // on rank 0 all others; on the others rank 0
	work   sync.WaitGroup
	done   chan struct{} // closed at the first failure, or by Close

	mu       sync.Mutex
	err      error // the first failure
	closed   bool
	gone     map[int]bool // ranks that have closed their sessions
	barriers int          // barriers to which this rank has come
	reached  map[int]int  // on rank 0: the last barrier of each rank
	open     int          // the last barrier to which all have come
	changed  chan struct{}
	unread   map[int][]byte // data of each rank

	order sync.Mutex // on rank 0: messages reach all others in one order

	exchange  sync.Mutex // held during an exchange
	exchanges int
}

func newSession(c Config, peers []*peer) *Session {
	s := &Session{config: c, peers: peers, done: make(chan struct{}), gone: map[int]bool{}, reached: map[int]int{}, unread: map[int][]byte{}, changed: make(chan struct{})}
	for _, p := range peers {
		s.work.Go(func() { s.listen(p) })
	}
	s.work.Go(s.beats)
	return s
}

// Done is closed when the session has failed or was closed: [Session.Err] returns which.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err returns the first failure of any rank, an [Error]; [ErrClosed] after Close; otherwise nil.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil && s.closed {
		return ErrClosed
	}
	return s.err
}

// Gone returns the lowest rank that has closed its session without a failure; -1 for none.
func (s *Session) Gone() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lowestGone()
}

// lowestGone is Gone. The lock is held.
func (s *Session) lowestGone() int {
	for r := range s.config.Size {
		if s.gone[r] {
			return r
		}
	}
	return -1
}

// Fail tells all ranks that this rank has failed.
func (s *Session) Fail(err error) { s.fail(&Error{s.config.Rank, string(reason(err.Error()))}) }

// fail records the first failure, and tells the others.
func (s *Session) fail(e *Error) {
	s.mu.Lock()
	if s.err != nil || s.closed {
		s.mu.Unlock()
		return
	}
	s.err = e
	close(s.done)
	s.mu.Unlock()
	for _, p := range s.peers {
		_ = p.send(failed, append(numbers(e.Rank), reason(e.Reason)...)) // the peer may have ended
	}
}

// listen handles the messages of a peer.
func (s *Session) listen(p *peer) {
	for {
		k, content, err := p.receive(time.Now().Add(s.config.Silence))
		if err != nil {
			if !s.hasLeft(p.rank) {
				s.fail(&Error{p.rank, lost(err, s.config.Silence)})
			}
			return
		}
		switch k {
		case beat:
		case failed:
			s.fail(s.config.failure(p.rank, content))
		case bye, left:
			rank := p.rank
			if k == left {
				if rank, _, err = number(content); err != nil || rank < 0 || rank >= s.config.Size {
					break
				}
			}
			s.leave(rank)
		case arrived:
			if n, _, err := number(content); err == nil {
				s.arrive(p.rank, n)
			}
		case passed:
			if n, _, err := number(content); err == nil {
				s.pass(n)
			}
		case data:
			if e := s.take(p, content); e != nil {
				s.fail(e)
				return
			}
		default:
			s.fail(&Error{p.rank, fmt.Sprintf("it sent a message of kind %d", k)})
			return
		}
	}
}

// lost returns the reason why a peer is lost.
func lost(err error, silence time.Duration) string {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Sprintf("it is silent for %v", silence)
	case closed(err):
		return "it has ended"
	}
	return fmt.Sprintf("it was lost: %v", err)
}

// beats sends this rank's heartbeats.
func (s *Session) beats() {
	tick := time.NewTicker(s.config.Beat)
	defer tick.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-tick.C:
			for _, p := range s.peers {
				_ = p.send(beat, nil) // the goroutine that listens to p reports a failure
			}
		}
	}
}

func (s *Session) hasLeft(rank int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gone[rank] || s.closed || s.err != nil
}

// leave records that a rank has closed its session.
func (s *Session) leave(rank int) {
	s.order.Lock()
	defer s.order.Unlock()
	s.mu.Lock()
	s.gone[rank] = true
	s.signal()
	s.mu.Unlock()
	if s.config.Rank == 0 {
		for _, p := range s.peers {
			_ = p.send(left, numbers(rank))
		}
	}
}

// signal wakes the waiters at barriers. The lock is held.
func (s *Session) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// arrive records, on rank 0, that a rank has come to a barrier.
func (s *Session) arrive(rank, n int) {
	s.order.Lock()
	defer s.order.Unlock()
	s.mu.Lock()
	s.reached[rank] = n
	for r := range s.config.Size {
		n = min(n, s.reached[r])
	}
	open := n > s.open
	s.mu.Unlock()
	if open {
		for _, p := range s.peers {
			_ = p.send(passed, numbers(n))
		}
		s.pass(n) // after the others: a caller past the barrier may close the session
	}
}

func (s *Session) pass(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = max(s.open, n)
	s.signal()
}

// Barrier waits until all ranks have come to their barrier with the same number. An error is a failure of all: a rank
// that has failed, has closed its session, or has not come in time.
func (s *Session) Barrier() error {
	s.mu.Lock()
	s.barriers++
	n := s.barriers
	s.mu.Unlock()
	if s.config.Rank == 0 {
		s.arrive(0, n)
	} else if err := s.peers[0].send(arrived, numbers(n)); err != nil && s.Err() == nil && s.Gone() < 0 {
		s.fail(&Error{0, lost(err, s.config.Silence)})
	}
	return s.await("a barrier", func() bool { return s.open >= n }, s.lowestGone, func() int { return s.missing(n) })
}

// await waits until ready. gone returns a rank that has left and is waited for, or -1, and missing one that is late. The lock is held while
// they are called.
func (s *Session) await(what string, ready func() bool, gone, missing func() int) error {
	limit := time.NewTimer(s.config.Timeout)
	defer limit.Stop()
	for {
		s.mu.Lock()
		// All read at the same time: a rank that has left may have passed the barrier.
		open, rank, late, changed := ready(), gone(), missing(), s.changed
		s.mu.Unlock()
		if open {
			return nil
		}
		if err := s.Err(); err != nil {
			return err
		}
		if rank >= 0 {
			s.fail(&Error{rank, "it has left before " + what})
			return s.Err()
		}
		select {
		case <-changed:
		case <-s.done:
		case <-limit.C:
			s.fail(&Error{late, fmt.Sprintf("it has not come to %s within %v", what, s.config.Timeout)})
		}
	}
}

// missing returns a rank that has not come to a barrier, as far as this rank knows. The lock is held.
func (s *Session) missing(n int) int {
	for r := range s.config.Size {
		if s.config.Rank == 0 && s.reached[r] < n {
			return r
		}
	}
	return 0
}

// Close leaves the job, which is no failure of the other ranks. A second Close is [ErrClosed].
func (s *Session) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.closed = true
	if s.err == nil {
		close(s.done)
	}
	s.signal()
	s.mu.Unlock()
	for _, p := range s.peers {
		if s.Err() == ErrClosed {
			_ = p.send(bye, nil) // the peer may have left, too
		}
		_ = p.conn.Close()
	}
	s.work.Wait()
	return nil
}
