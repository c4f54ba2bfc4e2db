package leanattention

import (
	"reflect"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/tensor"
)

// F16 is an IEEE 754 binary16 number and BF16 a bfloat16 number, both kept as
// their 16 bits. They are storage types: keys and values may be stored in
// them, arithmetic is done in float32 (float64 where the query is float64).
type (
	F16  = half.Float16
	BF16 = half.BFloat16
)

// Float16 and BFloat16 are the element types of tensors of [F16] and [BF16],
// for [CacheConfig] and for key and value nodes. Gorgonia carries such tensors
// (as inputs, through reshape, transpose, slice and concat) but computes
// nothing on them.
var (
	Float16  = tensor.Dtype{Type: reflect.TypeOf(F16(0))}
	BFloat16 = tensor.Dtype{Type: reflect.TypeOf(BF16(0))}
)

func init() {
	tensor.Register(Float16)
	tensor.Register(BFloat16)
}

// storageType is the engine's name for a tensor's element type.
func storageType(t tensor.Dtype) (attn.DType, bool) {
	switch t {
	case tensor.Float32:
		return attn.Float32, true
	case tensor.Float64:
		return attn.Float64, true
	case Float16:
		return attn.Float16, true
	case BFloat16:
		return attn.BFloat16, true
	}
	return 0, false
}

func isQueryType(t tensor.Dtype) bool { return t == tensor.Float32 || t == tensor.Float64 }

// isDeviceQueryType says whether queries on a GPU may have type t.
func isDeviceQueryType(t tensor.Dtype) bool {
	return t == tensor.Float32 || t == Float16 || t == BFloat16
}
