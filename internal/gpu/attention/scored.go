package attention

import (
	"math"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/lean"
)

// Masks other than causal, and score modifications (kernels/attn_variant.cuh). Scores are of base 4: numbers that are
// added to scores are multiplied by log4(e) first.

// scoredFeatures are the features of kernels with scores beyond plain kernels. A new score change is one of
// changeFeatures, a number in scoreParams that scoresOf fills, and a step of modifyScores in attn_variant.cuh.
const (
	scoredFeatures = maskFeatures | changeFeatures
	maskFeatures   = attn.Window | attn.SinkTokens | attn.Trees | attn.Sinks
	changeFeatures = attn.Cap | attn.SlopesOfHeads | attn.AddedBias // score changes
)

// scoredParams is struct ScoredLaunchParams.
type scoredParams struct {
	keyMap, valueMap cuda.TensorMap
	Params
	score      scoreParams
	meet       meetParams
	prefetched uint64 // an address; 0: the kernel does not read prefetched entries
	_          [(mapAlign - (unsafe.Sizeof(Params{})+unsafe.Sizeof(scoreParams{})+unsafe.Sizeof(meetParams{})+8)%mapAlign) % mapAlign]byte
}

// scoreParams is struct ScoreParams.
type scoreParams struct {
	slopes, sinks, bias, trees, details, cuts uint64 // addresses
	biasSequence, biasHead, biasRow           int64
	cap, reciprocal, biasFactor               float32
	biasType, window, sinkTokens              int32
	changes, invariant                        int32
}

// seqDetail is struct SeqDetail.
type seqDetail struct{ number, tree int32 }

// scored is the part of a plan for masks and score changes.
type scored struct {
	slopes  list[float32]   // ALiBi slopes of the query heads, to base 4; empty: none
	details list[seqDetail] // of each of seqs, with a bias or possible trees
	trees   list[uint64]    // masks of the trees
	cuts    list[int32]     // with prefixes and a window, of each token row: see cuts

	numbers []numbered // scratch of Build: the sequences with their numbers

	scoredParams scoredParams
}

func (c *scored) lists() []entries { return []entries{&c.slopes, &c.details, &c.trees, &c.cuts} }

// size sets the lengths of the lists.
func (c *scored) size(g *attn.Problem, need *stepSize, least *Capacity) {
	c.slopes.want(g.Slopes.Len(), 0, 0)
	c.details.want(0, 0, 0)
	if hasDetails(g) {
		c.details.want(need.Sequences, least.Sequences, 0)
	}
	c.trees.want(need.trees, 0, 0)
	if g.Tree {
		c.trees.want(need.trees, least.Rows, 0)
	}
	c.cuts.want(0, 0, 0) // layPrefixes sets the length
}

// listSlopes writes the slopes of the query heads.
func (p *Plan) listSlopes(g *attn.Problem) {
	p.slopes.data = p.slopes.data[:0]
	for h := range g.Slopes.Len() {
		p.slopes.data = append(p.slopes.data, float32(g.Slopes.Of(h)*lean.Log4E))
	}
}

// hasDetails reports whether kernels need the numbers of sequences.
func hasDetails(g *attn.Problem) bool {
	return g.Bias != (attn.Bias{}) || g.Tree || g.Variant != nil
}

// numbered is a sequence with its index in the argument of Build.
type numbered struct {
	sequence
	number int32
}

// listDetails writes the numbers and the trees of sequences, in the order of sortSequences. all is the argument of
// Build.
func (p *Plan) listDetails(g *attn.Problem, all []attn.Sequence, queries int) {
	p.details.data, p.trees.data = p.details.data[:0], p.trees.data[:0]
	if !hasDetails(g) {
		return
	}
	slices.SortFunc(p.numbers, func(a, b numbered) int { return inOrder(a.sequence, b.sequence, queries) })
	for _, n := range p.numbers {
		d := seqDetail{number: n.number, tree: -1}
		if tree := all[n.number].Tree; tree != nil {
			d.tree, p.trees.data = int32(len(p.trees.data)), append(p.trees.data, tree...)
		}
		p.details.data = append(p.details.data, d)
	}
}

// biasStrides returns the strides of a bias; 0 for a shared dimension.
func biasStrides(b *attn.Bias) (sequence, head, row int64) {
	stride := func(size, of int) int64 {
		if size == 1 {
			return 0
		}
		return int64(of)
	}
	return stride(b.Sequences, b.Heads*b.Queries*b.Keys), stride(b.Heads, b.Queries*b.Keys), stride(b.Queries, b.Keys)
}

// scoresOf returns the parameters of kernels for masks and score changes.
func (p *Plan) scoresOf(g *attn.Problem, o *Operands, k *kernel) (score scoreParams) {
	if k.changes {
		score.changes = 1
	}
	if g.Invariant {
		score.invariant = 1
	}
	score.window, score.sinkTokens = int32(min(g.Window, math.MaxInt32)), int32(min(g.SinkTokens, math.MaxInt32))
	if g.Cap != 0 {
		score.cap, score.reciprocal = float32(g.Cap*lean.Log4E), float32(1/(g.Cap*lean.Log4E))
	}
	if len(p.slopes.data) > 0 {
		score.slopes = p.slopes.address(&p.memory)
	}
	if g.Sinks {
		score.sinks = o.Sinks.Address() // the kernel multiplies them
	}
	if g.Bias != (attn.Bias{}) {
		score.bias, score.biasType, score.biasFactor = o.Bias.Address(), gpu.Code(o.Bias.DType), float32(g.Bias.Factor()*lean.Log4E)
		score.biasSequence, score.biasHead, score.biasRow = biasStrides(&g.Bias)
	}
	if g.Tree { // even if no sequence has a tree now: a recording may be replayed with trees
		score.trees = p.trees.address(&p.memory)
	}
	if hasDetails(g) {
		score.details = p.details.address(&p.memory)
	}
	if len(p.cuts.data) > 0 {
		score.cuts = p.cuts.address(&p.memory)
	}
	return score
}
