package model

import (
	"fmt"
	"math"
	"unsafe"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/tensor"
)

// arena is memory for weights: many of them in one piece, so that nearly all of
// it is of large pages where the system has them. Decoding reads every weight
// for every token, a tenth faster so: small pages keep memory waiting for
// addresses.
type arena []byte

// take is n new elements of a number type.
func take[T any](a *arena, n int) []T {
	const piece, line = 64 << 20, 64
	size := n * int(unsafe.Sizeof(*new(T)))
	if size > len(*a) {
		*a = make([]byte, max(piece, size))
		largePages(*a)
	}
	s := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(*a))), n)
	*a = (*a)[min((size+line-1)/line*line, len(*a)):]
	return s
}

// convert is t in another type, in memory of a, or t itself where that is the
// type that it has.
func convert(a *arena, t *tensor.Dense, to tensor.Dtype) (*tensor.Dense, error) {
	from := t.Dtype()
	if !isWeight(from) || !isWeight(to) {
		return nil, fmt.Errorf("%w: elements of %v as %v", ErrConfig, from, to)
	}
	if from == to {
		return t, nil
	}
	n := t.Shape().TotalSize()
	wide, ok := t.Data().([]float32)
	switch {
	case ok:
	case to == tensor.Float32:
		wide = take[float32](a, n)
	default:
		wide = make([]float32, n) // on the way to another type
	}
	switch data := t.Data().(type) {
	case []la.F16:
		half.DecodeFloat16(wide, data)
	case []la.BF16:
		half.DecodeBFloat16(wide, data)
	}
	var data any = wide
	switch to {
	case la.Float16:
		short := take[la.F16](a, n)
		half.EncodeFloat16(short, wide)
		for i, v := range short {
			if v := float64(v.Float32()); math.IsInf(v, 0) && v != float64(wide[i]) {
				return nil, fmt.Errorf("%w: element %d is %v, more than float16 can hold", ErrConfig, i, wide[i])
			}
		}
		data = short
	case la.BFloat16:
		short := take[la.BF16](a, n)
		half.EncodeBFloat16(short, wide)
		data = short
	}
	return tensor.New(tensor.WithShape(t.Shape()...), tensor.WithBacking(data)), nil
}

// isWeight reports whether weights may be of type t.
func isWeight(t tensor.Dtype) bool {
	return t == tensor.Float32 || t == la.Float16 || t == la.BFloat16
}
