package gpu

import "gorgonia.org/leanattention/internal/attn"

// Types are the element types that kernels know, Halves those of 16 bits. Eights, and Q4, are types of keys and values alone: Eights have
// scales, and an element of Q4 is 32 numbers.
var (
	Types  = []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	Halves = []attn.DType{attn.Float16, attn.BFloat16}
	Eights = []attn.DType{attn.E4M3, attn.Int8}
)

// elements is what kernels make of a type; nothing of those that they do not know.
var elements = [attn.DTypes]struct {
	name  string // in the names of kernels
	depth int    // keys of a tensor core product
}{
	attn.Float16:  {"f16", 16},
	attn.BFloat16: {"bf16", 16},
	attn.Float32:  {"f32", 8},
	attn.E4M3:     {"e4m3", 16},
	attn.Int8:     {"int8", 16},
	attn.Q4:       {"q4", 16},
}

// Known says whether kernels know a type, with or without scales.
func Known(d attn.DType) bool { return d < attn.DTypes && elements[d].name != "" }

// IsTensor says whether kernels know a type of tensors.
func IsTensor(d attn.DType) bool { return Known(d) && d.Size() > 1 && d.Columns() == 1 }

// Name is a type's in the names of kernels.
func Name(d attn.DType) string { return elements[d].name }

// Depth is how many keys of a type a tensor core product takes.
func Depth(d attn.DType) int { return elements[d].depth }

// Code is what kernels call a type: they number types as attn does (kernels/types.cuh).
func Code(d attn.DType) int32 { return int32(d) }
