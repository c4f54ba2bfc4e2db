package attention

import (
	"cmp"
	"math"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Attention of many query rows, as prompts have them, by kernels of their own
// (kernels/attn_prefill.cuh): output tiles of 128 rows and more, each the work of one
// thread block.

const prefillSection = 12 << 20

// prefillThreads has a producer warp group, and a consumer for each 64 rows.
func prefillThreads(k *kernel) int { return (k.tile.rows/64 + 1) * 128 }

// prefillShared is the bytes of shared memory: two places for queries, or one for large ones, and for the factors of
// their rows where they have two parts, a ring of keys and one of values, and barriers.
func prefillShared(k *kernel) int {
	row, places, stages, parts := (k.dims[0]*2+127)/128*128, 2, k.tile.stages, k.way.parts
	if k.dims[0] > 128 {
		places = 1
	}
	return places*k.tile.rows*(parts*row+(parts-1)*4) + 2*stages*k.tile.keys*row + 2*2*8 + 4*stages*8
}

func prefillFits(e *Engine, k *kernel, _, _ int) bool {
	return prefillShared(k) <= e.info.SharedPerBlockMost
}

// prefillTile is struct PrefillTile.
type prefillTile struct{ seq, head, block, keys int32 }

// prefillParams is struct PrefillParams.
type prefillParams struct {
	keyMap, valueMap                                          cuda.TensorMap
	query, out, lse, seqs, pages, masked, count, tiles        uint64 // addresses
	queryRow, queryHead, outRow, outHead, lseRow, lseHead     int64
	pageRows, headRows, pageTokens, box, heads, group, causal int32
	queryType, outType                                        int32
	scale, natural                                            float32
	_                                                         [36]byte // up to a multiple of 64, the alignment of maps
}

// prefillKernels are those for prompts: for operands of one type, and for others. A plan does not know
// yet which will come. nil: none is worth it.
type prefillKernels struct{ same, precise *kernel }

// first is one of them, nil if there is none.
func (k prefillKernels) first() *kernel {
	if k.same != nil {
		return k.same
	}
	return k.precise
}

// findPrefill has the kernels for sequences of at most so many rows.
func (e *Engine) findPrefill(g *attn.Problem, rows int) (k prefillKernels, err error) {
	for _, same := range [...]bool{true, false} {
		found := e.find(&want{problem: g, features: g.Features(), rows: rows, same: same})
		if found == nil || found.way.parts == 0 {
			continue
		}
		if err := e.load(found); err != nil {
			return k, err
		}
		if found.way.same {
			k.same = found
		} else {
			k.precise = found
		}
	}
	return k, nil
}

// prefillCount is the number of output tiles of such a kernel.
func prefillCount(g *attn.Problem, seqs []attn.Sequence, k *kernel) (n int) {
	for i := range seqs {
		n += attn.Ceil(seqs[i].Queries*g.Group(), k.tile.rows) * g.KVHeads
	}
	return n
}

// prefillTiles lists the output tiles of such kernels, in the order in which blocks take
// them, behind their number, and says which kernels are worth it. There is no list where the
// other kernel is faster, whose schedule is made already.
func (p *Plan) prefillTiles(g *attn.Problem, of prefillKernels) prefillKernels {
	// Keys and values of as many heads as stay in the L2 cache make a section. Within one the
	// long output tiles come first.
	p.prefilling = append(p.prefilling, prefillTile{})
	group, begin, bytes, size := g.Group(), 1, 0, of.first().tile.rows
	section := func() {
		slices.SortStableFunc(p.prefilling[begin:], func(a, b prefillTile) int { return cmp.Compare(b.keys, a.keys) })
		begin, bytes = len(p.prefilling), 0
	}
	for n := range p.seqs {
		s := &p.seqs[n]
		rows := int(s.queries) * group
		for head := range g.KVHeads {
			if bytes += int(s.keys) * tokenBytes(g); bytes > prefillSection {
				section()
				bytes = int(s.keys) * tokenBytes(g)
			}
			for first := 0; first < rows; first += size {
				keys := keysOf(g, s, first, min(first+size, rows))
				p.prefilling = append(p.prefilling, prefillTile{int32(n), int32(head), int32(first / size), int32(keys.Len())})
			}
		}
	}
	section()
	p.prefilling[0].seq = int32(len(p.prefilling) - 1)
	if !p.engine.alwaysPrefill {
		most := p.mostPrefill() * int64(size)
		of.same, of.precise = p.prefillPays(g, of.same, most), p.prefillPays(g, of.precise, most)
	}
	if of.first() == nil {
		p.prefilling = p.prefilling[:0]
	}
	return of
}

// mostPrefill is how many keys the block with the most to do has.
func (p *Plan) mostPrefill() int64 {
	blocks := p.engine.blocks
	p.prefillKeys = append(p.prefillKeys[:0], make([]int64, blocks)...)
	for i, t := range p.prefilling[1:] {
		b := i % blocks
		if i/blocks%2 != 0 {
			b = blocks - 1 - b
		}
		p.prefillKeys[b] += int64(t.keys)
	}
	return slices.Max(p.prefillKeys)
}

// prefillPays is k if the block with the most to do, so many rows and keys, has done it before the other kernel's
// have; else nil. A multiprocessor does some ten times as many of them in the same time here,
// and five times as many with twice the products.
func (p *Plan) prefillPays(g *attn.Problem, k *kernel, most int64) *kernel {
	const faster = 6 // to be sure
	other := p.sched.Tiles() * int64(tileTokens(g)) * BlockRows / int64(p.engine.blocks)
	if k == nil || most*int64(k.way.parts) > faster*other {
		return nil
	}
	return k
}

// runPrefill queues attention by blocks that take output tiles.
func (p *Plan) runPrefill(s *cuda.Stream, o *Operands, k *kernel) (err error) {
	e, g, m, a := p.engine, &p.look.geometry, &p.memory, &p.prefillParams
	*a = prefillParams{}
	shape := e.shape(k.kv, g.Dim)
	shape.keys = 0 // no box is more than one column block
	a.box = int32(boxOf(k.tile.keys, p.look.paged, g.PageTokens))
	if a.keyMap, err = e.tensorMap(&o.K, &shape, int(a.box)); err != nil {
		return err
	}
	if a.valueMap, err = e.tensorMap(&o.V, &shape, int(a.box)); err != nil {
		return err
	}
	table := m.table.Address()
	a.query, a.out = o.Q.Address(), o.Out.Address()
	if o.LSE.Buffer != nil {
		a.lse = o.LSE.Address()
	}
	a.seqs, a.masked, a.count = table+uint64(m.sections.seqs), table+uint64(m.sections.masked), table+uint64(m.sections.prefill)
	a.tiles = a.count + uint64(unsafe.Sizeof(prefillTile{}))
	if p.look.paged {
		a.pages = table + uint64(m.sections.pages)
	}
	a.queryRow, a.queryHead = int64(g.Query.Row), int64(g.Query.Head)
	a.outRow, a.outHead = int64(g.Out.Row), int64(g.Out.Head)
	a.lseRow, a.lseHead = int64(g.LSE.Row), int64(g.LSE.Head)
	a.pageRows, a.headRows, a.pageTokens = int32(g.Key.Page/g.Dim), int32(g.Key.Head/g.Dim), int32(g.PageTokens)
	a.heads, a.group = int32(g.KVHeads), int32(g.Group())
	if g.Causal {
		a.causal = 1
	}
	a.queryType, a.outType = gpu.Code(o.Q.DType), gpu.Code(o.Out.DType)
	a.scale, a.natural = float32(g.Scale*math.Log2E), float32(g.Scale)
	p.args.Reset()
	cuda.Struct(&p.args, a)
	p.hold(o)
	grid := cuda.Grid{Blocks: [3]int{e.blocks}, Threads: [3]int{prefillThreads(k)}, Shared: prefillShared(k), Overlap: true}
	return k.functions[0].Launch(s, grid, &p.args)
}
