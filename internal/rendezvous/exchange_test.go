package rendezvous

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// each calls f for all ranks at once.
func each(all []joined, f func(rank int, s *Session)) {
	var wait sync.WaitGroup
	for rank, j := range all {
		wait.Go(func() { f(rank, j.s) })
	}
	wait.Wait()
}

// partOf are the bytes of a round from one rank to another: of any size, up to several messages.
func partOf(round, from, to int) []byte {
	rng := rand.New(rand.NewPCG(uint64(round), uint64(from<<8+to)))
	b := make([]byte, rng.IntN(3)*rng.IntN(2*bulk))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// TestExchange: each rank gets what the others have sent to it, in many rounds, with barriers in between.
func TestExchange(t *testing.T) {
	for size := 1; size <= 5; size++ {
		all := joinAll(t, size)
		each(all, func(rank int, s *Session) {
			for round := range 12 {
				parts := make([][]byte, size)
				for to := range parts {
					parts[to] = partOf(round, rank, to)
				}
				got, err := s.Exchange(fmt.Sprint("round ", round), parts)
				if err != nil {
					t.Error(err)
					return
				}
				for from, b := range got {
					if !bytes.Equal(b, partOf(round, from, rank)) {
						t.Errorf("%d ranks, round %d: rank %d has %d other bytes of rank %d", size, round, rank, len(b), from)
					}
				}
				if round%4 == 1 {
					if err := s.Barrier(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
}

// TestExchangeLeft: a rank leaves behind its last exchange, while others have not read its part.
func TestExchangeLeft(t *testing.T) {
	all := joinAll(t, 3)
	each(all, func(rank int, s *Session) {
		parts := slices.Repeat([][]byte{make([]byte, 100000)}, 3)
		if got, err := s.Exchange("x", parts); err != nil || len(got[1]) != 100000 || len(got[2]) != 100000 {
			t.Error(rank, err)
		}
		if rank == 2 {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			return
		}
		if _, err := s.Exchange("y", parts); err == nil {
			t.Error("an exchange with a rank that has left")
		}
	})
	failedWith(t, all[0], 2, "it has left before an exchange")
	failedWith(t, all[1], 2, "it has left before an exchange")
}

// TestExchangeFails: labels that differ, ranks that end or do not come, and data that is none of a rank's, fail all ranks.
func TestExchangeFails(t *testing.T) {
	t.Run("labels", func(t *testing.T) {
		all := joinAll(t, 3)
		each(all, func(rank int, s *Session) {
			if _, err := s.Exchange(fmt.Sprint("sum of ", min(rank, 1)), make([][]byte, 3)); err == nil {
				t.Error(rank)
			}
		})
		for _, j := range all {
			if err := j.s.Err(); err == nil || !bytes.Contains([]byte(err.Error()), []byte(`"sum of `)) {
				t.Error(err)
			}
		}
	})
	t.Run("ends", func(t *testing.T) {
		all := joinAll(t, 3)
		each(all, func(rank int, s *Session) {
			if rank == 1 {
				s.kill()
			} else if _, err := s.Exchange("x", make([][]byte, 3)); err == nil {
				t.Error(rank)
			}
		})
		failedWith(t, all[0], 1, "it has ended")
		failedWith(t, all[2], 1, "it has ended")
	})
	t.Run("late", func(t *testing.T) {
		c := config(free(t), 2)
		c.Timeout = 1e9
		all := join(t, c, nil)
		if _, err := all[0].s.Exchange("x", make([][]byte, 2)); err == nil {
			t.Error("an exchange without the other rank")
		}
		failedWith(t, all[1], 1, "it has not come to an exchange within 1s")
	})
	for i, content := range [][]byte{{}, numbers(1), numbers(0, 0), numbers(2, 0), numbers(1, 1), numbers(1, 3), numbers(-1, 0), numbers(1, -1)} {
		t.Run(fmt.Sprint("data ", i), func(t *testing.T) {
			all := joinAll(t, 3)
			if err := all[1].s.peers[0].send(data, content); err != nil {
				t.Fatal(err)
			}
			<-all[0].s.Done()
			failedWith(t, all[0], 1, "data that is none of a rank's")
		})
	}
	t.Run("no part", func(t *testing.T) {
		all := joinAll(t, 2)
		if err := all[1].s.sendTo(0, numbers(1, 1<<20, 3)); err != nil {
			t.Fatal(err)
		}
		if _, err := all[0].s.Exchange("x", make([][]byte, 2)); err == nil {
			t.Error("no error")
		}
		failedWith(t, all[1], 1, "what is no part of an exchange")
	})
}
