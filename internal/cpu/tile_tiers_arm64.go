//go:build arm64 && gc && !noasm

package cpu

import "gorgonia.org/leanattention/internal/attn"

var tileTiers = [Tiers]*linearTiles{TierNEON: &tilesNEON}

// tilesNEON is faster than Go's kernels for 16-bit weights as soon as a tile is full.
var tilesNEON = func() linearTiles {
	way := func(fromRows int, pack func(*packArgs)) tileWay {
		mul := make([]func(*tileArgs), 9)
		for rows := 1; rows < len(mul); rows++ {
			mul[rows] = tileF32NEON
		}
		return tileWay{fromRows: fromRows, depth: 256, mul: mul, pack: pack, rows: packRows, packing: 12}
	}
	t := linearTiles{rows: 8, outs: 8, panels: 24}
	t.ways[attn.Float32], t.ways[attn.Float16], t.ways[attn.BFloat16] = way(128, packF32Go), way(8, packF16Go), way(8, packBF16Go)
	return t
}()
