package attention

import "gorgonia.org/leanattention/internal/cuda"

// Decode attention to keys that hold the values (kernels/attn_latent.cuh). This file mirrors LatentShape, and the layout
// of shared memory in Latent::run.

const (
	latentDim     = 576 // of keys
	latentValue   = 512 // of values
	latentKeys    = 64  // of a chunk
	latentColumns = 64  // of a product, at most: rows of an output tile, times the parts of a query
	latentWarps   = 8   // that compute
	latentThreads = 384 // with the warps that copy
)

// latentParams is struct LatentParams.
type latentParams struct {
	keyMap cuda.TensorMap
	Params
	meet meetParams
	_    [16]byte // up to a multiple of mapAlign
}

// latentConfig returns the configuration of a launch: the ring has as many blocks of 64 columns as shared memory holds.
func (e *Engine) latentConfig(k *kernel, dim, parts int) (c config, ok bool) {
	columns := min(k.tile.rows*parts, latentColumns)
	rows, block := columns/parts, latentKeys*128
	rest := dim/64*columns*128 + block + (latentWarps+5)*rows*4 + 3*16
	c = config{warps: latentWarps, slots: (e.info.SharedPerBlockMost - rest) / (block + 16), buffers: 1, threads: latentThreads}
	c.shared = rest + c.slots*(block+16)
	return c, c.slots >= dim/64+1
}

func latentFits(e *Engine, k *kernel, dim, rows int) bool {
	for parts := 1; parts <= 2; parts++ {
		if _, ok := e.latentConfig(k, dim, parts); !ok {
			return false
		}
	}
	return true
}

// runLatent queues attention by a kernel for keys that hold the values. Queries and outputs of the keys' type are operands
// of products as they are, and so are rounded ones. Others are sums of two parts.
func (p *Plan) runLatent(s *cuda.Stream, o *Operands, k *kernel) (err error) {
	e, g, kv := p.engine, &p.form.geometry, o.Pages[0].Data.DType
	parts := 2
	if g.Mixed || o.Q.DType == kv && (o.Out.DType == kv || p.form.sharing.on()) {
		parts = 1
	}
	shape := e.shapeOf(k, g.Dim)
	c, _ := e.latentConfig(k, g.Dim, parts) // choose has found the configuration
	box := boxOf(shape.keys, p.form.paged, g.PageTokens)
	p.fill(o, &shape, &c, box)
	a := latentParams{Params: p.params.Params, meet: p.params.meet}
	if a.keyMap, err = e.tensorMap(&o.Pages[0].Data, &shape, box); err != nil {
		return err
	}
	p.args.Reset()
	cuda.Struct(&p.args, &a)
	p.hold(o)
	grid := cuda.Grid{Blocks: [3]int{e.blocks}, Threads: [3]int{c.threads}, Shared: c.shared, Overlap: true}
	return k.functions[parts-1].Launch(s, grid, &p.args)
}
