//go:build amd64 && gc && !noasm

package cpu

var normTiers = [Tiers]normKernels{
	TierGo: normGo,
	TierAVX2: {
		sum: sumAVX2, deviations: deviationsAVX2, normalise: normaliseAVX2, sum64: sum64AVX2, deviations64: deviations64AVX2, normalise64: normalise64AVX2,
		nanos: VectorNanos,
	},
	TierAVX512: normAVX512,
	TierAMX:    normAVX512,
}

var normAVX512 = normKernels{
	sum: sumAVX512, deviations: deviationsAVX512, normalise: normaliseAVX512, sum64: sum64AVX512, deviations64: deviations64AVX512, normalise64: normalise64AVX512,
	nanos: VectorNanos,
}
