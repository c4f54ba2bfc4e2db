package attention

import (
	"math"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/dropout"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
)

// Limits of one kernel call, in scores and keys. Scores stay in the first-level cache. A long call has few ends, at
// which memory waits for arithmetic.
const (
	callScores  = 16384
	callKeys    = 4096
	callKeysMin = 16 // for any number of rows
)

// stateKeys is the number of keys, rounded up to a call, that are summed into one state. Longer contexts are sums of
// such states, since rounding errors grow with the length of a chain of additions.
const stateKeys = 4096

// workspace is the memory of one run besides its operands. Its size depends on the number of workers, the rows of a
// block and the dims. It does not depend on the length of the contexts.
type workspace[F cpu.Real] struct {
	plan   *Plan
	ops    *Operands[F]
	kernel kernel
	prompt *promptKernels // of blocks of many rows; nil: these use kernel, too
	scale  float64        // of queries, including log4(e)
	drop   dropout.Rule

	threads  []worker[F]
	partials []partial[F] // by lean.Plan.Slot
	moments  [][]moments  // as partials, for entropies
	arrived  []counter    // by host worker: number of workers that have stored their partials. 0 between runs.
	values   []F          // memory of partials

	// With batch invariance: the states of LeanTiles that another worker merges; the index of each worker's first
	// state, and the end of the last worker's; the states' memory.
	tiles      []partial[F]
	tilesOf    []int
	tileValues []F
}

// worker is the scratch of a thread, for one logical worker after another.
type worker[F cpu.Real] struct {
	tile    tile
	state   partial[F] // of the current output tile, if the worker has all of it
	q       []F
	visible []int32
	hidden  []int32 // by row: number of leading keys that are not visible to the row, in tiles
	// Score modification of a block's rows.
	slopes, distances []float64
	bias              []unsafe.Pointer
	treeBias          []F // of a tree position, with batch invariance

	runs   runs
	part   partial[F] // of stateKeys keys
	values []F        // memory of the slices of F
	scores []F
	wide   []F

	variant variantRun[F]
	mass    massRun[F]
	entropy entropyRun[F]

	decoded decoder[F] // used if kernels do not read keys and values in place

	prompt promptScratch
	some   tile    // some rows of tile
	here   Streams // prefetch target if there is nothing to prefetch
	_      [cpu.CacheLine]byte
}

// partial is the attention state of the rows of an output tile over a part of its keys.
type partial[F cpu.Real] struct {
	o, m, l []F // rows x ValueDim, rows, rows
}

func (p *partial[F]) row(r, dim int) lean.State[F] {
	return lean.State[F]{O: p.o[r*dim : (r+1)*dim : (r+1)*dim], M: p.m[r], L: p.l[r]}
}

// reset makes p the state of no keys, for `rows` rows.
func (p *partial[F]) reset(rows, dim int) {
	clear(p.o[:rows*dim])
	clear(p.l[:rows])
	for r := range p.m[:rows] {
		p.m[r] = F(math.Inf(-1))
	}
}

// merge merges the states of q into those of p.
func (p *partial[F]) merge(q *partial[F], rows, dim int) {
	for r := range rows {
		s := p.row(r, dim)
		s.Merge(q.row(r, dim))
		p.m[r], p.l[r] = s.M, s.L
	}
}

// receive makes t merge its keys into p's rows from row on.
func (p *partial[F]) receive(t *tile, row int) {
	t.O, t.M, t.L = unsafe.Pointer(&p.o[row*t.ValueDim]), unsafe.Pointer(&p.m[row]), unsafe.Pointer(&p.l[row])
}

// counter is an atomic integer on its own cache line.
type counter struct {
	atomic.Int32
	_ [cpu.CacheLine - 4]byte
}

// keysOfCall returns the largest number of keys of a kernel call with `rows` rows, a multiple of 16.
func keysOfCall(rows int) int { return min(max(callScores/rows/16*16, callKeysMin), callKeys) }

// widenedKeys is the number of keys or values that are decoded to float32 for many rows.
const widenedKeys = 64

// narrowWide returns the length of a tile's scratch before decoded keys or values.
func narrowWide(dim, valueDim int) int { return max(32*((dim+15)/16*16)+1024, 16*valueDim+3584) }

// wideOf returns the length of a tile's scratch Wide: with decoded keys or values, and Streams of these.
func wideOf(dim, valueDim int) int {
	return narrowWide(dim, valueDim) + widenedKeys*max(dim, valueDim) + 8
}

// prepare prepares ws for a run of p on o, and grows it as needed.
func (ws *workspace[F]) prepare(p *Plan, o *Operands[F]) {
	g := &p.g
	ws.plan, ws.ops = p, o
	ws.kernel, ws.prompt = kernelFor[F](storedType[F](g)), nil
	if p.packed >= promptRows && unsafe.Sizeof(F(0)) == 4 {
		ws.prompt = waysFor(&p.g)
	}
	ws.scale = g.Scale * lean.Log4E
	if storedType[F](g) == attn.Int8 {
		ws.scale *= int8Queries
	}
	if g.Pages.Key().Mixed {
		ws.scale /= half.Q4Columns // queries are mixed, too
	}
	ws.drop = dropout.Of(g.Dropout, o.Seed)

	n, rows := p.sched.Workers(), p.packed
	q, out, stats := cpu.Padded(rows*g.Dim), cpu.Padded(rows*g.ValueDim), cpu.Padded(rows)
	// An upper bound of r*keysOfCall(r) for all r <= rows:
	scores := cpu.Padded(max(callScores, rows*callKeysMin))
	wide := cpu.Padded(wideOf(g.Dim, g.ValueDim))
	runs := max(callKeys/4/g.PageTokens, 1)
	if g.Invariant {
		scores = max(scores, cpu.Padded(rows*invariantKeys))
		runs = invariantKeys / 4
	}
	if ws.prompt != nil { // rows up to the end of the last tile
		tall := tilesOf(rows) * promptTile
		out, scores = cpu.Padded(tall*g.ValueDim), max(scores, cpu.Padded(promptBlock*promptKeys))
	}

	for len(ws.arrived) < n {
		ws.arrived = append(ws.arrived, counter{})
	}
	threads := max(min(n, p.threads), 1)
	for len(ws.threads) < threads {
		ws.threads = append(ws.threads, worker[F]{})
	}
	for i := range ws.threads[:threads] {
		w := &ws.threads[i]
		if need := q + 2*(out+2*stats) + scores + wide + cpu.CacheLine; len(w.values) < need {
			w.values = dense.Make[F](need)
		}
		if len(w.visible) < rows {
			w.visible, w.hidden = make([]int32, rows), make([]int32, rows)
		}
		if g.Slopes != "" && len(w.slopes) < rows {
			w.slopes, w.distances = make([]float64, rows), make([]float64, rows)
		}
		if g.Bias != (attn.Bias{}) && len(w.bias) < rows {
			w.bias = make([]unsafe.Pointer, rows)
		}
		if need := g.Group() * invariantKeys; g.Invariant && g.Tree && g.Bias != (attn.Bias{}) && len(w.treeBias) < need {
			w.treeBias = dense.Make[F](need)
		}
		if g.Variant != nil {
			w.variant.Prepare(g.Variant)
		}
		if o.Mass != nil {
			w.mass.grow(rows)
		}
		if o.Entropy != nil {
			w.entropy.grow(rows)
		}
		if len(w.runs.k) < runs {
			w.runs.k, w.runs.v = make([]Streams, runs), make([]Streams, runs)
		}
		v := w.values
		w.q = cpu.Cut(&v, q)
		w.state = partial[F]{cpu.Cut(&v, out), cpu.Cut(&v, stats), cpu.Cut(&v, stats)}
		w.part = partial[F]{cpu.Cut(&v, out), cpu.Cut(&v, stats), cpu.Cut(&v, stats)}
		w.scores = cpu.Cut(&v, scores)
		w.wide = cpu.Cut(&v, wide)
		if !readInPlace[F](g) {
			w.decoded.grow(g)
		}
		if ws.prompt != nil {
			w.prompt.grow(ws.prompt, rows, g.Dim, g.ValueDim, g.Pages.Key().DType.Size())
		}
	}

	ws.prepareTiles(p)
	if need := 2*n*(out+2*stats) + cpu.CacheLine; len(ws.values) < need {
		ws.values = dense.Make[F](need)
	}
	if o.Entropy != nil {
		ws.growMoments(2*n, rows)
	}
	v := ws.values
	ws.partials = ws.partials[:0]
	for range 2 * n {
		ws.partials = append(ws.partials, partial[F]{cpu.Cut(&v, out), cpu.Cut(&v, stats), cpu.Cut(&v, stats)})
	}
}

// Work runs logical worker i of the plan: it attends to the LeanTiles of its range, one output tile at a time.
func (ws *workspace[F]) Work(i, thread int) {
	p, w := ws.plan, &ws.threads[thread]
	for it := p.sched.Work(i); ; {
		k, ok := it.Next()
		if !ok {
			w.tile, w.some = tile{}, tile{} // they point into the operands
			w.decoded.plan, w.decoded.pages = nil, nil
			w.variant.forget()
			w.runs.forget()
			clear(w.bias)
			return
		}
		b := p.block(k)
		ws.pack(w, b)
		state := &w.state
		if !k.Whole() {
			state = &ws.partials[p.sched.Slot(i, k)]
		}
		if p.g.Invariant {
			ws.attendAlone(i, w, b, k, state)
		} else {
			state.reset(b.rows, p.g.ValueDim)
			w.entropy.reset()
			ws.attend(w, b, k, state)
		}
		if k.Whole() {
			ws.finish(b, state, w.entropy.rows)
			continue
		}
		if ws.ops.Entropy != nil {
			copy(ws.moments[p.sched.Slot(i, k)], w.entropy.rows[:b.rows])
		}
		// The last worker to arrive merges: all partials are stored then, and no worker waits.
		first, last, count := p.sched.Sharers(k)
		if ws.arrived[first].Add(1) == int32(count) {
			ws.arrived[first].Store(0)
			if p.g.Invariant {
				state = ws.mergeTiles(b, k, first, last)
			} else {
				state = ws.merge(b, k, first, last)
			}
			ws.finish(b, state, ws.mergeMoments(b, k, first, last))
		}
	}
}

// block is an output tile: the packed rows of a block of query positions in one KV head. Packed row r
// is query position from+r/group of head head0+r%group.
type block struct {
	seq      *span
	index    int // of the sequence
	from, to int // query positions
	head     int // KV head
	head0    int // first query head
	group    int // query heads of the KV head
	rows     int
	seen     []int32 // LeanTiles, as a variant says; nil: all
}

func (p *Plan) block(k lean.Work) block {
	s := &p.seqs[k.Seq]
	from, to := s.block(k.Block)
	group := p.g.Group()
	b := block{
		seq: s, index: int(k.Seq), from: from, to: to,
		head: k.Head, head0: k.Head * group, group: group, rows: (to - from) * group,
	}
	if len(p.lists) > 0 {
		l := p.lists[s.lists+int(k.Block)]
		b.seen = p.seen[l.at : l.at+l.n]
	}
	return b
}

// pack gathers the block's query rows into w.q, rotated if the plan rotates and mixed if keys are, with the scale folded in.
func (ws *workspace[F]) pack(w *worker[F], b block) {
	g := &ws.plan.g
	dst := w.q
	for i := b.from; i < b.to; i++ {
		for h := b.head0; h < b.head0+b.group; h++ {
			at := (b.seq.row+i)*g.Query.Row + h*g.Query.Head
			q, to := ws.ops.Q[at:at+g.Dim], dst[:g.Dim]
			if r := &ws.plan.rotation; r.turns() {
				turnRow(r, b.seq.row+i, to, q)
				q = to
			}
			vector.Scale(to, q, ws.scale)
			if g.Pages.Key().Mixed {
				half.MixQ4(to)
			}
			dst = dst[g.Dim:]
		}
	}
}

// attend merges the keys of LeanTiles [k.Begin, k.End) into state.
func (ws *workspace[F]) attend(w *worker[F], b block, k lean.Work, state *partial[F]) {
	p := ws.plan
	g := &p.g
	t := &w.tile
	*t = tile{
		Rows: b.rows, Dim: g.Dim, ValueDim: g.ValueDim, Q: unsafe.Pointer(&w.q[0]),
		Scores: unsafe.Pointer(&w.scores[0]), Wide: unsafe.Pointer(&w.wide[0]),
	}
	if readInPlace[F](g) {
		t.scaled = ws.scaledRows()
	}
	mod := ws.scoreMod(w, b)
	t.scoreMod = mod
	t.drop = drop{rule: ws.drop, sequence: b.index, head: b.head0, group: b.group}
	byKey := t.byKey() || t.drops()
	state.receive(t, 0)
	sum, keys := state, 0 // the destination of t's sums, and the number of keys in it
	row := 0              // first row of the tile, in the block
	byTile := ws.ops.Mass != nil
	turn := func() {
		if keys >= stateKeys && t.Rows == b.rows {
			if sum != state {
				state.merge(sum, b.rows, g.ValueDim)
			}
			sum, keys = &w.part, 0
			sum.reset(b.rows, g.ValueDim)
			sum.receive(t, 0)
		}
	}
	ready := func(key int) {
		if !byTile {
			turn()
		}
		if byKey {
			ws.modAt(t, b, row, key)
		}
	}
	call := func(key int) {
		ready(key)
		ws.kernel(t)
		keys += t.Count
	}
	rows := ws.addresses(w, b)
	limit := keysOfCall(b.rows)
	seen := func(key, stop int) { // all keys [key, stop) are visible to all rows of the tile
		for key < stop {
			if t.drops() { // consecutive keys: the position of each weight follows from the first
				n := rows.neighbours(t, key, min(key+limit, stop))
				call(key)
				key += n
				continue
			}
			n := rows.streams(t, key, stop, limit)
			for from := 0; from < n; from += limit {
				rows.walk(t, from, n, limit)
				if next := key + n; byTile && t.Next == nil && next == stop && rows.decoder == nil && next+n <= b.seq.keys {
					for i := range w.runs.next { // of the next LeanTile
						w.runs.next[i], _ = rows.row(next + i*(n/4))
					}
					t.Next = &w.runs.next
				}
				call(key + from/4)
			}
			key += n
		}
		t.Next = nil
	}
	each := func(see func(i int)) { // the tile has each position's rows in turn, and all rows afterwards
		t.Rows = b.group
		for i := b.from; i < b.to; i++ {
			row = (i - b.from) * b.group
			t.Q = unsafe.Pointer(&w.q[row*g.Dim])
			sum.receive(t, row)
			t.scoreMod = mod.rows(row, b.group)
			see(i)
		}
		row, t.Rows, t.Q = 0, b.rows, unsafe.Pointer(&w.q[0])
		sum.receive(t, 0)
		t.scoreMod = mod
	}
	low, all := b.seq.common(g, b.from, b.to)
	some := func(key, end int) { // keys [key, end), each for the rows that attend to it
		if stop := min(end, low); key < stop {
			// Kernels have no first visible key of a row: each position gets a call with its visible keys.
			was := keys
			each(func(i int) {
				first, most := b.seq.sees(g, i)
				seen(key, min(stop, g.SinkKeys(first))) // sink tokens before the position's window
				seen(max(key, first), min(stop, most))
			})
			keys = was + stop - key
			key = stop
		}
		if stop := min(end, all); key < stop {
			seen(key, stop)
			key = stop
		}
		if fresh := b.seq.fresh(); b.seq.tree != nil && key < end {
			// Kernels have no gaps between visible keys. There are at most attn.MaxTree such keys.
			each(func(i int) {
				for from, to := range b.seq.tree.Runs(i, key-fresh, end-fresh) {
					seen(fresh+from, fresh+to)
				}
			})
			key = end
		}
		for key < end { // keys that are not visible to every row
			begin := key
			key += rows.neighbours(t, key, min(key+limit, end))
			for r := range b.rows {
				_, end := b.seq.sees(g, b.from+r/b.group)
				w.visible[r] = int32(min(max(end-begin, 0), t.Count))
			}
			t.Visible = unsafe.Pointer(&w.visible[0])
			call(begin)
		}
		t.Visible = nil
	}
	context, front := b.seq.context(g, b.from, b.to)
	many := ws.prompt != nil && b.rows >= promptRows && b.seq.tree == nil && w.prompt.begin(ws.prompt, t)
	keysOf := func(key, end int) {
		if stop := min(end, context.First+front); key < stop { // sink tokens are visible to all rows
			seen(key-context.First, stop-context.First)
			key = stop
		}
		for many && key < end {
			n := min(promptKeys, end-key)
			if ready(key); ws.inTiles(w, &rows, b, key, n, key < low || key+n > all) {
				keys += n
			} else {
				some(key, key+n)
			}
			key += n
		}
		some(key, end)
	}
	if byTile {
		all := keysOf
		keysOf = func(key, end int) {
			for key < end {
				number := key / g.TileTokens
				stop := min(end, (number+1)*g.TileTokens)
				turn()
				w.mass.begin(sum, b.rows)
				all(key, stop)
				w.mass.end(ws, b, sum, number)
				key = stop
			}
		}
	}
	ws.ranges(w, b, k.Begin, k.End, keysOf)
	if sum != state {
		state.merge(sum, b.rows, g.ValueDim)
	}
}

// merge merges the partials of k's output tile in worker order and returns the sum.
func (ws *workspace[F]) merge(b block, k lean.Work, first, last int) *partial[F] {
	sched := &ws.plan.sched
	dim := ws.plan.g.ValueDim
	k.Begin = 0 // the host block's part
	sum := &ws.partials[sched.Slot(first, k)]
	k.Begin = 1 // the part of any other worker
	for i := first + 1; i <= last; i++ {
		if begin, end := sched.Range(i); begin == end {
			continue
		}
		sum.merge(&ws.partials[sched.Slot(i, k)], b.rows, dim)
	}
	return sum
}

// finish writes the block's outputs from its state over all its keys. It adds the sinks, once for each row; kernels
// have no sinks.
func (ws *workspace[F]) finish(b block, state *partial[F], of []moments) {
	g, o, keep := &ws.plan.g, ws.ops, ws.drop.Keep()
	for r := range b.rows {
		row, head := b.seq.row+b.from+r/b.group, b.head0+r%b.group
		at := row*g.Out.Row + head*g.Out.Head
		s, out := state.row(r, g.ValueDim), o.Out[at:at+g.ValueDim]
		lse, empty := o.Sink(head), s.Empty()
		if empty {
			clear(out)
		} else {
			s.Sink(F(float64(lse) * lean.Log4E))
			if g.Variant != nil && g.Variant.Unnormalised {
				vector.Scale(out, s.O, math.Exp(lean.Ln4*float64(s.M))/keep)
			} else {
				vector.Divide(out, s.O, F(float64(s.L)*keep))
			}
		}
		if o.Mass != nil {
			finishMass(o.massOf(g, row, head), &s)
		}
		if o.Entropy != nil {
			o.Entropy[row*g.LSE.Row+head*g.LSE.Head] = F(of[r].entropy(float64(s.LSE()), o.Sinks != nil))
		}
		if o.LSE != nil {
			if !empty {
				lse = s.LSE()
			}
			o.LSE[row*g.LSE.Row+head*g.LSE.Head] = lse
		}
	}
}
