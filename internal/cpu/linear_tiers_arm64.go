//go:build arm64 && gc && !noasm

package cpu

var linearTiers = [tiers]*linearKernels{&linearGo, &linearGo}

var readSumTiers = [tiers]func(p *byte, step, n int) uint64{readSumGo, readSumGo}

var vectorTiers = [tiers]vectorKernels{vectorGo, vectorGo}
