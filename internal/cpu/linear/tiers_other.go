//go:build !(amd64 || arm64) || !gc || noasm

package linear

import "gorgonia.org/leanattention/internal/cpu"

var linearTiers = [cpu.Tiers]*linearKernels{cpu.TierGo: &linearGo}
