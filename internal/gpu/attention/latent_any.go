package attention

import (
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Decode attention of any type, mask and change of scores to keys that hold the values, of any width, and to keys and values apart, of widths
// that no other kernel has (kernels/attn_latent_any.cuh, attn_latent_append.cuh). This file mirrors LatentAnyParams, LatentAppendParams and
// the layout of shared memory.

const (
	latentAnyRows   = 32 // of an output tile
	latentAnyKeys   = 16 // of a chunk
	latentAnyWarps  = 8
	latentAnyStages = 6   // at most
	latentGroup     = 128 // elements of E4M3 that share a scale
	latentScales    = latentValue / latentGroup
	mostHead        = 256 // elements of a key and of a value that lie apart
)

// latentAnyParams is struct LatentAnyParams.
type latentAnyParams struct {
	Params
	score                       scoreParams
	rest, scales                uint64 // addresses
	dim, value, stages, precise int32
}

// latentAppend is struct LatentAppendParams.
type latentAppend struct {
	rotary       rotaryParams
	rest, scales uint64 // addresses
	value        int32
	_            [4]byte
}

// latentWidths reports whether there are kernels for the widths of keys and values of g.
func latentWidths(g *attn.Problem) bool {
	each := 8
	if isGrouped(g) {
		each = latentGroup
	}
	return g.Dim%8 == 0 && g.Dim <= latentDim && g.ValueDim%each == 0 && g.ValueDim <= latentValue
}

// headWidths reports whether kernels have the widths of g, whose keys and values lie apart.
func headWidths(g *attn.Problem) bool {
	return g.Dim%8 == 0 && g.Dim <= mostHead && g.ValueDim%8 == 0 && g.ValueDim <= mostHead
}

// isAny reports whether keys and values of g lie apart, and no kernel for all features has their widths. From 9.0 on, the kernels of anyLines
// take heads of such widths, except spread and packed heads.
func isAny(g *attn.Problem) bool {
	return !g.Pages.InKeys() && !(g.Dim == g.ValueDim && slices.Contains(headDims, g.Dim))
}

// latentAnyConfig returns the configuration of a launch for keys and values of these widths. The ring has as many chunks as fit. With
// apart, values lie apart from keys.
func (e *Engine) latentAnyConfig(kv attn.DType, dim, value int, apart bool) (c config, ok bool) {
	const front, scores = 1024, latentAnyRows * (latentAnyKeys + 8) * 4
	blocks := func(elements, size int) int { return attn.Ceil(elements*size, 128) * latentAnyKeys * 128 }
	stage, rest := blocks(dim, kv.Size()), (latentAnyWarps+1)*scores
	if apart {
		stage += blocks(value, kv.Size())
	}
	if kv == attn.E4M3 { // rows as in memory, and operands of 16 bits of one chunk
		stage = latentAnyKeys*(value+latentScales*4) + blocks(dim-value, 2)
		rest += blocks(value, 2)
	}
	c = config{warps: latentAnyWarps, buffers: 1, threads: latentAnyWarps * 32}
	c.slots = min((e.info.SharedPerBlockMost-front-rest)/stage, latentAnyStages)
	c.shared = front + max(rest+c.slots*stage, latentAnyRows*(value+8)*4) // rows of outputs lie there, too
	return c, c.slots >= 1 && c.shared <= e.info.SharedPerBlockMost
}

func latentAnyFits(e *Engine, k *kernel, dim, _ int) bool {
	if k.unit == anyUnit {
		_, ok := e.latentAnyConfig(k.kv, dim, mostHead, true)
		return ok
	}
	_, ok := e.latentAnyConfig(k.kv, dim, min(dim, latentValue), false) // fewer values of E4M3 take less
	return ok
}

// runLatentAny queues attention by a kernel of the family. Queries and weights are sums of two parts in the cases of runLatent.
func (p *Plan) runLatentAny(s *cuda.Stream, o *Operands, k *kernel) error {
	e, g := p.engine, &p.form.geometry
	c, _ := e.latentAnyConfig(k.kv, g.Dim, g.ValueDim, !g.Pages.InKeys())
	shape := e.shapeOf(k, g.Dim)
	p.fill(o, &shape, &c, shape.keys)
	a := latentAnyParams{
		Params: p.params.Params, score: p.scoresOf(g, o, k), dim: int32(g.Dim), value: int32(g.ValueDim), stages: int32(c.slots),
	}
	operand := k.kv
	if isGrouped(g) {
		operand, a.scales = attn.BFloat16, o.Pages[0].Scales.Address()
		a.rest = o.Pages[1].Data.AddressOr0()
	}
	if !g.Mixed && (o.Q.DType != operand || p.resultType(o) != operand) {
		a.precise = 1
	}
	p.args.Reset()
	cuda.Struct(&p.args, &a)
	p.hold(o)
	return k.functions[0].Launch(s, cuda.Grid{Blocks: [3]int{e.blocks}, Threads: [3]int{c.threads}, Shared: c.shared, Overlap: e.hasCopyEngine()}, &p.args)
}

// isGrouped reports whether keys hold the values, and the values have scales.
func isGrouped(g *attn.Problem) bool { return isScaled(g) && g.Pages.InKeys() }

// supportsGrouped returns an error if no kernel reads the planes of g. isGrouped is true of g. A token's row has the same number in all
// planes and among the scales.
func supportsGrouped(op string, g *attn.Problem) error {
	bad := func(format string, args ...any) error { return gpu.Errorf(op, attn.ErrUnsupported, format, args...) }
	f := &g.Pages
	if k := f.Key(); k.Scales != attn.ScalesByGroup || k.Group != latentGroup || k.Dim != g.ValueDim || f.Value.Plane != 0 {
		return bad("values of %d elements in keys of %v with %v, %d in a group: kernels take a plane of values with groups of %d", g.ValueDim, k.DType, k.Scales, k.Group, latentGroup)
	}
	if f.KeyPlanes > 2 || f.KeyPlanes == 2 && (f.Planes[1].DType != attn.BFloat16 || f.Planes[1].Scales != attn.NoScales) {
		return bad("keys of %d planes, the second of %v: kernels take one plane of %v", f.KeyPlanes, f.Planes[1].DType, attn.BFloat16)
	}
	if k, x := f.Key(), &f.Planes[1]; f.KeyPlanes == 2 && (x.At.Row != x.Dim || x.At.Page*k.Dim != k.At.Page*x.Dim || x.At.Head*k.Dim != k.At.Head*x.Dim) {
		return bad("strides %+v and %+v of planes of %d and %d elements: a row must have the same number in both", k.At, x.At, k.Dim, x.Dim)
	}
	return nil
}

// checkGrouped returns an error if the memory for scales, or for the rest of keys behind the values, is too small for the plan's pages.
func (p *Plan) checkGrouped(op string, pages *Pages) error {
	g := &p.form.geometry
	if !isGrouped(g) {
		return nil
	}
	need := func(plane int) int {
		if x := &g.Pages.Planes[plane]; p.lastPage >= 0 {
			return x.At.Extent(p.lastPage+1, g.KVHeads, p.mostSlots, x.Dim)
		}
		return 0
	}
	if err := pages[0].Scales.CheckFloats(op, "the scales of k", need(0)/latentGroup); err != nil || g.Pages.KeyPlanes < 2 {
		return err
	}
	rest := &pages[1].Data
	if rest.DType != attn.BFloat16 {
		return gpu.Errorf(op, attn.ErrDType, "the rest of k is %v, the plan is for %v", rest.DType, attn.BFloat16)
	}
	return rest.CheckStored(op, "the rest of k", need(1))
}

// loadGrouped loads the kernel that stores new keys if g needs it.
func (e *Engine) loadGrouped(g *attn.Problem) error {
	e.loading.Lock()
	defer e.loading.Unlock()
	if !isGrouped(g) || e.appendLatent != nil {
		return nil
	}
	m, err := gpu.Module(e.dev, latentAnyUnit)
	if err != nil {
		return err
	}
	e.appendLatent, err = m.Function(latentAppendEntry)
	return err
}

// storeGrouped queues the storing of new keys whose values have scales, as storeNarrow does.
func (p *Plan) storeGrouped(s *cuda.Stream, to *Pages, r *rotaryParams, buffers ...*cuda.Buffer) error {
	g, rows := &p.form.geometry, p.form.rows
	const warps = appendThreads / 32
	each := max(min(attn.Ceil(int(r.queryHeads)+g.KVHeads, warps), 2*p.engine.blocks/rows), 1)
	a := latentAppend{rotary: *r, rest: to[1].Data.AddressOr0(), scales: to[0].Scales.Address(), value: int32(g.ValueDim)}
	a.rotary.each = int32(each)
	p.args.Reset()
	cuda.Struct(&p.args, &a)
	for _, b := range append(buffers, to[0].Data.Buffer, to[0].Scales.Buffer, to[1].Data.Buffer, p.memory.table) {
		if b != nil {
			p.args.Hold(b)
		}
	}
	grid := cuda.Grid{Blocks: [3]int{rows * each}, Threads: [3]int{appendThreads}, Overlap: p.engine.hasCopyEngine()}
	if err := p.engine.appendLatent.Launch(s, grid, &p.args); err != nil {
		return err
	}
	p.stores(to)
	return nil
}

// storeCoded queues the storing of new keys and values in pages of isCoded.
func (p *Plan) storeCoded(s *cuda.Stream, to *Pages, r *rotaryParams, buffers ...*cuda.Buffer) error {
	switch g := &p.form.geometry; {
	case isGrouped(g):
		return p.storeGrouped(s, to, r, buffers...)
	case isFour(g):
		return p.storeFour(s, to, r, buffers...)
	}
	return p.storeNarrow(s, to, r, buffers...)
}
