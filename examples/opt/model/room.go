package model

import (
	"fmt"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/memory"

	"gorgonia.org/tensor"
)

// CheckRoom says, before anything is loaded, whether the host or the GPU has room for
// the weights of a source in a type (see [LoadAs]) and for the cache of a decoder:
// if not, leanattention.ErrOutOfMemory with the numbers. Activations need some
// more. On the host weights that keep their type stay where the file is mapped, and the
// system reads them again when it has to: they are not counted.
func CheckRoom(from Source, matrices tensor.Dtype, o Options) error {
	c := from.Config()
	if _, err := o.check(c); err != nil {
		return err
	}
	var weights, made int64
	for p := range c.Weights() {
		t, err := from.Tensor(p.Name, p.Shape...)
		if err != nil {
			return err
		}
		as := loadedAs(t, matrices)
		bytes := int64(t.Shape().TotalSize()) * int64(as.Size())
		weights += bytes
		if as != t.Dtype() {
			made += bytes
		}
	}
	cache, err := o.cacheBytes(c)
	if err != nil {
		return err
	}
	if o.Device == nil {
		if err := memory.Check(made + cache); err != nil {
			return fmt.Errorf("model: %d MB of converted weights and %d MB of cache in host memory: %v: %w", made>>20, cache>>20, err, la.ErrOutOfMemory)
		}
		return nil
	}
	memory, err := o.Device.Memory()
	if err != nil {
		return err
	}
	if weights+cache > memory.Free {
		return fmt.Errorf("model: %d MB of weights and %d MB of cache on %v, which has %d of %d MB free: %w",
			weights>>20, cache>>20, o.Device, memory.Free>>20, memory.Total>>20, la.ErrOutOfMemory)
	}
	return nil
}

// cacheBytes is the memory of the keys and values of all sequences at their capacity.
func (o *Options) cacheBytes(c hf.Config) (int64, error) {
	switch {
	case o.paged():
		return o.cacheConfig(c).Bytes()
	case o.Attention == Fused: // it has none
		return 0, nil
	}
	return int64(len(o.Capacity)) * int64(slices.Max(o.Capacity)) * tokenBytes(c, tensor.Float32), nil
}
