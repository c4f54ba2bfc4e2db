//go:build amd64 && gc && !noasm

package cpu

import "gorgonia.org/leanattention/internal/attn"

var tileTiers = [Tiers]*linearTiles{TierAVX2: &tilesAVX2, TierAVX512: &tilesAVX512, TierAMX: &tilesAMX}

var tilesAVX2 = floatTiles(linearTiles{rows: 6, outs: 16, panels: 12}, [3]int{64, 96, 40},
	[]func(*tileArgs){4: tileF32x4AVX2, tileF32x5AVX2, tileF32x6AVX2})

var tilesAVX512 = floatTiles(linearTiles{rows: 14, outs: 32, panels: 8}, [3]int{96, 96, 96},
	[]func(*tileArgs){8: tileF32x8AVX512, tileF32x9AVX512, tileF32x10AVX512, tileF32x11AVX512, tileF32x12AVX512,
		tileF32x13AVX512, tileF32x14AVX512})

// floatTiles multiplies float32, whatever weights are stored in. fromRows are how many rows are many with float32,
// float16 and bfloat16.
func floatTiles(t linearTiles, fromRows [3]int, mul []func(*tileArgs)) linearTiles {
	way := func(fromRows int, pack func(*packArgs)) tileWay {
		return tileWay{fromRows: fromRows, depth: 256, mul: mul, pack: pack, rows: packRows, packing: 12}
	}
	t.ways[attn.Float32] = way(fromRows[0], packF32AVX2)
	t.ways[attn.Float16] = way(fromRows[1], packF16AVX2)
	t.ways[attn.BFloat16] = way(fromRows[2], packBF16AVX2)
	return t
}

// tilesAMX multiplies parts of bfloat16, of which three are a float32 exactly and two a float16. Products of small
// parts are left out: those are less than 2^-21 of a product together, and where x may be rounded less than 2^-13.
var tilesAMX = func() linearTiles {
	way := func(fromRows, x, w, depth, packing int, mul func(*tileArgs), pack, columns, split func(*packArgs)) tileWay {
		muls := make([]func(*tileArgs), 2*stepRows+1)
		muls[2*stepRows] = mul
		return tileWay{
			fromRows: fromRows, depth: depth, mul: muls, pack: pack, columns: columns, rows: stepRows, packing: packing,
			xParts: x, wParts: w, split: split, odd: oddAVX512, large: largeAVX512,
		}
	}
	t := linearTiles{rows: 2 * stepRows, outs: 2 * stepRows, panels: 4, fewer: &tilesAVX512}
	t.ways[attn.Float32] = way(256, 3, 3, 1024, 34, tileX3W3AMX, pairsF32AMX, nil, splitX3AMX)
	t.ways[attn.Float16] = way(192, 3, 2, 1024, 24, tileX3W2AMX, pairsF16AMX, columnsF16AMX, splitX3AMX)
	t.ways[attn.BFloat16] = way(64, 3, 1, 2048, 16, tileX3W1AMX, pairsBF16AMX, columnsBF16AMX, splitX3AMX)
	f16, bf16 := way(96, 2, 2, 1024, 40, tileX2W2AMX, pairsF16AMX, columnsF16AMX, splitX2AMX), way(32, 1, 1, 2048, 48, tileX1W1AMX, pairsBF16AMX, columnsBF16AMX, splitX1AMX)
	t.rounded[attn.Float16], t.rounded[attn.BFloat16] = &f16, &bf16
	return t
}()
