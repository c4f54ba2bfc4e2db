// Package dense is tensors as memory: where the elements of a *tensor.Dense
// lie, and the same elements in the order that kernels want them.
package dense

import (
	"unsafe"

	"gorgonia.org/tensor"
)

// Backing is the memory of t as []T, in the order that it lies there. The
// element type of t must have T's size, unless T is byte, and Go must be able to
// read it. It does not allocate, unlike t.Data().
func Backing[T any](t *tensor.Dense) []T {
	n := int(t.MemSize() / unsafe.Sizeof(*new(T)))
	if n == 0 {
		return nil
	}
	// The tensor keeps its memory alive; only its address comes as a uintptr.
	address := t.Uintptr()
	return unsafe.Slice(*(**T)(unsafe.Pointer(&address)), n)
}

// RowMajor reports whether element (i, j, ...) of t lies where the shape alone
// says. Slices and lazy transposes of tensors are not so, nor are column-major
// ones. Strides tell, for every kind of view; flags do not.
func RowMajor(t *tensor.Dense) bool {
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

// Elements is t's elements in row-major order: its own memory where that is how
// they lie, so it must not be written, else a copy.
func Elements[T any](t *tensor.Dense) []T {
	src := Backing[T](t)
	if RowMajor(t) {
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
