package decoder

import (
	"fmt"
	"reflect"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// folder is the weights of a Hugging Face folder.
type folder struct{ *hf.Folder }

// stored returns the type of a weight in the files.
func (f folder) stored(name string) tensor.Dtype {
	t, _ := f.DType(name)
	return t
}

// rowsAs returns rows of a weight. Beside the result, the memory does not depend on the number of rows.
func (f folder) rowsAs(name string, as tensor.Dtype, shape []int, from, to int) (*tensor.Dense, error) {
	if as == (tensor.Dtype{}) || as == f.stored(name) {
		return f.Rows(name, shape, from, to)
	}
	t, err := rowsOf(as, shape, from, to)
	if err != nil {
		return nil, fmt.Errorf("decoder: weight %s: %w", name, err)
	}
	if err := f.Each(name, shape, from, to, func(at int, part any) error {
		if err := convert(t.Data(), at, part); err != nil {
			return fmt.Errorf("decoder: weight %s: %w", name, err)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return t, nil
}

// A folder has no blocks.
func (f folder) blocks(string, []int, int, int) (*nn.Quantised, error) { return nil, nil }
func (f folder) blockRow(string) int                                   { return 0 }
func (f folder) loaded()                                               {}
func (f folder) hold() (func() error, error)                           { return func() error { return nil }, nil }

func (f folder) float32s(dst []float32, name string, shape []int, from, to int) error {
	return f.Each(name, shape, from, to, func(at int, part any) error { return convert(dst, at, part) })
}

// rowsOf returns a tensor of a type with rows from to to of a shape.
func rowsOf(as tensor.Dtype, shape []int, from, to int) (*tensor.Dense, error) {
	shape = slices.Clone(shape)
	shape[0] = to - from
	n := tensor.Shape(shape).TotalSize()
	var data any
	switch as {
	case tensor.Float32:
		data = fresh[float32](n)
	case la.Float16:
		data = fresh[la.F16](n)
	case la.BFloat16:
		data = fresh[la.BF16](n)
	default:
		return nil, fmt.Errorf("elements as %v: %w", as, ErrUnsupported)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)), nil
}

// convert converts the elements of part to those of dst from index at on. A finite number that dst cannot have is an error.
func convert(dst any, at int, part any) error {
	if err := la.Convert(slice(dst, at, at+reflect.ValueOf(part).Len()), part); err != nil {
		return fmt.Errorf("elements from %d on: %w: %w", at, err, ErrConfig)
	}
	return nil
}
