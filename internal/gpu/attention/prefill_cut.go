package attention

import (
	"slices"

	"gorgonia.org/leanattention/internal/attn"
)

// This file assigns output tiles of the prefill kernels to thread blocks: whole output tiles, or, if there are too few
// for all blocks, parts of output tiles.

// prefillTile is struct PrefillTile.
type prefillTile struct{ seq, head, block, first, end, host, part, parts int32 }

const (
	cutKeys  = 128 // keys of a step, for any kernel; a part is whole steps
	leastCut = 4   // least number of steps of a part
	snapped  = 2   // so few steps at an end of an output tile are no part of their own

	// tileSteps is the cost of an output tile besides its steps: loading queries and the first keys, filling the
	// pipeline, and storing the output. It makes many short output tiles cost more than a few long ones.
	tileSteps = 2

	partCounters = 16 // of a block: one for each 16 rows, and spare ones
	mostTogether = 3  // thread blocks on a multiprocessor, at most
)

func (t *prefillTile) keys() int64  { return int64(t.end - t.first) }
func (t *prefillTile) steps() int64 { return (t.keys() + cutKeys - 1) / cutKeys }

// fixedSteps returns tileSteps, or 0 for tests, which cut small output tiles.
func (e *Engine) fixedSteps() int64 {
	if e.Eager {
		return 0
	}
	return tileSteps
}

// partCost returns the cost of an output tile that may be cut. An output tile without keys is part of its neighbour's
// cost.
func (e *Engine) partCost(steps int64) int64 {
	if steps == 0 {
		return 0
	}
	return steps + e.fixedSteps()
}

// deal assigns each output tile, in order, to the block with the fewest steps so far. Blocks then work on neighbouring
// output tiles at the same time. deal returns the largest number of steps of a block.
func (p *Plan) deal(blocks int) (most int64) {
	const shift = 16 // a block's number, below its steps
	fixed := p.engine.fixedSteps()
	heap := p.prefillBounds[:0] // the block with the fewest steps comes first
	for b := range blocks {
		heap = append(heap, int64(b))
	}
	p.prefillBounds, p.owners = heap, p.owners[:0]
	for i := range p.outputs {
		b := heap[0] & (1<<shift - 1)
		p.owners = append(p.owners, int32(b))
		now := heap[0]>>shift + p.outputs[i].steps() + fixed
		most = max(most, now)
		sink(heap, now<<shift|b)
	}
	return most
}

// sink replaces the first element of a heap by x.
func sink(heap []int64, x int64) {
	at := 0
	for {
		next := 2*at + 1
		if next+1 < len(heap) && heap[next+1] < heap[next] {
			next++
		}
		if next >= len(heap) || heap[next] >= x {
			break
		}
		heap[at], at = heap[next], next
	}
	heap[at] = x
}

// dealPrefill lists the output tiles by the blocks that deal has assigned.
func (p *Plan) dealPrefill() {
	starts := append(p.prefillStarts.data[:0], make([]int32, p.prefillGrid+2)...)
	for _, b := range p.owners {
		starts[b+2]++
	}
	for b := range p.prefillGrid {
		starts[b+2] += starts[b+1]
	}
	p.prefilling.data = append(p.prefilling.data[:0], p.outputs...)
	for i, b := range p.owners { // starts[b+1] begins as the start of block b and ends as its end
		p.prefilling.data[starts[b+1]] = p.outputs[i]
		starts[b+1]++
	}
	p.prefillStarts.data = starts[:p.prefillGrid+1]
}

// cutPrefill returns the number of blocks that take equal parts of all output tiles, and the number of steps until all
// parts are merged. It returns 0 and `most` if whole output tiles, with up to `most` steps a block, are as fast.
func (p *Plan) cutPrefill(blocks int, most int64) (workers int, steps int64) {
	least, fixed := int64(leastCut), p.engine.fixedSteps()
	if p.engine.Eager {
		least = 1
	}
	var all, cost, longest int64
	for i := range p.outputs {
		n := p.outputs[i].steps()
		all, cost, longest = all+n, cost+p.engine.partCost(n), max(longest, n)
	}
	if workers = int(min(all/least, int64(blocks))); workers < 2 || len(p.outputs) >= 4*blocks {
		return 0, most
	}
	// Writing a part, and reading another block's part, takes about half a step. The last block to arrive waits for
	// memory a few times: two steps.
	even := (cost + int64(workers) - 1) / int64(workers)
	parts := min((longest+fixed+even-1)/even+1, int64(workers))
	steps = even + (4+parts)/2
	gain := max(steps/32, 1) // a smaller gain does not pay
	if p.engine.Eager {
		steps, gain = even, 0
	}
	if steps+gain >= most {
		return 0, most
	}
	return workers, steps
}

// partPrefill gives each of `workers` blocks an equal part of all output tiles in order.
func (p *Plan) partPrefill(workers int) {
	snap, fixed := int64(snapped), p.engine.fixedSteps()
	if p.engine.Eager {
		snap = 0
	}
	var all, steps int64
	for i := range p.outputs {
		n := p.outputs[i].steps()
		all, steps = all+p.engine.partCost(n), steps+n
	}
	workers = int(max(min(int64(workers), steps), 1)) // no block between two others is without a part
	bounds := append(p.prefillBounds[:0], make([]int64, workers+1)...)
	p.prefillBounds = bounds
	// bounds are the first steps of blocks. Blocks have equal shares of the steps and of the fixed costs of output
	// tiles.
	bounds[workers] = steps
	for b, i, begin, cost := 1, 0, int64(0), int64(0); b < workers; b++ {
		want := int64(b) * all / int64(workers)
		for n := p.outputs[i].steps(); cost+p.engine.partCost(n) < want; n = p.outputs[i].steps() {
			begin, cost = begin+n, cost+p.engine.partCost(n)
			i++
		}
		n := p.outputs[i].steps()
		in := min(max(want-cost-fixed, 0), n)
		switch {
		case n-in <= snap:
			in = n
		case in <= snap:
			in = 0
		}
		bounds[b] = max(begin+in, bounds[b-1])
	}
	p.prefilling.data, p.prefillStarts.data = p.prefilling.data[:0], append(p.prefillStarts.data[:0], 0)
	begin, b := int64(0), 0
	for i := range p.outputs {
		t := p.outputs[i]
		end := begin + t.steps()
		for b < workers-1 && bounds[b+1] <= begin {
			p.endBlock()
			b++
		}
		host, first := b, len(p.prefilling.data)
		for at := begin; at < end || at == begin; {
			for b < workers-1 && bounds[b+1] <= at {
				p.endBlock()
				b++
			}
			to := min(end, bounds[b+1])
			part := t
			part.first, part.end = int32((at-begin)*cutKeys), int32(min((to-begin)*cutKeys, t.keys()))
			part.host, part.part = int32(host), int32(b-host)
			p.prefilling.data = append(p.prefilling.data, part)
			if at = to; at == begin {
				break // the output tile has no keys
			}
		}
		for j := first; j < len(p.prefilling.data); j++ {
			p.prefilling.data[j].parts = int32(b - host + 1)
		}
		begin = end
	}
	for len(p.prefillStarts.data) <= p.prefillGrid {
		p.endBlock()
	}
}

// endBlock ends the list of a block's output tiles.
func (p *Plan) endBlock() {
	p.prefillStarts.data = append(p.prefillStarts.data, int32(len(p.prefilling.data)))
}

// counterBytes returns the size of the counters of parts. It is the same for all kernels, since counters are zero
// between launches.
func (e *Engine) counterBytes() int64 { return mostTogether * int64(e.blocks) * partCounters * 4 }

// partBytes returns the size of the counters and of the partials after them.
func (e *Engine) partBytes(k *kernel) int64 {
	return e.counterBytes() + 2*int64(e.prefillBlocks(k))*int64(k.dims[0]/8+1)*int64(k.tile.rows*2)*16
}

// isPlain reports whether a problem has no mask but the causal one, and no score changes.
func isPlain(g *attn.Problem) bool { return g.Features()&^plainFeatures == 0 }

// frontRows returns the number of rows of a sequence's first output tile, if the first output tile has fewer rows than the others, or 0.
// With a causal mask the first rows see the fewest keys, so the short output tile wastes least there. Kernels take the first output tile as
// a sequence, and the rows behind as another one.
func frontRows(g *attn.Problem, s *sequence, rows int) int {
	group := g.Group()
	if all := int(s.queries) * group; isPlain(g) && g.Causal && rows%group == 0 && all > rows && s.keys >= s.queries {
		return all % rows
	}
	return 0
}

// listFronts lists two sequences for each sequence: the rows of the short first output tile, if there is one, and the rows behind.
func (p *Plan) listFronts(g *attn.Problem, seqs []sequence, rows int) {
	for i := range seqs {
		front, rest := seqs[i], seqs[i]
		front.queries = int32(frontRows(g, &rest, rows) / g.Group())
		front.keys -= rest.queries - front.queries
		rest.row, rest.queries = rest.row+front.queries, rest.queries-front.queries
		p.prefillSeqs.data = append(p.prefillSeqs.data, front, rest)
	}
}

// prefillOutputs lists the output tiles of sequences from number `from` on. A section has as many heads as the L2 cache
// has capacity for their keys and values. In a section long output tiles come first. The last section has enough output
// tiles that the short ones at its end balance the blocks.
func (p *Plan) prefillOutputs(g *attn.Problem, seqs []sequence, from, blocks, rows int) {
	p.outputs, p.prefillSections, p.single = p.outputs[:0], append(p.prefillSections[:0], 0), true
	group, bytes := g.Group(), 0
	for n := from; n < len(seqs); n++ {
		s := &seqs[n]
		all := int(s.queries) * group
		p.single = p.single && all <= rows
		for head := range g.KVHeads {
			if bytes += int(s.keys) * tokenBytes(g); bytes > prefillSection {
				p.prefillSections = append(p.prefillSections, int32(len(p.outputs)))
				bytes = int(s.keys) * tokenBytes(g)
			}
			front, first := frontRows(g, s, rows), 0
			if front > 0 {
				first = front - rows
			}
			for ; first < all; first += rows {
				t := prefillTile{seq: int32(n), head: int32(head), block: int32(first / rows), parts: 1}
				if hides(g) {
					t.end = p.written.promptKeys(g, s, first/rows, rows)
				} else {
					t.end = int32(keysOf(g, p.prefixes.cuts, s, max(first, 0), min(first+rows, all), cutKeys).Len()) // keys between the sink tokens and the window do not count
				}
				if isPlain(g) {
					t.seq = int32(2 * (n - from))
					if first >= 0 {
						t.seq, t.block = t.seq+1, int32((first-front)/rows)
					}
				}
				p.outputs = append(p.outputs, t)
			}
		}
	}
	const enough = 4 // of output tiles for each block
	end := len(p.outputs)
	for i, begin := range slices.Backward(p.prefillSections) {
		if end == len(p.outputs) && i > 0 && end-int(begin) < enough*blocks {
			continue
		}
		longer := func(a, b prefillTile) int { return int(b.end) - int(a.end) }
		if !slices.IsSortedFunc(p.outputs[begin:end], longer) {
			slices.SortStableFunc(p.outputs[begin:end], longer)
		}
		end = int(begin)
	}
}
