//go:build arm64 && gc && !noasm

package cpu

import "gorgonia.org/leanattention/internal/attn"

var linearTiers = [tiers]*linearKernels{&linearGo, &linearNEON}

var linearNEON = linearKernels{
	dot: [attn.DTypes][dotMaxRows + 1]func(*dotArgs){
		attn.Float32:  {nil, dotF32x1NEON, dotF32x2NEON, dotF32x3NEON},
		attn.Float64:  linearGo.dot[attn.Float64],
		attn.Float16:  linearGo.dot[attn.Float16],
		attn.BFloat16: linearGo.dot[attn.BFloat16],
	},
	rows:  3,
	tiles: &tilesNEON,
	add:   addGo,
	relu:  reluGo,
	gelu:  geluGo,
}

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

// There are no tile registers.
var promptTiers [tiers]*promptWays

var readSumTiers = [tiers]func(p *byte, step, n int) uint64{readSumGo, readSumGo}

var vectorTiers = [tiers]vectorKernels{vectorGo, vectorGo}
