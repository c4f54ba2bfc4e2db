//go:build arm64 && gc && !noasm

package cpu

const (
	tierNEON tier = 1
	tiers         = 2
)

var tierNames = [tiers]string{"go", "neon"}

// bestTier returns the best tier of this machine: every arm64 has NEON.
func bestTier() tier { return tierNEON }
