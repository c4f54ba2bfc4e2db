package layers

import (
	"fmt"
	"math"
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Linear layers whose weights have 8 or 4 bits. A launch makes operands of up to 64 rows of x, and one launch for each part of the layer
// reads its weights once. On 9.0, a layer of up to fewColumns columns of operands is a launch by clusters (narrow_few.go), which reads x
// itself. A norm has a launch of its own, and so has a gate or an activation that no kernel of a linear layer computes.

// Modules with the kernels. GPUs of 9.0 have kernels of their own.
const narrowUnit, narrowHopperUnit = "narrow", "narrow_hopper"

// Constants of the kernels (kernels/gemm_narrow.cuh).
const (
	narrowThreads = 256
	narrowTile    = 256
	narrowWeights = 2 * 16 * 512 // bytes of a stage's weights
	narrowPlane   = 2048
	narrowWord    = 128 // bytes behind the ring
	narrowMagic   = 0x64006400

	narrowMostStages = 6
	narrowSums       = 2 * narrowThreads * 4 // float32 of a block's sums of eight columns

	narrowMost = 64 // columns of operands

	// Of kernels for 9.0.
	narrowGroupThreads = (16 + 4) * 32 // of kernels with warp groups
	narrowAhead        = 8             // stages behind those of a full ring that are prefetched to the L2 cache before the launch ahead has ended
	narrowLate         = 1000          // stages before the last one where the next launch may start: there are fewer, so that launch starts at once
)

// narrowColumns are the columns of operands that the kernels have. narrowBlocks are thread blocks of a multiprocessor, and narrowShares the
// blocks that may have parts of one tile: the last one reads the sums of all.
var (
	narrowColumns = [...]int{8, 16, 32, narrowMost}
	narrowBlocks  = [len(narrowColumns)]int{2, 2, 2, 1}
	narrowShares  = [len(narrowColumns)]int{32, 16, 16, 8}
)

// narrowElements are the elements of packed matrices, by their numbers in narrow_gather.
var narrowElements = [...]string{"int8", "e4m3", "int4"}

// narrowIntegers are the elements whose kernels may multiply integers.
var narrowIntegers = [...]string{"int8", "int4"}

// narrowKernels are loaded at first use.
type narrowKernels struct {
	of               map[string]*[len(narrowColumns)]*cuda.Function // by elements
	integers         map[string]*[len(narrowColumns)]*cuda.Function // by elements: kernels that multiply integers, of up to fewColumns columns
	operands, gather *cuda.Function
	merge            [len(narrowColumns)]*cuda.Function // of kernels with warp groups
	super            *narrowKernels                     // for super-blocks; nil: not loaded yet
}

// narrowSet returns the kernels <prefix>_<columns of operands> that a module has.
func narrowSet(m *cuda.Module, prefix string, has func(columns int) bool) (of *[len(narrowColumns)]*cuda.Function, err error) {
	of = new([len(narrowColumns)]*cuda.Function)
	for i, n := range narrowColumns {
		if !has(n) {
			continue
		}
		if of[i], err = gpu.WithShared(m, fmt.Sprintf("%s_%d", prefix, n)); err != nil {
			return nil, err
		}
	}
	return of, nil
}

// narrowOf returns the kernels, loaded at first use, which may be within a capture.
func (d *Engine) narrowOf() (*narrowKernels, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	if d.narrow != nil {
		return d.narrow, nil
	}
	k := &narrowKernels{of: map[string]*[len(narrowColumns)]*cuda.Function{}, integers: map[string]*[len(narrowColumns)]*cuda.Function{}}
	err := d.dev.Relaxed(func() error {
		m, err := gpu.Module(d.dev, narrowUnit)
		if err != nil {
			return err
		}
		if k.operands, err = m.Function("narrow_operands"); err != nil {
			return err
		}
		if k.gather, err = m.Function("narrow_gather"); err != nil {
			return err
		}
		unit := narrowUnit
		if d.narrowGroups() {
			unit = narrowHopperUnit
			if m, err = gpu.Module(d.dev, unit); err != nil {
				return err
			}
			for i, n := range narrowColumns {
				if n < narrowFewest {
					continue
				}
				if k.merge[i], err = m.Function(fmt.Sprintf("%s_merge_%d", unit, n)); err != nil {
					return err
				}
			}
		}
		for _, of := range narrowElements {
			if k.of[of], err = narrowSet(m, unit+"_"+of, func(int) bool { return true }); err != nil {
				return err
			}
		}
		if !d.narrowGroups() {
			return nil
		}
		for _, of := range narrowIntegers {
			if k.integers[of], err = narrowSet(m, unit+"_integers_"+of, func(columns int) bool { return columns <= fewColumns }); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	d.narrow = k
	return k, nil
}

// Narrow reports whether a layer has weights of 8 or 4 bits.
func (o *Linear) Narrow() bool {
	for i := range o.Parts {
		if o.Parts[i].Packed != nil {
			return true
		}
	}
	return false
}

// checkPacked checks weights of 8 or 4 bits.
func (p *LinearPart) checkPacked(op string, in int) error {
	if p.Packed.Columns != in || p.First < 0 || p.First+p.Out > p.Packed.Rows {
		return gpu.Errorf(op, attn.ErrShape, "rows [%d, %d) of %d elements, of packed weights of %d rows of %d", p.First, p.First+p.Out, in, p.Packed.Rows, p.Packed.Columns)
	}
	return p.W.Check(op, "w", p.Packed.Bytes/4)
}

// narrowParams is struct NarrowParams.
type narrowParams struct {
	w, scales, second, x, order, sums, down, bias, residual, y, y2, partials, counters uint64
	blocks, rows, parts, columns, out, split, chunks, units, group, groups             int32
	fresh, full, shift, kind, zero, factor, stages, stage, in, ranks                   int32
	activation, early                                                                  int32
	magic                                                                              uint32
	ahead, late                                                                        int32
	_                                                                                  [4]byte
}

// narrowOperandParams is struct NarrowOperandParams.
type narrowOperandParams struct {
	x, order, operands, sums, down, counters uint64
	rows, in, deep, parts, tiles             int32
	columns, blocks, swizzled                int32
}

// narrowLaunch is a launch for all rows of a part's weights, which may be the weights of two parts.
type narrowLaunch struct {
	first, parts  int // of the Linear
	packed        *weight.Packed
	kind          int // of narrowColumns
	of            *[len(narrowColumns)]*cuda.Function
	blocks        int
	stages, stage int
	tiles, units  int
	ranks, shared int // of a launch by clusters
	cut           int // operands of an element of x, of a launch by clusters
}

// narrowGroup is launches with the same operands.
type narrowGroup struct {
	order    int64 // offset of the order of columns in the first part's weights; 0: columns are in order
	deep     int   // columns of operands, 32 each
	minima   bool
	tiles    int // of all launches
	launches []narrowLaunch
}

// narrowPlan is how a Linear is launched.
type narrowPlan struct {
	rows, parts int // rows of x of a launch, and parts of an element
	groups      []narrowGroup
	few         []narrowLaunch // by clusters
	dense       []Linear       // layers with other weights
	normed      int            // float32 of the norm of x
	rest        int            // float32 of the scratch behind it
}

// planNarrow plans a checked Linear without an activation or gate that is a launch of its own.
func (d *Engine) planNarrow(o *Linear) (p narrowPlan, err error) {
	if o.Norm != nil {
		p.normed = attn.Ceil(o.Rows*o.In, 4) * 4
	}
	p.parts = o.operandParts()
	p.rows = min(o.Rows, o.narrowMost()/p.parts)
	columns := d.narrowPadded(p.rows * p.parts)
	for i := 0; i < len(o.Parts); i++ {
		part := &o.Parts[i]
		if part.Packed == nil {
			dense := *o
			dense.Norm, dense.Parts = nil, o.Parts[i:i+1]
			n, err := d.Scratch(&dense)
			if err != nil {
				return p, err
			}
			p.rest = max(p.rest, n)
			p.dense = append(p.dense, dense)
			continue
		}
		l := narrowLaunch{first: i, parts: 1, packed: part.Packed, kind: d.narrowKindOf(part.Packed, columns)}
		k, err := d.kernelsOf(l.packed)
		if err != nil {
			return p, err
		}
		l.of = k.of[l.packed.Kernels]
		if i+1 < len(o.Parts) && part.Out < part.Packed.Rows { // halves of one weight
			l.parts = 2
			i++
		}
		if ok, err := d.configureFew(&l, k, p.rows, p.parts); err != nil {
			return p, err
		} else if ok {
			p.few = append(p.few, l)
			continue
		}
		d.configureNarrow(&l, columns)
		g := narrowGroup{order: int64(part.Packed.Order), deep: l.units * narrowDeep(part.Packed), minima: part.Packed.Kind == weight.PackedMinima}
		if n := len(p.groups); n > 0 && g.order == 0 && p.groups[n-1].order == 0 && g.deep == p.groups[n-1].deep && g.minima == p.groups[n-1].minima {
			g = p.groups[n-1]
			p.groups = p.groups[:n-1]
		}
		g.tiles += l.tiles
		g.launches = append(g.launches, l)
		p.groups = append(p.groups, g)
	}
	for i := range p.groups {
		s := d.narrowScratch(&p, &p.groups[i], gpu.Memory{})
		p.rest = max(p.rest, s.used)
	}
	return p, nil
}

// narrowDeep returns the columns of a unit, 32 each: two chunks.
func narrowDeep(p *weight.Packed) int { return p.Width() / 32 * 2 }

// narrowKind returns the index of the kernels with the fewest columns that are enough.
func narrowKind(columns int) (kind int) {
	for columns > narrowColumns[kind] {
		kind++
	}
	return kind
}

// narrowPadded returns the columns of operands with those that are 0. On 9.0, kernels of few columns read no operands.
func (d *Engine) narrowPadded(columns int) int {
	if d.narrowGroups() {
		return narrowColumns[narrowKind(max(columns, narrowFewest))]
	}
	return attn.Ceil(columns, 8) * 8
}

// narrowGroups reports whether kernels with operands are those of warp groups (kernels/gemm_narrow_groups.cuh).
func (d *Engine) narrowGroups() bool { return d.info.Capability == groupCapability }

// narrowBits returns the bits of the 32 columns of a unit with which a group of columns begins, those with which it ends, or its part
// in the unit, and log2 of the 32 columns of the part.
func narrowBits(p *weight.Packed) (fresh, full, shift int32) {
	deep := narrowDeep(p)
	each := min(p.Group/32, deep)
	for k := 0; each > 0 && k < deep; k += each {
		fresh |= 1 << k
		full |= 1 << (k + each - 1)
	}
	return fresh, full, int32(bits.Len(uint(max(each, 1))) - 1)
}

// narrowFactors returns the groups of a unit, 0 if a group is a row.
func narrowFactors(p *weight.Packed) int {
	if p.Group == 0 {
		return 0
	}
	return narrowDeep(p) / min(p.Group/32, narrowDeep(p))
}

// configureNarrow chooses the grid and the ring of a launch.
func (d *Engine) configureNarrow(l *narrowLaunch, columns int) {
	deep := narrowDeep(l.packed)
	l.units = attn.Ceil(l.packed.Chunks, 2)
	l.tiles = attn.Ceil(l.packed.Rows, narrowTile)
	l.stage = narrowWeights + deep*columns*64
	if l.packed.Group > 0 {
		l.stage += narrowPlane
		if l.packed.Kind != weight.PackedScales {
			l.stage += narrowPlane
		}
	}
	if l.packed.Kind == weight.PackedMinima {
		l.stage += attn.Ceil(deep*columns*4, 128) * 128
	}
	const static = narrowWord + 1<<10 // shared memory besides, and of the driver
	beside := narrowBlocks[l.kind]
	if d.narrowGroups() {
		beside = 1
		l.stage = attn.Ceil(narrowWeights+deep*columns*64+2*narrowFactors(l.packed)*narrowTile*l.packed.Factor+deep*columns*4, 1024) * 1024
	}
	for {
		if l.stages = min(narrowMostStages, (d.info.SharedPerBlockMost/beside-static)/l.stage); l.stages >= 2 || beside == 1 {
			break
		}
		beside = 1
	}
	l.stages = max(l.stages, 2)
	l.blocks = min(max(d.info.Multiprocessors, 1)*beside, l.tiles*l.units, l.tiles*narrowShares[l.kind])
}

// narrowScratch is the scratch of a group's launches.
type narrowScratch struct {
	operands, sums, down, counters, partials gpu.Memory
	used                                     int
}

// narrowScratch divides the scratch behind the norm.
func (d *Engine) narrowScratch(p *narrowPlan, g *narrowGroup, of gpu.Memory) (s narrowScratch) {
	r := scratch{of: of}
	columns := d.narrowPadded(p.rows * p.parts)
	s.operands = r.take(g.deep * columns * 16)
	if g.minima {
		s.sums = r.take(g.deep * columns)
	}
	s.down, s.counters = r.take(p.rows), r.take(g.tiles)
	most := 0
	for i := range g.launches {
		l := &g.launches[i]
		most = max(most, 2*l.blocks*narrowSums*narrowColumns[l.kind]/8)
	}
	s.partials = r.take(most)
	s.used = r.used
	return s
}

// narrowScratchOf returns the scratch of a Linear, in float32.
func (d *Engine) narrowScratchOf(o *Linear) (int, error) {
	p, err := d.planNarrow(o)
	return p.normed + p.rest, err
}

// queueNarrow queues a checked Linear without an activation or gate that is a launch of its own.
func (d *Engine) queueNarrow(s *cuda.Stream, o *Linear) error {
	p, err := d.planNarrow(o)
	if err != nil {
		return err
	}
	k, err := d.narrowOf()
	if err != nil {
		return err
	}
	if n := p.normed + p.rest; n > 0 {
		if err := o.Scratch.CheckFloats("linear", "the scratch", n); err != nil {
			return err
		}
	}
	x, behind := o.X, o.Scratch
	if o.Norm != nil {
		x = gpu.Memory{Buffer: o.Scratch.Buffer, Offset: o.Scratch.Offset, DType: attn.Float32, Len: p.normed}
		if err := d.Norm(s, o.Rows, o.In, o.X, x, o.Norm); err != nil {
			return err
		}
		behind.Offset += int64(p.normed) * 4
		behind.Len -= p.normed
	}
	for i := range p.dense {
		p.dense[i].X, p.dense[i].Scratch = x, behind
		if err := d.Linear(s, &p.dense[i]); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range p.few {
		for row := 0; row < o.Rows; row += p.rows {
			if err := d.queueFew(s, o, &p, &p.few[i], x, row); err != nil {
				return err
			}
		}
	}
	for i := range p.groups {
		g := &p.groups[i]
		at := d.narrowScratch(&p, g, behind)
		for row := 0; row < o.Rows; row += p.rows {
			if err := d.narrowRows(s, k, o, &p, g, &at, x, row); err != nil {
				return err
			}
		}
	}
	return nil
}

// narrowRows queues a group's launches for rows of x from one row on. d.mu is held.
func (d *Engine) narrowRows(s *cuda.Stream, k *narrowKernels, o *Linear, p *narrowPlan, g *narrowGroup, at *narrowScratch, x gpu.Memory, row int) error {
	rows := min(p.rows, o.Rows-row)
	columns := d.narrowPadded(rows * p.parts)
	from := narrowOperandParams{
		x: x.Address() + uint64(row)*uint64(o.In)*4, operands: at.operands.Address(), sums: at.sums.AddressOr0(), down: at.down.Address(), counters: at.counters.Address(),
		rows: int32(rows), in: int32(o.In), deep: int32(g.deep), parts: int32(p.parts), tiles: int32(g.tiles), columns: int32(columns),
	}
	first := &o.Parts[g.launches[0].first]
	if g.order > 0 {
		from.order = first.W.Address() + uint64(g.order)
	}
	from.blocks = int32(min(attn.Ceil(g.deep, narrowThreads/4), attn.Ceil(2*max(d.info.Multiprocessors, 1), rows)))
	threads := narrowThreads
	if d.narrowGroups() {
		from.swizzled, threads = 1, narrowGroupThreads
	}
	d.args.Reset()
	cuda.Struct(&d.args, &from)
	d.hold(x, at.operands, first.W)
	grid := cuda.Grid{Blocks: [3]int{rows * int(from.blocks)}, Threads: [3]int{narrowThreads}, Overlap: d.overlap(), Waits: true}
	if err := k.operands.Launch(s, grid, &d.args); err != nil {
		return err
	}
	tiles := 0
	for i := range g.launches {
		l := &g.launches[i]
		a := l.arguments(o, p, row, rows)
		a.x, a.sums, a.down, a.columns = at.operands.Address(), at.sums.AddressOr0(), at.down.Address(), int32(columns)
		a.partials, a.counters = at.partials.Address(), at.counters.Address()+uint64(tiles)*4
		tiles += l.tiles
		d.args.Reset()
		cuda.Struct(&d.args, &a)
		part, last := &o.Parts[l.first], &o.Parts[l.first+l.parts-1]
		d.hold(part.W, part.B, part.Y, last.Y, o.Residual, at.operands)
		grid := cuda.Grid{Blocks: [3]int{l.blocks}, Threads: [3]int{threads}, Shared: l.stages*l.stage + narrowWord, Overlap: d.overlap(), Waits: !o.Early}
		kind := d.narrowKindOf(l.packed, columns)
		if err := l.of[kind].Launch(s, grid, &d.args); err != nil {
			return err
		}
		if l.blocks == l.tiles || !d.narrowGroups() { // no tile is shared, or blocks merge
			continue
		}
		d.args.Reset()
		cuda.Struct(&d.args, &a)
		d.hold(part.B, part.Y, last.Y, o.Residual, at.partials)
		grid = cuda.Grid{Blocks: [3]int{l.tiles * columns / 4}, Threads: [3]int{narrowThreads}, Overlap: true, Waits: true}
		if err := k.merge[kind].Launch(s, grid, &d.args); err != nil {
			return err
		}
	}
	return nil
}

// arguments returns the parameters that all kernels have, for rows of x from one row on.
func (l *narrowLaunch) arguments(o *Linear, p *narrowPlan, row, rows int) narrowParams {
	w := l.packed
	part, last := &o.Parts[l.first], &o.Parts[l.first+l.parts-1]
	base := part.W.Address()
	a := narrowParams{
		w: base, scales: base + uint64(w.Scales), bias: part.B.AddressOr0(), y: part.Y.Address() + uint64(row)*uint64(part.Out)*4,
		blocks: int32(l.blocks), rows: int32(rows), parts: int32(p.parts), out: int32(w.Rows), split: int32(part.Out), chunks: int32(w.Chunks), units: int32(l.units),
		group: int32(w.Group / 32), groups: int32(w.Groups), kind: int32(w.Kind), zero: w.Zero, factor: int32(w.Factor),
		stages: int32(l.stages), stage: int32(l.stage), activation: o.activation(), magic: narrowMagic,
	}
	a.fresh, a.full, a.shift = narrowBits(w)
	a.late = narrowLate
	if w.Second > 0 {
		a.second = base + uint64(w.Second)
	}
	if l.parts == 2 {
		a.y2 = last.Y.Address() + uint64(row)*uint64(last.Out)*4
	}
	if o.Residual.Buffer != nil {
		a.residual = o.Residual.Address() + uint64(row)*uint64(part.Out)*4
	}
	if o.Early {
		a.early, a.ahead = 1, narrowAhead
	}
	return a
}

// narrowGatherParams is struct NarrowGatherParams.
type narrowGatherParams struct {
	w, scales, second, order, ids, residual, y        uint64
	n, out, chunks, group, groups, kind, zero, factor int32
	format                                            int32
	_                                                 [4]byte
}

// gatherNarrow queues a Gather of a packed table.
func (d *Engine) gatherNarrow(s *cuda.Stream, o *Gather) error {
	w := o.Packed
	k, err := d.kernelsOf(w)
	if err != nil {
		return err
	}
	base := o.Table.Address()
	p := narrowGatherParams{
		w: base, scales: base + uint64(w.Scales), ids: o.IDs.Address(), residual: o.Residual.AddressOr0(), y: o.Y.Address(),
		n: int32(o.N), out: int32(w.Rows), chunks: int32(w.Chunks), group: int32(w.Group / 32), groups: int32(w.Groups), kind: int32(w.Kind), zero: w.Zero, factor: int32(w.Factor),
	}
	for i, of := range narrowElements {
		if of == w.Kernels {
			p.format = int32(i)
		}
	}
	if w.Second > 0 {
		p.second = base + uint64(w.Second)
	}
	if w.Order > 0 {
		p.order = base + uint64(w.Order)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.args.Reset()
	cuda.Struct(&d.args, &p)
	d.hold(o.Table, o.IDs, o.Residual, o.Y)
	return k.gather.Launch(s, cuda.Grid{Blocks: [3]int{o.Rows}, Threads: [3]int{narrowThreads}, Overlap: d.overlap(), Waits: true}, &d.args)
}

// checkNarrow checks a Gather's packed table.
func (o *Gather) checkNarrow(op string) error {
	if w := o.Packed; w.Rows != o.TableRows || w.Columns != o.N || o.N > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrShape, "a table of %d rows of %d elements, packed with %d rows of %d", o.TableRows, o.N, w.Rows, w.Columns)
	}
	return o.Table.Check(op, "the table", o.Packed.Bytes/4)
}
