//go:build arm64 && gc && !noasm

package cpu

// The tier of arm64, and the number of tiers.
const (
	TierNEON Tier = 1
	Tiers         = 2
)

var tierNames = [Tiers]string{"go", "neon"}

// BestTier returns the best tier of this machine: every arm64 has NEON.
func BestTier() Tier { return TierNEON }
