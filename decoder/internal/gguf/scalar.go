package gguf

import (
	"encoding/binary"
	"math"
)

// integer decodes an integer into an int.
func integer(file, key string, kind Kind, b []byte) (int, error) {
	var x int64
	switch kind {
	case Uint8:
		x = int64(b[0])
	case Int8:
		x = int64(int8(b[0]))
	case Uint16:
		x = int64(binary.LittleEndian.Uint16(b))
	case Int16:
		x = int64(int16(binary.LittleEndian.Uint16(b)))
	case Uint32:
		x = int64(binary.LittleEndian.Uint32(b))
	case Int32:
		x = int64(int32(binary.LittleEndian.Uint32(b)))
	case Int64:
		x = int64(binary.LittleEndian.Uint64(b))
	case Uint64:
		u := binary.LittleEndian.Uint64(b)
		if u > math.MaxInt {
			return 0, fail(ErrRange, file, "metadata key %s has %d, more than an int can be", quote(key), u)
		}
		x = int64(u)
	}
	if x < math.MinInt || x > math.MaxInt {
		return 0, fail(ErrRange, file, "metadata key %s has %d, which no int can be", quote(key), x)
	}
	return int(x), nil
}

func float(kind Kind, b []byte) float64 {
	if kind == Float64 {
		return math.Float64frombits(binary.LittleEndian.Uint64(b))
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
}

// scalar decodes a value that is not an array.
func scalar(kind Kind, b []byte) any {
	switch kind {
	case Uint8:
		return b[0]
	case Int8:
		return int8(b[0])
	case Uint16:
		return binary.LittleEndian.Uint16(b)
	case Int16:
		return int16(binary.LittleEndian.Uint16(b))
	case Uint32:
		return binary.LittleEndian.Uint32(b)
	case Int32:
		return int32(binary.LittleEndian.Uint32(b))
	case Float32:
		return float32(float(kind, b))
	case Bool:
		return b[0] == 1
	case String:
		return string(b)
	case Uint64:
		return binary.LittleEndian.Uint64(b)
	case Int64:
		return int64(binary.LittleEndian.Uint64(b))
	}
	return float(kind, b)
}

// list decodes the elements of an array that readMetadata has checked.
func (c *cursor) list(kind Kind, n int) any {
	switch kind {
	case Uint8:
		return elements[uint8](c, kind, n)
	case Int8:
		return elements[int8](c, kind, n)
	case Uint16:
		return elements[uint16](c, kind, n)
	case Int16:
		return elements[int16](c, kind, n)
	case Uint32:
		return elements[uint32](c, kind, n)
	case Int32:
		return elements[int32](c, kind, n)
	case Float32:
		return elements[float32](c, kind, n)
	case Bool:
		return elements[bool](c, kind, n)
	case String:
		return elements[string](c, kind, n)
	case Uint64:
		return elements[uint64](c, kind, n)
	case Int64:
		return elements[int64](c, kind, n)
	case Float64:
		return elements[float64](c, kind, n)
	}
	return elements[any](c, kind, n)
}

func elements[T any](c *cursor, kind Kind, n int) []T {
	s := make([]T, n)
	for i := range s {
		var x any
		switch kind {
		case Array:
			elem := Kind(c.uint32(""))
			x = c.list(elem, int(c.uint64("")))
		case String:
			x = scalar(kind, c.string(math.MaxInt, ""))
		default:
			x = scalar(kind, c.bytes(uint64(kinds[kind].size), ""))
		}
		s[i] = x.(T)
	}
	return s
}
