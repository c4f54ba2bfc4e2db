package attention

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// kernel is a line of the table: the problems that a kernel takes, and its module and entries. A new kernel is a new
// line. Earlier lines are preferred.
type kernel struct {
	family     *kernelFamily
	unit       string   // the module of package kernels
	entries    []string // of consecutive launches
	kv         attn.DType
	dims       []int
	value      int  // width of values; 0: that of keys
	anyWidth   bool // in place of dims and value: all widths of latentWidths, or of headWidths without ValuesInKeys
	chunk      int  // keys of a chunk; 0: see Engine.shape
	rows       int  // least number of rows of a sequence: query positions times the heads of a group
	paged      bool // a chunk of keys must be in pages of a power of two of tokens, at most prefetchedEntries of them
	pages      bool // a chunk of keys may be in such pages
	packed     bool // rows of keys lie in shared memory as in pages, without column blocks
	row        bool // output tiles have one row, and launches are long: see longReads
	capability versions
	tile       tile
	parts      int  // parts of an element of a query, in prefill kernels; 0: a decode kernel
	exact      bool // queries and outputs must have the type of keys: the kernel does not round them
	halves     bool // roundsQueries must allow the queries

	features attn.Feature // supported features
	needs    attn.Feature // features that a problem must have
	positive bool         // scales must be positive, which keeps the order of scores
	scored   bool         // it has the Variant with scores (kernels/attn_variant.cuh)
	changes  bool         // score changes, too
	measures bool         // its weights, too: see measured.go
	spreads  bool         // of an engine: heads may have other widths, see spreads

	functions []*cuda.Function // of an engine; loaded at first use
	line      *kernel          // of a variant's kernel, its line in the table
}

// versions is a range of compute capabilities, 10*major + minor.
type versions struct{ least, most, but int } // but: excluded

func (v versions) have(capability int) bool {
	return v.least <= capability && capability <= v.most && capability != v.but
}

// tile is the shape of an output tile, and the loads that a thread block keeps in flight for it.
type tile struct {
	rows   int // at most
	keys   int // of a step; 0: set by the LeanTile
	stages int // of keys and of values, or of both where warps multiply; 0: as many as shared memory holds
	warps  int // warps that multiply, each by itself; 0: warp groups
	blocks int // thread blocks on a multiprocessor; 0: one
	speed  int // of prefill kernels: speed of a multiprocessor relative to the decode kernel, see stepCost
}

// kernelFamily is the launch code of similar kernels.
type kernelFamily struct {
	shared bool                                           // thread blocks have dynamic shared memory
	fits   func(e *Engine, k *kernel, dim, rows int) bool // reports whether shared memory suffices
	run    func(p *Plan, s *cuda.Stream, o *Operands, k *kernel) error
}

var (
	// decodeFamily: thread blocks have ranges of LeanTiles. Output tiles have 16 rows.
	decodeFamily = kernelFamily{shared: true, fits: decodeFits, run: (*Plan).runDecode}

	// narrowFamily: as decodeFamily, and elements of pages have 8 bits and scales, or 4 bits.
	narrowFamily = kernelFamily{shared: true, fits: narrowFits, run: (*Plan).runNarrow}

	// latentFamily: as decodeFamily, and values are the first elements of keys. Output tiles have up to 64 rows.
	latentFamily = kernelFamily{shared: true, fits: latentFits, run: (*Plan).runLatent}

	// latentAnyFamily: as latentFamily, with masks and score changes. Output tiles have up to 32 rows.
	latentAnyFamily = kernelFamily{shared: true, fits: latentAnyFits, run: (*Plan).runLatentAny}

	// latentNarrowFamily: as latentFamily, and values are of E4M3. latentFewFamily: the same, with keys as rows of products.
	latentNarrowFamily = kernelFamily{shared: true, fits: latentNarrowFits, run: (*Plan).runLatentNarrow}
	latentFewFamily    = kernelFamily{shared: true, fits: latentColumnsFits, run: (*Plan).runLatentFew}

	// prefillFamily: thread blocks have output tiles of 64 rows or more.
	prefillFamily = kernelFamily{shared: true, fits: prefillFits, run: (*Plan).runPrefill}

	// unfusedFamily: scores, their softmax and the sum of values are three launches, for comparison. The launches do
	// not use LeanTiles. Their plan is cut into LeanTiles all the same.
	unfusedFamily = kernelFamily{fits: decodeFits, run: (*Plan).runUnfused}
)

func decodeFits(e *Engine, k *kernel, dim, rows int) bool {
	_, ok := e.configure(e.shapeOf(k, dim), k.configured(min(rows, BlockRows)))
	return ok
}

// Sets of features.
const (
	plainFeatures    = attn.Causal | attn.Rotates | attn.RotatesBehind
	scheduleFeatures = attn.OtherPolicy | attn.SetTiles | attn.SetWorkers // decode kernels alone
	decodeFeatures   = plainFeatures | scheduleFeatures
	latentFeatures   = decodeFeatures | attn.OtherValueDim | attn.ValuesInKeys

	// rowFeatures are the features of kernels with one row in an output tile. A requested schedule takes the other
	// kernels: a sequence's bits must not depend on the keys of other sequences, and longReads counts these.
	rowFeatures = decodeFeatures &^ attn.OtherPolicy
)

// same reports whether queries and outputs have the type of keys, or are rounded to it.
func (k *kernel) same() bool { return k.parts == 1 }

// multiple returns a power of two that divides the strides of queries and outputs.
func (k *kernel) multiple() int {
	if k.same() {
		return 8
	}
	return 4
}

// blockRows returns the number of rows of an output tile: a sequence's rows are cut into blocks of this many rows.
func (k *kernel) blockRows() int { return max(BlockRows, k.tile.rows) }

// configured returns the number of rows that a launch's configuration is for. With batch invariance it is always
// BlockRows: warps share the keys of a LeanTile, and their number must not depend on the rows.
func (k *kernel) configured(rows int) int {
	if k.needs&attn.BatchInvariance != 0 {
		return BlockRows
	}
	return rows
}

const (
	decodeUnit         = "lean" // every plan needs this module
	decodeVariantUnit  = "lean_variant"
	measuredUnit       = "measured"
	latentUnit         = "latent"
	latentPartUnit     = "latent_part"
	latentNarrowUnit   = "latent_narrow"
	latentAnyUnit      = "latent_any"
	anyUnit            = "any"
	narrowUnit         = "attn_narrow"
	narrowVariantUnit  = "attn_narrow_variant"
	fourUnit           = "attn_q4"
	fourVariantUnit    = "attn_q4_variant"
	fourWideUnit       = "attn_q4_wide"
	appendUnit         = "append" // every plan needs this module
	prefillUnit        = "prefill"
	prefillVariantUnit = "prefill_variant"
	variantEnd         = "_variant"  // suffix of the names of kernels with scores
	writtenEnd         = "_written"  // and with a user's variant, before they have been compiled
	measuredEnd        = "_measured" // and of those that measure weights
)

// Kernels that store new keys and values. appendEntry and rotaryEntry, in appendUnit, are for pages of numbers. narrowEntry, in
// narrowUnit, is for pages with scales, fourEntry, in fourUnit, for those of isFour, and latentAppendEntry, in latentAnyUnit, for those
// of isGrouped. rotaryEntry applies a rotary embedding, and so do the latter three if the plan has one.
const (
	appendEntry = "append_rows"
	rotaryEntry = "append_rotated"
	narrowEntry = "append_narrow"
	fourEntry   = "append_q4"

	latentAppendEntry = "append_latent"
)

var (
	ampere      = versions{80, math.MaxInt, 0}  // 8.0 and newer
	hopper      = versions{90, 90, 0}           // 9.0: products of warp groups
	largeShared = versions{80, 80, 0}           // 8.0: two thread blocks have 81 KB of shared memory each
	smallShared = versions{81, math.MaxInt, 90} // 8.1 and newer, without 9.0: two thread blocks have 49 KB each
)

// prefillRows is the least number of rows of a prefill sequence: more than an output tile of the decode kernels has.
const prefillRows = BlockRows + 1

// headDims are the head dims that kernels have.
var headDims = []int{64, 80, 96, 128, 256}

// packedUnit returns the module of the kernels of packedDims for a type of keys.
func packedUnit(kv attn.DType) string { return "packed_" + gpu.Name(kv) }

// packedDims are the head dims of decode kernels whose rows of keys are no whole column blocks.
var packedDims = []int{32, 48, 80, 112, 144, 160, 176, 192, 208, 216, 224, 240, 248}

// table has a line for each kernel.
var table = slices.Concat(prefillLines(), decodeLines(), narrowLines(), fourLines(), latentLines(), anyLines(), unfusedLines())

// prefillTiles are the output tiles of prefill kernels of one head dim.
type prefillTiles struct {
	dim           int
	same, precise tile // for queries of the keys' type or rounded to it, and for queries in two parts
}

// prefillLines returns the lines of the prefill kernels, those with fewer features first. A GPU's prefill kernels of
// one head dim have output tiles of equal rows and equal numbers of thread blocks, since a plan has one list of output
// tiles. On 9.0, kernels of operands of the keys' type do not round, as code that rounds costs short launches up to 4%.
// Head dims 64 and 128 have kernels that round beside them. For other head dims the kernels with masks round, which are up
// to 5% slower. Speeds were measured on 9.0 (BenchmarkGPUPrefill, BenchmarkGPUPrefillScores) and are estimated for other
// GPUs (docs/lab/prompts.md).
func prefillLines() (lines []kernel) {
	// With masks alone, the softmax scales the products. With queries in two parts, score changes cost little beside
	// twice the products, so there is no line for masks alone.
	for _, of := range []kernel{
		{features: plainFeatures, positive: true, tile: tile{speed: 10}},
		{features: plainFeatures | maskFeatures, positive: true, scored: true, tile: tile{speed: 9}},
		{features: plainFeatures | scoredFeatures, scored: true, changes: true, tile: tile{speed: 6}},
		{features: plainFeatures | writtenFeatures, needs: attn.Varied, scored: true, changes: true, tile: tile{speed: 6}},
	} {
		masks, written := of.scored && !of.changes, of.needs != 0
		of.family, of.unit, of.rows = &prefillFamily, prefillUnit, prefillRows
		end := ""
		switch {
		case written:
			of.unit, end = "", writtenEnd
		case of.scored:
			of.unit, end = prefillVariantUnit, variantEnd
		}
		add := func(capability versions, tiles ...prefillTiles) {
			for _, kv := range gpu.Halves {
				for _, t := range tiles {
					line, name := of, fmt.Sprintf("prefill_%s_%d", gpu.Name(kv), t.dim)
					line.kv, line.dims, line.capability = kv, []int{t.dim}, capability
					line.entries, line.tile, line.parts = []string{name + end}, t.same, 1
					line.exact = capability == hopper && !of.scored || written
					if lines = append(lines, line); masks {
						continue
					}
					if line.exact && (t.dim == 64 || t.dim == 128 || written) {
						line.entries, line.exact = []string{name + "_rounded"}, false
						lines = append(lines, line)
					}
					line.exact = false
					line.entries, line.tile, line.parts, line.positive = []string{name + "_precise" + end}, t.precise, 2, !of.scored
					lines = append(lines, line)
				}
			}
		}
		groups := func(rows, keys, stages int) tile {
			return tile{rows: rows, keys: keys, stages: stages, blocks: 1, speed: of.tile.speed}
		}
		large := 192 // rows with heads of 64; masks and score changes take the registers of a third warp group
		if of.scored {
			large = 128
		}
		add(hopper,
			prefillTiles{64, groups(large, 128, 4), groups(large, 64, 6)},
			prefillTiles{80, groups(128, 128, 2), groups(128, 64, 3)},
			prefillTiles{96, groups(128, 128, 2), groups(128, 64, 3)},
			prefillTiles{128, groups(128, 128, 2), groups(128, 64, 3)},
			prefillTiles{256, groups(128, 64, 2), groups(128, 32, 3)})
		if !of.scored {
			for _, kv := range gpu.Halves {
				line := of
				line.kv, line.dims, line.value, line.capability = kv, []int{192}, 128, hopper
				line.entries, line.tile, line.parts, line.exact = []string{fmt.Sprintf("prefill_%s_192_128", gpu.Name(kv))}, groups(128, 128, 2), 1, true
				lines = append(lines, line)
			}
		}
		if masks {
			continue // on other GPUs the lines with score changes also have masks
		}
		for _, gpus := range []struct {
			versions
			keys, stages  int // if the queries of two thread blocks take 64 KB
			speed, scored int
			blocks64      int // thread blocks of a multiprocessor, with heads of 64
		}{{largeShared, 64, 3, 5, 4, 3}, {smallShared, 32, 2, 3, 2, 2}} {
			warps := func(rows, keys, stages, warps int) tile {
				return tile{rows: rows, keys: keys, stages: stages, warps: warps, blocks: 2, speed: gpus.speed}
			}
			together := func(blocks int, t tile) tile { t.blocks = blocks; return t }
			if of.scored {
				gpus.speed, gpus.blocks64 = gpus.scored, 2
			}
			add(gpus.versions,
				prefillTiles{64, together(gpus.blocks64, warps(128, 64, 4, 4)), together(gpus.blocks64, warps(128, 64, 4, 8))},
				prefillTiles{80, warps(128, gpus.keys, gpus.stages, 4), warps(128, 32, 4, 8)},
				prefillTiles{96, warps(128, gpus.keys, gpus.stages, 4), warps(128, 32, 4, 8)},
				prefillTiles{128, warps(128, gpus.keys, gpus.stages, 4), warps(128, 32, 4, 8)},
				prefillTiles{256, warps(64, 32, 3, 4), warps(64, 32, 2, 4)})
		}
	}
	return lines
}

// decodeLines returns the lines of the decode kernels.
func decodeLines() (lines []kernel) {
	add := func(of kernel, end string, kvs []attn.DType, dims ...int) {
		of.family = &decodeFamily
		for _, kv := range kvs {
			for _, dim := range dims {
				of.kv, of.dims, of.entries = kv, []int{dim}, []string{fmt.Sprintf("lean_%s_%d%s", gpu.Name(kv), dim, end)}
				lines = append(lines, of)
			}
		}
	}
	plain, row := tile{rows: BlockRows}, tile{rows: 1}
	// Output tiles with more rows than consumer warps merge in registers (HELPED in kernels/attn_reduce.cuh).
	add(kernel{unit: decodeUnit, features: decodeFeatures, rows: 9, capability: hopper, tile: plain}, "_many", gpu.Halves, 128)
	// Long launches of one row, by kernels with lower power.
	add(kernel{unit: decodeUnit, features: rowFeatures, paged: true, row: true, capability: hopper, tile: row}, "_row_paged", gpu.Halves, 64)
	add(kernel{unit: decodeUnit, features: rowFeatures, row: true, capability: hopper, tile: row}, "_row", gpu.Halves, 64)
	add(kernel{unit: decodeUnit, features: decodeFeatures, paged: true, capability: hopper, tile: plain}, "_paged", gpu.Halves, 64, 128)
	for _, kv := range gpu.Halves {
		for _, dim := range packedDims {
			lines = append(lines, kernel{
				family: &decodeFamily, unit: packedUnit(kv), entries: []string{fmt.Sprintf("%s_%d", packedUnit(kv), dim)}, kv: kv, dims: []int{dim},
				packed: dim%64 > 0, capability: hopper, tile: plain, features: decodeFeatures,
			})
		}
	}
	add(kernel{unit: decodeUnit, features: decodeFeatures, capability: ampere, tile: plain}, "", gpu.Types, headDims...)

	// With batch invariance kernels are slower, and have no sink tokens.
	of := kernel{unit: decodeVariantUnit, scored: true, changes: true, capability: ampere, tile: plain}
	for _, invariance := range []attn.Feature{0, attn.BatchInvariance} {
		of.features, of.needs = decodeFeatures|scoredFeatures|invariance, invariance
		if invariance != 0 {
			of.features &^= attn.SinkTokens
		}
		for _, dim := range headDims {
			of.pages = dim == 64 || dim == 128
			add(of, variantEnd, gpu.Halves, dim)
		}
		of.pages = false
		add(of, variantEnd, []attn.DType{attn.Float32}, headDims...)
	}
	measured := kernel{unit: measuredUnit, features: (decodeFeatures | scoredFeatures | attn.Measures) &^ attn.Trees, needs: attn.Measures, scored: true, changes: true, measures: true, capability: ampere, tile: plain}
	for _, kv := range gpu.Types {
		for _, dim := range []int{64, 128} {
			measured.pages = kv != attn.Float32
			add(measured, measuredEnd, []attn.DType{kv}, dim)
			line := &lines[len(lines)-1]
			line.entries = append(line.entries, measuredEntry)
		}
	}
	// Kernels that are compiled at run time.
	add(kernel{features: decodeFeatures | writtenFeatures, needs: attn.Varied, scored: true, changes: true, capability: ampere, tile: plain}, writtenEnd, gpu.Types, headDims...)
	add(kernel{features: decodeFeatures | writtenFeatures | attn.Measures, needs: attn.Varied | attn.Measures, scored: true, changes: true, measures: true, capability: ampere, tile: plain}, measuredEnd+writtenEnd, gpu.Types, headDims...)
	return lines
}

// narrowLines returns the lines of the kernels for keys and values of 8 bits.
func narrowLines() (lines []kernel) {
	for _, kv := range gpu.Eights {
		for _, dim := range []int{64, 128, 256} {
			of := kernel{
				family: &narrowFamily, unit: narrowUnit, entries: []string{fmt.Sprintf("narrow_%s_%d", gpu.Name(kv), dim)}, kv: kv, dims: []int{dim},
				pages: true, capability: ampere, tile: tile{rows: BlockRows}, features: decodeFeatures | attn.Scaled, needs: attn.Scaled,
			}
			if dim < 256 {
				lines = append(lines, of)
			} else {
				of.capability = hopper
			}
			of.unit, of.entries, of.scored, of.changes = narrowVariantUnit, []string{fmt.Sprintf("narrow_%d", dim) + variantEnd}, true, true
			of.features |= scoredFeatures &^ attn.AddedBias
			lines = append(lines, of)
		}
	}
	return lines
}

// fourLines returns the lines of the kernels for keys and values of 4 bits.
func fourLines() (lines []kernel) {
	for _, dim := range []int{64, 128, 256} {
		of := kernel{
			family: &narrowFamily, unit: fourUnit, entries: []string{fmt.Sprintf("q4_%d", dim)}, kv: attn.Q4, dims: []int{dim},
			pages: true, capability: ampere, tile: tile{rows: BlockRows}, features: decodeFeatures | attn.MixedKeys,
		}
		scored := of
		scored.unit, scored.entries, scored.scored, scored.changes = fourVariantUnit, []string{fmt.Sprintf("q4_%d", dim) + variantEnd}, true, true
		scored.features |= scoredFeatures &^ attn.AddedBias
		if dim < 256 {
			lines = append(lines, of)
		} else {
			scored.unit, scored.capability = fourWideUnit, hopper
		}
		lines = append(lines, scored)
	}
	return lines
}

// latentLines returns the lines of the kernels for keys that hold the values.
func latentLines() (lines []kernel) {
	for _, kv := range gpu.Halves {
		name := "latent_" + gpu.Name(kv)
		lines = append(lines, kernel{
			family: &latentFamily, unit: latentUnit, entries: []string{name, name + "_precise", name + "_16"}, kv: kv, dims: []int{latentDim}, value: latentValue,
			capability: hopper, tile: tile{rows: latentRows}, chunk: latentKeys, features: latentFeatures, needs: attn.ValuesInKeys,
		})
	}
	for _, kv := range gpu.Halves {
		lines = append(lines, kernel{
			family: &latentFamily, unit: latentPartUnit, entries: []string{"latent_part_" + gpu.Name(kv)}, kv: kv, dims: []int{latentPartDim}, value: latentPartValue, halves: true,
			capability: hopper, tile: tile{rows: latentRows}, chunk: latentKeys, features: latentFeatures, needs: attn.ValuesInKeys,
		})
	}
	narrow := kernel{
		family: &latentNarrowFamily, unit: latentNarrowUnit, entries: []string{"latent_e4m3"}, kv: attn.E4M3, dims: []int{latentDim}, value: latentValue,
		capability: hopper, rows: 2*latentFew + 1, tile: tile{rows: latentRows}, chunk: latentKeys, halves: true,
		features: latentFeatures | attn.Scaled | attn.SeveralPlanes | attn.SeveralTypes, needs: attn.ValuesInKeys | attn.Scaled,
	}
	few := narrow
	few.family, few.unit, few.entries, few.rows = &latentFewFamily, latentUnit, []string{"latent_e4m3_16", "latent_e4m3_32"}, 0
	lines = append(lines, narrow, few)
	for _, kv := range append(gpu.Types[:len(gpu.Types):len(gpu.Types)], attn.E4M3) {
		of := kernel{
			family: &latentAnyFamily, unit: latentAnyUnit, entries: []string{"latent_any_" + gpu.Name(kv)}, kv: kv, anyWidth: true,
			capability: ampere, tile: tile{rows: latentAnyRows}, chunk: latentAnyKeys, features: latentFeatures | scoredFeatures, needs: attn.ValuesInKeys, scored: true, changes: true,
		}
		if kv == attn.E4M3 {
			of.features |= attn.Scaled | attn.SeveralPlanes | attn.SeveralTypes
			of.needs |= attn.Scaled
		}
		lines = append(lines, of)
	}
	return lines
}

// anyLines returns the lines of the kernels for heads of other widths than headDims. From 9.0 on, most such heads are spread.
func anyLines() (lines []kernel) {
	for _, kv := range gpu.Types {
		lines = append(lines, kernel{
			family: &latentAnyFamily, unit: anyUnit, entries: []string{"any_" + gpu.Name(kv)}, kv: kv, anyWidth: true, capability: ampere,
			tile: tile{rows: latentAnyRows}, chunk: latentAnyKeys, features: decodeFeatures | attn.OtherValueDim | scoredFeatures, scored: true, changes: true,
		})
	}
	return lines
}

// unfusedLines returns the lines of unfused attention.
func unfusedLines() (lines []kernel) {
	for _, kv := range gpu.Types {
		name := gpu.Name(kv)
		lines = append(lines, kernel{
			family: &unfusedFamily, unit: "unfused", entries: []string{"unfused_scores_" + name, "unfused_softmax", "unfused_sum_" + name},
			kv: kv, dims: headDims, capability: ampere, features: decodeFeatures | attn.Unfused, needs: attn.Unfused,
		})
	}
	return lines
}

// kernelsOf returns the lines of the table for a GPU.
func kernelsOf(capability int) (all []kernel) {
	for _, k := range table {
		if k.capability.have(capability) {
			k.spreads = (k.family == &decodeFamily || k.family == &prefillFamily) && capability >= 90 && k.tile.warps == 0 && !k.packed // by the copy engine
			all = append(all, k)
		}
	}
	return all
}

// want describes the kernel to find.
type want struct {
	problem  *attn.Problem
	features attn.Feature // of the problem
	rows     int          // of the sequence with most rows
	pages    int          // pages of a chunk of keys, see shape.pages; 0: not a kernel for pages
	long     bool         // each thread block reads at least longReads
	same     bool         // queries and outputs have the type of keys, or are rounded to it
	rounds   bool         // a prefill kernel must round them
	direct   bool         // a prefill kernel must have the widths of the pages
}

// takes reports whether k can do w, if shared memory suffices.
func (k *kernel) takes(w *want) bool {
	g := w.problem
	strides := g.Query.Row | g.Query.Head | g.Out.Row | g.Out.Head
	return k.kv == g.Pages.Planes[0].DType && k.hasWidth(g) && (k.spreads || !isSpread(g)) && k.isDirect() == w.direct && w.rows >= k.rows && (w.same || !k.same()) && !(w.rounds && (k.exact || k.parts > 1)) &&
		(!k.halves || roundsQueries(g, k.kv)) && w.features&^k.features == 0 && w.features&k.needs == k.needs &&
		(g.Scale > 0 || !k.positive) && strides&(k.multiple()-1) == 0 &&
		(!k.paged || w.walks()) && (!k.row || w.rows == 1 && w.long)
}

// isDirect reports whether k is a prefill kernel with values of another width than keys.
func (k *kernel) isDirect() bool { return k.parts > 0 && k.value > 0 }

// hasWidth reports whether k has the widths of keys and values of g.
func (k *kernel) hasWidth(g *attn.Problem) bool {
	if k.anyWidth {
		return g.Pages.InKeys() && latentWidths(g) || isAny(g) && headWidths(g)
	}
	if k.isDirect() {
		return k.dims[0] == g.Pages.KeyDim() && k.value == g.Pages.Value.Dim
	}
	return slices.Contains(k.dims, g.Dim) && (k.value == 0 || k.value == g.ValueDim)
}

// walks reports whether the chunk's number of pages suits the kernels for pages.
func (w *want) walks() bool { return 1 <= w.pages && w.pages <= prefetchedEntries }

// find returns the first of kernels that takes w, or nil.
func find(kernels []kernel, w *want) *kernel {
	for i := range kernels {
		if kernels[i].takes(w) {
			return &kernels[i]
		}
	}
	return nil
}

// supports returns an error if none of kernels computes g with any lengths of sequences and types of operands. Errors
// wrap attn.ErrShape, attn.ErrDType and attn.ErrUnsupported.
func supports(op string, g *attn.Problem, kernels []kernel) error {
	if err := g.Check(op); err != nil {
		return err
	}
	spread := spreadsIn(kernels, g)
	of := spread.problem(*g)
	if w := (want{problem: &of, features: of.Features()}); find(kernels, &w) == nil {
		return refusal(op, &want{problem: g, features: g.Features()}, kernels)
	}
	return supportsKeys(op, g)
}

// spreadsIn returns the spreads of a problem if one of the kernels takes spread heads, and otherwise none.
func spreadsIn(kernels []kernel, g *attn.Problem) spreads {
	s := spreadsOf(g)
	of := s.problem(*g)
	if w := (want{problem: &of, features: of.Features()}); s.on() && find(kernels, &w) != nil {
		return s
	}
	return spreads{}
}

// supportsKeys returns an error if no kernel reads keys and values of these strides, or no launch spreads queries and outputs of these.
func supportsKeys(op string, g *attn.Problem) error {
	bad := func(format string, args ...any) error { return gpu.Errorf(op, attn.ErrUnsupported, format, args...) }
	k := g.Pages.Key()
	row, value := k.Elements(), g.ValueDim/g.Pages.ValuePlane().DType.Columns()
	switch {
	case isOdd(g):
		return bad("query strides %+v, output strides %+v: with head dim %d and values of %d they must be multiples of 4", g.Query, g.Out, g.Dim, g.ValueDim)
	case k.At.Row != row:
		return bad("keys are %d elements apart; they must be contiguous", k.At.Row)
	case k.At.Page%row != 0 || k.At.Head%row != 0:
		return bad("key strides %+v are no multiples of the head dim %d", k.At, k.Dim)
	case !g.Pages.InKeys() && g.Pages.ValuePlane().At != (attn.PageStrides{Page: k.At.Page / row * value, Head: k.At.Head / row * value, Row: value}):
		return bad("key strides %+v, value strides %+v: values must lie as keys do", k.At, g.Pages.ValuePlane().At)
	case k.At.Page/row >= mostKeyRows || k.At.Head/row >= mostKeyRows || g.PageTokens >= mostKeyRows:
		return bad("key strides %+v, pages of %d tokens: kernels support fewer than %d rows of keys", k.At, g.PageTokens, mostKeyRows)
	}
	return supportsScales(op, g)
}

// refusal returns an error with the first part of w that none of kernels supports.
func refusal(op string, w *want, kernels []kernel) error {
	g, can := w.problem, attn.Can{Name: "attention on GPUs"}
	narrow := (g.Pages.Key().DType.Size() == 1 || isFour(g)) && w.features&attn.ValuesInKeys == 0
	apart := attn.ValuesInKeys | attn.Varied | attn.Measures // features of kernels that others do not stand for
	if w.features&attn.Varied != 0 {
		can.Name += " with a variant"
	}
	if w.features&attn.Measures != 0 {
		can.Name += " that measures weights"
	}
	if narrow {
		can.Name += map[bool]string{false: " to keys and values of 8 bits", true: " to keys and values of 4 bits"}[isFour(g)]
	}
	var dims []int
	multiple, spread := 0, false
	spreads := spreadsOf(g)
	anyHeads := isAny(g) && slices.ContainsFunc(kernels, func(k kernel) bool { return k.unit == anyUnit }) &&
		!(spreads.on() && slices.ContainsFunc(kernels, func(k kernel) bool { return k.spreads }))
	if anyHeads {
		can.Name += fmt.Sprintf(" with keys of %d elements and values of %d", g.Dim, g.ValueDim)
	}
	for i := range kernels {
		k := &kernels[i]
		if anyHeads && k.unit != anyUnit || k.rows > w.rows || k.same() && !w.same || k.paged || k.isDirect() || (w.features^k.needs)&apart != 0 || narrow != (k.family == &narrowFamily) || isFour(g) != (k.kv == attn.Q4) {
			continue
		}
		if can.Features |= k.features; k.spreads && w.features&^(k.features|attn.OtherValueDim) == 0 {
			can.Features, spread = can.Features|attn.OtherValueDim, true
		}
		if !slices.Contains(can.KV, k.kv) {
			can.KV = append(can.KV, k.kv)
		}
		for _, dim := range k.dims {
			if k.kv == g.Pages.Planes[0].DType && !slices.Contains(dims, dim) {
				dims = append(dims, dim)
			}
		}
		if multiple == 0 || k.multiple() < multiple {
			multiple = k.multiple()
		}
	}
	if err := can.Do(op, g); err != nil {
		return err
	}
	bad := func(format string, args ...any) error { return gpu.Errorf(op, attn.ErrUnsupported, format, args...) }
	if w.features&attn.ValuesInKeys != 0 {
		return bad("keys of %d elements with values of %d in them: kernels have multiples of 8, up to %d and %d, and of %d for values of %v", g.Dim, g.ValueDim, latentDim, latentValue, latentGroup, attn.E4M3)
	}
	slices.Sort(dims)
	switch {
	case spreads.on() && spread, anyHeads && headWidths(g), g.Dim == g.ValueDim && slices.Contains(dims, g.Dim):
	case anyHeads:
		return bad("head dim %d with values of %d is not supported: kernels have multiples of 8 up to %d", g.Dim, g.ValueDim, mostHead)
	default:
		return bad("head dim %d is not supported: kernels have head dims %v", g.Dim, dims)
	}
	for _, s := range [...]struct {
		name string
		attn.Strides
	}{{"query", g.Query}, {"output", g.Out}} {
		if s.Row%multiple != 0 || s.Head%multiple != 0 {
			return bad("%s strides %+v: they must be multiples of %d", s.name, s.Strides, multiple)
		}
	}
	return bad("%+v: kernels exist for each feature, and none for all", *g)
}
