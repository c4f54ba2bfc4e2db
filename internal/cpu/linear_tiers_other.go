//go:build !(amd64 || arm64) || !gc || noasm

package cpu

var linearTiers = [tiers]*linearKernels{tierGo: &linearGo}

var readSumTiers = [tiers]func(p *byte, step, n int) uint64{tierGo: readSumGo}

var vectorTiers = [tiers]vectorKernels{tierGo: vectorGo}
