package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// named checks that an error names a rank, and has these texts.
func named(t *testing.T, what string, err error, rank int, texts ...string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Rank != rank {
		t.Errorf("%s: %v, want an error of rank %d", what, err, rank)
		return
	}
	for _, text := range texts {
		if !strings.Contains(e.Reason, text) {
			t.Errorf("%s: %q, want %q", what, e.Reason, text)
		}
	}
}

// TestSame: ranks that differ in Config.Same end at once, and all report the rank and the difference.
func TestSame(t *testing.T) {
	list := []string{"-n 4", "-seed 7", "-weights f16", "prompt \x1b[31m"}
	many := slices.Clone(list)
	for i := range 30_000 { // more than is sent
		many = append(many, fmt.Sprint("weight ", i, " 0123456789abcdef0123456789"))
	}
	changed := func(from []string, at int, to ...string) []string {
		return slices.Concat(from[:at:at], to, from[at+1:])
	}
	for _, c := range []struct {
		name        string
		zeros, ones []string
		want        []string
	}{
		{"small value", list, changed(list, 0, "-n 2"), []string{`it has "-n 2", and rank 0 has "-n 4"`}},
		{"two", list, changed(changed(list, 0, "-n 2"), 1, "-seed 8"), []string{`it has "-n 2", "-seed 8", and rank 0 has "-n 4", "-seed 7"`}},
		{"one more", list, append(list[:4:4], "-mixed true"), []string{`it has "-mixed true", and rank 0 has nothing of the kind`}},
		{"twice", list, append(list[:4:4], "-n 4"), []string{`it has "-n 4", and rank 0 has nothing of the kind`}},
		{"one less", list, list[:3], []string{`it has nothing of the kind, and rank 0 has "prompt \x1b[31m"`}},
		{"a boundary", []string{"ab", "c"}, []string{"a", "bc"}, []string{`it has "a", "bc", and rank 0 has "ab", "c"`}},
		{"nothing", list, nil, []string{`nothing of the kind`, `"-n 4", "-seed 7", "-weights f16" and 1 more`}},
		{"escapes", list, changed(list, 3, "prompt \x1b[32m"), []string{`it has "prompt \x1b[32m", and rank 0 has "prompt \x1b[31m"`}},
		{"long", list, changed(list, 3, strings.Repeat("\x1b", 5000)), []string{`it has "\x1b\x1b`, `and rank 0 has`}},
		{"all", many, changed(many, 2, "-weights bf16"), []string{`it has "-weights bf16", and rank 0 has "-weights f16"`}},
		{"the end", many, changed(many, len(many)-1, "other"), []string{`something behind the first`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cfg := config(free(t), 3)
			cfg.Timeout = time.Minute
			began := time.Now()
			for rank, j := range join(t, cfg, func(cfg *Config) {
				if cfg.Same = c.zeros; cfg.Rank == 1 {
					cfg.Same = c.ones
				}
			}) {
				named(t, fmt.Sprintf("rank %d", rank), j.err, 1, c.want...)
				if j.err != nil && (strings.ContainsRune(j.err.Error(), 0x1b) || len(j.err.Error()) > longest+100) {
					t.Errorf("rank %d: %q", rank, j.err)
				}
			}
			if took := time.Since(began); took > cfg.Timeout/2 {
				t.Errorf("it took %v", took)
			}
		})
	}
	t.Run("order", func(t *testing.T) {
		cfg := config(free(t), 2)
		for rank, j := range join(t, cfg, func(cfg *Config) {
			cfg.Same = slices.Clone(list)
			if cfg.Rank == 1 {
				slices.Reverse(cfg.Same)
			}
		}) {
			if j.err != nil {
				t.Errorf("rank %d: %v", rank, j.err)
			}
		}
	})
}

// TestSizeAndRank: an impossible rank ends the job, and both sides name the rank.
func TestSizeAndRank(t *testing.T) {
	cases := []struct{ size, rank int }{{4, 1}, {2, 1}, {3, 0}, {3, 3}, {3, -1}, {-3, 1}}
	together(len(cases), func(i int) {
		c := cases[i]
		cfg := config(free(t), 3)
		result := make(chan error)
		go func() {
			_, _, err := Join(t.Context(), cfg, func() ([]byte, error) { return nil, nil })
			result <- err
		}()
		_, _, err := Config{Size: c.size, Rank: c.rank, Address: cfg.Address, Timeout: cfg.Timeout, Silence: cfg.Silence}.connect(within(t, cfg.Timeout))
		what := fmt.Sprintf("rank %d of %d", c.rank, c.size)
		want := fmt.Sprintf("it is one of %d ranks, and rank 0 is one of 3", c.size)
		named(t, what+", rank 0", <-result, c.rank, want)
		if c.rank >= 0 && c.rank < c.size {
			named(t, what, err, c.rank, want)
		} else if err == nil {
			t.Errorf("%s: no error", what)
		}
	})
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// TestTurnedAway: processes of another job, or with another secret, are told so. The job continues.
func TestTurnedAway(t *testing.T) {
	for _, c := range []struct {
		name                             string
		job, otherJob, secret, otherSecr string
		want                             string
	}{
		{"job", "a", "b", "", "", `rank 1 of 2 is of job "b", and rank 0 at this address is of job "a"`},
		{"no job", "a", "", "", "", `is of job "", and rank 0 at this address is of job "a"`},
		{"escapes", "a\x1b[31m", "\x1b[32m", "", "", `is of job "\x1b[32m", and rank 0 at this address is of job "a\x1b[31m"`},
		{"secret", "a", "a", "one secret", "another", "another secret than rank 0"},
		{"no secret", "a", "a", "one secret", "", "another secret than rank 0"},
		{"needless secret", "a", "a", "", "a secret", "another secret than rank 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := config(free(t), 2)
			cfg.Job, cfg.Secret = c.job, []byte(c.secret)
			result := make(chan joined)
			go func() {
				var j joined
				j.s, j.made, j.err = Join(t.Context(), cfg, func() ([]byte, error) { return []byte("made"), nil })
				result <- j
			}()
			one := cfg
			one.Rank = 1
			other := one
			other.Job, other.Secret = c.otherJob, []byte(c.otherSecr)
			_, _, err := Join(t.Context(), other, nil)
			named(t, "the other", err, 1, "has turned it away: ", c.want)
			if err != nil && strings.ContainsRune(err.Error(), 0x1b) {
				t.Errorf("%q", err)
			}
			s, made, err := Join(t.Context(), one, nil)
			zero := <-result
			if err != nil || zero.err != nil || string(made) != "made" {
				t.Fatalf("the job: %v, %v, %q", zero.err, err, made)
			}
			if err := errors.Join(s.Close(), zero.s.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	// Rank 0 reports at its time limit which processes it has refused.
	cfg := config(free(t), 2)
	cfg.Timeout = 500 * time.Millisecond
	all := join(t, cfg, func(cfg *Config) { cfg.Job = fmt.Sprint("job ", cfg.Rank) })
	named(t, "rank 0", all[0].err, 1, "has not come", "turned away, as the last one: 127.0.0.1:", `rank 1 of 2 is of job "job 1"`)
	named(t, "rank 1", all[1].err, 1, "turned it away")
}

// TestImpostor: a process that listens in place of rank 0 must know the secret, too.
func TestImpostor(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := config(l.Addr().String(), 2)
	cfg.Rank, cfg.Secret = 1, []byte("secret")
	for _, c := range []struct {
		name string
		do   func(p *peer)
		want string
	}{
		{"reflects the proof", func(p *peer) {
			_ = p.send(challenge, make([]byte, nonceSize))
			_, content, _ := p.receive(time.Now().Add(time.Second))
			_ = p.send(proof, content)
		}, "does not know the job's secret"},
		{"another secret", func(p *peer) {
			_ = p.send(challenge, make([]byte, nonceSize))
			_, _, _ = p.receive(time.Now().Add(time.Second))
			_ = p.send(proof, (&Config{}).mac(byZero, nil, nil))
		}, "does not know the job's secret"},
		{"an early welcome", func(p *peer) { _ = p.send(welcome, nil) }, "a message of kind 2"},
		{"a welcome in place of a proof", func(p *peer) {
			_ = p.send(challenge, make([]byte, nonceSize))
			_, _, _ = p.receive(time.Now().Add(time.Second))
			_ = p.send(welcome, nil)
		}, "a message of kind 2"},
		{"escapes", func(p *peer) { _ = p.send(failed, append(numbers(0), "\x1b[31m\n\u202e\xff \\ \""...)) }, `\x1b[31m\n\u202e\xff \ "`},
		{"no rank", func(p *peer) { _ = p.send(failed, append(numbers(7), "no"...)) }, "none of a rank's"},
		{"no number", func(p *peer) { _ = p.send(failed, nil) }, "none of a rank's"},
	} {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			conn, err := l.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			p := &peer{conn: conn, limit: time.Second}
			_, _, _ = p.receive(time.Now().Add(time.Second))
			c.do(p)
			_, _ = io.Copy(io.Discard, conn)
		}()
		_, _, err := Join(t.Context(), cfg, nil)
		named(t, c.name, err, 0, c.want)
		if err != nil && strings.ContainsAny(err.Error(), "\x1b\n\u202e") {
			t.Errorf("%s: %q", c.name, err)
		}
		<-ended
	}
}

// The secret is in no message.
func TestSecretIsNotSent(t *testing.T) {
	cfg := config(free(t), 2)
	cfg.Secret = []byte("the secret of this job")
	spied := spy(t, cfg.Address)
	all := join(t, cfg, func(cfg *Config) {
		if cfg.Rank == 1 {
			cfg.Address = spied.address
		}
	})
	for rank, j := range all {
		if j.err != nil {
			t.Fatalf("rank %d: %v", rank, j.err)
		}
	}
	if err := errors.Join(all[1].s.Close(), all[0].s.Close()); err != nil {
		t.Error(err)
	}
	text := spied.text()
	if len(text) < 200 || strings.Contains(text, string(cfg.Secret)) {
		t.Errorf("%q", text)
	}
	// A replayed hello fails: the challenge is another one.
	again := config(free(t), 2)
	again.Secret, again.Timeout = cfg.Secret, 500*time.Millisecond
	result := make(chan error)
	go func() {
		_, _, err := Join(t.Context(), again, nil)
		result <- err
	}()
	conn, err := (&Config{Address: again.Address, Silence: time.Second}).dial(within(t, time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, spied.said())
	named(t, "said again", <-result, 1, "has not come", "another secret")
}

// spying is a proxy that records the messages.
type spying struct {
	address string
	mu      sync.Mutex
	up      strings.Builder // to rank 0
	down    strings.Builder
}

// said returns the bytes to rank 0, and text these and the answers.
func (s *spying) said() string { s.mu.Lock(); defer s.mu.Unlock(); return s.up.String() }
func (s *spying) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up.String() + s.down.String()
}

func spy(t *testing.T, to string) *spying {
	s := new(spying)
	keep := func(b *strings.Builder) pump {
		return func(w io.Writer, r io.Reader) bool {
			return copyAll(writer(func(p []byte) (int, error) {
				s.mu.Lock()
				b.Write(p)
				s.mu.Unlock()
				return w.Write(p)
			}), r)
		}
	}
	s.address = proxy(t, to, func(int) (up, down pump) { return keep(&s.up), keep(&s.down) })
	return s
}

// pipe returns two ends of a connection.
func pipe(t *testing.T) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// pump copies from one end of a connection to the other, until its end or its cut.
type pump func(w io.Writer, r io.Reader) (cut bool)

func copyAll(w io.Writer, r io.Reader) bool {
	_, _ = io.Copy(w, r)
	return false
}

// proxy forwards connections to an address, each direction by a pump. A cut in one direction closes the connection.
func proxy(t *testing.T, to string, each func(conn int) (up, down pump)) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		work.Wait()
	})
	work.Go(func() {
		for n := 0; ; n++ {
			from, err := l.Accept()
			if err != nil {
				return
			}
			up, down := each(n)
			work.Go(func() {
				defer from.Close()
				var into net.Conn
				for until := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) { // rank 0 may not listen yet
					if into, err = net.Dial("tcp", to); err == nil {
						break
					} else if time.Now().After(until) {
						return
					}
				}
				defer into.Close()
				var both sync.WaitGroup
				for p, ends := range map[*pump][2]net.Conn{&up: {into, from}, &down: {from, into}} {
					both.Go(func() {
						if (*p)(ends[0], ends[1]) {
							from.Close()
							into.Close()
						}
						_ = ends[0].(*net.TCPConn).CloseWrite()
					})
				}
				both.Wait()
			})
		}
	})
	return l.Addr().String()
}

// strangers opens n connections to an address, which write their texts and stay open until the test ends. It returns
// when all are connected.
func strangers(t *testing.T, address string, n int, say func(i int) string) {
	t.Helper()
	var all, ready sync.WaitGroup
	done := make(chan struct{})
	t.Cleanup(func() { close(done); all.Wait() })
	for i := range n {
		ready.Add(1)
		all.Go(func() {
			conn, err := (&Config{Address: address, Silence: 5 * time.Second}).dial(within(t, 20*time.Second))
			ready.Done()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_, _ = io.WriteString(conn, say(i))
			<-done
		})
	}
	ready.Wait()
}

// TestStrangers: neither silence nor noise of any number of strangers, nor ranks of another version, keep a job from
// meeting.
func TestStrangers(t *testing.T) {
	const many = 1000
	cfg := config(free(t), 2)
	cfg.Timeout, cfg.Silence = 2*time.Minute, time.Minute // so strangers are not rid of by waiting
	result := make(chan joined)
	var made atomic.Bool
	go func() {
		var j joined
		j.s, _, j.err = Join(t.Context(), cfg, func() ([]byte, error) { made.Store(true); return nil, nil })
		result <- j
	}()
	old := "\x01\x00\x1eleanattention ranks 1 " + string(numbers(2, 7)) // the 33 bytes of an earlier version
	hello := string(append([]byte{1, 0, byte(len(cfg.hello()))}, cfg.hello()...))
	wrong := cfg
	wrong.Size, wrong.Rank = 9, 8
	noise := []string{"GET / HTTP/1.1\r\n\r\n", "\x01\x00\x05hello", "\x01\xff\xff", "\x01\x08\x00", "\x03\x00\x00", "\x02\x00\x00", "\x00", old, hello, hello + hello,
		hello + "\x0a\x00\x20" + strings.Repeat("x", 32), string(append([]byte{1, 0, byte(len(wrong.hello()))}, wrong.hello()...)), "\x04\x00\x08\x00\x00\x00\x01lost"}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		b := make([]byte, 1+rng.IntN(100))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		noise = append(noise, string(b))
	}
	began := time.Now()
	strangers(t, cfg.Address, many, func(int) string { return "" })
	strangers(t, cfg.Address, many, func(i int) string { return noise[i%len(noise)] })
	t.Logf("%d strangers after %v", 2*many, time.Since(began))
	if made.Load() {
		t.Fatal("the job has met without rank 1")
	}
	began = time.Now()
	one := cfg
	one.Rank = 1
	s, _, err := Join(t.Context(), one, nil)
	took := time.Since(began)
	zero := <-result
	if err != nil || zero.err != nil {
		t.Fatalf("%v, %v", zero.err, err)
	}
	if took > 2*time.Second {
		t.Errorf("the job has met after %v", took)
	}
	if err := errors.Join(s.Close(), zero.s.Close()); err != nil {
		t.Error(err)
	}
}

// TestMoreRanksThanSlots: more ranks than spare slots meet, also ranks whose connections are closed for others.
func TestMoreRanksThanSlots(t *testing.T) {
	cfg := config(free(t), spareSlots+100)
	cfg.Timeout, cfg.Silence, cfg.Beat = 2*time.Minute, time.Minute, time.Second
	for rank, j := range join(t, cfg, nil) {
		if j.err != nil {
			t.Fatalf("rank %d: %v", rank, j.err)
		}
	}
}

// TestSlots: a limited number of connections is kept, and the oldest is closed first.
func TestSlots(t *testing.T) {
	cfg := config("127.0.0.1:0", 2)
	cfg.Silence = time.Minute
	l, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		t.Fatal(err)
	}
	a := newArrivals(t.Context(), l, &cfg)
	var conns []net.Conn
	dial := func() {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conns = append(conns, conn)
	}
	waiting := func(n int) {
		t.Helper()
		for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			a.mu.Lock()
			got := len(a.waiting)
			a.mu.Unlock()
			if got == n {
				return
			} else if time.Now().After(until) {
				t.Fatalf("%d connections wait, want %d", got, n)
			}
		}
	}
	for range a.slots {
		dial()
	}
	waiting(a.slots)
	isClosed := func(i int, wait time.Duration) bool {
		_ = conns[i].SetReadDeadline(time.Now().Add(wait))
		_, err := conns[i].Read(make([]byte, 1))
		return closed(err)
	}
	if isClosed(0, 50*time.Millisecond) {
		t.Error("a connection was closed while there was room")
	}
	dial()
	if !isClosed(0, 10*time.Second) || isClosed(1, 50*time.Millisecond) || isClosed(len(conns)-1, 50*time.Millisecond) {
		t.Error("the oldest connection is not the one that was closed")
	}
	waiting(a.slots)
	a.stop()
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting) > 0 { // stop waits for all
		t.Errorf("%d connections wait behind stop", len(a.waiting))
	}
	if _, err := net.Dial("tcp", l.Addr().String()); err == nil {
		t.Error("stop has left the listener")
	}
}

// failingListener returns errors before connections.
type failingListener struct {
	net.Listener
	errs atomic.Int32
}

func (l *failingListener) Accept() (net.Conn, error) {
	if l.errs.Add(-1) >= 0 {
		return nil, errors.New("too many open files")
	}
	return l.Listener.Accept()
}

// TestAcceptFails: a passing error of Accept does not fail the job.
func TestAcceptFails(t *testing.T) {
	cfg := config("127.0.0.1:0", 2)
	inner, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		t.Fatal(err)
	}
	l := &failingListener{Listener: inner}
	l.errs.Store(3)
	cfg.digest = digestOf(nil)
	a := newArrivals(t.Context(), l, &cfg)
	defer a.stop()
	one := cfg
	one.Rank, one.Address = 1, inner.Addr().String()
	go func() { _, _, _ = Join(within(t, 10*time.Second), one, nil) }()
	select {
	case got := <-a.c:
		if got.peer == nil || got.peer.rank != 1 || got.err != nil {
			t.Errorf("%+v", got)
		} else {
			got.peer.conn.Close()
		}
	case <-time.After(20 * time.Second):
		t.Error("no rank has come")
	}
}

// TestGreetTooLate: a connection after the end of the joining is closed at once.
func TestGreetTooLate(t *testing.T) {
	cfg := config("", 2)
	cfg.Silence = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	here, there := net.Pipe()
	defer there.Close()
	began := time.Now()
	if got := cfg.greet(ctx, here); got != (arrival{}) || time.Since(began) > 10*time.Second {
		t.Errorf("%+v after %v", got, time.Since(began))
	}
	if _, err := there.Write([]byte{1}); err == nil {
		t.Error("the connection is open")
	}
}

// TestListenAt: for a name that may be another of the host's, rank 0 listens on all of the host's addresses, and for
// a loopback address on that alone.
func TestListenAt(t *testing.T) {
	for _, c := range []struct{ address, want string }{
		{"127.0.0.1:80", "127.0.0.1:80"},
		{"127.1.2.3:80", "127.1.2.3:80"},
		{"localhost:80", "localhost:80"},
		{"[::1]:80", "[::1]:80"},
		{"node-0:80", ":80"},
		{"10.0.0.1:80", ":80"},
		{"0.0.0.0:80", ":80"},
		{"[fe80::1]:80", ":80"},
		{"no port", "no port"},
	} {
		if got := (Config{Address: c.address}).listenAt(); got != c.want {
			t.Errorf("%s: %s, want %s", c.address, got, c.want)
		}
	}
}

// TestNotRankZero: a listener that is silent, or closes all connections, is an error within the limit of silence.
func TestNotRankZero(t *testing.T) {
	t.Parallel()
	for name, do := range map[string]func(net.Conn){
		"closes": func(conn net.Conn) { conn.Close() },
		"silent": func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn); conn.Close() },
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var work sync.WaitGroup
		work.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				work.Go(func() { do(conn) })
			}
		})
		cfg := config(l.Addr().String(), 2)
		cfg.Rank, cfg.Timeout, cfg.Silence = 1, time.Minute, 300*time.Millisecond
		began := time.Now()
		_, _, err = Join(t.Context(), cfg, nil)
		named(t, name, err, 0, map[string]string{"closes": "closes connections without a word", "silent": "it is silent for 300ms"}[name])
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("%s: after %v", name, took)
		}
		l.Close()
		work.Wait()
	}
}
