package kvstore

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/tensor"
)

// formats are what caches store keys and values as, by their numbers in saved sequences.
var formats = [...]struct {
	DType  tensor.Dtype // as a configuration has it
	stored attn.DType
	scales attn.Scales
}{
	1: {tensor.Float32, attn.Float32, attn.NoScales},
	2: {operand.Float16, attn.Float16, attn.NoScales},
	3: {operand.BFloat16, attn.BFloat16, attn.NoScales},
}

// FormatOf returns the format of keys and values of these numbers of elements for a type, in pages of some heads and tokens. inKeys
// says that values are the first elements of their keys.
func FormatOf(t tensor.Dtype, dim, valueDim, heads, tokens int, inKeys bool) (f attn.Format, ok bool) {
	line := formats[Number(t)]
	if inKeys {
		f = attn.Format{Planes: [attn.MostPlanes]attn.Plane{{DType: line.stored, Dim: dim, Scales: line.scales}}, KeyPlanes: 1, Value: attn.Columns{Dim: valueDim}}
		return f.Packed(heads, tokens), Number(t) > 0
	}
	f = attn.Separate(line.stored, dim, valueDim, attn.PageStrides{}, attn.PageStrides{}).Packed(heads, tokens)
	for i := range 2 {
		f.Planes[i].Scales = line.scales
	}
	return f, Number(t) > 0
}

// Number returns the number of a type in saved sequences; 0: caches do not have the type.
func Number(t tensor.Dtype) int {
	for i := range formats {
		if i > 0 && formats[i].DType == t {
			return i
		}
	}
	return 0
}

// TypeOf returns the type with a number, of 1 to most.
func TypeOf(number uint32) (t tensor.Dtype, most int, ok bool) {
	most = len(formats) - 1
	if number < 1 || number > uint32(most) {
		return t, most, false
	}
	return formats[number].DType, most, true
}
