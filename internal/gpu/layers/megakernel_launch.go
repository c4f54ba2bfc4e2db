package layers

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/weight"
	"gorgonia.org/leanattention/kernels"
)

// The modules with the kernels of a [Megakernel], for each shape of blocks, and the prefixes of their names.
var megakernelUnits = [...]struct{ unit, prefix string }{optShape: {"megakernel", "megakernel_"}, llamaShape: {"megakernel_llama", "megakernel_llama_"}}

// Constants of the kernels (kernels/megakernel_layers.cuh).
const (
	decodeRows    = 4 // most rows of x
	decodeTile    = 16
	decodeBox     = 4096  // bytes of a tile's column box
	decodeColumns = 128   // elements of a row in it
	decodeGroup   = 8     // tiles x rows whose sums a block meets at once
	decodeFixed   = 14336 // fixed bytes of each block, and
	pairsFixed    = 21504 // of a block of a pair
	decodeStride  = 144   // floats of a box's columns of a row of x
	decodeBody    = 368

	linearKind, attentionKind, fourKind, eightKind, e4m3Kind = 0, 1, 2, 3, 4
)

const (
	mostDecodeStages  = 8 // stages of a warp's ring
	leastDecodeStages = 2
	decodeChunks      = 2 // chunks of keys that each computing warp loads ahead, if they fit

	// mostDecodeX is the largest number of elements of x of a thread block, which reads all of x, or half in a pair.
	// For more, launches whose clusters share x are as fast or faster.
	mostDecodeX = 32 << 10

	// leastPairs is the shared memory for x of one thread block from which on pairs are faster. At 36 KB their
	// meetings cost more than half of x saves.
	leastPairs = 64 << 10
)

// decodeDims are the head dims with megakernels; pairsDim is the one with pairs.
var decodeDims = [...]int{64, 80, pairsDim}

const pairsDim = 128

// llamaDims are the head dims of kernels for llamaShape.
var llamaDims = [...]int{64, pairsDim}

// decodeDim returns an index of decodeDims, -1 for other head dims.
func decodeDim(dim int) int { return slices.Index(decodeDims[:], dim) }

// decodeLinear is struct DecodeLinear.
type decodeLinear struct {
	tagged, x, residualTagged, residual uint64
	gamma, beta                         uint64
	b, y, made                          [mostParts]uint64
	out, tiles                          [mostParts]int32
	shift, each, rest, woven            int32
	in, most                            int32
	place, ready                        int32
	norm, activation                    int32
	eps, inverse, offset                float32
	workers                             int32
	next                                decodeAffine
	exchange                            decodeExchange
}

// decodeAffine is struct DecodeAffine.
type decodeAffine struct {
	gamma, beta        uint64
	place, boxes, most int32
}

// decodeAttention is struct DecodeAttention: struct Params and struct Links.
type decodeAttention struct {
	p     attention.Params
	links links
}

// decodeExchange is struct DecodeExchange.
type decodeExchange struct {
	group, from         uint64
	to                  [exchangeMembers]uint64
	members, me, stride int32
	_                   int32
}

// links is struct Links.
type links struct {
	query, newKeys, newValues, out, slots, partials uint64
	layer, layers                                   int32
}

// decodeLayer is struct DecodeLayer.
type decodeLayer struct {
	maps [mostParts]cuda.TensorMap
	body [decodeBody]byte
	kind int32
	_    [12]byte
}

// decodeFeed is struct DecodeFeed.
type decodeFeed struct {
	maps          uint64
	boxes, most   uint16
	tiles, shift  int32
	second, third int32
	woven         int32
}

// decodeParams is struct DecodeParams.
type decodeParams struct {
	layers, feeds, work, masked, run uint64
	count, feedCount, rows, stages   int32
	area, slots                      int32
	slotsInverse                     uint32
	_                                int32
}

// decodeEnds is struct DecodeEnds.
type decodeEnds struct {
	gather            gatherParams
	gathered          uint64
	logits, ids       uint64
	vocabulary        int32
	shift, each, rest int32
}

// decodeTurns is struct DecodeTurns.
type decodeTurns struct {
	positions uint64
	factor    float32
	_         [4]byte
	turns     [64]attn.Turning
}

// decodeLaunch is struct DecodeLaunch.
type decodeLaunch struct {
	p     decodeParams
	ends  decodeEnds
	turns decodeTurns
}

// NewMegakernel makes an empty megakernel; nil if the GPU has no kernels.
func (d *Engine) NewMegakernel() *Megakernel {
	if d.megakernels[optShape] == nil {
		return nil
	}
	return &Megakernel{d: d, format: noFormat, made: make(map[uint64]madeBy), read: make(map[int64]bool)}
}

// hasShape reports whether there are kernels for blocks of a shape. Kernels of llamaShape, and for weights of 8 and 4 bits, are loaded at
// first use, which may be within a capture.
func (d *Engine) hasShape(shape shapeOfBlocks, packed bool) bool {
	if shape != llamaShape && !packed {
		return true
	}
	shape = max(shape, optShape)
	d.loading.Lock()
	defer d.loading.Unlock()
	if d.kernelsFor(shape, packed) == nil && d.dev.Relaxed(func() error { return d.loadMegakernels(shape, packed) }) != nil {
		return false
	}
	return d.kernelsFor(shape, packed) != nil
}

// kernelsFor returns the loaded kernels.
func (d *Engine) kernelsFor(shape shapeOfBlocks, packed bool) *megakernels {
	if packed {
		return d.packed[shape]
	}
	return d.megakernels[shape]
}

// loadMegakernels loads the kernels of megakernels, if the GPU has any.
func (d *Engine) loadMegakernels(shape shapeOfBlocks, packed bool) error {
	if !d.overlap() {
		return nil
	}
	names, dims := megakernelUnits[shape], decodeDims[:]
	if packed {
		names, dims = packedUnits[shape], packedDims[:]
	} else if shape == llamaShape {
		dims = llamaDims[:]
	}
	m, err := gpu.Module(d.dev, names.unit)
	if errors.Is(err, kernels.ErrNoImage) {
		return nil
	}
	if err != nil {
		return err
	}
	functions := new(megakernels)
	err = withKernels(func(of weight.Format) (err error) {
		if !families[of].megakernel {
			return nil
		}
		name := names.prefix + of.Kernels()
		for j, dim := range decodeDims {
			if !slices.Contains(dims, dim) {
				continue
			}
			if functions.blocks[of][j], err = gpu.WithShared(m, fmt.Sprintf("%s_%d", name, dim)); err != nil {
				return err
			}
		}
		if packed {
			return nil
		}
		f, err := gpu.WithShared(m, fmt.Sprintf("%s_%d_pairs", name, pairsDim))
		if err != nil {
			return err
		}
		all := d.info.SharedPerBlockMost
		n, err := d.clustersAtOnce(clusterKey{of, pairClusters, 2, all, shape == llamaShape}, f, clusterGrid(1, 2, gemvWarps*32, all, false))
		if err != nil {
			return err
		}
		if 2*n == d.info.Multiprocessors {
			functions.pairs[of] = f
		}
		return nil
	})
	if err != nil {
		return err
	}
	if packed {
		d.packed[shape] = functions
	} else {
		d.megakernels[shape] = functions
	}
	return nil
}

// megakernels are the kernels for weights of each format: of thread blocks, and of pairs of blocks, for pairsDim alone.
// Pairs are nil if the GPU can't run a pair on every two multiprocessors at once: all blocks of a megakernel wait for
// each other.
type megakernels struct {
	blocks [weight.Formats][len(decodeDims)]*cuda.Function
	pairs  [weight.Formats]*cuda.Function
}

// of returns the kernel of megakernels with clusters of split blocks for a tile. Without attention, dim is 0 and any
// kernel serves.
func (f *megakernels) of(split int, of weight.Format, dim int) *cuda.Function {
	if split == 2 {
		return f.pairs[of]
	}
	return f.blocks[of][max(decodeDim(dim), 0)]
}

// areaOf returns the shared memory of the warps for x: each box's columns of each row and, with a layer norm, of
// gamma, beta, and unconverted gamma. most is the result of mostBoxes.
func areaOf(rows, most int, norm int32) int {
	more, raw := normRows(norm)
	return gemvWarps * most * ((rows+more)*decodeStride + raw) * 4
}

// normRows returns how many rows of operands a norm needs besides those of x, and how many floats of a box's columns
// hold unconverted gamma.
func normRows(kind int32) (rows, raw int) {
	switch kind {
	case 0:
		return 0, 0
	case (&Norm{RMS: true}).kind():
		return 0, decodeColumns
	}
	return 2, decodeColumns
}

// mostBoxes returns the largest number of boxes of a tile in a warp, if split blocks share the tile.
func mostBoxes(in, split int) int { return attn.Ceil(attn.Ceil(in/decodeColumns, split), gemvWarps) }

// sharedNeeds are the needs of a megakernel's layers with single blocks, and with pairs. The choice is made when all
// layers are there.
type sharedNeeds [2]struct {
	area int  // bytes of shared memory for x
	wide bool // some x has more than mostDecodeX elements a block, or does not fit
}

// needsWith returns the needs with another layer.
func (c *Megakernel) needsWith(shape shapeOfBlocks, packing *packing, o *Linear) sharedNeeds {
	needs, norm := c.needs, int32(0)
	if o.Norm != nil {
		norm = o.Norm.kind()
	}
	for i := range needs {
		n, split := &needs[i], i+1
		area := areaOf(o.Rows, mostBoxes(o.In, split), norm)
		n.area = max(n.area, area)
		n.wide = n.wide || o.Rows*o.In > split*mostDecodeX || c.stagesFor(shape, packing, split, area, 1, attention.ConsumerWarps) < leastDecodeStages
	}
	return needs
}

// splitOf returns how many thread blocks share a tile of a megakernel with these needs.
func (c *Megakernel) splitOf(shape shapeOfBlocks, of weight.Format, packing *packing, dim int, needs *sharedNeeds) int {
	if !packing.any && (dim == 0 || dim == pairsDim) && c.d.megakernels[max(shape, optShape)].pairs[of] != nil && needs[0].area >= c.d.leastPairs {
		return 2
	}
	return 1
}

// fits reports whether a megakernel with these needs fits, with the given bytes for its attention. Too wide layers
// become launches.
func (c *Megakernel) fits(shape shapeOfBlocks, of weight.Format, packing *packing, dim int, needs *sharedNeeds, attends int) bool {
	split := c.splitOf(shape, of, packing, dim, needs)
	n := &needs[split-1]
	return n.wide || c.stagesFor(shape, packing, split, max(n.area, attends), c.linears()+1, attention.ConsumerWarps) >= leastDecodeStages
}

// linears returns the number of linear layers, which have feeds.
func (c *Megakernel) linears() (n int) {
	for i := range c.layers {
		if c.layers[i].linear != nil {
			n++
		}
	}
	return n
}

// stagesFor returns how many boxes the warps' rings hold beside an area, and the barriers of attention's ring.
func (c *Megakernel) stagesFor(shape shapeOfBlocks, packing *packing, split, area, linears, slots int) int {
	rest := fixedOf(split) + rotatedOf(shape) + linears*packing.feed() + slots*16 + packing.aligned()
	return min((c.d.info.SharedPerBlockMost-rest-attn.Ceil(area, 16)*16)/(gemvWarps*packing.slot()), mostDecodeStages)
}

// rotatedOf returns the shared memory of cosines and sines, for the most rows of the widest heads.
func rotatedOf(shape shapeOfBlocks) int {
	if shape != llamaShape {
		return 0
	}
	return decodeRows * pairsDim / 2 * 8
}

func fixedOf(split int) int {
	if split == 2 {
		return pairsFixed
	}
	return decodeFixed
}

// Queue queues the megakernel as one launch or, if one launch gains nothing, its layers as separate launches. The
// launch reads memory that Upload fills: it may be captured, and must not run before Upload.
func (c *Megakernel) Queue(s *cuda.Stream) error {
	alone := c.isAlone()
	if g := c.group; g != nil {
		// All or none: launched megakernels wait for each other.
		if !g.decided {
			g.decided = true
			for _, other := range g.members {
				g.alone = g.alone || other != nil && other.isAlone()
			}
		}
		if alone && !g.alone {
			return gpu.Errorf("queue", attn.ErrUnsupported, "a decode step in one launch on some GPUs and not on others")
		}
		alone = g.alone
	}
	if alone {
		return c.queueAlone(s)
	}
	l := c.layOut()
	err := c.d.dev.Relaxed(func() (err error) {
		if c.program, err = c.d.dev.NewBuffer(l.end); err != nil {
			return err
		}
		c.tagged, err = c.d.dev.NewBuffer(runBytes + 8*(c.floats+l.partials))
		return err
	})
	if err != nil {
		return err
	}
	if err := c.write(&l); err != nil {
		return err
	}
	text := c.program.Address()
	p := decodeParams{
		layers: text, feeds: text + uint64(l.feedsAt), work: l.work, masked: l.masked, run: c.tagged.Address(),
		count: int32(len(c.layers)), feedCount: int32(l.feeds), rows: int32(c.rows), stages: int32(l.stages),
		area: int32(l.area), slots: int32(l.slots),
	}
	if l.slots > 0 {
		p.slotsInverse = inverseOf(l.slots)
	}
	var args cuda.Args
	launch := decodeLaunch{p: p, ends: c.endsAt()}
	if c.turns != nil {
		launch.turns = *c.turns
	}
	cuda.Struct(&args, &launch)
	for _, b := range c.holds {
		args.Hold(b)
	}
	args.Hold(c.program)
	args.Hold(c.tagged)
	g := clusterGrid(c.blocks()/l.split, l.split, gemvWarps*32, l.shared, false)
	g.Cooperative = true
	of := c.format
	if of == noFormat { // all weights are packed, and there is no attention
		of = weight.Float16
	}
	dim := c.dim
	if dim == 0 && c.packing.any {
		dim = packedDims[0]
	}
	return c.d.kernelsFor(max(c.shape, optShape), c.packing.any).of(l.split, of, dim).Launch(s, g, &args)
}

// isAlone reports whether the layers are separate launches.
func (c *Megakernel) isAlone() bool {
	return len(c.layers) < 2 || c.needs[c.splitOf(c.shape, c.format, &c.packing, c.dim, &c.needs)-1].wide
}

// queueAlone queues the layers as separate launches.
func (c *Megakernel) queueAlone(s *cuda.Stream) error {
	if c.front != nil {
		if err := c.front.Queue(s); err != nil {
			return err
		}
	}
	for i := range c.layers {
		if err := c.layers[i].alone(s); err != nil {
			return err
		}
	}
	if c.back != nil {
		return c.d.Sampler.Run(s, c.back)
	}
	return nil
}

// endsAt returns the work before and after the layers, after these are written.
func (c *Megakernel) endsAt() (e decodeEnds) {
	if c.front != nil {
		e.gather, e.gathered = c.front.params(), c.tagged.Address()+runBytes+8*uint64(c.made[c.front.result().Address()].at)
	}
	if c.back != nil {
		last := (*decodeLinear)(unsafe.Pointer(&c.written[len(c.written)-1].body))
		e.logits, e.ids, e.vocabulary = c.back.Logits.Address(), c.back.IDs.Address(), int32(c.back.Vocab)
		e.shift, e.each, e.rest = last.shift, last.each, last.rest
	}
	return e
}

// inverseOf returns 2^32/n, rounded up, for n >= 2: the bits above 32 of a product with it are the quotient by n, for
// numbers below 2^32/n.
func inverseOf(n int) uint32 { return uint32((1<<32 + uint64(n) - 1) / uint64(n)) }

// blocks returns the number of thread blocks of a megakernel: one for each multiprocessor.
func (c *Megakernel) blocks() int { return max(c.d.info.Multiprocessors, 1) }

// runBytes is the size of the memory before the LL protocol words: the number of the run, how many thread blocks are
// done with it, and the most likely token of each row.
const runBytes = 128

// megakernelLayout is the GPU resources of a megakernel's launch.
type megakernelLayout struct {
	split         int   // thread blocks that share a tile
	area, shared  int   // bytes of shared memory: for x and attention in turn, and in total
	stages, slots int   // of the rings of weights and of keys
	feeds         int   // linear layers
	feedsAt       int64 // offset of their feeds, after the layers
	groupAt       int64 // offset of the description of the summing GPUs
	mapsAt, end   int64 // offset of the maps of packed weights, and of the end
	partials      int64
	work, masked  uint64 // addresses for attention
}

// layOut divides the shared memory.
func (c *Megakernel) layOut() (l megakernelLayout) {
	l.split = c.splitOf(c.shape, c.format, &c.packing, c.dim, &c.needs)
	l.area = c.needs[l.split-1].area
	l.feeds = c.linears()
	rows := 0 // rows of attention's output tiles
	for i := range c.layers {
		if a := c.layers[i].attend; a != nil {
			rows, l.work, l.masked = int(a.p.Rows), a.p.Work, a.p.Masked // all layers have the same plan's
		}
	}
	if rows > 0 {
		x := l.area
		for n := attention.ConsumerWarps; ; n += attention.ConsumerWarps {
			attends := c.chunk.SharedBytes(rows, n)
			// More than decodeChunks only if x needs the memory anyway.
			more := n <= decodeChunks*attention.ConsumerWarps || attends <= x && n*c.chunk.Slot <= attention.RingBytes
			if n > attention.ConsumerWarps && (!more || c.stagesFor(c.shape, &c.packing, l.split, max(x, attends), l.feeds, n) < leastDecodeStages) {
				break
			}
			l.slots, l.area = n, max(x, attends)
		}
	}
	l.area = attn.Ceil(l.area, 16) * 16
	l.stages = c.stagesFor(c.shape, &c.packing, l.split, l.area, l.feeds, l.slots)
	// Memory for two layers' x at once, if no other use needs it.
	for i := 1; i < len(c.layers); i++ {
		if before, own := c.beside(i, l.split); before+own > l.area && c.stagesFor(c.shape, &c.packing, l.split, before+own, l.feeds, l.slots) == l.stages {
			l.area = before + own
		}
	}
	l.shared = fixedOf(l.split) + rotatedOf(c.shape) + gemvWarps*l.stages*c.packing.slot() + l.area + l.feeds*c.packing.feed() + l.slots*16 + c.packing.aligned()
	l.feedsAt = int64(len(c.layers)) * int64(unsafe.Sizeof(decodeLayer{}))
	l.groupAt = l.feedsAt + int64(l.feeds*c.packing.feed())
	l.mapsAt = (l.groupAt + int64(unsafe.Sizeof(exchangeGroup{})) + 127) / 128 * 128
	l.end = l.mapsAt + int64(c.packing.maps*int(unsafe.Sizeof(cuda.TensorMap{})))
	l.partials = int64(2 * c.blocks() * attention.ConsumerWarps * rows * (c.dim + 2))
	return l
}

// beside returns areaOf of the layer before layer i and of layer i, if the former may load the latter's gamma and
// beta and both fit; otherwise 0.
func (c *Megakernel) beside(i, split int) (before, own int) {
	if i == 0 || c.layers[i-1].linear == nil || c.layers[i].linear == nil || c.layers[i].linear.norm == 0 {
		return 0, 0
	}
	area := func(p *decodeLinear) int { return areaOf(c.rows, mostBoxes(int(p.in), split), p.norm) }
	return area(c.layers[i-1].linear), area(c.layers[i].linear)
}

// write makes the layers for the launch, after the LL protocol words have addresses.
func (c *Megakernel) write(l *megakernelLayout) error {
	text, words := c.program.Address(), c.tagged.Address()+runBytes
	// An offset becomes an address.
	at := func(x *uint64) {
		if *x != 0 {
			*x = words + (*x-1)*8
		}
	}
	c.written, c.mapsAt = make([]decodeLayer, len(c.layers)), l.mapsAt
	first, units := 0, c.blocks()/l.split // the block or pair with a layer's first tile, and the number of blocks or pairs
	for i := range c.layers {
		p, t := &c.layers[i], &c.written[i]
		t.maps = p.maps
		if p.linear != nil {
			x := (*decodeLinear)(unsafe.Pointer(&t.body))
			*x = *p.linear
			boxes, most := int(x.in)/decodeColumns, mostBoxes(int(x.in), l.split)
			x.most = int32(most)
			for rank := range l.split {
				x.workers |= int32(attn.Ceil((boxes+l.split-1-rank)/l.split, most) << (8 * rank))
			}
			// Blocks with one more tile have no extra tile in the next layer.
			x.shift, x.each, x.rest = int32(first), x.tiles[mostParts-1]/int32(units), x.tiles[mostParts-1]%int32(units)
			first = (first + int(x.tiles[mostParts-1])) % units
			x.woven = c.wovenOf(p.linear, l.split)
			if before, own := c.beside(i, l.split); own > 0 && before+own <= l.area {
				// At the other end of the area.
				y := (*decodeLinear)(unsafe.Pointer(&c.written[i-1].body))
				if y.place == 0 {
					x.place = int32(l.area - own)
				}
				x.ready, y.next = 1, decodeAffine{x.gamma, x.beta, x.place, int32(boxes), x.most}
			}
			at(&x.tagged)
			at(&x.residualTagged)
			if s := p.sum; s != nil {
				x.exchange = decodeExchange{group: text + uint64(l.groupAt), from: words + 8*uint64(s.at[c.member]),
					members: int32(len(s.x.engines)), me: int32(c.member), stride: int32(taggedOf(s.elements()))}
			}
			for j := range x.made {
				if x.made[j] != 0 && !c.read[int64(x.made[j])-1] {
					x.made[j] = 0
				}
				at(&x.made[j])
			}
			t.kind = linearKind
			for j := range p.weights {
				if p.packed != nil {
					break
				}
				w := &p.weights[j]
				var err error
				if t.maps[j], err = c.d.pairMap(&w.W, int(x.in), w.Out, decodeTile); err != nil {
					return err
				}
			}
			feed := decodeFeed{
				maps: text + uint64(i)*uint64(unsafe.Sizeof(*t)), boxes: uint16(boxes), most: uint16(most),
				tiles: x.tiles[mostParts-1], shift: x.shift, second: x.tiles[0], third: x.tiles[1], woven: x.woven,
			}
			if x.activation&gateFlag != 0 {
				feed.third = 0
			}
			if err := c.writeFeed(t, p, feed, text+uint64(l.mapsAt)); err != nil {
				return err
			}
		} else {
			x := (*decodeAttention)(unsafe.Pointer(&t.body))
			*x = *p.attend
			x.p.Slots, x.links.partials = int32(l.slots), words+8*uint64(c.floats)
			x.links.layer, x.links.layers = int32(i), int32(len(c.layers))
			for _, a := range []*uint64{&x.links.query, &x.links.newKeys, &x.links.newValues, &x.links.out} {
				at(a)
			}
			t.kind = attentionKind
		}
	}
	return nil
}

// wovenOf returns how many boxes of columns each warp has of the layer whose x this layer makes, if this layer should
// first make what all warps read first.
func (c *Megakernel) wovenOf(p *decodeLinear, split int) int32 {
	if p.tiles[0] != p.tiles[mostParts-1] {
		return 0
	}
	for i := range c.layers {
		if o := c.layers[i].linear; o != nil && o.tagged == p.made[0] {
			if most := mostBoxes(int(o.in), split); int(o.in) == split*gemvWarps*most*decodeColumns && most > 1 {
				return int32(most)
			}
		}
	}
	return 0
}

// link sets the addresses at the other members for the sums of this one: all have memory now.
func (c *Megakernel) link() error {
	for i := range c.written {
		s := c.layers[i].sum
		if s == nil {
			continue
		}
		x := (*decodeLinear)(unsafe.Pointer(&c.written[i].body))
		for m := range s.x.engines {
			other := s.members[m]
			if other.tagged == nil || other.blocks() != c.blocks() || len(other.layers) != len(c.layers) {
				return gpu.Errorf("queue", attn.ErrUnsupported, "a decode step in one launch that is another one on GPU %d", other.d.info.Ordinal)
			}
			x.exchange.to[m] = other.tagged.Address() + runBytes + 8*uint64(s.at[m]+int64(c.member)*int64(x.exchange.stride))
		}
	}
	return nil
}

// Upload fills the memory that the launch reads. Upload must not be called within a capture.
func (c *Megakernel) Upload() error {
	if c.program == nil {
		return nil
	}
	if err := c.link(); err != nil {
		return err
	}
	text := append(gpu.BytesOf(c.written), c.feeds...)
	if c.exchange != nil {
		text = append(text, gpu.BytesOf([]exchangeGroup{c.exchange.group(c.member)})...)
	}
	if len(c.maps) > 0 {
		text = append(append(text, make([]byte, c.mapsAt-int64(len(text)))...), gpu.BytesOf(c.maps)...)
	}
	if err := c.program.Upload(0, text); err != nil {
		return err
	}
	c.written, c.feeds, c.maps = nil, nil, nil
	return c.tagged.Set(0, 0, c.tagged.Len())
}

// Close frees the memory of the launch.
func (c *Megakernel) Close() error {
	var first error
	for _, b := range []*cuda.Buffer{c.program, c.tagged} {
		if b == nil {
			continue
		}
		if err := b.Close(); err != nil && first == nil && !errors.Is(err, cuda.ErrClosed) {
			first = err
		}
	}
	c.program, c.tagged, c.layers, c.holds = nil, nil, nil, nil
	return first
}
