//go:build !amd64 || !gc || noasm

package attention

import "gorgonia.org/leanattention/internal/cpu"

// There are no tile registers.
var promptTiers [cpu.Tiers]*promptWays
