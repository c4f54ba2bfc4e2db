package gguf

import "encoding/binary"

// cursor reads a file from its beginning. It keeps the first error, after which all reads return zero.
type cursor struct {
	file string
	data []byte
	at   int
	err  error
}

func (c *cursor) fail(kind error, format string, args ...any) {
	if c.err == nil {
		c.err = fail(kind, c.file, format, args...)
	}
}

// left returns the number of bytes that have not been read.
func (c *cursor) left() int { return len(c.data) - c.at }

// bytes returns the next n bytes. If the file ends earlier, the error calls the bytes what.
func (c *cursor) bytes(n uint64, what string) []byte {
	if c.err == nil && n > uint64(c.left()) {
		c.fail(ErrFormat, "%s at byte %d would have %d bytes, and the file has %d more", what, c.at, n, c.left())
	}
	if c.err != nil {
		return nil
	}
	b := c.data[c.at : c.at+int(n) : c.at+int(n)]
	c.at += int(n)
	return b
}

func (c *cursor) uint32(what string) uint32 {
	if b := c.bytes(4, what); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (c *cursor) uint64(what string) uint64 {
	if b := c.bytes(8, what); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// string reads a length, at most most, and returns that many bytes.
func (c *cursor) string(most uint64, what string) []byte {
	n := c.uint64(what)
	if n > most {
		c.fail(ErrFormat, "%s at byte %d has %d bytes, more than %d", what, c.at, n, most)
	}
	return c.bytes(n, what)
}
