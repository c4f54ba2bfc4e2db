package leanattention

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/kvstore"
)

// Append assigns the next Tokens rows of a step to a sequence, as its next tokens.
type Append struct {
	Seq    *Sequence
	Tokens int // at least 1

	// Parents, if not nil, make the new tokens a tree: Parents[i] is the new token that token i follows, and -1 is the last
	// token of the sequence. A token sees the sequence, its ancestors and itself. nil is a chain: each token sees all before
	// it. Trees serve speculative decoding (Miao et al., arXiv:2305.09781).
	//
	//   - Each parent comes before its token. A tree has a parent for each token, and at most 64 tokens.
	//   - Layers take [WithCausal], and neither [WithWindow] nor [WithALiBi]: else Set is [ErrUnsupported].
	//   - Keys and values lie in the order of the rows. Commit keeps all of them; [Sequence.Keep] then keeps a branch.
	//   - On a GPU kernels for masks attend to all rows of such a step. NaN in the value of a new token may reach tokens that
	//     do not see it, as with WithCausal.
	Parents []int

	// Positions, if not nil, has the position of each new token, in [0, 2^31), for [WithRotary] and [Step.Positions]. The default
	// is the index in the sequence. Positions serve models that number tokens otherwise: padding without a position, parts
	// of a prompt that each begin at 0, texts without their beginning.
	//
	//   - Positions need no order.
	//   - A sequence does not store Positions: its keys are rotated already, and later tokens without Positions get their index.
	//   - Masks, windows and ALiBi use the index, not Positions.
	Positions []int

	// QueryOnly says that the row queries the sequence's tokens, and that its key and value are not stored: the sequence remains as it
	// is, and may be empty. It serves a context that is sharded over processes (nn.MergeRanks): one of them stores a token, and all
	// attend. Layers have the log-sum-exp of the row.
	//
	//   - Tokens is 1, and Parents nil. Positions has the row's position; the default is the number of tokens.
	//   - The cache is in host memory, on one GPU, or on several GPUs that share heads. Layers are CachedAttention without [WithWindow],
	//     [WithALiBi] and [WithSinks]. Otherwise Set is [ErrUnsupported].
	QueryOnly bool
}

// checkPositions checks the positions of append i.
func checkPositions(op string, i int, a *Append) error {
	if !a.positioned() {
		return errs.Errorf(op, ErrShape, "append %d has %d positions for %d tokens", i, len(a.Positions), a.Tokens)
	}
	for j, p := range a.Positions {
		if p < 0 || p > math.MaxInt32 {
			return errs.Errorf(op, ErrLength, "append %d: token %d is at position %d, outside [0, %d]", i, j, p, math.MaxInt32)
		}
	}
	return nil
}

// canQuery lists the features of attention by rows whose keys are not stored. Such a row sees all tokens of its sequence.
var canQuery = attn.Can{
	Name:     "attention of a row that is QueryOnly",
	Features: attn.InParts&^(attn.Trees|attn.Sinks) | attn.Rotates | attn.RotatesBehind | attn.MixedKeys | attn.BatchInvariance,
	KV:       []attn.DType{attn.Float32, attn.Float64, attn.Float16, attn.BFloat16, attn.E4M3, attn.Int8, attn.Q4},
}

// checkQuery checks append i, which is QueryOnly.
func (s *Step) checkQuery(op string, i int, a *Append) error {
	switch c := &s.cache.config; {
	case a.Tokens != 1 || a.Parents != nil:
		return errs.Errorf(op, ErrUnsupported, "append %d is QueryOnly, with %d tokens and a tree: %v: want one token and no tree", i, a.Tokens, a.Parents != nil)
	case c.Device != nil && !s.cache.queriesThere():
		return errs.Errorf(op, ErrUnsupported, "append %d is QueryOnly, and the cache is on %s: keep the cache in host memory, or on GPUs that share heads", i, s.cache.store.Where())
	case c.Window != 0:
		return errs.Errorf(op, ErrUnsupported, "append %d is QueryOnly, and the cache keeps a Window of %d tokens", i, c.Window)
	}
	for _, p := range s.plans {
		if err := p.queryFits(op); err != nil {
			return err
		}
		if g := &p.geometry; s.cache.config.Device != nil && g.Rotary != (attn.Rotary{}) && !g.Pages.InKeys() && (kvstore.HasScales(s.cache.config.DType) || s.cache.config.DType == Q4) {
			return errs.Errorf(op, ErrUnsupported, "append %d is QueryOnly, and the cache on %s has %v with WithRotary: use 16 bits", i, s.cache.store.Where(), s.cache.config.DType)
		}
	}
	return nil
}

// queriesThere reports whether a cache on GPUs takes rows that are QueryOnly: each GPU has all tokens of a sequence.
func (c *Cache) queriesThere() bool {
	d, ok := c.store.(*kvstore.DevicePages)
	return ok && d.Shards() == 1
}

// queryFits returns an error if the layers of a plan do not support rows that are QueryOnly.
func (p *stepPlan) queryFits(op string) error {
	if err := canQuery.Do("attend", &p.geometry); err != nil {
		return errs.Errorf(op, ErrUnsupported, "%v", err)
	}
	return nil
}

// treeFits returns an error if the layers of a plan do not support trees.
func (s *Step) treeFits(op string, p *stepPlan) error {
	g := p.geometry
	if err := g.TreeFits(); err != nil {
		return errs.Errorf(op, ErrUnsupported, "a sequence has a tree, and a layer can't do it: %v", err)
	}
	g.Tree = true
	return s.cache.store.Supports(op, &g)
}

// commit moves a reservation to the table of its sequence, and drops tokens that no window reaches. The caller holds mu.
func (c *Cache) commit(op string, r *reservation) error {
	if r.tokens == 0 {
		r.seq.step = nil
		return nil
	}
	t := &r.seq.table
	err := c.pool.Commit(&r.Reservation)
	if gap := c.config.behind(t.Tokens); err == nil && gap.End > max(gap.First, t.Gap.End) {
		err = c.pool.Drop(t, gap)
	}
	if err != nil {
		return pagesError(op, err)
	}
	r.seq.step = nil
	c.tokens += r.tokens
	return nil
}
