package attention

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// kernel is what a kernel takes, and where it is: a line of the table. A new kernel is a new
// line. One that stands above others is preferred to them.
type kernel struct {
	way        *way
	unit       string   // the module of package kernels
	entries    []string // of launches one behind the other; of prefillWay, for queries and outputs of the keys' type, and for others
	kv         attn.DType
	dims       []int
	rows       int  // a sequence has at least so many: query positions times the heads of a group
	paged      bool // a chunk of keys lies in pages, of a power of two of tokens, and in no more than prefetchedEntries
	row        bool // output tiles have one row, and launches are long: see longReads
	capability versions
	tile       tile

	functions []*cuda.Function // of an engine, once they are needed
}

// versions are compute capabilities, 10*major + minor.
type versions struct{ least, most, but int } // but: not this one

func (v versions) have(capability int) bool {
	return v.least <= capability && capability <= v.most && capability != v.but
}

// tile is an output tile, and what a thread block has on its way for it.
type tile struct {
	rows   int // at most
	keys   int // of a step; 0: what a LeanTile is made of
	stages int // of keys and of values, or, where warps multiply, of both; 0: what shared memory has room for
	warps  int // that multiply, each for itself; 0: warp groups
	blocks int // thread blocks that a multiprocessor is to have; 0: one
	speed  int // of the kernels for many rows: how many times as fast as that for few rows a multiprocessor is, see stepCost
}

// way is how kernels are launched that work alike, and what they can do.
type way struct {
	can      attn.Can
	needs    attn.Feature                                   // that a problem has to have
	same     bool                                           // queries and outputs are of the type of keys
	positive bool                                           // scales keep the order of scores
	multiple int                                            // a power of two: strides of queries and outputs are multiples of it
	shared   bool                                           // thread blocks have dynamic shared memory
	parts    int                                            // of a query, where output tiles are those of Plan.prefilling
	fits     func(e *Engine, k *kernel, dim, rows int) bool // into shared memory
	run      func(p *Plan, s *cuda.Stream, o *Operands, k *kernel) error
}

// Thread blocks have ranges of LeanTiles, whose output tiles have 16 rows.
var leanWay = way{
	can: attn.Can{
		Name:     "attention on GPUs",
		Features: attn.Causal | attn.Rotates | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers,
		KV:       gpu.Types,
	},
	multiple: 4, shared: true,
	fits: func(e *Engine, k *kernel, dim, rows int) bool {
		_, ok := e.configure(e.shapeOf(k, dim), k.way.configured(min(rows, BlockRows)))
		return ok
	},
	run: (*Plan).runLean,
}

// Where output tiles have one row, and launches are long, by kernels that draw less. A schedule
// that was asked for has the others: there a sequence's bits do not depend on how much others have to read.
var rowWay = way{
	can: attn.Can{
		Name:     leanWay.can.Name,
		Features: attn.Causal | attn.Rotates | attn.SetTiles | attn.SetWorkers,
		KV:       gpu.Halves,
	},
	multiple: 4, shared: true,
	fits: leanWay.fits,
	run:  (*Plan).runLean,
}

// The same with masks and score modifications, by kernels of their own: those without are faster.
var scoredWay = way{
	can: attn.Can{
		Name:     leanWay.can.Name,
		Features: leanWay.can.Features | scoredFeatures,
		KV:       gpu.Types,
	},
	multiple: 4, shared: true,
	fits: leanWay.fits,
	run:  (*Plan).runScored,
}

// scoredFeatures are what these kernels have beside those that only have causal masks.
const (
	scoredFeatures = maskFeatures | changeFeatures
	maskFeatures   = attn.Window | attn.SinkTokens | attn.Trees | attn.Sinks
	changeFeatures = attn.Cap | attn.SlopesOfHeads | attn.AddedBias // of scores
)

// And with batch invariance: a row's bits must not depend on what a kernel could make use of.
var invariantWay = way{
	can: attn.Can{
		Name:     leanWay.can.Name,
		Features: scoredWay.can.Features&^attn.SinkTokens | attn.BatchInvariance,
		KV:       gpu.Types,
	},
	needs: attn.BatchInvariance, multiple: 4, shared: true,
	fits: leanWay.fits,
	run:  (*Plan).runScored,
}

// Thread blocks take output tiles of 64 rows and more. A caller that asks for workers,
// LeanTiles or a schedule gets these: from leanWay.
var prefillWay = way{
	can:  attn.Can{Name: "prefill on GPUs", Features: attn.Causal | attn.Rotates, KV: gpu.Halves},
	same: true, positive: true, multiple: 8, shared: true, parts: 1,
	fits: prefillFits, run: (*Plan).runPrefill,
}

// The same with queries and weights in two parts, for queries and outputs of any type.
var precisePrefillWay = way{
	can:      attn.Can{Name: "precise prefill on GPUs", Features: attn.Causal | attn.Rotates, KV: gpu.Halves},
	positive: true, multiple: 4, shared: true, parts: 2,
	fits: prefillFits, run: (*Plan).runPrefill,
}

// Both with masks and score modifications, by kernels of their own.
var scoredPrefillWay = way{
	can:  attn.Can{Name: prefillWay.can.Name, Features: prefillWay.can.Features | scoredFeatures, KV: gpu.Halves},
	same: true, multiple: 8, shared: true, parts: 1,
	fits: prefillFits, run: (*Plan).runPrefill,
}

// And with masks alone, where what makes scores of products can be left to the softmax.
var maskedPrefillWay = way{
	can:  attn.Can{Name: prefillWay.can.Name, Features: prefillWay.can.Features | maskFeatures, KV: gpu.Halves},
	same: true, positive: true, multiple: 8, shared: true, parts: 1,
	fits: prefillFits, run: (*Plan).runPrefill,
}

var preciseScoredPrefillWay = way{
	can:      attn.Can{Name: precisePrefillWay.can.Name, Features: precisePrefillWay.can.Features | scoredFeatures, KV: gpu.Halves},
	multiple: 4, shared: true, parts: 2,
	fits: prefillFits, run: (*Plan).runPrefill,
}

// Scores, their softmax and the sum of values are three launches. There are no LeanTiles: it
// makes no difference who would have them.
var unfusedWay = way{
	can: attn.Can{
		Name:     "unfused attention on GPUs",
		Features: attn.Causal | attn.Rotates | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers | attn.Unfused,
		KV:       gpu.Types,
	},
	needs: attn.Unfused, multiple: 4,
	fits: leanWay.fits, // the plan is one of LeanTiles all the same
	run:  (*Plan).runUnfused,
}

// configured is for how many rows of an output tile a launch is configured. With batch invariance it is for all: warps
// share a LeanTile's keys, so their number must not depend on the rows.
func (y *way) configured(rows int) int {
	if y.needs&attn.BatchInvariance != 0 {
		return BlockRows
	}
	return rows
}

// leanUnit is the module that every plan needs.
const leanUnit = "lean"

// rowUnit is that of kernels for output tiles of one row in long launches.
const rowUnit = "lean_row"

// appendEntry is the kernel there that stores new keys and values, of all types.
const appendEntry = "lean_append"

var (
	ampere      = versions{80, math.MaxInt, 0}  // and all after it
	hopper      = versions{90, 90, 0}           // with products of warp groups
	largeShared = versions{80, 80, 0}           // without; two thread blocks have 81 KB of shared memory each
	smallShared = versions{81, math.MaxInt, 90} // without; 49 KB
)

// prefillRows are more than an output tile of the kernels for few rows has.
const prefillRows = BlockRows + 1

// headDims are the head dims that unfused attention is for: those of the others.
var headDims = []int{64, 80, 96, 128, 256}

// promptTiles are the output tiles that kernels for many rows have of a head dim.
type promptTiles struct {
	dim           int
	same, precise tile // of queries of the keys' type or rounded to it, and of those in two parts
}

// mmaUnit is the module of those that multiply warp by warp.
const mmaUnit = "prefill_mma"

// prompts are kernels for many rows that have the same masks and changes of scores: the end of their names, and how they are launched, with
// queries of the keys' type or rounded to it, and in two parts; nil: there are none.
type prompts struct {
	end           string
	same, precise *way
	modified      bool // by other than causal masks: ScoredPrefillParams
}

var (
	plainPrompts  = prompts{"", &prefillWay, &precisePrefillWay, false}
	maskedPrompts = prompts{"_mask", &maskedPrefillWay, nil, true} // in two parts, what changes scores costs little beside twice the products
	scoredPrompts = prompts{"_score", &scoredPrefillWay, &preciseScoredPrefillWay, true}
)

// promptKernels are the lines of the kernels for many rows: those with fewer features before those with more. Those
// that a GPU has of one head dim have output tiles of as many rows, and as many thread blocks: a plan has one list of output
// tiles. Speeds were measured on 9.0 (BenchmarkGPUPrefill, BenchmarkGPUPrefillScores), and are estimated for others
// (docs/lab/prompts.md).
func promptKernels() (lines []kernel) {
	add := func(unit string, capability versions, of *prompts, tiles ...promptTiles) {
		for _, kv := range gpu.Halves {
			for _, t := range tiles {
				name := fmt.Sprintf("%s_%s_%d", unit, gpu.Name(kv), t.dim)
				line := kernel{way: of.same, unit: unit + of.end, entries: []string{name, name + "_rounded"}, kv: kv, dims: []int{t.dim}, rows: prefillRows, capability: capability, tile: t.same}
				if of.modified {
					line.entries = []string{name + of.end, name + of.end} // of any type
				}
				lines = append(lines, line)
				if of.precise != nil {
					line.way, line.entries, line.tile = of.precise, []string{name + "_precise" + of.end}, t.precise
					lines = append(lines, line)
				}
			}
		}
	}
	for _, of := range []*prompts{&plainPrompts, &maskedPrompts, &scoredPrompts} {
		speed := map[*prompts]int{&plainPrompts: 10, &maskedPrompts: 9, &scoredPrompts: 6}[of]
		groups := func(rows, keys, stages int) tile {
			return tile{rows: rows, keys: keys, stages: stages, blocks: 1, speed: speed}
		}
		large := 192 // rows with heads of 64: masks and what is added to scores take the registers of a third warp group
		if of.modified {
			large = 128
		}
		add("prefill", hopper, of,
			promptTiles{64, groups(large, 128, 4), groups(large, 64, 6)},
			promptTiles{80, groups(128, 128, 2), groups(128, 64, 3)},
			promptTiles{96, groups(128, 128, 2), groups(128, 64, 3)},
			promptTiles{128, groups(128, 128, 2), groups(128, 64, 3)},
			promptTiles{256, groups(128, 64, 2), groups(128, 32, 3)})
		if of == &maskedPrompts {
			continue // on others the kernels that change scores have masks, too
		}
		for _, gpus := range []struct {
			versions
			keys, stages  int // where queries of two thread blocks take 64 KB
			speed, scored int
			blocks64      int // thread blocks of a multiprocessor, with heads of 64
		}{{largeShared, 64, 3, 5, 4, 3}, {smallShared, 32, 2, 3, 2, 2}} {
			warps := func(rows, keys, stages, warps int) tile {
				return tile{rows: rows, keys: keys, stages: stages, warps: warps, blocks: 2, speed: gpus.speed}
			}
			together := func(blocks int, t tile) tile { t.blocks = blocks; return t }
			if of.modified {
				gpus.speed, gpus.blocks64 = gpus.scored, 2
			}
			add(mmaUnit, gpus.versions, of,
				promptTiles{64, together(gpus.blocks64, warps(128, 64, 4, 4)), together(gpus.blocks64, warps(128, 64, 4, 8))},
				promptTiles{80, warps(128, gpus.keys, gpus.stages, 4), warps(128, 32, 4, 8)},
				promptTiles{96, warps(128, gpus.keys, gpus.stages, 4), warps(128, 32, 4, 8)},
				promptTiles{128, warps(128, gpus.keys, gpus.stages, 4), warps(128, 32, 4, 8)},
				promptTiles{256, warps(64, 32, 3, 4), warps(64, 32, 2, 4)})
		}
	}
	return lines
}

var table = slices.Concat(promptKernels(), []kernel{
	// Output tiles of more rows than consumer warps merge in their registers (HELPED in the kernels' reduce header).
	{way: &leanWay, unit: "lean_many", entries: []string{"lean_f16_128_many"}, kv: attn.Float16, dims: []int{128}, rows: 9, capability: hopper, tile: tile{rows: 16}},
	{way: &leanWay, unit: "lean_many", entries: []string{"lean_bf16_128_many"}, kv: attn.BFloat16, dims: []int{128}, rows: 9, capability: hopper, tile: tile{rows: 16}},

	{way: &rowWay, unit: rowUnit, entries: []string{"lean_f16_64_row_paged"}, kv: attn.Float16, dims: []int{64}, paged: true, row: true, capability: hopper, tile: tile{rows: 1}},
	{way: &rowWay, unit: rowUnit, entries: []string{"lean_bf16_64_row_paged"}, kv: attn.BFloat16, dims: []int{64}, paged: true, row: true, capability: hopper, tile: tile{rows: 1}},
	{way: &rowWay, unit: rowUnit, entries: []string{"lean_f16_64_row"}, kv: attn.Float16, dims: []int{64}, row: true, capability: hopper, tile: tile{rows: 1}},
	{way: &rowWay, unit: rowUnit, entries: []string{"lean_bf16_64_row"}, kv: attn.BFloat16, dims: []int{64}, row: true, capability: hopper, tile: tile{rows: 1}},

	{way: &leanWay, unit: "lean_paged", entries: []string{"lean_f16_64_paged"}, kv: attn.Float16, dims: []int{64}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &leanWay, unit: "lean_paged", entries: []string{"lean_f16_128_paged"}, kv: attn.Float16, dims: []int{128}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &leanWay, unit: "lean_paged", entries: []string{"lean_bf16_64_paged"}, kv: attn.BFloat16, dims: []int{64}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &leanWay, unit: "lean_paged", entries: []string{"lean_bf16_128_paged"}, kv: attn.BFloat16, dims: []int{128}, paged: true, capability: hopper, tile: tile{rows: 16}},

	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f16_64"}, kv: attn.Float16, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f16_80"}, kv: attn.Float16, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f16_96"}, kv: attn.Float16, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f16_128"}, kv: attn.Float16, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f16_256"}, kv: attn.Float16, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_bf16_64"}, kv: attn.BFloat16, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_bf16_80"}, kv: attn.BFloat16, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_bf16_96"}, kv: attn.BFloat16, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_bf16_128"}, kv: attn.BFloat16, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_bf16_256"}, kv: attn.BFloat16, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f32_64"}, kv: attn.Float32, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f32_80"}, kv: attn.Float32, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f32_96"}, kv: attn.Float32, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f32_128"}, kv: attn.Float32, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &leanWay, unit: leanUnit, entries: []string{"lean_f32_256"}, kv: attn.Float32, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},

	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f16_64_score_paged"}, kv: attn.Float16, dims: []int{64}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f16_128_score_paged"}, kv: attn.Float16, dims: []int{128}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_bf16_64_score_paged"}, kv: attn.BFloat16, dims: []int{64}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_bf16_128_score_paged"}, kv: attn.BFloat16, dims: []int{128}, paged: true, capability: hopper, tile: tile{rows: 16}},

	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f16_64_score"}, kv: attn.Float16, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f16_80_score"}, kv: attn.Float16, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f16_96_score"}, kv: attn.Float16, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f16_128_score"}, kv: attn.Float16, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f16_256_score"}, kv: attn.Float16, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_bf16_64_score"}, kv: attn.BFloat16, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_bf16_80_score"}, kv: attn.BFloat16, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_bf16_96_score"}, kv: attn.BFloat16, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_bf16_128_score"}, kv: attn.BFloat16, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_bf16_256_score"}, kv: attn.BFloat16, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f32_64_score"}, kv: attn.Float32, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f32_80_score"}, kv: attn.Float32, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f32_96_score"}, kv: attn.Float32, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f32_128_score"}, kv: attn.Float32, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &scoredWay, unit: "lean_score", entries: []string{"lean_f32_256_score"}, kv: attn.Float32, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},

	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f16_64_invariant_paged"}, kv: attn.Float16, dims: []int{64}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f16_128_invariant_paged"}, kv: attn.Float16, dims: []int{128}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_bf16_64_invariant_paged"}, kv: attn.BFloat16, dims: []int{64}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_bf16_128_invariant_paged"}, kv: attn.BFloat16, dims: []int{128}, paged: true, capability: hopper, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f16_64_invariant"}, kv: attn.Float16, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f16_80_invariant"}, kv: attn.Float16, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f16_96_invariant"}, kv: attn.Float16, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f16_128_invariant"}, kv: attn.Float16, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f16_256_invariant"}, kv: attn.Float16, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_bf16_64_invariant"}, kv: attn.BFloat16, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_bf16_80_invariant"}, kv: attn.BFloat16, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_bf16_96_invariant"}, kv: attn.BFloat16, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_bf16_128_invariant"}, kv: attn.BFloat16, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_bf16_256_invariant"}, kv: attn.BFloat16, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f32_64_invariant"}, kv: attn.Float32, dims: []int{64}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f32_80_invariant"}, kv: attn.Float32, dims: []int{80}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f32_96_invariant"}, kv: attn.Float32, dims: []int{96}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f32_128_invariant"}, kv: attn.Float32, dims: []int{128}, capability: ampere, tile: tile{rows: 16}},
	{way: &invariantWay, unit: "lean_invariant", entries: []string{"lean_f32_256_invariant"}, kv: attn.Float32, dims: []int{256}, capability: ampere, tile: tile{rows: 16}},

	{way: &unfusedWay, unit: "unfused", entries: []string{"unfused_scores_f16", "unfused_softmax", "unfused_sum_f16"}, kv: attn.Float16, dims: headDims, capability: ampere},
	{way: &unfusedWay, unit: "unfused", entries: []string{"unfused_scores_bf16", "unfused_softmax", "unfused_sum_bf16"}, kv: attn.BFloat16, dims: headDims, capability: ampere},
	{way: &unfusedWay, unit: "unfused", entries: []string{"unfused_scores_f32", "unfused_softmax", "unfused_sum_f32"}, kv: attn.Float32, dims: headDims, capability: ampere},
})

// kernelsOf are the lines of the table that are for a GPU.
func kernelsOf(capability int) (all []kernel) {
	for _, k := range table {
		if k.capability.have(capability) {
			all = append(all, k)
		}
	}
	return all
}

// want is what a kernel is looked for to do.
type want struct {
	problem  *attn.Problem
	features attn.Feature // of the problem
	rows     int          // of the sequence with the most of them
	pages    int          // that a chunk of keys lies in, see shape.pages; 0: no kernel for pages will do
	long     bool         // a thread block reads much, see longReads
	same     bool         // queries and outputs are of the type of keys
}

// takes says whether k does what is wanted, if there is shared memory for it.
func (k *kernel) takes(w *want) bool {
	g, y := w.problem, k.way
	strides := g.Query.Row | g.Query.Head | g.Out.Row | g.Out.Head
	return k.kv == g.KV && slices.Contains(k.dims, g.Dim) && w.rows >= k.rows && (w.same || !y.same) &&
		w.features&^y.can.Features == 0 && w.features&y.needs == y.needs &&
		(g.Scale > 0 || !y.positive) && strides&(y.multiple-1) == 0 &&
		(!k.paged || 1 <= w.pages && w.pages <= prefetchedEntries) && (!k.row || w.rows == 1 && w.long)
}

// find is the first of some kernels that does what is wanted; nil: none does.
func find(kernels []kernel, w *want) *kernel {
	for i := range kernels {
		if kernels[i].takes(w) {
			return &kernels[i]
		}
	}
	return nil
}

// supports reports a problem that none of some kernels computes, whatever the lengths of its
// sequences and the types of its operands. Errors wrap attn.ErrShape, attn.ErrDType and
// attn.ErrUnsupported.
func supports(op string, g *attn.Problem, kernels []kernel) error {
	if err := g.Check(op); err != nil {
		return err
	}
	w := want{problem: g, features: g.Features()}
	if find(kernels, &w) == nil {
		return refusal(op, &w, kernels)
	}
	return supportsKeys(op, g)
}

// supportsKeys reports keys and values that lie as no kernel reads them.
func supportsKeys(op string, g *attn.Problem) error {
	bad := func(format string, args ...any) error { return gpu.Errorf(op, attn.ErrUnsupported, format, args...) }
	switch {
	case g.Key != g.Value:
		return bad("key strides %+v, value strides %+v: they must be equal", g.Key, g.Value)
	case g.Key.Row != g.Dim:
		return bad("keys are %d elements apart; they must follow each other", g.Key.Row)
	case g.Key.Page%g.Dim != 0 || g.Key.Head%g.Dim != 0:
		return bad("key strides %+v are no multiples of the head dim %d", g.Key, g.Dim)
	case g.Key.Page/g.Dim >= mostKeyRows || g.Key.Head/g.Dim >= mostKeyRows || g.PageTokens >= mostKeyRows:
		return bad("key strides %+v, pages of %d tokens: there are kernels for less than %d rows of keys", g.Key, g.PageTokens, mostKeyRows)
	}
	return nil
}

// refusal says why there is no kernel for what is wanted: the first thing that none can do.
func refusal(op string, w *want, kernels []kernel) error {
	g, can := w.problem, attn.Can{Name: leanWay.can.Name}
	var dims []int
	multiple := 0
	for i := range kernels {
		k := &kernels[i]
		if k.rows > w.rows || k.way.same && !w.same || k.paged {
			continue
		}
		can.Features |= k.way.can.Features
		if !slices.Contains(can.KV, k.kv) {
			can.KV = append(can.KV, k.kv)
		}
		for _, dim := range k.dims {
			if k.kv == g.KV && !slices.Contains(dims, dim) {
				dims = append(dims, dim)
			}
		}
		if multiple == 0 || k.way.multiple < multiple {
			multiple = k.way.multiple
		}
	}
	if err := can.Do(op, g); err != nil {
		return err
	}
	bad := func(format string, args ...any) error { return gpu.Errorf(op, attn.ErrUnsupported, format, args...) }
	if !slices.Contains(dims, g.Dim) {
		return bad("head dim %d; there are kernels for %v", g.Dim, dims)
	}
	for _, s := range [...]struct {
		name string
		attn.Strides
	}{{"query", g.Query}, {"output", g.Out}} {
		if s.Row%multiple != 0 || s.Head%multiple != 0 {
			return bad("%s strides %+v: they must be multiples of %d", s.name, s.Strides, multiple)
		}
	}
	return bad("%+v: there are kernels for each part of it, and none for all", *g)
}
