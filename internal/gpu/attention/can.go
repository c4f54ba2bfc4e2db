package attention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
)

// What this engine can do, each way into it. A feature of a problem that is not listed is refused.
var (
	canAttend = attn.Can{
		Name:     "attention on GPUs",
		Features: attn.Causal | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers | attn.Unfused,
		KV:       gpu.Types,
	}
	// Attention in three launches has no LeanTiles: it makes no difference who would have them.
	canUnfused = attn.Can{
		Name:     "unfused attention on GPUs",
		Features: attn.Causal | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers | attn.Unfused,
		KV:       gpu.Types,
	}
	// A caller that asks for workers, LeanTiles or a schedule gets these: from the kernels for few rows.
	canPrefill = attn.Can{
		Name:     "the kernels for many rows",
		Features: attn.Causal,
		KV:       []attn.DType{attn.Float16, attn.BFloat16},
	}
)
