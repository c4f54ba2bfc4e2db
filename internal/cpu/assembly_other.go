//go:build !(amd64 || arm64) || !gc || noasm

package cpu

import "gorgonia.org/leanattention/internal/attn"

func attendTiers(twins [attn.DTypes]kernel) [tiers][attn.DTypes]kernel {
	return [tiers][attn.DTypes]kernel{tierGo: twins}
}
