//go:build amd64 && gc && !noasm

package cpu

import "golang.org/x/sys/cpu"

// bestTier returns the best tier of this machine. Package cpu has asked the operating system, too,
// whether it saves the registers.
func bestTier() tier {
	x := &cpu.X86
	switch {
	case !(x.HasAVX2 && x.HasFMA && x.HasF16C && x.HasBMI2):
		return tierGo
	case !(x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL):
		return tierAVX2
	}
	return tierAVX512
}
