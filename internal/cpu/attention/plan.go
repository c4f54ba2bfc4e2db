package attention

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"
)

// blockRows is the largest number of packed rows of a block of query positions, which share one pass over the keys and
// values. A block has at least one position, for any number of heads. blockRowsPacked is the number for blocks whose
// keys and values are packed.
const (
	blockRows       = 64
	blockRowsPacked = 128
)

// defaultTileTokens is the default number of tokens of a LeanTile. Tiles of 128 to 512 tokens measured alike. Smaller
// tiles cost re-scaling, larger tiles make loads uneven. The default does not depend on the shape, so that a plan and
// all rounding follow from the problem alone.
const defaultTileTokens = 256

// withDefaults returns g with defaults in place of zero values.
func withDefaults(g attn.Problem) attn.Problem {
	if g.TileTokens == 0 {
		if g.TileTokens = defaultTileTokens; g.Invariant {
			g.TileTokens = invariantTileTokens
		}
	}
	return g
}

// Plan is the schedule of one step, for all its layers. The zero Plan has no sequences. A plan may be built any number
// of times. Once its memory has grown, Build allocates nothing. Between builds a plan may be run from any number of
// goroutines.
type Plan struct {
	g        attn.Problem
	sched    lean.Plan
	seqs     []span
	pages    []int32 // the live pages of all sequences
	trees    []uint64
	tiles    []int64 // scratch of Build
	rows     int     // extent of the sequences' rows of Q, Out and LSE
	lastPage int     // the highest page number
	slots    int     // largest number of used slots of a page
	packed   int     // largest number of packed rows of a block
	threads  int     // threads that a run can use
	rotation rotation

	// With a variant that hides keys: the LeanTiles of each block that some query sees, and where each list is.
	seen  []int32
	lists []seenTiles
	bound []variant.Interval // scratch

	// PrefixBytes is the least number of bytes that sharing must save for keys of several sequences to be attended to
	// once. 0: the engine's choice.
	PrefixBytes int
	prefix      *prefixPlan // nil before the first Build with two sequences
	shares      bool        // prefix is in use since the last Build
}

// Shares reports whether keys of several sequences are attended to once.
func (p *Plan) Shares() bool { return p.shares }

// span is a Sequence in the plan's form.
type span struct {
	row, queries, keys int
	positions          int // query positions of a block; the last block may have fewer
	masked             int // positions in the leading blocks without visible keys, for which no worker has work
	page               int // its first page in Plan.pages
	cut                int // see attn.Sequence
	lists              int // of Plan.lists, that of its first block

	tree attn.Tree // of the query positions; nil: none, or a chain
}

// block returns the query positions [from, to) of block b.
func (s *span) block(b int) (from, to int) {
	return b * s.positions, min((b+1)*s.positions, s.queries)
}

// position returns the position of query position i among the keys.
func (s *span) position(i int) int { return attn.Position(s.queries, s.keys, i) }

// mask returns the mask of g for the sequence.
func (s *span) mask(g *attn.Problem) attn.Mask {
	m := g.Mask
	m.Window -= s.cut
	return m
}

// sees returns the keys [first, end) that are visible to query position i, besides sink tokens.
func (s *span) sees(g *attn.Problem, i int) (first, end int) {
	return s.mask(g).Keys(s.queries, s.keys, i)
}

// fresh returns the index of the first new key.
func (s *span) fresh() int { return s.keys - s.queries }

// common returns the keys [low, end) that are visible to all query positions [from, to). Keys before low, and keys from
// end on, are visible to some of the positions only, or depend on the tree.
func (s *span) common(g *attn.Problem, from, to int) (low, end int) {
	low, _ = s.sees(g, to-1)
	if _, end = s.sees(g, from); s.tree != nil {
		end = s.fresh()
	}
	return low, end
}

// context returns the keys that are visible to at least one of the query positions [from, to), which are cut into
// LeanTiles. The front sink tokens count as if they directly preceded the window.
func (s *span) context(g *attn.Problem, from, to int) (keys lean.Keys, front int) {
	first, end := s.mask(g).Range(s.queries, s.keys, from, to)
	front = g.SinkKeys(first)
	return lean.Keys{First: first - front, End: end}, front
}

// countTiles returns the number of LeanTiles of the query positions [from, to).
func (s *span) countTiles(g *attn.Problem, from, to int) int64 {
	if g.Invariant {
		l := s.leanTiles(g, from, to)
		return l.len()
	}
	keys, _ := s.context(g, from, to)
	return keys.Tiles(g.TileTokens)
}

// Build makes p the plan of one step. Each sequence and KV head has blocks of query positions. The rows of a block
// (position by position, and within a position the heads of the group) are the rows of an output tile. Each block has
// the LeanTiles from the first visible key of its first position to the last visible key of its last position.
//
// Build copies what it needs from g and seqs. Everything is checked first. On error p is unchanged. Errors wrap
// ErrShape or ErrPage. Rows of different sequences must not overlap, which is not checked. Run checks the sizes of
// buffers.
func (p *Plan) Build(g attn.Problem, seqs []attn.Sequence) error {
	const op = "plan"
	if err := g.Check(op); err != nil {
		return err
	}
	if err := canAttend.Do(op, &g); err != nil {
		return err
	}
	g = withDefaults(g.Reduced())
	for i := range seqs {
		if err := seqs[i].CheckSize(op, i, g.PageTokens); err != nil {
			return err
		}
		if err := seqs[i].CheckTree(op, i, g.Mask); err != nil {
			return err
		}
		if q := &seqs[i]; !g.Bias.Covers(i, q.Queries, q.Keys) {
			return attn.Errorf(op, attn.ErrShape, "sequence %d has %d queries and %d keys, the bias is of %d sequences, %d queries and %d keys",
				i, q.Queries, q.Keys, g.Bias.Sequences, g.Bias.Queries, g.Bias.Keys)
		}
	}

	own, shares := p.findPrefixes(&g, seqs)
	last, lastShared := highest(&g, own), 0
	if shares { // shared pages are checked once
		lastShared = highest(&g, p.prefix.seqs)
	}
	if max(last, lastShared) > math.MaxInt32 {
		for i := range seqs {
			if err := seqs[i].Check(op, i, g.PageTokens); err != nil {
				return err
			}
		}
	}
	if p.shares = shares; shares {
		p.layPrefixes(&g, seqs, lastShared)
	}
	p.rotation.lay(g.Rotary, seqs)
	p.lay(g, own, last)
	return nil
}

// highest returns the highest page of seqs: -1 without pages, and more than MaxInt32 if a page is negative.
func highest(g *attn.Problem, seqs []attn.Sequence) int {
	last := -1
	for i := range seqs {
		if q := &seqs[i]; q.Queries > 0 && q.Keys > 0 {
			last = max(last, int(attn.Highest(q.Live(g.PageTokens))))
		}
	}
	return last
}

// lay is Build for checked sequences without prefixes.
func (p *Plan) lay(g attn.Problem, seqs []attn.Sequence, lastPage int) {
	p.g = g
	p.sched.Reset(g.KVHeads)
	p.seqs, p.pages, p.trees = p.seqs[:0], p.pages[:0], p.trees[:0]
	p.seen, p.lists = p.seen[:0], p.lists[:0]
	p.rows, p.lastPage, p.slots, p.packed = 0, lastPage, 0, 0
	group, most := g.Group(), blockRows
	if waysFor(&g) != nil {
		most = blockRowsPacked
	}
	most = max(most/group, 1)
	keys, pairs := 0.0, 0.0 // keys that are read, and pairs of rows and keys, in each KV head
	for i := range seqs {
		q := &seqs[i]
		p.seqs = append(p.seqs, span{})
		s := &p.seqs[len(p.seqs)-1] // written in place, without a copy
		s.row, s.queries, s.keys, s.page, s.cut, s.lists = q.Row, q.Queries, q.Keys, len(p.pages), q.Cut, len(p.lists)
		if q.Tree != nil && !q.Tree.Chain() { // a chain is a causal mask
			at := len(p.trees)
			p.trees = append(p.trees, q.Tree...)
			s.tree = p.trees[at:]
		}
		p.tiles = p.tiles[:0]
		if s.queries > 0 {
			// The fewest blocks for the rows, of nearly equal sizes.
			blocks := (s.queries-1)/most + 1
			s.positions = (s.queries-1)/blocks + 1
			p.rows = max(p.rows, s.row+s.queries)
			p.packed = max(p.packed, s.positions*group)

			p.pages = append(p.pages, q.Live(g.PageTokens)...)
			p.slots = max(p.slots, min(s.keys, g.PageTokens))
		}
		for from := 0; from < s.queries; from += s.positions {
			to := min(from+s.positions, s.queries)
			n := p.see(&g, s, i, from, to, s.countTiles(&g, from, to))
			if n == 0 {
				s.masked = to
			}
			p.tiles = append(p.tiles, n)
			seen := float64(min(n*int64(g.TileTokens), int64(s.keys)))
			keys += seen
			pairs += seen * float64((to-from)*group)
		}
		p.sched.Add(p.tiles)
	}
	heads := float64(g.KVHeads)
	work := cpu.WorkOf(keys*heads*float64(g.Pages.TokenBytes()), pairs*heads*float64(g.Dim+g.ValueDim))
	p.threads = cpu.ThreadsFor(work)
	workers := g.Workers
	if workers == 0 {
		if workers = p.threads; p.packed < promptRows { // with many rows a worker has much scratch, and there are many output tiles
			workers *= cpu.SharesFor(work, p.threads, cpu.ShareNanos)
		}
	}
	p.sched.Cut(g.Policy, workers)
}

// Workers returns the number of logical workers that have work.
func (p *Plan) Workers() int {
	if p.shares {
		return max(p.sched.Workers(), p.prefix.plan.sched.Workers())
	}
	return p.sched.Workers()
}

// Tiles returns the number of LeanTiles over all KV heads.
func (p *Plan) Tiles() int64 {
	if p.shares {
		return p.sched.Tiles() + p.prefix.plan.sched.Tiles()
	}
	return p.sched.Tiles()
}
