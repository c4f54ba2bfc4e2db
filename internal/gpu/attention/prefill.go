package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/lean"
)

// Attention of many query rows, as in prompts, by kernels of their own (kernels/attn_prefill.cuh and
// attn_prefill_mma.cuh). Output tiles have 64 rows or more. Each is the work of one thread block, or is cut into parts
// (prefill_cut.go).

const prefillSection = 12 << 20

// prefillThreads returns the number of threads of a block. With warp groups these are a producer and a consumer for
// each 64 rows.
func prefillThreads(k *kernel) int {
	if k.tile.warps > 0 {
		return k.tile.warps * 32
	}
	return (k.tile.rows/64 + 1) * 128
}

// prefillShared returns the bytes of shared memory: a buffer of queries, with the factors of their rows if queries have
// two parts, and one ring of keys and values. With warp groups there are two buffers of queries (one for large heads),
// a ring of keys, a ring of values, and barriers.
func prefillShared(k *kernel) int {
	width := func(dim int) int { return (dim*2 + 127) / 128 * 128 }
	row, stages, parts := width(k.dims[0]), k.tile.stages, k.parts
	queries, stage := k.tile.rows*(parts*row+(parts-1)*4), k.tile.keys*row
	values := stage
	if k.value > 0 {
		values = k.tile.keys * width(k.value)
	}
	switch {
	case k.tile.warps > 0:
		return queries + stages*stage
	case k.dims[0] <= 128:
		queries *= 2
	}
	return queries + stages*(stage+values) + 2*2*8 + 4*stages*8 + 4*64
}

// prefillBlocks returns the number of thread blocks of a launch.
func (e *Engine) prefillBlocks(k *kernel) int { return e.blocks * k.tile.blocks }

func prefillFits(e *Engine, k *kernel, _, _ int) bool {
	return prefillShared(k) <= e.info.SharedPerBlockMost
}

// prefillParams is struct PrefillParams.
type prefillParams struct {
	keyMap, valueMap                                          cuda.TensorMap
	query, out, lse, seqs, pages, masked, starts, tiles       uint64 // addresses
	partials, counters                                        uint64
	queryRow, queryHead, outRow, outHead, lseRow, lseHead     int64
	pageRows, headRows, pageTokens, box, heads, group, causal int32
	queryType, outType                                        int32
	scale, natural                                            float32
	beside                                                    int32
	keys, values, rows                                        uint64 // addresses
	streamed                                                  int32
	_                                                         [52]byte
}

// scoredPrefillParams is struct ScoredPrefillParams.
type scoredPrefillParams struct {
	prefillParams
	score scoreParams
	_     [(mapAlign - unsafe.Sizeof(scoreParams{})%mapAlign) % mapAlign]byte
}

// prefillKernels are a plan's kernels for prefill sequences. Run chooses by its operands' types, which Build does not know.
// nil: there is none, or it does not pay. A GPU may have one kernel that is both same and rounded.
type prefillKernels struct {
	same    *kernel // queries and outputs have the type of keys
	rounded *kernel // queries are rounded to the type of keys, outputs have any type
	precise *kernel // queries and outputs have any type
	direct  *kernel // as same, for widths of keys and values for which other kernels need spread heads (spread.go)
}

// first returns one of the kernels, or nil.
func (k prefillKernels) first() *kernel {
	if k.same != nil {
		return k.same
	}
	return k.precise
}

// of returns the kernel of a launch, or nil. same: queries and the step's outputs have the type of keys. mixed: the step has
// mixed precision. states: the launch writes states of a merge, which are float32.
func (k prefillKernels) of(same, mixed, states bool) *kernel {
	switch {
	case same && !states && k.same != nil:
		return k.same
	case (same || mixed) && k.rounded != nil:
		return k.rounded
	}
	return k.precise
}

// taken returns the kernel for the operands' types that g names.
func (k prefillKernels) taken(g *attn.Problem, states bool) *kernel {
	if of := k.of(g.QueryType == g.Pages.Planes[0].DType, g.Mixed, states); of != nil {
		return of
	}
	return k.first()
}

// findPrefill returns the kernels for sequences of at most `rows` rows.
func (e *Engine) findPrefill(g *attn.Problem, rows int) (k prefillKernels) {
	if rows < prefillRows {
		return k
	}
	for _, w := range [...]want{{same: true}, {same: true, rounds: true}, {}} {
		if w.rounds && k.same != nil && !k.same.exact {
			k.rounded = k.same
			continue
		}
		w.problem, w.features, w.rows = g, g.Features(), rows
		switch found := e.find(&w); {
		case found == nil || found.parts == 0:
		case !found.same():
			k.precise = found
		case w.rounds:
			k.rounded = found
		default:
			k.same = found
		}
	}
	if w := (want{problem: g, features: g.Features(), rows: rows, same: true, direct: true}); k.same != nil {
		k.direct = e.find(&w)
	}
	return k
}

// loadPrefill loads the kernels' functions. Of kernels of a variant, it replaces the line for the types of g by the compiled kernel.
func (e *Engine) loadPrefill(op string, g *attn.Problem, of *prefillKernels) error {
	if g.Variant != nil && of.first() != nil {
		return e.loadWritten(op, g, of)
	}
	for _, k := range [...]*kernel{of.same, of.rounded, of.precise, of.direct} {
		if k == nil {
			continue
		}
		if err := e.load(k); err != nil {
			return err
		}
	}
	return nil
}

// reservePrefill returns the largest number of output tiles, parts included, of a step of capacity c, and the bytes of
// their partials.
func (e *Engine) reservePrefill(g *attn.Problem, c *Capacity) (tiles int, parts int64) {
	k := e.findPrefill(g, attn.Product(c.queries(), g.Group())).first()
	if k == nil {
		return 0, 0
	}
	tiles = attn.Product(c.Rows, g.Group())/k.tile.rows + 1 + min(c.Sequences, c.Rows) // of a head
	return min(attn.Product(tiles, g.KVHeads), math.MaxInt32) + e.prefillBlocks(k), e.partBytes(k)
}

// prefilled is the part of a plan for prefill kernels.
type prefilled struct {
	prefilling    list[prefillTile] // output tiles, by blocks; empty if no prefill kernel may run
	prefillStarts list[int32]       // index of each block's first output tile, and the end of the last block's
	prefillSeqs   list[sequence]    // the sequences of output tiles of plain problems: two for each prefill sequence, see frontRows

	outputs         []prefillTile // scratch of Build
	prefillBounds   []int64       // scratch of Build
	costs           []int64       // scratch of Build
	prefillGrid     int           // thread blocks of the launch
	owners          []int32       // the block of each output tile
	prefillSections []int32       // index of each section's first output tile
	single          bool          // no sequence has two output tiles of a head

	steady bool   // a plan of prefixes in a recording: Build must not change its launches
	uncut  bool   // a plan of prefixes: prefixes are cut into pieces, so output tiles are not cut
	rows   uint64 // a plan of prefixes: address of the list of rows of queries; 0: queries are in the order of rows
	beside int    // a plan of prefixes: thread blocks that the previous launch leaves to this launch; 0: all

	prefillParams       prefillParams
	scoredPrefillParams scoredPrefillParams
}

func (f *prefilled) lists() []entries {
	return []entries{&f.prefillStarts, &f.prefillSeqs, &f.prefilling}
}

// sizePrefill sets the lengths of the lists that divide has chosen. It returns the bytes of partials of output tiles.
func (p *Plan) sizePrefill(g *attn.Problem, of division, least *Capacity) (parts int64) {
	tiles, parts := p.engine.reservePrefill(g, least)
	need := 0
	if k := of.first(); k != nil {
		need = len(p.outputs) + p.prefillGrid
		if of.workers > 0 {
			parts = p.engine.partBytes(k)
		}
	}
	p.prefillStarts.want(0, 0, mostTogether*p.engine.blocks+1)
	p.prefillSeqs.want(2*len(p.ordered), 2*min(least.Sequences, least.Rows), 0)
	p.prefilling.want(need, tiles, 0)
	return parts
}

// listPrefill lists the output tiles that divide has chosen.
func (p *Plan) listPrefill(g *attn.Problem, of division) {
	p.prefillSeqs.data = p.prefillSeqs.data[:0]
	if of.first() != nil && isPlain(g) {
		p.listFronts(g, p.seqs.data[of.few:], of.first().tile.rows)
	}
	switch {
	case of.first() == nil:
		p.prefilling.data, p.prefillStarts.data = p.prefilling.data[:0], p.prefillStarts.data[:0]
	case of.workers > 0:
		p.partPrefill(of.workers)
	default:
		p.dealPrefill()
	}
}

// runPrefill queues attention by blocks that have output tiles.
func (p *Plan) runPrefill(s *cuda.Stream, o *Operands, k *kernel) error {
	if k.needs&attn.Varied != 0 {
		return p.runWrittenPrefill(s, o, k)
	}
	g, a := &p.form.geometry, &p.prefillParams
	if err := p.prefillArguments(o, k); err != nil {
		return err
	}
	p.args.Reset()
	if k.changes {
		a.scale, a.natural = float32(g.Scale*lean.Log4E), lean.Ln4
	} else {
		a.scale, a.natural = float32(g.Scale*math.Log2E), float32(g.Scale)
	}
	if k.scored {
		p.scoredPrefillParams = scoredPrefillParams{prefillParams: *a, score: p.scoresOf(g, o, k)}
		cuda.Struct(&p.args, &p.scoredPrefillParams)
	} else {
		cuda.Struct(&p.args, a)
	}
	p.hold(o)
	return k.functions[0].Launch(s, p.engine.prefillLaunch(k), &p.args)
}

// prefillLaunch returns the grid of a launch of k.
func (e *Engine) prefillLaunch(k *kernel) cuda.Grid {
	return cuda.Grid{Blocks: [3]int{e.prefillBlocks(k)}, Threads: [3]int{prefillThreads(k)}, Shared: prefillShared(k), Overlap: e.hasCopyEngine()}
}

// prefillArguments fills p.prefillParams but for the factors of scores.
func (p *Plan) prefillArguments(o *Operands, k *kernel) error {
	e, g, m, a := p.engine, &p.form.geometry, &p.memory, &p.prefillParams
	*a = prefillParams{}
	if k.tile.warps > 0 {
		a.keys, a.values = o.Pages[0].Data.Address(), o.Pages[1].Data.Address()
	} else if err := p.prefillMaps(o, k); err != nil {
		return err
	}
	a.query, a.out = o.Q.Address(), o.Out.Address()
	if o.LSE.Buffer != nil {
		a.lse = o.LSE.Address()
	}
	a.seqs, a.masked, a.starts, a.tiles = p.seqs.address(m), p.masked.address(m), p.prefillStarts.address(m), p.prefilling.address(m)
	if isPlain(g) {
		a.seqs = p.prefillSeqs.address(m)
	}
	if m.parts != nil {
		a.counters, a.partials = m.parts.Address(), m.parts.Address()+uint64(e.counterBytes())
	}
	if p.form.paged {
		a.pages = p.pages.address(m)
	}
	a.queryRow, a.queryHead = int64(g.Query.Row), int64(g.Query.Head)
	a.outRow, a.outHead = int64(g.Out.Row), int64(g.Out.Head)
	if of := &p.form.spread; k.isDirect() {
		a.queryRow, a.queryHead = int64(of.query.Row), int64(of.query.Head)
		a.outRow, a.outHead = int64(of.out.Row), int64(of.out.Head)
	}
	a.lseRow, a.lseHead = int64(g.LSE.Row), int64(g.LSE.Head)
	a.pageRows, a.headRows, a.pageTokens = int32(g.Pages.Key().At.Page/g.Pages.Key().Dim), int32(g.Pages.Key().At.Head/g.Pages.Key().Dim), int32(g.PageTokens)
	a.heads, a.group = int32(g.KVHeads), int32(g.Group())
	if g.Causal {
		a.causal = 1
	}
	if p.form.both || p.form.beside {
		a.beside = 1
	}
	if p.single && p.streams(g) {
		a.streamed = 1
	}
	a.queryType, a.outType, a.rows = gpu.Code(o.Q.DType), gpu.Code(o.Out.DType), p.rows
	return nil
}

// prefillMaps sets the tensor maps of keys and values.
func (p *Plan) prefillMaps(o *Operands, k *kernel) (err error) {
	e, g, a := p.engine, &p.form.geometry, &p.prefillParams
	shape := e.shape(k.kv, g.Dim)
	shape.keys = 0 // a box is at most one column block
	values := shape
	a.box = int32(boxOf(k.tile.keys, p.form.paged, g.PageTokens))
	key, value := p.form.spread.rows(g)
	if k.isDirect() {
		key, value = whole(k.dims[0]), whole(k.value)
		shape, values = e.shape(k.kv, k.dims[0]), e.shape(k.kv, k.value)
		shape.keys, values.keys = 0, 0
	}
	if a.keyMap, err = e.tensorMap(&o.Pages[0].Data, &shape, key, int(a.box)); err != nil {
		return err
	}
	a.valueMap, err = e.tensorMap(&o.Pages[1].Data, &values, value, int(a.box))
	return err
}
