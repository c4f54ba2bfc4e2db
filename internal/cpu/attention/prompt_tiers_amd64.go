//go:build amd64 && gc && !noasm

package attention

import "gorgonia.org/leanattention/internal/cpu"

var promptTiers = [cpu.Tiers]*promptWays{cpu.TierAMX: promptsOf(cpu.TileTiers[cpu.TierAMX], weighNearAVX512)}
