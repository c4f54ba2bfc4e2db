package decoder

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/kernels"
)

// chainUnit is the module with the kernels of a [Chain].
const chainUnit = "chain"

// Constants of the kernels (kernels/decode_layers.cuh).
const (
	chainRows    = 4 // of x, at most
	chainTile    = 16
	chainBox     = 4096  // bytes of a tile's column box
	chainColumns = 128   // elements of a row in it
	chainGroup   = 8     // tiles x rows whose sums meet at once
	chainFixed   = 14336 // bytes of what each block has, and
	pairsFixed   = 21504 // of what a block of a pair has
	chainStride  = 144   // floats of a box's columns of a row of x
	chainBody    = 368

	chainLinearKind, chainAttentionKind = 0, 1
)

const (
	mostChainStages  = 8 // of a warp's ring
	leastChainStages = 2
	chainChunks      = 2 // chunks of keys that each computing warp has on the way, where there is room for them

	// Elements of x that a thread block is for: it reads all of them, or of a pair
	// half. Of more, launches whose clusters share x are as fast or faster.
	mostChainX = 32 << 10

	// Shared memory that x takes of one thread block where pairs are faster. At 36 KB
	// their meetings cost more than half of x saves.
	leastPairs = 64 << 10
)

// chainDims are the head dims that there are chains for, pairsDim the one that there
// are pairs for.
var chainDims = [...]int{64, 80, pairsDim}

const pairsDim = 128

// chainDim is an index of chainDims, -1 for other head dims.
func chainDim(dim int) int { return slices.Index(chainDims[:], dim) }

// chainLinear is struct DecodeLinear.
type chainLinear struct {
	tagged, x, residualTagged, residual uint64
	gamma, beta                         uint64
	b, y, made                          [mostParts]uint64
	out, tiles                          [mostParts]int32
	shift, each, rest, woven            int32
	in, most                            int32
	place, ready                        int32
	norm, activation                    int32
	eps, inverse                        float32
	workers                             int32
	next                                chainAffine
}

// chainAffine is struct DecodeAffine.
type chainAffine struct {
	gamma, beta        uint64
	place, boxes, most int32
}

// chainAttention is struct DecodeAttention: struct Params and struct Links.
type chainAttention struct {
	p     attention.Params
	links links
}

// links is struct Links.
type links struct {
	query, newKeys, newValues, out, slots, partials uint64
	layer, layers                                   int32
}

// chainLayer is struct DecodeLayer.
type chainLayer struct {
	maps [mostParts]cuda.TensorMap
	body [chainBody]byte
	kind int32
	_    [12]byte
}

// chainFeed is struct DecodeFeed.
type chainFeed struct {
	maps          uint64
	boxes, most   uint16
	tiles, shift  int32
	second, third int32
	woven         int32
}

// chainParams is struct DecodeParams.
type chainParams struct {
	layers, feeds, work, blind, run uint64
	count, feedCount, rows, stages  int32
	area, slots                     int32
	slotsInverse                    uint32
	_                               int32
}

// chainEnds is struct DecodeEnds.
type chainEnds struct {
	gather            gatherParams
	gathered          uint64
	logits, ids       uint64
	vocabulary        int32
	shift, each, rest int32
}

// chainLaunch is struct DecodeLaunch.
type chainLaunch struct {
	p    chainParams
	ends chainEnds
}

// NewChain makes an empty chain; nil where the GPU has no kernels for one.
func (d *Decoder) NewChain() *Chain {
	if d.chain == nil {
		return nil
	}
	return &Chain{d: d, element: untyped, made: make(map[uint64]madeBy), read: make(map[int64]bool)}
}

// loadChains loads the kernels of chains, if there are any for the GPU.
func (d *Decoder) loadChains() error {
	if !d.overlap() {
		return nil
	}
	m, err := d.dev.Module(chainUnit, func() ([]byte, error) { return gpu.Image(chainUnit, d.info.Capability) })
	if errors.Is(err, kernels.ErrNoImage) {
		return nil
	}
	if err != nil {
		return err
	}
	functions := new(chainFunctions)
	for _, i := range gpu.Halves {
		name := "chain_" + gpu.Name(i)
		for j, dim := range chainDims {
			if functions.blocks[i][j], err = gpu.WithShared(m, &d.info, fmt.Sprintf("%s_%d", name, dim)); err != nil {
				return err
			}
		}
		f, err := gpu.WithShared(m, &d.info, fmt.Sprintf("%s_%d_pairs", name, pairsDim))
		if err != nil {
			return err
		}
		all := d.info.SharedPerBlockMost
		n, err := d.clustersAtOnce(clusterKey{i, chainClusters, 2, all}, f, clusterGrid(1, 2, linearWarps*32, all, false))
		if err != nil {
			return err
		}
		if 2*n == d.info.Multiprocessors {
			functions.pairs[i] = f
		}
	}
	d.chain = functions
	return nil
}

// chainFunctions are the kernels of chains, for weights of each type: of thread blocks,
// and of pairs of them, for pairsDim alone. Those are nil where the GPU does not have
// one on every two multiprocessors at once: all blocks of a chain wait for each other.
type chainFunctions struct {
	blocks [attn.DTypes][len(chainDims)]*cuda.Function
	pairs  [attn.DTypes]*cuda.Function
}

// of is the kernel of chains whose blocks share a tile in such clusters. Without
// attention, dim is 0 and any will do.
func (f *chainFunctions) of(split int, element attn.DType, dim int) *cuda.Function {
	if split == 2 {
		return f.pairs[element]
	}
	return f.blocks[element][max(chainDim(dim), 0)]
}

// areaOf is the shared memory that the warps have for x: each box's columns of each
// row, and, if there is a norm, of gamma and beta, and of gamma as it is. most is what
// mostBoxes says.
func areaOf(rows, most int, norm bool) int {
	each := rows * chainStride
	if norm {
		each += 2*chainStride + chainColumns
	}
	return linearWarps * most * each * 4
}

// mostBoxes is how many boxes of a tile a warp has at most, where so many blocks share it.
func mostBoxes(in, split int) int { return gpu.Ceil(gpu.Ceil(in/chainColumns, split), linearWarps) }

// chainNeeds are what the layers of a chain need if it is one of blocks, and of pairs
// of them. Which one it is shows when all layers are there.
type chainNeeds [2]struct {
	area int  // bytes of shared memory for x
	wide bool // some x has more than mostChainX elements for a block, or no room
}

// needsWith is what they need with another layer.
func (c *Chain) needsWith(o *Linear) chainNeeds {
	needs := c.needs
	for i := range needs {
		n, split := &needs[i], i+1
		area := areaOf(o.Rows, mostBoxes(o.In, split), o.Norm != nil)
		n.area = max(n.area, area)
		n.wide = n.wide || o.Rows*o.In > split*mostChainX || c.stagesFor(split, area, 1, attention.MostWarps) < leastChainStages
	}
	return needs
}

// splitOf is how many thread blocks share a tile of a chain with such needs.
func (c *Chain) splitOf(element attn.DType, dim int, needs *chainNeeds) int {
	if (dim == 0 || dim == pairsDim) && c.d.chain.pairs[element] != nil && needs[0].area >= c.d.leastPairs {
		return 2
	}
	return 1
}

// fits says whether there is room for another layer of a chain with such needs, which
// has so many bytes for its attention. What is too wide becomes launches.
func (c *Chain) fits(element attn.DType, dim int, needs *chainNeeds, attends int) bool {
	split := c.splitOf(element, dim, needs)
	n := &needs[split-1]
	return n.wide || c.stagesFor(split, max(n.area, attends), c.linears()+1, attention.MostWarps) >= leastChainStages
}

// linears is how many linear layers there are: those have feeds.
func (c *Chain) linears() (n int) {
	for i := range c.layers {
		if c.layers[i].linear != nil {
			n++
		}
	}
	return n
}

// stagesFor is how many boxes the warps' rings have room for beside an area, and
// barriers of attention's ring.
func (c *Chain) stagesFor(split, area, linears, slots int) int {
	rest := fixedOf(split) + linears*int(unsafe.Sizeof(chainFeed{})) + slots*16
	return min((c.d.info.SharedPerBlockMost-rest-gpu.Ceil(area, 16)*16)/(linearWarps*(chainBox+8)), mostChainStages)
}

func fixedOf(split int) int {
	if split == 2 {
		return pairsFixed
	}
	return chainFixed
}

// Queue queues the chain: as one launch, or, if that gains nothing, its layers as
// the launches that they are without a chain. The launch reads memory that Upload
// fills: it may be captured, and must not run before.
func (c *Chain) Queue(s *cuda.Stream) error {
	if len(c.layers) < 2 || c.needs[c.splitOf(c.element, c.dim, &c.needs)-1].wide {
		return c.queueAlone(s)
	}
	l := c.layOut()
	err := c.d.dev.Relaxed(func() (err error) {
		if c.text, err = c.d.dev.NewBuffer(l.feedsAt + int64(l.feeds)*int64(unsafe.Sizeof(chainFeed{}))); err != nil {
			return err
		}
		c.words, err = c.d.dev.NewBuffer(runBytes + 8*(c.floats+l.partials))
		return err
	})
	if err != nil {
		return err
	}
	if err := c.write(&l); err != nil {
		return err
	}
	text := c.text.Address()
	p := chainParams{
		layers: text, feeds: text + uint64(l.feedsAt), work: l.work, blind: l.blind, run: c.words.Address(),
		count: int32(len(c.layers)), feedCount: int32(l.feeds), rows: int32(c.rows), stages: int32(l.stages),
		area: int32(l.area), slots: int32(l.slots),
	}
	if l.slots > 0 {
		p.slotsInverse = inverseOf(l.slots)
	}
	var args cuda.Args
	cuda.Struct(&args, &chainLaunch{p, c.endsAt()})
	for _, b := range c.holds {
		args.Hold(b)
	}
	args.Hold(c.text)
	args.Hold(c.words)
	g := clusterGrid(c.blocks()/l.split, l.split, linearWarps*32, l.shared, false)
	g.Cooperative = true
	return c.d.chain.of(l.split, c.element, c.dim).Launch(s, g, &args)
}

// queueAlone queues the launches that there would be without a chain.
func (c *Chain) queueAlone(s *cuda.Stream) error {
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

// endsAt is what there is before and behind the layers, when these are written.
func (c *Chain) endsAt() (e chainEnds) {
	if c.front != nil {
		e.gather, e.gathered = c.front.params(), c.words.Address()+runBytes+8*uint64(c.made[c.front.result().Address()].at)
	}
	if c.back != nil {
		last := (*chainLinear)(unsafe.Pointer(&c.texts[len(c.texts)-1].body))
		e.logits, e.ids, e.vocabulary = c.back.Logits.Address(), c.back.IDs.Address(), int32(c.back.Vocab)
		e.shift, e.each, e.rest = last.shift, last.each, last.rest
	}
	return e
}

// inverseOf is 2^32/n, rounded up, for n of 2 and more: what a product with it has above
// 32 bits is a quotient by n, of numbers below 2^32/n.
func inverseOf(n int) uint32 { return uint32((1<<32 + uint64(n) - 1) / uint64(n)) }

// blocks is how many thread blocks a chain has: one for each multiprocessor.
func (c *Chain) blocks() int { return max(c.d.info.Multiprocessors, 1) }

// runBytes is what lies before the tagged floats: the number of the run, how many thread
// blocks are done with it, and the most likely token of each row.
const runBytes = 128

// chainLayout is what a chain's launch has of the GPU.
type chainLayout struct {
	split         int   // thread blocks that share a tile
	area, shared  int   // bytes of shared memory: for x and attention in turn, and in all
	stages, slots int   // of the rings of weights and of keys
	feeds         int   // linear layers
	feedsAt       int64 // where their feeds begin, behind the layers' texts
	partials      int64
	work, blind   uint64 // of attention: addresses
}

// layOut shares out the shared memory.
func (c *Chain) layOut() (l chainLayout) {
	l.split = c.splitOf(c.element, c.dim, &c.needs)
	l.area = c.needs[l.split-1].area
	l.feeds = c.linears()
	rows := 0 // of attention's output tiles
	for i := range c.layers {
		if a := c.layers[i].attend; a != nil {
			rows, l.work, l.blind = int(a.p.Rows), a.p.Work, a.p.Blind // the same plan's in all layers
		}
	}
	if rows > 0 {
		x := l.area
		for n := attention.MostWarps; ; n += attention.MostWarps {
			room := c.chunk.Room(rows, n)
			// More than chainChunks only where x needs the room anyway.
			more := n <= chainChunks*attention.MostWarps || room <= x && n*c.chunk.Slot <= attention.RingBytes
			if n > attention.MostWarps && (!more || c.stagesFor(l.split, max(x, room), l.feeds, n) < leastChainStages) {
				break
			}
			l.slots, l.area = n, max(x, room)
		}
	}
	l.area = gpu.Ceil(l.area, 16) * 16
	l.stages = c.stagesFor(l.split, l.area, l.feeds, l.slots)
	// Room for two layers' x at once, if it takes nothing else's.
	for i := 1; i < len(c.layers); i++ {
		if before, own := c.beside(i, l.split); before+own > l.area && c.stagesFor(l.split, before+own, l.feeds, l.slots) == l.stages {
			l.area = before + own
		}
	}
	l.shared = fixedOf(l.split) + linearWarps*l.stages*(chainBox+8) + l.area + l.feeds*int(unsafe.Sizeof(chainFeed{})) + l.slots*16
	l.feedsAt = int64(len(c.layers)) * int64(unsafe.Sizeof(chainLayer{}))
	l.partials = int64(2 * c.blocks() * attention.MostWarps * rows * (c.dim + 2))
	return l
}

// beside is areaOf of the layer before layer i and of that, if the one may ask for the
// other's gamma and beta where there is room for both; else 0.
func (c *Chain) beside(i, split int) (before, own int) {
	if i == 0 || c.layers[i-1].linear == nil || c.layers[i].linear == nil || c.layers[i].linear.norm == 0 {
		return 0, 0
	}
	area := func(p *chainLinear) int { return areaOf(c.rows, mostBoxes(int(p.in), split), p.norm != 0) }
	return area(c.layers[i-1].linear), area(c.layers[i].linear)
}

// write makes the layers' texts, now that it is known where the words are.
func (c *Chain) write(l *chainLayout) error {
	text, words := c.text.Address(), c.words.Address()+runBytes
	// What was an offset becomes an address.
	at := func(x *uint64) {
		if *x != 0 {
			*x = words + (*x-1)*8
		}
	}
	c.texts = make([]chainLayer, len(c.layers))
	first, units := 0, c.blocks()/l.split // the block or pair that has a layer's first tile, and how many there are
	for i := range c.layers {
		p, t := &c.layers[i], &c.texts[i]
		t.maps = p.maps
		if p.linear != nil {
			x := (*chainLinear)(unsafe.Pointer(&t.body))
			*x = *p.linear
			boxes, most := int(x.in)/chainColumns, mostBoxes(int(x.in), l.split)
			x.most = int32(most)
			for rank := range l.split {
				x.workers |= int32(gpu.Ceil((boxes+l.split-1-rank)/l.split, most) << (8 * rank))
			}
			// Blocks that have a tile more have none more in the layer behind.
			x.shift, x.each, x.rest = int32(first), x.tiles[mostParts-1]/int32(units), x.tiles[mostParts-1]%int32(units)
			first = (first + int(x.tiles[mostParts-1])) % units
			x.woven = c.wovenOf(p.linear, l.split)
			if before, own := c.beside(i, l.split); own > 0 && before+own <= l.area {
				// At the other end of the area.
				y := (*chainLinear)(unsafe.Pointer(&c.texts[i-1].body))
				if y.place == 0 {
					x.place = int32(l.area - own)
				}
				x.ready, y.next = 1, chainAffine{x.gamma, x.beta, x.place, int32(boxes), x.most}
			}
			at(&x.tagged)
			at(&x.residualTagged)
			for j := range x.made {
				if !c.read[int64(x.made[j])-1] {
					x.made[j] = 0
				}
				at(&x.made[j])
			}
			t.kind = chainLinearKind
			for j := range p.weights {
				w := &p.weights[j]
				var err error
				if t.maps[j], err = c.d.pairMap(&w.W, int(x.in), w.Out, chainTile); err != nil {
					return err
				}
			}
			c.feeds = append(c.feeds, chainFeed{
				maps: text + uint64(i)*uint64(unsafe.Sizeof(*t)), boxes: uint16(boxes), most: uint16(most),
				tiles: x.tiles[mostParts-1], shift: x.shift, second: x.tiles[0], third: x.tiles[1], woven: x.woven,
			})
		} else {
			x := (*chainAttention)(unsafe.Pointer(&t.body))
			*x = *p.attend
			x.p.Slots, x.links.partials = int32(l.slots), words+8*uint64(c.floats)
			x.links.layer, x.links.layers = int32(i), int32(len(c.layers))
			for _, a := range []*uint64{&x.links.query, &x.links.newKeys, &x.links.newValues, &x.links.out} {
				at(a)
			}
			t.kind = chainAttentionKind
		}
	}
	return nil
}

// wovenOf is how many boxes of columns each warp has of the layer whose x this one
// makes, if that is a reason to make first what all of them read first.
func (c *Chain) wovenOf(p *chainLinear, split int) int32 {
	if p.tiles[0] != p.tiles[mostParts-1] {
		return 0
	}
	for i := range c.layers {
		if o := c.layers[i].linear; o != nil && o.tagged == p.made[0] {
			if most := mostBoxes(int(o.in), split); int(o.in) == split*linearWarps*most*chainColumns && most > 1 {
				return int32(most)
			}
		}
	}
	return 0
}

// Upload fills the memory that the launch reads. It is not for a capture.
func (c *Chain) Upload() error {
	if c.text == nil {
		return nil
	}
	if err := c.text.Upload(0, append(gpu.BytesOf(c.texts), gpu.BytesOf(c.feeds)...)); err != nil {
		return err
	}
	c.texts, c.feeds = nil, nil
	return c.words.Set(0, 0, c.words.Len())
}

// Close gives the memory of the launch back.
func (c *Chain) Close() error {
	var first error
	for _, b := range []*cuda.Buffer{c.text, c.words} {
		if b == nil {
			continue
		}
		if err := b.Close(); err != nil && first == nil && !errors.Is(err, cuda.ErrClosed) {
			first = err
		}
	}
	c.text, c.words, c.layers, c.holds = nil, nil, nil, nil
	return first
}
