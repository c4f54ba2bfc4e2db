//go:build !amd64 || !gc || noasm

package expression

import "gorgonia.org/leanattention/internal/cpu"

var steps [cpu.Tiers]func(code uint64, dst, a, b, c *uint32, n int)
