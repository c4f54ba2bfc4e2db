package ongpu

import (
	"fmt"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Value has the methods of a tensor on a GPU that Gorgonia asks of a value. The tensor of package device embeds a Value.
type Value struct{ t Tensor }

// NewValue makes a tensor whose Public is a Value. Tensors in the memory of Gorgonia's machine are such: no user sees them.
func NewValue() *Tensor {
	v := new(Value)
	v.t.Public = v
	return &v.t
}

// Internal returns the tensor of the value.
func (v *Value) Internal() *Tensor { return &v.t }

// Shape returns the tensor's shape.
func (v *Value) Shape() tensor.Shape { return v.t.Shape }

// Dtype returns the type of the tensor's elements.
func (v *Value) Dtype() tensor.Dtype { return v.t.DType }

// Size returns the number of elements.
func (v *Value) Size() int { return v.t.Size() }

// Type returns the tensor's type in Gorgonia's type system.
func (v *Value) Type() hm.Type {
	if len(v.t.Shape) == 0 {
		return v.t.DType
	}
	return G.TensorType{Dims: len(v.t.Shape), Of: v.t.DType}
}

// Data returns nil: there is no memory that the host could read.
func (v *Value) Data() any { return nil }

// Uintptr returns 0, as Data returns nil.
func (v *Value) Uintptr() uintptr { return 0 }

// MemSize returns 0, as Data returns nil. Under the build tag cuda, MemSize is the size on the GPU, so that Gorgonia's machine
// refuses to copy the tensor.
func (v *Value) MemSize() uintptr {
	if G.CUDA {
		return uintptr(v.t.Bytes())
	}
	return 0
}

// Format writes type, shape and place of the tensor, not its elements.
func (v *Value) Format(s fmt.State, _ rune) {
	if v.t.GPU == nil {
		fmt.Fprint(s, "tensor of no GPU")
		return
	}
	fmt.Fprintf(s, "%v %v on %v", v.t.DType, v.t.Shape, v.t.GPU)
}

// ZeroValue sets all elements to 0, for Gorgonia's lisp machine, and returns the tensor. If that fails, each later use of the
// tensor returns the error.
func (v *Value) ZeroValue() G.Value {
	v.t.Zero()
	return v.t.Value()
}

// ValueEq reports whether other is this very tensor. Elements are not compared.
func (v *Value) ValueEq(other G.Value) bool {
	return other != nil && other == v.t.Public
}
