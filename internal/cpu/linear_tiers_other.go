//go:build !(amd64 || arm64) || !gc || noasm

package cpu

var linearTiers = [tiers]*linearKernels{tierGo: &linearGo}

// There are no tile registers.
var promptTiers [tiers]*promptWays

var readSumTiers = [tiers]func(p *byte, step, n int) uint64{tierGo: readSumGo}

var vectorTiers = [tiers]vectorKernels{tierGo: vectorGo}
