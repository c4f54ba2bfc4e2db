package rendezvous

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
)

// Config is how a process joins.
type Config struct {
	Rank, Size int
	Address    string        // where rank 0 listens, host:port
	Job        string        // of all ranks; rank 0 turns processes of other jobs away. At most MostJob bytes
	Same       []string      // what all ranks must have alike, in any order
	Secret     []byte        // that all ranks know, and nobody else; empty: none
	Timeout    time.Duration // of the joining, and of a barrier
	Beat       time.Duration // from one sign of life to the next
	Silence    time.Duration // after which a process is lost

	digest [sha256.Size]byte // of Same
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
	c.digest = digestOf(c.Same) // before there is a connection, which has a time limit
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	if c.Rank == 0 {
		return c.gather(ctx, make)
	}
	return c.connect(ctx)
}

// arrival is what has become of a connection to rank 0. A stranger's has none of these.
type arrival struct {
	peer *peer  // a rank of this job
	err  error  // which it can't be
	away string // who was turned away, and why
}

// gather is Join of rank 0.
func (c Config) gather(ctx context.Context, make func() ([]byte, error)) (s *Session, made []byte, err error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", c.listenAt())
	if err != nil {
		return nil, nil, fmt.Errorf("rank 0 can't listen: %w", err)
	}
	var peers []*peer
	arrivals := newArrivals(ctx, listener, &c)
	here, away := map[int]bool{0: true}, ""
	defer func() {
		if err != nil {
			c.tell(ctx, err, peers, here, arrivals)
		}
		arrivals.stop()
	}()
	for len(here) < c.Size {
		select {
		case a := <-arrivals.c:
			if a.peer == nil {
				away = "; turned away, as the last one: " + a.away
				continue
			}
			peers = append(peers, a.peer)
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
			return nil, nil, &Error{missing[0], fmt.Sprintf("it has not come to %s within %v; of %d ranks these are missing: %v%s", c.Address, c.Timeout, c.Size, missing, away)}
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

// linger is how long rank 0 waits for ranks that have not come yet, to tell them that the job has failed: they would
// wait for rank 0 until their time limit.
const linger = 2 * time.Second

// tell tells all ranks that the joining has failed, those that come soon, too.
func (c *Config) tell(ctx context.Context, err error, peers []*peer, here map[int]bool, a *arrivals) {
	var e *Error
	if !errors.As(err, &e) {
		e = &Error{0, err.Error()}
	}
	one := func(p *peer) {
		_ = p.send(failed, append(numbers(e.Rank), reason(e.Reason)...)) // it may be gone
		_ = p.conn.Close()
		here[p.rank] = true
	}
	for _, p := range peers {
		one(p)
	}
	for enough := time.After(linger); len(here) < c.Size; {
		select {
		case late := <-a.c:
			if late.peer != nil {
				one(late.peer)
			}
		case <-ctx.Done():
			return
		case <-enough:
			return
		}
	}
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
	slots    int // most connections that have not introduced themselves

	mu      sync.Mutex
	waiting []net.Conn // these, the oldest first
}

// spareSlots is how many connections besides one for each rank may wait at once.
const spareSlots = 256

func newArrivals(ctx context.Context, l net.Listener, c *Config) *arrivals {
	ctx, cancel := context.WithCancel(ctx)
	a := &arrivals{c: make(chan arrival), listener: l, cancel: cancel, done: make(chan struct{}), slots: spareSlots + c.Size}
	go func() {
		defer close(a.done)
		var work sync.WaitGroup
		defer work.Wait()
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
				if err == nil {
					_ = conn.Close()
				}
				return
			}
			if err != nil { // such as too many open files
				a.dropOldest(0)
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
				continue
			}
			a.dropOldest(a.slots)
			a.mu.Lock()
			a.waiting = append(a.waiting, conn)
			a.mu.Unlock()
			work.Go(func() {
				got := c.greet(ctx, conn)
				a.mu.Lock()
				if i := slices.Index(a.waiting, conn); i >= 0 {
					a.waiting = slices.Delete(a.waiting, i, i+1)
				}
				a.mu.Unlock()
				if got == (arrival{}) {
					return
				}
				select {
				case a.c <- got:
				case <-ctx.Done():
					_ = conn.Close()
				}
			})
		}
	}()
	return a
}

// dropOldest closes the oldest connection if there are so many. A rank whose connection is closed connects again.
func (a *arrivals) dropOldest(many int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting) > 0 && len(a.waiting) >= many {
		_ = a.waiting[0].Close()
		a.waiting = slices.Delete(a.waiting, 0, 1)
	}
}

func (a *arrivals) stop() {
	a.cancel()
	_ = a.listener.Close()
	<-a.done
}

// connect is Join of the other ranks.
func (c Config) connect(ctx context.Context) (*Session, []byte, error) {
	var mute time.Time // when rank 0 first closed a connection without a word
	for {
		conn, err := c.dial(ctx)
		if err != nil {
			return nil, nil, err
		}
		p := &peer{conn: conn, limit: c.Silence}
		stop := context.AfterFunc(ctx, func() {
			if errors.Is(ctx.Err(), context.Canceled) {
				_ = conn.Close()
			}
		})
		made, err := c.introduce(ctx, p)
		stop()
		if e := ctx.Err(); errors.Is(e, context.Canceled) {
			err = e
		}
		if err == nil {
			return newSession(c, []*peer{p}), made, nil
		}
		_ = conn.Close()
		if err != errMute {
			return nil, nil, err
		}
		// Rank 0 has no room for the connection at present, or something else listens there.
		if mute.IsZero() {
			mute = time.Now()
		}
		if time.Since(mute) >= c.Silence || ctx.Err() != nil {
			return nil, nil, &Error{0, fmt.Sprintf("what listens at %s closes connections without a word: is that rank 0?", c.Address)}
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// pause is how long something that can't be done yet is left alone.
const pause = 100 * time.Millisecond

// dial tries until rank 0 listens.
func (c Config) dial(ctx context.Context) (net.Conn, error) {
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

// failure is what a message of a rank says of one.
func (c *Config) failure(from int, content []byte) *Error {
	rank, text, err := number(content)
	if err != nil || rank < 0 || rank >= c.Size {
		return &Error{from, "it sent a failure that is none of a rank's"}
	}
	return &Error{rank, printable(string(text))}
}
