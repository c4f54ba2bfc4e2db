package attention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// This file lists a step's schedule, for figures and tests.

// Share is the part of one output tile that a thread block attends to.
type Share struct {
	Sequence, Head, Block int   // the output tile: index of the sequence in Build's argument, KV head, block of rows
	Begin, End            int64 // LeanTiles [Begin, End) of it
	Tiles                 int64 // LeanTiles of the output tile
}

// Launch is one launch of attention.
type Launch struct {
	Entry  string    // the kernel
	Rows   int       // of an output tile, at most
	Tokens int       // of a LeanTile; with prefill kernels of a step of keys
	Blocks [][]Share // of each thread block, in the order of execution
	Hybrid bool      // some thread blocks have whole output tiles after their range: Policy.Hybrid
}

// Schedule has the attention launches of a step, which run beside each other, and the bytes of a plan's workspace for
// partials.
type Schedule struct {
	Launches  []Launch
	Workspace int64
}

// ScheduleOf returns the schedule of a step on a GPU described by info, without the GPU. info must have the capability,
// multiprocessors and shared memory. Without a memory clock and bus width, ScheduleOf takes those of an H200. Errors
// are those of [Plan.Build], without the driver's.
func ScheduleOf(info cuda.Info, g attn.Problem, seqs []attn.Sequence) (Schedule, error) {
	e := &Engine{info: info, blocks: max(info.Multiprocessors, 1), kernels: kernelsOf(info.Capability)}
	p := e.NewPlan()
	const op = "schedule"
	if err := supports(op, &g, e.kernels); err != nil {
		return Schedule{}, err
	}
	spread := p.spreadsFor(&g, seqs)
	g = spread.problem(g)
	form, need, who, err := p.choose(op, &g, seqs, 0)
	if err != nil {
		return Schedule{}, err
	}
	if g.Unfused {
		return Schedule{}, gpu.Errorf(op, attn.ErrUnsupported, "unfused attention has no schedule")
	}
	p.assign(&g, seqs, 0, &form, who)
	s := Schedule{Launches: p.launches(seqs, &form, who)}
	rows := form.kernel.tileRows(g.Group(), need.Queries)
	size := e.workspaceOf(rows, g.ValueDim)
	s.Workspace = size.partials + size.counters + size.tagged + size.runs
	if g.Invariant {
		s.Workspace += e.statesBytes(&g, need.tiles, need.longest, rows)
	}
	if who.workers > 0 {
		s.Workspace += e.partBytes(who.first())
	}
	return s, nil
}

// outputOf returns the sequence n of an output tile of prefill kernels, the first row of the step's sequence that has the rows of n, and the
// number of the output tile in the step's sequence. See frontRows.
func (p *Plan) outputOf(g *attn.Problem, t *prefillTile) (n *sequence, row int32, block int) {
	if !isPlain(g) {
		n = &p.seqs.data[t.seq]
		return n, n.row, int(t.block)
	}
	n = &p.prefillSeqs.data[t.seq]
	front := &p.prefillSeqs.data[t.seq&^1]
	if block = int(t.block); n != front && front.queries > 0 {
		block++
	}
	return n, front.row, block
}

// launches lists the launches of the assigned step.
func (p *Plan) launches(seqs []attn.Sequence, form *form, who division) (all []Launch) {
	g := &form.geometry
	number := make(map[int32]int, len(seqs)) // by first row, which no two sequences share
	for i := range seqs {
		if seqs[i].Queries > 0 {
			number[int32(seqs[i].Row)] = i
		}
	}
	if k := who.taken(g, false); k != nil {
		l := Launch{Entry: k.entries[0], Rows: k.tile.rows, Tokens: cutKeys, Blocks: make([][]Share, p.prefillGrid)}
		for b := range l.Blocks {
			for _, t := range p.prefilling.data[p.prefillStarts.data[b]:p.prefillStarts.data[b+1]] {
				n, row, block := p.outputOf(g, &t)
				rows, first := int(n.queries)*g.Group(), int(t.block)*k.tile.rows
				share := Share{Sequence: number[row], Head: int(t.head), Block: block, Begin: int64(t.first) / cutKeys}
				share.End, share.Tiles = share.Begin+t.steps(), keysOf(g, p.prefixes.cuts, n, first, min(first+k.tile.rows, rows), 1).Tiles(cutKeys)
				l.Blocks[b] = append(l.Blocks[b], share)
			}
		}
		all = append(all, l)
		if !form.both {
			return all
		}
	}
	l := Launch{Entry: form.kernel.entries[0], Rows: form.tileRows, Tokens: tileTokens(g), Blocks: make([][]Share, p.engine.blocks)}
	for b := range p.sched.Workers() {
		l.Hybrid = l.Hybrid || p.works.data[b].wholeTiles > 0
		for it := p.sched.Work(b); ; {
			k, ok := it.Next()
			if !ok {
				break
			}
			if p.sequences > 0 {
				k.Seq, k.Block = k.Seq%p.sequences, k.Seq/p.sequences
			}
			l.Blocks[b] = append(l.Blocks[b], Share{number[p.seqs.data[k.Seq].row], k.Head, k.Block, k.Begin, k.End, k.Tiles})
		}
	}
	return append(all, l)
}
