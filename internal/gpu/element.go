package gpu

import "gorgonia.org/leanattention/internal/attn"

// Stored are the types that keys and values may have.
var Stored = []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}

// Elements are the types that there are kernels for.
var Elements = [...]struct {
	DType attn.DType
	Name  string
	code  int32 // what kernels call it
	Bytes int
	Depth int // keys of a tensor core product
}{
	{attn.Float16, "f16", 1, 2, 16},
	{attn.BFloat16, "bf16", 2, 2, 16},
	{attn.Float32, "f32", 0, 4, 8},
}

// ElementOf is an index of Elements, -1 for other types.
func ElementOf(d attn.DType) int {
	for i := range Elements {
		if Elements[i].DType == d {
			return i
		}
	}
	return -1
}

// Code is how kernels call a type.
func Code(d attn.DType) int32 { return Elements[ElementOf(d)].code }
