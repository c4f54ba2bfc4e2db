package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/lean"
)

// Attention of many query rows, as prompts have them, by kernels of their own
// (kernels/attn_prefill.cuh and attn_prefill_mma.cuh): output tiles of 64 rows and more, each the
// work of one thread block.

const prefillSection = 12 << 20

// prefillThreads has all warps; where these are warp groups a producer, and a consumer for each 64 rows.
func prefillThreads(k *kernel) int {
	if k.tile.warps > 0 {
		return k.tile.warps * 32
	}
	return (k.tile.rows/64 + 1) * 128
}

// prefillShared is the bytes of shared memory: a place for queries, and for the factors of their rows where they have two
// parts, and a ring of keys and values. Warp groups have two places, or one for large queries, a ring of
// keys and one of values, and barriers.
func prefillShared(k *kernel) int {
	row, stages, parts := (k.dims[0]*2+127)/128*128, k.tile.stages, k.parts
	queries, stage := k.tile.rows*(parts*row+(parts-1)*4), k.tile.keys*row
	switch {
	case k.tile.warps > 0:
		return queries + stages*stage
	case k.dims[0] <= 128:
		queries *= 2
	}
	return queries + 2*stages*stage + 2*2*8 + 4*stages*8
}

// prefillBlocks are the thread blocks of a launch.
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
	_                                                         [56]byte
}

// scoredPrefillParams is struct ScoredPrefillParams.
type scoredPrefillParams struct {
	prefillParams
	score scoreParams
	_     [(mapAlign - unsafe.Sizeof(scoreParams{})%mapAlign) % mapAlign]byte
}

// prefillKernels are those for prompts: for operands of one type, and for others. What a plan knows of
// these is a guess. nil: none is worth it.
type prefillKernels struct{ same, precise *kernel }

// first is one of them, nil if there is none.
func (k prefillKernels) first() *kernel {
	if k.same != nil {
		return k.same
	}
	return k.precise
}

// taken is the one for the operands of a problem.
func (k prefillKernels) taken(g *attn.Problem) *kernel {
	if k.precise != nil && g.QueryType != g.Pages.Planes[0].DType && !g.Mixed {
		return k.precise
	}
	return k.first()
}

// findPrefill has the kernels for sequences of at most so many rows.
func (e *Engine) findPrefill(g *attn.Problem, rows int) (k prefillKernels) {
	if rows < prefillRows {
		return k
	}
	for _, same := range [...]bool{true, false} {
		switch found := e.find(&want{problem: g, features: g.Features(), rows: rows, same: same}); {
		case found == nil || found.parts == 0:
		case found.same():
			k.same = found
		default:
			k.precise = found
		}
	}
	return k
}

// loadPrefill has their functions.
func (e *Engine) loadPrefill(of prefillKernels) error {
	for _, k := range [...]*kernel{of.same, of.precise} {
		if k == nil {
			continue
		}
		if err := e.load(k); err != nil {
			return err
		}
	}
	return nil
}

// reservePrefill is how many output tiles, and parts of them, a step of capacity c can have, and how many
// bytes blocks write of parts.
func (e *Engine) reservePrefill(g *attn.Problem, c *Capacity) (tiles int, parts int64) {
	k := e.findPrefill(g, attn.Product(c.queries(), g.Group())).first()
	if k == nil {
		return 0, 0
	}
	tiles = attn.Product(c.Rows, g.Group())/k.tile.rows + 1 + min(c.Sequences, c.Rows) // of a head
	return min(attn.Product(tiles, g.KVHeads), math.MaxInt32) + e.prefillBlocks(k), e.partBytes(k)
}

// prefilled is what a plan has for prefill kernels.
type prefilled struct {
	prefilling    list[prefillTile] // their output tiles, by blocks; empty where none may run
	prefillStarts list[int32]       // where those of each block begin, and the last one's end

	outputs         []prefillTile // scratch of Build
	prefillBounds   []int64       // scratch of Build
	costs           []int64       // scratch of Build
	dealt           int           // thread blocks of the launch that output tiles are for
	owners          []int32       // of output tiles: the block of each
	prefillSections []int32       // of output tiles: where they begin

	steady bool   // of prefixes, and in a recording: Build changes no launch
	uncut  bool   // of prefixes: output tiles are not cut into parts, since the prefixes are
	rows   uint64 // of prefixes: address of a list of the rows of queries; 0: they are in the rows' order
	beside int    // of prefixes: thread blocks that the launch ahead leaves to this one; 0: it has all

	prefillParams       prefillParams
	scoredPrefillParams scoredPrefillParams
}

func (f *prefilled) lists() []entries { return []entries{&f.prefillStarts, &f.prefilling} }

// sizePrefill says how long the lists get that divide has chosen. It returns the bytes of parts of output tiles.
func (p *Plan) sizePrefill(g *attn.Problem, of division, least *Capacity) (parts int64) {
	tiles, parts := p.engine.reservePrefill(g, least)
	need := 0
	if k := of.first(); k != nil {
		need = len(p.outputs) + p.dealt
		if of.workers > 0 {
			parts = p.engine.partBytes(k)
		}
	}
	p.prefillStarts.want(0, 0, mostTogether*p.engine.blocks+1)
	p.prefilling.want(need, tiles, 0)
	return parts
}

// listPrefill deals out what divide has chosen.
func (p *Plan) listPrefill(of division) {
	switch {
	case of.first() == nil:
		p.prefilling.data, p.prefillStarts.data = p.prefilling.data[:0], p.prefillStarts.data[:0]
	case of.workers > 0:
		p.partPrefill(of.workers)
	default:
		p.dealPrefill()
	}
}

// runPrefill queues attention by blocks that take output tiles.
func (p *Plan) runPrefill(s *cuda.Stream, o *Operands, k *kernel) error {
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
	if m.parts != nil {
		a.counters, a.partials = m.parts.Address(), m.parts.Address()+uint64(e.counterBytes())
	}
	if p.form.paged {
		a.pages = p.pages.address(m)
	}
	a.queryRow, a.queryHead = int64(g.Query.Row), int64(g.Query.Head)
	a.outRow, a.outHead = int64(g.Out.Row), int64(g.Out.Head)
	a.lseRow, a.lseHead = int64(g.LSE.Row), int64(g.LSE.Head)
	a.pageRows, a.headRows, a.pageTokens = int32(g.Pages.Planes[0].At.Page/g.Dim), int32(g.Pages.Planes[0].At.Head/g.Dim), int32(g.PageTokens)
	a.heads, a.group = int32(g.KVHeads), int32(g.Group())
	if g.Causal {
		a.causal = 1
	}
	if p.form.both || p.form.beside {
		a.beside = 1
	}
	a.queryType, a.outType, a.rows = gpu.Code(o.Q.DType), gpu.Code(o.Out.DType), p.rows
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
	grid := cuda.Grid{Blocks: [3]int{e.prefillBlocks(k)}, Threads: [3]int{prefillThreads(k)}, Shared: prefillShared(k), Overlap: e.hasCopyEngine()}
	return k.functions[0].Launch(s, grid, &p.args)
}

// prefillMaps are what the copy engine brings keys and values by.
func (p *Plan) prefillMaps(o *Operands, k *kernel) (err error) {
	e, g, a := p.engine, &p.form.geometry, &p.prefillParams
	shape := e.shape(k.kv, g.Dim)
	shape.keys = 0 // no box is more than one column block
	a.box = int32(boxOf(k.tile.keys, p.form.paged, g.PageTokens))
	if a.keyMap, err = e.tensorMap(&o.Pages[0].Data, &shape, int(a.box)); err != nil {
		return err
	}
	a.valueMap, err = e.tensorMap(&o.Pages[1].Data, &shape, int(a.box))
	return err
}
