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

// Config says how a process joins a job.
type Config struct {
	Rank, Size int
	Address    string        // rank 0's address, host:port
	Job        string        // name of the job, at most MostJob bytes; rank 0 refuses processes of other jobs
	Same       []string      // texts that must be equal on all ranks, in any order
	Secret     []byte        // secret of the job's ranks; empty: none
	Timeout    time.Duration // limit of Join, and of a barrier
	Beat       time.Duration // time between two heartbeats
	Silence    time.Duration // time without a message after which a process is lost

	digest [sha256.Size]byte // digest of Same
}

// Error is a failure, with its rank.
type Error struct {
	Rank   int
	Reason string
}

func (e *Error) Error() string { return fmt.Sprintf("rank %d: %s", e.Rank, e.Reason) }

// Join waits until all ranks have come. Rank 0 then calls make, and sends its at most 1024 bytes to all ranks. After
// an error nothing is left open.
func Join(ctx context.Context, c Config, make func() ([]byte, error)) (*Session, []byte, error) {
	c.digest = digestOf(c.Same) // before the connection, which has a time limit
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	if c.Rank == 0 {
		return c.gather(ctx, make)
	}
	return c.connect(ctx)
}

// arrival is the result of a connection to rank 0. All fields are empty for a stranger.
type arrival struct {
	peer *peer  // a rank of this job
	err  error  // why the peer can't be a rank
	away string // the refused process, and why
}

// gather is Join on rank 0.
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

// linger is how long rank 0 of a failed job waits for further ranks, to tell them: otherwise they would wait for rank
// 0 until their time limit. Tests shorten linger and pause.
var linger = 2 * time.Second

// tell tells all ranks, and ranks that come soon, that the joining has failed.
func (c *Config) tell(ctx context.Context, err error, peers []*peer, here map[int]bool, a *arrivals) {
	var e *Error
	if !errors.As(err, &e) {
		e = &Error{0, err.Error()}
	}
	one := func(p *peer) {
		_ = p.send(failed, append(numbers(e.Rank), reason(e.Reason)...)) // the peer may have ended
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

// listenAt returns the port on all of the host's addresses: the host itself may resolve MASTER_ADDR to another of its
// addresses.
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

// arrivals accepts connections until it is stopped.
type arrivals struct {
	c        chan arrival
	listener net.Listener
	cancel   context.CancelFunc
	done     chan struct{}
	slots    int // largest number of connections before their hello

	mu      sync.Mutex
	waiting []net.Conn // such connections, the oldest first
}

// spareSlots is the number of connections, besides one for each rank, that may wait at once.
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
			if err != nil { // for example too many open files
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

// dropOldest closes the oldest connection if there are many. A rank whose connection was closed connects again.
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

// connect is Join on the other ranks.
func (c Config) connect(ctx context.Context) (*Session, []byte, error) {
	var mute time.Time // when rank 0 first closed a connection without a message
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
		// Rank 0 is full at present, or another program listens there.
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

// pause is the time between two attempts.
var pause = 100 * time.Millisecond

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

// failure returns the failure in a message of a rank.
func (c *Config) failure(from int, content []byte) *Error {
	rank, text, err := number(content)
	if err != nil || rank < 0 || rank >= c.Size {
		return &Error{from, "it sent a failure that is none of a rank's"}
	}
	return &Error{rank, printable(string(text))}
}
