package leanattention

import (
	"fmt"
	"reflect"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/tensor"
)

// denseValue is v as a tensor in memory that this process can read.
func denseValue(op, name string, v G.Value) (*tensor.Dense, error) {
	t, ok := v.(*tensor.Dense)
	at := placeOf(v)
	switch {
	case v == nil || ok && t == nil:
		return nil, errs.Errorf(op, ErrShape, "%s is nil", name)
	case at != nil:
		return nil, errs.Errorf(op, ErrUnsupported, "%s is on %v; it must be in %s", name, at, errs.Host)
	case !ok:
		return nil, errs.Errorf(op, ErrUnsupported, "%s is a %T; it must be a *tensor.Dense", name, v)
	case !t.IsNativelyAccessible():
		return nil, errs.Errorf(op, ErrUnsupported, "%s lies in memory that Go cannot read", name)
	case t.Dtype() == tensor.Dtype{}:
		return nil, errs.Errorf(op, ErrDType, "%s has no element type: it is an empty tensor", name)
	case t.DataSize() == 0:
		return nil, errs.Errorf(op, ErrShape, "%s has no elements, shape %v", name, t.Shape())
	case t.IsMasked():
		return nil, errs.Errorf(op, ErrUnsupported, "%s is a masked tensor", name)
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
	case BFloat16:
		return bufferOf(attn.BFloat16, dense.Elements[BF16](t))
	}
	panic(fmt.Sprintf("keys or values of %v", t.Dtype()))
}

func bufferOf[T any](d attn.DType, s []T) cpu.Buffer {
	return cpu.Buffer{DType: d, Ptr: unsafe.Pointer(unsafe.SliceData(s)), Len: len(s)}
}

// newBuffer is memory for keys or values of a cache.
func newBuffer(t attn.DType, elements int) cpu.Buffer {
	switch t.Size() {
	case 2:
		return bufferOf(t, make([]uint16, elements))
	case 4:
		return bufferOf(t, make([]uint32, elements))
	case 8:
		return bufferOf(t, make([]uint64, elements))
	}
	panic(fmt.Sprintf("a cache of %v", t))
}

// bufferBytes is the memory of a buffer.
func bufferBytes(b cpu.Buffer) []byte {
	return unsafe.Slice((*byte)(b.Ptr), b.Len*b.DType.Size())
}

// rowMajorBytes is the memory of t's elements in row-major order: its own where
// that is how they lie. The caller keeps t alive.
func rowMajorBytes(t *tensor.Dense) []byte {
	switch t.Dtype().Size() {
	case 2:
		return gpu.BytesOf(dense.Elements[uint16](t))
	case 4:
		return gpu.BytesOf(dense.Elements[uint32](t))
	}
	panic(fmt.Sprintf("a tensor of %v on a GPU", t.Dtype()))
}

// oneElement is v, or if it is a scalar where a tensor of one element is wanted,
// that tensor.
func oneElement(v G.Value, shape tensor.Shape) G.Value {
	var backing any
	switch s := v.(type) {
	case *G.F32:
		backing = []float32{float32(*s)}
	case *G.F64:
		backing = []float64{float64(*s)}
	case *tensor.Dense:
		if s == nil || sameShape(s.Shape(), shape) || s.Shape().TotalSize() != 1 || shape.TotalSize() != 1 || !s.IsNativelyAccessible() {
			return v
		}
		switch s.Dtype() {
		case tensor.Float32:
			backing = dense.Elements[float32](s)
		case tensor.Float64:
			backing = dense.Elements[float64](s)
		default:
			return v
		}
	default:
		return v
	}
	if shape.TotalSize() != 1 {
		return v
	}
	return tensor.New(tensor.WithShape(shape.Clone()...), tensor.WithBacking(backing))
}

// readLengths appends the lengths in t, which is of a name, to dst, each checked against the
// capacity.
func readLengths(op, name string, dst []int, t *tensor.Dense, capacity int) ([]int, error) {
	switch t.Dtype() {
	case tensor.Int:
		return appendLengths(op, name, dst, dense.Elements[int](t), capacity)
	case tensor.Int64:
		return appendLengths(op, name, dst, dense.Elements[int64](t), capacity)
	default:
		return appendLengths(op, name, dst, dense.Elements[int32](t), capacity)
	}
}

func appendLengths[T int | int32 | int64](op, name string, dst []int, src []T, capacity int) ([]int, error) {
	for b, n := range src {
		if n < 0 || int64(n) > int64(capacity) {
			return dst, errs.Errorf(op, ErrLength, "%s[%d] is %d, outside [0, %d]", name, b, n, capacity)
		}
		dst = append(dst, int(n))
	}
	return dst, nil
}

// readSeed is the number of a seed.
func readSeed(op string, v G.Value) (int64, error) {
	t, isTensor := v.(*tensor.Dense)
	at := placeOf(v)
	switch {
	case v == nil || isTensor && t == nil:
		return 0, errs.Errorf(op, ErrShape, "seed is nil")
	case at != nil:
		return 0, errs.Errorf(op, ErrUnsupported, "seed is on %v; it must be in %s", at, errs.Host)
	case isTensor && !t.IsNativelyAccessible():
		return 0, errs.Errorf(op, ErrUnsupported, "seed lies in memory that Go cannot read")
	case isTensor: // Gorgonia's scalars are no tensors, as a rule
		if err := checkSeed(op, valueOperand("seed", t)); err != nil {
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

// otherName is the name of b beside a's: one GPU can be opened twice.
func otherName(b, a *GPU) string {
	if b.String() == a.String() {
		return b.String() + ", opened a second time"
	}
	return b.String()
}

// inPlace is "in host memory" or "on GPU 0 (name)", beside a value on GPU other.
func inPlace(g, other *GPU) string {
	if g == nil {
		return "in " + errs.Host
	}
	if g == other {
		return "on " + g.String()
	}
	return "on " + otherName(g, other)
}

// placeOf is the GPU that a value is on, nil for the host.
func placeOf(v G.Value) *GPU {
	if d, ok := v.(*DeviceTensor); ok && d != nil {
		return d.gpu
	}
	return nil
}

// samePlace is the GPU that all values of an op are on, nil for the host. It
// refuses those that are in different places.
func samePlace(op string, names []string, in []G.Value) (*GPU, error) {
	first := placeOf(in[0])
	for i, v := range in {
		if v == nil {
			return nil, errs.Errorf(op, ErrShape, "%s is nil", names[i])
		}
		if d, ok := v.(*DeviceTensor); ok && d.problem("") != "" {
			return nil, errs.Errorf(op, ErrState, "%s", d.problem(names[i]))
		}
		if at := placeOf(v); at != first {
			return nil, errs.Errorf(op, ErrUnsupported, "%s is %s and %s %s: they must be in one place", names[0], inPlace(first, first), names[i], inPlace(at, first))
		}
	}
	return first, nil
}

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
