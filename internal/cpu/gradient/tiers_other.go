//go:build !(amd64 || arm64) || !gc || noasm

package gradient

import "gorgonia.org/leanattention/internal/cpu"

var (
	backwardTiers32 = [cpu.Tiers]*backwardKernels[float32]{cpu.TierGo: backwardGo32}
	backwardTiers64 = [cpu.Tiers]*backwardKernels[float64]{cpu.TierGo: backwardGo64}
)
