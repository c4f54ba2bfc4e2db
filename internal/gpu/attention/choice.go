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
// Costs are rows times keys of the decode kernels, whose output tiles of 16 rows read each key
// once: on an H100 a multiprocessor has some 0.7 of them in a nanosecond with heads of 128.

const (
	// besideSteps is what a second launch takes: so many steps of keys of operands of one part.
	besideSteps = 2

	// A chunk takes a quarter longer beside sequences of few rows, which keep the memory busy
	// (BenchmarkGPUMixed).
	besideMore, besideOf = 5, 4
)

// stepCost is the cost of a step of cutKeys keys by k, which is one for many rows: a multiprocessor does
// k.tile.speed times as many rows and keys in the same time (BenchmarkGPUPrefill), and half as many with
// twice the products.
func (k *kernel) stepCost() int64 {
	return cutKeys * int64(k.tile.rows) * int64(k.parts) / int64(k.tile.speed)
}

// stepTime is how long a thread block takes for it, which shares a multiprocessor with others.
func (k *kernel) stepTime() int64 { return int64(k.tile.blocks) * k.stepCost() }

// runsBeside says whether a launch of k, which is one for many rows, may run beside one of the kernel for
// few: those of 9.0 can, which wait for the launch ahead at their end, and of which a
// multiprocessor has one thread block. Elsewhere one kernel has all sequences.
func (k *kernel) runsBeside() bool { return k.tile.warps == 0 }

// fewCost is the cost of a sequence by the decode kernels.
func fewCost(g *attn.Problem, c cuts, s *sequence) int64 {
	return fewTiles(g, c, s, g.Group(), tileTokens(g)) * int64(g.KVHeads) * int64(tileTokens(g)) * BlockRows
}

// fewTiles is how many LeanTiles of so many tokens they have in a head.
func fewTiles(g *attn.Problem, c cuts, s *sequence, group, tile int) (tiles int64) {
	rows := int(s.queries) * group
	for first := 0; first < rows; first += BlockRows {
		tiles += keysOf(g, c, s, first, min(first+BlockRows, rows), 1).Tiles(tile)
	}
	return tiles
}

// manyCost is the cost of a sequence by k, which is one for many rows: its products, or, where
// these are few, the reading of its keys.
func (e *Engine) manyCost(g *attn.Problem, c cuts, s *sequence, k *kernel) int64 {
	rows, steps := int(s.queries)*g.Group(), int64(0)
	for first := 0; first < rows; first += k.tile.rows {
		steps += int64(keysOf(g, c, s, first, min(first+k.tile.rows, rows), cutKeys).Len()+cutKeys-1)/cutKeys + e.fixedSteps()
	}
	return int64(g.KVHeads) * max(steps*k.stepCost(), int64(keysOf(g, c, s, 0, rows, 1).Len())*BlockRows)
}

// fewTime is when so many of some blocks are done that have the sequences of few rows, with their
// cost. The memory is not much slower for some blocks than for all: on an H100 they take a third of
// what a share of its speed would make longer, 1.10 times as long for 104 of 132 blocks, and 1.14 for 88.
func fewTime(few int64, have, blocks int) int64 {
	h, b := int64(have), int64(blocks)
	return few * (2*h + b) / (3 * h * b)
}

// shares is how many of some blocks are to have the sequences of many rows, with their cost, so that
// they are done early, and the others, too.
func shares(few, many int64, blocks int) (forMany int) {
	least := int64(math.MaxInt64)
	for m := 1; m < blocks; m++ {
		if t := max((many+int64(m)-1)/int64(m), fewTime(few, blocks-m, blocks)); t <= least {
			forMany, least = m, t
		}
	}
	return forMany
}

// division is who attends to what of a step.
type division struct {
	prefillKernels       // for sequences of many rows; nil: those for few have all
	few            int   // sequences that the decode kernel has beside them: the first of Plan.ordered
	queries        int   // of one of these, at most
	blocks         int   // that attend to the others
	workers        int   // of these, that have equal parts of output tiles; 0: whole ones are dealt out
	time           int64 // until all is done
}

// divide chooses. of are the prefill kernels that there are. It writes nothing but
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
	if p.beside > 0 || p.steady {
		if p.beside == 0 && p.form.prefill.first() == nil {
			return division{}
		}
		d := division{prefillKernels: of, blocks: e.prefillBlocks(k)}
		if p.beside > 0 {
			d.blocks = p.beside
		}
		p.dealOut(g, k, &d)
		return d
	}
	few, many, both := p.weigh(g, k)
	best := division{time: few / int64(e.blocks)}
	all := division{prefillKernels: of, blocks: e.prefillBlocks(k)}
	p.dealOut(g, k, &all)
	all.time = max(all.time, many/int64(e.blocks))
	if e.choice != takeFastest || all.time <= best.time {
		best = all
	}
	worth, always := best.time-best.time/32-besideSteps*k.stepTime()/int64(k.parts), e.choice == takeBoth || e.Eager
	if both.blocks == 0 || both.time > worth && !always {
		return best // what was dealt out is all of it, if prefill kernels have it
	}
	time := both.time
	both.prefillKernels = of
	p.dealOut(g, k, &both)
	if both.time = max(both.time*besideMore/besideOf, time); both.time <= worth || always {
		return both
	}
	if best.first() != nil {
		p.dealOut(g, k, &best)
	}
	return best
}

// dealOut lists the output tiles of k, and says for how many of its blocks they are cut, and
// when these are done.
func (p *Plan) dealOut(g *attn.Problem, k *kernel, d *division) {
	p.sortSequences(p.ordered, d.queries)
	p.prefillOutputs(g, p.ordered, d.few, d.blocks, k.tile.rows)
	workers, steps := 0, p.deal(d.blocks)
	if !p.uncut {
		workers, steps = p.cutPrefill(d.blocks, steps)
	}
	d.workers, d.time, p.dealt = workers, steps*k.stepTime(), p.engine.prefillBlocks(k)
}

// weigh is the cost of all sequences by the decode kernels and by k, which is one for
// many, and the best of the divisions that have something for both, with the time of those for
// few. Its blocks are 0 where there is none.
func (p *Plan) weigh(g *attn.Problem, k *kernel) (few, many int64, both division) {
	e, cut := p.engine, p.prefixes.cuts
	slices.SortFunc(p.ordered, func(a, b sequence) int { return cmp.Compare(a.queries, b.queries) })
	p.costs = p.costs[:0]
	for i := range p.ordered {
		c := e.manyCost(g, cut, &p.ordered[i], k)
		p.costs, many = append(p.costs, c), many+c
	}
	rest, least := many, int64(math.MaxInt64)
	for i := range p.ordered {
		s := &p.ordered[i]
		few, rest = few+fewCost(g, cut, s), rest-p.costs[i]
		behind := i+1 < len(p.ordered) && s.queries < p.ordered[i+1].queries // others have more
		if !behind || p.fused || !k.runsBeside() || e.choice == takeMany || e.choice == takeFastest && int(s.queries)*g.Group() > k.tile.rows {
			continue
		}
		beside := rest * besideMore / besideOf
		m := shares(few, beside, e.blocks)
		if m == 0 {
			continue // one block
		}
		reads := fewTime(few, e.blocks-m, e.blocks)
		if t := max(reads, beside/int64(m)); t < least {
			least, both = t, division{few: i + 1, queries: int(s.queries), blocks: m, time: reads}
		}
	}
	return few, many, both
}

// choice is what plans take where several kernels could do something: tests have other than the
// fastest.
type choice uint8

const (
	takeFastest choice = iota
	takeMany           // prefill kernels
	takeBoth           // both, where there is something for each, else those for many
)
