package hf

import (
	"encoding/binary"
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/half"
)

// littleEndian: files are little endian, and in place only where the machine is.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// float32s returns the elements in row-major order: in place if they are F32,
// without gaps, aligned and in the machine's byte order, and otherwise in new
// memory. The type must be one that widens.
func (e *entry) float32s() []float32 {
	if e.stride != nil {
		return e.gather()
	}
	n := len(e.data) / elementBytes[e.dtype]
	if e.dtype == f32 {
		if s, ok := inPlace[float32](e.data, n); ok {
			return s
		}
	}
	dst := make([]float32, n)
	bits, aligned := inPlace[uint16](e.data, n)
	switch {
	case aligned && e.dtype == f16:
		half.DecodeFloat16(dst, bits)
	case aligned && e.dtype == bf16:
		half.DecodeBFloat16(dst, bits)
	default:
		for i := range dst {
			dst[i] = e.at(i)
		}
	}
	return dst
}

// at returns the element that lies i elements into the data.
func (e *entry) at(i int) float32 {
	switch e.dtype {
	case f32:
		return math.Float32frombits(binary.LittleEndian.Uint32(e.data[4*i:]))
	case f16:
		return half.Float16(binary.LittleEndian.Uint16(e.data[2*i:])).Float32()
	default:
		return half.BFloat16(binary.LittleEndian.Uint16(e.data[2*i:])).Float32()
	}
}

// gather is float32s for a tensor with strides: element (i, j, ...) lies at
// i*stride[0] + j*stride[1] + ... .
func (e *entry) gather() []float32 {
	n := 1
	for _, d := range e.shape {
		n *= d
	}
	dst, at := make([]float32, n), make([]int, len(e.shape))
	for i := range dst {
		offset := 0
		for d, x := range at {
			offset += x * e.stride[d]
		}
		dst[i] = e.at(offset)
		for d := len(at) - 1; d >= 0; d-- { // the next element in row-major order
			if at[d]++; at[d] < e.shape[d] {
				break
			}
			at[d] = 0
		}
	}
	return dst
}

// inPlace returns the bytes as n elements if the machine can read them so.
func inPlace[T uint16 | float32](data []byte, n int) ([]T, bool) {
	if n == 0 {
		return nil, true
	}
	p := unsafe.Pointer(unsafe.SliceData(data))
	if !littleEndian || uintptr(p)%unsafe.Alignof(*new(T)) != 0 {
		return nil, false
	}
	return unsafe.Slice((*T)(p), n), true
}
