package leanattention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// denseValue is v as a tensor in memory that this process can read.
func denseValue(op, name string, v G.Value) (*tensor.Dense, error) {
	t, ok := v.(*tensor.Dense)
	switch {
	case v == nil || ok && t == nil:
		return nil, errorf(op, ErrShape, "%s is nil", name)
	case !ok:
		return nil, errorf(op, ErrUnsupported, "%s is a %T; it must be a *tensor.Dense", name, v)
	case !t.IsNativelyAccessible():
		return nil, errorf(op, ErrUnsupported, "%s lies in memory that Go cannot read", name)
	case t.IsMasked():
		return nil, errorf(op, ErrUnsupported, "%s is a masked tensor", name)
	}
	return t, nil
}

func valueOperand(name string, t *tensor.Dense) operand {
	return operand{name, t.Shape(), t.Dtype()}
}

// backing is the memory of t as []T, in the order that it lies there. The
// element type must have T's size.
func backing[T any](t *tensor.Dense) []T {
	n := int(t.MemSize() / unsafe.Sizeof(*new(T)))
	if n == 0 {
		return nil
	}
	// The tensor keeps its memory alive; only its address comes as a uintptr.
	address := t.Uintptr()
	return unsafe.Slice(*(**T)(unsafe.Pointer(&address)), n)
}

// rowMajor reports whether element (i, j, ...) of t lies where the shape alone
// says. Slices and lazy transposes of tensors are not.
func rowMajor(t *tensor.Dense) bool {
	shape, strides := t.Shape(), t.Strides()
	if len(strides) != len(shape) {
		return false
	}
	want := 1
	for i := len(shape) - 1; i >= 0; i-- {
		if shape[i] > 1 && strides[i] != want {
			return false
		}
		want *= shape[i]
	}
	return true
}

// elements is t's elements in row-major order: its own memory where that
// is how they lie, else a copy.
func elements[T any](t *tensor.Dense) []T {
	src := backing[T](t)
	if rowMajor(t) {
		return src[:t.Shape().TotalSize()]
	}
	shape, strides := t.Shape(), t.Strides()
	dst := make([]T, 0, shape.TotalSize())
	var walk func(axis, at int)
	walk = func(axis, at int) {
		if axis == len(shape) {
			dst = append(dst, src[at])
			return
		}
		for i := range shape[axis] {
			walk(axis+1, at+i*strides[axis])
		}
	}
	walk(0, 0)
	return dst
}

// storageBuffer is [elements] of a tensor of keys or values.
func storageBuffer(t *tensor.Dense) cpu.Buffer {
	switch t.Dtype() {
	case tensor.Float32:
		return bufferOf(cpu.Float32, elements[float32](t))
	case tensor.Float64:
		return bufferOf(cpu.Float64, elements[float64](t))
	case Float16:
		return bufferOf(cpu.Float16, elements[F16](t))
	default:
		return bufferOf(cpu.BFloat16, elements[BF16](t))
	}
}

func bufferOf[T any](d cpu.DType, s []T) cpu.Buffer {
	return cpu.Buffer{DType: d, Ptr: unsafe.Pointer(unsafe.SliceData(s)), Len: len(s)}
}

// readLengths appends the live lengths in t to dst, each checked against the
// capacity.
func readLengths(op string, dst []int, t *tensor.Dense, capacity int) ([]int, error) {
	switch t.Dtype() {
	case tensor.Int:
		return appendLengths(op, dst, elements[int](t), capacity)
	case tensor.Int64:
		return appendLengths(op, dst, elements[int64](t), capacity)
	default:
		return appendLengths(op, dst, elements[int32](t), capacity)
	}
}

func appendLengths[T int | int32 | int64](op string, dst []int, src []T, capacity int) ([]int, error) {
	for b, n := range src {
		if n < 0 || int64(n) > int64(capacity) {
			return dst, errorf(op, ErrLength, "lengths[%d] is %d, outside [0, %d]", b, n, capacity)
		}
		dst = append(dst, int(n))
	}
	return dst, nil
}
