// Package operand has what is known of the operands of an op: shapes, element types, and their memory in the host.
package operand

import (
	"fmt"
	"math"
	"math/bits"
	"reflect"
	"slices"
	"unsafe"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/tensor"
)

// Operand is what is known of an argument before it has a value.
type Operand struct {
	Name  string
	Shape tensor.Shape
	DType tensor.Dtype
}

// New is an operand.
func New(name string, shape tensor.Shape, t tensor.Dtype) Operand { return Operand{name, shape, t} }

// OfNode describes node n. Gorgonia itself checks neither the rank of an
// op's inputs nor, when it cannot, says so without a panic.
func OfNode(op, name string, n *G.Node) (o Operand, err error) {
	if n == nil {
		return o, errs.Errorf(op, errs.ErrGraph, "%s is nil", name)
	}
	defer func() {
		if r := recover(); r != nil {
			err = errs.Errorf(op, errs.ErrDType, "%s has no element type: %v", name, r)
		}
	}()
	return Operand{name, n.Shape(), n.Dtype()}, nil
}

// OfTensor describes tensor t.
func OfTensor(name string, t *tensor.Dense) Operand {
	return Operand{name, t.Shape(), t.Dtype()}
}

// StorageBuffer is [dense.Elements] of a tensor of keys or values.
func StorageBuffer(t *tensor.Dense) cpu.Buffer {
	switch t.Dtype() {
	case tensor.Float32:
		return bufferOf(attn.Float32, dense.Elements[float32](t))
	case tensor.Float64:
		return bufferOf(attn.Float64, dense.Elements[float64](t))
	case Float16:
		return bufferOf(attn.Float16, dense.Elements[half.Float16](t))
	case BFloat16:
		return bufferOf(attn.BFloat16, dense.Elements[half.BFloat16](t))
	}
	panic(fmt.Sprintf("keys or values of %v", t.Dtype()))
}

func bufferOf[T any](d attn.DType, s []T) cpu.Buffer {
	return cpu.Buffer{DType: d, Ptr: unsafe.Pointer(unsafe.SliceData(s)), Len: len(s)}
}

// NewBuffer is memory for keys or values of a cache.
func NewBuffer(t attn.DType, elements int) cpu.Buffer {
	if t.Columns() > 1 {
		b := bufferOf(t, make([]uint8, elements*t.Size()))
		b.Len = elements
		return b
	}
	switch t.Size() {
	case 1:
		return bufferOf(t, make([]uint8, elements))
	case 2:
		return bufferOf(t, make([]uint16, elements))
	case 4:
		return bufferOf(t, make([]uint32, elements))
	case 8:
		return bufferOf(t, make([]uint64, elements))
	}
	panic(fmt.Sprintf("a cache of %v", t))
}

// BufferBytes is the memory of a buffer.
func BufferBytes(b cpu.Buffer) []byte {
	return unsafe.Slice((*byte)(b.Ptr), b.Len*b.DType.Size())
}

// RowMajorBytes is the memory of t's elements in row-major order: its own where
// that is how they lie. The caller keeps t alive.
func RowMajorBytes(t *tensor.Dense) []byte {
	switch t.Dtype().Size() {
	case 2:
		return gpu.BytesOf(dense.Elements[uint16](t))
	case 4:
		return gpu.BytesOf(dense.Elements[uint32](t))
	}
	panic(fmt.Sprintf("a tensor of %v on a GPU", t.Dtype()))
}

// OneElement is v, or if it is a scalar where a tensor of one element is wanted,
// that tensor.
func OneElement(v G.Value, shape tensor.Shape) G.Value {
	var backing any
	switch s := v.(type) {
	case *G.F32:
		backing = []float32{float32(*s)}
	case *G.F64:
		backing = []float64{float64(*s)}
	case *tensor.Dense:
		if s == nil || slices.Equal(s.Shape(), shape) || s.Shape().TotalSize() != 1 || shape.TotalSize() != 1 || !s.IsNativelyAccessible() {
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

// ReadLengths appends the live lengths in t to dst, each checked against the
// capacity.
func ReadLengths(op, name string, dst []int, t *tensor.Dense, capacity int) ([]int, error) {
	switch t.Dtype() {
	case tensor.Int:
		return AppendLengths(op, name, dst, dense.Elements[int](t), capacity)
	case tensor.Int64:
		return AppendLengths(op, name, dst, dense.Elements[int64](t), capacity)
	default:
		return AppendLengths(op, name, dst, dense.Elements[int32](t), capacity)
	}
}

// AppendLengths is [ReadLengths] of a slice.
func AppendLengths[T int | int32 | int64](op, name string, dst []int, src []T, capacity int) ([]int, error) {
	for b, n := range src {
		if n < 0 || int64(n) > int64(capacity) {
			return dst, errs.Errorf(op, errs.ErrLength, "%s[%d] is %d, outside [0, %d]", name, b, n, capacity)
		}
		dst = append(dst, int(n))
	}
	return dst, nil
}

// Float16 and BFloat16 are the element types of 16 bits. E4M3 and Q4, of 8 and of 4 bits, are those of caches
// alone.
var (
	Float16  = tensor.Dtype{Type: reflect.TypeFor[half.Float16]()}
	BFloat16 = tensor.Dtype{Type: reflect.TypeFor[half.BFloat16]()}
	E4M3     = tensor.Dtype{Type: reflect.TypeFor[half.E4M3]()}
	Q4       = tensor.Dtype{Type: reflect.TypeFor[half.Q4]()}
)

func init() {
	tensor.Register(Float16)
	tensor.Register(BFloat16)
}

// StorageType is the engine's name for a tensor's element type.
func StorageType(t tensor.Dtype) (attn.DType, bool) {
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

// IsQueryType reports whether queries in host memory may have type t.
func IsQueryType(t tensor.Dtype) bool { return t == tensor.Float32 || t == tensor.Float64 }

// IsDeviceQueryType says whether queries on a GPU may have type t.
func IsDeviceQueryType(t tensor.Dtype) bool {
	return t == tensor.Float32 || t == Float16 || t == BFloat16
}

// Product is the product of its arguments, if it fits in an int.
func Product(ns ...int) (int, bool) {
	p := uint64(1)
	for _, n := range ns {
		hi, lo := bits.Mul64(p, uint64(n))
		if hi != 0 || lo > math.MaxInt {
			return 0, false
		}
		p = lo
	}
	return int(p), true
}

// LSEType is the element type of the log-sum-exp of queries of type t.
func LSEType(t tensor.Dtype) tensor.Dtype {
	if t == tensor.Float64 {
		return t
	}
	return tensor.Float32
}
