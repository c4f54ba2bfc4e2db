package nn

import (
	"fmt"
	"slices"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// errorf makes "leanattention: nn.op: text: sentinel".
func errorf(op string, sentinel error, format string, args ...any) error {
	return fmt.Errorf("leanattention: nn.%s: %s: %w", op, fmt.Sprintf(format, args...), sentinel)
}

// recoverTo turns a panic into an error. It stands where Gorgonia calls this
// package (a panic inside Do would end the process) and where it is called.
func recoverTo(op string, err *error) {
	if r := recover(); r != nil {
		*err = errorf(op, la.ErrInternal, "%v", r)
	}
}

// apply is gorgonia.ApplyOp, whose panics become errors.
func apply(name string, op G.Op, children ...*G.Node) (n *G.Node, err error) {
	defer recoverTo(name, &err)
	n, err = G.ApplyOp(op, children...)
	if err != nil {
		return nil, errorf(name, la.ErrGraph, "%v", err)
	}
	return n, nil
}

// elements is the elements of v, which has to be a tensor of the wanted shape,
// in row-major order. They are v's own memory where they lie in that order and
// a copy where they do not (a transposed, sliced or column-major tensor), so
// they must not be written.
func elements[F float](name, what string, v G.Value, want tensor.Shape) ([]F, error) {
	t, ok := v.(*tensor.Dense)
	if !ok || !t.IsNativelyAccessible() {
		return nil, errorf(name, la.ErrUnsupported, "%s is a %T, want a *tensor.Dense in host memory", what, v)
	}
	// Not Shape.Eq, which takes (3), (1,3) and (3,1) for the same.
	if !slices.Equal(t.Shape(), want) {
		return nil, errorf(name, la.ErrShape, "%s has shape %v when run, want %v", what, t.Shape(), want)
	}
	data, ok := t.Data().([]F)
	if !ok {
		return nil, errorf(name, la.ErrDType, "%s is of %v when run, want %T", what, t.Dtype(), *new(F))
	}
	// Strides tell the order of every kind of view alike, flags do not.
	strides, size := t.Strides(), want.TotalSize()
	if len(strides) != len(want) {
		return nil, errorf(name, la.ErrUnsupported, "%s of shape %v has strides %v", what, want, strides)
	}
	inOrder, step, last := true, 1, 0
	for i := len(want) - 1; i >= 0; i-- {
		if want[i] > 1 {
			inOrder = inOrder && strides[i] == step
			last += (want[i] - 1) * strides[i]
		}
		step *= want[i]
	}
	if last >= len(data) {
		return nil, errorf(name, la.ErrShape, "%s of shape %v and strides %v has %d elements", what, want, strides, len(data))
	}
	if inOrder {
		return data[:size], nil
	}
	out, at := make([]F, size), make([]int, len(want))
	for i, from := 0, 0; i < size; i++ {
		out[i] = data[from]
		for axis := len(want) - 1; axis >= 0; axis-- {
			at[axis]++
			from += strides[axis]
			if at[axis] < want[axis] {
				break
			}
			from -= want[axis] * strides[axis]
			at[axis] = 0
		}
	}
	return out, nil
}
