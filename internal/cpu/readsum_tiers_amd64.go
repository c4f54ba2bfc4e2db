//go:build amd64 && gc && !noasm

package cpu

var readSumTiers = [Tiers]func(p *byte, step, n int) uint64{readSumGo, readSumAVX2, readSumAVX512, readSumAVX512}
