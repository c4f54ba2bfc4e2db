package decoder

import (
	"errors"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/kernels"
)

// Linear layers with gates, and with activations that most models have no use for, are launches
// as the others are, by kernels of their own: these would be slower with more to choose from.

// The modules with these kernels, as matrixUnit and gemmUnit have the others, and what their names
// begin with.
const (
	gatedUnit     = "gated"
	gatedGEMMUnit = "gated_gemm"
	gatedPrefix   = "gated_"
)

// gateFlag goes with the activation of a gate (kernels/gemm_activation.cuh).
const gateFlag = 64

// plainActivations are those that the other kernels know.
const plainActivations = attn.GELU + 1

// gates says whether a Linear is for these kernels.
func (o *Linear) gates() bool { return o.Gate || o.Activation >= plainActivations }

// activation is the activation as kernels take it.
func (o *Linear) activation() int32 {
	if o.Gate {
		return int32(o.Activation) | gateFlag
	}
	return int32(o.Activation)
}

// together is how many tiles of W go together.
func (o *Linear) together() int {
	if o.Gate {
		return 2
	}
	return 1
}

// gatedKernels are those of few rows, of tiles, and of batches. The last two are nil where the
// other kernels have none.
type gatedKernels struct {
	gemv   [attn.DTypes]*cuda.Function
	tiled  [attn.DTypes]*[len(gemmRows)]*cuda.Function
	skinny [attn.DTypes]*skinnyKernels
}

// gatedOf is the kernels, which are loaded when the first layer needs them; a capture may be what asks.
func (d *Engine) gatedOf() (*gatedKernels, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	if d.gated != nil {
		return d.gated, nil
	}
	k := new(gatedKernels)
	if err := d.dev.Relaxed(func() error { return d.loadGated(k) }); err != nil {
		return nil, err
	}
	d.gated = k
	return k, nil
}

func (d *Engine) loadGated(k *gatedKernels) error {
	m, err := gpu.Module(d.dev, gatedUnit)
	if err != nil {
		return err
	}
	for _, i := range gpu.Types {
		if k.gemv[i], err = gpu.WithShared(m, &d.info, gatedPrefix+"linear_"+gpu.Name(i)); err != nil {
			return err
		}
		if d.gemm[i] != nil {
			if k.tiled[i], err = d.loadTiled(m, gatedPrefix, i, 2); err != nil {
				return err
			}
		}
		if d.skinny[i] != nil {
			if k.skinny[i], err = d.loadSkinny(m, gatedPrefix, i, 2); err != nil {
				return err
			}
		}
	}
	return nil
}

// gemvOf, tiledOf and skinnyOf are the kernels for a Linear.
func (d *Engine) gemvOf(o *Linear) (*cuda.Function, error) {
	element := o.Parts[0].W.DType
	if !o.gates() {
		return d.gemv[element], nil
	}
	k, err := d.gatedOf()
	if err != nil {
		return nil, err
	}
	return k.gemv[element], nil
}

func (d *Engine) tiledOf(o *Linear, kind int) (*cuda.Function, error) {
	element := o.Parts[0].W.DType
	if o.operandParts() == 1 {
		k, err := d.roundedOf(element, o.gates())
		if err != nil {
			return nil, err
		}
		return k.tiled[kind], nil
	}
	if !o.gates() {
		return d.gemm[element].of[kind], nil
	}
	k, err := d.gatedOf()
	if err != nil {
		return nil, err
	}
	return k.tiled[element][kind], nil
}

func (d *Engine) skinnyOf(o *Linear) (*skinnyKernels, error) {
	element := o.Parts[0].W.DType
	if o.operandParts() == 1 {
		k, err := d.roundedOf(element, o.gates())
		if err != nil {
			return nil, err
		}
		return k.skinny, nil
	}
	if !o.gates() {
		return d.skinny[element], nil
	}
	k, err := d.gatedOf()
	if err != nil {
		return nil, err
	}
	return k.skinny[element], nil
}

// activationApart says whether what is for these kernels is launches of its own, since there are
// none.
func (d *Engine) activationApart(o *Linear) (bool, error) {
	if !o.gates() {
		return false, nil
	}
	if d.gatesApart {
		return true, nil
	}
	_, err := d.gatedOf()
	if errors.Is(err, kernels.ErrNoImage) {
		return true, nil
	}
	return false, err
}
