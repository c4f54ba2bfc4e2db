package layers

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// canMegakernel has the features of a megakernel's attention.
var canMegakernel = attn.Can{
	Name:     "attention in a megakernel",
	Features: attn.Causal | attn.Rotates | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers,
	KV:       gpu.Types,
}

// families says what kernels there are for a format of weights besides a GEMV's, which each format with kernels has.
var families = [weight.Formats]struct {
	gemm       bool // GEMMs of each kind
	megakernel bool
}{
	weight.Float16:  {gemm: true, megakernel: true},
	weight.BFloat16: {gemm: true, megakernel: true},
}

// hasKernels reports whether there are kernels for weights of a format.
func hasKernels(f weight.Format) bool { return f.Kernels() != "" }

// withKernels calls load for each format that has kernels, until load returns an error.
func withKernels(load func(weight.Format) error) error {
	for f := range weight.Format(weight.Formats) {
		if hasKernels(f) {
			if err := load(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// format is that of all weights.
func (o *Linear) format() weight.Format { return weight.Dense(o.Parts[0].W.DType) }
