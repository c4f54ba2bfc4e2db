//go:build amd64 && gc && !noasm

package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
)

// assembly is the attention kernel for queries of type F on keys and values of one type, with steps in assembly. The
// functions are documented at their generated declarations.
type assembly[F cpu.Real] struct {
	dims  int    // divisor of Dim and ValueDim; other tiles use plain
	plain kernel // the Go kernel
	size  int    // bytes of an element of keys and values
	keys  int    // keys of a panel
	few   int    // rows: few64, few32, few16 or few8

	score, weighted, weightedBlock func(so, qp *F, kv **byte, at, rows, count, dim, stride, step int,
		ahead **byte, aheadAt, aheadStep int)
	weigh      func(s, o, m, l *F, rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) (empty int)
	panel      func(panel *F, k **byte, at, dim, step int)
	scorePanel func(s, q, panel *F, rows, dim, stride int)

	// nil for float64: a register has too few elements.
	scoreLanes func(so, qp *float32, kv **byte, at, rows, count, dim, stride, step int,
		ahead **byte, aheadAt, aheadStep int, wide *float32)

	factor float32 // by which elements of keys and values are too small, where these have scales

	tiles    *tiles    // nil if there are none
	widening *widening // nil: many rows have steps of their own
}

const (
	// With panelRows rows or more, a tile is a matrix product, not streaming: keys are transposed for the scores. With
	// fewer rows, rows are in the lanes of registers, in blocks of rowBlock.
	panelRows = 17
	rowBlock  = 8

	// Up to these numbers of rows, with keys and values of 64, 32, 16 and 8 bits an element, memory is slower than
	// arithmetic: keys and values are processed row by row, which is the fastest order for memory.
	few64 = panelRows - 1
	few32 = 12
	few16 = 5
	few8  = 5

	// aheadBytes is the prefetch distance in each stream, a few rows. With it, and streams that continue from call to
	// call, four streams of keys or values saturate memory.
	aheadBytes = 2048

	// leastPanel is the least number of quads of values in a call of weightedBlock. Each call reads and writes the whole
	// output, so with wide values one quad is too few.
	leastPanel = 4
)

// attendTiers returns the kernels by tier, for queries of float32.
func attendTiers32(plain [attn.DTypes]kernel) [cpu.Tiers][attn.DTypes]kernel {
	t := allTiers(plain)
	kernels := [cpu.Tiers]map[attn.DType]*assembly[float32]{
		cpu.TierAVX2: {
			attn.Float32: {
				dims: 8, size: 4, keys: 16, few: few32,
				score: scoreF32AVX2, weigh: weighAVX2, weighted: weightedF32AVX2,
				panel: panelF32AVX2, scorePanel: scorePanelAVX2, weightedBlock: weightedBlockF32AVX2,
				scoreLanes: scoreLanesF32AVX2,
			},
			attn.Float16: {
				dims: 8, size: 2, keys: 16, few: few16,
				score: scoreF16AVX2, weigh: weighAVX2, weighted: weightedF16AVX2,
				panel: panelF16AVX2, scorePanel: scorePanelAVX2, weightedBlock: weightedBlockF16AVX2,
				scoreLanes: scoreLanesF16AVX2,
			},
			attn.BFloat16: {
				dims: 8, size: 2, keys: 16, few: few16,
				score: scoreBF16AVX2, weigh: weighAVX2, weighted: weightedBF16AVX2,
				panel: panelBF16AVX2, scorePanel: scorePanelAVX2, weightedBlock: weightedBlockBF16AVX2,
				scoreLanes: scoreLanesBF16AVX2,
			},
			attn.E4M3: {
				dims: 8, size: 1, keys: 16, few: few8, factor: 256,
				score: scoreE4M3AVX2, weigh: weighAVX2, weighted: weightedE4M3AVX2,
				panel: panelE4M3AVX2, scorePanel: scorePanelAVX2, weightedBlock: weightedBlockE4M3AVX2,
			},
			attn.Int8: {
				dims: 8, size: 1, keys: 16, few: few8, factor: 1,
				score: scoreInt8AVX2, weigh: weighAVX2, weighted: weightedInt8AVX2,
				panel: panelInt8AVX2, scorePanel: scorePanelAVX2, weightedBlock: weightedBlockInt8AVX2,
			},
		},
		cpu.TierAVX512: {
			attn.Float32: {
				dims: 1, size: 4, keys: 32, few: few32,
				score: scoreF32AVX512, weigh: weighAVX512, weighted: weightedF32AVX512,
				panel: panelF32AVX512, scorePanel: scorePanelAVX512, weightedBlock: weightedBlockF32AVX512,
				scoreLanes: scoreLanesF32AVX512,
			},
			attn.Float16: {
				dims: 1, size: 2, keys: 32, few: few16,
				score: scoreF16AVX512, weigh: weighAVX512, weighted: weightedF16AVX512,
				panel: panelF16AVX512, scorePanel: scorePanelAVX512, weightedBlock: weightedBlockF16AVX512,
				scoreLanes: scoreLanesF16AVX512,
			},
			attn.BFloat16: {
				dims: 1, size: 2, keys: 32, few: few16,
				score: scoreBF16AVX512, weigh: weighAVX512, weighted: weightedBF16AVX512,
				panel: panelBF16AVX512, scorePanel: scorePanelAVX512, weightedBlock: weightedBlockBF16AVX512,
				scoreLanes: scoreLanesBF16AVX512,
			},
			attn.E4M3: {
				dims: 1, size: 1, keys: 32, few: few8, factor: 256,
				score: scoreE4M3AVX512, weigh: weighAVX512, weighted: weightedE4M3AVX512,
				panel: panelE4M3AVX512, scorePanel: scorePanelAVX512, weightedBlock: weightedBlockE4M3AVX512,
				scoreLanes: scoreLanesE4M3AVX512,
			},
			attn.Int8: {
				dims: 1, size: 1, keys: 32, few: few8, factor: 1,
				score: scoreInt8AVX512, weigh: weighAVX512, weighted: weightedInt8AVX512,
				panel: panelInt8AVX512, scorePanel: scorePanelAVX512, weightedBlock: weightedBlockInt8AVX512,
				scoreLanes: scoreLanesInt8AVX512,
			},
		},
	}
	kernels[cpu.TierAVX2][attn.Q4] = fourBits(&assembly[float32]{few: panelRows, score: scoreQ4AVX2, weighted: weightedQ4AVX2},
		kernels[cpu.TierAVX2][attn.Float32], widening{rows: widenedQ4AVX2, few: 2})
	kernels[cpu.TierAVX512][attn.Q4] = fourBits(&assembly[float32]{few: few8, score: scoreQ4AVX512, weighted: weightedQ4AVX512, scoreLanes: scoreLanesQ4AVX512, weightedBlock: weightedBlockQ4AVX512},
		kernels[cpu.TierAVX512][attn.Float32], widening{rows: widenedQ4AVX512, few: panelRows - 1})
	for tier, kernels := range kernels {
		for d, a := range kernels {
			a.plain = plain[d]
			t[tier][d] = a.attend
		}
	}
	t[cpu.TierAMX] = t[cpu.TierAVX512]
	a := *kernels[cpu.TierAVX512][attn.BFloat16]
	a.tiles = &tiles{queryTilesBF16AMX, scoreTilesBF16AMX, weightedTilesBF16AMX}
	t[cpu.TierAMX][attn.BFloat16] = a.attend
	return t
}

// attendTiers64 returns the kernels by tier, for queries of float64.
func attendTiers64(plain [attn.DTypes]kernel) [cpu.Tiers][attn.DTypes]kernel {
	t := allTiers(plain)
	for d, a := range map[attn.DType]assembly[float64]{
		attn.Float64:  {size: 8, score: scoreF64AVX2, weighted: weightedF64AVX2, panel: panelF64AVX2, weightedBlock: weightedBlockF64AVX2},
		attn.Float32:  {size: 4, score: scoreF64F32AVX2, weighted: weightedF64F32AVX2, panel: panelF64F32AVX2, weightedBlock: weightedBlockF64F32AVX2},
		attn.Float16:  {size: 2, score: scoreF64F16AVX2, weighted: weightedF64F16AVX2, panel: panelF64F16AVX2, weightedBlock: weightedBlockF64F16AVX2},
		attn.BFloat16: {size: 2, score: scoreF64BF16AVX2, weighted: weightedF64BF16AVX2, panel: panelF64BF16AVX2, weightedBlock: weightedBlockF64BF16AVX2},
	} {
		a.plain, a.dims, a.keys, a.few = plain[d], 4, 8, few64
		a.weigh, a.scorePanel = weigh64AVX2, scorePanel64AVX2
		t[cpu.TierAVX2][d] = a.attend
	}
	for d, a := range map[attn.DType]assembly[float64]{
		attn.Float64:  {size: 8, score: scoreF64AVX512, weighted: weightedF64AVX512, panel: panelF64AVX512, weightedBlock: weightedBlockF64AVX512},
		attn.Float32:  {size: 4, score: scoreF64F32AVX512, weighted: weightedF64F32AVX512, panel: panelF64F32AVX512, weightedBlock: weightedBlockF64F32AVX512},
		attn.Float16:  {size: 2, score: scoreF64F16AVX512, weighted: weightedF64F16AVX512, panel: panelF64F16AVX512, weightedBlock: weightedBlockF64F16AVX512},
		attn.BFloat16: {size: 2, score: scoreF64BF16AVX512, weighted: weightedF64BF16AVX512, panel: panelF64BF16AVX512, weightedBlock: weightedBlockF64BF16AVX512},
	} {
		a.plain, a.dims, a.keys, a.few = plain[d], 1, 16, few64
		a.weigh, a.scorePanel = weigh64AVX512, scorePanel64AVX512
		t[cpu.TierAVX512][d] = a.attend
	}
	t[cpu.TierAMX] = t[cpu.TierAVX512]
	return t
}

// attend implements kernel.
func (a *assembly[F]) attend(t *tile) {
	if t.Dim%a.dims != 0 || t.ValueDim%a.dims != 0 {
		a.plain(t)
		return
	}
	stride := (t.Count + 15) / 16 * 16
	values := func(row, rows, from, to int) { a.values(t, stride, row, rows, from, to) }
	a.scores(t, stride)
	scores := unsafe.Slice((*F)(t.Scores), t.Rows*stride)
	scaleScores(t, scores, stride, a.factor)
	modifyScores(t, scores, stride)
	keepScores(t, scores, stride)
	if t.Visible == nil {
		tiled, further := a.tiledValues(t), 0
		if tiled > 0 {
			further = t.Count // tiles are fast enough to gain by prefetching; other kernels lose a little
		}
		empty := a.weigh(at[F](t.Scores, 0), at[F](t.O, 0), at[F](t.M, 0), at[F](t.L, 0), t.Rows, t.Count, stride, t.ValueDim,
			array(&t.V[0]), 0, further)
		watchWeights(t, scores, t.M, stride)
		dropWeights(t, scores, stride)
		scaleWeights(t, scores, stride, a.factor)
		if empty == 0 {
			a.values(t, stride, 0, t.Rows, a.valuesInTiles(t, stride, tiled), t.Count)
			return
		}
		ragged[F](t, rowBlock, func(int) int { return t.Count }, values)
		return
	}
	visible := unsafe.Slice((*int32)(t.Visible), t.Rows)
	for r, n := range visible {
		if n > 0 {
			a.weigh(at[F](t.Scores, r*stride), at[F](t.O, r*t.ValueDim), at[F](t.M, r), at[F](t.L, r), 1, int(n), stride, t.ValueDim, array(&t.V[0]), 0, 0)
		}
	}
	watchWeights(t, scores, t.M, stride)
	dropWeights(t, scores, stride)
	scaleWeights(t, scores, stride, a.factor)
	ragged[F](t, rowBlock, func(r int) int { return int(visible[r]) }, values)
}

// scores computes the scores of all rows with all keys.
func (a *assembly[F]) scores(t *tile, stride int) {
	if a.widens(t, t.Rows) {
		a.scoresWidened(t, stride)
		return
	}
	a.scoresStored(t, stride)
}

// scoresStored is scores of keys as they lie.
func (a *assembly[F]) scoresStored(t *tile, stride int) {
	if t.Alone { // the other methods sum in other orders
		a.scoresByRow(t, stride, 0)
		return
	}
	key, half := a.scoresInTiles(t, stride), a.keys/2
	if t.Rows >= panelRows && (len(t.K) == 1 || t.Run%half == 0) {
		for ; key+a.keys <= t.Count; key += a.keys {
			for c := key; c < key+a.keys; c += half {
				a.panel(at[F](t.Wide, c-key), array(&t.K[c/t.Run]), c%t.Run/4*t.KStep, t.Dim, t.KStep)
			}
			a.scorePanel(at[F](t.Scores, key), at[F](t.Q, 0), at[F](t.Wide, 0), t.Rows, t.Dim, stride)
		}
	}
	if a.scoreLanes != nil && t.Rows > a.few && t.Rows < panelRows && (len(t.K) == 1 || t.Run%(half/2) == 0) {
		a.scoresInLanes(t, stride, key)
		return
	}
	a.scoresByRow(t, stride, key)
}

// scoresByRow computes scores for few rows, from key on, a multiple of 4: one sum across a register for each row and
// key, in an order that does not depend on the rest of the tile.
func (a *assembly[F]) scoresByRow(t *tile, stride, key int) {
	run, last := t.Run/4, (t.Count+3)/4 // in quads
	lead := a.lead(t.Dim, run)
	for x := key / 4; x < last; {
		n := min(run-x%run, last-x)
		ahead, aheadAt, aheadStep := &t.V[0], (x+lead-last)*t.VStep, t.VStep // values follow the keys
		if y := x + lead; y < last {
			n = min(n, run-y%run, last-y)
			ahead, aheadAt, aheadStep = &t.K[y/run], y%run*t.KStep, t.KStep
		}
		a.score(at[F](t.Scores, 4*x), at[F](t.Q, 0), array(&t.K[x/run]), x%run*t.KStep,
			t.Rows, min(4*n, t.Count-4*x), t.Dim, stride, t.KStep, array(ahead), aheadAt, aheadStep)
		x += n
	}
}

// scoresInLanes computes scores for more rows, from key on, a multiple of 16. Calls have whole groups of keys, of which
// a kernel takes several quads together.
func (a *assembly[F]) scoresInLanes(t *tile, stride, key int) {
	lanes := a.keys / 2
	each, together := lanes/4, lanes/8
	dim := (t.Dim + lanes - 1) / lanes * lanes
	keys, queries := at32(t.Wide, 0), at32(t.Wide, lanes*dim)
	a.interleave(t, unsafe.Slice(queries, (t.Rows+rowBlock-1)/rowBlock*rowBlock*dim), each)
	run, last := t.Run/4, (t.Count+3)/4 // in quads
	lead := (a.lead(t.Dim, run) + together - 1) / together * together
	for x := key / 4; x < last; {
		n := min(run-x%run, last-x)
		ahead, aheadAt, aheadStep := &t.V[0], (x+lead-last)*t.VStep, t.VStep // values follow the keys
		if y := x + lead; y < last {
			n = min(n, run-y%run, last-y)
			ahead, aheadAt, aheadStep = &t.K[y/run], y%run*t.KStep, t.KStep
		}
		a.scoreLanes(at32(t.Scores, 4*x), queries, array(&t.K[x/run]), x%run*t.KStep,
			t.Rows, min(4*n, t.Count-4*x), t.Dim, stride, t.KStep, array(ahead), aheadAt, aheadStep, keys)
		x += n
	}
}

// interleave arranges the tile's queries for scoreLanes: blocks of rowBlock rows, in which `each` consecutive elements
// of a row follow those of the previous row. Missing rows, and elements beyond Dim, are 0.
func (a *assembly[F]) interleave(t *tile, dst []float32, each int) {
	if t.Rows%rowBlock != 0 || len(dst) > t.Rows*t.Dim {
		clear(dst)
	}
	wide := len(dst) / ((t.Rows + rowBlock - 1) / rowBlock)
	for r := range t.Rows {
		x := unsafe.Slice(at32(t.Q, r*t.Dim), t.Dim)
		to := dst[r/rowBlock*wide+r%rowBlock*each:]
		from, at, step := unsafe.Pointer(&x[0]), unsafe.Pointer(&to[0]), 4*each*rowBlock
		n := t.Dim / each
		if each == 2 {
			for i := range n {
				*(*uint64)(unsafe.Add(at, i*step)) = *(*uint64)(unsafe.Add(from, 8*i))
			}
		} else {
			for i := range n {
				*(*[2]uint64)(unsafe.Add(at, i*step)) = *(*[2]uint64)(unsafe.Add(from, 16*i))
			}
		}
		if rest := x[n*each:]; len(rest) > 0 {
			copy(to[n*each*rowBlock:], rest)
		}
	}
}

// lead returns the prefetch distance in quads.
func (a *assembly[F]) lead(dim, run int) int { return max(min(aheadBytes/(dim*a.size), run), 1) }

// values adds the weighted values of keys [from, to), from a multiple of 4, to rows [row, row+rows). If rows are Alone,
// each four keys are added together, and the rest one by one.
func (a *assembly[F]) values(t *tile, stride, row, rows, from, to int) {
	if a.widens(t, rows) {
		a.valuesWidened(t, stride, row, rows, from, to)
		return
	}
	a.valuesStored(t, stride, row, rows, from, to)
}

// valuesStored is values as they lie.
func (a *assembly[F]) valuesStored(t *tile, stride, row, rows, from, to int) {
	run, last := t.Run/4, (to+3)/4 // in quads
	lead := a.lead(t.ValueDim, run)
	for x := from / 4; x < last; {
		n := min(run-x%run, last-x)
		v, offset := array(&t.V[x/run]), x%run*t.VStep
		ahead, aheadAt, aheadStep := v, offset, t.VStep
		if y := x + lead; y < last {
			n = min(n, run-y%run, last-y)
			ahead, aheadAt = array(&t.V[y/run]), y%run*t.VStep
		} else if t.Next != nil {
			ahead, aheadAt, aheadStep = array(t.Next), (y-last)*t.KStep, t.KStep
		}
		blocks := 0 // rows in blocks
		if !t.Alone && (rows > a.few || rows >= rowBlock && t.Rows >= panelRows) && 4*x+4 <= to {
			if blocks = rows &^ 3; rows == 6 || rows == 7 {
				blocks = 6
			}
			n = min(n, (to-4*x)/4)
			if t.Rows < panelRows {
				n = min(n, max(lead, leastPanel)) // larger panels outrun the prefetches
			}
			a.weightedBlock(at[F](t.O, row*t.ValueDim), at[F](t.Scores, row*stride+4*x), v, offset,
				blocks, 4*n, t.ValueDim, stride, t.VStep, ahead, aheadAt, aheadStep)
		}
		if blocks < rows {
			a.weighted(at[F](t.O, (row+blocks)*t.ValueDim), at[F](t.Scores, (row+blocks)*stride+4*x), v, offset,
				rows-blocks, min(4*n, to-4*x), t.ValueDim, stride, t.VStep, ahead, aheadAt, aheadStep)
		}
		x += n
	}
}
