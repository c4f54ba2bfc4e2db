package attention

import (
	"math"
	"sort"

	"gorgonia.org/leanattention/internal/attn"
)

// This file decides whether sequences share prefixes, and which thread block attends to which piece of a prefix.

const (
	// Without sharing, most sequences read their prefix from the L2 cache, which takes 1/2.5 of the time from memory.
	// The launches around attention and their states cost as much as reading prefixBytes (BenchmarkGPUPrefixes).
	// Sharing a single prefix must save at least leastPrefix bytes.
	cachedMore, cachedOf = 5, 2
	prefixBytes          = 100 << 20
	leastPrefix          = 4 << 20

	// Prefill kernels that run alone read at two thirds of the memory's speed.
	aloneMore, aloneOf = 3, 2

	mostPrefixesOfRow = 3 // on average
	mostPieces        = 3 // of a thread block
	prefixSteps       = 3 // cost of the launch for prefixes and of the launch that merges, in steps
)

// sharingPays reports whether sharing pays, if it saves reading `saved` keys of `key` bytes with their values.
func sharingPays(g *attn.Problem, seqs []attn.Sequence, saved, key int) bool {
	all := 0
	for i := range seqs {
		if q := &seqs[i]; q.Queries > 0 {
			first, _ := g.Mask.Keys(q.Queries, q.Keys, 0)
			all += q.Keys - first + g.SinkKeys(first)
		}
	}
	return all*cachedOf-(all-saved)*cachedMore >= cachedOf*attn.Ceil(prefixBytes, key)
}

// besidePrefixes assigns prefixes to k, a prefill kernel, and cuts them into pieces. A thread block attends to whole
// pieces. The launch that merges prefixes also merges the states of pieces. The members of all pieces have at most
// `gathered` rows.
//
// If the decode kernel attends to the own keys, some thread blocks may attend to prefixes beside it: decode blocks keep
// the memory busy, the others the tensor cores. besidePrefixes returns the number of these blocks; 0: one launch
// follows the other.
func (p *Plan) besidePrefixes(g *attn.Problem, few, k *kernel, who division, need *stepSize, gathered int) (blocks int) {
	const step = 8 // step of the numbers of blocks that are tried
	e := p.engine
	n := int64(e.blocks)
	own, shared := p.reading(g, need)
	p.alikePrefixes(g, k)
	best := p.piecesOf(g, k, e.prefillBlocks(k), gathered)
	least := max(best.time, shared/n*aloneMore/aloneOf) + own/n
	can := k.runsBeside() && who.first() == nil && few.family == &decodeFamily && !few.row
	if p.recorded {
		can = p.prefixes.plan.form.beside
	}
	// If one launch ends long before the other, its blocks are idle.
	until := func(reads, multiplies int64) int64 {
		return max(reads, multiplies, (own+shared)/n) + (reads+multiplies)/16
	}
	for m := step; can && m < e.blocks; m += step {
		reads, always := fewTime(own, e.blocks-m, e.blocks), blocks == 0 && (p.recorded || e.Eager)
		if until(reads, 0) >= least && !always {
			break // fewer blocks for own keys take even longer
		}
		c := p.piecesOf(g, k, m, gathered)
		if t := until(reads, c.time*besideMore/besideOf); t < least || always {
			best, least, blocks = c, t, m
		}
	}
	p.cutPrefixes(g, best.size)
	return blocks
}

// reading returns the costs of reading own keys, of the size in need, and prefixes, in the unit of the decode kernels.
func (p *Plan) reading(g *attn.Problem, need *stepSize) (own, shared int64) {
	x, group, tile := &p.prefixes, g.Group(), tileTokens(g)
	if own = need.tiles; need.Queries > 1 || g.Window != 0 { // rows attend to different numbers of keys
		own = 0
		for i := range x.own {
			if q := &x.own[i]; q.Queries > 0 {
				own += fewTiles(g, x.cuts, &sequence{row: int32(q.Row), queries: int32(q.Queries), keys: int32(q.Keys)}, group, tile)
			}
		}
		own *= int64(g.KVHeads)
	}
	own *= int64(tile) * BlockRows
	for i := range x.seqs {
		shared += int64(x.seqs[i].Keys) * BlockRows * int64(g.KVHeads)
	}
	return own, shared
}

// pieces is a size of pieces, in units, and the time of the thread blocks.
type pieces struct {
	size int
	time int64
}

// pieceUnit returns the number of keys of a unit: whole pages, and whole steps of a prefill kernel.
func pieceUnit(g *attn.Problem) int { return g.PageTokens * attn.Ceil(cutKeys, g.PageTokens) }

// alike describes `count` prefixes with the same units and rows: the output tiles of each in all heads, and its
// queries.
type alike struct{ count, units, tiles, queries int }

// alikePrefixes lists the prefixes for piecesOf.
func (p *Plan) alikePrefixes(g *attn.Problem, k *kernel) {
	x, unit := &p.prefixes, pieceUnit(g)
	x.alike, x.work, x.longest, x.all = x.alike[:0], 0, 0, 0
	for i := range x.seqs {
		q := &x.seqs[i]
		a := alike{units: attn.Ceil(q.Keys, unit), tiles: attn.Ceil(q.Queries*g.Group(), k.tile.rows) * g.KVHeads, queries: q.Queries}
		if n := len(x.alike); n > 0 && x.alike[n-1].units == a.units && x.alike[n-1].queries == a.queries {
			x.alike[n-1].count++
			continue
		}
		a.count = 1
		x.alike = append(x.alike, a)
	}
	step, steps := k.stepCost(), int64(unit/cutKeys)
	for _, a := range x.alike {
		x.all, x.longest = x.all+a.count*a.tiles*a.units, max(x.longest, a.units)
		// Consumers without rows are idle. An eighth of a step is the work of all consumers.
		rows := int64(attn.Ceil(a.queries*g.Group(), 64)*64*g.KVHeads) * 7 / 8
		x.work += int64(a.count) * ((rows + int64(a.tiles*k.tile.rows)/8) * int64(a.units) * steps * step / int64(k.tile.rows))
	}
}

// piecesOf returns the fastest size of pieces for the prefixes of alikePrefixes on `blocks` thread blocks.
func (p *Plan) piecesOf(g *attn.Problem, k *kernel, blocks, gathered int) pieces {
	smallest, longest, step := 1, p.prefixes.longest, k.stepCost()
	if !p.engine.Eager {
		smallest = attn.Ceil(leastCut*cutKeys, pieceUnit(g))
	}
	// cut returns the numbers of output tiles and rows of pieces of `size` units.
	cut := func(size int) (count, rows int) {
		for _, a := range p.prefixes.alike {
			of := a.count * attn.Ceil(a.units, size)
			count, rows = count+a.tiles*of, rows+a.queries*of
		}
		return count, rows
	}
	best := pieces{size: longest, time: math.MaxInt64}
	for n := 1; n <= mostPieces; n++ { // n is the number of output tiles of a block
		size := max(attn.Ceil(p.prefixes.all, n*blocks), smallest)
		size += sort.Search(max(longest-size, 0), func(more int) bool {
			count, rows := cut(size + more)
			return count <= n*blocks && rows <= gathered
		})
		count, _ := cut(size)
		most := int64(attn.Ceil(count, blocks)) // output tiles of a block
		if t := p.prefixes.work*most/int64(count) + (most*tileSteps+prefixSteps)*step; t < best.time {
			best = pieces{size, t}
		}
	}
	return best
}

// cutPrefixes cuts the prefixes into pieces of at most `size` units.
func (p *Plan) cutPrefixes(g *attn.Problem, size int) {
	x, unit := &p.prefixes, pieceUnit(g)
	whole := len(x.seqs)
	for i := range whole {
		q, of := x.seqs[i], x.of[i]
		all := attn.Ceil(q.Keys, unit)
		n := attn.Ceil(all, size)
		for j := range n {
			first, end := all*j/n*unit, min(all*(j+1)/n*unit, q.Keys)
			x.seqs = append(x.seqs, attn.Sequence{Queries: q.Queries, Keys: end - first, Pages: q.Pages[first/g.PageTokens:]})
			x.of = append(x.of, of)
		}
	}
	n := copy(x.seqs, x.seqs[whole:])
	copy(x.of, x.of[whole:])
	x.seqs, x.of = x.seqs[:n], x.of[:n]
}

// mostGathered returns the largest number of rows of the members of all prefixes and pieces, in a step of `rows` rows.
func (e *Engine) mostGathered(g *attn.Problem, rows int) int {
	const tile = 192      // rows of the largest output tile
	if g.Pages.InKeys() { // no prefill kernel cuts prefixes into pieces
		return attn.Product(mostPrefixesOfRow, rows)
	}
	return min(attn.Product(mostPrefixesOfRow, rows)+mostPieces*attn.Ceil(e.blocks*tile, g.Heads), 1<<30)
}
