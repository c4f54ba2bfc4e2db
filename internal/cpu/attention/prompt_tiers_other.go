//go:build !amd64 || !gc || noasm

package attention

import "gorgonia.org/leanattention/internal/cpu"

// promptTiers is empty without tile registers.
var promptTiers [cpu.Tiers]*promptWays
