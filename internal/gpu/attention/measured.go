package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Attention that measures its weights (kernels/attn_measured.cuh): entropies of rows, and sums of weights by LeanTiles. The attention leaves
// two numbers of each row and chunk of keys, of which a launch behind it makes the results.

// MassTile divides the number of keys of LeanTiles that attention mass is of.
const MassTile = mostChunk

// measuredEntry is that launch.
const measuredEntry = "measured_rows"

// measureParams is struct MeasureParams.
type measureParams struct {
	sums   uint64
	chunks int32
	_      [4]byte
}

// measuredParams is struct MeasuredLaunchParams.
type measuredParams struct {
	keyMap, valueMap cuda.TensorMap
	Params
	score      scoreParams
	measure    measureParams
	meet       meetParams
	prefetched uint64
	_          [(mapAlign - (unsafe.Sizeof(Params{})+unsafe.Sizeof(scoreParams{})+unsafe.Sizeof(measureParams{})+unsafe.Sizeof(meetParams{})+8)%mapAlign) % mapAlign]byte
}

// measuredRows is struct MeasuredRowsParams.
type measuredRows struct {
	sums, seqs, sinks, mass, entropy     uint64
	lseRow, lseHead                      int64
	sequences, rows, heads, chunks, each int32
	places                               int32
}

// measured is the part of a plan for measured weights.
type measured struct {
	launch measuredParams
	rows   measuredRows
}

// mostChunks is the most chunks of a sequence for which memory is reserved in advance.
const mostChunks = 1 << 10

// sizeMeasured returns the number of chunks of keys of a row, and the bytes of the sums.
func (p *Plan) sizeMeasured(g *attn.Problem, need *stepSize, least *Capacity, k *kernel) (chunks int, bytes int64) {
	keys := p.engine.shapeOf(k, g.Dim).keys
	reserved := attn.Ceil(attn.Product(least.Pages, g.PageTokens), keys)
	chunks = growth(p.form.chunks, max(int(need.longest)*(tileTokens(g)/keys), 1), min(reserved, mostChunks))
	return chunks, 8 * int64(attn.Product(g.LSE.Extent(max(need.Rows, least.Rows, 1), g.Heads, 1), chunks))
}

// checkMeasured returns an error if results of measured weights have other types or sizes, or are not what the plan measures.
func (p *Plan) checkMeasured(op string, o *Operands) error {
	g := &p.form.geometry
	if o.Entropy.Buffer == nil && o.Mass.Buffer == nil {
		return nil
	}
	if !g.Measures {
		return gpu.Errorf(op, attn.ErrUnsupported, "entropies or attention mass of a plan that measures no weights")
	}
	if o.Mass.Buffer != nil {
		switch tile := g.TileTokens; {
		case tile < 1 || tile%mostChunk != 0:
			return gpu.Errorf(op, attn.ErrUnsupported, "attention mass of LeanTiles of %d keys: on a GPU they have a multiple of %d", tile, mostChunk)
		case o.Places < 1:
			return gpu.Errorf(op, attn.ErrShape, "attention mass with %d places", o.Places)
		}
		for i := range p.seqs.data {
			if n := attn.Ceil(int(p.seqs.data[i].keys), g.TileTokens); n > o.Places {
				return gpu.Errorf(op, attn.ErrShape, "a sequence of %d keys has %d LeanTiles, and attention mass has places for %d", p.seqs.data[i].keys, n, o.Places)
			}
		}
	}
	for _, x := range [...]struct {
		name string
		gpu.Memory
		of int
	}{{"entropies", o.Entropy, 1}, {"attention mass", o.Mass, o.Places}} {
		if x.Buffer == nil {
			continue
		}
		if x.DType != attn.Float32 {
			return gpu.Errorf(op, attn.ErrDType, "%s of %v; they must be of %v", x.name, x.DType, attn.Float32)
		}
		if err := x.CheckLoose(op, x.name, attn.Product(g.LSE.Extent(p.reach, g.Heads, 1), x.of)); err != nil {
			return err
		}
	}
	return nil
}

// runMeasured queues the attention, and the launch that makes the results. p.params is filled.
func (p *Plan) runMeasured(s *cuda.Stream, o *Operands, k *kernel, grid cuda.Grid) error {
	g, a, l := &p.form.geometry, &p.params, &p.measured.launch
	*l = measuredParams{keyMap: a.keyMap, valueMap: a.valueMap, Params: a.Params, score: p.scoresOf(g, o, k), measure: p.measureOf(), meet: a.meet}
	if p.form.walks {
		l.prefetched = a.prefetched
	}
	p.args.Reset()
	cuda.Struct(&p.args, l)
	p.hold(o)
	if err := k.functions[0].Launch(s, grid, &p.args); err != nil {
		return err
	}
	return p.finishMeasured(s, o, k)
}

// measureOf returns the parameters of kernels that measure weights; zero: they do not.
func (p *Plan) measureOf() (m measureParams) {
	if p.form.chunks > 0 {
		m.sums, m.chunks = p.memory.sums.Address(), int32(p.form.chunks)
	}
	return m
}

// finishMeasured queues the launch behind k that makes the results.
func (p *Plan) finishMeasured(s *cuda.Stream, o *Operands, k *kernel) error {
	g, r := &p.form.geometry, &p.measured.rows
	*r = measuredRows{
		sums: p.memory.sums.Address(), seqs: p.seqs.address(&p.memory), lseRow: int64(g.LSE.Row), lseHead: int64(g.LSE.Head),
		sequences: int32(len(p.seqs.data)), rows: int32(p.form.rows), heads: int32(g.Heads), chunks: int32(p.form.chunks), places: int32(o.Places),
	}
	if g.Sinks {
		r.sinks = o.Sinks.Address()
	}
	if o.Entropy.Buffer != nil {
		r.entropy = o.Entropy.Address()
	}
	if o.Mass.Buffer != nil {
		r.mass, r.each = o.Mass.Address(), int32(g.TileTokens/p.engine.shapeOf(k, g.Dim).keys)
	}
	p.args.Reset()
	cuda.Struct(&p.args, r)
	p.hold(o)
	const warps, most = 4, math.MaxUint16
	blocks := len(p.seqs.data) * g.Heads
	if p.form.rows > 0 {
		blocks = attn.Ceil(p.form.rows*g.Heads, warps)
	}
	return k.functions[1].Launch(s, cuda.Grid{Blocks: [3]int{min(max(blocks, 1), most)}, Threads: [3]int{warps * 32}}, &p.args)
}
