package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"
)

// Batch invariance: the bits of a row depend only on its query and on the keys and values that are visible to the row.
// So the positions of keys in their sequence fix the order of all sums:
//
//   - LeanTiles begin at multiples of their size, for all rows of an output tile. Each LeanTile of a row has a state of
//     its own. One worker merges all states of a row in order.
//   - Kernel calls begin at multiples of invariantKeys within a LeanTile. If all keys of a call are visible to a row, the
//     row sums them in quarters; if only some are, it sums them in order. Rows of both kinds are never in one call.
//   - Kernels compute each row as if it were alone (tile.Alone).

const (
	// invariantKeys is the largest number of keys of a kernel call, a multiple of 16.
	invariantKeys = 1024

	// invariantTileTokens is the default number of tokens of a LeanTile.
	invariantTileTokens = 1024
)

// leanTiles has the LeanTiles of an output tile, by their numbers in the sequence: [0, front) with the sink tokens, and
// [first, end).
type leanTiles struct{ front, first, end int64 }

func (l leanTiles) len() int64 { return l.front + l.end - l.first }

// at returns the number, in the sequence, of LeanTile i of the output tile.
func (l leanTiles) at(i int64) int64 {
	if i < l.front {
		return i
	}
	return l.first + i - l.front
}

// leanTiles returns the LeanTiles visible to query positions [from, to), for batch invariance.
func (s *span) leanTiles(g *attn.Problem, from, to int) (l leanTiles) {
	first, end := g.Mask.Range(s.queries, s.keys, from, to)
	if first >= end {
		return l
	}
	size := g.TileTokens
	l.first, l.end = int64(first/size), int64(attn.Ceil(end, size))
	l.front = min(int64(attn.Ceil(g.SinkKeys(first), size)), l.first)
	return l
}

// part is a range of keys [first, end) of a sequence, in the order of a row's visible keys.
type part struct{ first, end int }

// view has the visible keys of a row in a call.
type view struct {
	sinks, rest part // both may be empty
}

// view returns the keys of [first, end) that are visible to query position i. With a tree, new keys count in the order
// in which the position attends to them: the last one is its own.
func (s *span) view(g *attn.Problem, i, first, end int) (v view) {
	from, to := s.sees(g, i)
	if s.tree != nil {
		to = s.fresh() + s.tree.Depth(i) + 1
	}
	v.sinks = part{first, min(g.SinkKeys(from), end)}
	v.rest = part{max(from, first), min(to, end)}
	return v
}

func (p part) empty() bool { return p.first >= p.end }

// whole reports whether v is all of the keys [first, end). begins reports whether v begins with key first.
func (v view) whole(first, end int) bool {
	return v.sinks.empty() && v.rest == part{first, end} || v.rest.empty() && v.sinks == part{first, end}
}
func (v view) begins(first int) bool {
	return v.sinks.empty() && !v.rest.empty() && v.rest.first == first
}

// attendAlone is attend with batch invariance, for worker i with the scratch of a thread. Parts of an output tile that
// another worker hosts stay in states of LeanTiles. mergeTiles merges them.
func (ws *workspace[F]) attendAlone(i int, w *worker[F], b block, k lean.Work, state *partial[F]) {
	a := ws.alone(w, b)
	for n := k.Begin; n < k.End; n++ {
		switch {
		case !k.Host():
			a.leanTile(n, &ws.tiles[ws.tilesOf[i]+int(n-k.Begin)])
		case n == 0:
			a.leanTile(n, state)
		default:
			a.leanTile(n, &w.part)
			state.merge(&w.part, b.rows, ws.plan.g.ValueDim)
		}
	}
}

// mergeTiles merges the states of k's output tile in the order of its LeanTiles: the host's part, then each other
// LeanTile.
func (ws *workspace[F]) mergeTiles(b block, k lean.Work, first, last int) *partial[F] {
	sched := &ws.plan.sched
	k.Begin = 0 // the host block's part
	sum := &ws.partials[sched.Slot(first, k)]
	for i := first + 1; i <= last; i++ {
		for n := ws.tilesOf[i]; n < ws.tilesOf[i+1]; n++ {
			sum.merge(&ws.tiles[n], b.rows, ws.plan.g.ValueDim)
		}
	}
	return sum
}

// prepareTiles allocates the states of LeanTiles that another worker merges: those of each worker's first output tile,
// if another worker hosts it.
func (ws *workspace[F]) prepareTiles(p *Plan) {
	ws.tiles, ws.tilesOf = ws.tiles[:0], ws.tilesOf[:0]
	if !p.g.Invariant {
		return
	}
	dim, workers, need := p.g.ValueDim, p.sched.Workers(), 0
	if workers == 0 {
		return
	}
	foreign := func(it *lean.Iterator, i int) (tiles, rows int) {
		it.GoTo(i)
		if k, ok := it.Next(); ok && !k.Host() {
			return int(k.End - k.Begin), p.block(k).rows
		}
		return 0, 0
	}
	it := p.sched.Work(0)
	for i := range workers {
		tiles, rows := foreign(&it, i)
		need += tiles * (cpu.Padded(rows*dim) + 2*cpu.Padded(rows))
	}
	if len(ws.tileValues) < need {
		ws.tileValues = dense.Make[F](need)
	}
	v := ws.tileValues
	it = p.sched.Work(0)
	for i := range workers {
		ws.tilesOf = append(ws.tilesOf, len(ws.tiles))
		tiles, rows := foreign(&it, i)
		for range tiles {
			ws.tiles = append(ws.tiles, partial[F]{cpu.Cut(&v, cpu.Padded(rows*dim)), cpu.Cut(&v, cpu.Padded(rows)), cpu.Cut(&v, cpu.Padded(rows))})
		}
	}
	ws.tilesOf = append(ws.tilesOf, len(ws.tiles))
}

// alone attends with the rows of a block, each as if it were alone.
type alone[F cpu.Real] struct {
	ws   *workspace[F]
	w    *worker[F]
	b    block
	mod  scoreMod
	rows addresses
	l    leanTiles

	state *partial[F] // the state that keys are merged into
	seer  int         // the query position whose tree selects the keys; -1: none
}

// alone prepares w for a block.
func (ws *workspace[F]) alone(w *worker[F], b block) alone[F] {
	p := ws.plan
	g := &p.g
	a := alone[F]{
		ws: ws, w: w, b: b, mod: ws.scoreMod(w, b), l: b.seq.leanTiles(g, b.from, b.to),
		rows: ws.addresses(w, b),
	}
	w.tile = tile{
		Alone: true, Dim: g.Dim, ValueDim: g.ValueDim,
		Scores: unsafe.Pointer(&w.scores[0]), Wide: unsafe.Pointer(&w.wide[0]),
	}
	if readInPlace[F](g) {
		w.tile.scaled = ws.scaledRows()
	}
	return a
}

// leanTile computes the state of LeanTile n of the output tile.
func (a *alone[F]) leanTile(n int64, state *partial[F]) {
	g := &a.ws.plan.g
	state.reset(a.b.rows, g.ValueDim)
	a.state = state
	first := int(a.l.at(a.b.number(n))) * g.TileTokens
	end := min(first+g.TileTokens, a.b.seq.keys)
	if v := &a.w.variant; g.Variant != nil {
		sight := v.sight(&a.b, first, end)
		if sight == variant.Never {
			return
		}
		v.hides = sight == variant.Sometimes
	}
	for key := first; key < end; key += invariantKeys {
		a.keys(key, min(key+invariantKeys, first+g.TileTokens))
	}
}

// keys merges the existing keys of [first, end) into the state. Consecutive query positions share a call if all of the
// keys are visible to each, or if the visible keys of each begin with the first.
func (a *alone[F]) keys(first, end int) {
	g, s := &a.ws.plan.g, a.b.seq
	trees := s.tree != nil && end > s.fresh() // the keys depend on the row
	for i := a.b.from; i < a.b.to; {
		v, to := s.view(g, i, first, end), i+1
		whole := v.whole(first, end)
		begins := !whole && v.begins(first)
		for !trees && (whole || begins) && to < a.b.to {
			next := s.view(g, to, first, end)
			if whole != next.whole(first, end) || !whole && !next.begins(first) {
				break
			}
			v.rest.end = max(v.rest.end, next.rest.end)
			to++
		}
		switch {
		case whole:
			a.call(i, to, part{first, end}, true)
		case begins:
			a.call(i, to, v.rest, false)
		default:
			a.call(i, to, v.sinks, false)
			a.call(i, to, v.rest, false)
		}
		i = to
	}
}

// call merges keys into the states of query positions [from, to): all of the keys, or, if whole is false, each
// position's visible keys from the first on.
func (a *alone[F]) call(from, to int, keys part, whole bool) {
	if keys.empty() {
		return
	}
	ws, w, b, t := a.ws, a.w, &a.b, &a.w.tile
	g := &ws.plan.g
	row := (from - b.from) * b.group
	t.Rows, t.Q, t.Visible, t.Next = (to-from)*b.group, unsafe.Pointer(&w.q[row*g.Dim]), nil, nil
	t.scoreMod = a.mod.rows(row, t.Rows)
	a.state.receive(t, row)
	if a.seer = -1; b.seq.tree != nil && keys.end > b.seq.fresh() {
		a.seer = from
	}
	if t.byKey() {
		ws.modAt(t, *b, row, keys.first)
		if a.seer >= 0 {
			a.biasOfTree(from, keys)
		}
	}
	switch n := keys.end - keys.first; {
	case whole && n%4 == 0:
		a.inQuarters(keys.first, n)
		if next := keys.end; a.seer < 0 && a.rows.decoder == nil && next+n <= b.seq.keys { // the expected keys of the next call
			for i := range w.runs.next {
				w.runs.next[i], _ = a.rows.row(next + i*(n/4))
			}
			t.Next = &w.runs.next
		}
	default:
		a.inOrder(keys.first, n)
	}
	if !whole && to-from > 1 {
		for r := range t.Rows {
			v := b.seq.view(g, from+r/b.group, keys.first, keys.end)
			w.visible[r] = int32(v.rest.end - keys.first)
		}
		t.Visible = unsafe.Pointer(&w.visible[0])
	}
	ws.kernel(t)
}

// biasOfTree gathers the bias of keys in the order of a tree position. Slopes are not supported with trees.
func (a *alone[F]) biasOfTree(position int, keys part) {
	t, s, n := &a.w.tile, a.b.seq, keys.end-keys.first
	for r := range t.Bias {
		at := a.ws.plan.g.Bias.Row(a.b.index, a.b.head0+r, position)
		bias := a.w.treeBias[r*invariantKeys:][:n]
		for i := range bias {
			bias[i] = a.ws.ops.Bias[at+s.place(position, keys.first+i)]
		}
		t.Bias[r] = unsafe.Pointer(&bias[0])
	}
}

// inOrder sets the tile to n keys from key on, in order.
func (a *alone[F]) inOrder(key, n int) {
	page, run := a.ws.plan.g.PageTokens, 4
	switch {
	case a.seer >= 0:
	case key%page+n <= page:
		run = (n + 3) / 4 * 4
	case page%4 == 0 && key%page == 0:
		run = page
	}
	a.lay(key, n, run, 1, 4)
}

// inQuarters sets the tile to n keys from key on, a multiple of 4: each four are one key of each quarter.
func (a *alone[F]) inQuarters(key, n int) {
	page, quarter, run := a.ws.plan.g.PageTokens, n/4, 4
	inPage := true
	for i := range 4 {
		inPage = inPage && (key+i*quarter)%page+quarter <= page
	}
	switch {
	case a.seer >= 0:
	case inPage:
		run = n
	case quarter%page == 0 && key%page == 0:
		run = 4 * page
	}
	a.lay(key, n, run, quarter, 1)
}

// lay sets the tile to n keys from key on, in runs of `run` keys. The four streams of a run begin `apart` keys from each
// other. The next key of a stream is step keys further. The order of keys depends neither on runs nor on pages.
func (a *alone[F]) lay(key, n, run, apart, step int) {
	t := &a.w.tile
	t.order = order{streams: step == 1}
	for i := range t.order.first {
		t.order.first[i] = i * apart
	}
	if d := a.rows.decoder; d != nil {
		for c := range n {
			page, slot := a.rows.slot(a.key(key + c%4*apart + c/4*step))
			d.decode(c, 1, page, slot)
		}
		a.rows.openDecoded(t, n)
		return
	}
	t.Count, t.KStep, t.VStep = n, step*a.rows.keyAt.Row, step*a.rows.valAt.Row
	runs := (n-1)/run + 1
	a.rows.open(t, runs, run)
	for r := range runs {
		for i := range t.K[r] {
			at := r * run
			if at+i < n {
				t.K[r][i], t.V[r][i] = a.row(key + at*step/4 + i*apart)
			} else { // unused, but the pointer must be valid
				t.K[r][i], t.V[r][i] = t.K[r][0], t.V[r][0]
			}
		}
	}
}

// row returns the addresses of a key and its value.
func (a *alone[F]) row(key int) (k, v unsafe.Pointer) {
	return a.rows.row(a.key(key))
}

// key returns the index in the sequence of a key of the call.
func (a *alone[F]) key(key int) int {
	if a.seer >= 0 {
		key = a.b.seq.place(a.seer, key)
	}
	return key
}

// place returns the index in the sequence of the key that query position i of a tree attends to as number key.
func (s *span) place(i, key int) int {
	if n := key - s.fresh(); n >= 0 {
		return s.fresh() + s.tree.Seen(i, n)
	}
	return key
}
