package layers

import (
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Mixed precision: x is rounded to the type of W, with half as many products.

// The modules with the kernels that round x, except those of persistent.go.
const (
	mixedUnit      = "mixed"
	gatedMixedUnit = "gated_mixed"
)

// Up to mostPrecise rows x is in two parts even with RoundX: products are hidden behind the weights. So they are up to
// mostNarrowPrecise rows if weights are packed.
const mostPrecise, mostNarrowPrecise = 16, 4

// operandParts returns the parts of each element of x in launches of several rows.
func (o *Linear) operandParts() int {
	if o.RoundX && (o.Rows > mostPrecise || o.Rows > mostNarrowPrecise && o.Narrow()) {
		return 1
	}
	return 2
}

// roundedKernels are the kernels that round x. skinny is nil if the other kernels have none.
type roundedKernels struct {
	skinny *skinnyKernels
	tiled  *[len(gemmRows)]*cuda.Function
}

// roundedOf returns the kernels of a format, loaded at first use, which may be within a capture.
func (d *Engine) roundedOf(of weight.Format, gates bool) (*roundedKernels, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	unit, prefix, to := mixedUnit, "", &d.rounded[of][0]
	if gates {
		unit, prefix, to = gatedMixedUnit, gatedPrefix, &d.rounded[of][1]
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
		if k.tiled, err = d.loadTiled(m, prefix, of, 1); err != nil {
			return err
		}
		if d.info.Capability == groupCapability {
			k.skinny, err = d.loadSkinny(m, prefix, of, 1)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	*to = k
	return k, nil
}
