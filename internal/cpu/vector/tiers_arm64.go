//go:build arm64 && gc && !noasm

package vector

import "gorgonia.org/leanattention/internal/cpu"

var tiers = [cpu.Tiers]kernels{cpu.TierGo: goKernels, cpu.TierNEON: neon()}

// neon returns the Go kernels, but for those that NEON has.
func neon() kernels {
	k := goKernels
	k.fromE4M3, k.fromInt8 = fromE4M3NEON, fromInt8NEON
	return k
}
