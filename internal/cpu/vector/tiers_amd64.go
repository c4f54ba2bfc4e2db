//go:build amd64 && gc && !noasm

package vector

import "gorgonia.org/leanattention/internal/cpu"

var tiers = [cpu.Tiers]kernels{
	cpu.TierGo: goKernels,
	cpu.TierAVX2: {
		scale: scaleAVX2, divide: divideAVX2, bias: biasAVX2, slope: slopeAVX2, softCap: softCapAVX2, biasStreams: biasStreamsAVX2,
		dot: dotAVX2, scale64: scale64AVX2, divide64: divide64AVX2, dot64: dot64AVX2, softCap64: softCap64AVX2,
		add: addAVX2, times: timesAVX2, relu: reluAVX2, gelu: geluAVX2, toFloat16: toFloat16AVX2, toBFloat16: toBFloat16AVX2, roundNanos: cpu.VectorNanos,
		fromE4M3: fromE4M3AVX2, fromInt8: fromInt8AVX2,
	},
	cpu.TierAVX512: avx512,
	cpu.TierAMX:    avx512,
}

var avx512 = kernels{
	scale: scaleAVX512, divide: divideAVX512, bias: biasAVX512, slope: slopeAVX512, softCap: softCapAVX512, biasStreams: biasStreamsAVX512,
	dot: dotAVX512, scale64: scale64AVX512, divide64: divide64AVX512, dot64: dot64AVX512, softCap64: softCap64AVX512,
	add: addAVX512, times: timesAVX512, relu: reluAVX512, gelu: geluAVX512, toFloat16: toFloat16AVX512, toBFloat16: toBFloat16AVX512, roundNanos: cpu.VectorNanos,
	fromE4M3: fromE4M3AVX512, fromInt8: fromInt8AVX512,
}
