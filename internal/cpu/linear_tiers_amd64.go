//go:build amd64 && gc && !noasm

package cpu

import "gorgonia.org/leanattention/internal/attn"

// The tables of the tiers.
var linearTiers = [tiers]*linearKernels{&linearGo, &linearAVX2, &linearAVX512, &linearAVX512}

var linearAVX2 = linearKernels{
	dot: [attn.DTypes][dotMaxRows + 1]func(*dotArgs){
		attn.Float32:  {nil, dotF32x1AVX2, dotF32x2AVX2, dotF32x3AVX2},
		attn.Float64:  linearGo.dot[attn.Float64],
		attn.Float16:  {nil, dotF16x1AVX2, dotF16x2AVX2, dotF16x3AVX2},
		attn.BFloat16: {nil, dotBF16x1AVX2, dotBF16x2AVX2, dotBF16x3AVX2},
	},
	rows: 3,
	add:  addAVX2,
	relu: reluAVX2,
	gelu: geluAVX2,
}

var linearAVX512 = linearKernels{
	dot: [attn.DTypes][dotMaxRows + 1]func(*dotArgs){
		attn.Float32:  {nil, dotF32x1AVX512, dotF32x2AVX512, dotF32x3AVX512, dotF32x4AVX512},
		attn.Float64:  linearGo.dot[attn.Float64],
		attn.Float16:  {nil, dotF16x1AVX512, dotF16x2AVX512, dotF16x3AVX512, dotF16x4AVX512},
		attn.BFloat16: {nil, dotBF16x1AVX512, dotBF16x2AVX512, dotBF16x3AVX512, dotBF16x4AVX512},
	},
	rows: 4,
	add:  addAVX512,
	relu: reluAVX512,
	gelu: geluAVX512,
}

var readSumTiers = [tiers]func(p *byte, step, n int) uint64{readSumGo, readSumAVX2, readSumAVX512, readSumAVX512}

var vectorTiers = [tiers]vectorKernels{
	tierGo:     vectorGo,
	tierAVX2:   {scale: scaleAVX2, divide: divideAVX2, bias: biasAVX2, slope: slopeAVX2},
	tierAVX512: {scale: scaleAVX512, divide: divideAVX512, bias: biasAVX512, slope: slopeAVX512},
	tierAMX:    {scale: scaleAVX512, divide: divideAVX512, bias: biasAVX512, slope: slopeAVX512},
}
