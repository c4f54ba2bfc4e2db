package hf

import (
	"encoding/binary"
	"math"
	"slices"
	"sync"
	"unsafe"

	la "gorgonia.org/leanattention"
)

// littleEndian reports whether the machine is little endian. Files are little endian, so other machines copy elements.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// load returns the elements of a file in row-major order, as a slice of their stored type. The type must be one that
// widens. The elements of a mapped file are copied.
func (e *entry) load() (data any, err error) {
	at, mapped := e.in.offset(e.data)
	if !mapped || e.stride != nil || !littleEndian {
		err = reading(e.file, func() error {
			data = e.stored() // copies elements that have other places or bytes in memory
			return nil
		})
		return data, err
	}
	switch e.dtype {
	case f32:
		return copied[float32](e, at)
	case f16:
		return copied[la.F16](e, at)
	default:
		return copied[la.BF16](e, at)
	}
}

// copied copies elements that lie at an offset of a mapped file.
func copied[T any](e *entry, at int64) (any, error) {
	dst := make([]T, len(e.data)/int(unsafe.Sizeof(*new(T))))
	bytes := bytesOf(dst)
	return dst, shares(len(bytes), func(from, to int) error { return e.in.readAt(bytes[from:to], at+int64(from)) })
}

// bytesOf returns the memory of elements.
func bytesOf[T any](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(*new(T))))
}

// each calls do for parts of the elements in row-major order, from several goroutines. A part is a slice of the stored type
// that begins at an element, and is valid until do returns. The memory does not depend on the number of elements, if the
// file has them in row-major order.
func (e *entry) each(do func(at int, part any) error) error {
	at, mapped := e.in.offset(e.data)
	if !mapped || e.stride != nil || !littleEndian {
		data, err := e.load()
		if err != nil {
			return err
		}
		return do(0, data)
	}
	switch e.dtype {
	case f32:
		return eachOf[float32](e, at, do)
	case f16:
		return eachOf[la.F16](e, at, do)
	default:
		return eachOf[la.BF16](e, at, do)
	}
}

// partPool has the memory of parts of a tensor.
var partPool = sync.Pool{New: func() any { return new([share / 8]uint64) }}

func eachOf[T any](e *entry, at int64, do func(at int, part any) error) error {
	size := int(unsafe.Sizeof(*new(T)))
	return shares(len(e.data), func(from, to int) error {
		buffer := partPool.Get().(*[share / 8]uint64)
		defer partPool.Put(buffer)
		part := unsafe.Slice((*T)(unsafe.Pointer(buffer)), (to-from)/size)
		if err := e.in.readAt(bytesOf(part), at+int64(from)); err != nil {
			return err
		}
		return do(from/size, part)
	})
}

// rows returns the rows [from, to) of a tensor.
func (e *entry) rows(from, to int) entry {
	r := *e
	r.shape = slices.Clone(e.shape)
	r.shape[0] = to - from
	size := elementBytes[e.dtype]
	if e.stride != nil {
		r.data = e.data[from*e.stride[0]*size:]
		return r
	}
	for _, n := range e.shape[1:] {
		size *= n
	}
	r.data = e.data[from*size : to*size : to*size]
	return r
}

// stored returns the elements in row-major order, as a slice of their stored type. The type must be one that widens.
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

// Functions that decode one element from its bytes in a file.

func loadFloat32(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }

func loadFloat16(b []byte) la.F16 { return la.F16(binary.LittleEndian.Uint16(b)) }

func loadBFloat16(b []byte) la.BF16 { return la.BF16(binary.LittleEndian.Uint16(b)) }

// rowMajor returns the elements of e in row-major order. Element (i, j, ...) is at i*stride[0] + j*stride[1] + ... .
//
// The result aliases e.data if the elements have no gaps, are aligned and have the machine's byte order. Otherwise
// rowMajor copies the elements.
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
			for d := len(at) - 1; d >= 0; d-- { // advance to the next element in row-major order
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

// bytes returns the size of the elements in their stored type.
func (e *entry) bytes() int64 {
	n := int64(elementBytes[e.dtype])
	for _, d := range e.shape {
		n *= int64(d)
	}
	return n
}

// inPlace returns the bytes as a slice of n elements. It returns false if byte order or alignment do not allow that.
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
