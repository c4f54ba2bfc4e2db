package layers

import (
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Products of hundreds of rows of 16-bit operands on compute capability 9.0, for training and for mixed precision. Operands may be
// row-major or transposes, so gradients need no transposes in memory.

// hopperUnit is the module with the kernels.
const hopperUnit = "hopper"

// Constants of the kernels (kernels/gemm_hopper.cuh).
const (
	hopperThreads = 384
	hopperRows    = 128
	hopperColumns = 192
	hopperPair    = 2
	hopperStages  = 5
	hopperStage   = (hopperRows + hopperColumns) * 128
	hopperShared  = hopperStages * (hopperStage + 16)
	hopperPartial = hopperRows * hopperColumns
	hopperEach    = 4
	hopperLists   = mostParts + 1
)

// leastHopper is the least number of rows of a product: with fewer, one tile of a pair is empty. mostHopper is the largest number that kernels
// can count.
const leastHopper, mostHopper = hopperRows + 1, 1 << 30

// hopperKernels are the kernels for a type.
type hopperKernels struct {
	round   *cuda.Function
	product map[hopperLayout]*cuda.Function
}

// hopperLayout says whether the transpose of A or of B is in memory, and whether two parts are a gated unit.
type hopperLayout struct{ a, b, gate bool }

// columns returns the columns of C in a tile.
func (l hopperLayout) columns() int {
	if l.gate {
		return hopperColumns / 2
	}
	return hopperColumns
}

// hopperLayouts are the layouts with kernels, and the ends of their names.
var hopperLayouts = map[attn.DType]map[hopperLayout]string{
	attn.BFloat16: {{}: "rr", {b: true}: "ra", {a: true, b: true}: "aa", {gate: true}: "gated"},
	attn.Float16:  {{}: "rr", {gate: true}: "gated"},
}

// hopperOf returns the kernels for a type, loaded at first use, which may be within a capture.
func (d *Engine) hopperOf(t attn.DType) (*hopperKernels, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	if k := d.hopper[t]; k != nil {
		return k, nil
	}
	k := &hopperKernels{product: map[hopperLayout]*cuda.Function{}}
	err := d.dev.Relaxed(func() error {
		m, err := gpu.Module(d.dev, hopperUnit)
		if err != nil {
			return err
		}
		name := weight.Dense(t).Kernels()
		if k.round, err = m.Function("hopper_round_" + name); err != nil {
			return err
		}
		for layout, end := range hopperLayouts[t] {
			if k.product[layout], err = gpu.WithShared(m, &d.info, "hopper_"+name+"_"+end); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		d.hopper[t] = k
	}
	return k, err
}

// hopperProduct is C = f(A B^T + bias) + Plus for each part, with operands of 16 bits. A has m rows of k elements, and B is the part's W.
// With the layout's a or b the transpose of A or of B is in memory.
type hopperProduct struct {
	m, k       int
	wide       int // elements of a row of A in memory
	layout     hopperLayout
	a          gpu.Memory
	factors    gpu.Memory // of rows of A, for float16
	parts      []LinearPart
	plus       gpu.Memory // of a single part; no buffer: none
	activation attn.Activation
	scratch    gpu.Memory // as many float32 as hopperLaunch.scratch
}

// hopperParams is struct HopperParams.
type hopperParams struct {
	of              gemmParams
	partials, flags uint64
	slices          int32
	_               [44]byte
}

// hopperRoundParams is struct HopperRoundParams.
type hopperRoundParams struct {
	x, y    [hopperLists]uint64
	ends    [hopperLists]int64
	flags   uint64
	flagged int32
	_       [4]byte
}

// hopperLaunch is a launch of products.
type hopperLaunch struct {
	kernel        *cuda.Function
	blocks, tiles int     // tiles: pairs of tiles
	slices        int     // of a sum of k products
	cost          float64 // microseconds
}

// partials returns the number of tiles of partial sums: those of all slices but a tile's last one, whose thread block adds them.
func (l *hopperLaunch) partials() int { return hopperPair * l.tiles * (l.slices - 1) }

// scratch returns the number of float32 of the partial sums and their flags.
func (l *hopperLaunch) scratch() int {
	n := l.partials()
	return n*hopperPartial + attn.Ceil(n, 4)*4
}

// flags returns the flags of the partial sums; without partial sums, no buffer.
func (l *hopperLaunch) flags(of gpu.Memory) gpu.Memory {
	n := l.partials()
	if n == 0 {
		return gpu.Memory{}
	}
	return elementsFrom(of, n*hopperPartial, n)
}

// hopperFor reports whether there are kernels for products with m rows.
func (d *Engine) hopperFor(t attn.DType, m int, layout hopperLayout) bool {
	_, ok := hopperLayouts[t][layout]
	return ok && d.info.Capability == groupCapability && m >= d.leastHopper && m <= mostHopper && d.info.SharedPerBlockMost >= hopperShared && d.info.Multiprocessors >= hopperPair
}

// hopperLaunchOf returns the launch of products with m rows, sums over k elements, and the columns of parts.
func (d *Engine) hopperLaunchOf(t attn.DType, layout hopperLayout, m, k int, parts []LinearPart) (l hopperLaunch, err error) {
	kernels, err := d.hopperOf(t)
	if err != nil {
		return l, err
	}
	l.kernel = kernels.product[layout]
	key := clusterKey{format: weight.Dense(t), kind: hopperClusters, split: hopperPair, shared: hopperShared}
	clusters, err := d.clustersAtOnce(key, l.kernel, clusterGrid(1, hopperPair, hopperThreads, hopperShared, true))
	if err != nil {
		return l, err
	}
	if clusters < 1 {
		return l, gpu.Errorf("product", attn.ErrUnsupported, "the GPU runs no cluster of %d thread blocks", hopperPair)
	}
	steps, below, tiles := attn.Ceil(k, gemmStep), attn.Ceil(m, hopperPair*hopperRows), 0
	for i := range parts {
		if i == 0 || !layout.gate {
			tiles += attn.Ceil(parts[i].Out, layout.columns())
		}
	}
	l.tiles = tiles * below
	most, step := mostSlices, hopperStep
	if layout.gate {
		most, step = 1, hopperGates
	}
	var time int
	l.slices, time = hopperSlices(l.tiles, clusters, steps, most)
	l.cost, l.blocks = step*float64(time), hopperPair*min(clusters, l.tiles*l.slices)
	return l, nil
}

const (
	mostSlices   = 8
	mostPartials = 1 << 25 // float32

	// Costs in steps: of the beginning and the end of a tile, and of several slices: of their addition, and of each slice.
	sliceEnds, sliceMeeting, sliceSums = 3, 7, 5

	// Estimated microseconds of a step, alone and in gated units, on the scale of persistentStep.
	hopperStep, hopperGates = 0.65, 0.57
)

// hopperSlices returns the number of slices of k with the least estimated time, and the time in steps.
func hopperSlices(tiles, clusters, steps, most int) (slices, least int) {
	for n := 1; n <= min(most, steps) && hopperPair*tiles*(n-1)*hopperPartial <= mostPartials; n++ {
		time := attn.Ceil(tiles*n, clusters) * (attn.Ceil(steps, n) + sliceEnds)
		if n > 1 {
			time += sliceMeeting + n*sliceSums
		}
		if n == 1 || time < least {
			slices, least = n, time
		}
	}
	return slices, least
}

// roundTo queues the rounding of lists of float32 to 16 bits, and zeros for flags, which may have no buffer. The length of a list is a
// multiple of eight.
func (d *Engine) roundTo(s *cuda.Stream, t attn.DType, flags gpu.Memory, lists ...Convert) error {
	switch {
	case len(lists) > 0:
	case flags.Buffer != nil:
		return s.Set(flags.Buffer, flags.Offset, 0, 4*int64(flags.Len))
	default:
		return nil
	}
	k, err := d.hopperOf(t)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	p := hopperRoundParams{flags: flags.AddressOr0()}
	if flags.Buffer != nil {
		p.flagged = int32(flags.Len)
	}
	memory, end := []gpu.Memory{flags}, 0
	for i := range hopperLists {
		if i < len(lists) {
			p.x[i], p.y[i] = lists[i].X.Address(), lists[i].Y.Address()
			end += lists[i].N / 8
			memory = append(memory, lists[i].X, lists[i].Y)
		}
		p.ends[i] = int64(end)
	}
	return queueNode(d, s, k.round, attn.Ceil(end, trainingThreads*hopperEach), &p, memory...)
}

// queueHopper queues products. Flags of the launch are 0.
func (d *Engine) queueHopper(s *cuda.Stream, o *hopperProduct, l *hopperLaunch) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := hopperParams{of: gemmParams{
		factors: o.factors.AddressOr0(), residual: o.plus.AddressOr0(), rows: int32(o.m), in: int32(o.k), split: hopperPair, beside: 1, stages: hopperStages,
		activation: int32(o.activation),
	}, slices: int32(l.slices)}
	if flags := l.flags(o.scratch); flags.Buffer != nil {
		p.partials, p.flags = o.scratch.Address(), flags.Address()
	}
	var err error
	if o.layout.a {
		p.of.x, err = d.tensorMap(&o.a, o.wide, o.k, gemmStep)
	} else {
		p.of.x, err = d.tensorMap(&o.a, o.wide, o.m, hopperRows)
	}
	if err != nil {
		return err
	}
	tiles := 0
	for i := range mostParts {
		if i < len(o.parts) {
			part := &o.parts[i]
			p.of.b[i], p.of.y[i], p.of.out[i] = part.B.AddressOr0(), part.Y.AddressOr0(), int32(part.Out)
			if o.layout.b {
				p.of.maps[i], err = d.tensorMap(&part.W, part.Out, o.k, gemmStep/hopperPair)
			} else {
				p.of.maps[i], err = d.tensorMap(&part.W, o.k, part.Out, hopperColumns/hopperPair)
			}
			if err != nil {
				return err
			}
			if i == 0 || !o.layout.gate {
				tiles += attn.Ceil(part.Out, o.layout.columns())
			}
		}
		p.of.tiles[i] = int32(tiles)
	}
	d.args.Reset()
	cuda.Struct(&d.args, &p)
	d.hold(o.a, o.factors, o.plus, o.scratch)
	for i := range o.parts {
		d.hold(o.parts[i].W, o.parts[i].B, o.parts[i].Y)
	}
	return l.kernel.Launch(s, clusterGrid(l.blocks/hopperPair, hopperPair, hopperThreads, hopperShared, true), &d.args)
}

// multiplies reports whether a Linear is a launch of hopper.go: with Products, or with W of 16 bits and RoundX if the launch costs no more
// than a GEMM.
func (d *Engine) multiplies(o *Linear) (bool, error) {
	t := o.Products
	if t == 0 {
		t = o.Parts[0].W.DType
	}
	activations := []attn.Activation{attn.NoActivation, attn.ReLU}
	if o.Gate {
		activations = []attn.Activation{attn.SiLU, attn.GELUTanh}
	}
	layout := hopperLayout{gate: o.Gate}
	if !o.RoundX && o.Products == 0 || o.Narrow() || !slices.Contains(activations, o.Activation) || !d.hopperFor(t, o.Rows, layout) || !canRound(t, o.In) {
		return false, nil
	}
	for i := range o.Parts {
		if o.Parts[i].Out%2 != 0 {
			return false, nil
		}
	}
	if o.Products != 0 {
		return true, nil
	}
	l, err := d.hopperLaunchOf(t, layout, o.Rows, o.In, o.Parts)
	if err != nil {
		return false, err
	}
	gemm, err := d.configureGEMM(o)
	return l.cost*d.hopperTime <= gemm.cost, err
}

// asProduct returns o as a product of hopper.go, the launch, and the number of float32 of scratch memory. The operands of x are at the
// beginning of the scratch memory, as those of a gemmLaunch.
func (d *Engine) asProduct(o *Linear) (p *hopperProduct, l hopperLaunch, n int, err error) {
	t, r := o.Products, scratch{of: o.Scratch}
	if t == 0 {
		t = o.Parts[0].W.DType
	}
	p = &hopperProduct{m: o.Rows, k: o.In, wide: o.In, plus: o.Residual, activation: o.Activation, layout: hopperLayout{gate: o.Gate}, parts: slices.Clone(o.Parts)}
	p.a = r.takeOf(o.Rows*o.In, t)
	p.factors = r.take(o.Rows)
	r.align()
	for i := range p.parts {
		if o.Products != 0 {
			p.parts[i].W = r.takeOf(p.parts[i].Out*o.In, t)
			r.align()
		}
	}
	l, err = d.hopperLaunchOf(t, p.layout, p.m, p.k, p.parts)
	p.scratch = r.take(l.scratch())
	return p, l, r.used, err
}

// queueProduct queues a checked Linear that multiplies.
func (d *Engine) queueProduct(s *cuda.Stream, o *Linear) error {
	p, l, n, err := d.asProduct(o)
	if err != nil {
		return err
	}
	if err := o.Scratch.CheckFloats("linear", "the scratch", n); err != nil {
		return err
	}
	flags, lists := l.flags(p.scratch), []Convert(nil)
	if o.Products != 0 {
		for i := range o.Parts {
			lists = append(lists, Convert{N: o.Parts[i].Out * o.In, X: o.Parts[i].W, Y: p.parts[i].W})
		}
	}
	operands := o.Norm != nil || p.a.DType == attn.Float16 // float16 has factors of rows
	if !operands {
		lists = append(lists, Convert{N: o.Rows * o.In, X: o.X, Y: p.a})
	}
	if err := d.roundTo(s, p.a.DType, flags, lists...); err != nil {
		return err
	}
	if operands {
		if err := d.operandsOf(s, o, p.a); err != nil {
			return err
		}
	}
	return d.queueHopper(s, p, &l)
}
