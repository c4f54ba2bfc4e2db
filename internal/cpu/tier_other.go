//go:build !(amd64 || arm64) || !gc || noasm

package cpu

// Tiers is the number of tiers.
const Tiers = 1

var tierNames = [Tiers]string{"go"}

// BestTier returns the best tier of this machine.
func BestTier() Tier { return TierGo }
