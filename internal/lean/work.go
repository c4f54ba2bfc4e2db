package lean

import "sort"

// Work is the part of one output tile that one worker attends to.
type Work struct {
	Seq, Head, Block int   // sequence (in order of Add), KV head, query block
	Output           int64 // number of the output tile, in the plan's linear order
	Begin, End       int64 // LeanTiles [Begin, End) of the output tile
	Tiles            int64 // LeanTiles of the whole output tile, at least 1
}

// Host reports whether k has its output tile's first LeanTile.
func (k *Work) Host() bool { return k.Begin == 0 }

// Finishing reports whether k has its output tile's last LeanTile.
func (k *Work) Finishing() bool { return k.End == k.Tiles }

// Whole reports whether k is all of its output tile, with nothing to merge.
func (k *Work) Whole() bool { return k.Begin == 0 && k.End == k.Tiles }

// Iterator iterates over the Work of one worker in the plan's linear order, its Range before its Wholes. A copy
// continues independently.
type Iterator struct {
	plan             *Plan
	pos, end         int64 // remaining LeanTiles of the current range
	then, last       int64 // the range after it
	seq, head, block int   // the output tile of pos, unless it is used up
	at               int64 // first LeanTile of that output tile
}

// Work returns an iterator over the work of worker w. There is at least one Work unless the worker's range is empty.
func (p *Plan) Work(w int) Iterator {
	it := Iterator{plan: p}
	it.GoTo(w)
	return it
}

// GoTo makes it an iterator over the work of worker w. It searches near the current output tile, so it is fast for
// workers in order.
func (it *Iterator) GoTo(w int) {
	it.pos, it.end = it.plan.Range(w)
	it.then, it.last = it.plan.Wholes(w)
	it.seek()
}

// GoToRange is GoTo without the worker's Wholes.
func (it *Iterator) GoToRange(w int) {
	it.pos, it.end = it.plan.Range(w)
	it.then, it.last = 0, 0
	it.seek()
}

// GoToWholes is GoTo without the worker's Range.
func (it *Iterator) GoToWholes(w int) {
	it.pos, it.end = it.plan.Wholes(w)
	it.then, it.last = 0, 0
	it.seek()
}

// seek finds the output tile of pos.
func (it *Iterator) seek() {
	if it.pos == it.end {
		it.pos, it.end, it.then = it.then, it.last, it.last
	}
	if it.pos == it.end {
		return
	}
	p := it.plan
	q := &p.seqs[it.seq]
	if it.block < q.blocks && it.at <= it.pos && it.pos-it.at < p.starts[q.start+it.block+1]-p.starts[q.start+it.block] {
		return // the current output tile
	}
	n := p.headTiles(q)
	if it.pos < q.tile || it.pos-q.tile >= p.heads*n {
		it.seq = p.sequenceOf(it.pos, it.seq)
		q = &p.seqs[it.seq]
		n = p.headTiles(q)
	}
	head, rest := (it.pos-q.tile)/n, (it.pos-q.tile)%n
	it.head, it.block, it.at = int(head), 0, it.pos-rest
	if q.blocks > 1 {
		starts := p.starts[q.start : q.start+q.blocks]
		it.block = sort.Search(len(starts), func(i int) bool { return starts[i] > rest }) - 1
		it.at += starts[it.block]
	}
}

// sequenceOf returns the last sequence that begins at or before a LeanTile. It searches from the sequence near, in
// growing steps.
func (p *Plan) sequenceOf(tile int64, near int) int {
	from, to := 0, len(p.seqs) // the sequence is in [from, to)
	if p.seqs[near].tile <= tile {
		from = near
		for step := 1; from+step < to; step *= 2 {
			if p.seqs[from+step].tile > tile {
				to = from + step
				break
			}
			from += step
		}
	}
	for to-from > 1 {
		if middle := int(uint(from+to) / 2); p.seqs[middle].tile > tile {
			to = middle
		} else {
			from = middle
		}
	}
	return from
}

// Next returns the worker's next Work, or false after the last Work.
func (it *Iterator) Next() (k Work, ok bool) {
	if it.pos == it.end {
		return k, false
	}
	p := it.plan
	q := &p.seqs[it.seq]
	n := p.starts[q.start+it.block+1] - p.starts[q.start+it.block]
	for it.pos >= it.at+n { // used up: go to the next output tile with LeanTiles
		it.at += n
		if it.block++; it.block >= q.blocks {
			it.block = 0
			it.head++
		}
		if int64(it.head) == p.heads || p.headTiles(q) == 0 {
			it.head, it.block = 0, 0
			it.seq++
			q = &p.seqs[it.seq]
		}
		n = 0
		if q.blocks > 0 {
			n = p.starts[q.start+it.block+1] - p.starts[q.start+it.block]
		}
	}
	// Field by field: a composite literal is built elsewhere and copied, which takes twice as long.
	k.Seq, k.Head, k.Block = it.seq, it.head, it.block
	k.Output = q.output + int64(it.head)*int64(q.blocks) + int64(it.block)
	k.Begin, k.End, k.Tiles = it.pos-it.at, min(it.end-it.at, n), n
	if it.pos = it.at + k.End; it.pos == it.end {
		it.seek()
	}
	return k, true
}

// Sharers returns the workers with a part of k's output tile: the first, which is the host block, the last, which is
// the finishing block, and their number. Every worker from first to last is one of them, since no two cuts within an
// output tile are equal (Cut never makes more ranges than units). Partials are merged in the order of the workers.
//
// A worker hosts at most one output tile that it shares, so first identifies the output tile among the shared ones.
func (p *Plan) Sharers(k Work) (first, last, count int) {
	q := &p.seqs[k.Seq]
	at := q.tile + int64(k.Head)*p.headTiles(q) + p.starts[q.start+k.Block]
	first = p.owner(at)
	last = p.owner(at + k.Tiles - 1)
	return first, last, last - first + 1
}

// owner returns the worker that owns LeanTile t: the last worker whose range begins at or before t. Workers of empty
// ranges before it begin where its range begins.
func (p *Plan) owner(t int64) int {
	cuts := p.cuts
	if t >= cuts[len(cuts)-1] {
		cuts = p.wholes
	}
	return sort.Search(len(cuts), func(w int) bool { return cuts[w] > t }) - 1
}

// Slot returns the index of worker w's partial of k, in [0, 2*Workers()): 2w+1 for a part of an output tile that w
// hosts, 2w for any other part. Two slots are enough for any problem: a Range is contiguous and Wholes are no parts, so
// only the first Work of a Range can be a part that w does not host, and only the last can be a part that w hosts.
func (p *Plan) Slot(w int, k Work) int {
	if k.Host() {
		return 2*w + 1
	}
	return 2 * w
}
