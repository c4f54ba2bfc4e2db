//go:build arm64 && gc && !noasm

package linear

import (
	"runtime"

	arm "golang.org/x/sys/cpu"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/weight"
)

var linearTiers = [cpu.Tiers]*linearKernels{&linearGo, &linearNEON}

var linearNEON = linearKernels{
	dot: [weight.Formats][dotMaxRows + 1]func(*dotArgs){
		weight.Float32:  {nil, dotF32x1NEON, dotF32x2NEON, dotF32x3NEON},
		weight.Float16:  {nil, dotF16x1NEON, dotF16x2NEON, dotF16x3NEON},
		weight.BFloat16: {nil, dotBF16x1NEON, dotBF16x2NEON, dotBF16x3NEON},
	},
	rows:   3,
	tiles:  matmul.Tiers[cpu.TierNEON],
	blocks: blocksOfNEON(),
}

// blocksNEON are for every processor.
var blocksNEON = blockKernels{
	unpack: [weight.Formats]func(*unpackArgs){
		weight.Int8: unpackI8NEON, weight.Q8_0: unpackQ80NEON, weight.Q4_0: unpackQ40NEON, weight.Q4_1: unpackQ41NEON,
		weight.Q5_0: unpackQ50NEON, weight.Q5_1: unpackQ51NEON, weight.Q4_K: unpackQ4KNEON, weight.Q5_K: unpackQ5KNEON, weight.Q6_K: unpackQ6KNEON,
		weight.Int4_32: unpackI4x32NEON, weight.Int4_64: unpackI4x64NEON, weight.Int4_128: unpackI4x128NEON,
	},
	e4m3:   [dotMaxRows + 1]func(*blockRowArgs){nil, rowsE4M3x1NEON, rowsE4M3x2NEON},
	round:  roundNEON,
	expand: [blockKinds]func(*expandArgs){expandNEON, expandMinimaNEON, expandHalvesNEON},
	one:    [blockKinds]func(*groupArgs){oneNEON, oneMinimaNEON, oneHalvesNEON},
	row: [weight.Formats]func(*blockRowArgs){
		weight.Int8: rowI8NEON, weight.Q8_0: rowQ80NEON, weight.Q4_0: rowQ40NEON, weight.Q4_1: rowQ41NEON, weight.Q5_0: rowQ50NEON, weight.Q5_1: rowQ51NEON,
		weight.Q4_K: rowQ4KNEON, weight.Q5_K: rowQ5KNEON, weight.Q6_K: rowQ6KNEON,
		weight.Int4_32: rowI4x32NEON, weight.Int4_64: rowI4x64NEON, weight.Int4_128: rowI4x128NEON,
	},
}

// blocksDot are for processors with dot products of 8 bits (FEAT_DotProd, optional from Armv8.2 on).
var blocksDot = func() blockKernels {
	k := blocksNEON
	k.one = [blockKinds]func(*groupArgs){oneDot, oneMinimaDot, oneHalvesDot}
	k.row = [weight.Formats]func(*blockRowArgs){
		weight.Int8: rowI8Dot, weight.Q8_0: rowQ80Dot, weight.Q4_0: rowQ40Dot, weight.Q4_1: rowQ41Dot, weight.Q5_0: rowQ50Dot, weight.Q5_1: rowQ51Dot,
		weight.Q4_K: rowQ4KDot, weight.Q5_K: rowQ5KDot, weight.Q6_K: rowQ6KDot,
		weight.Int4_32: rowI4x32Dot, weight.Int4_64: rowI4x64Dot, weight.Int4_128: rowI4x128Dot,
	}
	k.panelRows, k.interleave, k.panel = 2, interleaveNEON, [blockKinds]func(*panelArgs){panelDot, panelMinimaDot, panelHalvesDot}
	return k
}()

// blocksOfNEON returns the kernels for the processor. Each Mac of Apple's own processors has dot products, and not each macOS says so.
func blocksOfNEON() *blockKernels {
	if arm.ARM64.HasASIMDDP || runtime.GOOS == "darwin" {
		return &blocksDot
	}
	return &blocksNEON
}
