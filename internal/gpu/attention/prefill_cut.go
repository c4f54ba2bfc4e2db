package attention

import (
	"slices"

	"gorgonia.org/leanattention/internal/attn"
)

// Which thread block has which output tiles of the kernels for many rows: whole ones, or,
// where these are too few for all blocks, parts of them.

// prefillTile is struct PrefillTile.
type prefillTile struct{ seq, head, block, first, end, host, part, parts int32 }

const (
	cutKeys  = 128 // a part is whole steps, of whatever kernel
	leastCut = 4   // of these, of a part
	snapped  = 2   // so many at an end of an output tile are not worth a part

	partCounters = 16 // of a block: one for each consumer warp, and some more
)

func (t *prefillTile) keys() int64  { return int64(t.end - t.first) }
func (t *prefillTile) steps() int64 { return (t.keys() + cutKeys - 1) / cutKeys }

// dealt is the numbers of the output tiles that a block has where whole ones are dealt out,
// there and back, so that each block has long ones and short ones.
func (p *Plan) dealt(block int, yield func(i int)) {
	blocks := p.engine.blocks
	for n := 0; ; n++ {
		i := n*blocks + block
		if n%2 != 0 {
			i = n*blocks + blocks - 1 - block
		}
		if i >= len(p.outputs) {
			return
		}
		yield(i)
	}
}

// mostDealt is how many keys the block with the most of them has then.
func (p *Plan) mostDealt() (most int64) {
	for b := range p.engine.blocks {
		keys := int64(0)
		p.dealt(b, func(i int) { keys += p.outputs[i].keys() })
		most = max(most, keys)
	}
	return most
}

// dealPrefill deals whole output tiles out.
func (p *Plan) dealPrefill() {
	p.prefilling, p.prefillStarts = p.prefilling[:0], append(p.prefillStarts[:0], 0)
	for b := range p.engine.blocks {
		p.dealt(b, func(i int) { p.prefilling = append(p.prefilling, p.outputs[i]) })
		p.endBlock()
	}
}

// cutPrefill is how many blocks are to have equal parts of all output tiles, and how many keys
// each could have taken until all are merged. 0: whole output tiles, where a block has up to
// `most` keys, are done as soon.
func (p *Plan) cutPrefill(most int64) (workers int, keys int64) {
	least := int64(leastCut)
	if p.engine.Eager {
		least = 1
	}
	var steps, longest int64
	for i := range p.outputs {
		n := p.outputs[i].steps()
		steps, longest = steps+n, max(longest, n)
	}
	blocks := p.engine.blocks
	if workers = int(min(steps/least, int64(blocks))); workers < 2 || len(p.outputs) >= 4*blocks {
		return 0, most
	}
	// Writing a part, and reading that of another block, takes about half of a step. Who comes last
	// waits for the memory some times: two steps.
	even := (steps + int64(workers) - 1) / int64(workers)
	parts := min((longest+even-1)/even+1, int64(workers))
	keys = even*cutKeys + (4+parts)*cutKeys/2
	gain := keys / 32 // or it is not worth it
	if p.engine.Eager {
		keys, gain = even*cutKeys, 0
	}
	if keys+gain >= most {
		return 0, most
	}
	return workers, keys
}

// partPrefill gives each of so many blocks an equal part of all output tiles, one behind the
// other.
func (p *Plan) partPrefill(workers int) {
	snap := int64(snapped)
	if p.engine.Eager {
		snap = 0
	}
	var steps int64
	for i := range p.outputs {
		steps += p.outputs[i].steps()
	}
	workers = int(max(min(int64(workers), steps), 1)) // nobody between two parts has nothing
	bounds := append(p.prefillBounds[:0], make([]int64, workers+1)...)
	p.prefillBounds = bounds
	bounds[workers] = steps
	for b, i, begin := 1, 0, int64(0); b < workers; b++ {
		at := int64(b) * steps / int64(workers)
		for begin+p.outputs[i].steps() < at {
			begin += p.outputs[i].steps()
			i++
		}
		end := begin + p.outputs[i].steps()
		switch {
		case end-at <= snap:
			at = end
		case at-begin <= snap:
			at = begin
		}
		bounds[b] = max(at, bounds[b-1])
	}
	p.prefilling, p.prefillStarts = p.prefilling[:0], append(p.prefillStarts[:0], 0)
	begin, b := int64(0), 0
	for i := range p.outputs {
		t := p.outputs[i]
		end := begin + t.steps()
		for b < workers-1 && bounds[b+1] <= begin {
			p.endBlock()
			b++
		}
		host, first := b, len(p.prefilling)
		for at := begin; at < end || at == begin; {
			for b < workers-1 && bounds[b+1] <= at {
				p.endBlock()
				b++
			}
			to := min(end, bounds[b+1])
			part := t
			part.first, part.end = int32((at-begin)*cutKeys), int32(min((to-begin)*cutKeys, t.keys()))
			part.host, part.part = int32(host), int32(b-host)
			p.prefilling = append(p.prefilling, part)
			if at = to; at == begin {
				break // it has no keys
			}
		}
		for j := first; j < len(p.prefilling); j++ {
			p.prefilling[j].parts = int32(b - host + 1)
		}
		begin = end
	}
	for len(p.prefillStarts) <= p.engine.blocks {
		p.endBlock()
	}
}

// endBlock: what comes now is for the next block.
func (p *Plan) endBlock() { p.prefillStarts = append(p.prefillStarts, int32(len(p.prefilling))) }

// partBytes is the size of what blocks write of parts, behind their counters.
func (e *Engine) partBytes(k *kernel) (counters, all int64) {
	counters = int64(e.blocks) * partCounters * 4
	return counters, counters + 2*int64(e.blocks)*int64(k.dims[0]/8+1)*int64(k.tile.rows*2)*16
}

// prefillOutputs lists the output tiles. Keys and values of as many heads as stay in the L2 cache
// make a section. Within one the long output tiles come first.
func (p *Plan) prefillOutputs(g *attn.Problem, seqs []sequence, rows int) {
	p.outputs = p.outputs[:0]
	group, begin, bytes := g.Group(), 0, 0
	section := func() {
		slices.SortStableFunc(p.outputs[begin:], func(a, b prefillTile) int { return int(b.end) - int(a.end) })
		begin, bytes = len(p.outputs), 0
	}
	for n := range seqs {
		s := &seqs[n]
		all := int(s.queries) * group
		for head := range g.KVHeads {
			if bytes += int(s.keys) * tokenBytes(g); bytes > prefillSection {
				section()
				bytes = int(s.keys) * tokenBytes(g)
			}
			for first := 0; first < all; first += rows {
				keys := keysOf(g, s, first, min(first+rows, all)).Len()
				p.outputs = append(p.outputs, prefillTile{seq: int32(n), head: int32(head), block: int32(first / rows), end: int32(keys), parts: 1})
			}
		}
	}
	section()
}
