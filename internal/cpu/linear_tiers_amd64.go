//go:build amd64 && gc && !noasm

package cpu

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
)

// The tables of the tiers.
var linearTiers = [tiers]*linearKernels{&linearGo, &linearAVX2, &linearAVX512, &linearAMX}

var linearAVX2 = linearKernels{
	dot: [attn.DTypes][dotMaxRows + 1]func(*dotArgs){
		attn.Float32:  {nil, dotF32x1AVX2, dotF32x2AVX2, dotF32x3AVX2},
		attn.Float64:  linearGo.dot[attn.Float64],
		attn.Float16:  {nil, dotF16x1AVX2, dotF16x2AVX2, dotF16x3AVX2},
		attn.BFloat16: {nil, dotBF16x1AVX2, dotBF16x2AVX2, dotBF16x3AVX2},
	},
	rows: 3,
	row: rowKernels{
		dot:     [attn.DTypes]func(*rowArgs){attn.Float32: rowF32AVX2, attn.Float16: rowF16AVX2, attn.BFloat16: rowBF16AVX2},
		streams: 4, side: math.MaxInt, ahead: 2560, unit: 256 << 10,
	},
	tiles: &tilesAVX2,
	add:   addAVX2,
	relu:  reluAVX2,
	gelu:  geluAVX2,
}

var linearAVX512 = linearKernels{
	dot: [attn.DTypes][dotMaxRows + 1]func(*dotArgs){
		attn.Float32:  {nil, dotF32x1AVX512, dotF32x2AVX512, dotF32x3AVX512, dotF32x4AVX512},
		attn.Float64:  linearGo.dot[attn.Float64],
		attn.Float16:  {nil, dotF16x1AVX512, dotF16x2AVX512, dotF16x3AVX512, dotF16x4AVX512},
		attn.BFloat16: {nil, dotBF16x1AVX512, dotBF16x2AVX512, dotBF16x3AVX512, dotBF16x4AVX512},
	},
	rows: 4,
	row: rowKernels{
		dot:     [attn.DTypes]func(*rowArgs){attn.Float32: rowF32AVX512, attn.Float16: rowF16AVX512, attn.BFloat16: rowBF16AVX512},
		streams: 8, side: 4 << 10, ahead: 1024, unit: 64 << 10,
		fetch: prefetchAVX512, idle: 512 << 10,
	},
	tiles: &tilesAVX512,
	add:   addAVX512,
	relu:  reluAVX512,
	gelu:  geluAVX512,
}

// linearAMX is AVX-512 but for many rows.
var linearAMX = func() linearKernels {
	k := linearAVX512
	k.tiles = &tilesAMX
	return k
}()

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
	way := func(fromRows, x, w, depth, packing int, mul func(*tileArgs), pack, split func(*packArgs)) tileWay {
		muls := make([]func(*tileArgs), 2*stepRows+1)
		muls[2*stepRows] = mul
		return tileWay{fromRows: fromRows, depth: depth, mul: muls, pack: pack, rows: stepRows, packing: packing, xParts: x, wParts: w, split: split, odd: oddAVX512}
	}
	t := linearTiles{rows: 2 * stepRows, outs: 2 * stepRows, panels: 4, fewer: &tilesAVX512}
	t.ways[attn.Float32] = way(256, 3, 3, 1024, 34, tileX3W3AMX, pairsF32AMX, splitX3AMX)
	t.ways[attn.Float16] = way(192, 3, 2, 1024, 24, tileX3W2AMX, pairsF16AMX, splitX3AMX)
	t.ways[attn.BFloat16] = way(64, 3, 1, 2048, 16, tileX3W1AMX, pairsBF16AMX, splitX3AMX)
	f16, bf16 := way(96, 2, 2, 1024, 40, tileX2W2AMX, pairsF16AMX, splitX2AMX), way(32, 1, 1, 2048, 48, tileX1W1AMX, pairsBF16AMX, splitX1AMX)
	t.rounded[attn.Float16], t.rounded[attn.BFloat16] = &f16, &bf16
	return t
}()

// Prompts are multiplied by the kernels of tilesAMX. Of float32, six products of parts are no faster than AVX-512.
var promptTiers = [tiers]*promptWays{tierAMX: func() *promptWays {
	of := func(x, w int, mul func(*tileArgs), split, pairs, columns func(*packArgs)) *promptKernels {
		return &promptKernels{xParts: x, wParts: w, split: split, pairs: pairs, columns: columns, mul: mul, large: largeAVX512, weigh: weighNearAVX512}
	}
	var w promptWays
	w.exact[attn.Float16] = of(3, 2, tileX3W2AMX, splitX3AMX, pairsF16AMX, columnsF16AMX)
	w.exact[attn.BFloat16] = of(3, 1, tileX3W1AMX, splitX3AMX, pairsBF16AMX, columnsBF16AMX)
	w.rounded[attn.Float16] = of(2, 2, tileX2W2AMX, splitX2AMX, pairsF16AMX, columnsF16AMX)
	w.rounded[attn.BFloat16] = of(1, 1, tileX1W1AMX, splitX1AMX, pairsBF16AMX, columnsBF16AMX)
	return &w
}()}

var readSumTiers = [tiers]func(p *byte, step, n int) uint64{readSumGo, readSumAVX2, readSumAVX512, readSumAVX512}

var vectorTiers = [tiers]vectorKernels{
	tierGo: vectorGo,
	tierAVX2: {
		scale: scaleAVX2, divide: divideAVX2, bias: biasAVX2, slope: slopeAVX2, softCap: softCapAVX2, biasStreams: biasStreamsAVX2,
		dot: dotAVX2, scale64: scale64AVX2, divide64: divide64AVX2, dot64: dot64AVX2, softCap64: softCap64AVX2,
		sum: sumAVX2, deviations: deviationsAVX2, normalise: normaliseAVX2, sum64: sum64AVX2, deviations64: deviations64AVX2, normalise64: normalise64AVX2,
		normNanos: normNanos, toFloat16: toFloat16AVX2, toBFloat16: toBFloat16AVX2, appendNanos: appendNanos,
	},
	tierAVX512: vectorAVX512,
	tierAMX:    vectorAVX512,
}

var vectorAVX512 = vectorKernels{
	scale: scaleAVX512, divide: divideAVX512, bias: biasAVX512, slope: slopeAVX512, softCap: softCapAVX512, biasStreams: biasStreamsAVX512,
	dot: dotAVX512, scale64: scale64AVX512, divide64: divide64AVX512, dot64: dot64AVX512, softCap64: softCap64AVX512,
	sum: sumAVX512, deviations: deviationsAVX512, normalise: normaliseAVX512, sum64: sum64AVX512, deviations64: deviations64AVX512, normalise64: normalise64AVX512,
	normNanos: normNanos, toFloat16: toFloat16AVX512, toBFloat16: toBFloat16AVX512, appendNanos: appendNanos,
}
