package hf

import (
	"math"
	"math/bits"
)

// dtype is the name of an element type in safetensors.
type dtype string

const (
	f32  dtype = "F32"
	f16  dtype = "F16"
	bf16 dtype = "BF16"
)

// elementBytes has the size of an element of every type that a file may have. Some of the types are not those of
// weights: a file may also have other tensors.
var elementBytes = map[dtype]int{
	"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
	"I16": 2, "U16": 2, f16: 2, bf16: 2,
	"I32": 4, "U32": 4, f32: 4,
	"I64": 8, "U64": 8, "F64": 8, "C64": 8,
}

// widens reports whether Tensor and Float32 can read the type.
func (d dtype) widens() bool { return d == f32 || d == f16 || d == bf16 }

// entry is one tensor of a file. The field data aliases the mapping.
type entry struct {
	name   string // name in the file
	file   string // the file's path, for errors
	dtype  dtype
	shape  []int
	stride []int // in elements; nil is row-major without gaps
	data   []byte
	in     *file // the file; nil: data is memory of the caller
}

// product returns the number of elements of a shape. It returns false if a dimension or the product does not fit an
// int. The empty shape is that of a scalar, with one element.
func product(shape []uint64) (int, bool) {
	n, zero := uint64(1), false
	for _, d := range shape {
		if d > math.MaxInt {
			return 0, false
		}
		if d == 0 {
			zero = true
			continue
		}
		hi, lo := bits.Mul64(n, d)
		if hi != 0 || lo > math.MaxInt {
			// The product would fit only with a zero in a later dimension, and no file needs that case.
			return 0, false
		}
		n = lo
	}
	if zero {
		return 0, true
	}
	return int(n), true
}

// ints converts dimensions. product must have accepted the dimensions.
func ints(shape []uint64) []int {
	s := make([]int, len(shape))
	for i, d := range shape {
		s[i] = int(d)
	}
	return s
}
