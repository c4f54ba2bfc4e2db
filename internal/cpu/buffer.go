package cpu

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// Buffer is the storage of keys, values or weights: Len elements of type DType from Ptr on. Ptr is aligned to the
// size of an element, unless an element has several columns, and nil only if Len is 0. The maker of a Buffer keeps the memory alive during its use.
type Buffer struct {
	DType attn.DType
	Ptr   unsafe.Pointer
	Len   int
}

// At returns a pointer to element i.
func (b *Buffer) At(i int) unsafe.Pointer { return unsafe.Add(b.Ptr, i*b.DType.Size()) }

// Check reports whether the buffer is well formed.
func (b *Buffer) Check(op, name string) error {
	size := b.DType.Size()
	switch {
	case size == 0:
		return attn.Errorf(op, attn.ErrDType, "%s is of %v", name, b.DType)
	case b.Len < 0 || b.Len > 0 && b.Ptr == nil:
		return attn.Errorf(op, attn.ErrShape, "%s has %d elements at %v", name, b.Len, b.Ptr)
	case b.DType.Columns() == 1 && uintptr(b.Ptr)%uintptr(size) != 0:
		return attn.Errorf(op, attn.ErrShape, "%s at %v is not aligned to its %d-byte elements", name, b.Ptr, size)
	}
	return nil
}
