package layers

import (
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Kernels for weights in super-blocks (kernels/gemm_narrow_super.cuh). Launches are those of other weights of 8 and 4 bits.

const narrowSuperUnit = "narrow_super"

const superMost = 32 // columns of operands

// hasSuper reports whether there are kernels of so many columns.
func (d *Engine) hasSuper(columns int) bool {
	return columns == superMost || columns == narrowColumns[0] && d.narrowGroups()
}

// kernelsOf returns the kernels for packed weights. The first use loads the kernels.
func (d *Engine) kernelsOf(w *weight.Packed) (*narrowKernels, error) {
	k, err := d.narrowOf()
	if err == nil && w.Super {
		k, err = d.superOf(k)
	}
	return k, err
}

// superOf returns the kernels for super-blocks.
func (d *Engine) superOf(all *narrowKernels) (*narrowKernels, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	if all.super != nil {
		return all.super, nil
	}
	k := &narrowKernels{of: map[string]*[len(narrowColumns)]*cuda.Function{}, integers: map[string]*[len(narrowColumns)]*cuda.Function{}}
	err := d.dev.Relaxed(func() error {
		m, err := gpu.Module(d.dev, narrowSuperUnit)
		if err != nil {
			return err
		}
		for _, of := range narrowIntegers {
			if k.of[of], err = narrowSet(m, narrowSuperUnit+"_"+of, d.hasSuper); err != nil {
				return err
			}
			if !d.narrowGroups() {
				continue
			}
			if k.integers[of], err = narrowSet(m, narrowSuperUnit+"_integers_"+of, func(columns int) bool { return columns == narrowColumns[0] }); err != nil {
				return err
			}
		}
		k.gather, err = m.Function(narrowSuperUnit + "_gather")
		return err
	})
	if err != nil {
		return nil, err
	}
	all.super = k
	return k, nil
}

// narrowMost returns the largest number of columns of operands for which all parts have kernels.
func (o *Linear) narrowMost() int {
	for i := range o.Parts {
		if w := o.Parts[i].Packed; w != nil && w.Super {
			return superMost
		}
	}
	return narrowMost
}

// narrowKindOf returns the index of the kernels for packed weights with the least number of columns that holds all columns of the operands.
func (d *Engine) narrowKindOf(w *weight.Packed, columns int) (kind int) {
	for kind = narrowKind(columns); w.Super && !d.hasSuper(narrowColumns[kind]); kind++ {
	}
	return kind
}
