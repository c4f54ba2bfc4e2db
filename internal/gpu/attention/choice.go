package attention

import (
	"cmp"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
)

// Which kernels attend to which sequences of a step: those for few rows, those for many, or both,
// one beside the other. Then those for few rows keep the memory busy, and those for many the
// tensor cores, each on some of the multiprocessors.
//
// Costs are rows times keys of the kernels for few rows, whose output tiles of 16 rows read each key
// once: on an H100 a multiprocessor has some 0.7 of them in a nanosecond with heads of 128.

const (
	// A multiprocessor does ten times as many rows and keys in the same time by the kernels for
	// many rows, and five times as many with twice the products (BenchmarkGPUPrefill).
	faster = 10

	// besideSteps is what a second launch takes: so many steps of keys of operands of one part.
	besideSteps = 2

	// Five of six multiprocessors keep the memory busy: see Engine.blockEach.
	busy, busyOf = 5, 6
)

// stepCost is the cost of a step of cutKeys keys.
func (k *kernel) stepCost() int64 {
	return cutKeys * int64(k.tile.rows) * int64(k.way.parts) / faster
}

// fewCost is the cost of a sequence by the kernels for few rows.
func fewCost(g *attn.Problem, s *sequence) (cost int64) {
	rows := int(s.queries) * g.Group()
	for first := 0; first < rows; first += BlockRows {
		cost += keysOf(g, s, first, min(first+BlockRows, rows)).Tiles(tileTokens(g))
	}
	return cost * int64(g.KVHeads) * int64(tileTokens(g)) * BlockRows
}

// manyCost is the cost of a sequence by k, which is one for many rows: its products, or, where
// these are few, the reading of its keys.
func (e *Engine) manyCost(g *attn.Problem, s *sequence, k *kernel) int64 {
	rows, steps := int(s.queries)*g.Group(), int64(0)
	for first := 0; first < rows; first += k.tile.rows {
		steps += int64(keysOf(g, s, first, min(first+k.tile.rows, rows)).Len()+cutKeys-1)/cutKeys + e.fixedSteps()
	}
	return int64(g.KVHeads) * max(steps*k.stepCost(), int64(s.keys)*BlockRows*busy/busyOf)
}

// shares is how many of some blocks are to attend to the sequences of many rows, so that they are
// done with their cost when the others are done with theirs, and when that is.
func shares(few, many int64, blocks int) (forMany int, time int64) {
	time = math.MaxInt64
	for m := 1; m < blocks; m++ {
		reading := min(int64(blocks-m)*busyOf, int64(blocks)*busy)
		if t := max((many+int64(m)-1)/int64(m), few*busy/reading); t <= time {
			forMany, time = m, t
		}
	}
	return forMany, time
}

// division is who attends to what of a step.
type division struct {
	prefillKernels     // for sequences of many rows; nil: those for few have all
	few            int // sequences that the kernel for few rows has beside them: the first of Plan.ordered
	queries        int // of one of these, at most
	blocks         int // that attend to the others
	workers        int // of these, that have equal parts of output tiles; 0: whole ones are dealt out
}

// divide chooses. of are the kernels for many rows that there are. It writes nothing but
// scratch.
func (p *Plan) divide(g *attn.Problem, seqs []attn.Sequence, of prefillKernels) division {
	k, e := of.taken(g), p.engine
	if k == nil {
		return division{}
	}
	p.ordered = p.ordered[:0]
	for i := range seqs {
		if s := &seqs[i]; s.Queries > 0 {
			p.ordered = append(p.ordered, sequence{row: int32(s.Row), queries: int32(s.Queries), keys: int32(s.Keys)})
		}
	}
	both, besides, few, many := p.divideBoth(g, k)
	sortSequences(p.ordered, 0)
	p.prefillOutputs(g, p.ordered, 0, e.blocks, k.tile.rows)
	workers, steps := p.cutPrefill(e.blocks, p.deal(e.blocks))
	few, many = few/int64(e.blocks), max(steps*k.stepCost(), many/int64(e.blocks))
	least := min(few, many)
	switch {
	case both.blocks > 0 && (e.choice == takeBoth || e.choice == takeFastest && besides < least-least/32):
		both.prefillKernels = of
		sortSequences(p.ordered, both.queries)
		p.prefillOutputs(g, p.ordered, both.few, both.blocks, k.tile.rows)
		both.workers, _ = p.cutPrefill(both.blocks, p.deal(both.blocks))
		return both
	case e.choice == takeFastest && many > few:
		return division{}
	}
	return division{prefillKernels: of, blocks: e.blocks, workers: workers}
}

// divideBoth is the best of the divisions that have something for both kinds of kernels, without its
// workers, and its time; blocks is 0 where there is none. few and many are the costs of all sequences by
// either kind.
func (p *Plan) divideBoth(g *attn.Problem, k *kernel) (best division, time, few, many int64) {
	slices.SortFunc(p.ordered, func(a, b sequence) int { return cmp.Compare(a.queries, b.queries) })
	p.costs = p.costs[:0]
	for i := range p.ordered {
		c := p.engine.manyCost(g, &p.ordered[i], k)
		p.costs, many = append(p.costs, c), many+c
	}
	rest := many
	for i := range p.ordered {
		s := &p.ordered[i]
		few, rest = few+fewCost(g, s), rest-p.costs[i]
		if i+1 == len(p.ordered) || s.queries == p.ordered[i+1].queries || p.fused || int(s.queries)*g.Group() > k.tile.rows {
			continue
		}
		if m, t := shares(few, rest, p.engine.blocks); m > 0 && (best.blocks == 0 || t < time) {
			best, time = division{few: i + 1, queries: int(s.queries), blocks: m}, t
		}
	}
	return best, time + besideSteps*k.stepCost()/int64(k.way.parts), few, many
}

// choice is what plans take where several kernels could do something: tests have other than the
// fastest.
type choice uint8

const (
	takeFastest choice = iota
	takeMany           // kernels for many rows
	takeBoth           // both, where there is something for each, else those for many
)
