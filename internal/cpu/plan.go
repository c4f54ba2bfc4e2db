package cpu

import (
	"math"

	"gorgonia.org/leanattention/internal/lean"
)

// blockRows is the number of packed rows that a block of query positions is filled up to: so many rows
// share one pass over the keys and values. One position is the least a block holds, whatever its heads.
const blockRows = 64

// Plan is the schedule of one step, and serves all its layers. The zero Plan is that of no sequences.
// It may be built again and again; once its memory has grown, that allocates nothing. Between builds it
// may be run from any number of goroutines.
type Plan struct {
	g        Geometry
	sched    lean.Plan
	seqs     []span
	pages    []int32 // the live pages of all sequences
	tiles    []int64 // scratch of Build
	rows     int     // rows of Q, Out and LSE that the sequences reach over
	lastPage int     // the highest page
	slots    int     // the most slots used of a page
	packed   int     // the most packed rows of a block
}

// span is a Sequence as the plan keeps it.
type span struct {
	row, queries, keys int
	positions          int // query positions of a block; the last block may have fewer
	blind              int // positions in the leading blocks that see no key: nobody has work there
	page               int // its first page in Plan.pages
}

// block returns the query positions [from, to) of block b.
func (s *span) block(b int) (from, to int) {
	return b * s.positions, min((b+1)*s.positions, s.queries)
}

// first returns the first key that query position i sees, if it sees any.
func (s *span) first(g *Geometry, i int) int { return firstSeen(s.position(i), g.Window) }

// position returns the place of query position i among the keys.
func (s *span) position(i int) int { return s.keys - s.queries + i }

// visible returns the end of the keys that query position i sees.
func (s *span) visible(g *Geometry, i int) int {
	if !g.Causal {
		return s.keys
	}
	return max(s.position(i)+1, 0)
}

// Build makes p the plan of one step: for each sequence and KV head, blocks of query positions, whose
// rows (position by position, within it the heads of the group) are the rows of an output tile, and for
// each block the LeanTiles that its positions see, from the first one's first key to the last one's last.
//
// It copies what it needs of g and seqs. Everything is checked first; on error p is unchanged. The
// error wraps ErrShape or ErrPage. That rows of different sequences do not overlap is left to the
// caller, as are the sizes of buffers, which Run checks.
func (p *Plan) Build(g Geometry, seqs []Sequence) error {
	const op = "plan"
	if err := g.check(op); err != nil {
		return err
	}
	g = g.withDefaults()
	for i := range seqs {
		if err := seqs[i].check(op, i, g.PageTokens); err != nil {
			return err
		}
		if q := &seqs[i]; !g.Bias.covers(i, q.Queries, q.Keys) {
			return errorf(op, ErrShape, "sequence %d has %d queries and %d keys, the bias is of %d sequences, %d queries and %d keys",
				i, q.Queries, q.Keys, g.Bias.Sequences, g.Bias.Queries, g.Bias.Keys)
		}
	}

	p.g = g
	p.sched.Reset(g.KVHeads)
	p.seqs, p.pages = p.seqs[:0], p.pages[:0]
	p.rows, p.lastPage, p.slots, p.packed = 0, -1, 0, 0
	group := g.Heads / g.KVHeads
	for i := range seqs {
		q := &seqs[i]
		s := span{row: q.Row, queries: q.Queries, keys: q.Keys, page: len(p.pages)}
		p.tiles = p.tiles[:0]
		if s.queries > 0 {
			// As few blocks as hold the rows, of as nearly equal size as can be.
			most := max(blockRows/group, 1)
			blocks := (s.queries-1)/most + 1
			s.positions = (s.queries-1)/blocks + 1
			p.rows = max(p.rows, s.row+s.queries)
			p.packed = max(p.packed, s.positions*group)

			live := pagesOf(s.keys, g.PageTokens)
			p.pages = append(p.pages, q.Pages[:live]...)
			for _, page := range q.Pages[:live] {
				p.lastPage = max(p.lastPage, int(page))
			}
			p.slots = max(p.slots, min(s.keys, g.PageTokens))
		}
		for from := 0; from < s.queries; from += s.positions {
			to := min(from+s.positions, s.queries)
			n := pagesOf(max(s.visible(&g, to-1)-s.first(&g, from), 0), g.TileTokens)
			if n == 0 {
				s.blind = to
			}
			p.tiles = append(p.tiles, int64(n))
		}
		p.sched.Add(p.tiles)
		p.seqs = append(p.seqs, s)
	}
	p.sched.Cut(g.Policy, g.Workers)
	return nil
}

// check reports what is wrong with sequence i.
func (q *Sequence) check(op string, i, pageTokens int) error {
	if q.Row < 0 || q.Queries < 0 || q.Keys < 0 || q.Row > math.MaxInt-q.Queries {
		return errorf(op, ErrShape, "sequence %d has row %d, %d queries, %d keys", i, q.Row, q.Queries, q.Keys)
	}
	if q.Queries == 0 {
		return nil
	}
	live := pagesOf(q.Keys, pageTokens)
	if len(q.Pages) < live {
		return errorf(op, ErrPage, "sequence %d has %d pages of %d tokens for %d keys",
			i, len(q.Pages), pageTokens, q.Keys)
	}
	for j, page := range q.Pages[:live] {
		if page < 0 {
			return errorf(op, ErrPage, "sequence %d names page %d at %d", i, page, j)
		}
	}
	return nil
}

// pagesOf returns ceil(n/size) for n >= 0: the pages (or LeanTiles) that n tokens fill.
func pagesOf(n, size int) int {
	if n == 0 {
		return 0
	}
	return (n-1)/size + 1
}

// Workers returns the number of logical workers that the plan has work for.
func (p *Plan) Workers() int { return p.sched.Workers() }

// Tiles returns the number of LeanTiles of the plan, over all KV heads.
func (p *Plan) Tiles() int64 { return p.sched.Tiles() }
