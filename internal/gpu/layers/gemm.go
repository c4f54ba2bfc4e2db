package layers

import (
	"fmt"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// The modules with the kernels for linear layers of many rows: for all GPUs, and for hundreds of rows on compute
// capability 9.0.
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
	// Up to mostGEMVRows rows a GEMV is faster, which reads x once for all tiles. More rows are a GEMM, if the GPU has the
	// kernels.
	mostGEMVRows = 8

	// gemmRing is the length of the rings of tiles, in bytes.
	gemmRing = 192 << 10
)

// The cost of a launch of tiles is in microseconds, by the bytes and products of its blocks. The rates were measured
// on an H200. Other GPUs have similar ratios, which decide a choice.
const (
	blockRate   = 93e3  // bytes a microsecond to a thread block,
	memoryRate  = 4.2e6 // from memory to all of them,
	cacheRate   = 5.5e6 // and from the L2 cache
	productRate = 2.7e6 // multiply-adds of a multiprocessor in tiles,
	skinnyRate  = 1.4e6 // and in skinny GEMMs

	gemmEnds    = 8.0   // the launch of the operands, and the time before a tile's first products and after its last
	endRate     = 2.5e6 // bytes of x and y a microsecond, besides
	gemmMeeting = 0.5   // for the blocks that share a tile's columns

	// The cost of a skinny GEMM besides its weights grows with the columns of x and y, and with a second cluster for
	// the rows of x. At about equal costs the skinny GEMM is chosen: tiles need a launch for operands.
	skinnyEnds, skinnyColumn, skinnyBelow = 3.5, 0.28 / 1024, 2.5
	skinnyTaken                           = 0.95
)

// gemmRows are the possible numbers of rows of x of a thread block.
var gemmRows = [...]int{32, 64, 128}

// tiledCluster is a cluster shape: split thread blocks share the columns of a tile, and the cluster has `beside`
// tiles, whose blocks load x for each other.
type tiledCluster struct{ split, beside int }

// tiledClusters are the possible shapes. On GPUs without products of warp groups a cluster has one tile.
var tiledClusters = [...]tiledCluster{{1, 1}, {2, 1}, {3, 1}, {4, 1}, {6, 1}, {8, 1}, {1, 2}, {2, 2}, {3, 2}, {4, 2}, {1, 4}, {2, 4}}

// gemmKernels are the kernels for weights of a type.
type gemmKernels struct {
	operands   [2]*cuda.Function // for many rows, and for up to mostSkinny rows, which threads keep in registers
	of         *[len(gemmRows)]*cuda.Function
	persistent [2]*persistentKernels // without gates, and with gates; nil: not loaded, or the GPU has none
}

// loadGEMM loads the kernels, if the GPU has any.
func (d *Engine) loadGEMM() error {
	if !d.overlap() {
		return nil
	}
	m, err := gpu.Module(d.dev, matrixUnit)
	if err != nil {
		return err
	}
	return withKernels(func(f weight.Format) (err error) {
		if !families[f].gemm {
			return nil
		}
		var k gemmKernels
		for few, suffix := range [...]string{"", "_few"} {
			if k.operands[few], err = m.Function("matrix_operands_" + f.Kernels() + suffix); err != nil {
				return err
			}
		}
		if k.of, err = d.loadTiled(m, "", f, 2); err != nil {
			return err
		}
		d.gemm[f] = &k
		if d.info.Capability == groupCapability {
			if d.skinny[f], err = d.loadSkinny(m, "", f, 2); err != nil {
				return err
			}
		}
		return nil
	})
}

// loadTiled loads the tiled kernels of a format and a number of parts from a module.
func (d *Engine) loadTiled(m *cuda.Module, prefix string, of weight.Format, parts int) (*[len(gemmRows)]*cuda.Function, error) {
	k, suffix := new([len(gemmRows)]*cuda.Function), ""
	if prefix == "" {
		prefix = "matrix_"
	}
	if parts == 1 {
		suffix = "_rounded"
	}
	for i := range gemmRows {
		f, err := gpu.WithShared(m, fmt.Sprintf("%s%s_%d%s", prefix, of.Kernels(), gemmRows[i], suffix))
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
	keep          fusedAppend
	out, tiles    [mostParts]int32
	rows, in      int32
	split, beside int32
	stages        int32
	activation    int32
	early         int32
	_             [20]byte
}

// Scratch returns how many float32 [Linear].Scratch needs. Types and sizes of the operands count, not their memory.
// The error is the driver's.
func (d *Engine) Scratch(o *Linear) (int, error) {
	if o.Rows < 1 || o.In < 1 || len(o.Parts) == 0 || !o.Narrow() && !hasKernels(o.format()) {
		return 0, nil
	}
	if err := d.checkQuantised("linear", o); err != nil {
		return 0, err
	}
	if product, err := d.multiplies(o); err != nil {
		return 0, err
	} else if product {
		_, _, n, err := d.asProduct(o)
		return n, err
	}
	if o.rounds() {
		in, n := o.rounded()
		more, err := d.Scratch(in)
		return n + more, err
	}
	if separate, err := d.separateActivation(o); err != nil {
		return 0, err
	} else if separate {
		in, n := o.inner()
		more, err := d.Scratch(in)
		return n + more, err
	}
	if o.quantises() || d.widens(o) {
		p, err := d.planRows(o)
		return p.used, err
	}
	if o.Narrow() {
		return d.narrowScratchOf(o)
	}
	if l, err := d.choose(o); err != nil {
		return 0, err
	} else if l.skinny != nil {
		return l.skinny.scratch(o), nil
	} else if l.gemm != nil {
		return l.gemm.scratch(o), nil
	}
	if needs, err := d.normsBefore(o); err != nil || !needs {
		return 0, err
	}
	return o.Rows * o.In, nil
}

// gemmLaunch is a launch of a GEMM.
type gemmLaunch struct {
	kernel        *cuda.Function
	rows, columns int // of x and of W in a tile
	below         int // rows of x of a cluster's tiles
	box           int // rows of W that a block loads at a time
	parts         int // parts of each element of x
	blocks, split int // thread blocks or clusters, and how many blocks of a cluster share a tile
	beside        int // tiles of a cluster, whose blocks load x for each other
	threads       int
	stages        int
	shared        int
	cost          float64 // microseconds
}

// scratch returns the number of float32 of the operands: parts of 16 bits, and a factor for each row. Tiles also read rows behind the last
// row of x, which lie in scratch memory, too.
func (l *gemmLaunch) scratch(o *Linear) int {
	return max(o.Rows*o.In*l.parts/2+o.Rows, (o.Rows*(l.parts-1)+l.padded(o))*o.In/2)
}

// padded returns the number of rows that tiles read. Rows behind the last row of x have any values. They are within the tensor map, since the
// copy engine is slow with rows outside of a tensor map.
func (l *gemmLaunch) padded(o *Linear) int { return attn.Ceil(o.Rows, l.below) * l.below }

// factors returns the address of the factors, after the parts.
func (l *gemmLaunch) factors(o *Linear) uint64 {
	return o.Scratch.Address() + uint64(o.Rows)*uint64(o.In)*uint64(l.parts)*2
}

// configureGEMM chooses the launch of a Linear of many rows with the least estimated cost.
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

// configureTiled is configureGEMM for the kernels of all GPUs: the thread blocks of a cluster share the columns of a
// tile if there are few tiles. A result without a kernel means that the GPU has too little shared memory.
func (d *Engine) configureTiled(o *Linear) (best gemmLaunch, err error) {
	kind, parts := 0, o.operandParts()
	for kind < len(gemmRows)-1 && gemmRows[kind] < o.Rows {
		kind++
	}
	rows := gemmRows[kind]
	kernel, err := d.tiledOf(o, kind)
	if err != nil {
		return best, err
	}
	columns := gemmTile // of each part in a tile
	if o.Gate {
		columns /= 2
	}
	stage := 128 * (gemmTile + parts*rows)
	l := gemmLaunch{kernel: kernel, rows: rows, below: rows, columns: columns, box: columns, parts: parts, threads: gemmThreads}
	l.stages = min(gemmRing/stage, d.info.SharedPerBlockMost/(stage+16)) // 16: the stage's barriers
	sums := rows * 4 * (gemmTile + gemmPad)                              // the sums reuse the ring's memory
	l.shared = max(l.stages*(stage+16), sums)
	steps := attn.Ceil(o.In, gemmStep)
	for _, c := range d.tiled {
		l.split, l.beside = c.split, c.beside
		if l.stages < 2 || l.split > steps || c.beside > 1 && (d.info.Capability != groupCapability || l.stages*stage < sums) {
			continue // sums must not overlap stages that other blocks still release
		}
		l.blocks = attn.Ceil(o.tilesOf(columns), l.beside) * attn.Ceil(o.Rows, rows)
		key := clusterKey{o.format(), kind + len(gemmRows)*(2-parts), l.split * l.beside, l.shared, o.gates()}
		clusters, err := d.clustersAtOnce(key, l.kernel, clusterGrid(1, l.split*l.beside, gemmThreads, l.shared, true))
		if err != nil {
			return best, err
		}
		if clusters == 0 {
			continue
		}
		if l.cost = d.slower * l.micros(o, clusters); best.kernel == nil || l.cost < best.cost {
			best = l
		}
	}
	return best, nil
}

// micros returns the cost of a launch of tiles if the given number of clusters runs at a time.
func (l *gemmLaunch) micros(o *Linear, clusters int) float64 {
	const weights = gemmTile * 128 // bytes of a step
	x := float64(128 * l.parts * l.rows)
	shared := x / float64(l.beside)
	if l.beside == 1 {
		shared = 2 * x // all blocks read the same lines
	}
	blocks := float64(min(l.blocks, clusters) * l.split * l.beside)
	step := max(
		(weights+x)/blockRate,
		blocks*weights/float64(attn.Ceil(o.Rows, l.rows))/memoryRate,
		blocks*(weights+shared)/cacheRate,
		float64(gemmTile*gemmStep*l.rows*l.parts)/productRate,
	)
	ends := gemmEnds
	if l.split > 1 {
		ends += gemmMeeting
	}
	steps := attn.Ceil(attn.Ceil(o.In, gemmStep), l.split)
	return float64(attn.Ceil(l.blocks, clusters))*float64(steps)*step + ends + o.endBytes()/endRate
}

// endBytes returns the bytes of x and y.
func (o *Linear) endBytes() float64 {
	n := o.In
	for i := range o.Parts {
		if i == 0 || !o.Gate {
			n += o.Parts[i].Out
		}
	}
	return 4 * float64(o.Rows) * float64(n)
}

// queueGEMM queues a checked Linear of many rows, and stores its results in a cache, except in persistent launches.
func (d *Engine) queueGEMM(s *cuda.Stream, o *Linear, l *gemmLaunch, keep fusedAppend, cache ...gpu.Memory) error {
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
		factors: l.factors(o), residual: o.Residual.AddressOr0(), keep: keep,
		rows: int32(o.Rows), in: int32(o.In), split: int32(l.split), beside: int32(l.beside), stages: int32(l.stages),
	}
	if p.x, err = d.operandMap(o, l); err != nil {
		return err
	}
	p.activation = o.activation()
	if o.Early {
		p.early = 1
	}
	if err := d.queueOperands(s, o, o.Parts[0].W.DType, l); err != nil {
		return err
	}
	d.args.Reset()
	cuda.Struct(&d.args, &p)
	d.hold(o.Scratch, o.Residual)
	d.hold(cache...)
	d.holdParts(o)
	return l.kernel.Launch(s, clusterGrid(l.blocks, l.split*l.beside, l.threads, l.shared, true), &d.args)
}

// queueOperands queues the launch that makes operands of x, of a type of 16 bits. The launch refuses closed buffers of both launches before
// anything is written.
func (d *Engine) queueOperands(s *cuda.Stream, o *Linear, t attn.DType, l *gemmLaunch) error {
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
	kernel := d.gemm[weight.Dense(t)].operands[0]
	if o.Rows <= mostSkinny {
		kernel = d.gemm[weight.Dense(t)].operands[1]
	}
	return kernel.Launch(s, cuda.Grid{Blocks: [3]int{o.Rows}, Threads: [3]int{rowThreads}, Overlap: true}, &d.args)
}

// operandMap returns the tensor map of the operands of x. A box is all parts of 64 columns of a tile's rows; for
// neighbouring tiles it is one part of a share of these rows.
func (d *Engine) operandMap(o *Linear, l *gemmLaunch) (cuda.TensorMap, error) {
	box, deep, rows := l.rows, l.parts, l.padded(o)
	if l.beside > 1 {
		box, deep = box/l.beside, 1
	}
	at := &o.Scratch
	key := linearMap{address: at.Address(), in: o.In, out: o.Rows, box: box, element: at.DType, parts: l.parts, deep: deep, padded: rows}
	return d.maps.Get(key, func() (cuda.TensorMap, error) {
		return d.dev.TensorMap(at.Buffer, at.Offset, cuda.Tiles{
			ElementBytes: 2, Dims: [3]uint64{uint64(o.In), uint64(rows), uint64(l.parts)}, Strides: [2]uint64{uint64(o.In) * 2, uint64(o.In) * uint64(o.Rows) * 2},
			Box: [3]uint32{gemmStep, uint32(box), uint32(deep)},
		})
	})
}
