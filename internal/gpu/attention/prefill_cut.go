package attention

import (
	"slices"

	"gorgonia.org/leanattention/internal/attn"
)

// Which thread block has which output tiles of the prefill kernels: whole ones, or,
// where these are too few for all blocks, parts of them.

// prefillTile is struct PrefillTile.
type prefillTile struct{ seq, head, block, first, end, host, part, parts int32 }

const (
	cutKeys  = 128 // a step of keys, of whatever kernel: a part is whole steps
	leastCut = 4   // of these, of a part
	snapped  = 2   // so many at an end of an output tile are not worth a part

	// tileSteps is what an output tile takes beside its steps: its queries, the first keys, the
	// pipeline's fill and the output. Many short ones take longer than a few long ones.
	tileSteps = 2

	partCounters = 16 // of a block: one for each 16 rows, and some more
	mostTogether = 3  // thread blocks of a multiprocessor
)

func (t *prefillTile) keys() int64  { return int64(t.end - t.first) }
func (t *prefillTile) steps() int64 { return (t.keys() + cutKeys - 1) / cutKeys }

// fixedSteps is tileSteps. Tests cut what is not worth it.
func (e *Engine) fixedSteps() int64 {
	if e.Eager {
		return 0
	}
	return tileSteps
}

// partCost is the cost of an output tile that may be cut. One without keys is with a
// neighbour.
func (e *Engine) partCost(steps int64) int64 {
	if steps == 0 {
		return 0
	}
	return steps + e.fixedSteps()
}

// deal gives each output tile to the one of so many blocks that has the least so far, in their order: blocks
// that work at the same time have neighbours. It says how many steps the block with the most
// of them has.
func (p *Plan) deal(blocks int) (most int64) {
	const shift = 16 // a block's number, below its steps
	fixed := p.engine.fixedSteps()
	heap := p.prefillBounds[:0] // the block with the least comes first
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

// sink puts x in the place of the first of a heap.
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

// dealPrefill lists what deal has dealt out.
func (p *Plan) dealPrefill() {
	starts := append(p.prefillStarts.data[:0], make([]int32, p.dealt+2)...)
	for _, b := range p.owners {
		starts[b+2]++
	}
	for b := range p.dealt {
		starts[b+2] += starts[b+1]
	}
	p.prefilling.data = append(p.prefilling.data[:0], p.outputs...)
	for i, b := range p.owners { // block b has from starts[b+1] on, which so becomes its end
		p.prefilling.data[starts[b+1]] = p.outputs[i]
		starts[b+1]++
	}
	p.prefillStarts.data = starts[:p.dealt+1]
}

// cutPrefill is how many of some blocks are to have equal parts of all output tiles, and how many
// steps each could have done until all are merged. 0: whole output tiles, where a block has up to
// `most` steps, are done as soon.
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
	// Writing a part, and reading that of another block, takes about half of a step. Who comes last
	// waits for the memory some times: two steps.
	even := (cost + int64(workers) - 1) / int64(workers)
	parts := min((longest+fixed+even-1)/even+1, int64(workers))
	steps = even + (4+parts)/2
	gain := max(steps/32, 1) // or it is not worth it
	if p.engine.Eager {
		steps, gain = even, 0
	}
	if steps+gain >= most {
		return 0, most
	}
	return workers, steps
}

// partPrefill gives each of so many blocks an equal part of all output tiles, one behind the
// other.
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
	workers = int(max(min(int64(workers), steps), 1)) // nobody between two parts has nothing
	bounds := append(p.prefillBounds[:0], make([]int64, workers+1)...)
	p.prefillBounds = bounds
	// Where blocks begin, in steps. They have equal parts of these and of what output tiles take beside them.
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
				break // it has no keys
			}
		}
		for j := first; j < len(p.prefilling.data); j++ {
			p.prefilling.data[j].parts = int32(b - host + 1)
		}
		begin = end
	}
	for len(p.prefillStarts.data) <= p.dealt {
		p.endBlock()
	}
}

// endBlock: what comes now is for the next block.
func (p *Plan) endBlock() {
	p.prefillStarts.data = append(p.prefillStarts.data, int32(len(p.prefilling.data)))
}

// counterBytes is the size of the counters of parts: the same for all kernels, since they are zero between launches.
func (e *Engine) counterBytes() int64 { return mostTogether * int64(e.blocks) * partCounters * 4 }

// partBytes is that and, behind it, the size of what blocks write of parts.
func (e *Engine) partBytes(k *kernel) int64 {
	return e.counterBytes() + 2*int64(e.prefillBlocks(k))*int64(k.dims[0]/8+1)*int64(k.tile.rows*2)*16
}

// prefillOutputs lists the output tiles of sequences from number `from` on. Keys and values of as many heads as stay in the L2 cache
// make a section. Within one the long output tiles come first. The last section has enough of
// them that the short ones at its end make blocks even.
func (p *Plan) prefillOutputs(g *attn.Problem, seqs []sequence, from, blocks, rows int) {
	p.outputs, p.prefillSections = p.outputs[:0], append(p.prefillSections[:0], 0)
	group, bytes := g.Group(), 0
	for n := from; n < len(seqs); n++ {
		s := &seqs[n]
		all := int(s.queries) * group
		for head := range g.KVHeads {
			if bytes += int(s.keys) * tokenBytes(g); bytes > prefillSection {
				p.prefillSections = append(p.prefillSections, int32(len(p.outputs)))
				bytes = int(s.keys) * tokenBytes(g)
			}
			for first := 0; first < all; first += rows {
				keys := keysOf(g, p.prefixes.cuts, s, first, min(first+rows, all), cutKeys).Len() // as if there was nothing between sink tokens and a window
				p.outputs = append(p.outputs, prefillTile{seq: int32(n), head: int32(head), block: int32(first / rows), end: int32(keys), parts: 1})
			}
		}
	}
	const enough = 4 // for each block
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
