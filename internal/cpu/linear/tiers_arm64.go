//go:build arm64 && gc && !noasm

package linear

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/matmul"
)

var linearTiers = [cpu.Tiers]*linearKernels{&linearGo, &linearNEON}

var linearNEON = linearKernels{
	dot: [attn.DTypes][dotMaxRows + 1]func(*dotArgs){
		attn.Float32:  {nil, dotF32x1NEON, dotF32x2NEON, dotF32x3NEON},
		attn.Float64:  linearGo.dot[attn.Float64],
		attn.Float16:  linearGo.dot[attn.Float16],
		attn.BFloat16: linearGo.dot[attn.BFloat16],
	},
	rows:  3,
	tiles: matmul.Tiers[cpu.TierNEON],
}
