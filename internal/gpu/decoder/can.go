package decoder

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
)

// canChain is what a chain's attention can do.
var canChain = attn.Can{
	Name:     "attention in a chain of layers",
	Features: attn.Causal | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers,
	KV:       gpu.Types,
}
