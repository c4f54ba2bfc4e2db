//go:build !(amd64 || arm64) || !gc || noasm

package matmul

import "gorgonia.org/leanattention/internal/cpu"

// Tiers are the sets by tier: without any, all rows are few.
var Tiers [cpu.Tiers]*Set
