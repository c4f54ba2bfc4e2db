package attention

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Attention of many query rows, as prompts have them, by kernels of their own
// (kernels/prefill.cuh): output tiles of 128 rows and more, each the work of one
// thread block.

// prefillUnit is the module with these kernels.
const prefillUnit = "prefill"

const (
	prefillKeys    = 128 // of a step
	prefillSection = 12 << 20
)

// prefillKernel is what follows from a head dim.
type prefillKernel struct {
	dim    int
	groups int // consumer warp groups, of 64 rows each
	stages int // of the ring
}

var prefillKernels = [...]prefillKernel{{64, 3, 4}, {128, 2, 2}}

func (k *prefillKernel) rows() int { return k.groups * 64 }

func (k *prefillKernel) threads() int { return (k.groups + 1) * 128 }

// shared is the bytes of shared memory: two places for queries, a ring of keys and
// one of values, and barriers.
func (k *prefillKernel) shared() int {
	return 2*k.rows()*k.dim*2 + 2*k.stages*prefillKeys*k.dim*2 + 2*2*8 + 4*k.stages*8
}

// prefillTile is struct PrefillTile.
type prefillTile struct{ seq, head, block, steps int32 }

// prefillParams is struct PrefillParams.
type prefillParams struct {
	keyMap, valueMap                                          cuda.TensorMap
	query, out, lse, seqs, pages, blind, count, tiles         uint64 // addresses
	queryRow, queryHead, outRow, outHead, lseRow, lseHead     int64
	pageRows, headRows, pageTokens, box, heads, group, causal int32
	scale, natural                                            float32
	_                                                         [44]byte // up to a multiple of 64, the alignment of maps
}

type prefillKey struct {
	element attn.DType
	dim     int // index
}

// prefill is the kernels of an engine.
type prefill struct {
	sync.Mutex
	kernels map[prefillKey]*cuda.Function // by element and index of prefillKernels; nil: not loaded

	always bool // they are worth having for any number of rows: tests
}

// loadPrefill loads the kernels when they are first needed.
func (e *Engine) loadPrefill() error {
	e.prefill.Lock()
	defer e.prefill.Unlock()
	if e.prefill.kernels != nil {
		return nil
	}
	m, err := e.dev.Module(prefillUnit, func() ([]byte, error) { return gpu.Image(prefillUnit, e.info.Capability) })
	if err != nil {
		return err
	}
	kernels := map[prefillKey]*cuda.Function{}
	for _, d := range gpu.Halves {
		for j, k := range prefillKernels {
			if kernels[prefillKey{d, j}], err = gpu.WithShared(m, &e.info, fmt.Sprintf("prefill_%s_%d", gpu.Name(d), k.dim)); err != nil {
				return err
			}
		}
	}
	e.prefill.kernels = kernels
	return nil
}

// prefillIndex is the index of the kernels that can do a problem, or -1. They take scales that
// keep the order of scores, and rows of whole 16 bytes.
func (e *Engine) prefillIndex(g *attn.Problem) int {
	i := slices.IndexFunc(prefillKernels[:], func(k prefillKernel) bool { return k.dim == g.Dim })
	strides := g.Query.Row | g.Query.Head | g.Out.Row | g.Out.Head
	if i < 0 || !e.finishes() || e.info.SharedPerBlockMost < prefillKernels[i].shared() ||
		!canPrefill.Does(g) || !(g.Scale > 0) || strides%8 != 0 {
		return -1
	}
	return i
}

// prefillCount is the number of output tiles of these kernels, or 0 where no sequence has
// more rows than an output tile of the other one.
func prefillCount(g *attn.Problem, seqs []attn.Sequence, k *prefillKernel) (n int) {
	group, most := g.Heads/g.KVHeads, 0
	for i := range seqs {
		rows := seqs[i].Queries * group
		most = max(most, rows)
		n += gpu.Ceil(rows, k.rows()) * g.KVHeads
	}
	if most <= BlockRows {
		return 0
	}
	return n
}

// prefillTiles lists the output tiles of these kernels, in the order in which blocks take
// them, behind their number. There is no list where the other kernel is faster, whose schedule
// is made already.
func (p *Plan) prefillTiles(g *attn.Problem, k *prefillKernel) {
	// Keys and values of as many heads as stay in the L2 cache make a section. Within one the
	// long output tiles come first.
	p.prefilling = append(p.prefilling, prefillTile{})
	group, begin, bytes := g.Heads/g.KVHeads, 1, 0
	section := func() {
		slices.SortStableFunc(p.prefilling[begin:], func(a, b prefillTile) int { return cmp.Compare(b.steps, a.steps) })
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
			for first := 0; first < rows; first += k.rows() {
				steps := keysOf(g, s, first, min(first+k.rows(), rows)).Tiles(prefillKeys)
				p.prefilling = append(p.prefilling, prefillTile{int32(n), int32(head), int32(first / k.rows()), int32(steps)})
			}
		}
	}
	section()
	p.prefilling[0].seq = int32(len(p.prefilling) - 1)
	if !p.engine.prefill.always && !p.prefillPays(g, k) {
		p.prefilling = p.prefilling[:0]
	}
}

// prefillPays says whether the block with the most to do has done it before the other kernel's
// have. A multiprocessor does some ten times as many rows and keys in the same time here.
func (p *Plan) prefillPays(g *attn.Problem, k *prefillKernel) bool {
	const faster = 6 // to be sure
	blocks := p.engine.blocks
	p.prefillSteps = append(p.prefillSteps[:0], make([]int64, blocks)...)
	for i, t := range p.prefilling[1:] {
		b := i % blocks
		if i/blocks%2 != 0 {
			b = blocks - 1 - b
		}
		p.prefillSteps[b] += int64(t.steps)
	}
	there := slices.Max(p.prefillSteps) * prefillKeys * int64(k.rows())
	other := p.sched.Tiles() * int64(tileTokens(g)) * BlockRows / int64(blocks)
	return there <= faster*other
}

// prefills says whether such a kernel takes these operands.
func (p *Plan) prefills(o *Operands) bool {
	return p.look.prefill && o.Q.DType == o.K.DType && o.Out.DType == o.K.DType
}

// prefillLaunch checks operands, and fills the arguments of their launch.
func (p *Plan) prefillLaunch(op string, o *Operands) (f *cuda.Function, grid cuda.Grid, err error) {
	if err := p.checkOperands(op, o); err != nil {
		return nil, grid, err
	}
	e, g, m, a := p.engine, &p.look.geometry, &p.memory, &prefillParams{}
	i := e.prefillIndex(g)
	k := &prefillKernels[i]
	element := o.K.DType
	shape := e.shape(element, g.Dim)
	shape.keys = 0 // no box is more than one column block
	a.box = int32(boxOf(prefillKeys, p.look.paged, g.PageTokens))
	if a.keyMap, err = e.tensorMap(&o.K, &shape, int(a.box)); err != nil {
		return nil, grid, err
	}
	if a.valueMap, err = e.tensorMap(&o.V, &shape, int(a.box)); err != nil {
		return nil, grid, err
	}
	table := m.table.Address()
	a.query, a.out = o.Q.Address(), o.Out.Address()
	if o.LSE.Buffer != nil {
		a.lse = o.LSE.Address()
	}
	a.seqs, a.blind, a.count = table+uint64(m.sections.seqs), table+uint64(m.sections.blind), table+uint64(m.sections.prefill)
	a.tiles = a.count + uint64(unsafe.Sizeof(prefillTile{}))
	if p.look.paged {
		a.pages = table + uint64(m.sections.pages)
	}
	a.queryRow, a.queryHead = int64(g.Query.Row), int64(g.Query.Head)
	a.outRow, a.outHead = int64(g.Out.Row), int64(g.Out.Head)
	a.lseRow, a.lseHead = int64(g.LSE.Row), int64(g.LSE.Head)
	a.pageRows, a.headRows, a.pageTokens = int32(g.Key.Page/g.Dim), int32(g.Key.Head/g.Dim), int32(g.PageTokens)
	a.heads, a.group = int32(g.KVHeads), int32(g.Heads/g.KVHeads)
	if g.Causal {
		a.causal = 1
	}
	a.scale, a.natural = float32(g.Scale*math.Log2E), float32(g.Scale)
	p.args.Reset()
	cuda.Struct(&p.args, a)
	p.hold(o)
	grid = cuda.Grid{Blocks: [3]int{e.blocks}, Threads: [3]int{k.threads()}, Shared: k.shared(), Overlap: true}
	return e.prefill.kernels[prefillKey{element, i}], grid, nil
}
