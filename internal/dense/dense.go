// Package dense is tensors as memory: where the elements of a *tensor.Dense
// lie, and the same elements in the order that kernels want them.
package dense

import (
	"math"
	"math/bits"
	"slices"
	"strings"
	"unsafe"

	host "gorgonia.org/leanattention/internal/memory"

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
	dst := Make[T](shape.TotalSize())[:0]
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

// New is a new tensor of zeros. It panics with a *memory.Shortage where memory is short, as [Make], [Unwritten] and [Memory] do, and
// Go would end the process. Ops recover.
func New(of tensor.Dtype, shape ...int) *tensor.Dense {
	claim(bytesOf(of.Size(), shape...))
	return tensor.New(tensor.Of(of), tensor.WithShape(shape...))
}

// Make is make, for elements that may be many.
func Make[T any](n int) []T {
	claim(bytesOf(unsafe.Sizeof(*new(T)), n))
	return make([]T, n)
}

// bytesOf is the bytes of elements of a size.
func bytesOf(size uintptr, shape ...int) int {
	bytes := uint64(size)
	for _, n := range shape {
		hi, lo := bits.Mul64(bytes, uint64(n))
		if hi != 0 || lo > math.MaxInt {
			free, _ := host.Now()
			panic(&host.Shortage{Bytes: math.MaxInt64, Free: free})
		}
		bytes = lo
	}
	return int(bytes)
}

// claim asks for memory, if it is much.
func claim(bytes int) {
	if bytes < muchBytes {
		return
	}
	if err := host.Check(int64(bytes), int64(bytes)); err != nil {
		panic(err)
	}
}

// Unwritten is a new tensor of T, and its elements, all of which are to be written: they may lie in memory that was recycled.
// (Handing tensor.New a slice costs one allocation more, and decoding has a hundred nodes a token.)
func Unwritten[T any](of tensor.Dtype, shape tensor.Shape) (*tensor.Dense, []T) {
	size := unsafe.Sizeof(*new(T))
	if bytes := bytesOf(size, shape...); bytes >= muchBytes {
		n := bytes / int(size)
		y := again[T](n)
		if y == nil {
			y = Memory[T](n)
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(y)), y
	}
	t := tensor.New(tensor.Of(of), tensor.WithShape(shape...))
	y := Backing[T](t)
	poison(y)
	return t, y
}

// Poison is for tests: memory with whatever values has NaN in it, of small tensors too, and so has what is recycled.
var Poison bool

func poison[T any](x []T) {
	if !Poison {
		return
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(*new(T))))
	for i := range b {
		b[i] = 0xff
	}
}

// muchBytes take long to clear.
const muchBytes = 1 << 18

// Memory is that of n elements with whatever values: prompts have outputs of many megabytes, which make would clear on
// one thread while all others wait. What a strings.Builder grows by is not cleared; if it were, or began elsewhere,
// nothing would be wrong but the time. T has no pointers.
func Memory[T any](n int) []T {
	claim(bytesOf(unsafe.Sizeof(*new(T)), n))
	x := memory[T](n)
	poison(x)
	return x
}

// memory is Memory as it comes.
func memory[T any](n int) []T {
	bytes := bytesOf(unsafe.Sizeof(*new(T)), n)
	if bytes < muchBytes {
		return make([]T, n)
	}
	var b strings.Builder
	b.Grow(bytes)
	b.WriteByte(0) // an empty string has no address
	p := unsafe.Pointer(unsafe.StringData(b.String()))
	if uintptr(p)%unsafe.Alignof(*new(T)) != 0 {
		return make([]T, n)
	}
	LargePages(unsafe.Slice((*byte)(p), bytes))
	return unsafe.Slice((*T)(p), n)
}

// Printable is args as fmt prints them in full: a [tensor.Dtype] prints its type's name, of which types without
// a name have none, and panics where it has no type.
func Printable(args []any) []any {
	args = slices.Clone(args)
	for i, a := range args {
		if d, ok := a.(tensor.Dtype); ok {
			switch {
			case d.Type == nil:
				args[i] = "no type"
			case d.Type.Name() == "":
				args[i] = d.Type.String()
			}
		}
	}
	return args
}
