//go:build !(amd64 || arm64) || !gc || noasm

package attention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
)

func attendTiers32(plain [attn.DTypes]kernel) [cpu.Tiers][attn.DTypes]kernel { return allTiers(plain) }

func attendTiers64(plain [attn.DTypes]kernel) [cpu.Tiers][attn.DTypes]kernel { return allTiers(plain) }
