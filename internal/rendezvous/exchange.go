package rendezvous

import (
	"errors"
	"fmt"
	"math"
	"os"
)

// mostUnread is how many bytes of a rank may wait for the exchange that reads them. A rank is one exchange ahead at most.
const mostUnread = 1 << 30

// Exchange sends parts[r] to each rank r, and returns what each rank r has sent to this rank; the own part is returned as it is. All ranks
// call Exchange, in the same order, with one label: labels that differ are a failure of all ranks. So is a rank that fails, leaves, or does
// not come in time.
//
// Parts between other ranks than rank 0 pass through rank 0.
func (s *Session) Exchange(label string, parts [][]byte) (got [][]byte, err error) {
	s.exchange.Lock()
	defer s.exchange.Unlock()
	if err := s.Err(); err != nil {
		return nil, err
	}
	s.exchanges++
	me, n := s.config.Rank, s.config.Size
	for i := range n - 1 {
		to := (me + 1 + i) % n
		if len(parts[to]) > mostUnread/2 || len(label) > most {
			err := fmt.Errorf("a part of %d bytes with a label of %d, want at most %d and %d", len(parts[to]), len(label), mostUnread/2, most)
			s.Fail(err)
			return nil, s.Err()
		}
		head := append(numbers(s.exchanges&math.MaxInt32, len(label), len(parts[to])), label...)
		for _, b := range [][]byte{head, parts[to]} {
			if err := s.sendTo(to, b); err != nil {
				return nil, err
			}
		}
	}
	got = make([][]byte, n)
	got[me] = parts[me]
	for i := range n - 1 {
		from := (me + n - 1 - i) % n
		if got[from], err = s.part(label, from); err != nil {
			return nil, err
		}
	}
	return got, nil
}

// part returns a rank's part of the present exchange.
func (s *Session) part(label string, from int) ([]byte, error) {
	head, err := s.read(from, 12)
	if err != nil {
		return nil, err
	}
	number3 := func() (all [3]int) {
		for i := range all {
			all[i], head, _ = number(head)
		}
		return all
	}
	of := number3()
	if of[1] < 0 || of[1] > most || of[2] < 0 || of[2] > mostUnread/2 {
		s.fail(&Error{from, "it sent what is no part of an exchange"})
		return nil, s.Err()
	}
	text, err := s.read(from, of[1])
	if err != nil {
		return nil, err
	}
	if of[0] != s.exchanges&math.MaxInt32 || string(text) != label {
		s.fail(&Error{from, fmt.Sprintf("its exchange %d is %q, and that of rank %d is exchange %d, %q", of[0], printable(string(text)), s.config.Rank, s.exchanges, label)})
		return nil, s.Err()
	}
	return s.read(from, of[2])
}

// read waits for n bytes of a rank.
func (s *Session) read(from, n int) ([]byte, error) {
	gone := func() int {
		for _, r := range []int{from, 0} {
			if s.gone[r] {
				return r
			}
		}
		return -1
	}
	if err := s.await("an exchange", func() bool { return len(s.unread[from]) >= n }, gone, func() int { return from }); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.unread[from]
	if s.unread[from] = b[n:]; len(b) == n {
		delete(s.unread, from)
	}
	return b[:n:n], nil
}

// sendTo sends bytes to a rank.
func (s *Session) sendTo(to int, b []byte) error {
	p := s.peers[0]
	for _, q := range s.peers {
		if q.rank == to {
			p = q
		}
	}
	for len(b) > 0 {
		n := min(len(b), bulk-8)
		switch err := p.send(data, append(numbers(s.config.Rank, to), b[:n]...)); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			s.fail(&Error{p.rank, fmt.Sprintf("it takes no data for %v", s.config.Silence)})
			return s.Err()
		case err != nil:
			return nil // the goroutine that listens to p knows whether p has left or has ended
		}
		b = b[n:]
	}
	return nil
}

// take keeps the data of a message for this rank, and rank 0 passes on data for other ranks.
func (s *Session) take(p *peer, content []byte) *Error {
	from, rest, err := number(content)
	to := -1
	if err == nil {
		to, rest, err = number(rest)
	}
	me := s.config.Rank
	if err != nil || from < 0 || from >= s.config.Size || from == me || me == 0 && from != p.rank || me != 0 && to != me || to < 0 || to >= s.config.Size || to == from {
		return &Error{p.rank, "it sent data that is none of a rank's"}
	}
	if to != me {
		for _, q := range s.peers {
			if q.rank == to {
				_ = q.send(data, content) // the goroutine that listens to q reports a failure
			}
		}
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.unread[from])+len(rest) > mostUnread {
		return &Error{from, fmt.Sprintf("it sent more than %d bytes that no exchange has read", mostUnread)}
	}
	s.unread[from] = append(s.unread[from], rest...)
	s.signal()
	return nil
}
