package attention

import (
	"cmp"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
)

// This file chooses the kernels of each sequence of a step: decode kernels, prefill kernels, or both beside each other.
// Beside each other, decode kernels keep the memory busy and prefill kernels the tensor cores, each on some of the
// multiprocessors.
//
// Costs are rows times keys of the decode kernels. Their output tiles of 16 rows read each key once. On an H100 with
// heads of 128, a multiprocessor does about 0.7 rows times keys a nanosecond.

const (
	// besideSteps is the cost of a second launch, in steps of cutKeys keys with operands of one part.
	besideSteps = 2

	// A chunk takes a quarter longer beside decode sequences, which keep the memory busy (BenchmarkGPUMixed).
	besideMore, besideOf = 5, 4
)

// stepCost returns the cost of a step of cutKeys keys by k, a prefill kernel. In the same time a multiprocessor does
// k.tile.speed times as many rows times keys as by a decode kernel (BenchmarkGPUPrefill). Operands of two parts have
// twice the products and take twice as long.
func (k *kernel) stepCost() int64 {
	return cutKeys * int64(k.tile.rows) * int64(k.parts) / int64(k.tile.speed)
}

// stepTime returns the time of a step in a thread block that shares its multiprocessor with tile.blocks-1 others.
func (k *kernel) stepTime() int64 { return int64(k.tile.blocks) * k.stepCost() }

// runsBeside reports whether a launch of k, a prefill kernel, may run beside a decode launch. Kernels of 9.0 may: they
// wait for the previous launch at their end, and have one thread block on a multiprocessor. Elsewhere one kernel
// attends to all sequences.
func (k *kernel) runsBeside() bool { return k.tile.warps == 0 }

// fewCost returns the cost of a sequence by the decode kernels.
func fewCost(g *attn.Problem, c cuts, s *sequence) int64 {
	return fewTiles(g, c, s, g.Group(), tileTokens(g)) * int64(g.KVHeads) * int64(tileTokens(g)) * BlockRows
}

// fewTiles returns the number of LeanTiles, of `tile` tokens each, of a sequence in one head.
func fewTiles(g *attn.Problem, c cuts, s *sequence, group, tile int) (tiles int64) {
	rows := int(s.queries) * group
	for first := 0; first < rows; first += BlockRows {
		tiles += keysOf(g, c, s, first, min(first+BlockRows, rows), 1).Tiles(tile)
	}
	return tiles
}

// manyCost returns the cost of a sequence by k, a prefill kernel: its products or the reading of its keys, whichever is
// more.
func (e *Engine) manyCost(g *attn.Problem, c cuts, s *sequence, k *kernel) int64 {
	rows, steps := int(s.queries)*g.Group(), int64(0)
	for first := 0; first < rows; first += k.tile.rows {
		steps += int64(keysOf(g, c, s, first, min(first+k.tile.rows, rows), cutKeys).Len()+cutKeys-1)/cutKeys + e.fixedSteps()
	}
	return int64(g.KVHeads) * max(steps*k.stepCost(), int64(keysOf(g, c, s, 0, rows, 1).Len())*BlockRows)
}

// fewTime returns the time in which `have` of `blocks` thread blocks attend to decode sequences of cost few. Bandwidth
// falls more slowly than the number of blocks: the slowdown is a third of a proportional one. On an H100 104 of 132
// blocks take 1.10 times as long, and 88 blocks 1.14 times.
func fewTime(few int64, have, blocks int) int64 {
	h, b := int64(have), int64(blocks)
	return few * (2*h + b) / (3 * h * b)
}

// shares returns how many of `blocks` thread blocks attend to the prefill sequences, of cost many, so that decode and
// prefill sequences end earliest.
func shares(few, many int64, blocks int) (forMany int) {
	least := int64(math.MaxInt64)
	for m := 1; m < blocks; m++ {
		if t := max((many+int64(m)-1)/int64(m), fewTime(few, blocks-m, blocks)); t <= least {
			forMany, least = m, t
		}
	}
	return forMany
}

// division says which kernels and thread blocks attend to the sequences of a step.
type division struct {
	prefillKernels       // of the prefill sequences; nil: the decode kernel attends to all
	few            int   // decode sequences beside them: the first of Plan.ordered
	queries        int   // largest number of queries of a decode sequence
	blocks         int   // thread blocks of the prefill sequences
	workers        int   // blocks among which output tiles are cut evenly; 0: each block has whole output tiles
	time           int64 // of the longest block
}

// divide chooses the division of a step; `of` are the available prefill kernels. divide writes only scratch.
func (p *Plan) divide(g *attn.Problem, seqs []attn.Sequence, of prefillKernels) division {
	k, e := of.taken(g, false), p.engine
	if k == nil {
		return division{}
	}
	p.ordered = p.ordered[:0]
	if hides(g) {
		p.written.prompts.begin(seqs)
	}
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
		return best // the output tiles listed last are those of best, if prefill kernels attend to any
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

// dealOut lists the output tiles of k and assigns them to thread blocks. It sets d.workers and d.time.
func (p *Plan) dealOut(g *attn.Problem, k *kernel, d *division) {
	p.sortSequences(p.ordered, d.queries)
	p.prefillOutputs(g, p.ordered, d.few, d.blocks, k.tile.rows)
	workers, steps := 0, p.deal(d.blocks)
	if !p.uncut {
		workers, steps = p.cutPrefill(d.blocks, steps)
	}
	d.workers, d.time, p.prefillGrid = workers, steps*k.stepTime(), p.engine.prefillBlocks(k)
}

// weigh returns the cost of all sequences by the decode kernels and by k, a prefill kernel, and the fastest division
// with sequences for both. The division's time is that of its decode sequences. Without such a division its blocks are
// 0.
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
		behind := i+1 < len(p.ordered) && s.queries < p.ordered[i+1].queries // later sequences have more queries
		if !behind || p.fused || !k.runsBeside() || e.choice == takePrefill || e.choice == takeFastest && int(s.queries)*g.Group() > k.tile.rows {
			continue
		}
		beside := rest * besideMore / besideOf
		m := shares(few, beside, e.blocks)
		if m == 0 {
			continue // there is one block
		}
		reads := fewTime(few, e.blocks-m, e.blocks)
		if t := max(reads, beside/int64(m)); t < least {
			least, both = t, division{few: i + 1, queries: int(s.queries), blocks: m, time: reads}
		}
	}
	return few, many, both
}

// choice is the preference of plans among the kernels that can do a step. Only tests have another than the fastest.
type choice uint8

const (
	takeFastest choice = iota
	takePrefill        // prefill kernels alone
	takeBoth           // decode and prefill kernels if there are sequences for each, else prefill kernels
)
