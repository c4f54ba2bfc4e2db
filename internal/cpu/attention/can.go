package attention

import "gorgonia.org/leanattention/internal/attn"

// canAttend has the features of attention on a CPU. Other features of a problem are refused.
var canAttend = attn.Can{
	Name: "attention on the CPU",
	Features: attn.Causal | attn.Window | attn.SinkTokens | attn.Trees | canModify | attn.Sinks | attn.Dropout | attn.Rotates | attn.RotatesBehind |
		attn.OtherValueDim | attn.SeveralPlanes | attn.ValuesInKeys | attn.SeveralTypes | attn.Scaled | attn.MixedKeys | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers | attn.BatchInvariance,
	KV: []attn.DType{attn.Float32, attn.Float64, attn.Float16, attn.BFloat16, attn.E4M3, attn.Int8, attn.Q4},
}
