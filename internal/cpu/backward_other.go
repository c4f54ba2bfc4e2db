//go:build !(amd64 || arm64) || !gc || noasm

package cpu

var (
	backwardTiers32 = [Tiers]*backwardKernels[float32]{TierGo: backwardGo32}
	backwardTiers64 = [Tiers]*backwardKernels[float64]{TierGo: backwardGo64}
)
