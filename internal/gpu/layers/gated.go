package layers

import (
	"errors"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
	"gorgonia.org/leanattention/kernels"
)

// Linear layers with gates and with rare activations have kernels of their own: the other kernels would be slower
// with more activations.

// The modules of these kernels, beside matrixUnit and gemmUnit, and the prefixes of their names.
const (
	gatedUnit     = "gated"
	gatedGEMMUnit = "gated_gemm"
	gatedPrefix   = "gated_"
)

// gateFlag is added to the activation of a gate (kernels/gemm_activation.cuh).
const gateFlag = 64

// plainActivations is the number of activations of the other kernels.
const plainActivations = attn.GELU + 1

// gates reports whether a Linear needs these kernels.
func (o *Linear) gates() bool { return o.Gate || o.Activation >= plainActivations }

// activation returns the kernels' number of the activation.
func (o *Linear) activation() int32 {
	if o.Gate {
		return int32(o.Activation) | gateFlag
	}
	return int32(o.Activation)
}

// together returns how many tiles of W a block takes at once.
func (o *Linear) together() int {
	if o.Gate {
		return 2
	}
	return 1
}

// gatedKernels are the kernels for few rows, for tiles, and for batches. The last two are nil if the other kernels
// have none.
type gatedKernels struct {
	gemv   [weight.Formats]*cuda.Function
	tiled  [weight.Formats]*[len(gemmRows)]*cuda.Function
	skinny [weight.Formats]*skinnyKernels
}

// gatedOf returns the kernels, loaded at first use, which may be within a capture.
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
	return withKernels(func(f weight.Format) (err error) {
		if k.gemv[f], err = gpu.WithShared(m, gatedPrefix+"linear_"+f.Kernels()); err != nil {
			return err
		}
		if d.gemm[f] != nil {
			if k.tiled[f], err = d.loadTiled(m, gatedPrefix, f, 2); err != nil {
				return err
			}
		}
		if d.skinny[f] != nil {
			if k.skinny[f], err = d.loadSkinny(m, gatedPrefix, f, 2); err != nil {
				return err
			}
		}
		return nil
	})
}

// gemvOf, tiledOf and skinnyOf return the kernels for a Linear.
func (d *Engine) gemvOf(o *Linear) (*cuda.Function, error) {
	f := o.format()
	if !o.gates() {
		return d.gemv[f], nil
	}
	k, err := d.gatedOf()
	if err != nil {
		return nil, err
	}
	return k.gemv[f], nil
}

func (d *Engine) tiledOf(o *Linear, kind int) (*cuda.Function, error) {
	f := o.format()
	if o.operandParts() == 1 {
		k, err := d.roundedOf(f, o.gates())
		if err != nil {
			return nil, err
		}
		return k.tiled[kind], nil
	}
	if !o.gates() {
		return d.gemm[f].of[kind], nil
	}
	k, err := d.gatedOf()
	if err != nil {
		return nil, err
	}
	return k.tiled[f][kind], nil
}

func (d *Engine) skinnyOf(o *Linear) (*skinnyKernels, error) {
	f := o.format()
	if o.operandParts() == 1 {
		k, err := d.roundedOf(f, o.gates())
		if err != nil {
			return nil, err
		}
		return k.skinny, nil
	}
	if !o.gates() {
		return d.skinny[f], nil
	}
	k, err := d.gatedOf()
	if err != nil {
		return nil, err
	}
	return k.skinny[f], nil
}

// separateActivation reports whether the activation or gate is a launch of its own, because these kernels are missing.
func (d *Engine) separateActivation(o *Linear) (bool, error) {
	if o.quantises() || d.widens(o) {
		return !o.fusesRows(), nil
	}
	if !o.gates() {
		return false, nil
	}
	if d.separateGates || o.Narrow() {
		return true, nil
	}
	_, err := d.gatedOf()
	if errors.Is(err, kernels.ErrNoImage) {
		return true, nil
	}
	return false, err
}
