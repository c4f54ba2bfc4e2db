//go:build amd64 && gc && !noasm

package linear

import (
	"math"

	x86 "golang.org/x/sys/cpu"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/weight"
)

var linearTiers = [cpu.Tiers]*linearKernels{&linearGo, &linearAVX2, &linearAVX512, &linearAMX}

var linearAVX2 = linearKernels{
	dot: [weight.Formats][dotMaxRows + 1]func(*dotArgs){
		weight.Float32:  {nil, dotF32x1AVX2, dotF32x2AVX2, dotF32x3AVX2},
		weight.Float16:  {nil, dotF16x1AVX2, dotF16x2AVX2, dotF16x3AVX2},
		weight.BFloat16: {nil, dotBF16x1AVX2, dotBF16x2AVX2, dotBF16x3AVX2},
	},
	rows: 3,
	row: rowKernels{
		dot:     [weight.Formats]func(*rowArgs){weight.Float32: rowF32AVX2, weight.Float16: rowF16AVX2, weight.BFloat16: rowBF16AVX2},
		streams: 4, side: math.MaxInt, ahead: 2560, unit: 256 << 10,
	},
	tiles:  matmul.Tiers[cpu.TierAVX2],
	blocks: &blocksAVX2,
}

var blocksAVX2 = blockKernels{
	unpack: [weight.Formats]func(*unpackArgs){
		weight.Int8: unpackI8AVX2, weight.Q8_0: unpackQ80AVX2, weight.Q4_0: unpackQ40AVX2, weight.Q4_1: unpackQ41AVX2,
		weight.Q5_0: unpackQ50AVX2, weight.Q5_1: unpackQ51AVX2, weight.Q4_K: unpackQ4KAVX2, weight.Q5_K: unpackQ5KAVX2, weight.Q6_K: unpackQ6KAVX2,
		weight.Int4_32: unpackI4x32AVX2, weight.Int4_64: unpackI4x64AVX2, weight.Int4_128: unpackI4x128AVX2,
	},
	e4m3:   [dotMaxRows + 1]func(*blockRowArgs){nil, rowsE4M3x1AVX2, rowsE4M3x2AVX2},
	round:  roundAVX2,
	expand: [blockKinds]func(*expandArgs){expandAVX2, expandMinimaAVX2, expandHalvesAVX2},
	one:    [blockKinds]func(*groupArgs){oneAVX2, oneMinimaAVX2, oneHalvesAVX2},
	many:   [blockKinds]func(*groupArgs){manyAVX2, manyMinimaAVX2, manyHalvesAVX2},
	rows:   4, outs: 1,
}

// blocksWithoutVNNI are for processors with AVX-512 and without VNNI. Sums of float32 are in the order of AVX-512.
var blocksWithoutVNNI = func() blockKernels {
	k := blocksAVX2
	k.e4m3 = blocksAVX512.e4m3
	return k
}()

// blocksAVX512 needs VNNI.
var blocksAVX512 = blockKernels{
	unpack: [weight.Formats]func(*unpackArgs){
		weight.Int8: unpackI8AVX512, weight.Q8_0: unpackQ80AVX512, weight.Q4_0: unpackQ40AVX512, weight.Q4_1: unpackQ41AVX512,
		weight.Q5_0: unpackQ50AVX512, weight.Q5_1: unpackQ51AVX512, weight.Q4_K: unpackQ4KAVX512, weight.Q5_K: unpackQ5KAVX512, weight.Q6_K: unpackQ6KAVX512,
		weight.Int4_32: unpackI4x32AVX512, weight.Int4_64: unpackI4x64AVX512, weight.Int4_128: unpackI4x128AVX512,
	},
	row: [weight.Formats]func(*blockRowArgs){
		weight.Int8: rowI8AVX512, weight.Q8_0: rowQ80AVX512, weight.Q4_0: rowQ40AVX512, weight.Q4_1: rowQ41AVX512,
		weight.Int4_32: rowI4x32AVX512, weight.Int4_64: rowI4x64AVX512, weight.Int4_128: rowI4x128AVX512,
	},
	e4m3:   [dotMaxRows + 1]func(*blockRowArgs){nil, rowsE4M3x1AVX512, rowsE4M3x2AVX512, rowsE4M3x3AVX512, rowsE4M3x4AVX512},
	round:  roundAVX512,
	expand: [blockKinds]func(*expandArgs){expandAVX512, expandMinimaAVX512, expandHalvesAVX512},
	one:    [blockKinds]func(*groupArgs){oneAVX512, oneMinimaAVX512, oneHalvesAVX512},
	pack: [weight.Formats]func(*unpackArgs){
		weight.Int8: packI8AVX512, weight.Q8_0: packQ80AVX512, weight.Q4_0: packQ40AVX512, weight.Q4_1: packQ41AVX512,
		weight.Int4_32: packI4x32AVX512, weight.Int4_64: packI4x64AVX512, weight.Int4_128: packI4x128AVX512,
	},
	panelRows: 2, interleave: interleaveAVX512, panel: [blockKinds]func(*panelArgs){panelAVX512, panelMinimaAVX512, panelHalvesAVX512},
}

func blocksOfAVX512() *blockKernels {
	if x86.X86.HasAVX512VNNI {
		return &blocksAVX512
	}
	return &blocksWithoutVNNI
}

var linearAVX512 = linearKernels{
	dot: [weight.Formats][dotMaxRows + 1]func(*dotArgs){
		weight.Float32:  {nil, dotF32x1AVX512, dotF32x2AVX512, dotF32x3AVX512, dotF32x4AVX512},
		weight.Float16:  {nil, dotF16x1AVX512, dotF16x2AVX512, dotF16x3AVX512, dotF16x4AVX512},
		weight.BFloat16: {nil, dotBF16x1AVX512, dotBF16x2AVX512, dotBF16x3AVX512, dotBF16x4AVX512},
	},
	rows: 4,
	row: rowKernels{
		dot:     [weight.Formats]func(*rowArgs){weight.Float32: rowF32AVX512, weight.Float16: rowF16AVX512, weight.BFloat16: rowBF16AVX512},
		streams: 8, side: 4 << 10, ahead: 1024, unit: 64 << 10,
		fetch: prefetchAVX512, idle: 512 << 10,
	},
	tiles:  matmul.Tiers[cpu.TierAVX512],
	blocks: blocksOfAVX512(),
}

// linearAMX is AVX-512 but for many rows.
var linearAMX = func() linearKernels {
	k := linearAVX512
	k.tiles = matmul.Tiers[cpu.TierAMX]
	if x86.X86.HasAMXInt8 && k.blocks == &blocksAVX512 {
		k.blocks = &blocksAMX
	}
	return k
}()

// blocksAMX needs products of bytes in tile registers, beyond VNNI.
var blocksAMX = func() blockKernels {
	k := blocksAVX512
	k.strips = stripKernels{rows: 64, x: stripXAVX512, w: stripWAVX512, mul: [blockKinds]func(*stripArgs){stripsAMX, stripsMinimaAMX, nil}, ones: stripsOnesAMX}
	return k
}()
