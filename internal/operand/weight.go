package operand

import (
	"fmt"
	"unsafe"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/weight"
	"gorgonia.org/tensor"
)

// weightTypes are the element types that stand for formats of weights in a graph.
var weightTypes = [weight.Formats]tensor.Dtype{
	weight.Float32:  tensor.Float32,
	weight.Float64:  tensor.Float64,
	weight.Float16:  Float16,
	weight.BFloat16: BFloat16,
}

// WeightType is the element type of a node whose value has a format.
func WeightType(f weight.Format) tensor.Dtype { return weightTypes[f] }

// WeightFormat is the format that an element type stands for.
func WeightFormat(t tensor.Dtype) (f weight.Format, ok bool) {
	for f, of := range weightTypes {
		if of == t {
			return weight.Format(f), true
		}
	}
	return 0, false
}

// SumType is the element type of what weights of a format are multiplied with.
func SumType(f weight.Format) tensor.Dtype { return weightTypes[weight.Dense(f.Sums())] }

// Weight is a matrix of weights as the value of an input: the planes that its format stores. Each plane is a tensor in host
// memory or on GPUs, whose axis 0 is rows; a sharded weight has sharded planes.
//
// A Weight is a gorgonia.Value of the element type that stands for its format, so a graph has one input for it. Weights of a
// format without scales may also be their elements alone, a tensor: see [WeightOf].
type Weight struct {
	Of       weight.Format
	Elements G.Value // (rows, columns)
	Scales   G.Value // (rows), of float32; nil: the format has none
}

// WeightOf is the weight that a value is: a *Weight, or a tensor of a type that stands for a format without scales.
func WeightOf(op, name string, v G.Value) (w Weight, err error) {
	if given, ok := v.(*Weight); ok {
		w = *given
	} else {
		f, ok := WeightFormat(v.Dtype())
		if !ok {
			return w, errs.Errorf(op, errs.ErrDType, "%s is of %v, want %s", name, v.Dtype(), weight.Names(weight.Format.Known))
		}
		w = Weight{Of: f, Elements: v}
	}
	if has := w.Scales != nil; has != w.Of.HasScales() {
		return w, errs.Errorf(op, errs.ErrUnsupported, "%s is of %v, scales: %v, want %v", name, w.Of, has, w.Of.HasScales())
	}
	return w, nil
}

// Host is the weight in host memory, in row-major order.
func (w *Weight) Host(op, name string) (m weight.Matrix, err error) {
	t, ok := w.Elements.(*tensor.Dense)
	if !ok || !t.IsNativelyAccessible() {
		return m, errs.Errorf(op, errs.ErrUnsupported, "%s is a %T, want a *tensor.Dense in host memory", name, w.Elements)
	}
	m = weight.Matrix{Format: w.Of, Len: t.Shape().TotalSize()}
	switch w.Of.Bytes() {
	case 1:
		m.Ptr = pointer(dense.Elements[uint8](t))
	case 2:
		m.Ptr = pointer(dense.Elements[uint16](t))
	case 4:
		m.Ptr = pointer(dense.Elements[uint32](t))
	case 8:
		m.Ptr = pointer(dense.Elements[uint64](t))
	}
	if w.Scales == nil {
		return m, nil
	}
	s, ok := w.Scales.(*tensor.Dense)
	if !ok || !s.IsNativelyAccessible() || s.Dtype() != tensor.Float32 || s.Shape().TotalSize() != t.Shape()[0] {
		return m, errs.Errorf(op, errs.ErrShape, "the scales of %s are %v of %v, want %d of float32 in host memory", name, w.Scales.Shape(), w.Scales.Dtype(), t.Shape()[0])
	}
	m.Scales = dense.Elements[float32](s)
	return m, nil
}

func pointer[T any](s []T) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(s)) }

// Shape is (rows, columns).
func (w *Weight) Shape() tensor.Shape { return w.Elements.Shape() }

// Dtype stands for the format.
func (w *Weight) Dtype() tensor.Dtype { return WeightType(w.Of) }

// Type is the weight's type in Gorgonia's type system.
func (w *Weight) Type() hm.Type { return G.TensorType{Dims: len(w.Shape()), Of: w.Dtype()} }

// Size is the number of weights.
func (w *Weight) Size() int { return w.Shape().TotalSize() }

// Data is nil: no code but this module's knows how a format stores weights.
func (w *Weight) Data() any { return nil }

// Uintptr and MemSize are 0, as Data is nil.
func (w *Weight) Uintptr() uintptr { return 0 }
func (w *Weight) MemSize() uintptr { return 0 }

// Format writes the format and the shape.
func (w *Weight) Format(s fmt.State, _ rune) { fmt.Fprintf(s, "weights of %v, %v", w.Of, w.Shape()) }

var (
	_ G.Value = (*Weight)(nil)
	_ G.Typer = (*Weight)(nil)
)
