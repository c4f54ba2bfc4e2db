//go:build !(amd64 || arm64) || !gc || noasm

package cpu

var (
	backwardTiers32 = [tiers]*backwardKernels[float32]{tierGo: backwardGo32}
	backwardTiers64 = [tiers]*backwardKernels[float64]{tierGo: backwardGo64}
)
