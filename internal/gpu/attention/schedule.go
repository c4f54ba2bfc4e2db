package attention

import (
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/lean"
)

// This file assigns LeanTiles to thread blocks.

// tileTokens returns the number of tokens of a LeanTile: g.TileTokens, or a default, rounded up to a power of two that
// is whole chunks.
func tileTokens(g *attn.Problem) int {
	if g.TileTokens == 0 {
		if g.Invariant {
			return invariantTile
		}
		return defaultTile
	}
	return 1 << bits.Len(uint(min(max(g.TileTokens, mostChunk), 1<<30)-1))
}

// tokenBytes returns the size of a key and its value in one head.
func tokenBytes(g *attn.Problem) int { return g.Pages.TokenBytes() }

// slack returns the percentage by which a thread block's share may exceed an even share, so that the block has whole
// output tiles or one part. Less is to be merged then, and the end of a part takes as long as reading about 72 KB of
// float16.
//
//   - If consumer warps merge, 5% pay up to a few 100 KB. Merging took 7 us for one row and 11 us for eight rows. For
//     longer reads 5% take more time than merging: with a few blocks less the bandwidth falls, since multiprocessors
//     share paths to memory in groups of four or six, which are not equal.
//   - If other warps merge, or blocks merge together, blocks hide most of the merging, and 5% pay only up to about 100 KB.
//   - In a launch with other work, the second part of a block delays all blocks, so the first limit applies.
func (p *Plan) slack(g *attn.Problem, workers int) int {
	const least, part = 5, 72 << 10
	most, row := 192<<10, 24<<10
	if p.engine.hasEpilogue() && (p.sched.Outputs() > int64(workers) || !p.fused) {
		most, row = 96<<10, 8<<10
	}
	even := max(p.sched.Tiles()/int64(workers), 1)
	tile := tileTokens(g) * tokenBytes(g)
	bounded := min(least, 100*int64((most+row*min(g.Group(), BlockRows))/tile)/even)
	return int(max(bounded, (100*int64(part/tile)+even-1)/even))
}

// whole returns the largest number of LeanTiles of a thread block, so that all blocks have whole output tiles, where
// whole output tiles would otherwise follow parts. Epilogue warps merge the parts while whole output tiles are read, so
// nothing is left to merge at the end of the launch, and all blocks read. Fewer blocks pay if each reads at most about
// 64 KB more than the average over all blocks: a long read by 128 blocks in place of 132 takes up to 2% longer. The
// limit is not a percentage, since one LeanTile is already 1% of 3 MB.
//
// whole returns 0, which leaves the limit to slack:
//
//   - if merging ends the launch, or consumer warps merge;
//   - in a launch with other work;
//   - if an output tile, of `longest` LeanTiles, needs several blocks;
//   - if a block reads less than was measured.
func (p *Plan) whole(g *attn.Problem, workers, longest int) int64 {
	const most, least = 64 << 10, 768 << 10
	n, tile := int64(workers), int64(tileTokens(g)*tokenBytes(g))
	even := p.sched.Tiles() / n
	if !p.engine.hasEpilogue() || p.fused || p.sched.Outputs() <= n || int64(longest) > even || even*tile < least {
		return 0
	}
	return (p.sched.Tiles() + n*most/tile) / n
}

// worth returns the number of thread blocks to use, at most workers. `longest` is the number of LeanTiles of the longest output
// tile. A block copies `box` keys at a time. Blocks with whole output tiles have nothing to merge, but each reads at
// its own speed, and a few of them do not saturate the memory. Otherwise a further block should read at least about 40
// KB, or its partial costs more than it saves.
func (p *Plan) worth(g *attn.Problem, workers, longest, box int) int {
	const least = 40 << 10
	if p.sched.Outputs() > int64(workers) {
		return workers
	}
	outputs, tile := max(int(p.sched.Outputs()), 1), tileTokens(g)*tokenBytes(g)
	if p.engine.blockEach(outputs, workers, min(longest, 1<<18)*tile, box*min(2*g.Dim, g.Pages.Key().Elements()*g.Pages.Key().DType.Size())) {
		return outputs
	}
	return max(outputs, int(min(p.sched.Tiles()*int64(tile)/least, int64(workers))))
}

// blockEach reports whether one block for each of `outputs` output tiles of `bytes` bytes is faster than parts for more
// blocks. One block for each saves merging, which takes as long as a block's reading of about 60 KB, and leaves
// multiprocessors to the next launch. So it pays for small output tiles, and where the blocks nearly saturate the
// memory.
//
//   - Two neighbouring multiprocessors share one bandwidth, of which the memory serves about 55.
//   - A block takes 57 ns to request the keys and values of a page. With copies below about 4 KB, requests take longer
//     than transfers: then more blocks are needed to saturate the memory, and merging costs fewer bytes.
//
// The figures were measured on an H200 and an H100. Another memory counts by its bandwidth relative to the H200's, and
// as the H200's if the driver does not report a bandwidth.
func (e *Engine) blockEach(outputs, workers, bytes, copied int) bool {
	const pairs, merging, small, large = 55, 60 << 10, 132 << 10, 264 << 10
	const h200, asked = 3201e3 * 6144, 184 << 10
	if bytes > small && (bytes > large || 2*outputs > workers || bytes*(pairs-outputs) > merging*pairs) {
		return false
	}
	memory := 1.0
	if bits := float64(e.info.MemoryClockKHz) * float64(e.info.MemoryBusBits); bits > 0 {
		memory = bits / h200
	}
	paces, merged := asked*memory/float64(copied), copied*51/2 // at the speed of small copies
	return 2*bytes <= 3*merged || float64(bytes)*(paces-float64(outputs)) <= float64(merged)*paces
}

// mergeTogether makes thread blocks that share output tiles merge them together, if merging ends the launch. If some
// blocks go on with whole output tiles, no block should wait.
func (p *Plan) mergeTogether() {
	shared := false
	for i := range p.works.data {
		if p.works.data[i].wholeTiles > 0 {
			return
		}
		shared = shared || p.works.data[i].guests > 0
	}
	for i := 0; shared && i < len(p.works.data); i++ {
		p.works.data[i].wholeSeq = together
	}
}

// schedule cuts the LeanTiles of the decode sequences, seqs, for `workers` thread blocks. Output tiles have at most
// `block` rows.
func (p *Plan) schedule(g *attn.Problem, seqs []sequence, workers int, paged bool, block int) {
	group, tile, chunk := g.Group(), tileTokens(g), p.engine.shape(g.Pages.Planes[0].DType, g.Dim).keys
	if g.Pages.InKeys() || isAny(g) {
		chunk = latentAnyKeys // other kernels for values in keys have no windows, for which it counts
	}
	if g.Invariant {
		chunk = tile // alignment of LeanTiles
	}
	longest := 0 // LeanTiles of the longest output tile
	p.sched.Reset(g.KVHeads)
	p.written.reset()
	blocks := blockwise(g, seqs, block)
	p.tiles = p.tiles[:0]
	for i, s := range seqs {
		if blocks == 0 {
			p.tiles = p.tiles[:0]
		}
		before := len(p.tiles)
		if rows := int(s.queries) * group; hides(g) {
			p.countTiles(g, &s, int(p.details.data[i].number), block)
		} else {
			for first := 0; first < rows; first += block {
				p.tiles = append(p.tiles, keysOf(g, p.prefixes.cuts, &s, first, min(first+block, rows), chunk).Tiles(tile))
			}
		}
		for _, n := range p.tiles[before:] {
			longest = max(longest, int(n))
		}
		if blocks == 0 {
			p.sched.Add(p.tiles)
		}
	}
	for b := range blocks {
		for i := range seqs {
			p.sched.Add(p.tiles[i*blocks+b:][:1])
		}
	}
	if g.Workers > 0 {
		workers = min(workers, g.Workers)
	}
	// A launch with other work has all thread blocks anyway, and merging costs it less.
	if g.Policy.Kind == lean.StreamK && p.engine.hasEpilogue() && !p.engine.Eager && !p.fused {
		workers = p.worth(g, workers, longest, boxOf(mostChunk, paged, g.PageTokens))
	}
	policy := g.Policy
	policy.Slack, policy.Whole, policy.Hybrid = p.slack(g, workers), p.whole(g, workers, longest), !g.Invariant && blocks == 0
	p.sched.Cut(policy, workers)
	if p.works.data == nil {
		p.works.data = make([]work, p.engine.blocks)
	}
	packWorks(&p.sched, seqs, p.works.data)
	if p.sequences = 0; blocks > 0 {
		p.sequences = len(seqs)
		packBlocks(p.sequences, p.works.data)
	}
	switch {
	case g.Invariant:
		placeStates(&p.sched, p.works.data)
	case p.engine.hasEpilogue():
		p.mergeTogether()
	}
}

// placeStates sets the places, in the workspace, of the states of LeanTiles that thread blocks exchange with batch
// invariance. The states of an output tile that several blocks share are consecutive. It returns the number of states.
func placeStates(p *lean.Plan, works []work) (states int) {
	if p.Workers() == 0 {
		return 0
	}
	it := p.Work(0)
	host := int32(-1) // of the last placed output tile
	for b := range p.Workers() {
		it.GoTo(b)
		k, ok := it.Next()
		if !ok || k.Host() {
			continue
		}
		w := &works[b]
		if w.host != host {
			host = w.host
			works[host].wholeBlock = int32(states)
			states += int(k.Tiles)
		}
		w.wholeHead = works[host].wholeBlock
	}
	return states
}

// keysOf returns the keys that the query positions of packed rows [first, end) attend to: the keys that are cut into
// LeanTiles. They are whole chunks of `chunk` keys, except the last chunk.
func keysOf(g *attn.Problem, c cuts, s *sequence, first, end, chunk int) lean.Keys {
	keys, _ := keysBehind(g, c, s, first, end, chunk)
	return keys
}

// keysBehind is keysOf, and also returns the number of keys in the chunks of sink tokens. These chunks count as if they
// directly preceded the window. keys.First is the number of skipped keys.
func keysBehind(g *attn.Problem, c cuts, s *sequence, first, end, chunk int) (keys lean.Keys, front int) {
	if g.Window == 0 && s.queries == 1 { // as most sequences
		return lean.Keys{End: int(s.keys)}, 0
	}
	group := g.Group()
	if g.Window == 0 { // no key is skipped
		_, to := g.Mask.Keys(int(s.queries), int(s.keys), (end-1)/group)
		return lean.Keys{End: to}, 0
	}
	from, to := c.mask(g, s).Range(int(s.queries), int(s.keys), first/group, (end-1)/group+1)
	front = attn.Ceil(g.SinkKeys(from), chunk) * chunk
	return lean.Keys{First: max(from-from%chunk-front, 0), End: to}, front
}

// blockwise returns the number of output tiles of each sequence if their first ones are to come first in the plan, then all second ones,
// and so on, and 0 otherwise. Kernels for keys that hold the values have output tiles of a sequence that read the same keys:
// in this order thread blocks read the keys at the same time, and the memory serves them once.
func blockwise(g *attn.Problem, seqs []sequence, block int) (blocks int) {
	if block != mostBlockRows || g.KVHeads != 1 || g.Policy.Kind != lean.StreamK {
		return 0
	}
	for i := range seqs {
		n := attn.Ceil(int(seqs[i].queries)*g.Group(), block)
		if i > 0 && n != blocks {
			return 0
		}
		blocks = n
	}
	if blocks < 2 {
		return 0
	}
	return blocks
}
