package decoder

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
)

// canMegakernel is what a megakernel's attention can do.
var canMegakernel = attn.Can{
	Name:     "attention in a megakernel",
	Features: attn.Causal | attn.Rotates | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers,
	KV:       gpu.Types,
}
