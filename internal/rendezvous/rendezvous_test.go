package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	linger, pause = 500*time.Millisecond, 10*time.Millisecond
	goleak.VerifyTestMain(m)
}

// free returns an address without a listener.
func free(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func config(address string, size int) Config {
	return Config{Size: size, Address: address, Timeout: 20 * time.Second, Beat: 50 * time.Millisecond, Silence: 2 * time.Second}
}

type joined struct {
	s    *Session
	made []byte
	err  error
}

// join makes ranks join, each changed by change; the sessions are closed when the test ends.
func join(t *testing.T, c Config, change func(*Config)) []joined {
	t.Helper()
	all := make([]joined, c.Size)
	var wait sync.WaitGroup
	for rank := range all {
		c := c
		c.Rank = rank
		if change != nil {
			change(&c)
		}
		wait.Go(func() {
			j := &all[rank]
			j.s, j.made, j.err = Join(t.Context(), c, func() ([]byte, error) { return []byte("made"), nil })
		})
	}
	wait.Wait()
	for _, j := range all {
		if j.s != nil {
			t.Cleanup(func() { j.s.Close() })
		}
	}
	return all
}

func joinAll(t *testing.T, size int) []joined {
	t.Helper()
	all := join(t, config(free(t), size), nil)
	for rank, j := range all {
		if j.err != nil || string(j.made) != "made" {
			t.Fatalf("rank %d: %q, %v", rank, j.made, j.err)
		}
	}
	return all
}

// failedWith waits until a session has failed because of a rank.
func failedWith(t *testing.T, j joined, rank int, text string) {
	t.Helper()
	select {
	case <-j.s.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("no failure")
	}
	var e *Error
	if err := j.s.Err(); !errors.As(err, &e) || e.Rank != rank || !strings.Contains(e.Reason, text) {
		t.Errorf("%v, want one of rank %d with %q", err, rank, text)
	}
}

func TestJoin(t *testing.T) {
	for _, size := range []int{1, 2, 5} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			all := joinAll(t, size)
			var wait sync.WaitGroup
			for _, j := range all {
				wait.Go(func() {
					for range 20 {
						if err := j.s.Barrier(); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wait.Wait()
			time.Sleep(3 * config("", 0).Beat)
			for rank, j := range all {
				if err := j.s.Err(); err != nil {
					t.Errorf("rank %d: %v", rank, err)
				}
			}
		})
	}
}

// TestBarrierWaits: no rank passes a barrier before all have come to it.
func TestBarrierWaits(t *testing.T) {
	all := joinAll(t, 3)
	passed := make(chan error, 3)
	for _, j := range all[:2] {
		go func() { passed <- j.s.Barrier() }()
	}
	select {
	case <-passed:
		t.Fatal("past a barrier without rank 2")
	case <-time.After(100 * time.Millisecond):
	}
	go func() { passed <- all[2].s.Barrier() }()
	for range 3 {
		if err := <-passed; err != nil {
			t.Error(err)
		}
	}
}

// kill ends a session like a killed process: without a message.
func (s *Session) kill() {
	s.mu.Lock()
	s.err = errors.New("killed")
	close(s.done)
	s.mu.Unlock()
	for _, p := range s.peers {
		p.conn.Close()
	}
}

// TestCloseBehindBarrier: a session that closes after a barrier does not disturb ranks that are still in it.
func TestCloseBehindBarrier(t *testing.T) {
	for range 30 {
		var wait sync.WaitGroup
		for rank, j := range joinAll(t, 4) {
			wait.Go(func() {
				if err := errors.Join(j.s.Barrier(), j.s.Close()); err != nil {
					t.Errorf("rank %d: %v", rank, err)
				}
			})
		}
		wait.Wait()
	}
}

// TestLost: when any rank is lost, all others soon know which one.
func TestLost(t *testing.T) {
	for lost := range 3 {
		t.Run(fmt.Sprint(lost), func(t *testing.T) {
			all := joinAll(t, 3)
			all[lost].s.kill()
			for rank, j := range all {
				if rank != lost {
					failedWith(t, j, lost, "it has ended")
				}
			}
			if err := all[(lost+1)%3].s.Barrier(); err == nil {
				t.Error("a barrier without a rank that is lost")
			}
		})
	}
}

func TestSilent(t *testing.T) {
	c := config(free(t), 2)
	c.Silence = 300 * time.Millisecond
	all := join(t, c, func(c *Config) {
		if c.Rank == 1 {
			c.Beat = time.Hour
		}
	})
	failedWith(t, all[0], 1, "silent")
	failedWith(t, all[1], 1, "silent") // rank 0 tells it
}

func TestFail(t *testing.T) {
	for rank := range 3 {
		all := joinAll(t, 3)
		all[rank].s.Fail(errors.New("out of " + strings.Repeat("memory é", 1000)))
		for _, j := range all {
			failedWith(t, j, rank, "out of memory é")
		}
	}
}

// TestLeave: leaving is no failure until another rank waits for the rank.
func TestLeave(t *testing.T) {
	for leaver := range 3 {
		all := joinAll(t, 3)
		if err := all[leaver].s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := all[leaver].s.Close(); !errors.Is(err, ErrClosed) {
			t.Errorf("second Close: %v", err)
		}
		for rank, j := range all {
			if rank == leaver {
				continue
			}
			for until := time.Now().Add(5 * time.Second); j.s.Gone() != leaver; time.Sleep(time.Millisecond) {
				if time.Now().After(until) {
					t.Fatalf("rank %d does not know that rank %d has left", rank, leaver)
				}
			}
			if err := j.s.Err(); err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
		var e *Error
		if err := all[(leaver+1)%3].s.Barrier(); !errors.As(err, &e) || e.Rank != leaver {
			t.Errorf("a barrier without rank %d: %v", leaver, err)
		}
	}
}

func TestNeverComes(t *testing.T) {
	for missing := range 2 {
		c := config(free(t), 2)
		c.Rank, c.Timeout = 1-missing, 200*time.Millisecond
		_, _, err := Join(t.Context(), c, func() ([]byte, error) { return nil, nil })
		var e *Error
		if !errors.As(err, &e) || e.Rank != missing || !strings.Contains(e.Reason, c.Address) {
			t.Errorf("%v, want one of rank %d at %s", err, missing, c.Address)
		}
	}
	c := config(free(t), 2)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	for c.Rank = range 2 {
		if _, _, err := Join(ctx, c, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	}
}

// TestWrong: an impossible configuration is an error of all ranks that names one.
func TestWrong(t *testing.T) {
	t.Run("barrier", func(t *testing.T) {
		c := config(free(t), 2)
		c.Timeout = 300 * time.Millisecond
		all := join(t, c, nil)
		if err := all[0].s.Barrier(); err == nil {
			t.Error("a barrier of one")
		}
		failedWith(t, all[0], 1, "barrier")
		failedWith(t, all[1], 1, "barrier")
	})
	for name, change := range map[string]func(*Config){
		"sizes": func(c *Config) {
			if c.Rank == 1 {
				c.Size = 4
			}
		},
		"twice": func(c *Config) {
			if c.Rank == 2 {
				c.Rank = 1
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := config(free(t), 3)
			c.Timeout = 3 * time.Second
			errs := 0
			for _, j := range join(t, c, change) {
				var e *Error
				if errors.As(j.err, &e) && e.Rank == 1 {
					errs++
				} else if j.err == nil {
					t.Error("no error")
				}
			}
			if errs == 0 {
				t.Error("no error names rank 1")
			}
		})
	}
	t.Run("make", func(t *testing.T) {
		c := config(free(t), 2)
		got := make(chan error)
		go func() {
			c := c
			c.Rank = 1
			_, _, err := Join(t.Context(), c, nil)
			got <- err
		}()
		if _, _, err := Join(t.Context(), c, func() ([]byte, error) { return nil, errors.New("no NCCL") }); err == nil {
			t.Error("no error")
		}
		if err := <-got; err == nil || !strings.Contains(err.Error(), "rank 0: no NCCL") {
			t.Errorf("rank 1: %v", err)
		}
	})
}

func FuzzRead(f *testing.F) {
	c := config("", 2)
	c.Job, c.Same = "a job", []string{"-n 2", ""}
	f.Add([]byte("\x01\x00\x05hello"))
	said := c.hello()
	f.Add(append([]byte{1, 0, byte(len(said))}, said...))
	f.Add(append([]byte{1, 0, 12}, encode(c.Same)...))
	f.Add(append([]byte{4, 0, 9}, "\x00\x00\x00\x01\x1b[31m"...))
	f.Fuzz(func(t *testing.T, data []byte) {
		k, content, err := read(bytes.NewReader(data))
		if err != nil {
			return
		}
		if k == 0 || k >= kinds || len(content) > k.most() {
			t.Errorf("kind %d, %d bytes", k, len(content))
		}
		if g, err := parseHello(content); err == nil && len(g.job) > MostJob {
			t.Errorf("a job of %d bytes", len(g.job))
		}
		if list := decode(content); !bytes.HasPrefix(content, encode(list)) {
			t.Errorf("%q is no beginning of %q", list, content)
		}
		if e := c.failure(1, content); e.Rank < 0 || e.Rank >= c.Size || strings.ContainsFunc(e.Reason, func(r rune) bool { return !strconv.IsPrint(r) }) {
			t.Errorf("%q: %d, %q", content, e.Rank, e.Reason)
		}
	})
}
