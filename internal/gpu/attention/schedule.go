package attention

import (
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/lean"
)

// Which thread block attends to which LeanTiles.

// tileTokens is the size of a LeanTile: what the geometry asks for, rounded up to
// a power of two that is whole chunks.
func tileTokens(g *attn.Problem) int {
	if g.TileTokens == 0 {
		if g.Invariant {
			return invariantTile
		}
		return defaultTile
	}
	return 1 << bits.Len(uint(min(max(g.TileTokens, mostChunk), 1<<30)-1))
}

// tokenBytes is the size of a key and its value in one head.
func tokenBytes(g *attn.Problem) int { return g.Pages.TokenBytes() }

// slack is how many percent more than an even share a thread block may have, to
// have whole output tiles or one part: nothing or less has to be merged, and the end
// of a part takes as long as reading some 72 KB of float16. 5% are worth it where
// they are less than a few 100 KB. Of a longer read they are more than merging takes,
// which was 7 us for one row and 11 for eight where consumer warps merge: a few
// blocks less get less from the memory, since multiprocessors share ways to it in groups
// of four or six, which are not equal. Where others merge, blocks do so while they are at
// whole output tiles, or together, and 5% are worth it only up to some 100 KB; but in a
// launch that does more a block's second part is in everybody's way.
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

// whole is the most LeanTiles that a thread block may have so that all have whole output
// tiles, where those would be behind parts else: warps of their own merge the parts while
// whole ones come, so that nothing is left for the end of the launch, and all blocks read.
// Fewer blocks are worth it if each reads no more than some 64 KB more than all would on
// average: else a long read by 128 blocks instead of 132 takes up to 2% longer. It is no
// percentage, since one LeanTile is 1% of 3 MB already. 0: slack says it, where merging ends
// the launch or is done by the consumer warps, in a launch that does more, where an output tile, of
// `longest` LeanTiles, is for several blocks, and where a block reads less than was measured.
func (p *Plan) whole(g *attn.Problem, workers, longest int) int64 {
	const most, least = 64 << 10, 768 << 10
	n, tile := int64(workers), int64(tileTokens(g)*tokenBytes(g))
	even := p.sched.Tiles() / n
	if !p.engine.hasEpilogue() || p.fused || p.sched.Outputs() <= n || int64(longest) > even || even*tile < least {
		return 0
	}
	return (p.sched.Tiles() + n*most/tile) / n
}

// worth is how many of so many thread blocks are worth having; `longest` is the number of
// LeanTiles of the longest output tile, and a block copies `box` keys at a time. Blocks that
// have whole output tiles have nothing to merge, but each reads at its own pace then, and
// few of them leave the memory idle. Else a further block should have some 40 KB to read, or
// its partial is not worth merging.
func (p *Plan) worth(g *attn.Problem, workers, longest, box int) int {
	const least = 40 << 10
	if p.sched.Outputs() > int64(workers) {
		return workers
	}
	outputs, tile := max(int(p.sched.Outputs()), 1), tileTokens(g)*tokenBytes(g)
	if p.engine.blockEach(outputs, workers, min(longest, 1<<18)*tile, 2*box*g.Dim) {
		return outputs
	}
	return max(outputs, int(min(p.sched.Tiles()*int64(tile)/least, int64(workers))))
}

// blockEach says whether a block for each of so many output tiles, of so many bytes, is
// better than parts of them for more blocks. It saves merging, in whose time a block reads
// some 60 KB, and leaves multiprocessors to the next launch; so it is where output tiles are
// small, or the blocks nearly keep the memory busy, each at its own pace. Two multiprocessors
// side by side have one pace together, of which the memory has for some 55. And asking for the
// keys and values of a page takes a block 57 ns: where copies are less than some 4 KB that is
// longer than they take to come, so more blocks keep the memory busy, and merging costs
// fewer bytes. How many was measured on an H200 and an H100; another memory counts by what it
// is of the H200's, and as that if the driver does not tell.
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
	paces, merged := asked*memory/float64(copied), copied*51/2 // at the pace of small copies
	return 2*bytes <= 3*merged || float64(bytes)*(paces-float64(outputs)) <= float64(merged)*paces
}

// mergeTogether has the thread blocks that share output tiles merge them together, if that
// is the end of the launch: where some go on with whole output tiles, nobody should wait.
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

// schedule cuts the LeanTiles of the first sequences, which are all or those of few rows, for so many thread blocks.
func (p *Plan) schedule(g *attn.Problem, seqs []sequence, workers int, paged bool) {
	group, tile, chunk := g.Group(), tileTokens(g), p.engine.shape(g.Pages.Planes[0].DType, g.Dim).keys
	if g.Invariant {
		chunk = tile // where LeanTiles begin
	}
	longest := 0 // LeanTiles of an output tile
	p.sched.Reset(g.KVHeads)
	for _, s := range seqs {
		p.tiles = p.tiles[:0]
		rows := int(s.queries) * group
		for first := 0; first < rows; first += BlockRows {
			n := keysOf(g, p.prefixes.cuts, &s, first, min(first+BlockRows, rows), chunk).Tiles(tile)
			p.tiles, longest = append(p.tiles, n), max(longest, int(n))
		}
		p.sched.Add(p.tiles)
	}
	if g.Workers > 0 {
		workers = min(workers, g.Workers)
	}
	// A launch that does more has all thread blocks anyway, and merging costs it less.
	if g.Policy.Kind == lean.StreamK && p.engine.hasEpilogue() && !p.engine.Eager && !p.fused {
		workers = p.worth(g, workers, longest, boxOf(mostChunk, paged, g.PageTokens))
	}
	policy := g.Policy
	policy.Slack, policy.Whole, policy.Hybrid = p.slack(g, workers), p.whole(g, workers, longest), !g.Invariant
	p.sched.Cut(policy, workers)
	if p.works.data == nil {
		p.works.data = make([]work, p.engine.blocks)
	}
	packWorks(&p.sched, seqs, p.works.data)
	switch {
	case g.Invariant:
		placeStates(&p.sched, p.works.data)
	case p.engine.hasEpilogue():
		p.mergeTogether()
	}
}

// placeStates says where in the workspace the states of LeanTiles are that thread blocks hand each other with batch
// invariance: those of each output tile that several blocks have lie one behind the other. It returns how many there are.
func placeStates(p *lean.Plan, works []work) (states int) {
	if p.Workers() == 0 {
		return 0
	}
	it := p.Work(0)
	host := int32(-1) // of the last output tile that was placed
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

// keysOf is the keys that the query positions of some packed rows see, [first, end) of a
// sequence's: what is cut into their LeanTiles. They are whole chunks of so many keys, but for the last one.
func keysOf(g *attn.Problem, c cuts, s *sequence, first, end, chunk int) lean.Keys {
	keys, _ := keysBehind(g, c, s, first, end, chunk)
	return keys
}

// keysBehind is keysOf, and how many keys there are in chunks that have sink tokens. These stand right before the others, as if
// there was nothing between them: keys.First is how many are left out.
func keysBehind(g *attn.Problem, c cuts, s *sequence, first, end, chunk int) (keys lean.Keys, front int) {
	if g.Window == 0 && s.queries == 1 { // as of most sequences there are
		return lean.Keys{End: int(s.keys)}, 0
	}
	group := g.Group()
	if g.Window == 0 { // nothing is left out in front
		_, to := g.Mask.Keys(int(s.queries), int(s.keys), (end-1)/group)
		return lean.Keys{End: to}, 0
	}
	from, to := c.mask(g, s).Range(int(s.queries), int(s.keys), first/group, (end-1)/group+1)
	front = attn.Ceil(g.SinkKeys(from), chunk) * chunk
	return lean.Keys{First: max(from-from%chunk-front, 0), End: to}, front
}
