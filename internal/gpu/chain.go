package gpu

import (
	"errors"
	"fmt"
	"math/bits"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/kernels"
)

// chainUnit is the module with the kernels of a [Chain].
const chainUnit = "chain"

// Constants of the kernels (kernels/chain.cuh).
const (
	chainRows   = 4 // of x, at most
	chainTile   = 16
	chainBox    = 4096 // bytes of a tile's column box
	chainColumn = 256  // bytes of a row in it
	chainGroup  = 8    // tiles whose sums meet at once
	chainPad    = 16   // floats between rows of x
	chainBody   = 368

	chainLinearKind, chainAttentionKind = 0, 1
)

const (
	mostChainStages = 8 // of a warp's ring
	chainChunks     = 2 // chunks of keys that each computing warp has on the way, where there is room for them

	// Elements of x that a chain is for: every thread block reads all of them. Of
	// more, launches whose clusters share x are as fast or faster.
	mostChainX = 16 << 10
)

// chainDims are the head dims that there are chains for.
var chainDims = [...]int{64, 80, 128}

// chainLinear is struct ChainLinear.
type chainLinear struct {
	tagged, x, residualTagged, residual uint64
	gamma, beta                         uint64
	b, y, made                          [mostParts]uint64
	out, tiles                          [mostParts]int32
	each, over                          int32
	in, norm, relu                      int32
	eps, inverse                        float32
	_                                   [4]byte
}

// chainAttention is struct ChainAttention: struct Params and struct Links.
type chainAttention struct {
	p     paramsBody
	links links
}

// links is struct Links.
type links struct {
	query, newKeys, newValues, out, slots, partials uint64
	layer, layers                                   int32
}

// chainLayer is struct ChainLayer.
type chainLayer struct {
	maps [mostParts]cuda.TensorMap
	body [chainBody]byte
	kind int32
	_    [12]byte
}

// chainFeed is struct ChainFeed.
type chainFeed struct {
	maps              uint64
	boxes, each, over int32
	second, third     int32
	_                 [4]byte
}

// chainParams is struct ChainParams.
type chainParams struct {
	layers, feeds, work, blind, run       uint64
	count, feedCount, rows, group, ofRows int32
	spread, stages, area                  int32
}

// Chain is layers of a decode step that one launch does, one behind the other:
// linear layers of few rows, and attention that appends. It is made of the calls
// that would queue them: Linear and Attend say whether they have taken a layer,
// which then waits for Queue. Not for several goroutines at once.
//
// A chain keeps what it was given: the arguments of its layers are those of the
// time when they were taken, as if they were queued.
type Chain struct {
	d       *Decoder
	engine  *Engine // nil: no attention yet
	plan    *Plan
	step    paramsBody // of the plan
	element int        // of weights, keys and values
	dim     int        // of heads; 0: no attention yet
	rows    int        // of x
	layers  []chainPart
	made    map[uint64]madeBy // by address
	reads   []span            // of plain memory
	writes  []span
	holds   []*cuda.Buffer
	floats  int64 // that are tagged
	area    int   // bytes of shared memory for x
	wide    bool  // some x has more than mostChainX elements

	text, words *cuda.Buffer // layers and feeds; the run's number, and tagged floats
	bytes       []byte       // of text, until Upload
}

// chainPart is a layer: one of the two.
type chainPart struct {
	linear  *chainLinear
	weights []LinearPart
	attend  *chainAttention
	maps    [mostParts]cuda.TensorMap // of keys and values
	alone   func(*cuda.Stream) error  // queues it as a launch of its own
}

// madeBy says where a layer's output is among the tagged floats.
type madeBy struct {
	at       int64
	elements int
}

// span is a range of device memory, in bytes.
type span struct{ from, to uint64 }

func (s span) meets(list []span) bool {
	for _, o := range list {
		if s.from < o.to && o.from < s.to {
			return true
		}
	}
	return false
}

func spanOf(m *Memory, elements int) span {
	return span{m.address(), m.address() + uint64(elements*m.DType.Size())}
}

// NewChain makes an empty chain; nil where the GPU has no kernels for one.
func (d *Decoder) NewChain() *Chain {
	if d.chain == nil {
		return nil
	}
	return &Chain{d: d, element: -1, made: make(map[uint64]madeBy)}
}

// loadChains loads the kernels of chains, if there are any for the GPU.
func (d *Decoder) loadChains() error {
	if !d.overlap() {
		return nil
	}
	m, err := d.dev.Module(chainUnit, func() ([]byte, error) { return image(chainUnit, d.info.Capability) })
	if errors.Is(err, kernels.ErrNoImage) {
		return nil
	}
	if err != nil {
		return err
	}
	functions := new(chainFunctions)
	for i := range elements {
		if elements[i].bytes != 2 {
			continue
		}
		for j, dim := range chainDims {
			f, err := m.Function(fmt.Sprintf("chain_%s_%d", elements[i].name, dim))
			if err != nil {
				return err
			}
			if err := f.SetDynamicShared(d.info.SharedPerBlockMost); err != nil {
				return err
			}
			functions[i][j] = f
		}
	}
	d.chain = functions
	return nil
}

type chainFunctions [len(elements)][len(chainDims)]*cuda.Function

// Len is the number of layers.
func (c *Chain) Len() int { return len(c.layers) }

// source is where a layer reads memory: tagged floats if a layer of the chain
// makes it, else the memory as it is. ok is false for what is partly made here.
func (c *Chain) source(m *Memory, elements int) (at int64, tagged, ok bool) {
	if made, is := c.made[m.address()]; is {
		return made.at, true, made.elements == elements
	}
	return 0, false, !spanOf(m, elements).meets(c.writes)
}

// Linear takes a layer if the chain can do it behind those that it has. What is
// wrong with its operands is left to [Decoder.Linear].
func (c *Chain) Linear(o *Linear) bool {
	if o.check() != nil {
		return false
	}
	element := elementOf(o.Parts[0].W.DType)
	if o.Rows > chainRows || elements[element].bytes != 2 || o.In%128 != 0 || c.element >= 0 && c.element != element || c.rows > 0 && c.rows != o.Rows {
		return false
	}
	area := o.Rows * (o.In + chainPad + o.In/64)
	if o.Norm != nil {
		area += 2 * (o.In + chainPad)
	}
	area *= 4
	wide := o.Rows*o.In > mostChainX
	if !wide && !c.fits(max(area, c.area)) {
		return false
	}
	p := &chainLinear{in: int32(o.In), inverse: 1 / float32(o.In)}
	part := chainPart{linear: p}
	x, tagged, ok := c.source(&o.X, o.Rows*o.In)
	if !ok {
		return false
	}
	var reads, writes []span
	read := func(m *Memory, elements int) uint64 {
		if m.Buffer == nil {
			return 0
		}
		reads = append(reads, spanOf(m, elements))
		return m.address()
	}
	// Addresses of tagged floats are offsets until there is memory: plus one, since 0 is none.
	if tagged {
		p.tagged = uint64(x) + 1
	} else {
		p.x = read(&o.X, o.Rows*o.In)
	}
	if o.Residual.Buffer != nil {
		at, tagged, ok := c.source(&o.Residual, o.Rows*o.Parts[0].Out)
		if !ok {
			return false
		}
		if tagged {
			p.residualTagged = uint64(at) + 1
		} else {
			p.residual = read(&o.Residual, o.Rows*o.Parts[0].Out)
		}
	}
	if o.Norm != nil {
		p.norm, p.eps = 1, float32(o.Norm.Eps)
		p.gamma, p.beta = read(&o.Norm.Gamma, o.In), read(&o.Norm.Beta, o.In)
	}
	if o.ReLU {
		p.relu = 1
	}
	holds := []Memory{o.X, o.Residual}
	if o.Norm != nil {
		holds = append(holds, o.Norm.Gamma, o.Norm.Beta)
	}
	tiles, floats := 0, c.floats
	for i := range mostParts {
		if i < len(o.Parts) {
			q := &o.Parts[i]
			p.b[i] = read(&q.B, q.Out)
			read(&q.W, q.Out*o.In)
			p.y[i], p.out[i] = q.Y.address(), int32(q.Out)
			p.made[i] = uint64(floats) + 1
			floats += int64(alignUp(o.Rows*q.Out, 2))
			writes = append(writes, spanOf(&q.Y, o.Rows*q.Out))
			tiles += ceil(q.Out, chainTile)
			holds = append(holds, q.W, q.B, q.Y)
		}
		p.tiles[i] = int32(tiles)
	}
	if !c.apart(reads, writes) {
		return false
	}
	blocks := max(c.d.info.Multiprocessors, 1)
	p.each, p.over = int32(tiles/blocks), int32(tiles%blocks)
	for i := range o.Parts {
		c.made[o.Parts[i].Y.address()] = madeBy{int64(p.made[i]) - 1, o.Rows * o.Parts[i].Out}
	}
	own := *o
	own.Parts = append([]LinearPart(nil), o.Parts...)
	part.weights, part.alone = own.Parts, func(s *cuda.Stream) error { return c.d.Linear(s, &own) }
	c.take(part, reads, writes, holds)
	c.element, c.rows, c.floats = element, o.Rows, floats
	if wide {
		c.wide = true
	} else {
		c.area = max(area, c.area)
	}
	return true
}

// apart says whether a layer reads nothing that the chain writes elsewhere, and
// writes nothing that it reads or writes: plain memory is written in no order.
func (c *Chain) apart(reads, writes []span) bool {
	for _, s := range reads {
		if s.meets(c.writes) || s.meets(writes) {
			return false
		}
	}
	for i, s := range writes {
		if s.meets(c.reads) || s.meets(c.writes) || s.meets(writes[:i]) {
			return false
		}
	}
	return true
}

func (c *Chain) take(p chainPart, reads, writes []span, holds []Memory) {
	c.layers = append(c.layers, p)
	c.reads, c.writes = append(c.reads, reads...), append(c.writes, writes...)
	for i := range holds {
		if b := holds[i].Buffer; b != nil {
			c.holds = append(c.holds, b)
		}
	}
}

// Attend takes the append of new keys and values, and the attention to them and
// those before, if the chain makes q, k and v and can do it: where every sequence
// has rows for one output tile.
func (c *Chain) Attend(p *Plan, o *Operands, newK, newV Memory) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ready("chain") != nil || p.look.idle || !p.appends || o.LSE.Buffer != nil || o.Q.Buffer == nil || newK.Buffer == nil || newV.Buffer == nil || o.Out.Buffer == nil {
		return false
	}
	g := &p.look.geometry
	if dimOf(g.Dim) < 0 || c.plan != nil && c.plan != p || c.element < 0 || elementOf(o.K.DType) != c.element || p.engine.dev != c.d.dev ||
		o.Q.DType != cpu.Float32 || o.Out.DType != cpu.Float32 || newK.DType != cpu.Float32 || newV.DType != cpu.Float32 {
		return false
	}
	// Whoever has the last chunk of a sequence has its new keys: nobody else may need them.
	if p.look.tileRows >= blockRows && p.look.rows*(g.Heads/g.KVHeads) > blockRows {
		return false
	}
	if _, _, err := p.attention("chain", o); err != nil {
		return false
	}
	width := p.look.rows * g.KVHeads * g.Dim
	reach := extent(g.Query, p.reach, g.Heads, g.Dim)
	q, tagged, ok := c.source(&o.Q, reach)
	k, taggedK, okK := c.source(&newK, width)
	v, taggedV, okV := c.source(&newV, width)
	if !(ok && okK && okV && tagged && taggedK && taggedV) {
		return false
	}
	outs := extent(g.Out, p.reach, g.Heads, g.ValueDim)
	writes := []span{spanOf(&o.Out, outs), spanOf(&o.K, o.K.Len), spanOf(&o.V, o.V.Len)}
	shape := p.engine.chainShape(c.element, g.Dim)
	if !c.fits(max(c.area, attentionRoom(&shape, p.look.tileRows, mostWarps))) || !c.apart(nil, writes) {
		return false
	}
	box := shape.box(p.look.paged, g.PageTokens)
	var maps [mostParts]cuda.TensorMap
	var err error
	if maps[0], err = p.engine.tensorMap(&o.K, &shape, box); err != nil {
		return false // the layer's own launch will say why
	}
	if maps[1], err = p.engine.tensorMap(&o.V, &shape, box); err != nil {
		return false
	}
	a := &chainAttention{
		p: p.params.paramsBody,
		links: links{
			query: uint64(q) + 1, newKeys: uint64(k) + 1, newValues: uint64(v) + 1, out: uint64(c.floats) + 1,
			slots: p.memory.table.Address() + uint64(p.memory.sections.slots),
		},
	}
	a.p.box, a.p.tileShift = int32(box), int32(bits.TrailingZeros(uint(tileTokens(g)/shape.keys)))
	a.p.warps, a.p.rooms, a.p.parts = mostWarps, 2, int32(partsOf(mostWarps, p.look.tileRows))
	part := chainPart{attend: a, maps: maps}
	own := *o
	part.alone = func(s *cuda.Stream) error {
		if err := p.Append(s, own.K, own.V, newK, newV); err != nil {
			return err
		}
		return p.Run(s, &own)
	}
	c.made[o.Out.address()] = madeBy{c.floats, outs}
	c.floats += int64(alignUp(outs, 2))
	c.take(part, nil, writes, []Memory{o.Q, o.Out, o.K, o.V, newK, newV,
		{Buffer: p.memory.table}, {Buffer: p.memory.partials}, {Buffer: p.memory.counters}})
	c.engine, c.plan, c.step, c.dim = p.engine, p, a.p, g.Dim
	return true
}

func dimOf(dim int) int {
	for i, d := range chainDims {
		if d == dim {
			return i
		}
	}
	return -1
}

// chainShape is the shape of a chain's attention: its chunks are half as large, since
// the way to the end of a part is what counts there.
func (e *Engine) chainShape(element, dim int) shape {
	s := e.shape(element, dim)
	s.keys, s.slot = s.keys/2, s.slot/2
	return s
}

// attentionRoom is the shared memory that attention has with so many slots in
// its ring, as [Engine.configure] has it with two rooms.
func attentionRoom(s *shape, rows, slots int) int {
	return s.query + 2*(mostWarps*rows*s.width*4+2*blockRows*16) + 16 + slots*(s.slot+16)
}

// rest is the shared memory of a chain of so many layers besides rings and area.
func (c *Chain) rest(layers int) int {
	const finishers = chainGroup * chainTile
	return 2*finishers*linearWarps*4 + linearWarps*8 + 2*(chainBody+16) + 64 + finishers*(8+4) + layers*int(unsafe.Sizeof(chainFeed{}))
}

// stagesFor is how many boxes the warps' rings have room for beside an area.
func (c *Chain) stagesFor(area, layers int) int {
	return min((c.d.info.SharedPerBlockMost-c.rest(layers)-area)/(linearWarps*(chainBox+8)), mostChainStages)
}

func (c *Chain) fits(area int) bool { return c.stagesFor(alignUp(area, 16), len(c.layers)+1) >= 2 }

func alignUp(n, to int) int { return (n + to - 1) / to * to }

// chainMap is the map of weights: column blocks of 128 bytes, two of 16 rows in a
// box.
func (d *Decoder) chainMap(w *Memory, in, out int) (cuda.TensorMap, error) {
	key := linearMap{w.address(), in, out, len(elements) + elementOf(w.DType)}
	return d.maps.get(key, func() (cuda.TensorMap, error) {
		size := w.DType.Size()
		return d.dev.TensorMap(w.Buffer, w.Offset, cuda.Tiles{
			ElementBytes: size,
			Dims:         [3]uint64{uint64(128 / size), uint64(out), uint64(in * size / 128)},
			Strides:      [2]uint64{uint64(in * size), 128},
			Box:          [3]uint32{uint32(128 / size), chainTile, chainColumn / 128},
		})
	})
}

// Queue queues the chain: as one launch, or, if that gains nothing, its layers as
// the launches that they are without a chain. The launch reads memory that Upload
// fills: it may be captured, and must not run before.
func (c *Chain) Queue(s *cuda.Stream) error {
	if len(c.layers) < 2 || c.wide {
		for i := range c.layers {
			if err := c.layers[i].alone(s); err != nil {
				return err
			}
		}
		return nil
	}
	blocks := max(c.d.info.Multiprocessors, 1)
	area, slots := c.area, 0
	rows := 0 // of attention's output tiles
	if c.dim > 0 {
		for i := range c.layers {
			if a := c.layers[i].attend; a != nil {
				rows = max(rows, int(a.p.rows))
			}
		}
		shape := c.engine.chainShape(c.element, c.dim)
		area = max(c.area, attentionRoom(&shape, rows, mostWarps*chainChunks))
		if c.stagesFor(alignUp(area, 16), len(c.layers)) < 2 {
			area = max(c.area, attentionRoom(&shape, rows, mostWarps))
		}
		// As many chunks as the area has room for.
		for slots = mostWarps; attentionRoom(&shape, rows, slots+mostWarps) <= area && slots*shape.slot < ringBytes; {
			slots += mostWarps
		}
	}
	area = alignUp(area, 16)
	stages := c.stagesFor(area, len(c.layers))
	shared := linearWarps*stages*(chainBox+8) + area + c.rest(len(c.layers))

	const runBytes = 128
	partials := int64(2 * blocks * rows * (c.dim + 2))
	layerBytes, feedBytes := len(c.layers)*int(unsafe.Sizeof(chainLayer{})), 0
	for i := range c.layers {
		if c.layers[i].linear != nil {
			feedBytes += int(unsafe.Sizeof(chainFeed{}))
		}
	}
	err := c.d.dev.Relaxed(func() (err error) {
		if c.text, err = c.d.dev.NewBuffer(int64(layerBytes + feedBytes)); err != nil {
			return err
		}
		c.words, err = c.d.dev.NewBuffer(runBytes + 8*(c.floats+partials))
		return err
	})
	if err != nil {
		return err
	}
	text, words := c.text.Address(), c.words.Address()+runBytes
	// What was an offset becomes an address.
	at := func(x *uint64) {
		if *x != 0 {
			*x = words + (*x-1)*8
		}
	}
	c.bytes = make([]byte, layerBytes+feedBytes)
	feed := layerBytes
	for i := range c.layers {
		p := &c.layers[i]
		l := chainLayer{maps: p.maps}
		from := i * int(unsafe.Sizeof(l))
		if p.linear != nil {
			x := *p.linear
			at(&x.tagged)
			at(&x.residualTagged)
			for j := range x.made {
				at(&x.made[j])
			}
			copy(l.body[:], rawBytes(&x))
			l.kind = chainLinearKind
			for j := range p.weights {
				w := &p.weights[j]
				if l.maps[j], err = c.d.chainMap(&w.W, int(x.in), w.Out); err != nil {
					return err
				}
			}
			feed += copy(c.bytes[feed:], rawBytes(&chainFeed{maps: text + uint64(from), boxes: x.in / (chainColumn / 2), each: x.each, over: x.over, second: x.tiles[0], third: x.tiles[1]}))
		} else {
			x := *p.attend
			x.p.slots, x.links.partials = int32(slots), words+8*uint64(c.floats)
			x.links.layer, x.links.layers = int32(i), int32(len(c.layers))
			for _, a := range []*uint64{&x.links.query, &x.links.newKeys, &x.links.newValues, &x.links.out} {
				at(a)
			}
			copy(l.body[:], rawBytes(&x))
			l.kind = chainAttentionKind
		}
		copy(c.bytes[from:], rawBytes(&l))
	}
	p := chainParams{
		layers: text, feeds: text + uint64(layerBytes), run: c.words.Address(),
		count: int32(len(c.layers)), feedCount: int32(feedBytes / int(unsafe.Sizeof(chainFeed{}))), rows: int32(c.rows), group: int32(chainGroup / c.rows), ofRows: int32(65536/c.rows + 1),
		spread: int32(bits.Len(uint(c.rows - 1))), stages: int32(stages), area: int32(area),
	}
	if c.dim > 0 {
		p.work, p.blind = c.step.work, c.step.blind
	}
	dim := max(dimOf(c.dim), 0)
	var args cuda.Args
	cuda.Struct(&args, &p)
	for _, b := range c.holds {
		args.Hold(b)
	}
	args.Hold(c.text)
	args.Hold(c.words)
	return c.d.chain[c.element][dim].Launch(s, cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{linearWarps * 32}, Shared: shared, Cooperative: true}, &args)
}

func rawBytes[T any](x *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(x)), unsafe.Sizeof(*x))
}

// Upload fills the memory that the launch reads. It is not for a capture.
func (c *Chain) Upload() error {
	if c.text == nil {
		return nil
	}
	if err := c.text.Upload(0, c.bytes); err != nil {
		return err
	}
	c.bytes = nil
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
