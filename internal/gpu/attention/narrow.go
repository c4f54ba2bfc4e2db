package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Keys and values of 8 bits with scales (kernels/attn_narrow.cuh). Launches are those of decodeFamily, with the addresses of
// scales behind the other parameters.

// narrowScales is struct NarrowParams.
type narrowScales struct {
	keyScales, valueScales uint64 // addresses
	scales, dtype          int32
}

// narrowParams is struct NarrowLaunchParams.
type narrowParams struct {
	keyMap, valueMap cuda.TensorMap
	Params
	meet       meetParams
	prefetched uint64 // an address; 0: the kernel does not read prefetched entries
	narrow     narrowScales
	_          [(mapAlign - (unsafe.Sizeof(Params{})+unsafe.Sizeof(meetParams{})+8+unsafe.Sizeof(narrowScales{}))%mapAlign) % mapAlign]byte
}

// narrowScoredParams is struct NarrowScoredParams.
type narrowScoredParams struct {
	keyMap, valueMap cuda.TensorMap
	Params
	score      scoreParams
	meet       meetParams
	prefetched uint64 // as in narrowParams
	narrow     narrowScales
	_          [(mapAlign - (unsafe.Sizeof(Params{})+unsafe.Sizeof(scoreParams{})+unsafe.Sizeof(meetParams{})+8+unsafe.Sizeof(narrowScales{}))%mapAlign) % mapAlign]byte
}

// narrowAppend is struct NarrowAppendParams.
type narrowAppend struct {
	rotary                 rotaryParams
	keyScales, valueScales uint64 // addresses
	scales, pageTokens     int32
}

// narrowed has the parameters of a plan's launches.
type narrowed struct {
	run    narrowParams
	scored narrowScoredParams
	append narrowAppend
}

// narrowFits: a ring has four slots at least, since producer warps fill slots in turn.
func narrowFits(e *Engine, k *kernel, dim, rows int) bool {
	c, ok := e.configure(e.shapeOf(k, dim), min(rows, BlockRows))
	return ok && c.slots >= 4
}

// isScaled reports whether pages have scales. isNarrow reports whether pages have scales, and values of their own.
func isScaled(g *attn.Problem) bool { return g.Pages.Key().Scales != attn.NoScales }
func isNarrow(g *attn.Problem) bool { return isScaled(g) && !g.Pages.InKeys() }

// supportsScales returns an error if kernels do not read the scales of g. Kernels find a scale by its page, head and token.
func supportsScales(op string, g *attn.Problem) error {
	k, v := g.Pages.Key(), g.Pages.ValuePlane()
	switch {
	case k.Scales != v.Scales || k.DType != v.DType:
		return gpu.Errorf(op, attn.ErrUnsupported, "keys of %v with %v, and values of %v with %v: they must be alike", k.DType, k.Scales, v.DType, v.Scales)
	case isGrouped(g):
		return supportsGrouped(op, g)
	case isFour(g):
		return supportsFour(op, g)
	case !isNarrow(g):
		return nil
	case k.Scales > attn.ScalesByToken:
		return gpu.Errorf(op, attn.ErrUnsupported, "%v with %v", k.DType, k.Scales)
	case g.Dim%128 != 0 && g.PageTokens%2 != 0: // the copy engine copies lines of 128 bytes
		return gpu.Errorf(op, attn.ErrUnsupported, "pages of %d tokens with head dim %d and %v: the tokens of a page must be even", g.PageTokens, g.Dim, k.DType)
	case k.At.Head != g.PageTokens*g.Dim || k.At.Page != g.KVHeads*k.At.Head:
		return gpu.Errorf(op, attn.ErrUnsupported, "key strides %+v: pages with scales must be contiguous", k.At)
	}
	return nil
}

// loadNarrow loads the kernel that stores new keys and values if g needs it.
func (e *Engine) loadNarrow(g *attn.Problem) error {
	e.loading.Lock()
	defer e.loading.Unlock()
	if !isNarrow(g) || e.appendNarrow != nil {
		return nil
	}
	m, err := gpu.Module(e.dev, narrowUnit)
	if err != nil {
		return err
	}
	e.appendNarrow, err = m.Function(narrowEntry)
	return err
}

// checkScales returns an error if the memory does not hold the scales of the plan's pages.
func (p *Plan) checkScales(op string, pages *Pages) error {
	g := &p.form.geometry
	if !isNarrow(g) {
		return p.checkGrouped(op, pages)
	}
	for i, name := range [...]string{"the scales of k", "the scales of v"} {
		if err := pages[i].Scales.CheckFloats(op, name, g.Pages.Planes[i].ScaleLen(p.lastPage+1, g.KVHeads, g.PageTokens)); err != nil {
			return err
		}
	}
	return nil
}

// runNarrow is runDecode for pages with scales.
func (p *Plan) runNarrow(s *cuda.Stream, o *Operands, k *kernel) error {
	grid, err := p.arguments(o)
	if err != nil {
		return err
	}
	a, g := &p.params, &p.form.geometry
	scales := narrowScales{keyScales: o.Pages[0].Scales.AddressOr0(), valueScales: o.Pages[1].Scales.AddressOr0(), scales: int32(g.Pages.Key().Scales), dtype: gpu.Code(g.Pages.Key().DType)}
	prefetched := uint64(0)
	if p.form.walks {
		prefetched = a.prefetched
	}
	p.args.Reset()
	if k.scored {
		p.narrowed.scored = narrowScoredParams{keyMap: a.keyMap, valueMap: a.valueMap, Params: a.Params, score: p.scoresOf(g, o, k), meet: a.meet, prefetched: prefetched, narrow: scales}
		cuda.Struct(&p.args, &p.narrowed.scored)
	} else {
		p.narrowed.run = narrowParams{keyMap: a.keyMap, valueMap: a.valueMap, Params: a.Params, meet: a.meet, prefetched: prefetched, narrow: scales}
		cuda.Struct(&p.args, &p.narrowed.run)
	}
	p.hold(o)
	return k.functions[0].Launch(s, grid, &p.args)
}

// rowBlocks returns the number of thread blocks for each row of new tokens, whose warps take a row of a head at a time.
func (p *Plan) rowBlocks(r *rotaryParams) int {
	const warps = appendThreads / 32
	return max(min(attn.Ceil(int(r.queryHeads)+2*p.form.geometry.KVHeads, warps), 2*p.engine.blocks/p.form.rows), 1)
}

// storeNarrow queues the storing of new keys and values in pages with scales. r has the parameters of packAppend, and those
// of a rotary embedding if the plan has one. Buffers are those of its operands.
func (p *Plan) storeNarrow(s *cuda.Stream, to *Pages, r *rotaryParams, buffers ...*cuda.Buffer) error {
	g, rows, each := &p.form.geometry, p.form.rows, p.rowBlocks(r)
	a := &p.narrowed.append
	*a = narrowAppend{rotary: *r, keyScales: to[0].Scales.Address(), valueScales: to[1].Scales.Address(), scales: int32(g.Pages.Key().Scales), pageTokens: int32(g.PageTokens)}
	a.rotary.each = int32(each)
	p.args.Reset()
	cuda.Struct(&p.args, a)
	for _, m := range to[:2] {
		p.args.Hold(m.Data.Buffer)
		p.args.Hold(m.Scales.Buffer)
	}
	for _, b := range append(buffers, p.memory.table) {
		p.args.Hold(b)
	}
	grid := cuda.Grid{Blocks: [3]int{rows * each}, Threads: [3]int{appendThreads}, Overlap: p.engine.hasCopyEngine()}
	if err := p.engine.appendNarrow.Launch(s, grid, &p.args); err != nil {
		return err
	}
	p.stores(to)
	return nil
}
