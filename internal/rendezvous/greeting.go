package rendezvous

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	nonceSize = 32
	// MostJob is the largest length of [Config.Job] in bytes.
	MostJob = 128
	// mostList is the largest part of rank 0's list that is sent and accepted, in bytes.
	mostList = 1 << 20
)

// greeting is the content of a hello.
type greeting struct {
	nonce      [nonceSize]byte
	size, rank int
	digest     [sha256.Size]byte
	job        string
}

func newNonce() (n [nonceSize]byte) {
	_, _ = rand.Read(n[:]) // it never fails
	return n
}

// hello returns this process's hello.
func (c *Config) hello() []byte {
	nonce := newNonce()
	return slices.Concat([]byte(magic+version), nonce[:], numbers(c.Size, c.Rank), c.digest[:], []byte(c.Job))
}

// digestOf returns the digest of a list in any order.
func digestOf(list []string) [sha256.Size]byte {
	return sha256.Sum256(encode(slices.Sorted(slices.Values(list))))
}

// errVersion is returned for a hello of another version of the protocol.
var errVersion = errors.New("not a hello of this version")

func parseHello(b []byte) (g greeting, err error) {
	b, ok := bytes.CutPrefix(b, []byte(magic))
	if !ok {
		return g, io.ErrUnexpectedEOF
	}
	if b, ok = bytes.CutPrefix(b, []byte(version)); !ok {
		return g, errVersion
	}
	const fixed = nonceSize + 8 + sha256.Size
	if len(b) < fixed || len(b) > fixed+MostJob {
		return g, io.ErrUnexpectedEOF
	}
	b = b[copy(g.nonce[:], b):]
	g.size, b, _ = number(b)
	g.rank, b, _ = number(b)
	g.job = string(b[copy(g.digest[:], b):])
	return g, nil
}

// Labels of the two proofs.
const (
	byRank = "rank: "
	byZero = "rank 0: "
)

// mac returns the proof that the process with label who knows the secret: a proof needs the secret, this hello and
// this challenge.
func (c *Config) mac(who string, hello, challenge []byte) []byte {
	m := hmac.New(sha256.New, c.Secret)
	m.Write([]byte(who))
	m.Write(hello)
	m.Write(challenge)
	return m.Sum(nil)
}

// encode returns a list of texts, each after its length.
func encode(list []string) (b []byte) {
	for _, s := range list {
		b = append(append(b, numbers(len(s))...), s...)
	}
	return b
}

// decode returns the list of encode, up to the end of a cut list.
func decode(b []byte) (list []string) {
	for len(b) >= 4 {
		n := int64(binary.BigEndian.Uint32(b))
		if b = b[4:]; n > int64(len(b)) {
			break
		}
		list, b = append(list, string(b[:n])), b[n:]
	}
	return list
}

// cut returns the part of a list that is compared, which both sides can have.
func cut(list []byte) []byte { return list[:min(len(list), mostList)] }

// difference returns how a rank's list differs from the list of rank 0.
func difference(mine, zeros []string) string {
	count := map[string]int{}
	for _, s := range mine {
		count[s]++
	}
	for _, s := range zeros {
		count[s]--
	}
	pick := func(list []string, sign int) string {
		const most, width = 3, 100
		var all []string
		for _, s := range list {
			if count[s]*sign <= 0 {
				continue
			}
			count[s] -= sign
			if len(s) > width {
				s = s[:width] + "..."
			}
			all = append(all, strconv.Quote(s))
		}
		switch n := len(all) - most; {
		case len(all) == 0:
			return "nothing of the kind"
		case n > 0:
			return strings.Join(all[:most], ", ") + fmt.Sprintf(" and %d more", n)
		}
		return strings.Join(all, ", ")
	}
	here, there := pick(mine, 1), pick(zeros, -1)
	if here == there {
		return fmt.Sprintf("it differs from rank 0 in something behind the first %d things that all ranks must have alike", len(mine))
	}
	return fmt.Sprintf("it has %s, and rank 0 has %s: all ranks must have this alike", here, there)
}

// greet is rank 0's side of a connection's first messages. greet closes the connection unless the other end is a
// rank.
func (c *Config) greet(ctx context.Context, conn net.Conn) arrival {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	p := &peer{conn: conn, limit: c.Silence}
	err := c.admit(p, time.Now().Add(c.Silence))
	// If stop is false, the connection is closed.
	if stop() && err == nil {
		return arrival{peer: p}
	}
	var no *Error
	if errors.As(err, &no) && ctx.Err() == nil {
		return arrival{peer: p, err: no}
	}
	_ = conn.Close()
	var away turnedAway
	if errors.As(err, &away) {
		return arrival{away: fmt.Sprintf("%v: %s", conn.RemoteAddr(), away)}
	}
	return arrival{}
}

// turnedAway is the reason why a process does not belong to this job.
type turnedAway string

func (t turnedAway) Error() string { return string(t) }

// errStranger is returned for a connection that does not speak the protocol.
var errStranger = errors.New("a stranger")

// admit checks the other end. An [Error] ends the job.
func (c *Config) admit(p *peer, until time.Time) error {
	k, said, err := p.receive(until)
	if err != nil || k != hello {
		return errStranger
	}
	g, err := parseHello(said)
	if err == errVersion {
		const text = "it has another version of leanattention than this process"
		_ = p.send(failed, append(numbers(0), text...)) // every version has this message
		return turnedAway(text)
	} else if err != nil {
		return errStranger
	}
	nonce := newNonce()
	if err := p.send(challenge, nonce[:]); err != nil {
		return errStranger
	}
	k, content, err := p.receive(until)
	if err != nil || k != proof {
		return errStranger
	}
	if !hmac.Equal(content, c.mac(byRank, said, nonce[:])) {
		return p.turnAway(fmt.Sprintf("rank %d of %d has another secret than rank 0, or one of both has none", g.rank, g.size))
	}
	if err := p.send(proof, c.mac(byZero, said, nonce[:])); err != nil {
		return errStranger
	}
	if g.job != c.Job {
		return p.turnAway(fmt.Sprintf("rank %d of %d is of job %q, and rank 0 at this address is of job %q", g.rank, g.size, g.job, c.Job))
	}
	p.rank = g.rank
	if g.size != c.Size || g.rank < 1 || g.rank >= c.Size {
		return &Error{g.rank, fmt.Sprintf("it is one of %d ranks, and rank 0 is one of %d", g.size, c.Size)}
	}
	if g.digest == c.digest {
		return nil
	}
	for part := range slices.Chunk(cut(encode(c.Same)), most) {
		if err := p.send(differs, part); err != nil {
			break // the rank can't report the difference then
		}
	}
	_ = p.send(differs, nil)
	if k, content, err := p.receive(time.Now().Add(c.Silence)); err == nil && k == failed {
		if _, text, err := number(content); err == nil {
			return &Error{g.rank, printable(string(text))}
		}
	}
	return &Error{g.rank, "it differs from rank 0 in what all ranks must have alike, and has not said in what"}
}

// turnAway tells a process why it does not belong to this job.
func (p *peer) turnAway(text string) error {
	_ = p.send(refused, reason(text)) // the process may have ended
	return turnedAway(text)
}

// errMute is returned for a connection that rank 0 closed before its first message: rank 0 did not know yet which
// process connected.
var errMute = errors.New("closed without a word")

// introduce is a rank's side of a connection's first messages. introduce returns the bytes that rank 0 made after all
// ranks had come.
func (c *Config) introduce(ctx context.Context, p *peer) ([]byte, error) {
	said := c.hello()
	k, nonce, err := p.ask(hello, said)
	switch {
	case err != nil && closed(err):
		return nil, errMute
	case err != nil:
		return nil, &Error{0, lost(err, c.Silence)}
	case k != challenge:
		return nil, c.unwelcome(k, nonce)
	}
	k, content, err := p.ask(proof, c.mac(byRank, said, nonce))
	switch {
	case err != nil:
		return nil, &Error{0, lost(err, c.Silence)}
	case k != proof:
		return nil, c.unwelcome(k, content)
	case !hmac.Equal(content, c.mac(byZero, said, nonce)):
		return nil, &Error{0, fmt.Sprintf("what listens at %s does not know the job's secret", c.Address)}
	}
	until, _ := ctx.Deadline()
	// Rank 0 reports first which rank is missing.
	k, content, err = p.receive(until.Add(c.Silence))
	switch {
	case err != nil:
		return nil, &Error{0, "before all ranks had come: " + lost(err, c.Silence)}
	case k == welcome:
		return content, nil
	case k == differs:
		return nil, c.differ(p, content)
	}
	return nil, c.unwelcome(k, content)
}

// ask sends a message and waits for the answer.
func (p *peer) ask(k kind, content []byte) (kind, []byte, error) {
	if err := p.send(k, content); err != nil {
		return 0, nil, err
	}
	return p.receive(time.Now().Add(p.limit))
}

// differ receives the list of rank 0, finds the difference, and sends the difference to rank 0.
func (c *Config) differ(p *peer, list []byte) error {
	for until, part := time.Now().Add(c.Silence), list; len(part) > 0; list = append(list, part...) {
		k, content, err := p.receive(until)
		if err != nil {
			return &Error{0, lost(err, c.Silence)}
		}
		if part = content; k != differs || len(list)+len(part) > mostList {
			return c.unwelcome(k, content)
		}
	}
	e := &Error{c.Rank, difference(decode(cut(encode(c.Same))), decode(list))}
	_ = p.send(failed, append(numbers(c.Rank), reason(e.Reason)...)) // rank 0 ends without the message, too
	return e
}

// unwelcome returns the error of an unexpected message.
func (c *Config) unwelcome(k kind, content []byte) error {
	switch k {
	case failed:
		return c.failure(0, content)
	case refused:
		return &Error{c.Rank, fmt.Sprintf("rank 0 at %s has turned it away: %s", c.Address, printable(string(content)))}
	}
	return &Error{0, fmt.Sprintf("it sent a message of kind %d", k)}
}

// closed reports whether the other end has closed a connection.
func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
