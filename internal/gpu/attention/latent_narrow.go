package attention

import "gorgonia.org/leanattention/internal/cuda"

// Decode attention to latents of E4M3 for output tiles of more than 2*latentFew rows (kernels/attn_latent_narrow.cuh). This file mirrors LatentNarrowParams, and
// the layout of shared memory.

// latentNarrowParams is struct LatentNarrowParams.
type latentNarrowParams struct {
	Params
	meet         meetParams
	rest, scales uint64 // addresses
}

// latentNarrowConfig returns the configuration of a launch: two chunks of float16 lie in shared memory.
func (e *Engine) latentNarrowConfig() (c config, ok bool) {
	const block, parts = latentKeys * 128, latentScales + 1
	c = config{warps: latentWarps, slots: 2, buffers: 1, threads: latentThreads}
	c.shared = (3*latentDim/64+1)*block + 2*latentScales*latentKeys*4 + 3*latentRows*4 + 2*16 + 2*16 + 2*2*parts*8
	return c, c.shared <= e.info.SharedPerBlockMost
}

func latentNarrowFits(e *Engine, k *kernel, dim, rows int) bool {
	_, ok := e.latentNarrowConfig()
	return ok
}

// runLatentNarrow queues attention by that kernel.
func (p *Plan) runLatentNarrow(s *cuda.Stream, o *Operands, k *kernel) error {
	if err := p.checkRounded(o, k.kv); err != nil {
		return err
	}
	e := p.engine
	shape := e.shapeOf(k, p.form.geometry.Dim)
	c, _ := e.latentNarrowConfig() // choose has found the configuration
	p.fill(o, &shape, &c, 0)
	a := latentNarrowParams{Params: p.params.Params, meet: p.params.meet, rest: o.Pages[1].Data.Address(), scales: o.Pages[0].Scales.Address()}
	p.args.Reset()
	cuda.Struct(&p.args, &a)
	p.hold(o)
	grid := cuda.Grid{Blocks: [3]int{e.blocks}, Threads: [3]int{c.threads}, Shared: c.shared, Overlap: true}
	return k.functions[0].Launch(s, grid, &p.args)
}
