package decoder

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"

	la "gorgonia.org/leanattention"
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
	free = func() (err error) {
		for _, t := range there {
			if e := t.Free(); !errors.Is(e, la.ErrClosed) {
				err = errors.Join(err, e)
			}
		}
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, free())
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
	return weights, free, nil
}

// widener is a source of weights that returns them in any type.
type widener interface {
	TensorAs(name string, as tensor.Dtype, shape ...int) (*tensor.Dense, error)
}

// part returns the tensor of a weight, which may be some rows of a tensor. A source that decodes returns the type as.
func part(from Weights, w *Weight, as tensor.Dtype) (t *tensor.Dense, err error) {
	name, shape := w.tensor()
	if f, ok := from.(widener); ok {
		t, err = f.TensorAs(name, as, shape...)
	} else {
		t, err = from.Tensor(name, shape...)
	}
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

// converted returns t in another type, or t itself if it has that type.
func converted(t *tensor.Dense, to tensor.Dtype) (*tensor.Dense, error) {
	if t.Dtype() == to {
		return t, nil
	}
	n := t.Shape().TotalSize()
	var at func(i int) float32
	switch data := t.Data().(type) {
	case []float32:
		at = func(i int) float32 { return data[i] }
	case []la.F16:
		at = func(i int) float32 { return data[i].Float32() }
	case []la.BF16:
		at = func(i int) float32 { return data[i].Float32() }
	default:
		return nil, fmt.Errorf("elements of %v: %w", t.Dtype(), ErrUnsupported)
	}
	var into any
	var set func(i int, x float32)
	switch to {
	case tensor.Float32:
		data := make([]float32, n)
		into, set = data, func(i int, x float32) { data[i] = x }
	case la.Float16:
		data := make([]la.F16, n)
		into, set = data, func(i int, x float32) { data[i] = float16(x) }
	case la.BFloat16:
		data := make([]la.BF16, n)
		into, set = data, func(i int, x float32) { data[i] = bfloat16(x) }
	default:
		return nil, fmt.Errorf("elements as %v: %w", to, ErrUnsupported)
	}
	var mu sync.Mutex
	var err error
	each(n, func(from, end int) {
		for i := from; i < end; i++ {
			x := at(i)
			set(i, x)
			if to == la.Float16 && math.Abs(float64(x)) >= 65520 && !math.IsInf(float64(x), 0) {
				mu.Lock()
				err = fmt.Errorf("element %d is %v, more than float16 has: %w", i, x, ErrConfig)
				mu.Unlock()
				return
			}
		}
	})
	return tensor.New(tensor.WithShape(t.Shape()...), tensor.WithBacking(into)), err
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

// bfloat16 rounds to nearest, ties to even.
func bfloat16(x float32) la.BF16 {
	b := math.Float32bits(x)
	if x != x {
		return la.BF16(b>>16 | 0x40)
	}
	return la.BF16((b + 0x7fff + b>>16&1) >> 16)
}

// float16 rounds to nearest, ties to even.
func float16(x float32) la.F16 {
	b := math.Float32bits(x)
	sign := la.F16(b >> 16 & 0x8000)
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000:
		return sign | 0x7e00
	case b >= 0x477ff000: // 65520 and more
		return sign | 0x7c00
	case b < 0x38800000: // below 2^-14: a multiple of 2^-24
		return sign | la.F16(math.RoundToEven(float64(math.Float32frombits(b))*(1<<24)))
	}
	b += 0xfff + b>>13&1
	return sign | la.F16((b-0x38000000)>>13)
}
