package attention

import (
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// This file has heads of widths that no kernel has, and values of another width than keys (kernels/attn_spread.cuh). A kernel of a larger
// width reads the keys and values. The copy engine divides a row among the kernel's column blocks and fills the rest of each block
// with zeros, without reading memory for the zeros. A launch before the kernel spreads the rows of queries in the same way. A launch after
// the kernel gathers the outputs.

const (
	spreadUnit    = "spread"
	spreadEntry   = "spread_rows"
	gatherOutputs = "gather_rows"
	spreadThreads = 256
	spreadBlocks  = 8 // of a multiprocessor, at most
)

// columns is struct Spread. A row that needs no gaps between column blocks is one block.
type columns struct{ dim, block, taken, step int32 }

// whole returns the columns of rows of the kernel's width.
func whole(dim int) columns { return columns{dim: int32(dim), block: int32(dim), taken: int32(dim)} }

// spreadOver returns how rows of dim elements lie in rows of a kernel's width. ok reports whether the copy engine supports the pair: the
// column blocks of a copy have equal numbers of elements, at equal distances.
func spreadOver(dim, width int, element attn.DType) (c columns, ok bool) {
	size := element.Size()
	unit, column := 16/size, 128/size // elements of the smallest distance in a tensor map, and of a column block
	row := width * size
	if dim > width || dim%unit != 0 {
		return c, false
	}
	blocks := row / 128
	if row%128 != 0 || blocks == 1 || dim == width {
		return columns{dim: int32(dim), block: int32(width), taken: int32(dim)}, true
	}
	for taken := unit; taken <= column; taken += unit {
		if step := (dim - taken) / (blocks - 1); step*(blocks-1) == dim-taken && step%unit == 0 && 0 < step && step <= taken {
			return columns{int32(dim), int32(column), int32(taken), int32(step)}, true
		}
	}
	return c, false
}

// spreads says how a problem's heads lie in rows of a kernel's width. The zero value is for kernels of the problem's width.
type spreads struct {
	width      int // of the kernel
	key, value columns
	query, out attn.Strides // of the caller's queries and outputs
}

func (s *spreads) on() bool { return s.width > 0 }

// spreadsOf returns the spreads of a problem, for the narrowest kernel that the copy engine can serve.
func spreadsOf(g *attn.Problem) (s spreads) {
	has := g.Dim == g.ValueDim && slices.Contains(headDims, g.Dim)
	if has || g.Pages.InKeys() || g.Pages.KeyPlanes != 1 || g.Features()&(attn.Scaled|attn.SeveralTypes|attn.MixedKeys) != 0 {
		return s
	}
	for _, width := range headDims {
		key, ok := spreadOver(g.Dim, width, g.Pages.Key().DType)
		value, also := spreadOver(g.ValueDim, width, g.Pages.Key().DType)
		if ok && also {
			return spreads{width, key, value, g.Query, g.Out}
		}
	}
	return s
}

// spreadsFor returns the spreads of a step. If no sequence has the rows for a prefill kernel, and a decode kernel is packed for the
// problem's widths, there are none.
func (p *Plan) spreadsFor(g *attn.Problem, seqs []attn.Sequence) spreads {
	s := spreadsIn(p.engine.kernels, g)
	if p.steady && !p.form.spread.on() {
		return spreads{} // a recording keeps its launches
	}
	queries := 1
	for i := range seqs {
		queries = max(queries, seqs[i].Queries)
	}
	w := want{problem: g, features: g.Features(), rows: attn.Product(queries, g.Group())}
	if s.on() && w.rows < prefillRows && !p.steady {
		if k := p.engine.find(&w); k != nil && k.unit == packedUnit(k.kv) {
			return spreads{}
		}
	}
	return s
}

// problem returns g as the kernel sees it. Its pages stay as they are.
func (s *spreads) problem(g attn.Problem) attn.Problem {
	if s.on() {
		g.Query, g.Out = widened(g.Query, g.Heads, g.Dim, s.width), widened(g.Out, g.Heads, g.ValueDim, s.width)
		g.Dim, g.ValueDim = s.width, s.width
	}
	return g
}

// widened returns strides for rows of a kernel's width in place of dim elements. In the layout (batch, heads, tokens, dim), a sequence's
// first row counts the rows of all heads of the sequences before. widened keeps that layout.
func widened(s attn.Strides, heads, dim, width int) attn.Strides {
	if s.Head <= s.Row || s.Row%dim != 0 || s.Head%dim != 0 {
		return attn.PackedRows(heads, width)
	}
	return attn.Strides{Row: s.Row / dim * width, Head: s.Head / dim * width}
}

// isSpread reports whether g is a problem that spreads.problem has changed.
func isSpread(g *attn.Problem) bool {
	return g.Dim != g.Pages.KeyDim() || g.ValueDim != g.Pages.Value.Dim
}

// widths returns the numbers of elements of the caller's queries and outputs.
func (s *spreads) widths(g *attn.Problem) (query, out int) {
	if s.on() {
		return int(s.key.dim), int(s.value.dim)
	}
	return g.Dim, g.ValueDim
}

// queries returns the strides of the caller's queries.
func (s *spreads) queries(g *attn.Problem) attn.Strides {
	if s.on() {
		return s.query
	}
	return g.Query
}

// isOdd reports whether a stride of spread queries or outputs is no multiple of four elements.
func isOdd(g *attn.Problem) bool {
	of := spreadsOf(g)
	return of.on() && (g.Query.Row|g.Query.Head|g.Out.Row|g.Out.Head)%4 != 0
}

// bytes returns the memory for queries and outputs of `rows` rows, of any type.
func (s *spreads) bytes(g *attn.Problem, rows int) int64 {
	if !s.on() {
		return 0
	}
	return 4 * int64(g.Query.Extent(rows, g.Heads, s.width)+g.Out.Extent(rows, g.Heads, s.width))
}

// rows returns the columns of keys and of values.
func (s *spreads) rows(g *attn.Problem) (key, value columns) {
	if s.on() {
		return s.key, s.value
	}
	return whole(g.Dim), whole(g.ValueDim)
}

// spreadParams is struct SpreadParams.
type spreadParams struct {
	from, to, seqs                       uint64 // addresses
	fromRow, fromHead, toRow, toHead     int64
	spread                               columns
	rows, heads, width, sequences, bytes int32
	_                                    [4]byte
}

// loadSpread loads the kernels if s needs them.
func (e *Engine) loadSpread(s *spreads) error {
	e.loading.Lock()
	defer e.loading.Unlock()
	if !s.on() || e.spread[0] != nil {
		return nil
	}
	m, err := gpu.Module(e.dev, spreadUnit)
	if err != nil {
		return err
	}
	var f [2]*cuda.Function
	for i, entry := range [...]string{spreadEntry, gatherOutputs} {
		if f[i], err = m.Function(entry); err != nil {
			return err
		}
	}
	e.spread = f
	return nil
}

// directKernel returns the kernel that attends to all sequences without spread heads, or nil. With same, queries and outputs have
// the type of keys.
func (p *Plan) directKernel(same bool) *kernel {
	of := &p.form.spread
	if strides := of.query.Row | of.query.Head | of.out.Row | of.out.Head; !same || p.form.both || p.form.sharing.on() || strides%8 != 0 {
		return nil
	}
	return p.form.prefill.direct
}

// attend queues attention by k, with spread queries and outputs if the plan has them. Operands have been checked.
func (p *Plan) attend(s *cuda.Stream, o *Operands, k *kernel) error {
	g, of := &p.form.geometry, &p.form.spread
	if !of.on() {
		return p.launch(s, o, k)
	}
	inner := *o
	inner.Q = gpu.Memory{Buffer: p.memory.spread, DType: o.Q.DType, Len: g.Query.Extent(p.reach, g.Heads, of.width)}
	inner.Out = gpu.Memory{Buffer: p.memory.spread, Offset: int64(4 * inner.Q.Len), DType: o.Out.DType, Len: g.Out.Extent(p.reach, g.Heads, of.width)}
	a := spreadParams{
		from: o.Q.Address(), to: inner.Q.Address(), fromRow: int64(of.query.Row), fromHead: int64(of.query.Head), toRow: int64(g.Query.Row), toHead: int64(g.Query.Head),
		spread: of.key, rows: int32(p.reach), heads: int32(g.Heads), width: int32(of.width), bytes: int32(o.Q.DType.Size()),
	}
	if err := p.launchSpread(s, 0, &a, o.Q.Buffer); err != nil {
		return err
	}
	if err := p.launch(s, &inner, k); err != nil {
		return err
	}
	a = spreadParams{
		from: inner.Out.Address(), to: o.Out.Address(), fromRow: int64(g.Out.Row), fromHead: int64(g.Out.Head), toRow: int64(of.out.Row), toHead: int64(of.out.Head),
		spread: of.value, rows: int32(p.reach), heads: int32(g.Heads), width: int32(of.width), bytes: int32(o.Out.DType.Size()),
	}
	return p.launchSpread(s, 1, &a, o.Out.Buffer)
}

// launchSpread queues one of the launches. It waits for all earlier launches: attention may not begin before queries are spread.
func (p *Plan) launchSpread(s *cuda.Stream, which int, a *spreadParams, other *cuda.Buffer) error {
	if p.form.rows == 0 { // rows between those of sequences are not the plan's
		a.seqs, a.sequences = p.seqs.address(&p.memory), int32(len(p.seqs.data))
	}
	p.args.Reset()
	cuda.Struct(&p.args, a)
	for _, b := range [...]*cuda.Buffer{p.memory.spread, p.memory.table, other} {
		p.args.Hold(b)
	}
	return p.engine.spread[which].Launch(s, cuda.Grid{Blocks: [3]int{min(p.reach, spreadBlocks*p.engine.blocks)}, Threads: [3]int{spreadThreads}}, &p.args)
}
