package decoder

import (
	"fmt"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// The modules with the kernels for linear layers of many rows: those of all GPUs, and
// those of hundreds of rows on compute capability 9.0.
const (
	matrixUnit = "matrix"
	gemmUnit   = "gemm"
)

// Constants of the kernels (kernels/gemm_tiled.cuh).
const (
	gemmThreads = 9 * 32
	gemmTile    = 128 // rows of W
	gemmStep    = 64  // columns
	gemmPad     = 4   // floats between rows of a tile's sums
)

const (
	// More rows are a GEMM, where there are kernels for that: up to here it is
	// faster to read x once for all tiles.
	fewRows = 8

	// What the beginning and the end of a tile take, and the meeting of a cluster's
	// blocks, in steps that could be done.
	gemmEnds    = 6
	gemmMeeting = 2

	// gemmSlower is how much longer a step takes than one of a persistent launch, and gemmRounded
	// what one part of x takes of that of two, as long as two thirds of the operands take to come.
	gemmSlower  = 1.5
	gemmRounded = 0.67
)

// gemmRows are how many rows of x a thread block may have, and the stages of its
// ring, for x of up to gemmWide columns and for wider ones. With more stages a block
// is alone on its multiprocessor, which is faster but for wide x: there it is better
// that the next launch's blocks begin beside it.
var gemmRows = [...]struct{ rows, stages, wide int }{{32, 8, 4}, {64, 6, 3}, {128, 4, 4}}

const gemmWide = 8192

// gemmKernels are the kernels for weights of a type.
type gemmKernels struct {
	operands   *cuda.Function
	of         *[len(gemmRows)]*cuda.Function
	persistent [2]*persistentKernels // without gates, and with them; nil: not loaded, or there are none for the GPU
}

// loadGEMM loads the kernels, if there are any for the GPU.
func (d *Engine) loadGEMM() error {
	if !d.overlap() {
		return nil
	}
	m, err := gpu.Module(d.dev, matrixUnit)
	if err != nil {
		return err
	}
	for _, i := range gpu.Halves {
		var k gemmKernels
		if k.operands, err = m.Function("matrix_operands_" + gpu.Name(i)); err != nil {
			return err
		}
		if k.of, err = d.loadTiled(m, "", i, 2); err != nil {
			return err
		}
		d.gemm[i] = &k
		if d.info.Capability == groupCapability {
			if d.skinny[i], err = d.loadSkinny(m, "", i, 2); err != nil {
				return err
			}
		}
	}
	return nil
}

// loadTiled loads the tiled kernels of a type, and of so many parts, from a module.
func (d *Engine) loadTiled(m *cuda.Module, prefix string, element attn.DType, parts int) (*[len(gemmRows)]*cuda.Function, error) {
	k, suffix := new([len(gemmRows)]*cuda.Function), ""
	if prefix == "" {
		prefix = "matrix_"
	}
	if parts == 1 {
		suffix = "_rounded"
	}
	for i := range gemmRows {
		f, err := gpu.WithShared(m, &d.info, fmt.Sprintf("%s%s_%d%s", prefix, gpu.Name(element), gemmRows[i].rows, suffix))
		if err != nil {
			return nil, err
		}
		k[i] = f
	}
	return k, nil
}

// operandParams is struct OperandParams.
type operandParams struct {
	x, gamma, beta, lead, factors uint64
	n, rows, norm, parts          int32
	eps, offset                   float32
}

// gemmParams is struct GemmParams.
type gemmParams struct {
	maps          [mostParts]cuda.TensorMap
	x             cuda.TensorMap
	factors       uint64
	b, y          [mostParts]uint64
	residual      uint64
	out, tiles    [mostParts]int32
	rows, in      int32
	split, stages int32
	activation    int32
	early         int32
	_             [16]byte
}

// Scratch is how many float32 a Linear needs as [Linear].Scratch. The types and
// sizes of its operands count, not the memory. The error is the driver's.
func (d *Engine) Scratch(o *Linear) (int, error) {
	if o.Rows < 1 || o.In < 1 || len(o.Parts) == 0 || !gpu.Known(o.Parts[0].W.DType) {
		return 0, nil
	}
	if apart, err := d.activationApart(o); err != nil {
		return 0, err
	} else if apart {
		in, n := o.inner()
		more, err := d.Scratch(in)
		return n + more, err
	}
	if l, err := d.choose(o); err != nil || l.skinny != nil {
		return 0, err
	} else if l.gemm != nil {
		return l.gemm.scratch(o), nil
	}
	if needs, err := d.normsBefore(o); err != nil || !needs {
		return 0, err
	}
	return o.Rows * o.In, nil
}

// gemmLaunch is how a launch looks.
type gemmLaunch struct {
	kernel        *cuda.Function
	rows, columns int // of x and of W that a tile has
	box           int // rows of W that a block brings at a time
	parts         int // that each element of x is taken in
	tiles         int // of y, that a block or a cluster has one of at a time
	blocks, split int // thread blocks or clusters of them, and how many a cluster has
	threads       int
	stages        int
	shared        int
	cost          float64 // in steps of 128 rows of x in two parts by 128 of W
}

// scratch is how many float32 the operands take: parts of 16 bits, and a factor for each
// row.
func (l *gemmLaunch) scratch(o *Linear) int { return o.Rows*o.In*l.parts/2 + o.Rows }

// factors is where the factors are: behind the parts.
func (l *gemmLaunch) factors(o *Linear) uint64 {
	return o.Scratch.Address() + uint64(o.Rows)*uint64(o.In)*uint64(l.parts)*2
}

// configureGEMM says how a Linear of many rows is launched: whichever takes the fewest
// steps by what is known of each kernel.
func (d *Engine) configureGEMM(o *Linear) (gemmLaunch, error) {
	best, err := d.configureTiled(o)
	if err != nil {
		return best, err
	}
	l, err := d.configurePersistent(o)
	if err != nil {
		return best, err
	}
	if l.kernel != nil && (best.kernel == nil || l.cost < best.cost) {
		best = l
	}
	if best.kernel == nil {
		return best, gpu.Errorf("linear", attn.ErrShape, "the GPU has too little shared memory for %d rows", o.Rows)
	}
	return best, nil
}

// configureTiled is configureGEMM of the kernels of all GPUs: the thread blocks of a
// cluster share the columns of a tile where there are few tiles. Without a kernel: the GPU
// has too little shared memory.
func (d *Engine) configureTiled(o *Linear) (best gemmLaunch, err error) {
	element, kind, parts := o.Parts[0].W.DType, 0, o.operandParts()
	for kind < len(gemmRows)-1 && gemmRows[kind].rows < o.Rows {
		kind++
	}
	rows := gemmRows[kind].rows
	kernel, err := d.tiledOf(o, kind)
	if err != nil {
		return best, err
	}
	columns := gemmTile // that a tile has of each part
	if o.Gate {
		columns /= 2
	}
	l := gemmLaunch{kernel: kernel, rows: rows, columns: columns, box: columns, parts: parts, threads: gemmThreads, stages: gemmRows[kind].stages}
	l.tiles = o.tilesOf(columns) * attn.Ceil(o.Rows, rows)
	l.blocks = l.tiles
	if o.In > gemmWide {
		l.stages = gemmRows[kind].wide
	}
	stage := 128*(gemmTile+parts*rows) + 16
	l.stages = l.stages * (gemmTile + 2*rows) / (gemmTile + parts*rows) // a ring is as long in bytes
	l.stages = min(l.stages, d.info.SharedPerBlockMost/stage)
	l.shared = max(l.stages*stage, rows*4*(gemmTile+gemmPad)) // the sums are where the ring was
	steps := attn.Ceil(o.In, gemmStep)
	for l.split = 1; l.stages > 1 && l.split <= min(mostSplit, steps); l.split *= 2 {
		key := clusterKey{element, kind + len(gemmRows)*(2-parts), l.split, l.shared, o.gates()}
		clusters, err := d.clustersAtOnce(key, l.kernel, clusterGrid(1, l.split, gemmThreads, l.shared, true))
		if err != nil {
			return best, err
		}
		if clusters == 0 {
			continue
		}
		each := float64(attn.Ceil(steps, l.split))
		if parts == 1 {
			each *= gemmRounded
		}
		if each += gemmEnds; l.split > 1 {
			each += gemmMeeting
		}
		if l.cost = d.slower * float64(attn.Ceil(l.tiles, clusters)) * each; best.kernel == nil || l.cost < best.cost {
			best = l
		}
	}
	return best, nil
}

// queueGEMM queues a Linear of many rows, which was checked.
func (d *Engine) queueGEMM(s *cuda.Stream, o *Linear, l *gemmLaunch) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := o.Scratch.CheckFloats("linear", "the scratch", l.scratch(o)); err != nil {
		return err
	}
	parts, err := d.partArgs(o, 0, l.columns, l.box, false)
	if err != nil {
		return err
	}
	p := gemmParams{
		maps: parts.maps, b: parts.b, y: parts.y, out: parts.out, tiles: parts.tiles,
		factors: l.factors(o), residual: o.Residual.AddressOr0(),
		rows: int32(o.Rows), in: int32(o.In), split: int32(l.split), stages: int32(l.stages),
	}
	if p.x, err = d.operandMap(&o.Scratch, o.In, o.Rows, l.parts, l.rows); err != nil {
		return err
	}
	p.activation = o.activation()
	if o.Early {
		p.early = 1
	}
	if err := d.queueOperands(s, o, l); err != nil {
		return err
	}
	d.args.Reset()
	cuda.Struct(&d.args, &p)
	d.hold(o.Scratch, o.Residual)
	d.holdParts(o)
	return l.kernel.Launch(s, clusterGrid(l.blocks, l.split, l.threads, l.shared, true), &d.args)
}

// queueOperands queues the launch that makes operands of x. It refuses closed buffers of
// both launches: nothing is written then.
func (d *Engine) queueOperands(s *cuda.Stream, o *Linear, l *gemmLaunch) error {
	p := operandParams{x: o.X.Address(), lead: o.Scratch.Address(), factors: l.factors(o), n: int32(o.In), rows: int32(o.Rows), parts: int32(l.parts)}
	d.args.Reset()
	if o.Norm != nil {
		p.norm, p.eps, p.offset = o.Norm.kind(), float32(o.Norm.Eps), o.Norm.offset()
		p.gamma, p.beta = o.Norm.Gamma.AddressOr0(), o.Norm.Beta.AddressOr0()
		d.hold(o.Norm.Gamma, o.Norm.Beta)
	}
	cuda.Struct(&d.args, &p)
	d.hold(o.X, o.Scratch, o.Residual)
	d.holdParts(o)
	return d.gemm[o.Parts[0].W.DType].operands.Launch(s, cuda.Grid{Blocks: [3]int{o.Rows}, Threads: [3]int{rowThreads}, Overlap: true}, &d.args)
}

// operandMap is the map of the operands that x has become: all parts of 64 columns of so
// many rows are a box.
func (d *Engine) operandMap(scratch *gpu.Memory, in, rows, parts, box int) (cuda.TensorMap, error) {
	key := linearMap{address: scratch.Address(), in: in, out: rows, box: box, element: scratch.DType, parts: parts}
	return d.maps.Get(key, func() (cuda.TensorMap, error) {
		return d.dev.TensorMap(scratch.Buffer, scratch.Offset, cuda.Tiles{
			ElementBytes: 2, Dims: [3]uint64{uint64(in), uint64(rows), uint64(parts)}, Strides: [2]uint64{uint64(in) * 2, uint64(in) * uint64(rows) * 2},
			Box: [3]uint32{gemmStep, uint32(box), uint32(parts)},
		})
	})
}
