//go:build amd64 && gc && !noasm

package cpu

import (
	"os"

	"golang.org/x/sys/cpu"
)

// The tiers of amd64, and how many tiers there are.
const (
	TierAVX2   Tier = 1 + iota // with FMA, F16C and BMI2
	TierAVX512                 // F, BW, DQ and VL, and what AVX2 has
	TierAMX                    // products of tiles of bfloat16, BF16, and what AVX-512 has
	Tiers      = iota + 1
)

var tierNames = [Tiers]string{"go", "avx2", "avx512", "amx"}

// BestTier returns the best tier of this machine. Package cpu has asked the operating system, too,
// whether it saves the registers.
func BestTier() Tier {
	x := &cpu.X86
	switch {
	case !(x.HasAVX2 && x.HasFMA && x.HasF16C && x.HasBMI2):
		return TierGo
	case !(x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL):
		return TierAVX2
	case !(x.HasAMXTile && x.HasAMXBF16 && x.HasAVX512BF16 && asksForTiles() && allowTiles()):
		return TierAVX512
	}
	return TierAMX
}

// asksForTiles reports whether TierVariable lets a process have tile registers. They are for good, and signals
// take 8 KB more of a stack with them: a process whose C code makes smaller ones has to do without.
func asksForTiles() bool {
	name := os.Getenv(TierVariable)
	return name == "" || name == tierNames[TierAMX]
}
