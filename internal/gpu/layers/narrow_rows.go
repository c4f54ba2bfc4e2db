package layers

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Linear layers whose weights have 8 or 4 bits and are read once for 128 or 256 rows of x (kernels/gemm_narrow_rows.cuh), on 9.0. A launch makes
// operands of x, of float16 or quantised to the type of weights of 8 bits. Then a launch for each format multiplies.

// narrowRowsUnit is the module with the kernels.
const narrowRowsUnit = "narrow_rows"

// Constants of the kernels.
const (
	narrowRowsThreads = 384
	narrowRowsStep    = 128       // bytes of a row of x
	narrowRowsRing    = 192 << 10 // bytes
	narrowRowsPair    = 2         // thread blocks of a cluster
	narrowRowsHalf    = 128       // channels of a thread block
	narrowRowsGated   = 128       // rows of x of a gated unit's tile

	// Costs, in steps of tiles with 256 rows: of steps with 128 rows, and of the end of a tile of 256 rows.
	narrowRowsShort = 0.7
	narrowRowsEnd   = 4
)

// narrowRowsTiles are the rows of x of a tile.
var narrowRowsTiles = [...]int{256, 128}

// leastWideRows is the least number of rows of float16. Fewer rows are launches of kernels that read the weights once for 64 rows.
const leastWideRows = 129

// narrowRowsKinds are the kernels: of quantised rows, by elements, and of rows of float16, by elements and the least columns of a group.
var narrowRowsKinds = [...]string{"int8", "e4m3", "f16_int8", "f16_int8_32", "f16_e4m3", "f16_e4m3_64", "f16_int4_64", "f16_int4_32"}

// narrowRowsKernels are the kernels of a kind. operands and gated are for quantised rows.
type narrowRowsKernels struct {
	operands, gated *cuda.Function
	tiles           [len(narrowRowsTiles)]*cuda.Function
}

// narrowRowsOf returns the kernels by kind, loaded at first use, which may be within a capture.
func (d *Engine) narrowRowsOf() (map[string]*narrowRowsKernels, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	if d.byRows != nil {
		return d.byRows, nil
	}
	all := map[string]*narrowRowsKernels{}
	err := d.dev.Relaxed(func() error {
		m, err := gpu.Module(d.dev, narrowRowsUnit)
		if err != nil {
			return err
		}
		for _, of := range narrowRowsKinds {
			k := new(narrowRowsKernels)
			all[of] = k
			for j, rows := range narrowRowsTiles {
				if k.tiles[j], err = gpu.WithShared(m, fmt.Sprintf("%s_%s_%d", narrowRowsUnit, of, rows)); err != nil {
					return err
				}
			}
			if strings.HasPrefix(of, "f16_") {
				continue
			}
			if k.operands, err = m.Function(narrowRowsUnit + "_operands_" + of); err != nil {
				return err
			}
			if k.gated, err = gpu.WithShared(m, fmt.Sprintf("%s_%s_gated", narrowRowsUnit, of)); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		d.byRows = all
	}
	return d.byRows, err
}

// narrowRowsKind returns the kind of a part's kernels; "": there are none.
func (o *Linear) narrowRowsKind(w *weight.Packed) string {
	switch {
	case o.quantises():
		return w.Kernels
	case w.Super || w.Order > 0 || w.Kind != weight.PackedScales && w.Kind != weight.PackedZeros:
		return ""
	case w.Group == 0:
		return "f16_" + w.Kernels
	case w.Group == 32:
		return "f16_" + w.Kernels + "_32"
	}
	return "f16_" + w.Kernels + "_64"
}

// widens reports whether a Linear has launches with rows of float16.
func (d *Engine) widens(o *Linear) bool {
	if o.quantises() || d.info.Capability != groupCapability || o.Rows < d.leastWide || o.In%8 != 0 {
		return false
	}
	return !slices.ContainsFunc(o.Parts, func(p LinearPart) bool { return p.Packed == nil || o.narrowRowsKind(p.Packed) == "" })
}

// narrowRowsPart is struct NarrowRowsPart.
type narrowRowsPart struct {
	w, scales, second, b, y, y2                                uint64
	all, first, out, split, tiles, group, groups, zero, factor int32
	_                                                          [4]byte
}

// narrowRowsParams is struct NarrowRowsParams.
type narrowRowsParams struct {
	x                                            cuda.TensorMap
	parts                                        [mostParts]narrowRowsPart
	factors, residual                            uint64
	rows, chunks, steps, deep, activation, early int32
	magic                                        uint32
	_                                            [12]byte
}

// narrowRowOperandParams is struct NarrowRowOperandParams.
type narrowRowOperandParams struct {
	x, gamma, beta, bytes, factors uint64
	n, wide, norm                  int32
	eps, offset                    float32
	_                              [4]byte
}

// quantises reports whether x is quantised by row.
func (o *Linear) quantises() bool { return o.QuantiseX && o.Rows >= weight.LeastQuantisedRows }

// checkQuantised returns an error if x cannot be quantised by row.
func (d *Engine) checkQuantised(op string, o *Linear) error {
	if !o.QuantiseX {
		return nil
	}
	if d.info.Capability != groupCapability {
		return gpu.Errorf(op, attn.ErrUnsupported, "rows of x that are quantised, on a GPU of compute capability %d.%d: want 9.0, or x as it is", d.info.Capability/10, d.info.Capability%10)
	}
	if o.In > weight.MostQuantised {
		return gpu.Errorf(op, attn.ErrUnsupported, "rows of x that are quantised have %d elements, want at most %d", o.In, weight.MostQuantised)
	}
	for i := range o.Parts {
		p := &o.Parts[i]
		if p.Packed == nil || !weight.QuantisesRows(p.Packed.Format) {
			of := weight.Dense(p.W.DType)
			if p.Packed != nil {
				of = p.Packed.Format
			}
			return gpu.Errorf(op, attn.ErrUnsupported, "rows of x that are quantised, and w of layer %d is %v: want %s, or x as it is", i, of, weight.Names(weight.QuantisesRows))
		}
	}
	return nil
}

// fusesRows reports whether the kernels compute the activation and the gate.
func (o *Linear) fusesRows() bool {
	if !o.Gate {
		return o.Activation == attn.NoActivation || o.Activation == attn.ReLU
	}
	for i := range o.Parts {
		if p := &o.Parts[i]; !o.quantises() || p.First%narrowRowsHalf != 0 || p.Packed.Kernels != o.Parts[0].Packed.Kernels {
			return false
		}
	}
	return o.Activation == attn.SiLU || o.Activation == attn.GELUTanh
}

// narrowRowsLaunch is a launch of products.
type narrowRowsLaunch struct {
	kind   string
	kernel *cuda.Function
	rows   int // of x, of a tile
	blocks int
	p      narrowRowsParams
	memory []gpu.Memory
}

// narrowRowsPlan is how a Linear is launched.
type narrowRowsPlan struct {
	x         gpu.Memory // operands: pairs of bytes, or float16
	in, below int        // of x: elements of a row, and rows up to the end of the last tile
	factors   uint64
	parts     int // of float16; 0: quantised
	used      int
	launches  []narrowRowsLaunch
}

// planRows plans a checked Linear that quantises or widens, with an activation that the kernels have. Scratch may have no memory.
func (d *Engine) planRows(o *Linear) (p narrowRowsPlan, err error) {
	kernels, err := d.narrowRowsOf()
	if err != nil {
		return p, err
	}
	most := narrowRowsTiles[0]
	p.below = attn.Ceil(o.Rows, most) * most
	r := scratch{of: o.Scratch}
	if o.quantises() {
		factors := r.take(o.Rows)
		r.align()
		p.in, p.factors = attn.Ceil(o.In, narrowRowsStep)*narrowRowsStep/2, factors.AddressOr0()
		p.x = r.takeOf(p.below*p.in, attn.Float16)
	} else { // as queueOperands has them
		p.in, p.parts = o.In, o.operandParts()
		l := gemmLaunch{parts: p.parts}
		p.below += (p.parts - 1) * o.Rows
		p.x = r.takeOf(p.below*p.in, attn.Float16)
		r.used = max(r.used, attn.Ceil(o.Rows*o.In*p.parts, 2)+o.Rows)
		if o.Scratch.Buffer != nil {
			p.factors = l.factors(o)
		}
	}
	p.used = r.used
	for _, kind := range narrowRowsKinds {
		l := narrowRowsLaunch{kind: kind}
		n, tiles := 0, 0
		for i := 0; i < len(o.Parts); i++ {
			part := &o.Parts[i]
			w := part.Packed
			if o.narrowRowsKind(w) != kind {
				continue
			}
			l.p.chunks = int32(w.Chunks) // one width of x, and one width of chunks for a kind
			base := part.W.AddressOr0()
			to := &l.p.parts[n]
			*to = narrowRowsPart{
				w: base, scales: base + uint64(w.Scales), b: part.B.AddressOr0(), y: part.Y.AddressOr0(), all: int32(w.Rows), first: int32(part.First), out: int32(part.Out), split: int32(part.Out),
				group: int32(w.Group / narrowRowsStep), groups: int32(w.Groups), zero: w.Zero, factor: int32(w.Factor),
			}
			if p.parts > 0 {
				to.group = int32(w.Group / 32)
			}
			if w.Kind == weight.PackedZeros {
				to.second = base + uint64(w.Second)
			}
			l.memory = append(l.memory, part.W, part.B, part.Y)
			if !o.Gate && part.First == 0 && part.Out < w.Rows { // halves of one weight
				i++
				to.out, to.y2 = int32(w.Rows), o.Parts[i].Y.AddressOr0()
				l.memory = append(l.memory, o.Parts[i].Y)
			}
			tiles += attn.Ceil(int(to.out), narrowTile)
			to.tiles = int32(tiles)
			n++
		}
		if n == 0 {
			continue
		}
		for i := n; i < mostParts; i++ {
			l.p.parts[i].tiles = int32(tiles)
		}
		if o.Gate {
			tiles = int(l.p.parts[0].tiles)
		}
		l.p.deep = int32(attn.Ceil(2*p.in, narrowRowsStep))
		l.p.steps = l.p.deep * int32(max(p.parts, 1))
		if err := d.configureRows(o, &l, kernels[kind], tiles); err != nil {
			return p, err
		}
		p.launches = append(p.launches, l)
	}
	return p, nil
}

// configureRows chooses the kernel of a launch with `tiles` tiles of channels.
func (d *Engine) configureRows(o *Linear, l *narrowRowsLaunch, kernels *narrowRowsKernels, tiles int) error {
	steps, best := float64(l.p.steps), 0.0
	for i, rows := range narrowRowsTiles {
		kernel, short := kernels.tiles[i], 1.0
		if o.Gate {
			if kernel = kernels.gated; rows != narrowRowsGated {
				continue
			}
		}
		if rows == narrowRowsTiles[1] {
			short = narrowRowsShort
		}
		clusters, err := d.clustersAtOnce(clusterKey{weight.Int8, rowsClusters, narrowRowsPair, narrowRowsShared(), false}, kernel, narrowRowsGrid(1))
		if err != nil {
			return err
		}
		all := tiles * attn.Ceil(o.Rows, rows)
		if clusters = min(clusters, all); clusters < 1 {
			return gpu.Errorf("linear", attn.ErrUnsupported, "the GPU runs no cluster of %d thread blocks", narrowRowsPair)
		}
		if cost := float64(attn.Ceil(all, clusters)) * (steps + narrowRowsEnd) * short; l.kernel == nil || cost < best {
			l.kernel, l.rows, l.blocks, best = kernel, rows, narrowRowsPair*clusters, cost
		}
	}
	return nil
}

// narrowRowsShared returns the shared memory of a thread block, with its barriers.
func narrowRowsShared() int { return narrowRowsRing + 16*8 }

func narrowRowsGrid(clusters int) cuda.Grid {
	return clusterGrid(clusters, narrowRowsPair, narrowRowsThreads, narrowRowsShared(), true)
}

// queueRows queues a checked Linear that quantises or widens, with an activation that the kernels have.
func (d *Engine) queueRows(s *cuda.Stream, o *Linear) error {
	p, err := d.planRows(o)
	if err != nil {
		return err
	}
	if err := o.Scratch.CheckFloats("linear", "the scratch", p.used); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range p.launches {
		l := &p.launches[i]
		switch {
		case p.parts == 0:
			err = d.quantiseRows(s, o, &p, l.kind)
		case i == 0:
			err = d.queueOperands(s, o, attn.Float16, &gemmLaunch{parts: p.parts})
		}
		if err != nil {
			return err
		}
		if l.p.x, err = d.tensorMap(&p.x, p.in, p.below, l.rows/narrowRowsPair); err != nil {
			return err
		}
		l.p.factors, l.p.residual, l.p.rows, l.p.activation, l.p.magic = p.factors, o.Residual.AddressOr0(), int32(o.Rows), int32(o.Activation), narrowMagic
		if o.Early {
			l.p.early = 1
		}
		d.args.Reset()
		cuda.Struct(&d.args, &l.p)
		d.hold(slices.Concat(l.memory, []gpu.Memory{o.Residual, o.Scratch})...)
		grid := narrowRowsGrid(l.blocks / narrowRowsPair)
		grid.Waits = !o.Early
		if err := l.kernel.Launch(s, grid, &d.args); err != nil {
			return err
		}
	}
	return nil
}

// quantiseRows queues the launch that quantises rows of x. d.mu is held.
func (d *Engine) quantiseRows(s *cuda.Stream, o *Linear, p *narrowRowsPlan, kind string) error {
	a := narrowRowOperandParams{x: o.X.Address(), bytes: p.x.Address(), factors: p.factors, n: int32(o.In), wide: int32(2 * p.in)}
	d.args.Reset()
	d.hold(o.X, o.Scratch)
	if n := o.Norm; n != nil {
		a.norm, a.eps, a.offset, a.gamma, a.beta = n.kind(), float32(n.Eps), n.offset(), n.Gamma.AddressOr0(), n.Beta.AddressOr0()
		d.hold(n.Gamma, n.Beta)
	}
	cuda.Struct(&d.args, &a)
	grid := cuda.Grid{Blocks: [3]int{o.Rows}, Threads: [3]int{rowThreads}, Overlap: d.overlap(), Waits: true}
	return d.byRows[kind].operands.Launch(s, grid, &d.args)
}
