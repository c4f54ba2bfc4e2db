package rendezvous

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// kind is the kind of a message.
type kind byte

const (
	hello     kind = 1 + iota // to rank 0: see greeting
	welcome                   // to the others: the bytes that rank 0 made
	beat                      // no content
	failed                    // a rank, and the reason of its failure
	bye                       // the sender has closed its session
	arrived                   // to rank 0: the number of a barrier
	passed                    // to the others: the same number, when all have come to the barrier
	left                      // to the others: a rank that has closed its session
	challenge                 // to the others: a random number
	proof                     // see Config.mac
	refused                   // to the others: why rank 0 refuses this process
	differs                   // to the others: a part of rank 0's list of Config.Same; an empty part ends the list
	data                      // the sender, the receiver, and bytes of an exchange; rank 0 passes on those of other ranks
	kinds
)

const (
	magic   = "leanattention ranks "
	version = "2 "
	most    = 2048    // most bytes of a message's content, but for data
	bulk    = 1 << 15 // most bytes of data
	longest = 1024    // most bytes of a reason
)

// most returns the most bytes of a message's content.
func (k kind) most() int {
	if k == data {
		return bulk
	}
	return most
}

// peer is a connection.
type peer struct {
	rank  int // rank of the other end
	conn  net.Conn
	limit time.Duration // time limit of a message, and of silence

	mu sync.Mutex // held for writing
}

func (p *peer) send(k kind, content []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(content) > k.most() {
		return fmt.Errorf("a message of %d bytes", len(content))
	}
	if err := p.conn.SetWriteDeadline(time.Now().Add(p.limit)); err != nil {
		return err
	}
	m := binary.BigEndian.AppendUint16([]byte{byte(k)}, uint16(len(content)))
	_, err := p.conn.Write(append(m, content...))
	return err
}

// receive waits for a message until a time.
func (p *peer) receive(until time.Time) (kind, []byte, error) {
	if err := p.conn.SetReadDeadline(until); err != nil {
		return 0, nil, err
	}
	return read(p.conn)
}

// read reads a message.
func read(r io.Reader) (kind, []byte, error) {
	var head [3]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	k, n := kind(head[0]), int(binary.BigEndian.Uint16(head[1:]))
	if k == 0 || k >= kinds || n > k.most() {
		return 0, nil, fmt.Errorf("a message of kind %d with %d bytes", k, n)
	}
	content := make([]byte, n)
	_, err := io.ReadFull(r, content)
	return k, content, err
}

// numbers encodes numbers of 32 bits.
func numbers(n ...int) (b []byte) {
	for _, x := range n {
		b = binary.BigEndian.AppendUint32(b, uint32(x))
	}
	return b
}

// number decodes the first number of a message.
func number(b []byte) (n int, rest []byte, err error) {
	if len(b) < 4 {
		return 0, nil, io.ErrUnexpectedEOF
	}
	return int(int32(binary.BigEndian.Uint32(b))), b[4:], nil
}

// reason returns an error's text as the content of a message.
func reason(text string) []byte {
	if len(text) > longest {
		text = text[:longest]
	}
	for !utf8.ValidString(text) && text != "" {
		text = text[:len(text)-1]
	}
	return []byte(text)
}

// printable escapes control characters in text from a peer, as in Go's strings. Escaped text stays as it is, so rank
// 0 can pass it on.
func printable(text string) string {
	var b strings.Builder
	for text != "" {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case strconv.IsPrint(r):
			b.WriteRune(r)
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		text = text[size:]
	}
	return b.String()
}
