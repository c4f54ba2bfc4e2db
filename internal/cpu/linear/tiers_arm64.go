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
		weight.Float32: {nil, dotF32x1NEON, dotF32x2NEON, dotF32x3NEON},
	},
	rows:   3,
	tiles:  matmul.Tiers[cpu.TierNEON],
	blocks: &blocksNEON,
}

// blocksNEON are the kernels in Go, but for those whose sums of float32 are in another order than that of NEON.
var blocksNEON = func() blockKernels {
	k := blocksGo
	clear(k.e4m3[:])
	return k
}()
