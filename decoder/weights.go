package decoder

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/internal/gguf"
	"gorgonia.org/leanattention/device"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Weights is a source of weights.
type Weights interface {
	// Tensor returns the tensor of a name and a shape, of float32, leanattention.Float16 or leanattention.BFloat16. The tensor
	// is not written, and must be valid as long as the engines that use it.
	Tensor(name string, shape ...int) (*tensor.Dense, error)
}

// load returns the values of all weights of a network, where the engine computes. Matrices have the type as; the zero Dtype
// keeps the stored type. Vectors are float32: they are a thousandth of a model, and are added to float32. free frees the
// memory of a GPU.
func load(n Network, from Weights, as tensor.Dtype, gpu *device.GPU, progress func(done int)) (weights map[string]G.Value, free func() error, err error) {
	weights = map[string]G.Value{}
	var there []*device.Tensor
	release := func() (err error) {
		for _, t := range there {
			if e := t.Free(); !errors.Is(e, la.ErrClosed) {
				err = errors.Join(err, e)
			}
		}
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, release())
		}
	}()
	for w := range n.Weights() {
		to := as
		if len(w.Shape) == 1 {
			to = tensor.Float32
		}
		t, err := part(from, &w, to)
		if err != nil {
			return nil, nil, err
		}
		if to == (tensor.Dtype{}) {
			to = t.Dtype()
		}
		if t, err = converted(t, to); err != nil {
			return nil, nil, fmt.Errorf("decoder: weight %s: %w", w.Name, err)
		}
		weights[w.Name] = t
		if gpu != nil {
			up, err := gpu.Upload(t)
			if err != nil {
				return nil, nil, fmt.Errorf("decoder: weight %s: %w", w.Name, err)
			}
			there = append(there, up)
			weights[w.Name] = up
		}
		if progress != nil {
			progress(len(weights))
		}
	}
	return weights, release, nil
}

// widener is a source of weights that decodes rows into any type. The zero Dtype is the type that Tensor returns.
type widener interface {
	rowsAs(name string, as tensor.Dtype, shape []int, from, to int) (*tensor.Dense, error)
}

// part returns the tensor of a weight, which may be some rows of a tensor. A source that decodes returns the type as.
func part(from Weights, w *Weight, as tensor.Dtype) (t *tensor.Dense, err error) {
	name, shape := w.tensor()
	if f, ok := from.(widener); ok {
		return f.rowsAs(name, as, shape, w.From.Row, w.From.Row+w.Shape[0])
	}
	t, err = from.Tensor(name, shape...)
	if err != nil || w.From.Name == "" {
		return t, err
	}
	row := 1
	for _, n := range shape[1:] {
		row *= n
	}
	begin, end := w.From.Row*row, (w.From.Row+w.Shape[0])*row
	var data any
	switch all := t.Data().(type) {
	case []float32:
		data = all[begin:end]
	case []la.F16:
		data = all[begin:end]
	case []la.BF16:
		data = all[begin:end]
	default:
		return nil, fmt.Errorf("decoder: weight %s has elements of %v: %w", name, t.Dtype(), ErrUnsupported)
	}
	return tensor.New(tensor.WithShape(w.Shape...), tensor.WithBacking(data)), nil
}

// converted returns t in another type, or t itself if it has that type. A finite number that the type does not have is an error.
func converted(t *tensor.Dense, to tensor.Dtype) (*tensor.Dense, error) {
	if t.Dtype() == to {
		return t, nil
	}
	n := t.Shape().TotalSize()
	var widen func(dst []float32, from int) // elements of t
	switch data := t.Data().(type) {
	case []float32:
		widen = func(dst []float32, from int) { copy(dst, data[from:]) }
	case []la.F16:
		widen = func(dst []float32, from int) { widen16(dst, data[from:]) }
	case []la.BF16:
		widen = func(dst []float32, from int) { widen16(dst, data[from:]) }
	default:
		return nil, fmt.Errorf("elements of %v: %w", t.Dtype(), ErrUnsupported)
	}
	var into any
	var bits []uint16
	var round func(dst []uint16, src []float32) int
	switch to {
	case tensor.Float32:
		data := make([]float32, n)
		each(n, func(from, end int) { widen(data[from:end], from) })
		return tensor.New(tensor.WithShape(t.Shape()...), tensor.WithBacking(data)), nil
	case la.Float16:
		data := make([]la.F16, n)
		into, bits, round = data, as16[uint16](data), gguf.RoundFloat16
	case la.BFloat16:
		data := make([]la.BF16, n)
		into, bits, round = data, as16[uint16](data), gguf.RoundBFloat16
	default:
		return nil, fmt.Errorf("elements as %v: %w", to, ErrUnsupported)
	}
	var mu sync.Mutex
	var err error
	each(n, func(from, end int) {
		var piece [4096]float32
		for ; from < end; from += len(piece) {
			wide := piece[:min(len(piece), end-from)]
			widen(wide, from)
			if bad := round(bits[from:from+len(wide)], wide); bad >= 0 {
				mu.Lock()
				defer mu.Unlock()
				err = fmt.Errorf("element %d is %v, more than %v has: %w", from+bad, wide[bad], to, ErrConfig)
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return tensor.New(tensor.WithShape(t.Shape()...), tensor.WithBacking(into)), nil
}

// widen16 converts as many numbers as dst has.
func widen16[T interface{ Float32() float32 }](dst []float32, src []T) {
	for i := range dst {
		dst[i] = src[i].Float32()
	}
}

// each calls f for parts of n elements, on all processors.
func each(n int, f func(from, end int)) {
	const least = 1 << 16
	parts := min(runtime.GOMAXPROCS(0), max(1, n/least))
	var wait sync.WaitGroup
	for i := range parts {
		wait.Add(1)
		go func() {
			defer wait.Done()
			f(i*n/parts, (i+1)*n/parts)
		}()
	}
	wait.Wait()
}
