package nn

import (
	"fmt"
	"reflect"
	"slices"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// errorf makes "leanattention: nn.op: text: sentinel".
func errorf(op string, sentinel error, format string, args ...any) error {
	return errs.Errorf(prefix+op, sentinel, format, args...)
}

// prefix begins the name of an op in errors.
const prefix = "nn."

// called returns the name of an argument for errors, with the name of its node, if the node has one.
func called(argument string, n *G.Node) string {
	if name := stock.NameOf(n); name != "" && name != argument {
		return fmt.Sprintf("%s, node %q,", argument, name)
	}
	return argument
}

// toConvert returns the way out for errors about a 16-bit input, "" for other inputs.
func toConvert(of, want tensor.Dtype) string {
	if (of == operand.Float16 || of == operand.BFloat16) && of != want {
		return fmt.Sprintf("; convert its values to %v when they are loaded", want)
	}
	return ""
}

// engineError returns the error of an engine whose operands have been checked.
func engineError(op string, err error) error {
	if err == nil {
		return nil
	}
	return errs.Engine(prefix+op, "the CPU engine", err)
}

// elements returns the elements of v, a tensor of the wanted shape, in row-major order. The elements are v's own memory, or a copy if
// v is transposed, sliced or column-major, so they must not be written.
func elements[F any](name, what string, v G.Value, want tensor.Shape) ([]F, error) {
	t, ok := v.(*tensor.Dense)
	if !ok || !t.IsNativelyAccessible() {
		return nil, errorf(name, errs.ErrUnsupported, "%s is a %T, want a *tensor.Dense in host memory", what, v)
	}
	// Not Shape.Eq, which takes (3), (1,3) and (3,1) for the same.
	if !slices.Equal(t.Shape(), want) {
		return nil, errorf(name, errs.ErrShape, "%s has shape %v when run, want %v", what, t.Shape(), want)
	}
	if t.Dtype() != dtypeOf[F]() {
		return nil, errorf(name, errs.ErrDType, "%s is of %v when run, want %v", what, t.Dtype(), dtypeOf[F]())
	}
	return dense.Elements[F](t), nil
}

// output returns a new tensor, and its elements. The caller writes all elements.
func output[F float](shape tensor.Shape) (*tensor.Dense, []F) {
	return dense.Unwritten[F](dtypeOf[F](), shape)
}

// zeros returns a new tensor of zeros, and its elements.
func zeros[F float](shape tensor.Shape) (*tensor.Dense, []F) {
	t := dense.New(dtypeOf[F](), shape...)
	return t, dense.Backing[F](t)
}

// scratch returns memory for intermediate results, with any values: new memory of the system takes as long as a norm or longer. The
// caller gives the memory back.
func scratch[F float](n int) *[]F {
	s, _ := scratches[unsafe.Sizeof(F(0))/4-1].Get().(*[]F)
	if s == nil {
		s = new([]F)
	}
	if cap(*s) < n {
		*s = dense.Memory[F](n)
	}
	*s = (*s)[:n]
	return s
}

func giveBack[F float](s *[]F) { scratches[unsafe.Sizeof(F(0))/4-1].Put(s) }

// scratches has a pool for float32, and one for float64.
var scratches [2]sync.Pool

func dtypeOf[F any]() tensor.Dtype { return tensor.Dtype{Type: reflect.TypeFor[F]()} }
