//go:build !(amd64 || arm64) || !gc || noasm

package cpu

var linearTiers = [Tiers]*linearKernels{TierGo: &linearGo}
