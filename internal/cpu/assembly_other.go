//go:build !(amd64 || arm64) || !gc || noasm

package cpu

import "gorgonia.org/leanattention/internal/attn"

func attendTiers32(twins [attn.DTypes]kernel) [Tiers][attn.DTypes]kernel { return allTiers(twins) }

func attendTiers64(twins [attn.DTypes]kernel) [Tiers][attn.DTypes]kernel { return allTiers(twins) }
