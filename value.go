package leanattention

import (
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// readSeed is the number of a seed.
func readSeed(op string, v G.Value) (int64, error) {
	t, isTensor := v.(*tensor.Dense)
	at := ongpu.PlaceOf(v)
	switch {
	case v == nil || isTensor && t == nil:
		return 0, errs.Errorf(op, ErrShape, "seed is nil")
	case at != nil:
		return 0, errs.Errorf(op, ErrUnsupported, "seed is on %v; it must be in %s", at, errs.Host)
	case isTensor && !t.IsNativelyAccessible():
		return 0, errs.Errorf(op, ErrUnsupported, "seed lies in memory that Go cannot read")
	case isTensor: // Gorgonia's scalars are no tensors, as a rule
		if err := checkSeed(op, operand.OfTensor("seed", t)); err != nil {
			return 0, err
		}
	}
	switch x := v.Data().(type) {
	case int:
		return int64(x), nil
	case int32:
		return int64(x), nil
	case int64:
		return x, nil
	}
	return 0, errs.Errorf(op, ErrDType, "seed is a %T; it must be a scalar of int, int32 or int64", v)
}

// F16 is an IEEE 754 binary16 number, and BF16 a bfloat16 number. Both are types for storage, of keys, values and weights: arithmetic
// is in float32, or in float64 if the query is float64.
type (
	F16  = half.Float16
	BF16 = half.BFloat16
)

// Float16 and BFloat16 are the element types of tensors of [F16] and [BF16], for [CacheConfig], for nodes of keys and values, and for
// weights. Gorgonia accepts such tensors as inputs, and in reshape, transpose, slice and concat, but computes nothing on them.
var (
	Float16  = operand.Float16
	BFloat16 = operand.BFloat16
)

// E4M3 is the element type of caches ([CacheConfig]) that store keys and values as 8-bit floating-point numbers with 4 bits of
// exponent and 3 bits of fraction, as the OCP specification has them (E4M3FN). There are no tensors of the type.
var E4M3 = operand.E4M3

// Q4 is the element type of caches ([CacheConfig]) that store keys and values in 4 bits. 32 neighbours of a row are an element of 18
// bytes: a scale of 16 bits, and for each number an index of 4 bits to integers from -127 to 111 that suit a normal distribution. Keys
// are multiplied by a Hadamard matrix of 32 x 32 before they are rounded, and queries before scores: this spreads outliers, and leaves
// scores as they are. There are no tensors of the type.
var Q4 = operand.Q4
