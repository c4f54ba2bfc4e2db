package attn

import "fmt"

// DType is the element type of a tensor in memory. An engine may compute in another type.
type DType uint8

const (
	Float32 DType = iota
	Float64
	Float16
	BFloat16
	E4M3          // 8 bits: see package half
	Int8          // from -127 to 127; -128 is NaN
	Q4            // 32 numbers of 4 bits with a scale: see package half
	DTypes = iota // the number of types
)

// dtypes describes each type.
var dtypes = [DTypes]struct {
	name    string
	size    int
	columns int
}{
	Float32:  {"float32", 4, 1},
	Float64:  {"float64", 8, 1},
	Float16:  {"float16", 2, 1},
	BFloat16: {"bfloat16", 2, 1},
	E4M3:     {"e4m3", 1, 1},
	Int8:     {"int8", 1, 1},
	Q4:       {"q4", 18, 32},
}

// Size returns the size of an element in bytes, 0 if d is not one of the constants.
func (d DType) Size() int {
	if d >= DTypes {
		return 0
	}
	return dtypes[d].size
}

// Columns returns how many numbers an element has: rows of a type have a multiple of these.
func (d DType) Columns() int {
	if d >= DTypes {
		return 1
	}
	return dtypes[d].columns
}

// String returns the name of d as Go spells it.
func (d DType) String() string {
	if d >= DTypes {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypes[d].name
}
