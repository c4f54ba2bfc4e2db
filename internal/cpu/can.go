package cpu

import "gorgonia.org/leanattention/internal/attn"

// What this engine can do, each way into it. A feature of a problem that is not listed is refused.
var (
	canAttend = attn.Can{
		Name: "attention on the CPU",
		Features: attn.Causal | attn.Window | attn.SinkTokens | attn.Trees | attn.Cap | attn.SlopesOfHeads | attn.AddedBias | attn.Sinks | attn.Dropout | attn.Rotates |
			attn.OtherValueDim | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers | attn.BatchInvariance,
		KV: []attn.DType{attn.Float32, attn.Float64, attn.Float16, attn.BFloat16},
	}
	canBackward = attn.Can{
		Name:     "gradients on the CPU",
		Features: attn.Causal | attn.Window | attn.Cap | attn.SlopesOfHeads | attn.AddedBias | attn.Sinks | attn.Dropout,
		KV:       []attn.DType{attn.Float32, attn.Float64},
	}
)

// CanBackward reports what of a mask and of changes of scores gradients can't do.
func CanBackward(m attn.Mask, s attn.Score) error {
	return canBackward.Do("backward", &attn.Problem{Mask: m, Score: s})
}
