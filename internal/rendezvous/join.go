package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

// Config is how a process joins.
type Config struct {
	Rank, Size int
	Address    string        // where rank 0 listens, host:port
	Timeout    time.Duration // of the joining, and of a barrier
	Beat       time.Duration // from one sign of life to the next
	Silence    time.Duration // after which a process is lost
}

// Error is a failure, and whose it is.
type Error struct {
	Rank   int
	Reason string
}

func (e *Error) Error() string { return fmt.Sprintf("rank %d: %s", e.Rank, e.Reason) }

// Join waits until all ranks have come. Rank 0 calls make then, and what it makes, at most
// 1024 bytes, is given to all. On an error nothing is left of it.
func Join(ctx context.Context, c Config, make func() ([]byte, error)) (*Session, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	if c.Rank == 0 {
		return c.gather(ctx, make)
	}
	return c.connect(ctx)
}

// arrival is a connection to rank 0, or why there can be none of it.
type arrival struct {
	peer *peer
	err  error
}

// gather is Join of rank 0.
func (c Config) gather(ctx context.Context, make func() ([]byte, error)) (s *Session, made []byte, err error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", c.listenAt())
	if err != nil {
		return nil, nil, fmt.Errorf("rank 0 can't listen: %w", err)
	}
	var peers []*peer
	arrivals := newArrivals(ctx, listener, &c)
	defer func() {
		arrivals.stop()
		if err != nil {
			for _, p := range peers {
				var e *Error
				if !errors.As(err, &e) {
					e = &Error{0, err.Error()}
				}
				_ = p.send(failed, append(numbers(e.Rank), reason(e.Reason)...)) // it may be gone
				_ = p.conn.Close()
			}
		}
	}()
	here := map[int]bool{0: true}
	for len(here) < c.Size {
		select {
		case a := <-arrivals.c:
			if a.peer != nil {
				peers = append(peers, a.peer)
			}
			if a.err != nil {
				return nil, nil, a.err
			}
			if here[a.peer.rank] {
				return nil, nil, &Error{a.peer.rank, "two processes say that they are this rank"}
			}
			here[a.peer.rank] = true
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil, nil, ctx.Err()
			}
			var missing []int
			for r := range c.Size {
				if !here[r] {
					missing = append(missing, r)
				}
			}
			return nil, nil, &Error{missing[0], fmt.Sprintf("it has not come to %s within %v; of %d ranks these are missing: %v", c.Address, c.Timeout, c.Size, missing)}
		}
	}
	if made, err = make(); err != nil {
		return nil, nil, &Error{0, err.Error()}
	}
	for _, p := range peers {
		if err := p.send(welcome, made); err != nil {
			return nil, nil, &Error{p.rank, fmt.Sprintf("it was lost before all had come: %v", err)}
		}
	}
	return newSession(c, peers), made, nil
}

// listenAt is the port on all of the host's addresses: MASTER_ADDR may be a name that the
// host itself has for another one of them.
func (c Config) listenAt() string {
	host, port, err := net.SplitHostPort(c.Address)
	if err != nil {
		return c.Address
	}
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
		return c.Address
	}
	return net.JoinHostPort("", port)
}

// arrivals takes connections until it is stopped.
type arrivals struct {
	c        chan arrival
	listener net.Listener
	cancel   context.CancelFunc
	done     chan struct{}
}

func newArrivals(ctx context.Context, l net.Listener, c *Config) *arrivals {
	ctx, cancel := context.WithCancel(ctx)
	a := &arrivals{make(chan arrival), l, cancel, make(chan struct{})}
	waiting := make(chan struct{}, 64) // connections whose hello has not come
	go func() {
		defer close(a.done)
		for {
			conn, err := l.Accept()
			if err != nil {
				break
			}
			waiting <- struct{}{}
			go func() {
				defer func() { <-waiting }()
				got := c.greet(ctx, conn)
				if got.peer == nil && got.err == nil {
					_ = conn.Close() // somebody else's
					return
				}
				select {
				case a.c <- got:
				case <-ctx.Done():
					_ = conn.Close()
				}
			}()
		}
		for range cap(waiting) { // all have ended
			waiting <- struct{}{}
		}
	}()
	return a
}

func (a *arrivals) stop() {
	a.cancel()
	_ = a.listener.Close()
	<-a.done
}

// greet reads what a connection begins with.
func (c *Config) greet(ctx context.Context, conn net.Conn) arrival {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Now()) })
	defer stop()
	p := &peer{conn: conn, limit: c.Silence}
	if conn.SetReadDeadline(time.Now().Add(c.Silence)) != nil || ctx.Err() != nil {
		return arrival{}
	}
	k, content, err := read(conn)
	if err != nil || k != hello {
		return arrival{}
	}
	size, rank, err := parseHello(content)
	if err != nil {
		return arrival{}
	}
	p.rank = rank
	if size != c.Size || rank < 1 || rank >= c.Size {
		return arrival{p, &Error{rank, fmt.Sprintf("it is one of %d ranks, and rank 0 is one of %d", size, c.Size)}}
	}
	return arrival{p, nil}
}

// connect is Join of the other ranks.
func (c Config) connect(ctx context.Context) (*Session, []byte, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	p := &peer{rank: 0, conn: conn, limit: c.Silence}
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			_ = conn.SetReadDeadline(time.Now())
		}
	})
	defer stop()
	made, err := func() ([]byte, error) {
		if err := p.send(hello, append([]byte(magic), numbers(c.Size, c.Rank)...)); err != nil {
			return nil, &Error{0, fmt.Sprintf("it was lost: %v", err)}
		}
		until, _ := ctx.Deadline()
		// Rank 0 is to say first who has not come.
		k, content, err := p.receive(until.Add(c.Silence))
		switch {
		case ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled):
			return nil, ctx.Err()
		case err != nil:
			return nil, &Error{0, fmt.Sprintf("it was lost before all had come: %v", err)}
		case k == failed:
			return nil, failure(content)
		case k != welcome:
			return nil, &Error{0, fmt.Sprintf("it sent a message of kind %d", k)}
		}
		return content, nil
	}()
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return newSession(c, []*peer{p}), made, nil
}

// dial tries until rank 0 listens.
func (c Config) dial(ctx context.Context) (net.Conn, error) {
	const pause = 100 * time.Millisecond
	d := net.Dialer{Timeout: c.Silence}
	for {
		conn, err := d.DialContext(ctx, "tcp", c.Address)
		if err == nil {
			return conn, nil
		}
		select {
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil, ctx.Err()
			}
			return nil, &Error{0, fmt.Sprintf("it does not answer at %s for %v: %v", c.Address, c.Timeout, err)}
		case <-time.After(pause):
		}
	}
}

// failure is what a message says of one.
func failure(content []byte) error {
	rank, text, err := number(content)
	if err != nil {
		return &Error{0, "a message of a failure that is none"}
	}
	return &Error{rank, string(text)}
}
