package gguf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
)

// Kind is the type of a metadata value. Its numbers are those of the format.
type Kind uint32

// The kinds of metadata values.
const (
	Uint8 Kind = iota
	Int8
	Uint16
	Int16
	Uint32
	Int32
	Float32
	Bool
	String
	Array
	Uint64
	Int64
	Float64
)

var kinds = [...]struct {
	name string
	size int // in bytes; 0: the size depends on the value
}{
	Uint8: {"uint8", 1}, Int8: {"int8", 1}, Uint16: {"uint16", 2}, Int16: {"int16", 2}, Uint32: {"uint32", 4}, Int32: {"int32", 4},
	Float32: {"float32", 4}, Bool: {"bool", 1}, String: {"string", 0}, Array: {"array", 0}, Uint64: {"uint64", 8}, Int64: {"int64", 8},
	Float64: {"float64", 8},
}

// String returns the kind's name in the format's specification.
func (k Kind) String() string {
	if int64(k) < int64(len(kinds)) {
		return kinds[k].name
	}
	return fmt.Sprintf("kind %d", uint32(k))
}

// least returns the minimum size of a value in bytes. A string has at least its length, and an array its kind and
// length.
func (k Kind) least() uint64 {
	switch k {
	case String:
		return 8
	case Array:
		return 12
	}
	return uint64(kinds[k].size)
}

const (
	// maxKey is the maximum length of a key in the format.
	maxKey = 1<<16 - 1
	// maxKeys bounds the memory of a file's keys. Real files have fewer than a hundred.
	maxKeys = 1 << 16
	// maxDepth bounds the nesting of arrays. Real files have no nested arrays.
	maxDepth = 8
)

// value is an undecoded metadata value.
type value struct {
	kind Kind
	elem Kind // of the elements of an array
	n    int  // number of elements of an array
	data []byte
	read atomic.Bool
}

func (v *value) String() string {
	if v.kind == Array {
		return fmt.Sprintf("an array of %d %v", v.n, v.elem)
	}
	return v.kind.String()
}

// Metadata is the keys and values of a file. A getter returns one of these errors:
//
//   - ErrMissing: the file does not have the key.
//   - ErrType: the value is of another kind.
//   - ErrRange: the number does not fit the requested type.
type Metadata struct {
	file   string
	keys   []string
	values map[string]*value
	use    *use
}

// readMetadata reads n keys with their values.
func readMetadata(c *cursor, n uint64) *Metadata {
	const least = 8 + 1 + 4 + 1 // bytes of a key of one byte with a value of one byte
	switch {
	case n > uint64(c.left())/least:
		c.fail(ErrFormat, "%d metadata keys are claimed, more than %d bytes can have", n, c.left())
	case n > maxKeys:
		c.fail(ErrUnsupported, "%d metadata keys; at most %d are read", n, maxKeys)
	}
	m := &Metadata{file: c.file, values: map[string]*value{}}
	for i := uint64(0); i < n && c.err == nil; i++ {
		name := c.string(maxKey, "a metadata key")
		if c.err != nil {
			break
		}
		key := string(name)
		for _, b := range name {
			if b <= ' ' || b > '~' {
				c.fail(ErrFormat, "metadata key %s is not of visible ASCII characters", quote(key))
				break
			}
		}
		switch {
		case key == "":
			c.fail(ErrFormat, "metadata key %d is empty", i)
		case m.values[key] != nil:
			c.fail(ErrFormat, "metadata key %s is there twice", quote(key))
		}
		v := &value{kind: Kind(c.uint32("the kind of a metadata value"))}
		c.value(v, key, 0)
		m.keys = append(m.keys, key)
		m.values[key] = v
	}
	return m
}

// value skips a value of the given kind, and returns it without decoding it.
func (c *cursor) value(v *value, key string, depth int) {
	if c.err != nil {
		return
	}
	start := c.at
	switch {
	case v.kind > Float64:
		c.fail(ErrFormat, "metadata key %s has a value of unknown kind %d", quote(key), uint32(v.kind))
	case v.kind == String:
		v.data = c.string(math.MaxInt, "a metadata string")
	case v.kind == Array:
		c.array(v, key, depth)
	default:
		v.data = c.bytes(uint64(kinds[v.kind].size), "a metadata value")
		if c.err == nil && v.kind == Bool && v.data[0] > 1 {
			c.fail(ErrFormat, "metadata key %s has a bool of %d at byte %d", quote(key), v.data[0], start)
		}
	}
}

// array reads an array: its elements' kind, their number, and the elements.
func (c *cursor) array(v *value, key string, depth int) {
	if depth == maxDepth {
		c.fail(ErrUnsupported, "metadata key %s has arrays in more than %d arrays", quote(key), maxDepth)
		return
	}
	v.elem = Kind(c.uint32("the kind of an array"))
	n := c.uint64("the length of an array")
	switch {
	case c.err != nil:
		return
	case v.elem > Float64:
		c.fail(ErrFormat, "metadata key %s has an array of unknown kind %d", quote(key), uint32(v.elem))
		return
	case n > uint64(c.left())/v.elem.least():
		c.fail(ErrFormat, "metadata key %s has an array of %d %v, more than the %d bytes behind it can have", quote(key), n, v.elem, c.left())
		return
	}
	v.n = int(n)
	start := c.at
	switch v.elem {
	case String, Array:
		for i := 0; i < v.n && c.err == nil; i++ {
			element := value{kind: v.elem}
			c.value(&element, key, depth+1)
		}
	default:
		b := c.bytes(n*v.elem.least(), "an array")
		if v.elem == Bool {
			for _, x := range b {
				if x > 1 {
					c.fail(ErrFormat, "metadata key %s has a bool of %d in its array", quote(key), x)
					break
				}
			}
		}
	}
	v.data = c.data[start:c.at:c.at]
}

// Keys returns all keys in the file's order.
func (m *Metadata) Keys() []string { return slices.Clone(m.keys) }

// Has reports whether the file has a key. Has does not mark the key as read.
func (m *Metadata) Has(key string) bool { return m.values[key] != nil }

// Kind returns the kind of a key's value. For an array, Kind also returns the kind and the number of the elements. Kind
// does not mark the key as read.
func (m *Metadata) Kind(key string) (kind, elem Kind, n int, ok bool) {
	v := m.values[key]
	if v == nil {
		return 0, 0, 0, false
	}
	return v.kind, v.elem, v.n, true
}

// Unread returns the keys that were passed to no getter, in the file's order.
func (m *Metadata) Unread() []string {
	var unread []string
	for _, key := range m.keys {
		if !m.values[key].read.Load() {
			unread = append(unread, key)
		}
	}
	return unread
}

// Or returns the value that get returns for a key, or missing if the file does not have the key:
//
//	theta, err := gguf.Or(m.Float64, "llama.rope.freq_base", 10000)
func Or[T any](get func(key string) (T, error), key string, missing T) (T, error) {
	v, err := get(key)
	if _, absent := errors.AsType[*noKey](err); absent {
		return missing, nil
	}
	return v, err
}

// noKey is the error of a missing key. Or returns the default only for noKey: a file that is gone is ErrMissing, too.
type noKey struct{ error }

func (e *noKey) Unwrap() error { return e.error }

// Int returns the integer of a key. The integer may be of any kind.
func (m *Metadata) Int(key string) (n int, err error) {
	err = m.get(key, "an integer", isInteger, func(v *value) error {
		n, err = integer(m.file, key, v.kind, v.data)
		return err
	})
	return n, err
}

// Float64 returns the float32 or float64 of a key.
func (m *Metadata) Float64(key string) (x float64, err error) {
	err = m.get(key, "a float32 or float64", isFloat, func(v *value) error {
		x = float(v.kind, v.data)
		return nil
	})
	return x, err
}

// Bool returns the bool of a key.
func (m *Metadata) Bool(key string) (b bool, err error) {
	err = m.get(key, "a bool", is(Bool), func(v *value) error {
		b = v.data[0] == 1
		return nil
	})
	return b, err
}

// String returns the string of a key. The format requires UTF-8, which String does not check.
func (m *Metadata) String(key string) (s string, err error) {
	err = m.get(key, "a string", is(String), func(v *value) error {
		s = string(v.data)
		return nil
	})
	return s, err
}

// Ints returns the array of integers of a key. The integers may be of any kind.
func (m *Metadata) Ints(key string) (s []int, err error) {
	err = m.array(key, "integers", isInteger, func(v *value) error {
		s = make([]int, v.n)
		size := kinds[v.elem].size
		for i := range s {
			if s[i], err = integer(m.file, key, v.elem, v.data[i*size:]); err != nil {
				s = nil
				return err
			}
		}
		return nil
	})
	return s, err
}

// Float32s returns the array of float32 of a key.
func (m *Metadata) Float32s(key string) (s []float32, err error) {
	err = m.array(key, "float32", is(Float32), func(v *value) error {
		s = make([]float32, v.n)
		decodeF32(s, v.data)
		return nil
	})
	return s, err
}

// Bools returns the array of bools of a key.
func (m *Metadata) Bools(key string) (s []bool, err error) {
	err = m.array(key, "bool", is(Bool), func(v *value) error {
		s = make([]bool, v.n)
		for i := range s {
			s[i] = v.data[i] == 1
		}
		return nil
	})
	return s, err
}

// Strings returns the array of strings of a key.
func (m *Metadata) Strings(key string) (s []string, err error) {
	err = m.array(key, "strings", is(String), func(v *value) error {
		s = make([]string, v.n)
		rest := v.data
		for i := range s {
			n := int(binary.LittleEndian.Uint64(rest)) // readMetadata has checked that the file has n bytes
			s[i], rest = string(rest[8:8+n]), rest[8+n:]
		}
		return nil
	})
	return s, err
}

// Any returns the value of a key. The value is a Go value of the kind's name, a slice of such values, or, for an array
// of arrays, an []any.
func (m *Metadata) Any(key string) (x any, err error) {
	err = m.get(key, "a value", func(Kind) bool { return true }, func(v *value) error {
		c := &cursor{file: m.file, data: v.data}
		if v.kind == Array {
			x = c.list(v.elem, v.n)
		} else {
			x = scalar(v.kind, v.data)
		}
		return nil
	})
	return x, err
}

// get calls read with the value of a key, if the value has the right kind.
func (m *Metadata) get(key, wanted string, right func(Kind) bool, read func(*value) error) error {
	v := m.values[key]
	if v == nil {
		return &noKey{fail(ErrMissing, m.file, "metadata key %s", quote(key))}
	}
	v.read.Store(true)
	if !right(v.kind) {
		return fail(ErrType, m.file, "metadata key %s is %v; %s is wanted", quote(key), v, wanted)
	}
	return m.use.do(m.file, func() error { return read(v) })
}

// array calls read with an array, if its elements have the right kind.
func (m *Metadata) array(key, wanted string, right func(Kind) bool, read func(*value) error) error {
	wanted = "an array of " + wanted
	return m.get(key, wanted, is(Array), func(v *value) error {
		if !right(v.elem) {
			return fail(ErrType, m.file, "metadata key %s is %v; %s is wanted", quote(key), v, wanted)
		}
		return read(v)
	})
}

func is(kind Kind) func(Kind) bool { return func(k Kind) bool { return k == kind } }

func isFloat(k Kind) bool { return k == Float32 || k == Float64 }

func isInteger(k Kind) bool {
	switch k {
	case Uint8, Int8, Uint16, Int16, Uint32, Int32, Uint64, Int64:
		return true
	}
	return false
}
