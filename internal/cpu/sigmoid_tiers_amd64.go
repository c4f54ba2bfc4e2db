//go:build amd64 && gc && !noasm

package cpu

var sigmoidTiers = [Tiers]func(dst *float32, n int, linear, cubic float32){bySigmoidGo, bySigmoidAVX2, bySigmoidAVX512, bySigmoidAVX512}
