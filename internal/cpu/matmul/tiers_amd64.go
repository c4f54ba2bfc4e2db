//go:build amd64 && gc && !noasm

package matmul

import (
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Tiers are the sets by tier; nil: all rows are few.
var Tiers = [cpu.Tiers]*Set{cpu.TierAVX2: &tilesAVX2, cpu.TierAVX512: &tilesAVX512, cpu.TierAMX: &tilesAMX}

var tilesAVX2 = floatTiles(Set{Rows: 6, Outs: 16, Panels: 12}, [3]int{64, 96, 40},
	[]func(*Args){4: tileF32x4AVX2, tileF32x5AVX2, tileF32x6AVX2})

var tilesAVX512 = floatTiles(Set{Rows: 14, Outs: 32, Panels: 8}, [3]int{96, 96, 96},
	[]func(*Args){8: tileF32x8AVX512, tileF32x9AVX512, tileF32x10AVX512, tileF32x11AVX512, tileF32x12AVX512,
		tileF32x13AVX512, tileF32x14AVX512})

// floatTiles multiplies float32 for weights of any type. fromRows has the least number of many rows with float32,
// float16 and bfloat16.
func floatTiles(t Set, fromRows [3]int, mul []func(*Args)) Set {
	way := func(fromRows int, pack func(*PackArgs)) Way {
		return Way{FromRows: fromRows, Depth: 256, Mul: mul, Pack: pack, Rows: packRows, Packing: 12}
	}
	t.Ways[weight.Float32] = way(fromRows[0], packF32AVX2)
	t.Ways[weight.Float16] = way(fromRows[1], packF16AVX2)
	t.Ways[weight.BFloat16] = way(fromRows[2], packBF16AVX2)
	return t
}

// tilesAMX multiplies parts of bfloat16: three are exactly a float32, two a float16. Products of small parts are left
// out: together less than 2^-21 of a product, and with a rounded x less than 2^-13.
var tilesAMX = func() Set {
	way := func(fromRows, x, w, depth, packing int, mul func(*Args), pack, columns, split func(*PackArgs)) Way {
		muls := make([]func(*Args), 2*StepRows+1)
		muls[2*StepRows] = mul
		return Way{
			FromRows: fromRows, Depth: depth, Mul: muls, Pack: pack, Columns: columns, Rows: StepRows, Packing: packing,
			XParts: x, WParts: w, Split: split, Odd: oddAVX512, Large: largeAVX512,
		}
	}
	t := Set{Rows: 2 * StepRows, Outs: 2 * StepRows, Panels: 4, Fewer: &tilesAVX512}
	t.Ways[weight.Float32] = way(256, 3, 3, 1024, 34, tileX3W3AMX, pairsF32AMX, nil, splitX3AMX)
	t.Ways[weight.Float16] = way(192, 3, 2, 1024, 24, tileX3W2AMX, pairsF16AMX, columnsF16AMX, splitX3AMX)
	t.Ways[weight.BFloat16] = way(64, 3, 1, 2048, 16, tileX3W1AMX, pairsBF16AMX, columnsBF16AMX, splitX3AMX)
	f16, bf16 := way(96, 2, 2, 1024, 40, tileX2W2AMX, pairsF16AMX, columnsF16AMX, splitX2AMX), way(32, 1, 1, 2048, 48, tileX1W1AMX, pairsBF16AMX, columnsBF16AMX, splitX1AMX)
	t.Rounded[weight.Float16], t.Rounded[weight.BFloat16] = &f16, &bf16
	return t
}()
