//go:build amd64 && gc && !noasm

package attention

import (
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/matmul"
)

var promptTiers = [cpu.Tiers]*promptWays{cpu.TierAMX: promptsOf(matmul.Tiers[cpu.TierAMX], weighNearAVX512)}
