package attention

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
)

// blockRows is the number of packed rows that a block of query positions is filled up to: so many rows
// share one pass over the keys and values. One position is the least a block holds, whatever its heads. Blocks whose keys
// and values are packed have more.
const (
	blockRows       = 64
	blockRowsPacked = 128
)

// defaultTileTokens is the number of tokens of a LeanTile unless a problem says otherwise: tiles of 128 to
// 512 tokens measured alike, less costs re-scaling, more makes loads uneven. It does not depend on the
// shape, so that a plan, and with it every rounding, follows from the problem alone.
const defaultTileTokens = 256

// withDefaults returns g with its zero values replaced by what they stand for.
func withDefaults(g attn.Problem) attn.Problem {
	if g.TileTokens == 0 {
		if g.TileTokens = defaultTileTokens; g.Invariant {
			g.TileTokens = invariantTileTokens
		}
	}
	return g
}

// Plan is the schedule of one step, and serves all its layers. The zero Plan is that of no sequences.
// It may be built again and again; once its memory has grown, that allocates nothing. Between builds it
// may be run from any number of goroutines.
type Plan struct {
	g        attn.Problem
	sched    lean.Plan
	seqs     []span
	pages    []int32 // the live pages of all sequences
	trees    []uint64
	tiles    []int64 // scratch of Build
	rows     int     // rows of Q, Out and LSE that the sequences reach over
	lastPage int     // the highest page
	slots    int     // the most slots used of a page
	packed   int     // the most packed rows of a block
	threads  int     // that a run is worth
	rotation rotation

	// PrefixBytes is how many bytes must be read less for keys that sequences have in common to be attended to
	// apart; 0: the engine's choice.
	PrefixBytes int
	prefix      *prefixPlan // nil before there were two sequences
	shares      bool        // prefix has keys of the last build
}

// span is a Sequence as the plan keeps it.
type span struct {
	row, queries, keys int
	positions          int // query positions of a block; the last block may have fewer
	masked             int // positions in the leading blocks that see no key: nobody has work there
	page               int // its first page in Plan.pages
	cut                int // see attn.Sequence

	tree attn.Tree // of the query positions; nil: none, or one that is a chain
}

// block returns the query positions [from, to) of block b.
func (s *span) block(b int) (from, to int) {
	return b * s.positions, min((b+1)*s.positions, s.queries)
}

// position returns the place of query position i among the keys.
func (s *span) position(i int) int { return attn.Position(s.queries, s.keys, i) }

// mask returns g's as it is for the sequence.
func (s *span) mask(g *attn.Problem) attn.Mask {
	m := g.Mask
	m.Window -= s.cut
	return m
}

// sees returns the keys [first, end) that query position i sees, besides sink tokens.
func (s *span) sees(g *attn.Problem, i int) (first, end int) {
	return s.mask(g).Keys(s.queries, s.keys, i)
}

// fresh returns the number of its first new key.
func (s *span) fresh() int { return s.keys - s.queries }

// common returns the keys [low, end) that all query positions [from, to) see: in front of them some see more, and
// behind them others, or all those that their tree says.
func (s *span) common(g *attn.Problem, from, to int) (low, end int) {
	low, _ = s.sees(g, to-1)
	if _, end = s.sees(g, from); s.tree != nil {
		end = s.fresh()
	}
	return low, end
}

// context returns the keys that the query positions [from, to) see: what is cut into their LeanTiles. Sink tokens, of which
// there are front, stand right before the others, as if there was nothing between them.
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

// Build makes p the plan of one step: for each sequence and KV head, blocks of query positions, whose
// rows (position by position, within it the heads of the group) are the rows of an output tile, and for
// each block the LeanTiles that its positions see, from the first one's first key to the last one's last.
//
// It copies what it needs of g and seqs. Everything is checked first; on error p is unchanged. The
// error wraps ErrShape or ErrPage. That rows of different sequences do not overlap is left to the
// caller, as are the sizes of buffers, which Run checks.
func (p *Plan) Build(g attn.Problem, seqs []attn.Sequence) error {
	const op = "plan"
	if err := g.Check(op); err != nil {
		return err
	}
	if err := canAttend.Do(op, &g); err != nil {
		return err
	}
	g = withDefaults(g)
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
	if shares { // pages that sequences share are looked at once
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

// highest is the highest page of some sequences, -1 if they have none, and more than an int32 if there is a negative one.
func highest(g *attn.Problem, seqs []attn.Sequence) int {
	last := -1
	for i := range seqs {
		if q := &seqs[i]; q.Queries > 0 && q.Keys > 0 {
			last = max(last, int(attn.Highest(q.Live(g.PageTokens))))
		}
	}
	return last
}

// lay is Build of what has been checked, each sequence by itself.
func (p *Plan) lay(g attn.Problem, seqs []attn.Sequence, lastPage int) {
	p.g = g
	p.sched.Reset(g.KVHeads)
	p.seqs, p.pages, p.trees = p.seqs[:0], p.pages[:0], p.trees[:0]
	p.rows, p.lastPage, p.slots, p.packed = 0, lastPage, 0, 0
	group, most := g.Group(), blockRows
	if waysFor(&g) != nil {
		most = blockRowsPacked
	}
	most = max(most/group, 1)
	keys, pairs := 0.0, 0.0 // that are read, and of rows and keys, in each KV head
	for i := range seqs {
		q := &seqs[i]
		p.seqs = append(p.seqs, span{})
		s := &p.seqs[len(p.seqs)-1] // it is written where it stays
		s.row, s.queries, s.keys, s.page, s.cut = q.Row, q.Queries, q.Keys, len(p.pages), q.Cut
		if q.Tree != nil && !q.Tree.Chain() { // a chain is what causal is
			at := len(p.trees)
			p.trees = append(p.trees, q.Tree...)
			s.tree = p.trees[at:]
		}
		p.tiles = p.tiles[:0]
		if s.queries > 0 {
			// As few blocks as hold the rows, of as nearly equal size as can be.
			blocks := (s.queries-1)/most + 1
			s.positions = (s.queries-1)/blocks + 1
			p.rows = max(p.rows, s.row+s.queries)
			p.packed = max(p.packed, s.positions*group)

			p.pages = append(p.pages, q.Live(g.PageTokens)...)
			p.slots = max(p.slots, min(s.keys, g.PageTokens))
		}
		for from := 0; from < s.queries; from += s.positions {
			to := min(from+s.positions, s.queries)
			n := s.countTiles(&g, from, to)
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
		if workers = p.threads; p.packed < promptRows { // of many rows each worker has much scratch, and many output tiles
			workers *= cpu.SharesFor(work, p.threads, cpu.ShareNanos)
		}
	}
	p.sched.Cut(g.Policy, workers)
}

// Workers returns the number of logical workers that the plan has work for.
func (p *Plan) Workers() int {
	if p.shares {
		return max(p.sched.Workers(), p.prefix.plan.sched.Workers())
	}
	return p.sched.Workers()
}

// Tiles returns the number of LeanTiles of the plan, over all KV heads.
func (p *Plan) Tiles() int64 {
	if p.shares {
		return p.sched.Tiles() + p.prefix.plan.sched.Tiles()
	}
	return p.sched.Tiles()
}
