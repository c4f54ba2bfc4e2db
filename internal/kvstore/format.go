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
	4: {operand.E4M3, attn.E4M3, attn.ScalesByToken},
	5: {tensor.Int8, attn.Int8, attn.ScalesByToken},
}

// LatentGroup is the number of columns of a latent vector that share a scale.
const LatentGroup = 128

// FormatOf returns the format of keys and values of these numbers of elements for a type, in pages of some heads and tokens. inKeys
// says that values are the first elements of their keys. Types with scales then store values in groups of columns, and the
// rest of a key as bfloat16.
func FormatOf(t tensor.Dtype, dim, valueDim, heads, tokens int, inKeys bool) (f attn.Format, ok bool) {
	line := formats[Number(t)]
	switch {
	case inKeys && line.scales != attn.NoScales:
		f = attn.Format{
			Planes:    [attn.MostPlanes]attn.Plane{{DType: line.stored, Dim: valueDim, Scales: attn.ScalesByGroup, Group: LatentGroup}},
			KeyPlanes: 1, Value: attn.Columns{Dim: valueDim},
		}
		if dim > valueDim {
			f.Planes[1], f.KeyPlanes = attn.Plane{DType: attn.BFloat16, Dim: dim - valueDim}, 2
		}
		return f.Packed(heads, tokens), true
	case inKeys:
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
