package leanattention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// denseValue is v as a tensor in memory that this process can read.
func denseValue(op, name string, v G.Value) (*tensor.Dense, error) {
	t, ok := v.(*tensor.Dense)
	at := placeOf(v)
	switch {
	case v == nil || ok && t == nil:
		return nil, errorf(op, ErrShape, "%s is nil", name)
	case at != nil:
		return nil, errorf(op, ErrUnsupported, "%s is on %v; it must be in %s", name, at, hostName)
	case !ok:
		return nil, errorf(op, ErrUnsupported, "%s is a %T; it must be a *tensor.Dense", name, v)
	case !t.IsNativelyAccessible():
		return nil, errorf(op, ErrUnsupported, "%s lies in memory that Go cannot read", name)
	case t.Dtype() == tensor.Dtype{}:
		return nil, errorf(op, ErrDType, "%s has no element type: it is an empty tensor", name)
	case t.DataSize() == 0:
		return nil, errorf(op, ErrShape, "%s has no elements, shape %v", name, t.Shape())
	case t.IsMasked():
		return nil, errorf(op, ErrUnsupported, "%s is a masked tensor", name)
	}
	return t, nil
}

func valueOperand(name string, t *tensor.Dense) operand {
	return operand{name, t.Shape(), t.Dtype()}
}

// storageBuffer is [dense.Elements] of a tensor of keys or values.
func storageBuffer(t *tensor.Dense) cpu.Buffer {
	switch t.Dtype() {
	case tensor.Float32:
		return bufferOf(attn.Float32, dense.Elements[float32](t))
	case tensor.Float64:
		return bufferOf(attn.Float64, dense.Elements[float64](t))
	case Float16:
		return bufferOf(attn.Float16, dense.Elements[F16](t))
	default:
		return bufferOf(attn.BFloat16, dense.Elements[BF16](t))
	}
}

func bufferOf[T any](d attn.DType, s []T) cpu.Buffer {
	return cpu.Buffer{DType: d, Ptr: unsafe.Pointer(unsafe.SliceData(s)), Len: len(s)}
}

// readLengths appends the live lengths in t to dst, each checked against the
// capacity.
func readLengths(op string, dst []int, t *tensor.Dense, capacity int) ([]int, error) {
	switch t.Dtype() {
	case tensor.Int:
		return appendLengths(op, dst, dense.Elements[int](t), capacity)
	case tensor.Int64:
		return appendLengths(op, dst, dense.Elements[int64](t), capacity)
	default:
		return appendLengths(op, dst, dense.Elements[int32](t), capacity)
	}
}

func appendLengths[T int | int32 | int64](op string, dst []int, src []T, capacity int) ([]int, error) {
	for b, n := range src {
		if n < 0 || int64(n) > int64(capacity) {
			return dst, errorf(op, ErrLength, "lengths[%d] is %d, outside [0, %d]", b, n, capacity)
		}
		dst = append(dst, int(n))
	}
	return dst, nil
}
