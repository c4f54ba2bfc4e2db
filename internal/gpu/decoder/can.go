package decoder

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
)

// canMegakernel has the features of a megakernel's attention.
var canMegakernel = attn.Can{
	Name:     "attention in a megakernel",
	Features: attn.Causal | attn.Rotates | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers,
	KV:       gpu.Types,
}
