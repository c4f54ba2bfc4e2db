//go:build amd64 && gc && !noasm

package cpu

import (
	"os"

	"golang.org/x/sys/cpu"
)

const (
	tierAVX2   tier = 1 + iota // with FMA, F16C and BMI2
	tierAVX512                 // F, BW, DQ and VL, and what AVX2 has
	tierAMX                    // products of tiles of bfloat16, BF16, and what AVX-512 has
	tiers      = iota + 1
)

var tierNames = [tiers]string{"go", "avx2", "avx512", "amx"}

// bestTier returns the best tier of this machine. Package cpu has asked the operating system, too,
// whether it saves the registers.
func bestTier() tier {
	x := &cpu.X86
	switch {
	case !(x.HasAVX2 && x.HasFMA && x.HasF16C && x.HasBMI2):
		return tierGo
	case !(x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL):
		return tierAVX2
	case !(x.HasAMXTile && x.HasAMXBF16 && x.HasAVX512BF16 && asksForTiles() && allowTiles()):
		return tierAVX512
	}
	return tierAMX
}

// asksForTiles reports whether TierVariable lets a process have tile registers. They are for good, and signals
// take 8 KB more of a stack with them: a process whose C code makes smaller ones has to do without.
func asksForTiles() bool {
	name := os.Getenv(TierVariable)
	return name == "" || name == tierNames[tierAMX]
}
