package hf

import (
	"encoding/binary"
	"math"
	"unsafe"

	la "gorgonia.org/leanattention"
)

// littleEndian: files are little endian, and in place only where the machine is.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// stored returns the elements in row-major order, as a slice of the type that
// they are stored in. The type must be one that widens.
func (e *entry) stored() any {
	switch e.dtype {
	case f32:
		return rowMajor(e, loadFloat32)
	case f16:
		return rowMajor(e, loadFloat16)
	default:
		return rowMajor(e, loadBFloat16)
	}
}

// float32s returns the elements as float32.
func (e *entry) float32s() []float32 {
	switch s := e.stored().(type) {
	case []la.F16:
		dst := make([]float32, len(s))
		for i, x := range s {
			dst[i] = x.Float32()
		}
		return dst
	case []la.BF16:
		dst := make([]float32, len(s))
		for i, x := range s {
			dst[i] = x.Float32()
		}
		return dst
	default:
		return s.([]float32)
	}
}

// Elements as files have them.

func loadFloat32(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }

func loadFloat16(b []byte) la.F16 { return la.F16(binary.LittleEndian.Uint16(b)) }

func loadBFloat16(b []byte) la.BF16 { return la.BF16(binary.LittleEndian.Uint16(b)) }

// rowMajor returns the elements of e in row-major order: in place if they lie
// without gaps, aligned and in the machine's byte order, and else in new memory.
// Element (i, j, ...) lies at i*stride[0] + j*stride[1] + ... .
func rowMajor[T any](e *entry, load func([]byte) T) []T {
	size, n := int(unsafe.Sizeof(*new(T))), 1
	for _, d := range e.shape {
		n *= d
	}
	if e.stride == nil {
		if s, ok := inPlace[T](e.data, n); ok {
			return s
		}
	}
	dst, at := make([]T, n), make([]int, len(e.shape))
	for i := range dst {
		offset := i
		if e.stride != nil {
			offset = 0
			for d, x := range at {
				offset += x * e.stride[d]
			}
			for d := len(at) - 1; d >= 0; d-- { // the next element in row-major order
				if at[d]++; at[d] < e.shape[d] {
					break
				}
				at[d] = 0
			}
		}
		dst[i] = load(e.data[offset*size:])
	}
	return dst
}

// bytes is the size of the elements, as they are stored.
func (e *entry) bytes() int64 {
	n := int64(elementBytes[e.dtype])
	for _, d := range e.shape {
		n *= int64(d)
	}
	return n
}

// inPlace returns the bytes as n elements if the machine can read them so.
func inPlace[T any](data []byte, n int) ([]T, bool) {
	if n == 0 {
		return nil, true
	}
	p := unsafe.Pointer(unsafe.SliceData(data))
	if !littleEndian || uintptr(p)%unsafe.Alignof(*new(T)) != 0 {
		return nil, false
	}
	return unsafe.Slice((*T)(p), n), true
}
