//go:build arm64 && gc && !noasm

package cpu

var linearTiers = [tiers]*linearKernels{&linearGo, &linearNEON}

var linearNEON = linearKernels{
	dot: [dtypes][dotMaxRows + 1]func(*dotArgs){
		Float32:  {nil, dotF32x1NEON, dotF32x2NEON, dotF32x3NEON},
		Float64:  linearGo.dot[Float64],
		Float16:  linearGo.dot[Float16],
		BFloat16: linearGo.dot[BFloat16],
	},
	rows: 3,
	add:  addGo,
	relu: reluGo,
	gelu: geluGo,
}

var readSumTiers = [tiers]func(p *byte, step, n int) uint64{readSumGo, readSumGo}

var vectorTiers = [tiers]vectorKernels{vectorGo, vectorGo}
