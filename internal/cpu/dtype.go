package cpu

import (
	"fmt"
	"unsafe"
)

// DType is the element type of stored keys and values.
type DType uint8

const (
	Float32 DType = iota
	Float64
	Float16
	BFloat16
	dtypes = iota // how many there are
)

// Size returns the size of an element in bytes, 0 if d is not one of the constants.
func (d DType) Size() int {
	switch d {
	case Float32:
		return 4
	case Float64:
		return 8
	case Float16, BFloat16:
		return 2
	}
	return 0
}

// String returns the name of d as Go spells it.
func (d DType) String() string {
	switch d {
	case Float32:
		return "float32"
	case Float64:
		return "float64"
	case Float16:
		return "float16"
	case BFloat16:
		return "bfloat16"
	}
	return fmt.Sprintf("DType(%d)", uint8(d))
}

// Buffer is the storage of keys or of values: Len elements of type DType from Ptr on. Ptr is aligned
// to the size of an element; it is nil only if Len is 0. Whoever makes a Buffer keeps the memory
// alive while it is used.
type Buffer struct {
	DType DType
	Ptr   unsafe.Pointer
	Len   int
}

// at returns a pointer to element i.
func (b *Buffer) at(i int) unsafe.Pointer { return unsafe.Add(b.Ptr, i*b.DType.Size()) }

// check reports whether the buffer is well formed.
func (b *Buffer) check(op, name string) error {
	size := b.DType.Size()
	switch {
	case size == 0:
		return errorf(op, ErrDType, "%s is of %v", name, b.DType)
	case b.Len < 0 || b.Len > 0 && b.Ptr == nil:
		return errorf(op, ErrShape, "%s has %d elements at %v", name, b.Len, b.Ptr)
	case uintptr(b.Ptr)%uintptr(size) != 0:
		return errorf(op, ErrShape, "%s at %v is not aligned to its %d-byte elements", name, b.Ptr, size)
	}
	return nil
}

// errorf makes the package's errors: "leanattention: Op: argument and values: sentinel".
func errorf(op string, sentinel error, format string, args ...any) error {
	return fmt.Errorf("leanattention: %s: %s: %w", op, fmt.Sprintf(format, args...), sentinel)
}
