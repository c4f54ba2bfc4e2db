package attention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
)

// Decode attention to keys that hold the values (kernels/attn_latent.cuh). This file mirrors LatentShape, and the layout
// of shared memory in Latent::run.

const (
	latentDim   = 576 // of keys
	latentValue = 512 // of values

	latentPartDim, latentPartValue = 320, 256 // of keys and values of half a latent vector
	latentKeys                     = 64       // of a chunk
	latentRows                     = 64       // of a product: of an output tile, or a pass's with the parts of a query
	latentWarps                    = 8        // that compute
	latentThreads                  = 384      // with the warps that copy
)

// latentSixteen is the entry of latentFamily for output tiles of up to 16 rows. Entries 0 and 1 are for queries in one part and in two.
const latentSixteen = 2

// latentParams is struct LatentParams.
type latentParams struct {
	keyMap cuda.TensorMap
	Params
	meet meetParams
	_    [16]byte // up to a multiple of mapAlign
}

// latentConfig returns the configuration of a launch for output tiles of `rows` rows, with queries in `parts` parts. The rings fill the rest of
// shared memory.
func (e *Engine) latentConfig(dim, rows, parts int) (c config, ok bool) {
	const block, most, statistics = latentKeys * 128, 227 << 10, 2048
	blocks := dim / 64
	queries := (blocks+1)*rows*128 + (latentRows-rows)*128 // with weights, and the bytes that products read behind the weights
	fitting := (most - queries - statistics) / block
	rests := fitting/blocks + (fitting-fitting/blocks)%2
	units := (fitting - rests) / 2
	c = config{warps: latentWarps, slots: units, buffers: 1, threads: latentThreads}
	c.shared = queries + (2*units+rests)*block + 7*rows/parts*4 + 2*16 + (units+rests)*16
	return c, c.shared <= e.info.SharedPerBlockMost
}

func latentFits(e *Engine, k *kernel, dim, rows int) bool {
	_, ok := e.latentConfig(dim, latentRows, 1) // with two parts there are fewer statistics
	return ok
}

// resultType returns the type of the step's results, which launches around prefixes round states to.
func (p *Plan) resultType(o *Operands) attn.DType {
	if p.form.sharing.on() || p.uncut {
		return p.outType
	}
	return o.Out.DType
}

// runLatent queues attention by a kernel for keys that hold the values. Queries and outputs of the keys' type are operands
// of products as they are, and so are rounded ones. Others are sums of two parts.
func (p *Plan) runLatent(s *cuda.Stream, o *Operands, k *kernel) (err error) {
	e, g, kv := p.engine, &p.form.geometry, o.Pages[0].Data.DType
	parts := 2
	switch {
	case k.halves:
		if parts, err = 1, p.checkRounded(o, k.kv); err != nil {
			return err
		}
	case g.Mixed || o.Q.DType == kv && p.resultType(o) == kv:
		parts = 1
	}
	shape := e.shapeOf(k, g.Dim)
	entry, rows := parts-1, latentRows
	if parts == 1 && !k.halves && p.form.tileRows <= latentFew {
		entry, rows = latentSixteen, latentFew
	}
	c, _ := e.latentConfig(g.Dim, rows, parts) // choose has found the configuration
	box := boxOf(shape.keys, p.form.paged, g.PageTokens)
	p.fill(o, &shape, &c, box)
	a := latentParams{Params: p.params.Params, meet: p.params.meet}
	if a.keyMap, err = e.tensorMap(&o.Pages[0].Data, &shape, whole(g.Dim), box); err != nil {
		return err
	}
	p.args.Reset()
	cuda.Struct(&p.args, &a)
	p.hold(o)
	grid := cuda.Grid{Blocks: [3]int{e.blocks}, Threads: [3]int{c.threads}, Shared: c.shared, Overlap: true}
	return k.functions[entry].Launch(s, grid, &p.args)
}
