package cuda

import (
	"fmt"
	"unsafe"
)

// TensorMap describes an array to the copy engine of a GPU of compute capability 9.0 or newer (CUtensorMap). In a
// kernel's struct a TensorMap is at a multiple of 64 bytes.
type TensorMap [16]uint64

// Tiles describes an array of three dimensions, the innermost first, and its boxes that are copied at once. Rows of a
// box have 128 bytes, in shared memory with the 128-byte swizzle. Elements outside the array are copied as zeros.
type Tiles struct {
	ElementBytes int       // 2 or 4
	Dims         [3]uint64 // elements
	Strides      [2]uint64 // bytes between neighbours in dimensions 1 and 2, multiples of 16
	Box          [3]uint32 // elements
	Plain        bool      // rows of a box are side by side in shared memory, not swizzled
}

// TensorMap makes the map of an array in b. The driver checks the limits of the copy engine.
func (v *Device) TensorMap(b *Buffer, offset int64, t Tiles) (m TensorMap, err error) {
	if err := inside("a buffer", offset, 0, b.bytes); err != nil {
		return m, err
	}
	if t.ElementBytes != 2 && t.ElementBytes != 4 {
		return m, fmt.Errorf("a tensor map of %d-byte elements: %w", t.ElementBytes, ErrRange)
	}
	if err := enterAll(&b.handle); err != nil {
		return m, err
	}
	defer leaveAll(&b.handle)
	if b.dev != v {
		return m, ErrOtherDevice
	}
	const (
		// CU_TENSOR_MAP_...
		typeUint16, typeUint32 = 1, 2
		interleaveNone         = 0
		swizzle128B            = 3
		l2Promotion128B        = 2
		fillZeros              = 0
	)
	element, swizzle := uintptr(typeUint16), uintptr(swizzle128B)
	if t.Plain {
		swizzle = 0
	}
	if t.ElementBytes == 4 {
		element = typeUint32
	}
	// The driver needs 64-byte alignment.
	var memory [len(m)*8 + 56]byte
	at := int(-uintptr(unsafe.Pointer(&memory)) & 63)
	steps := [3]uint32{1, 1, 1}
	err = v.with(func() error {
		f := &v.drv.fn.tensorMapEncodeTiled
		if r := f.call(uintptr(unsafe.Pointer(&memory[at])), element, 3, b.id+uintptr(offset),
			uintptr(unsafe.Pointer(&t.Dims)), uintptr(unsafe.Pointer(&t.Strides)),
			uintptr(unsafe.Pointer(&t.Box)), uintptr(unsafe.Pointer(&steps)),
			interleaveNone, swizzle, l2Promotion128B, fillZeros); r != 0 {
			return v.drv.failed(r, f, "%+v", t)
		}
		return nil
	})
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&m)), len(m)*8), memory[at:])
	return m, err
}
