package model

import (
	"fmt"
	"math"
	"unsafe"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/dense"

	"gorgonia.org/tensor"
)

// convert converts every weight to the type that kind returns. Converted weights are in one allocation, so that
// nearly all of them are in large pages if the system has such: decode reads every weight for every token, and is a
// tenth faster, since small pages delay address translation.
func (w *Weights) convert(kind func(*tensor.Dense) tensor.Dtype) (err error) {
	defer shortage(&err)
	size := 0
	for p := range w.config.Weights() {
		t := w.tensors[p.Name]
		if t == nil { // another rank's weight
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
	made := arena(dense.Memory[byte](size))
	for p := range w.config.Weights() {
		if w.tensors[p.Name] == nil {
			continue
		}
		t, err := made.convert(w.tensors[p.Name], kind(w.tensors[p.Name]))
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

// lines rounds bytes up to the end of a cache line.
func lines(bytes int) int { return (bytes + 63) &^ 63 }

// arena is unused memory.
type arena []byte

// take returns n elements of a number type. They must fit.
func take[T any](a *arena, n int) []T {
	size := lines(n * int(unsafe.Sizeof(*new(T))))
	s := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData((*a)[:size]))), n)
	*a = (*a)[size:]
	return s
}

// convert returns t in another type of weights, or t itself if it has that type.
func (a *arena) convert(t *tensor.Dense, to tensor.Dtype) (*tensor.Dense, error) {
	if t.Dtype() == to {
		return t, nil
	}
	var data any
	switch n := t.Shape().TotalSize(); to {
	case la.Float16:
		data = take[la.F16](a, n)
	case la.BFloat16:
		data = take[la.BF16](a, n)
	default:
		data = take[float32](a, n)
	}
	into := tensor.New(tensor.WithShape(t.Shape()...), tensor.WithBacking(data))
	return into, convertAll(buffer(into), buffer(t))
}

// buffer returns the elements of a tensor of weights.
func buffer(t *tensor.Dense) cpu.Buffer {
	kinds := map[tensor.Dtype]attn.DType{tensor.Float32: attn.Float32, la.Float16: attn.Float16, la.BFloat16: attn.BFloat16}
	return cpu.Buffer{DType: kinds[t.Dtype()], Ptr: unsafe.Pointer(unsafe.SliceData(dense.Backing[byte](t))), Len: t.Shape().TotalSize()}
}

// piece is the number of elements that a thread converts at a time.
const piece = 1 << 16

// convertAll converts elements on all threads. The first element that float16 can't represent is an error.
func convertAll(into, from cpu.Buffer) error {
	pieces := (from.Len + piece - 1) / piece
	failed := make([]error, pieces)
	cpu.Each(cpu.Default(), pieces, min(piece, from.Len), func(i int) {
		dst, src := part(into, i), part(from, i)
		if failed[i] = vector.Convert(dst, src); failed[i] != nil || dst.DType != attn.Float16 {
			return
		}
		for j, v := range unsafe.Slice((*la.F16)(dst.Ptr), dst.Len) {
			if v&0x7fff != 0x7c00 { // not an infinity
				continue
			}
			var was [1]float32
			one := cpu.Buffer{DType: attn.Float32, Ptr: unsafe.Pointer(&was), Len: 1}
			if failed[i] = vector.Convert(one, at(src, j, 1)); failed[i] != nil {
				return
			}
			if v := was[0]; !math.IsInf(float64(v), 0) {
				failed[i] = fmt.Errorf("%w: element %d is %v, more than float16 can hold", ErrConfig, i*piece+j, v)
				return
			}
		}
	})
	for _, err := range failed {
		if err != nil {
			return err
		}
	}
	return nil
}

// part returns piece i of a buffer.
func part(b cpu.Buffer, i int) cpu.Buffer { return at(b, i*piece, min(piece, b.Len-i*piece)) }

// at returns n elements of a buffer from i on.
func at(b cpu.Buffer, i, n int) cpu.Buffer {
	b.Ptr, b.Len = unsafe.Add(b.Ptr, i*b.DType.Size()), n
	return b
}
