//go:build arm64 && gc && !noasm

package linear

import (
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/weight"
)

var linearTiers = [cpu.Tiers]*linearKernels{&linearGo, &linearNEON}

var linearNEON = linearKernels{
	dot: [weight.Formats][dotMaxRows + 1]func(*dotArgs){
		weight.Float32:  {nil, dotF32x1NEON, dotF32x2NEON, dotF32x3NEON},
		weight.Float64:  linearGo.dot[weight.Float64],
		weight.Float16:  linearGo.dot[weight.Float16],
		weight.BFloat16: linearGo.dot[weight.BFloat16],
	},
	rows:  3,
	tiles: matmul.Tiers[cpu.TierNEON],
}
