//go:build amd64 && gc && !noasm

package cpu

import (
	"os"

	"golang.org/x/sys/cpu"
)

// The tiers of amd64, and the number of tiers.
const (
	TierAVX2   Tier = 1 + iota // with FMA, F16C and BMI2
	TierAVX512                 // F, BW, DQ and VL, beyond AVX2
	TierAMX                    // products of tiles of bfloat16, and BF16, beyond AVX-512
	Tiers      = iota + 1
)

var tierNames = [Tiers]string{"go", "avx2", "avx512", "amx"}

// BestTier returns the best tier of this machine. Package golang.org/x/sys/cpu also asks the operating system whether
// it saves the registers.
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

// asksForTiles reports whether TierVariable lets the process have tile registers. They stay enabled, and signals take
// 8 KB more of a stack: a process whose C code makes smaller stacks has to do without.
func asksForTiles() bool {
	name := os.Getenv(TierVariable)
	return name == "" || name == tierNames[TierAMX]
}
