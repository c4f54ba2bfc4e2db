//go:build amd64 && gc && !noasm

package vector

import "gorgonia.org/leanattention/internal/cpu"

var sigmoidTiers = [cpu.Tiers]func(dst *float32, n int, linear, cubic float32){bySigmoidGo, bySigmoidAVX2, bySigmoidAVX512, bySigmoidAVX512}
