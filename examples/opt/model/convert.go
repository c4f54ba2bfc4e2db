package model

import (
	"fmt"
	"math"
	"unsafe"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/tensor"
)

// convert gives every weight the type that kind has for it. Those that it has to
// make lie in one piece, so that nearly all of them are in large pages where the
// system has such: decoding reads every weight for every token, a tenth faster
// so, since small pages keep memory waiting for addresses.
func (w *Weights) convert(kind func(*tensor.Dense) tensor.Dtype) error {
	size := 0
	for p := range w.config.Weights() {
		t := w.tensors[p.Name]
		if t == nil { // another rank's
			continue
		}
		from, to := t.Dtype(), kind(t)
		if !isWeight(from) || !isWeight(to) {
			return fmt.Errorf("weight %s: %w: elements of %v as %v", p.Name, ErrConfig, from, to)
		}
		if from != to {
			size += lines(t.Shape().TotalSize() * int(to.Size()))
		}
	}
	memory := arena(make([]byte, size))
	dense.LargePages(memory)
	for p := range w.config.Weights() {
		if w.tensors[p.Name] == nil {
			continue
		}
		t, err := memory.convert(w.tensors[p.Name], kind(w.tensors[p.Name]))
		if err != nil {
			return fmt.Errorf("weight %s: %w", p.Name, err)
		}
		w.tensors[p.Name] = t
	}
	return nil
}

// isWeight reports whether weights may be of type t.
func isWeight(t tensor.Dtype) bool {
	return t == tensor.Float32 || t == la.Float16 || t == la.BFloat16
}

// lines is so many bytes up to the end of a cache line.
func lines(bytes int) int { return (bytes + 63) &^ 63 }

// arena is memory that has not been handed out.
type arena []byte

// take is n elements of a number type. There has to be room for them.
func take[T any](a *arena, n int) []T {
	size := lines(n * int(unsafe.Sizeof(*new(T))))
	s := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData((*a)[:size]))), n)
	*a = (*a)[size:]
	return s
}

// convert is t in another type of weights, or t itself where that is the type
// that it has.
func (a *arena) convert(t *tensor.Dense, to tensor.Dtype) (*tensor.Dense, error) {
	if t.Dtype() == to {
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
