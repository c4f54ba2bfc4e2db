//go:build amd64 && gc && !noasm

package cpu

var promptTiers = [Tiers]*promptWays{TierAMX: promptsOf(tileTiers[TierAMX], weighNearAVX512)}
