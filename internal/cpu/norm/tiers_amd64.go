//go:build amd64 && gc && !noasm

package norm

import "gorgonia.org/leanattention/internal/cpu"

var tiers = [cpu.Tiers]kernels{
	cpu.TierGo: goKernels,
	cpu.TierAVX2: {
		sum: sumAVX2, deviations: deviationsAVX2, normalise: normaliseAVX2, sum64: sum64AVX2, deviations64: deviations64AVX2, normalise64: normalise64AVX2,
		nanos: cpu.VectorNanos,
	},
	cpu.TierAVX512: avx512,
	cpu.TierAMX:    avx512,
}

var avx512 = kernels{
	sum: sumAVX512, deviations: deviationsAVX512, normalise: normaliseAVX512, sum64: sum64AVX512, deviations64: deviations64AVX512, normalise64: normalise64AVX512,
	nanos: cpu.VectorNanos,
}
