package attention

import (
	"bytes"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Keys that several sequences share (prefixes) are attended to once, by the query rows of all these sequences. A second
// plan attends to the prefixes with gathered queries. The plan itself attends to each sequence's own keys. Both write
// states, and a last launch merges the states (kernels/attn_prefix.cuh).

const (
	prefixUnit    = "prefix"
	gatherEntry   = "prefix_gather"
	mergeEntry    = "prefix_merge"
	prefixThreads = 256
	prefixBlocks  = 8 // on a multiprocessor
)

// sharing is the form of a plan's launches for prefixes. The zero sharing is a plan without prefixes.
type sharing struct {
	out, lse   attn.Strides // strides of results; those of the geometry are those of states
	rows       int          // rows of queries
	gathered   int          // capacity for gathered rows
	generation uint64       // of the plan of prefixes
}

func (s *sharing) on() bool { return s.generation > 0 }

// states has the offsets of the buffers of states that the launches exchange, in bytes.
type states struct{ out, lse, query, prefixOut, prefixLse, end int64 }

func (s *sharing) states(heads, dim, valueDim int) (at states) {
	next := func(rows, width int) (start int64) {
		const align = 256
		start = at.end
		at.end += (int64(rows)*int64(heads)*int64(width)*4 + align - 1) / align * align
		return start
	}
	at.out, at.lse = next(s.rows, valueDim), next(s.rows, 1)
	at.query, at.prefixOut, at.prefixLse = next(s.gathered, dim), next(s.gathered, valueDim), next(s.gathered, 1)
	return at
}

// prefixes is the part of a plan for prefixes.
type prefixes struct {
	plan    *Plan           // plan of prefixes; nil before first use
	found   attn.Prefixes   // scratch of Build
	saved   int             // keys that the last Build saved from being read
	own     []attn.Sequence // scratch of Build: sequences without their prefixes
	seqs    []attn.Sequence // scratch of Build: prefixes or their pieces, as sequences with the rows of all members
	of      []int32         // scratch of Build: the prefix of each of seqs, an index of found
	cuts    cuts            // scratch of Build: of own
	alike   []alike         // scratch of Build
	work    int64           // scratch of Build: the cost of all of alike
	all     int             // scratch of Build: units of all of alike, in all heads and output tiles
	longest int             // scratch of Build: units of the longest prefix
	built   []sequence      // the sequences of plan's last Build
	isBuilt bool            // built is valid
	blocks  int             // thread blocks left to plan
	direct  bool            // kernels of plan read queries in place, without the gather launch

	// Lists for the GPU, and the found.Turn and `of` of their last writing.
	turn     int
	listed   []int32
	gathered list[int32] // rows of queries that attend to prefixes: their number, and the rows
	starts   list[int32] // of each row of queries: the index of its first gathered row in slots; and the end of the last row's
	slots    list[int32]
	shifts   list[int32] // with slopes, of each gathered row: see attn.Prefixes.AppendShifts

	gather prefixGatherParams
	merge  prefixMergeParams
}

func (x *prefixes) lists() []entries { return []entries{&x.gathered, &x.starts, &x.slots, &x.shifts} }

// size sets the lengths of the lists for a step without prefixes. layPrefixes sets them otherwise.
func (x *prefixes) size() {
	for _, l := range x.lists() {
		l.of().want(0, 0, 0)
	}
}

// prefixGatherParams is struct PrefixGatherParams.
type prefixGatherParams struct {
	query, to, rows     uint64 // addresses
	queryRow, queryHead int64
	heads, width        int32
}

// prefixMergeParams is struct PrefixMergeParams.
type prefixMergeParams struct {
	own, ownLse, prefix, prefixLse, starts, slots, out, lse uint64 // addresses
	outRow, outHead, lseRow, lseHead                        int64
	rows, heads, dim, outType                               int32
	slopes, shifts                                          uint64 // addresses
}

// hasTables reports whether page tables are long enough for the keys. measure reports the error if they are not.
func hasTables(g *attn.Problem, seqs []attn.Sequence) bool {
	for i := range seqs {
		if q := &seqs[i]; q.Queries < 0 || q.Keys < 0 || q.Queries > 0 && len(q.Pages) < attn.Ceil(q.Keys, g.PageTokens) {
			return false
		}
	}
	return true
}

// shareable returns the features with which sequences can share prefixes. Merging takes values of any width.
func shareable(g *attn.Problem) attn.Feature {
	if !g.Pages.InKeys() {
		return attn.Shareable | attn.OtherValueDim | attn.Scaled | attn.MixedKeys
	}
	return attn.Shareable | attn.ValuesInKeys | attn.OtherValueDim | attn.SeveralPlanes | attn.SeveralTypes | attn.Scaled
}

// findPrefixes reports whether sequences share prefixes and sharing pays, or a recording has the launches of sharing.
// It then lists the prefixes and the sequences' own keys. It writes only scratch.
func (p *Plan) findPrefixes(g *attn.Problem, seqs []attn.Sequence, rows int) bool {
	x := &p.prefixes
	x.blocks, x.saved, x.cuts = 0, 0, x.cuts[:0]
	switch {
	case rows == 0 || p.fused || g.Features()&^shareable(g) != 0:
		return false
	case p.recorded && !p.form.sharing.on():
		return false
	case !p.recorded && len(seqs) < 2, !hasTables(g, seqs):
		return false
	}
	least, key := leastPrefix, g.KVHeads*tokenBytes(g)
	if p.engine.Eager {
		least = 1
	}
	x.found.Find(g, seqs, attn.Ceil(least, key), attn.Product(mostPrefixesOfRow, rows))
	x.own, x.seqs, x.of = x.found.AppendOwn(x.own[:0], seqs), x.seqs[:0], x.of[:0]
	for i := range x.found.Found {
		x.seqs, x.of = append(x.seqs, x.found.Sequence(&x.found.Found[i], seqs)), append(x.of, int32(i))
	}
	x.saved = x.found.Saved
	if !p.recorded && (x.saved == 0 || !p.engine.Eager && !sharingPays(g, seqs, x.saved, key)) {
		return false
	}
	if g.Window != 0 {
		x.cuts = x.cuts.list(x.own, rows)
	}
	return true
}

// cuts has, at each sequence's first row of queries, the number of keys by which prefixes shorten its window
// ([attn.Sequence.Cut]). An empty list means 0 for all.
type cuts []int32

// list returns the cuts of seqs in a step of `rows` rows. It uses the memory of c.
func (c cuts) list(seqs []attn.Sequence, rows int) cuts {
	c = slices.Grow(c[:0], rows)[:rows]
	clear(c)
	for i := range seqs {
		if q := &seqs[i]; q.Cut > 0 && q.Row >= 0 && q.Row < rows { // measure reports the others
			c[q.Row] = int32(q.Cut)
		}
	}
	return c
}

// mask returns the mask of g for s.
func (c cuts) mask(g *attn.Problem, s *sequence) attn.Mask {
	m := g.Mask
	if len(c) > 0 {
		m.Window -= int(c[s.row])
	}
	return m
}

// ownProblem returns the problem of sequences' own keys.
func ownProblem(g *attn.Problem) attn.Problem {
	of := *g
	of.Out, of.LSE = attn.PackedRows(g.Heads, g.ValueDim), attn.PackedRows(g.Heads, 1)
	return of
}

// prefixProblem returns the problem of prefixes. If direct is true, queries are read in place, else they are gathered.
func prefixProblem(g *attn.Problem, direct bool) attn.Problem {
	of := g.OfPrefixes()
	if direct {
		of.Query = g.Query
	}
	return of
}

// manyOfPrefixes returns the prefill kernel that may attend to prefixes, or nil.
func (p *Plan) manyOfPrefixes(of *attn.Problem) *kernel {
	most := 0
	for i := range p.prefixes.seqs {
		most = max(most, p.prefixes.seqs[i].Queries)
	}
	return p.engine.findPrefill(of, attn.Product(most, of.Group())).taken(of, true)
}

// layPrefixes assigns prefixes to kernels and thread blocks, and sets the sizes of the launches around attention, for a
// step of `rows` rows. few is the kernel of the sequences' own keys. results is the problem of the step, g that of the
// own keys.
func (p *Plan) layPrefixes(results, g *attn.Problem, rows int, few *kernel, who division, need *stepSize, least *Capacity) sharing {
	x := &p.prefixes
	s := sharing{out: results.Out, lse: results.LSE, rows: rows, gathered: p.engine.mostGathered(g, max(least.Rows, rows))}
	if p.recorded {
		s.gathered = p.form.sharing.gathered
	}
	of := prefixProblem(g, true)
	many := p.manyOfPrefixes(&of)
	switch {
	case p.recorded && x.plan.form.beside && many == nil:
		x.blocks = 1 // a block without work
	case many != nil && (!p.recorded || x.plan.form.prefill.first() != nil):
		x.blocks = p.besidePrefixes(g, few, many, who, need, s.gathered)
	}
	gathered := 0
	for i := range x.seqs {
		x.seqs[i].Row = gathered
		gathered += x.seqs[i].Queries
	}
	x.gathered.want(gathered, s.gathered, 1)
	x.slots.want(gathered, s.gathered, 0)
	if g.Slopes.Len() > 0 {
		x.shifts.want(gathered, s.gathered, 0)
	}
	x.starts.want(need.Rows, least.Rows, 1)
	p.cuts.want(need.Rows, least.Rows, 0)
	return s
}

// buildPrefixes builds the plan of prefixes.
func (p *Plan) buildPrefixes(g *attn.Problem, s *sharing) error {
	x := &p.prefixes
	if err := p.engine.loadPrefixes(); err != nil {
		return err
	}
	if x.plan == nil {
		x.plan = p.engine.NewPlan()
	}
	// The capacity does not depend on the step, so that output tiles keep their number of rows, for recordings.
	least := Capacity{Sequences: s.gathered, Rows: s.gathered, Queries: s.gathered, Pages: max(p.least.Pages, s.gathered+1)}
	if p.recorded {
		least = x.plan.least
	}
	if x.stillBuilt(g, p.recorded, least) {
		s.generation = x.plan.generation
		return nil
	}
	if !p.recorded {
		if err := x.plan.Reserve(least); err != nil {
			return err
		}
	}
	x.plan.uncut, x.plan.steady, x.plan.beside = true, p.recorded, x.blocks
	x.built, x.isBuilt = x.built[:0], false
	if err := x.plan.Build(prefixProblem(g, x.direct), x.seqs, 0); err != nil {
		return err
	}
	if direct := x.plan.form.prefill.first() != nil && !x.plan.form.both && !x.plan.form.spread.on(); direct != x.direct { // differs from the last step
		x.direct = direct
		if err := x.plan.Build(prefixProblem(g, direct), x.seqs, 0); err != nil {
			p.state = fresh // the plan of prefixes has changed
			return err
		}
	}
	s.generation = x.plan.generation
	for i := range x.seqs {
		q := &x.seqs[i]
		x.built = append(x.built, sequence{row: int32(q.Row), queries: int32(q.Queries), keys: int32(q.Keys)})
	}
	x.isBuilt = true
	return nil
}

// stillBuilt reports whether the plan of prefixes is what a new Build would make. For the next token this mostly holds.
func (x *prefixes) stillBuilt(g *attn.Problem, recorded bool, least Capacity) bool {
	of := x.plan
	if !x.isBuilt || of.state < built || len(x.built) != len(x.seqs) || of.steady != recorded || of.beside != x.blocks || of.least != least ||
		!of.form.paged || of.form.geometry != of.form.spread.problem(prefixProblem(g, x.direct)) {
		return false
	}
	pages := of.pages.data // in the order of seqs
	for i := range x.seqs {
		q, was := &x.seqs[i], &x.built[i]
		live := attn.Ceil(q.Keys, g.PageTokens)
		if q.Row != int(was.row) || q.Queries != int(was.queries) || q.Keys != int(was.keys) || !bytes.Equal(gpu.BytesOf(q.Pages[:live]), gpu.BytesOf(pages[:live])) {
			return false
		}
		pages = pages[live:]
	}
	return true
}

// listPrefixes writes the lists for the launches around attention.
func (p *Plan) listPrefixes(seqs []attn.Sequence, s *sharing) {
	x := &p.prefixes
	if s.on() && x.turn == x.found.Turn && slices.Equal(x.of, x.listed) && len(x.starts.data) == s.rows+1 && len(p.slopes.data)+len(x.shifts.data) == 0 {
		return // the lists have not changed
	}
	x.gathered.data, x.starts.data, x.slots.data, x.shifts.data, x.listed = x.gathered.data[:0], x.starts.data[:0], x.slots.data[:0], x.shifts.data[:0], x.listed[:0]
	if !s.on() {
		return
	}
	x.turn, x.listed = x.found.Turn, append(x.listed, x.of...)
	x.gathered.data, x.starts.data = append(x.gathered.data, 0), slices.Grow(x.starts.data, s.rows+2)[:s.rows+2]
	clear(x.starts.data)
	first := 0
	for k, i := range x.of {
		piece := x.found.Found[i] // pieces of one prefix are next to each other
		if k > 0 && x.of[k-1] == i {
			piece.First = first
		}
		first = piece.First + x.seqs[k].Keys
		piece.End = first
		x.gathered.data = x.found.AppendRows(x.gathered.data, &piece, seqs)
		if len(p.slopes.data) > 0 {
			x.shifts.data = x.found.AppendShifts(x.shifts.data, &piece, seqs)
		}
	}
	starts := x.starts.data[1:]
	for _, row := range x.gathered.data[1:] {
		starts[row+1]++
	}
	n := len(x.gathered.data) - 1
	x.gathered.data[0] = int32(n)
	sum := int32(0)
	for i, count := range starts {
		sum += count
		starts[i] = sum
	}
	x.slots.data = slices.Grow(x.slots.data, n)[:n]
	for slot, row := range x.gathered.data[1:] { // starts[row] begins as the start of the row's slots and ends as their end
		at := starts[row]
		x.slots.data[at], starts[row] = int32(slot), at+1
	}
	x.starts.data = x.starts.data[:s.rows+1]
}

// loadPrefixes loads the functions of the launches around attention.
func (e *Engine) loadPrefixes() error {
	e.loading.Lock()
	defer e.loading.Unlock()
	if e.mergePrefixes != nil {
		return nil
	}
	m, err := gpu.Module(e.dev, prefixUnit)
	if err != nil {
		return err
	}
	gather, err := m.Function(gatherEntry)
	if err != nil {
		return err
	}
	merge, err := m.Function(mergeEntry)
	if err != nil {
		return err
	}
	e.gatherPrefixes, e.mergePrefixes = gather, merge
	return nil
}

// runSharing queues attention of sequences that share prefixes.
func (p *Plan) runSharing(s *cuda.Stream, o *Operands) error {
	x, g := &p.prefixes, &p.form.geometry
	share := &p.form.sharing
	width, outWidth := p.form.spread.widths(g)
	at, query := share.states(g.Heads, width, outWidth), p.form.spread.queries(g)
	floats := func(begin, end int64) gpu.Memory {
		return gpu.Memory{Buffer: p.memory.states, Offset: begin, Len: int(end-begin) / 4, DType: attn.Float32}
	}
	own, shared := *o, Operands{Pages: o.Pages}
	p.outType, x.plan.outType = o.Out.DType, o.Out.DType
	own.Out, own.LSE = floats(at.out, at.lse), floats(at.lse, at.query)
	shared.Q, shared.Out, shared.LSE = floats(at.query, at.prefixOut), floats(at.prefixOut, at.prefixLse), floats(at.prefixLse, at.end)
	shared.Q.DType = o.Q.DType
	shared.Q.Len *= 4 / o.Q.DType.Size()

	size := int64(o.Q.DType.Size())
	x.gather = prefixGatherParams{
		query: o.Q.Address(), to: shared.Q.Address(), rows: x.gathered.address(&p.memory),
		queryRow: int64(query.Row) * size, queryHead: int64(query.Head) * size,
		heads: int32(g.Heads), width: int32(width * int(size)),
	}
	x.merge = prefixMergeParams{
		own: own.Out.Address(), ownLse: own.LSE.Address(), prefix: shared.Out.Address(), prefixLse: shared.LSE.Address(),
		starts: x.starts.address(&p.memory), slots: x.slots.address(&p.memory),
		out: o.Out.Address(), lse: o.LSE.AddressOr0(),
		outRow: int64(share.out.Row), outHead: int64(share.out.Head), lseRow: int64(share.lse.Row), lseHead: int64(share.lse.Head),
		rows: int32(share.rows), heads: int32(g.Heads), dim: int32(outWidth), outType: gpu.Code(o.Out.DType),
	}
	if len(p.slopes.data) > 0 {
		x.merge.slopes, x.merge.shifts = p.slopes.address(&p.memory), x.shifts.address(&p.memory)
	}
	most := prefixBlocks * p.engine.blocks
	if x.plan.rows = 0; x.direct {
		shared.Q, x.plan.rows = o.Q, x.gather.rows+4
	} else if err := launchAround(p, s, o, p.engine.gatherPrefixes, min(share.gathered, most), &x.gather); err != nil {
		return err
	}
	if err := p.attend(s, &own, p.kernelOf(o, true)); err != nil {
		return err
	}
	if err := x.plan.attend(s, &shared, x.plan.kernelOf(o, true)); err != nil {
		return err
	}
	warps := attn.Product(share.rows, g.Heads)
	return launchAround(p, s, o, p.engine.mergePrefixes, min(attn.Ceil(warps, prefixThreads/32), most), &x.merge)
}

// launchAround queues a launch before or after attention.
func launchAround[T any](p *Plan, s *cuda.Stream, o *Operands, f *cuda.Function, blocks int, params *T) error {
	p.args.Reset()
	cuda.Struct(&p.args, params)
	p.hold(o)
	return f.Launch(s, cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{prefixThreads}, Overlap: p.engine.hasCopyEngine()}, &p.args)
}
