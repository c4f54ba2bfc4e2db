package attention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Rotary embeddings: one launch rotates a layer's queries, and rotates its new keys and stores them in their pages.

const (
	rotaryPairs = 128 // ROTARY_PAIRS: half the largest head dim
)

// rotaryParams is struct RotaryAppendParams.
type rotaryParams struct {
	Append                   appendParams
	query, turned, positions uint64 // addresses
	queryRow, queryHead      int64
	queryHeads, queryType    int32
	pairs, interleaved       int32
	factor                   float32
	each, first              int32 // thread blocks of a row; the first rotated element of a head
	_                        [4]byte
	turns                    [rotaryPairs]attn.Turning
}

// rotated is the part of a plan for rotary embeddings.
type rotated struct {
	positions list[int64] // of each token row
	rotary    rotaryParams
	rotatedQ  gpu.Memory // rotated queries of the last AppendRotated since Build
}

func (r *rotated) lists() []entries { return []entries{&r.positions} }

// size sets the length of the list, for a step of `rows` rows and for the largest reserved step.
func (r *rotated) size(g *attn.Problem, rows, least int) {
	if !rotates(g) {
		rows, least = 0, 0
	}
	r.positions.want(rows, least, 0)
}

// rotates reports whether g has a rotary embedding.
func rotates(g *attn.Problem) bool { return g.Rotary != attn.Rotary{} }

// loadRotary loads the kernel if g needs it.
func (e *Engine) loadRotary(g *attn.Problem) error {
	e.loading.Lock()
	defer e.loading.Unlock()
	if !rotates(g) || isCoded(g) || e.rotary != nil {
		return nil
	}
	m, err := gpu.Module(e.dev, appendUnit)
	if err != nil {
		return err
	}
	e.rotary, err = m.Function(rotaryEntry)
	return err
}

// listPositions writes the position of each row's token in its sequence, and -1 for a row without a token.
func (p *Plan) listPositions(g *attn.Problem, seqs []attn.Sequence, rows int) {
	p.positions.data = p.positions.data[:0]
	if !rotates(g) {
		return
	}
	for range rows {
		p.positions.data = append(p.positions.data, -1)
	}
	for i := range seqs {
		q := &seqs[i]
		for j := range min(q.Queries, rows-q.Row) { // with rows 0 there is nothing to append
			p.positions.data[q.Row+j] = int64(q.Position(j))
		}
	}
}

// AppendRotated is AppendRows for a plan whose problem has a rotary embedding. It rotates the new keys that have slots, and all queries
// q into rotated. Run then attends with rotated as its Q. Both q and rotated have the problem's strides and one type, and
// share no memory.
func (p *Plan) AppendRotated(s *cuda.Stream, to Pages, newK, newV, q, rotated gpu.Memory, heads int) error {
	const op = "append"
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.ready(op); err != nil {
		return err
	}
	if p.form.idle {
		return nil
	}
	g := &p.form.geometry
	if !rotates(g) {
		return gpu.Errorf(op, attn.ErrShape, "the problem has no rotary embedding")
	}
	if err := p.packAppend(op, &to, newK, newV, heads); err != nil {
		return err
	}
	query := p.form.spread.queries(g)
	extent := query.Extent(p.form.rows, g.Heads, g.Pages.KeyDim())
	if err := q.Check(op, "q", extent); err != nil {
		return err
	}
	if err := rotated.Check(op, "the rotated q", extent); err != nil {
		return err
	}
	if q.DType != rotated.DType {
		return gpu.Errorf(op, attn.ErrDType, "q is %v, the rotated q %v", q.DType, rotated.DType)
	}
	if from, to, n := q.Address(), rotated.Address(), uint64(extent*q.DType.Size()); from < to+n && to < from+n {
		return gpu.Errorf(op, attn.ErrShape, "q and the rotated q have memory in common")
	}
	r := &p.rotary
	*r = rotaryParams{
		Append: p.newRows, query: q.Address(), turned: rotated.Address(), positions: p.positions.address(&p.memory),
		queryRow: int64(query.Row), queryHead: int64(query.Head), queryHeads: int32(g.Heads), queryType: gpu.Code(q.DType),
		pairs: int32(g.Rotary.Turns.Len()), first: int32(g.Rotary.First), factor: float32(g.Rotary.Factor),
	}
	if g.Rotary.Interleaved {
		r.interleaved = 1
	}
	for i := range g.Rotary.Turns.Len() {
		r.turns[i] = g.Rotary.Turns.Of(i)
	}
	if isCoded(g) {
		if err := p.storeCoded(s, &to, r, newK.Buffer, newV.Buffer, q.Buffer, rotated.Buffer); err != nil {
			return err
		}
		p.rotatedQ = rotated
		return nil
	}
	each := p.engine.blocksOfRow(g, p.form.rows)
	r.each = int32(each)
	p.args.Reset()
	cuda.Struct(&p.args, r)
	for _, b := range [...]*cuda.Buffer{to[0].Data.Buffer, to[p.form.geometry.Pages.Value.Plane].Data.Buffer, newK.Buffer, newV.Buffer, q.Buffer, rotated.Buffer, p.memory.table} {
		p.args.Hold(b)
	}
	grid := cuda.Grid{Blocks: [3]int{p.form.rows * each}, Threads: [3]int{appendThreads}, Overlap: p.engine.hasCopyEngine()}
	if err := p.engine.rotary.Launch(s, grid, &p.args); err != nil {
		return err
	}
	if err := p.appendValues(s, &to, newV); err != nil {
		return err
	}
	p.stores(&to)
	p.rotatedQ = rotated
	return nil
}

// blocksOfRow returns the number of thread blocks of a row: enough for all multiprocessors, if there is work for them.
func (e *Engine) blocksOfRow(g *attn.Problem, rows int) int {
	all := attn.Ceil((g.Heads+2*g.KVHeads)*g.Dim/4, appendThreads)
	return min(all, attn.Ceil(e.blocks, rows))
}
