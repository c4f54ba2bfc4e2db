//go:build arm64 && gc && !noasm

package matmul

import (
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Tiers are the sets by tier; nil: all rows are few.
var Tiers = [cpu.Tiers]*Set{cpu.TierNEON: &tilesNEON}

// tilesNEON are for the rows that repay packing, by a count of instructions: no arm64 machine was measured.
var tilesNEON = func() Set {
	way := func(pack func(*PackArgs)) Way {
		mul := make([]func(*Args), 9)
		for rows := 1; rows < len(mul); rows++ {
			mul[rows] = tileF32NEON
		}
		return Way{FromRows: 128, Depth: 256, Mul: mul, Pack: pack, Rows: packRows, Packing: 12}
	}
	t := Set{Rows: 8, Outs: 8, Panels: 24}
	t.Ways[weight.Float32], t.Ways[weight.Float16], t.Ways[weight.BFloat16] = way(packF32Go), way(packF16Go), way(packBF16Go)
	return t
}()
