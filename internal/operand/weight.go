package operand

import (
	"fmt"
	"reflect"
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
	weight.Int8:     tensor.Int8,
	weight.Q8_0:     {Type: reflect.TypeFor[Q8_0]()},
	weight.Q4_0:     {Type: reflect.TypeFor[Q4_0]()},
	weight.Q4_1:     {Type: reflect.TypeFor[Q4_1]()},
	weight.Q5_0:     {Type: reflect.TypeFor[Q5_0]()},
	weight.Q5_1:     {Type: reflect.TypeFor[Q5_1]()},
	weight.Q4_K:     {Type: reflect.TypeFor[Q4_K]()},
	weight.Q5_K:     {Type: reflect.TypeFor[Q5_K]()},
	weight.Q6_K:     {Type: reflect.TypeFor[Q6_K]()},
	weight.E4M3:     E4M3,
	weight.Int4_32:  {Type: reflect.TypeFor[Int4_32]()},
	weight.Int4_64:  {Type: reflect.TypeFor[Int4_64]()},
	weight.Int4_128: {Type: reflect.TypeFor[Int4_128]()},
}

// The types that stand for formats in blocks. Gorgonia never has a tensor of them.
type (
	Q8_0 struct{}
	Q4_0 struct{}
	Q4_1 struct{}
	Q5_0 struct{}
	Q5_1 struct{}
	Q4_K struct{}
	Q5_K struct{}
	Q6_K struct{}

	Int4_32  struct{}
	Int4_64  struct{}
	Int4_128 struct{}
)

// WeightType returns the element type of a node whose value has a format.
func WeightType(f weight.Format) tensor.Dtype { return weightTypes[f] }

// WeightFormat returns the format that an element type stands for.
func WeightFormat(t tensor.Dtype) (f weight.Format, ok bool) {
	for f, of := range weightTypes {
		if of == t {
			return weight.Format(f), true
		}
	}
	return 0, false
}

// SumType returns the element type of the numbers that weights of a format are multiplied with, and of the sums.
func SumType(f weight.Format) tensor.Dtype { return weightTypes[weight.Dense(f.Sums())] }

// Weight is a matrix of weights as a gorgonia.Value, so that a graph has one input for the weight.
//
//   - The planes are what the format stores: elements and, with some formats, scales. Each plane is a tensor in host memory or on
//     GPUs, with rows on axis 0. A sharded weight has sharded planes.
//   - The element type of the value stands for the format.
//   - A weight of a format without scales and blocks may also be a plain tensor, its elements: see [WeightOf].
type Weight struct {
	Of       weight.Format
	Elements G.Value // (rows, columns); of a format in blocks (rows, bytes of a row), of uint8
	Scales   G.Value // (rows) or, of groups, (rows, groups of a row), float32; nil: the format has no scales
	Group    int     // see weight.Matrix
	Order    []int32 // see weight.Matrix; nil: columns are in order

	shape tensor.Shape // nil: that of Elements
}

// NewBlocks returns the weight of rows in blocks. data and order are kept.
func NewBlocks(of weight.Format, data []byte, rows, columns int, order []int32) *Weight {
	return &Weight{Of: of, Elements: tensor.New(tensor.WithShape(rows, of.Size(columns)), tensor.WithBacking(data)), Order: order, shape: tensor.Shape{rows, columns}}
}

// NewScaled returns the weight of rows of elements of a byte, with a scale for each row, or for each group of a row. data and scales are
// kept.
func NewScaled(of weight.Format, data []byte, scales []float32, rows, columns, group int) *Weight {
	return &Weight{
		Of: of, Elements: tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(data)), Group: group,
		Scales: tensor.New(tensor.WithShape(rows, len(scales)/rows), tensor.WithBacking(scales)),
	}
}

// NewPacked returns the weight of a tensor on a GPU that has rows in packed order (weight.Packed).
func NewPacked(of weight.Format, words G.Value, rows, columns int) *Weight {
	return &Weight{Of: of, Elements: words, shape: tensor.Shape{rows, columns}}
}

// WeightOf returns the weight of a value: a *Weight, or a tensor whose type stands for a format without scales.
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
	switch has := w.Scales != nil; {
	case has && !w.Of.HasScales():
		return w, errs.Errorf(op, errs.ErrUnsupported, "%s is of %v with scales, and the format has none", name, w.Of)
	case !has && w.Of.HasScales():
		return w, errs.Errorf(op, errs.ErrUnsupported, "%s is of %v without scales: pass a weight, not its elements", name, w.Of)
	}
	return w, nil
}

// Host returns the weight in host memory, in row-major order.
func (w *Weight) Host(op, name string) (m weight.Matrix, err error) {
	t, ok := w.Elements.(*tensor.Dense)
	if !ok || !t.IsNativelyAccessible() {
		return m, errs.Errorf(op, errs.ErrUnsupported, "%s is a %T, want a *tensor.Dense in host memory", name, w.Elements)
	}
	m = weight.Matrix{Format: w.Of, Len: w.Shape().TotalSize(), Order: w.Order}
	switch int(t.Dtype().Size()) {
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
	m.Group = w.Group
	if want := t.Shape()[0] * m.Groups(t.Shape()[1]); !ok || !s.IsNativelyAccessible() || s.Dtype() != tensor.Float32 || s.Shape().TotalSize() != want {
		return m, errs.Errorf(op, errs.ErrShape, "the scales of %s are %v of %v, want %d of float32 in host memory", name, w.Scales.Shape(), w.Scales.Dtype(), want)
	}
	m.Scales = dense.Elements[float32](s)
	return m, nil
}

func pointer[T any](s []T) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(s)) }

// Shape returns (rows, columns).
func (w *Weight) Shape() tensor.Shape {
	if w.shape != nil {
		return w.shape
	}
	return w.Elements.Shape()
}

// Dtype returns the element type that stands for the format.
func (w *Weight) Dtype() tensor.Dtype { return WeightType(w.Of) }

// Type returns the weight's type in Gorgonia's type system.
func (w *Weight) Type() hm.Type { return G.TensorType{Dims: len(w.Shape()), Of: w.Dtype()} }

// Size returns the number of elements.
func (w *Weight) Size() int { return w.Shape().TotalSize() }

// Data returns nil, since Gorgonia does not know the formats.
func (w *Weight) Data() any { return nil }

// Uintptr and MemSize return 0, as Data returns nil.
func (w *Weight) Uintptr() uintptr { return 0 }
func (w *Weight) MemSize() uintptr { return 0 }

// Format writes the format and the shape.
func (w *Weight) Format(s fmt.State, _ rune) { fmt.Fprintf(s, "weights of %v, %v", w.Of, w.Shape()) }

var (
	_ G.Value = (*Weight)(nil)
	_ G.Typer = (*Weight)(nil)
)
