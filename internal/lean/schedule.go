package lean

import (
	"math"
	"math/bits"
	"slices"
	"sort"
)

// Kind is a rule for cutting the LeanTiles of a plan into workers' ranges.
type Kind uint8

const (
	// StreamK gives every worker the same number of LeanTiles, to within one, across the borders of output tiles, heads
	// and sequences: LeanAttention.
	StreamK Kind = iota
	// FixedSplit splits the context of every output tile into Policy.Splits parts of equal size and distributes the
	// parts evenly: FlashDecoding.
	FixedSplit
	// PerHead distributes whole output tiles evenly and never splits one: FlashAttention-2.
	PerHead
)

// String returns the name of k in options and reports.
func (k Kind) String() string {
	switch k {
	case StreamK:
		return "stream-k"
	case FixedSplit:
		return "fixed-split"
	case PerHead:
		return "per-head"
	}
	return "unknown"
}

// Policy is the rule of a plan's cuts. The zero value is StreamK.
type Policy struct {
	Kind   Kind
	Splits int // parts of an output tile under FixedSplit; less than 1 counts as 1. The other kinds ignore Splits.

	// Slack lets StreamK give a worker up to Slack percent more LeanTiles than the largest even share, and at least one
	// more, if every worker then has either whole output tiles or a part of one. The end of a part costs time, and a
	// partial costs more. If that is impossible, cuts move to nearby ends of output tiles, as long as no share exceeds
	// that limit, and if this saves the busiest worker a part. 0 keeps the shares even.
	Slack int

	// Whole replaces Slack's limit for cuts that give every worker either whole output tiles or a part of one: it is
	// the largest number of LeanTiles of a worker. The largest even share is always allowed. 0: Slack sets the limit.
	Whole int64

	// Hybrid lets StreamK cut only the first output tiles evenly, and assign the last ones as a whole, so that every
	// worker has an even share of both together. A worker has its part of the cut output tiles first, so that their
	// partials can be merged while workers are at whole output tiles. Hybrid applies if Slack finds no cut into whole
	// output tiles, and if enough output tiles at the end of the plan are smaller than an even share.
	//
	// Source: the hybrid of stream-K and data-parallel tiles of Osama et al., "Stream-K" (arXiv:2301.03598).
	Hybrid bool
}

// Plan is a schedule: it assigns LeanTiles to workers.
//
// The LeanTiles of all output tiles have one linear order,
//
//	sequence -> KV head -> query block -> context
//
// which counts live LeanTiles only (ragged lengths are not padded). Worker w of G owns the LeanTiles [cut(w), cut(w+1))
// of that order. The three policies differ only in the cuts. With T LeanTiles and O output tiles:
//
//	StreamK    cut(w) = floor(w*T/G); Policy.Slack and Policy.Hybrid change these cuts
//	PerHead    cut(w) = first LeanTile of output tile floor(w*O/G)
//	FixedSplit cut(w) = first LeanTile of unit floor(w*U/G), where the U = O*s
//	           units are the s splits of each output tile in order, and split k
//	           of an output tile of n LeanTiles starts at min(k*ceil(n/s), n)
//
// Partial slots, sharers and merge order follow from the cuts (Algorithm 2). Under Policy.Hybrid the cuts end at some
// output tile, and each later output tile belongs to one worker.
//
// An output tile without LeanTiles (no key is visible to it) counts in Outputs, but no worker has Work for it. The
// caller writes its rows: zeros, and a log-sum-exp of -Inf.
//
// The zero Plan is empty and ready for use. Reset, Add and Cut build a plan. Once its memory has grown, building and
// reading it allocates nothing. Memory is O(sequences + query blocks + workers), for contexts of any length. The total
// number of LeanTiles must be less than 2^63. After Cut, a Plan may be read from any number of goroutines.
type Plan struct {
	heads   int64
	tiles   int64
	outputs int64
	seqs    []sequence
	runs    []run
	starts  []int64 // for each sequence, blocks+1 prefix sums of its blocks' LeanTiles in one head
	cuts    []int64 // G+1 cuts, or none before Cut
	wholes  []int64 // of the output tiles after the last cut, the first LeanTile of each worker, and the end; empty if there are none
	ends    []mark  // see align
}

// run is consecutive sequences of one query block each with equal numbers of LeanTiles. A sequence of several blocks,
// or none, is a run by itself. Cuts depend on output tiles, and steps have many output tiles of few lengths.
type run struct{ from, to int }

// mark is a moved cut: the beginning of worker w.
type mark struct {
	w  int
	at int64
}

// sequence is the position of a sequence in the linear orders.
type sequence struct {
	tile   int64 // its first LeanTile
	output int64 // its first output tile
	start  int   // its first entry in Plan.starts
	blocks int   // its query blocks
}

// Reset empties the plan and sets the number of KV heads of the sequences to add. It keeps the memory. With heads < 1
// there are no output tiles.
func (p *Plan) Reset(heads int) {
	p.heads = int64(max(heads, 0))
	p.tiles, p.outputs = 0, 0
	p.seqs, p.runs = p.seqs[:0], p.runs[:0]
	p.starts = p.starts[:0]
	p.cuts, p.wholes = p.cuts[:0], p.wholes[:0]
}

// Add appends a sequence to the plan. blockTiles has, for each query block, the number of LeanTiles that are visible to
// the block, the same in every head. A number below 1 is a block without visible keys. An empty blockTiles is a
// sequence without queries. blockTiles is copied. Cut must follow.
func (p *Plan) Add(blockTiles []int64) {
	p.seqs = append(p.seqs, sequence{
		tile:   p.tiles,
		output: p.outputs,
		start:  len(p.starts),
		blocks: len(blockTiles),
	})
	if last := len(p.seqs) - 1; len(blockTiles) == 1 && last > 0 && p.seqs[last-1].blocks == 1 && p.headTiles(&p.seqs[last-1]) == max(blockTiles[0], 0) {
		p.runs[len(p.runs)-1].to++
	} else {
		p.runs = append(p.runs, run{last, last + 1})
	}
	var n int64
	p.starts = append(p.starts, n)
	for _, t := range blockTiles {
		n += max(t, 0)
		p.starts = append(p.starts, n)
	}
	p.tiles += p.heads * n
	p.outputs += p.heads * int64(len(blockTiles))
	p.cuts, p.wholes = p.cuts[:0], p.wholes[:0]
}

// Cut sets the ranges of at most `workers` workers; less than 1 counts as 1. It may be called again with another policy
// or number. See Plan for the cuts.
func (p *Plan) Cut(policy Policy, workers int) {
	g := p.fit(policy, max(workers, 1))
	p.cuts, p.wholes = p.cuts[:0], p.wholes[:0]
	if g == 0 {
		return
	}
	if splits := policy.splits(); splits > 0 {
		for w := range g {
			p.cuts = append(p.cuts, p.cutUnit(w, g, splits))
		}
		p.cuts = append(p.cuts, p.tiles)
		return
	}
	if !p.cutWhole(g, max(workers, 1), policy) {
		if policy.Hybrid {
			p.setWholeTiles(g)
		}
		p.cutEven(g)
		p.align(g, policy.Slack)
	}
}

// splits returns the number of units of each output tile; 0: the units are LeanTiles.
func (p Policy) splits() int {
	switch p.Kind {
	case FixedSplit:
		return max(p.Splits, 1)
	case PerHead:
		return 1
	}
	return 0
}

// most returns the largest share of g workers under slack.
func (p *Plan) most(g, slack int) int64 {
	even := (p.tiles-1)/int64(g) + 1
	if slack <= 0 {
		return even
	}
	return even + max(1, even/100*int64(slack)+even%100*int64(slack)/100)
}

// cutEven gives g workers equal shares, including the whole output tiles after the ranges.
func (p *Plan) cutEven(g int) {
	p.cuts = slices.Grow(p.cuts[:0], g+1)[:g+1]
	last := p.tiles
	if len(p.wholes) > 0 {
		last = p.wholes[0]
	}
	p.cuts[0] = 0
	p.shareOut(mark{}, mark{g, last}, math.MaxInt64, true)
}

// align moves even cuts to ends of output tiles. The cut that is nearest to an end moves there, if the workers since
// the last moved cut can share the LeanTiles between, with no more than slack allows for each. align undoes all moves
// if the busiest worker gains nothing. A part of an output tile counts as the LeanTiles that slack adds.
func (p *Plan) align(g, slack int) {
	if slack <= 0 || p.outputs > mostPacked {
		return
	}
	most := p.most(g, slack)
	price := most - p.most(g, 0)
	before := p.worst(g, price)
	p.ends = append(p.ends[:0], mark{})
	w, last := 1, p.cuts[g]
	p.eachEnd(last, func(at int64) {
		for p.cuts[w] < at {
			w++
		}
		near := w
		if at-p.cuts[w-1] < p.cuts[w]-at {
			near--
		}
		if near == g {
			return
		}
		// From the last moved cut, or instead of it: no later move may fit after it.
		for n := len(p.ends); n > max(0, len(p.ends)-2); n-- {
			if from := p.ends[n-1]; near > from.w && p.shareOut(from, mark{near, at}, most, false) {
				p.ends = append(p.ends[:n], mark{near, at})
				return
			}
		}
	})
	// The last workers share the rest. This fits if no cut has moved.
	end := mark{g, last}
	for len(p.ends) > 1 && !p.shareOut(p.ends[len(p.ends)-1], end, most, false) {
		p.ends = p.ends[:len(p.ends)-1]
	}
	p.ends = append(p.ends, end)
	for i := range p.ends[1:] {
		p.shareOut(p.ends[i], p.ends[i+1], most, true)
	}
	if p.worst(g, price) >= before {
		p.cutEven(g)
	}
}

// shareOut gives the workers between two marks even shares of the LeanTiles between the marks and of the workers' whole
// output tiles. It returns false if a worker would get no LeanTile between the marks, or more than `most` in all. If
// record is true, it stores the cuts.
func (p *Plan) shareOut(from, to mark, most int64, record bool) bool {
	firstWhole, _ := p.Wholes(from.w)
	_, lastWhole := p.Wholes(to.w - 1)
	all, begin := to.at-from.at+lastWhole-firstWhole, from.at
	for w := from.w; w < to.w; w++ {
		share, _ := mulDiv(w+1-from.w, all, to.w-from.w)
		first, last := p.Wholes(w)
		end := from.at + share - (last - firstWhole)
		if n := end - begin; n < 1 || n > most-(last-first) {
			return false
		}
		if begin = end; record {
			p.cuts[w+1] = end
		}
	}
	return true
}

// worst returns the largest cost of g workers: LeanTiles, and price for each part in the worker's range.
func (p *Plan) worst(g int, price int64) (worst int64) {
	w, parts := 0, int64(1)
	next := func() {
		first, last := p.Wholes(w)
		worst = max(worst, p.cuts[w+1]-p.cuts[w]+last-first+parts*price)
		w, parts = w+1, 1
	}
	p.eachEnd(p.cuts[g], func(at int64) {
		for p.cuts[w+1] < at {
			next()
		}
		if p.cuts[w+1] > at {
			parts++
		}
	})
	for w < g {
		next()
	}
	return worst
}

// each calls f for the output tiles with LeanTiles, in order, until f returns false. The arguments are the first
// LeanTile of `count` consecutive output tiles, and their number n of LeanTiles each.
func (p *Plan) each(f func(at, n, count int64) bool) {
	for _, r := range p.runs {
		q := &p.seqs[r.from]
		if q.blocks == 1 { // all heads at once
			if n := p.headTiles(q); n > 0 && p.heads > 0 && !f(q.tile, n, p.heads*int64(r.to-r.from)) {
				return
			}
			continue
		}
		starts := p.starts[q.start : q.start+q.blocks+1]
		for head := range p.heads {
			at := q.tile + head*p.headTiles(q)
			for b := range q.blocks {
				if n := starts[b+1] - starts[b]; n > 0 && !f(at+starts[b], n, 1) {
					return
				}
			}
		}
	}
}

// eachEnd calls f with the ends of output tiles before `last`, in order.
func (p *Plan) eachEnd(last int64, f func(at int64)) {
	p.each(func(at, n, count int64) bool {
		for range count {
			if at += n; at >= last {
				return false
			}
			f(at)
		}
		return true
	})
}

// cutWhole cuts so that every worker has whole output tiles or a part of one, of at most m LeanTiles in all. m is the
// smallest limit that policy allows and for which there are enough workers. cutWhole returns false if there is none.
func (p *Plan) cutWhole(g, workers int, policy Policy) bool {
	if policy.Slack <= 0 || p.outputs > mostPacked {
		return false
	}
	even, most := p.most(g, 0), p.most(g, policy.Slack)
	if policy.Whole > 0 {
		most = max(even, policy.Whole)
	}
	enough := func(i int) bool { return p.pack(even+int64(i), workers, false) }
	n := int(most - even)
	if !enough(n) {
		return false
	}
	p.pack(even+int64(sort.Search(n, enough)), workers, true)
	return true
}

// mostPacked bounds the number of output tiles for which cuts are searched. The search visits each about ten times,
// which takes a few ten microseconds, once for each plan.
const mostPacked = 1 << 12

// pack assigns output tiles to workers, in order, at most m LeanTiles to each. A larger output tile is cut every m
// LeanTiles. pack returns false if there are too few workers. If record is true, it stores the cuts.
func (p *Plan) pack(m int64, workers int, record bool) bool {
	var room int64 // LeanTiles that the last worker can still take
	used, enough := 0, true
	p.each(func(at, n, count int64) bool {
		for end := at + n*count; at < end; at += n {
			if n <= room {
				fit := min(room/n, (end-at)/n)
				room -= fit * n
				if at += fit * n; at == end {
					break
				}
			}
			if enough = (n-1)/m < int64(workers-used); !enough {
				return false
			}
			for t := int64(0); t < n; t += m {
				used++
				if record {
					p.cuts = append(p.cuts, at+t)
				}
			}
			room = max(m-n, 0) // a worker with a part gets nothing else
		}
		return true
	})
	if enough && record {
		p.cuts = append(p.cuts, p.tiles)
	}
	return enough
}

// setWholeTiles assigns whole output tiles to g workers, from the last output tile on, as long as they are smaller
// than an even share. It assigns none if the last output tile is not smaller.
func (p *Plan) setWholeTiles(g int) {
	most := p.tiles/int64(g) - 1 // at least one LeanTile of each worker's share is in cut output tiles, since neighbours share these
	if most < 1 || p.outputs > mostPacked {
		return
	}
	// The least m for which workers have all small output tiles leaves few workers without any. It is little more than
	// if output tiles could be cut.
	if p.packLast(g, most, most) {
		small := p.tiles - p.wholes[0]
		least, enough := max((small-1)/int64(g)+1, 1), most
		for more := int64(0); least < enough; more = 2*more + 1 {
			if m := min(least+more, (least+enough)/2); p.packLast(g, m, most) {
				enough = m
			} else {
				least = m + 1
			}
		}
		p.packLast(g, enough, most)
	}
	if p.wholes[0] == p.tiles {
		p.wholes = p.wholes[:0]
	}
}

// packLast assigns whole output tiles of at most `most` LeanTiles to g workers, at most m LeanTiles to each, from the
// last output tile and the last worker on. It returns false if some of these output tiles are left.
func (p *Plan) packLast(g int, m, most int64) (all bool) {
	p.wholes = slices.Grow(p.wholes[:0], g+1)[:g+1]
	p.wholes[g] = p.tiles
	at, room, worker := p.tiles, m, g-1
	all = true
pack:
	for _, r := range slices.Backward(p.runs) {
		q := &p.seqs[r.from]
		starts := p.starts[q.start : q.start+q.blocks+1]
		heads, alike := p.heads, int64(1) // number of iterations, and equal output tiles in each
		if q.blocks == 1 {
			heads, alike = 1, p.heads*int64(r.to-r.from)
		}
		for range heads {
			for b := q.blocks - 1; b >= 0; b-- {
				n := starts[b+1] - starts[b]
				if n > most {
					break pack
				}
				for left := alike; left > 0 && n > 0; {
					if n > room {
						if n > m || worker == 0 {
							all = false
							break pack
						}
						p.wholes[worker] = at
						worker, room = worker-1, m
					}
					fit := min(left, room/n)
					at, room, left = at-fit*n, room-fit*n, left-fit
				}
			}
		}
	}
	for ; worker >= 0; worker-- {
		p.wholes[worker] = at
	}
	return all
}

// fit returns the number of workers to use: at most the number of units, and 0 without LeanTiles.
func (p *Plan) fit(policy Policy, workers int) int {
	if p.tiles == 0 {
		return 0
	}
	splits := policy.splits()
	if splits == 0 {
		return int(min(int64(workers), p.tiles))
	}
	hi, units := bits.Mul64(uint64(p.outputs), uint64(splits))
	if hi != 0 || units >= uint64(workers) {
		return workers
	}
	return int(units)
}

// cutUnit returns the first LeanTile of unit floor(w*O*s/g), with s units in each of the O output tiles. With w*O = o*g
// + r that unit is split floor(r*s/g) of output tile o. No product exceeds 128 bits.
func (p *Plan) cutUnit(w, g, s int) int64 {
	o, r := mulDiv(w, p.outputs, g)
	k, _ := mulDiv(int(r), int64(s), g)

	i := sort.Search(len(p.seqs), func(i int) bool { return p.seqs[i].output > o }) - 1
	q := &p.seqs[i]
	head, block := (o-q.output)/int64(q.blocks), (o-q.output)%int64(q.blocks)
	at := p.starts[q.start+int(block)]
	n := p.starts[q.start+int(block)+1] - at

	size := n / int64(s)
	if n%int64(s) != 0 {
		size++
	}
	return q.tile + head*p.headTiles(q) + at + min(k*size, n)
}

// mulDiv returns the quotient and the remainder of a*b/c in 128 bits, for 0 <= a <= c, 0 < c and 0 <= b.
func mulDiv(a int, b int64, c int) (quo, rem int64) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	q, r := bits.Div64(hi, lo, uint64(c))
	return int64(q), int64(r)
}

// headTiles returns the number of LeanTiles of one KV head of a sequence.
func (p *Plan) headTiles(q *sequence) int64 { return p.starts[q.start+q.blocks] }

// Workers returns the number of workers that the plan was cut for. It is at most the argument of Cut, at most the
// number of units (LeanTiles, splits or output tiles, by policy), and 0 without LeanTiles. Under FixedSplit and PerHead
// a worker's range may be empty.
func (p *Plan) Workers() int { return max(len(p.cuts)-1, 0) }

// Tiles returns the number of LeanTiles.
func (p *Plan) Tiles() int64 { return p.tiles }

// Outputs returns the number of output tiles, including those without LeanTiles.
func (p *Plan) Outputs() int64 { return p.outputs }

// Range returns the LeanTiles [begin, end) of worker w in the plan's linear order, without its Wholes.
func (p *Plan) Range(w int) (begin, end int64) { return p.cuts[w], p.cuts[w+1] }

// Wholes returns the LeanTiles [begin, end) of the whole output tiles that worker w has after its Range, under
// Policy.Hybrid.
func (p *Plan) Wholes(w int) (begin, end int64) {
	if len(p.wholes) == 0 {
		return 0, 0
	}
	return p.wholes[w], p.wholes[w+1]
}
