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
	hopperEach    = 4
	hopperLists   = mostParts + 1
)

// leastHopper is the least number of rows of a product. With fewer rows, one tile of a pair is empty, and other kernels take about as long as
// a kernel that only reads the weights. mostHopper is the largest number of rows that kernels can count.
const leastHopper, mostHopper = hopperRows + 1, 1 << 30

// hopperKernels are the kernels for a type.
type hopperKernels struct {
	round   *cuda.Function
	add     *cuda.Function
	product map[hopperLayout]*cuda.Function
}

// hopperLayout says how operands lie in memory.
//
//   - a, b: the transpose of A or of B is in memory.
//   - gate: two parts are a gated unit.
//   - swapped: in a layer, the weights are A, and x is B. Otherwise x is A.
type hopperLayout struct{ a, b, gate, swapped bool }

// columns returns the output features of a part in a tile.
func (l hopperLayout) columns() int {
	n := hopperColumns
	if l.swapped {
		n = hopperRows
	}
	if l.gate {
		n /= 2
	}
	return n
}

// tiles returns the number of pairs of tiles of products with m rows, and the number of pairs side by side up to the end of each part.
func (l hopperLayout) tiles(m int, parts []LinearPart) (all int, ends [mostParts]int) {
	wide, below := l.columns(), attn.Ceil(m, hopperPair*hopperRows)
	if l.swapped {
		wide, below = hopperPair*wide, attn.Ceil(m, hopperColumns)
	}
	n := 0
	for i := range ends {
		if i < len(parts) && (i == 0 || !l.gate) {
			n += attn.Ceil(parts[i].Out, wide)
		}
		ends[i] = n
	}
	return n * below, ends
}

// hopperLayouts are the layouts with kernels, and the ends of their names.
var hopperLayouts = map[attn.DType]map[hopperLayout]string{
	attn.BFloat16: {{}: "rr", {b: true}: "ra", {a: true, b: true}: "aa", {gate: true}: "gated", {swapped: true}: "swapped", {gate: true, swapped: true}: "gated_swapped"},
	attn.Float16:  {{}: "rr", {gate: true}: "gated", {swapped: true}: "swapped", {gate: true, swapped: true}: "gated_swapped"},
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
		if k.add, err = m.Function("hopper_add"); err != nil {
			return err
		}
		for layout, end := range hopperLayouts[t] {
			if k.product[layout], err = gpu.WithShared(m, "hopper_"+name+"_"+end); err != nil {
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
	padded     int // rows of A in memory; 0: m. Rows behind row m have any values: see gemmLaunch.padded
	wide       int // elements of a row of A in memory
	layout     hopperLayout
	a          gpu.Memory
	factors    gpu.Memory // of rows of A, for float16
	parts      []LinearPart
	plus       gpu.Memory // of a single part; no buffer: none
	activation attn.Activation
	early      bool       // as Linear.Early
	scratch    gpu.Memory // as many float32 as slicesScratch
}

// hopperParams is struct HopperParams.
type hopperParams struct {
	of     gemmParams
	apart  int64
	slices int32
	_      [52]byte
}

// hopperRoundParams is struct HopperRoundParams.
type hopperRoundParams struct {
	x, y [hopperLists]uint64
	ends [hopperLists]int64
}

// hopperAddParams is struct HopperAddParams.
type hopperAddParams struct {
	sums, b, y                       [mostParts]uint64
	residual                         uint64
	apart                            int64
	out                              [mostParts]int32
	rows, slices, activation, blocks int32
	_                                [4]byte
}

// hopperLaunch is a launch of products.
type hopperLaunch struct {
	kernel, add   *cuda.Function
	blocks, tiles int     // tiles: pairs of tiles
	slices        int     // of a sum of k products
	cost          float64 // microseconds
}

// sums describes the sums of a slice in scratch memory: the beginnings of the parts, and the number of float32.
func (o *hopperProduct) sums() (begins [mostParts]int, all int) {
	for i := range o.parts {
		begins[i] = all
		all += attn.Ceil(attn.Product(o.m, o.parts[i].Out), 4) * 4
	}
	return begins, all
}

// slicesScratch returns the number of float32 of the sums of all slices.
func (o *hopperProduct) slicesScratch(l *hopperLaunch) int {
	if l.slices == 1 {
		return 0
	}
	_, n := o.sums()
	return l.slices * n
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
	l.kernel, l.add = kernels.product[layout], kernels.add
	key := clusterKey{format: weight.Dense(t), kind: hopperClusters, split: hopperPair, shared: hopperShared}
	clusters, err := d.clustersAtOnce(key, l.kernel, clusterGrid(1, hopperPair, hopperThreads, hopperShared, true))
	if err != nil {
		return l, err
	}
	if clusters < 1 {
		return l, gpu.Errorf("product", attn.ErrUnsupported, "the GPU runs no cluster of %d thread blocks", hopperPair)
	}
	l.tiles, _ = layout.tiles(m, parts)
	floats, step := 0, hopperStep
	for i := range parts {
		floats += attn.Product(m, parts[i].Out)
	}
	if layout.gate {
		step = hopperGates
	}
	l.slices, l.cost = hopperSlices(l.tiles, clusters, attn.Ceil(k, gemmStep), floats, step)
	l.blocks = hopperPair * min(clusters, l.tiles*l.slices)
	return l, nil
}

const (
	mostSlices = 8
	mostSums   = 1 << 26 // float32 of the sums of slices

	// Microseconds on an H200.
	hopperStep  = 0.55   // of a step
	hopperGates = 0.66   // of a step of a gated unit
	hopperEnds  = 8      // of the launches, without steps, and with one tile
	hopperEnd   = 1.5    // of the end of each other tile
	sliceEnds   = 1      // of the launch that adds slices
	sliceFloat  = 2.3e-6 // of a float32 of a slice's sums
)

// hopperSlices returns the number of slices of k with the least estimated time, and the time in microseconds. floats is the number of
// results.
func hopperSlices(tiles, clusters, steps, floats int, step float64) (slices int, least float64) {
	for n := 1; n <= min(mostSlices, steps) && (n == 1 || n*floats <= mostSums); n++ {
		waves := float64(attn.Ceil(tiles*n, clusters))
		time := hopperEnds + waves*float64(attn.Ceil(steps, n))*step + (waves-1)*hopperEnd
		if n > 1 {
			time += sliceEnds + float64(n*floats)*sliceFloat
		}
		if n == 1 || time < least {
			slices, least = n, time
		}
	}
	return slices, least
}

// roundTo queues the rounding of lists of float32 to 16 bits. The length of a list is a multiple of eight.
func (d *Engine) roundTo(s *cuda.Stream, t attn.DType, lists ...Convert) error {
	if len(lists) == 0 {
		return nil
	}
	k, err := d.hopperOf(t)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var p hopperRoundParams
	var memory []gpu.Memory
	end := 0
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

// queueHopper queues products.
func (d *Engine) queueHopper(s *cuda.Stream, o *hopperProduct, l *hopperLaunch) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := hopperParams{of: gemmParams{
		factors: o.factors.AddressOr0(), residual: o.plus.AddressOr0(), rows: int32(o.m), in: int32(o.k), split: hopperPair, beside: 1, stages: hopperStages,
		activation: int32(o.activation),
	}, slices: int32(l.slices)}
	if o.early {
		p.of.early = 1
	}
	var err error
	rows := max(o.m, o.padded)
	switch {
	case o.layout.a:
		p.of.x, err = d.tensorMap(&o.a, o.wide, o.k, gemmStep)
	case o.layout.swapped:
		p.of.x, err = d.tensorMap(&o.a, o.wide, rows, hopperColumns/hopperPair)
	default:
		p.of.x, err = d.tensorMap(&o.a, o.wide, rows, hopperRows)
	}
	if err != nil {
		return err
	}
	_, ends := o.layout.tiles(o.m, o.parts)
	for i, end := range ends {
		p.of.tiles[i] = int32(end)
	}
	for i := range o.parts {
		part := &o.parts[i]
		p.of.b[i], p.of.y[i], p.of.out[i] = part.B.AddressOr0(), part.Y.AddressOr0(), int32(part.Out)
		switch {
		case o.layout.b:
			p.of.maps[i], err = d.tensorMap(&part.W, part.Out, o.k, gemmStep/hopperPair)
		case o.layout.swapped:
			p.of.maps[i], err = d.tensorMap(&part.W, o.k, part.Out, o.layout.columns())
		default:
			p.of.maps[i], err = d.tensorMap(&part.W, o.k, part.Out, hopperColumns/hopperPair)
		}
		if err != nil {
			return err
		}
	}
	of := p.of
	if l.slices > 1 { // queueSlices adds biases, and applies the activation
		begins, apart := o.sums()
		for i := range o.parts {
			p.of.y[i] = o.scratch.Address() + 4*uint64(begins[i])
		}
		p.apart, p.of.residual, p.of.activation, p.of.b = int64(apart), 0, int32(attn.NoActivation), [mostParts]uint64{}
	}
	d.args.Reset()
	cuda.Struct(&d.args, &p)
	d.hold(o.a, o.factors, o.plus, o.scratch)
	for i := range o.parts {
		d.hold(o.parts[i].W, o.parts[i].B, o.parts[i].Y)
	}
	if err := l.kernel.Launch(s, clusterGrid(l.blocks/hopperPair, hopperPair, hopperThreads, hopperShared, true), &d.args); err != nil || l.slices == 1 {
		return err
	}
	return d.queueSlices(s, o, l, &of, &p)
}

// queueSlices queues the launch that adds the sums of the slices of a product. of are the parameters of the product with one slice. d.mu is
// held.
func (d *Engine) queueSlices(s *cuda.Stream, o *hopperProduct, l *hopperLaunch, of *gemmParams, p *hopperParams) error {
	most, parts := 0, len(o.parts)
	for i := range o.parts {
		most = max(most, attn.Product(o.m, o.parts[i].Out))
	}
	add := hopperAddParams{
		sums: p.of.y, b: of.b, y: of.y, residual: of.residual, apart: p.apart, out: of.out,
		rows: of.rows, slices: p.slices, activation: of.activation, blocks: int32(attn.Ceil(most, 2*trainingThreads)),
	}
	if o.layout.gate {
		parts = 1
		add.activation |= gateFlag
	}
	d.args.Reset()
	cuda.Struct(&d.args, &add)
	d.hold(o.plus, o.scratch)
	for i := range o.parts {
		d.hold(o.parts[i].B, o.parts[i].Y)
	}
	return l.add.Launch(s, cuda.Grid{Blocks: [3]int{int(add.blocks) * parts}, Threads: [3]int{trainingThreads}, Overlap: d.overlap()}, &d.args)
}

// hopperLayoutOf returns the layout and the launch of a Linear with the least cost. A launch without a kernel means that no kernel takes the
// Linear.
func (d *Engine) hopperLayoutOf(o *Linear, t attn.DType) (best hopperLayout, launch hopperLaunch, err error) {
	for _, swapped := range d.orders {
		layout := hopperLayout{gate: o.Gate, swapped: swapped}
		if !d.hopperFor(t, o.Rows, layout) {
			continue
		}
		l, err := d.hopperLaunchOf(t, layout, o.Rows, o.In, o.Parts)
		if err != nil {
			return best, launch, err
		}
		if launch.kernel == nil || l.cost < launch.cost {
			best, launch = layout, l
		}
	}
	return best, launch, nil
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
	if !o.RoundX && o.Products == 0 || o.Narrow() || !slices.Contains(activations, o.Activation) || !canRound(t, o.In) {
		return false, nil
	}
	for i := range o.Parts {
		if o.Parts[i].Out%2 != 0 {
			return false, nil
		}
	}
	_, l, err := d.hopperLayoutOf(o, t)
	if err != nil || l.kernel == nil || o.Products != 0 {
		return l.kernel != nil, err
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
	p = &hopperProduct{m: o.Rows, k: o.In, wide: o.In, plus: o.Residual, activation: o.Activation, parts: slices.Clone(o.Parts), early: o.Early && o.Products == 0}
	p.a = r.takeOf(o.Rows*o.In, t)
	p.factors = r.take(o.Rows)
	r.align()
	for i := range p.parts {
		if o.Products != 0 {
			p.parts[i].W = r.takeOf(p.parts[i].Out*o.In, t)
			r.align()
		}
	}
	if p.layout, l, err = d.hopperLayoutOf(o, t); err != nil {
		return p, l, 0, err
	}
	each := hopperPair * hopperRows
	if p.layout.swapped {
		each = hopperColumns
	}
	p.padded = attn.Ceil(o.Rows, each) * each
	p.scratch = r.take(p.slicesScratch(&l))
	return p, l, max(r.used, attn.Ceil(p.padded*o.In, 2)), nil
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
	var lists []Convert
	if o.Products != 0 {
		for i := range o.Parts {
			lists = append(lists, Convert{N: o.Parts[i].Out * o.In, X: o.Parts[i].W, Y: p.parts[i].W})
		}
	}
	operands := o.Norm != nil || p.a.DType == attn.Float16 // float16 has factors of rows
	if !operands {
		lists = append(lists, Convert{N: o.Rows * o.In, X: o.X, Y: p.a})
	}
	if err := d.roundTo(s, p.a.DType, lists...); err != nil {
		return err
	}
	if operands {
		if err := d.operandsOf(s, o, p.a); err != nil {
			return err
		}
	}
	return d.queueHopper(s, p, &l)
}
