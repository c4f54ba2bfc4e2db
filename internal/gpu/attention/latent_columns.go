package attention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Decode attention to latents of E4M3 with keys as rows of products (kernels/attn_latent_columns.cuh), for output tiles of up to
// 2*latentFew rows. This file mirrors LatentColumnsParams, and the layout of shared memory.

const (
	latentPiece = 16 // keys of a piece of a chunk
	latentFew   = 16 // rows of output tiles of the kernels for fewest rows
)

// latentColumnsParams is struct LatentColumnsParams.
type latentColumnsParams struct {
	keyMap, restMap cuda.TensorMap
	Params
	meet   meetParams
	scales uint64 // an address
	whole  int32
	_      [4]byte // up to a multiple of mapAlign
}

// latentColumnsConfig returns the configuration of a launch for output tiles of at most `columns` rows. The ring has as many pieces as
// fit.
func (e *Engine) latentColumnsConfig(columns int) (c config, ok bool) {
	const each = latentPiece*(latentValue+(latentDim-latentValue)*2) + latentPiece*latentScales*4 + 16
	rest := columns*(latentDim*2+2*latentScales*latentKeys*2) + 13*columns*4 + 2*4 + 2*4 + 2*16
	c = config{warps: latentWarps, buffers: 1, threads: latentThreads}
	c.slots = (e.info.SharedPerBlockMost - rest) / each
	c.shared = rest + c.slots*each
	return c, c.slots >= 2*latentKeys/latentPiece
}

func latentColumnsFits(e *Engine, k *kernel, dim, rows int) bool {
	_, ok := e.latentColumnsConfig(2 * latentFew)
	return ok
}

// roundsQueries reports whether a kernel may round the queries of g to the type of its operands, for keys of type kv.
func roundsQueries(g *attn.Problem, kv attn.DType) bool {
	if kv == attn.E4M3 {
		kv = attn.BFloat16
	}
	return g.Mixed || g.QueryType == kv
}

// checkRounded returns an error if a kernel must not round the queries of o, which differ in type from those that the plan was built for.
func (p *Plan) checkRounded(o *Operands, kv attn.DType) error {
	g := &p.form.geometry
	if of := *g; o.Q.DType != g.QueryType {
		if of.QueryType = o.Q.DType; !roundsQueries(&of, kv) {
			return gpu.Errorf("run", attn.ErrDType, "queries of %v for latents of %v, where the plan's QueryType is %v: build a plan with the queries' type", o.Q.DType, kv, g.QueryType)
		}
	}
	return nil
}

// runLatentFew queues attention to latents of E4M3 for output tiles of up to 2*latentFew rows.
func (p *Plan) runLatentFew(s *cuda.Stream, o *Operands, k *kernel) error {
	if err := p.checkRounded(o, k.kv); err != nil {
		return err
	}
	columns, entry := latentFew, 0
	if p.form.tileRows > columns {
		columns, entry = 2*columns, 1
	}
	e, g := p.engine, &p.form.geometry
	shape, box := e.shapeOf(k, g.Dim), boxOf(latentPiece, p.form.paged, g.PageTokens)
	c, _ := e.latentColumnsConfig(columns) // choose has found the configuration
	p.fill(o, &shape, &c, box)
	a := latentColumnsParams{Params: p.params.Params, meet: p.params.meet, scales: o.Pages[0].Scales.Address()}
	blocks := 1
	if box == latentPiece {
		blocks, a.whole = latentValue/128, 1
	}
	var err error
	if a.keyMap, err = e.rowsMap(&o.Pages[0].Data, latentValue, box, blocks); err != nil {
		return err
	}
	if a.restMap, err = e.rowsMap(&o.Pages[1].Data, (latentDim-latentValue)*2, box, 1); err != nil {
		return err
	}
	p.args.Reset()
	cuda.Struct(&p.args, &a)
	p.hold(o)
	grid := cuda.Grid{Blocks: [3]int{e.blocks}, Threads: [3]int{c.threads}, Shared: c.shared, Overlap: true}
	return k.functions[entry].Launch(s, grid, &p.args)
}

// rowsMap returns the tensor map of rows of a multiple of 128 bytes, for boxes of `blocks` times 128 bytes of `box` rows. In shared
// memory the rows of a block are side by side.
func (e *Engine) rowsMap(m *gpu.Memory, row, box, blocks int) (cuda.TensorMap, error) {
	rows := max(m.Len*m.DType.Size()/row, 1)
	return e.maps.Get(mapKey{address: m.Address(), rows: rows, dim: row, box: box, whole: blocks > 1, element: m.DType}, func() (cuda.TensorMap, error) {
		return e.dev.TensorMap(m.Buffer, m.Offset, cuda.Tiles{
			ElementBytes: 2, Dims: [3]uint64{64, uint64(rows), uint64(row / 128)}, Strides: [2]uint64{uint64(row), 128}, Box: [3]uint32{64, uint32(box), uint32(blocks)},
		})
	})
}
