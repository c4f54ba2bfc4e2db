package attention

import (
	"math"
	"math/bits"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/lean"
)

// The structs that kernels read, field by field (kernels/attn_work.cuh, kernels/attn_append.cuh).

// sequence is struct Seq.
type sequence struct {
	row, queries, keys int32
	pages              int32 // its first entry of the block table; the page itself if pages hold whole sequences
}

// work is struct Work: the LeanTiles of a thread block.
type work struct {
	seq, head, block, tile int32 // of the first LeanTile: its output tile, and its index there
	tiles                  int32
	host, sharers          int32 // of the first output tile
	guests                 int32 // number of blocks that share the range's last output tile, if this block hosts it
	first                  sequence

	wholeSeq, wholeHead, wholeBlock, wholeTiles int32 // a range of whole output tiles after the other range; see placeStates
	firstWhole                                  sequence
}

// together is the wholeSeq of all thread blocks if no block has whole output tiles after its range. Blocks that share
// an output tile then merge it together. Otherwise the last block to arrive merges it.
const together = -1

// params is struct LaunchParams.
type params struct {
	keyMap, valueMap cuda.TensorMap
	Params
	meet       meetParams
	prefetched uint64  // an address
	_          [8]byte // up to a multiple of mapAlign
}

// mapAlign is the alignment of tensor maps in bytes. Structs with maps have a multiple of it as size.
const mapAlign = 64

// meetParams is struct MeetParams.
type meetParams struct {
	tagged, runs uint64 // addresses
	count        int32
	_            [4]byte
}

// Params is struct Params.
type Params struct {
	keys, values, query, out, lse                              uint64 // addresses
	Work, seqs, pages, Masked, partials, counters              uint64
	queryRow, queryHead, outRow, outHead, lseRow, lseHead      int64
	pageRows, headRows, pageTokens                             int32
	heads, group                                               int32
	tileShift, box, Rows, warps, Slots, buffers, parts, Causal int32
	queryType, outType, early, streamed                        int32
	scale, perGroup                                            float32
	_                                                          [4]byte
}

// prefetchedEntries is PREFETCHED_ENTRIES: the number of block table entries, from the beginning of a thread block's
// range, in a list of their own. Kernels for pages load that list beside the block's work. Otherwise they would have to
// wait for the work, which says where the entries are.
const prefetchedEntries = 16

// prefetch has the entries of one thread block; -1 after the end of the sequence.
type prefetch [prefetchedEntries]int32

var noPrefetch = prefetch(slices.Repeat([]int32{-1}, prefetchedEntries))

// packPrefetches writes the prefetched entries of works with chunks of `chunk` keys. Pages have a power of two of
// tokens.
func packPrefetches(works []work, g *attn.Problem, c cuts, chunk int, pages []int32, openings []prefetch) {
	tile, page, group := bits.TrailingZeros(uint(tileTokens(g))), bits.TrailingZeros(uint(g.PageTokens)), g.Group()
	begin := chunk
	if g.Invariant {
		begin = 1 << tile
	}
	for i := range works {
		w, o := &works[i], &openings[i]
		*o = noPrefetch
		if w.tiles > 0 {
			rows := int(w.first.queries) * group
			keys, front := keysBehind(g, c, &w.first, int(w.block)*BlockRows, min(int(w.block+1)*BlockRows, rows), begin)
			key := int(w.tile) << tile
			if key >= front {
				key += keys.First
			}
			if g.Invariant { // the keys of a LeanTile that no row attends to are skipped
				seen, _ := g.Mask.Keys(int(w.first.queries), int(w.first.keys), int(w.block)*BlockRows/group)
				key = max(key, seen-seen%chunk)
			}
			first, end := key>>page, (int(w.first.keys)-1)>>page+1
			copy(o[:], pages[int(w.first.pages)+first:int(w.first.pages)+end])
		}
	}
}

// appendParams is struct AppendParams.
type appendParams struct {
	newKeys, newValues, keys, values, slots uint64
	headRows, heads, dim, newType, dtype    int32
	row                                     int32
}

// packBlocks makes works of a plan whose sequences are single output tiles those of output tiles of `sequences` sequences: see blockwise.
// The wholeHead of a work without whole output tiles says so.
func packBlocks(sequences int, works []work) {
	for i := range works {
		if w := &works[i]; w.tiles > 0 {
			w.block, w.seq, w.wholeHead = w.seq/int32(sequences), w.seq%int32(sequences), int32(sequences)
		}
	}
}

// packWorks writes the LeanTiles of a cut plan, one work for each thread block. seqs are the plan's sequences, or again and again the
// same if the plan has more.
func packWorks(p *lean.Plan, seqs []sequence, works []work) {
	clear(works)
	if p.Workers() == 0 {
		return
	}
	it, wholes := p.Work(0), p.Work(0)
	shared, host, sharers := int64(-1), 0, 0 // the last output tile of Sharers, its host and its sharers
	for b := range p.Workers() {
		it.GoToRange(b)
		k, ok := it.Next()
		if !ok {
			continue // it has no whole output tiles either: see Policy.Hybrid
		}
		w := &works[b]
		begin, end := p.Range(b)
		if k.Whole() {
			shared, host, sharers = -1, b, 1
		} else if k.Output != shared {
			shared = k.Output
			host, _, sharers = p.Sharers(k)
		}
		w.seq, w.head, w.block, w.tile = int32(k.Seq), int32(k.Head), int32(k.Block), int32(k.Begin)
		w.tiles, w.host, w.sharers, w.first = int32(end-begin), int32(host), int32(sharers), seqs[k.Seq%len(seqs)]
		if !k.Host() { // it is the last output tile of its host
			works[host].guests = int32(sharers)
		}
		whole, last := p.Wholes(b)
		if whole == last {
			continue
		}
		wholes.GoToWholes(b)
		k, _ = wholes.Next()
		w.wholeSeq, w.wholeHead, w.wholeBlock, w.wholeTiles, w.firstWhole = int32(k.Seq), int32(k.Head), int32(k.Block), int32(last-whole), seqs[k.Seq%len(seqs)]
	}
}

// place returns the first sort key of inOrder.
func (s *sequence) place(queries int) uint32 {
	at := math.MaxInt32 - uint32(s.keys)
	if int(s.queries) > queries {
		at |= 1 << 31
	}
	return at
}
