package kvstore

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/tensor"
)

// formats are what caches store keys and values as, by their numbers in saved sequences.
var formats = [...]struct {
	DType  tensor.Dtype // as a configuration has it
	scales attn.Scales
	stored attn.DType
}{
	1:  {tensor.Float32, attn.NoScales, attn.Float32},
	2:  {operand.Float16, attn.NoScales, attn.Float16},
	3:  {operand.BFloat16, attn.NoScales, attn.BFloat16},
	4:  {operand.E4M3, attn.ScalesByToken, attn.E4M3},
	5:  {tensor.Int8, attn.ScalesByToken, attn.Int8},
	6:  {operand.E4M3, attn.ScalesByHead, attn.E4M3},
	7:  {tensor.Int8, attn.ScalesByHead, attn.Int8},
	8:  {operand.E4M3, attn.ScalesByPage, attn.E4M3},
	9:  {tensor.Int8, attn.ScalesByPage, attn.Int8},
	10: {operand.Q4, attn.NoScales, attn.Q4},
}

// HasScales reports whether elements of a type have scales.
func HasScales(t tensor.Dtype) bool { return Number(t, attn.ScalesByToken) > 0 }

// HeadScale returns scale i of a list, or 1 without a list.
func HeadScale(scales []float32, i int) float32 {
	if scales == nil {
		return 1
	}
	return scales[i]
}

// LatentGroup is the number of columns of a latent vector that share a scale.
const LatentGroup = 128

// FormatOf returns the format of keys and values of these numbers of elements for a type and its scales, in pages of some heads and
// tokens. inKeys says that values are the first elements of their keys. Types with scales then store values in groups of columns, and
// the rest of a key as bfloat16.
func FormatOf(t tensor.Dtype, scales attn.Scales, dim, valueDim, heads, tokens int, inKeys bool) (f attn.Format, ok bool) {
	n := Number(t, scales)
	stored := formats[n].stored
	switch {
	case inKeys && scales != attn.NoScales:
		f = attn.Format{
			Planes:    [attn.MostPlanes]attn.Plane{{DType: stored, Dim: valueDim, Scales: attn.ScalesByGroup, Group: LatentGroup}},
			KeyPlanes: 1, Value: attn.Columns{Dim: valueDim},
		}
		if dim > valueDim {
			f.Planes[1], f.KeyPlanes = attn.Plane{DType: attn.BFloat16, Dim: dim - valueDim}, 2
		}
	case inKeys:
		f = attn.Format{Planes: [attn.MostPlanes]attn.Plane{{DType: stored, Dim: dim}}, KeyPlanes: 1, Value: attn.Columns{Dim: valueDim}}
	default:
		f = attn.Separate(stored, dim, valueDim, attn.PageStrides{}, attn.PageStrides{})
		for i := range 2 {
			f.Planes[i].Scales = scales
		}
		f.Planes[0].Mixed = stored == attn.Q4
	}
	return f.Packed(heads, tokens), n > 0
}

// Number returns the number of a type and its scales in saved sequences; 0: caches do not have them.
func Number(t tensor.Dtype, scales attn.Scales) int {
	for i := range formats {
		if i > 0 && formats[i].DType == t && formats[i].scales == scales {
			return i
		}
	}
	return 0
}

// TypeOf returns the type and the scales with a number, of 1 to most.
func TypeOf(number uint32) (t tensor.Dtype, scales attn.Scales, most int, ok bool) {
	most = len(formats) - 1
	if number < 1 || number > uint32(most) {
		return t, scales, most, false
	}
	return formats[number].DType, formats[number].scales, most, true
}
