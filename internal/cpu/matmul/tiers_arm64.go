//go:build arm64 && gc && !noasm

package matmul

import (
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Tiers are the sets by tier; nil: all rows are few.
var Tiers = [cpu.Tiers]*Set{cpu.TierNEON: &tilesNEON}

// tilesNEON is faster than Go's kernels for 16-bit weights once a tile is full.
var tilesNEON = func() Set {
	way := func(fromRows int, pack func(*PackArgs)) Way {
		mul := make([]func(*Args), 9)
		for rows := 1; rows < len(mul); rows++ {
			mul[rows] = tileF32NEON
		}
		return Way{FromRows: fromRows, Depth: 256, Mul: mul, Pack: pack, Rows: packRows, Packing: 12}
	}
	t := Set{Rows: 8, Outs: 8, Panels: 24}
	t.Ways[weight.Float32], t.Ways[weight.Float16], t.Ways[weight.BFloat16] = way(128, packF32Go), way(8, packF16Go), way(8, packBF16Go)
	return t
}()
