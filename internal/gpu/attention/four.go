package attention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Keys and values of 4 bits (kernels/attn_q4.cuh). Launches are those of 8 bits, without scales and tensor maps.

// isFour reports whether keys have 4 bits. isCoded reports whether numbers of pages are not elements as they are.
func isFour(g *attn.Problem) bool  { return g.Pages.Key().DType == attn.Q4 }
func isCoded(g *attn.Problem) bool { return isScaled(g) || isFour(g) }

// supportsFour returns an error if kernels do not read the pages of g. They copy multiples of 16 bytes.
func supportsFour(op string, g *attn.Problem) error {
	k, v := g.Pages.Key(), g.Pages.ValuePlane()
	switch multiple := 16 / (k.Elements() * k.DType.Size() & -(k.Elements() * k.DType.Size())); {
	case v.DType != k.DType || v.Mixed || !k.Mixed:
		return gpu.Errorf(op, attn.ErrUnsupported, "keys of %v, mixed: %v, and values of %v, mixed: %v: keys must be mixed, and values of their type", k.DType, k.Mixed, v.DType, v.Mixed)
	case g.PageTokens%multiple != 0:
		return gpu.Errorf(op, attn.ErrUnsupported, "pages of %d tokens with head dim %d and %v: the tokens of a page must be a multiple of %d", g.PageTokens, g.Dim, k.DType, multiple)
	case k.At.Head != g.PageTokens*k.Elements() || k.At.Page != g.KVHeads*k.At.Head:
		return gpu.Errorf(op, attn.ErrUnsupported, "key strides %+v: pages of %v must be contiguous", k.At, k.DType)
	}
	return nil
}

// loadFour loads the kernel that stores new keys and values if g needs it.
func (e *Engine) loadFour(g *attn.Problem) error {
	e.loading.Lock()
	defer e.loading.Unlock()
	if !isFour(g) || e.appendFour != nil {
		return nil
	}
	m, err := gpu.Module(e.dev, fourUnit)
	if err != nil {
		return err
	}
	e.appendFour, err = m.Function(fourEntry)
	return err
}

// storeFour is storeNarrow for 4 bits.
func (p *Plan) storeFour(s *cuda.Stream, to *Pages, r *rotaryParams, buffers ...*cuda.Buffer) error {
	each := p.rowBlocks(r)
	r.each = int32(each)
	p.args.Reset()
	cuda.Struct(&p.args, r)
	for _, b := range append(buffers, to[0].Data.Buffer, to[1].Data.Buffer, p.memory.table) {
		p.args.Hold(b)
	}
	grid := cuda.Grid{Blocks: [3]int{p.form.rows * each}, Threads: [3]int{appendThreads}, Overlap: p.engine.hasCopyEngine()}
	if err := p.engine.appendFour.Launch(s, grid, &p.args); err != nil {
		return err
	}
	p.stores(to)
	return nil
}
