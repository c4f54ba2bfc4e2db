package decoder

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Mixed precision: x is rounded to the type of W, and its products are half as many.

// The modules with the kernels that round x, but for those of persistent.go.
const (
	mixedUnit      = "mixed"
	gatedMixedUnit = "gated_mixed"
)

// Up to mostPrecise rows x is in two parts even if it may be rounded: products take no time beside
// the weights then.
const mostPrecise = 16

// operandParts are the parts that launches of several rows have of each element of x.
func (o *Linear) operandParts() int {
	if o.RoundX && o.Rows > mostPrecise {
		return 1
	}
	return 2
}

// roundedKernels are those that round x. skinny is nil where the others have none.
type roundedKernels struct {
	skinny *skinnyKernels
	tiled  *[len(gemmRows)]*cuda.Function
}

// roundedOf is the kernels of a type, which are loaded when a layer first needs them; a capture may be
// what asks.
func (d *Engine) roundedOf(element attn.DType, gates bool) (*roundedKernels, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	unit, prefix, to := mixedUnit, "", &d.rounded[element][0]
	if gates {
		unit, prefix, to = gatedMixedUnit, gatedPrefix, &d.rounded[element][1]
	}
	if *to != nil {
		return *to, nil
	}
	k := new(roundedKernels)
	err := d.dev.Relaxed(func() error {
		m, err := gpu.Module(d.dev, unit)
		if err != nil {
			return err
		}
		if k.tiled, err = d.loadTiled(m, prefix, element, 1); err != nil {
			return err
		}
		if d.info.Capability == groupCapability {
			k.skinny, err = d.loadSkinny(m, prefix, element, 1)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	*to = k
	return k, nil
}
