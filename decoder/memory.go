package decoder

import (
	"fmt"
	"math"
	"math/bits"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// checkMemory returns ErrOutOfMemory with both numbers if the weights of a network are larger than the memory for them. Weights of a
// type that is not known yet count as 16 bits. blockRow returns the bytes of a row of a tensor that stays in blocks, 0 for another; nil:
// there is none. GPUs keep freed memory for later values, so the memory of a GPU that this process uses
// counts as free: loading itself finds smaller shortages.
func (o *Options) checkMemory(n Network, blockRow func(name string) int) error {
	if o.Weights != (tensor.Dtype{}) {
		blockRow = nil
	}
	all, largest, err := weightBytes(n, o.Weights, blockRow)
	if err != nil {
		return err
	}
	of := ""
	if size := int64(o.world().Size); size > 1 {
		of = fmt.Sprintf(" of %d", all)
		all, largest = all/size, largest/size
	}
	if o.Device == nil {
		if err := la.CheckMemory(all, largest); err != nil {
			return fmt.Errorf("decoder: weights of at least %d%s bytes: %w", all, of, err)
		}
		return nil
	}
	m, err := o.Device.Memory()
	if err != nil {
		return err
	}
	if free := m.Free + m.Used; all > free {
		return fmt.Errorf("decoder: the weights take at least %d%s bytes, and %d of %d bytes of %v are free: %w", all, of, free, m.Total, o.Device, la.ErrOutOfMemory)
	}
	return nil
}

// weightBytes returns the bytes of all weights of a network, and of the largest one.
func weightBytes(n Network, as tensor.Dtype, blockRow func(name string) int) (all, largest int64, err error) {
	seen := map[string]bool{}
	for w := range n.Weights() {
		name, _ := w.tensor()
		same := fmt.Sprint(name, w.From.Row, w.Shape)
		if seen[same] {
			continue
		}
		seen[same] = true
		bytes, sizes := uint64(2), w.Shape
		switch {
		case len(w.Shape) == 1 || as == tensor.Float32:
			bytes = 4
		case !w.matrix():
		case as == tensor.Int8 || as == la.E4M3:
			bytes = 1
		case as == nn.Int4: // 19 bytes for 32 elements
			bytes, sizes = 19, []int{w.Shape[0], (w.Shape[1] + 31) / 32}
		case blockRow != nil && blockRow(name) > 0:
			bytes, sizes = uint64(blockRow(name)), w.Shape[:1]
		}
		for _, d := range sizes {
			high, low := bits.Mul64(bytes, uint64(max(d, 0)))
			if high > 0 || low > math.MaxInt64 {
				return 0, 0, fmt.Errorf("decoder: weight %s of shape %v: %w", w.Name, w.Shape, la.ErrOutOfMemory)
			}
			bytes = low
		}
		if uint64(all)+bytes > math.MaxInt64 {
			return 0, 0, fmt.Errorf("decoder: the weights take more than %d bytes: %w", int64(math.MaxInt64), la.ErrOutOfMemory)
		}
		all, largest = all+int64(bytes), max(largest, int64(bytes))
	}
	return all, largest, nil
}
