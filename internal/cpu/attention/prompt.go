package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/weight"
)

// With many rows, scores and weighted sums are matrix products, as in linear layers of many rows: queries and weights
// take the place of a layer's x, keys and values the place of its weights. The kernels of linear layers compute them in
// tiles, from parts of bfloat16. Problems without such kernels, and blocks of few rows, use kernel.

const (
	// promptRows is the least number of rows of a block for tiles: with fewer rows, packing keys and values takes
	// longer than it saves.
	promptRows = 24

	// promptKeys is the number of keys that are packed at a time, a multiple of StepDepth.
	promptKeys = 256

	// promptBlock is the number of rows whose scores are computed at a time, so that scores and packed keys stay in
	// cache.
	promptBlock = 64

	// promptTile is the number of rows, and of columns, of a tile.
	promptTile = 2 * matmul.StepRows
)

// promptKernels multiply keys and values of one type by rows of float32. The functions are documented at their
// declarations.
type promptKernels struct {
	xParts, wParts        int // parts of queries and weights, and of keys and values
	split, pairs, columns func(a *matmul.PackArgs)
	mul                   func(a *matmul.Args)
	large                 func(p *float32, n int) int

	weigh func(s, o, m, l *float32, rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) (empty int)
}

// promptWays has the kernels of a tier by type of keys and values, and the kernels for queries and weights that may be
// rounded to that type. nil: there are none.
type promptWays struct {
	exact, rounded [attn.DTypes]*promptKernels
}

// promptsOf returns the prompt kernels of a set of matrix kernels. It takes the types whose columns the set packs.
// float32 is not among these: its six products of parts are no faster than AVX-512. weigh is a step of the attention
// kernels.
func promptsOf(t *matmul.Set, weigh func(s, o, m, l *float32, rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) (empty int)) *promptWays {
	of := func(w *matmul.Way) *promptKernels {
		if w == nil || w.Columns == nil {
			return nil
		}
		return &promptKernels{
			xParts: w.XParts, wParts: w.WParts, split: w.Split, pairs: w.Pack, columns: w.Columns, mul: w.Mul[t.Rows], large: w.Large, weigh: weigh,
		}
	}
	var p promptWays
	for d := range p.exact {
		f := weight.Dense(attn.DType(d))
		if !f.Known() {
			continue
		}
		p.exact[d], p.rounded[d] = of(&t.Ways[f]), of(t.Rounded[f])
	}
	return &p
}

// waysFor returns the prompt kernels of a problem, or nil.
func waysFor(g *attn.Problem) *promptKernels {
	ways := promptTiers[cpu.InUse()]
	if ways == nil || !readInPlace[float32](g) || g.QueryType != attn.Float32 || g.Invariant || g.ValueDim%promptTile != 0 || g.Dim < matmul.StepDepth {
		return nil
	}
	if k := ways.rounded[g.Pages.Key().DType]; k != nil && g.Mixed {
		return k
	}
	return ways.exact[g.Pages.Key().DType]
}

// promptScratch is the scratch of a worker for packing.
type promptScratch struct {
	memory                       cpu.Aligned
	queries, keys, values, parts unsafe.Pointer // parts has the weights
	edge                         cpu.Aligned    // rows of keys or values that cross pages

	mul  matmul.Args
	pack matmul.PackArgs
}

// tilesOf returns the number of tiles of n rows or columns.
func tilesOf(n int) int { return (n + promptTile - 1) / promptTile }

// stepsOf returns the number of steps of n elements.
func stepsOf(n int) int { return (n + matmul.StepDepth - 1) / matmul.StepDepth }

// grow allocates scratch for blocks of at most `rows` rows.
func (s *promptScratch) grow(k *promptKernels, rows, dim, valueDim, size int) {
	sizes := [4]int{
		2 * tilesOf(rows) * stepsOf(dim) * k.xParts * matmul.StepBytes,
		2 * tilesOf(promptKeys) * stepsOf(dim) * k.wParts * matmul.StepBytes,
		2 * tilesOf(valueDim) * stepsOf(promptKeys) * k.wParts * matmul.StepBytes,
		2 * tilesOf(promptBlock) * stepsOf(promptKeys) * k.xParts * matmul.StepBytes,
	}
	n := 0
	for _, size := range sizes {
		n += size
	}
	s.memory.Grow(n)
	at := s.memory.At
	for i, p := range []*unsafe.Pointer{&s.queries, &s.keys, &s.values, &s.parts} {
		*p = at
		at = unsafe.Add(at, sizes[i])
	}
	s.edge.Grow(matmul.StepDepth * max(dim, valueDim) * size)
}

// split splits n elements of each of `rows` rows of float32, which are stride elements apart.
func (s *promptScratch) split(k *promptKernels, dst, src unsafe.Pointer, rows, n, stride int) {
	a := &s.pack
	steps := stepsOf(n)
	a.DstStep, a.DstPart, a.SrcRow, a.N = k.xParts*matmul.StepBytes, matmul.StepBytes, 4*stride, n
	for r := 0; r < rows; r += matmul.StepRows {
		a.Dst = unsafe.Add(dst, r/matmul.StepRows*steps*a.DstStep)
		a.Src, a.Rows = unsafe.Add(src, r*a.SrcRow), min(matmul.StepRows, rows-r)
		k.split(a)
	}
}

// multiply multiplies split rows by packed columns, a multiple of promptTile. It writes rows of y up to the end of the
// last tile.
func (s *promptScratch) multiply(k *promptKernels, x, w unsafe.Pointer, steps int, y unsafe.Pointer, rows, columns, yRow, more int) {
	a := &s.mul
	a.N, a.More, a.X, a.W, a.Y = steps, more, x, w, y
	a.XRow, a.YRow = steps*k.xParts*matmul.StepBytes, 4*yRow
	a.Tiles, a.WStep = columns/promptTile, 2*steps*k.wParts*matmul.StepBytes
	a.Tall, a.XStep, a.YStep = tilesOf(rows), 2*a.XRow, promptTile*a.YRow
	k.mul(a)
}

// begin splits the queries of a block. It returns false if some are large or not finite, which kernel must handle.
func (s *promptScratch) begin(k *promptKernels, t *tile) bool {
	if k.large(at32(t.Q, 0), t.Rows*t.Dim) != 0 {
		return false
	}
	s.split(k, s.queries, t.Q, t.Rows, t.Dim, t.Dim)
	return true
}

// inTiles merges n keys from key on into the rows of a block. masked says that some rows do not attend to all of them.
// inTiles returns false, without changes, if keys or values are large or not finite: their parts would not be exact.
func (ws *workspace[F]) inTiles(w *worker[F], rows *addresses, b block, key, n int, masked bool) bool {
	t, k, s := &w.tile, ws.prompt, &w.prompt
	if !ws.packKeys(s, rows, key, n) || !ws.packValues(s, rows, key, n) {
		return false
	}
	width, dim := tilesOf(n)*promptTile, t.Dim
	sinks := int32(max(0, ws.plan.g.SinkTokens-key)) // of these keys; also visible to rows whose window begins later
	for row := 0; row < b.rows; row += promptBlock {
		p := &w.some // some rows of the tile
		*p = *t
		p.Rows, p.Count, p.first, p.order = min(promptBlock, b.rows-row), n, row, order{}
		p.scoreMod = t.scoreMod.rows(row, p.Rows)
		if masked && ws.see(w, b, row, p, key) == 0 && sinks == 0 {
			continue
		}
		strip := row / matmul.StepRows * stepsOf(dim) * k.xParts * matmul.StepBytes
		s.multiply(k, unsafe.Add(s.queries, strip), s.keys, stepsOf(dim), p.Scores, p.Rows, width, width, 0)
		scores := unsafe.Slice((*float32)(p.Scores), p.Rows*width)
		modifyScores(p, scores, width)
		if masked {
			for r := range p.Rows {
				see := scores[r*width : r*width+n]
				hide(see[min(sinks, w.hidden[r]):w.hidden[r]])
				hide(see[w.visible[r]:])
			}
		}
		keepScores(p, scores, width)
		m := unsafe.Slice(at32(t.M, row), p.Rows)
		w.here = Streams{p.Scores, p.Scores, p.Scores, p.Scores}
		empty := k.weigh(&scores[0], at32(t.O, row*t.ValueDim), &m[0], at32(t.L, row), p.Rows, n, width, t.ValueDim, array(&w.here), 0, 0)
		if empty > 0 { // rows without weights so far
			for r := range m {
				if m[r] == float32(math.Inf(-1)) {
					clear(scores[r*width : r*width+n])
				}
			}
		}
		watchWeights(p, scores, unsafe.Pointer(&m[0]), width)
		dropWeights(p, scores, width)
		s.split(k, s.parts, p.Scores, p.Rows, n, width)
		s.multiply(k, s.parts, s.values, stepsOf(n), unsafe.Pointer(at32(t.O, row*t.ValueDim)), p.Rows, t.ValueDim, t.ValueDim, 1)
	}
	return true
}

// see sets the visible keys, among p.Count keys from key on, of the block's rows from row on. It returns the largest
// number of keys that are visible to one row.
func (ws *workspace[F]) see(w *worker[F], b block, row int, p *tile, key int) (most int32) {
	g := &ws.plan.g
	for r := range p.Rows {
		first, end := b.seq.sees(g, b.from+(row+r)/b.group)
		w.visible[r] = int32(min(max(end-key, 0), p.Count))
		w.hidden[r] = min(int32(max(first-key, 0)), w.visible[r])
		most = max(most, w.visible[r]-w.hidden[r])
	}
	p.Visible = unsafe.Pointer(&w.visible[0])
	return most
}

// packKeys packs keys. It returns false if a key is large or not finite.
func (ws *workspace[F]) packKeys(s *promptScratch, rows *addresses, key, n int) bool {
	k, a := ws.prompt, &s.pack
	dim := ws.plan.g.Dim
	steps := stepsOf(dim)
	a.DstStep, a.DstPart, a.N, a.Odd = 2*k.wParts*matmul.StepBytes, 2*matmul.StepBytes, dim, 0
	for c := 0; c < n; c += matmul.StepRows {
		a.Rows = min(matmul.StepRows, n-c)
		a.Dst = unsafe.Add(s.keys, c/promptTile*steps*a.DstStep+c/matmul.StepRows%2*matmul.StepBytes)
		a.Src, a.SrcRow = rows.together(&s.edge, key+c, a.Rows, true)
		k.pairs(a)
	}
	return a.Odd == 0
}

// packValues packs the values of keys. It returns false if a value is large or not finite.
func (ws *workspace[F]) packValues(s *promptScratch, rows *addresses, key, n int) bool {
	k, a := ws.prompt, &s.pack
	size, dim := rows.size, ws.plan.g.ValueDim
	steps := stepsOf(n)
	a.DstStep, a.DstPart, a.Odd = 2*k.wParts*matmul.StepBytes, 2*matmul.StepBytes, 0
	for c := 0; c < n; c += a.N {
		// The keys of one page, or a step of keys that cross pages.
		a.N = min(n-c, rows.inPage(key+c))
		if a.N%2 != 0 && c+a.N < n {
			a.N = min(n-c, matmul.StepDepth-c%matmul.StepDepth)
		}
		src, stride := rows.together(&s.edge, key+c, a.N, false)
		a.SrcRow = stride
		if last := c + a.N; last == n && last%matmul.StepDepth != 0 {
			for o := range dim / promptTile {
				at := unsafe.Add(s.values, (o*steps+steps-1)*a.DstStep)
				s.clearBehind(k, at, last%matmul.StepDepth)
			}
		}
		for o := 0; o < dim; o += matmul.StepRows {
			at := unsafe.Add(s.values, (o/promptTile*steps+c/matmul.StepDepth)*a.DstStep+o/matmul.StepRows%2*matmul.StepBytes)
			a.Src = unsafe.Add(src, o*size)
			all, first := a.N, min(a.N, matmul.StepDepth-c%matmul.StepDepth) // the keys that complete the current step
			a.N = first
			a.Dst = unsafe.Add(at, c%matmul.StepDepth/2*64)
			k.columns(a)
			if a.N = all - first; a.N > 0 {
				a.Dst = unsafe.Add(at, a.DstStep)
				a.Src = unsafe.Add(a.Src, first*stride)
				k.columns(a)
			}
			a.N = all
		}
	}
	return a.Odd == 0
}

// clearBehind clears the elements of a step of values from element from on, in all parts and both halves of a tile.
func (s *promptScratch) clearBehind(k *promptKernels, at unsafe.Pointer, from int) {
	for block := range 2 * k.wParts {
		lines := unsafe.Slice((*[64]byte)(unsafe.Add(at, block*matmul.StepBytes)), matmul.StepRows)
		clear(lines[(from+1)/2:])
	}
}

// hide sets the scores of invisible keys to -Inf.
func hide(scores []float32) {
	for i := range scores {
		scores[i] = float32(math.Inf(-1))
	}
}

// inPage returns the number of keys from key on in its page.
func (a *addresses) inPage(key int) int {
	tokens := a.plan.g.PageTokens
	return tokens - key%tokens
}

// together returns the address and the stride, in bytes, of n rows of keys or, if keys is false, of values. Rows in one
// page stay in place. Others, at most StepDepth, are copied to scratch.
func (a *addresses) together(scratch *cpu.Aligned, key, n int, keys bool) (at unsafe.Pointer, stride int) {
	g := &a.plan.g
	of, dim, step := func(key int) unsafe.Pointer { _, v := a.row(key); return v }, g.ValueDim, g.Pages.ValuePlane().At.Row
	if keys {
		of, dim, step = func(key int) unsafe.Pointer { k, _ := a.row(key); return k }, g.Dim, g.Pages.Key().At.Row
	}
	if n <= a.inPage(key) {
		return of(key), step * a.size
	}
	bytes := dim * a.size
	for i := range n {
		copy(unsafe.Slice((*byte)(unsafe.Add(scratch.At, i*bytes)), bytes), unsafe.Slice((*byte)(of(key+i)), bytes))
	}
	return scratch.At, bytes
}
