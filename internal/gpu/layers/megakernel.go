package layers

import (
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/weight"
)

// Megakernel is consecutive layers of a decode step in one launch. The layers are linear
// layers of few rows, and attention that appends. The launch may begin with rows of tables, and end with the most
// likely token of each row of logits.
//
// A Megakernel is made from the calls that would queue the layers. Gather, Linear, Attend and Choose report whether
// they have taken their operands, which then wait for Queue. A Megakernel copies its operands: the arguments of its
// layers are those of the time of the call. A Megakernel is not safe for use by several goroutines at once.
type Megakernel struct {
	d        *Engine
	plan     *attention.Plan // nil: no attention yet
	format   weight.Format   // of weights that are not packed; keys and values are dense, of its type. noFormat: no such layer yet
	packing  packing         // of weights of 8 and 4 bits
	dim      int             // head dim; 0: no attention yet
	chunk    attention.Chunk // chunk of its attention
	attends  int             // least bytes of its attention
	rows     int             // of x
	layers   []megakernelLayer
	made     map[uint64]madeBy // by address
	read     map[int64]bool    // offsets of LL protocol words that a layer reads
	claims                     // uses of plain memory
	floats   int64             // number of floats as LL protocol words
	needs    sharedNeeds
	shape    shapeOfBlocks
	turns    *decodeTurns // nil: no rotary embedding
	group    *summing     // the megakernels of other GPUs that sum with this one; nil: none
	exchange *Exchange    // the exchange for the sums
	member   int          // member of the exchange
	front    *Gathers     // nil: none
	back     *Samples     // nil: none yet

	program, tagged *cuda.Buffer  // layers and feeds; the run's number, and LL protocol words
	written         []decodeLayer // what Upload copies to program
	feeds           []byte
	maps            []cuda.TensorMap // of packed weights
	mapsAt          int64            // in program
}

// shapeOfBlocks says which kernels a megakernel needs.
type shapeOfBlocks int

const (
	anyShape   shapeOfBlocks = iota
	optShape                 // layer norms, heads of 80
	llamaShape               // RMS norms, gated units, rotary embeddings
)

// with returns the shape that serves both; ok is false if no kernels do.
func (s shapeOfBlocks) with(o shapeOfBlocks) (both shapeOfBlocks, ok bool) {
	return max(s, o), s == anyShape || o == anyShape || s == o
}

// shape returns which kernels a layer needs.
func (o *Linear) shape() shapeOfBlocks {
	switch {
	case o.Gate || o.Norm != nil && o.Norm.RMS:
		return llamaShape
	case o.Norm != nil:
		return optShape
	}
	return anyShape
}

// noFormat is no format.
const noFormat = weight.Format(weight.Formats)

// megakernelLayer is a layer: linear or attention.
type megakernelLayer struct {
	linear  *decodeLinear
	weights []LinearPart
	packed  *packedLayer // nil: weights of 16 bits
	sum     *Sum         // the sum over all members; nil: none
	attend  *decodeAttention
	maps    [mostParts]cuda.TensorMap // of keys and values
	alone   func(*cuda.Stream) error  // queues the layer as a launch of its own
}

// madeBy says where a layer's output is among the LL protocol words.
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

func spanOf(m *gpu.Memory, elements int) span {
	return span{m.Address(), m.Address() + uint64(elements*m.DType.Size())}
}

// taggedOf returns the number of LL protocol words for some floats: an even number, since two are read at once.
func taggedOf(floats int) int64 { return int64(attn.Ceil(floats, 2) * 2) }

// source returns where a layer reads memory: LL protocol words if a layer of the megakernel makes it, and otherwise
// the memory itself. ok is false for memory of which layers make a part.
func (c *Megakernel) source(m *gpu.Memory, elements int) (at int64, tagged, ok bool) {
	if made, is := c.made[m.Address()]; is {
		return made.at, true, made.elements == elements
	}
	return 0, false, !spanOf(m, elements).meets(c.writes)
}

// megakernelRows returns the largest number of rows of a megakernel: with kernels for the rows of a batch, their
// launches are faster from there on.
func (d *Engine) megakernelRows(of weight.Format) int {
	if d.skinny[of] != nil {
		return leastSkinny - 1
	}
	return decodeRows
}

// Gather adds rows of tables as the megakernel's first work.
func (c *Megakernel) Gather(g *Gathers) bool {
	f, result := &g.first, g.result()
	if c.front != nil || len(c.layers) > 0 || f.Rows > decodeRows || f.N%2 != 0 || f.Residual.Buffer != nil {
		return false
	}
	var reads, writes []span
	var holds []gpu.Memory
	for _, o := range g.all() {
		ids := o.ids()
		reads = append(reads, spanOf(&o.Table, o.TableRows*o.N), spanOf(&ids, o.Rows))
		writes = append(writes, spanOf(&o.Y, o.Rows*o.N))
		holds = append(holds, o.Table, o.IDs, o.Y)
	}
	if !c.apart(reads, writes) {
		return false
	}
	c.made[result.Address()] = madeBy{c.floats, f.Rows * f.N}
	c.floats += taggedOf(f.Rows * f.N)
	c.claim(reads, writes, holds...)
	c.front, c.rows = g, f.Rows
	return true
}

// Choose adds the choice of the most likely token of each row of the last layer's output, as the megakernel's last
// work.
func (c *Megakernel) Choose(o *Samples) bool {
	if len(c.layers) == 0 || c.back != nil || o.check("choose") != nil || o.Settings.Buffer != nil {
		return false
	}
	last := &c.layers[len(c.layers)-1]
	if last.linear == nil || len(last.weights) != 1 || o.Rows != c.rows || o.Vocab != last.weights[0].Out || o.Stride != o.Vocab || o.Logits.Address() != last.weights[0].Y.Address() {
		return false
	}
	at := o.IDs.Address()
	ids := span{at, at + uint64(4*o.Rows)}
	if !c.apart(nil, []span{ids}) {
		return false
	}
	own := *o
	c.back = &own
	c.claim(nil, []span{ids}, o.Logits, gpu.Memory{Buffer: o.IDs.Buffer})
	return true
}

// canChain reports whether a megakernel's kernels have a layer's activation, or its gate: a gate with a norm without
// biases.
func canChain(o *Linear) bool {
	if o.Gate {
		return o.Norm != nil && o.Norm.RMS && o.Parts[0].B.Buffer == nil && o.Parts[1].B.Buffer == nil
	}
	return !o.gates()
}

// Linear adds a layer if the megakernel can compute the layer after its present layers. [Engine.Linear] reports
// invalid operands.
func (c *Megakernel) Linear(o *Linear) bool {
	if c.back != nil || o.check() != nil || !canChain(o) {
		return false
	}
	shape, ok := c.shape.with(o.shape())
	if !ok || o.In%decodeColumns != 0 || c.rows > 0 && c.rows != o.Rows {
		return false
	}
	of, packing, packs := c.format, c.packing, (*packedLayer)(nil)
	if o.Narrow() {
		if packs = newPackedLayer(o); packs == nil {
			return false
		}
		packing = packing.with(packs)
	} else if of = o.format(); !families[of].megakernel || o.Rows > c.d.megakernelRows(of) || c.format != noFormat && c.format != of {
		return false
	}
	if packing.any && (max(o.Rows, c.rows) > packedRows || c.dim > 0 && !slices.Contains(packedDims[:], c.dim)) {
		return false
	}
	if !c.d.hasShape(shape, packing.any) {
		return false
	}
	needs := c.needsWith(shape, &packing, o)
	if !c.fits(shape, of, &packing, c.dim, &needs, c.attends) {
		return false
	}
	p := &decodeLinear{in: int32(o.In), inverse: 1 / float32(o.In)}
	part := megakernelLayer{linear: p, packed: packs}
	x, tagged, ok := c.source(&o.X, o.Rows*o.In)
	if !ok {
		return false
	}
	var reads, writes []span
	read := func(m *gpu.Memory, elements int) uint64 {
		if m.Buffer == nil {
			return 0
		}
		reads = append(reads, spanOf(m, elements))
		return m.Address()
	}
	// Addresses of LL protocol words are offsets until memory is allocated: plus one, since 0 means none.
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
		p.norm, p.eps, p.offset = o.Norm.kind(), float32(o.Norm.Eps), o.Norm.offset()
		p.gamma, p.beta = read(&o.Norm.Gamma, o.In), read(&o.Norm.Beta, o.In)
	}
	p.activation = o.activation()
	holds := []gpu.Memory{o.X, o.Residual}
	if o.Norm != nil {
		holds = append(holds, o.Norm.Gamma, o.Norm.Beta)
	}
	tiles, floats := 0, c.floats
	for i := range mostParts {
		if i < len(o.Parts) {
			q := &o.Parts[i]
			p.b[i] = read(&q.B, q.Out)
			if q.Packed != nil {
				read(&q.W, q.Packed.Bytes/4)
			} else {
				read(&q.W, q.Out*o.In)
			}
			holds = append(holds, q.W, q.B)
			if i == 0 || !o.Gate { // otherwise a tile is of both parts
				p.y[i], p.out[i] = q.Y.Address(), int32(q.Out)
				p.made[i] = uint64(floats) + 1
				floats += taggedOf(o.Rows * q.Out)
				writes = append(writes, spanOf(&q.Y, o.Rows*q.Out))
				tiles += attn.Ceil(q.Out, decodeTile)
				holds = append(holds, q.Y)
			}
		}
		p.tiles[i] = int32(tiles)
	}
	if !c.apart(reads, writes) {
		return false
	}
	for _, at := range [...]uint64{p.tagged, p.residualTagged} {
		if at != 0 {
			c.read[int64(at)-1] = true
		}
	}
	for i := range o.Parts {
		if p.made[i] == 0 {
			continue
		}
		c.made[o.Parts[i].Y.Address()] = madeBy{int64(p.made[i]) - 1, o.Rows * o.Parts[i].Out}
	}
	own := *o
	own.Parts = append([]LinearPart(nil), o.Parts...)
	part.weights, part.alone = own.Parts, func(s *cuda.Stream) error { return c.d.Linear(s, &own) }
	c.take(part, reads, writes, holds)
	c.format, c.packing, c.rows, c.floats, c.needs, c.shape = of, packing, o.Rows, floats, needs, shape
	return true
}

func (c *Megakernel) take(p megakernelLayer, reads, writes []span, holds []gpu.Memory) {
	c.layers = append(c.layers, p)
	c.claim(reads, writes, holds...)
}

// claims has the reads and writes of a megakernel's layers.
type claims struct {
	reads, writes []span
	holds         []*cuda.Buffer
}

// apart reports whether a layer reads nothing that the megakernel writes elsewhere, and writes nothing that the
// megakernel reads or writes: writes of plain memory have no order.
func (c *claims) apart(reads, writes []span) bool {
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

// claim adds a layer's reads and writes.
func (c *claims) claim(reads, writes []span, holds ...gpu.Memory) {
	c.reads, c.writes = append(c.reads, reads...), append(c.writes, writes...)
	for i := range holds {
		if b := holds[i].Buffer; b != nil {
			c.holds = append(c.holds, b)
		}
	}
}

// Attend adds the append of new keys and values, and attention to them and to the keys before, if the megakernel
// makes q, k and v: for sequences with at most one new token, and KV heads with at most 16 query heads. rotated is
// memory for the rotated queries of a rotary embedding, used only if the layers become launches after all.
func (c *Megakernel) Attend(p *attention.Plan, o *attention.Operands, newK, newV, rotated gpu.Memory) bool {
	if kv := weight.Dense(o.Pages[0].Data.DType); kv != c.format && !(c.packing.any && c.format == noFormat && families[kv].megakernel) {
		return false
	}
	if c.back != nil || c.plan != nil && c.plan != p || p.Device() != c.d.dev || o.LSE.Buffer != nil || o.Q.Buffer == nil || newK.Buffer == nil || newV.Buffer == nil || o.Out.Buffer == nil {
		return false
	}
	if o.Q.DType != attn.Float32 || o.Out.DType != attn.Float32 || newK.DType != attn.Float32 || newV.DType != attn.Float32 {
		return false
	}
	return p.FuseAttention(o, func(a *attention.Attending) bool { return c.attend(p, a, o, newK, newV, rotated) })
}

// attend is Attend for the parts that the plan exports.
func (c *Megakernel) attend(p *attention.Plan, a *attention.Attending, o *attention.Operands, newK, newV, rotated gpu.Memory) bool {
	g := a.Problem
	if !canMegakernel.Does(g) || decodeDim(g.Dim) < 0 || c.packing.any && !slices.Contains(packedDims[:], g.Dim) {
		return false
	}
	needs, turns := anyShape, turnsOf(a)
	switch {
	case g.Rotary != attn.Rotary{}:
		if turns == nil || rotated.Buffer == nil {
			return false
		}
		needs = llamaShape
	case !slices.Contains(llamaDims[:], g.Dim):
		needs = optShape
	}
	shape, ok := c.shape.with(needs)
	if !ok || shape == llamaShape && !slices.Contains(llamaDims[:], g.Dim) || !c.d.hasShape(shape, c.packing.any) {
		return false
	}
	// With one token a sequence, all output tiles have as many rows, and each KV head of a sequence is one output
	// tile. The merging block waits for all rows of the others' partials, and the block of the last chunk has the new
	// keys, which no other block may need.
	if group := g.Group(); a.TileRows != group || group == attention.BlockRows && a.Rows > 1 {
		return false
	}
	width := a.Rows * g.KVHeads * g.Dim
	q, tagged, ok := c.source(&o.Q, a.QueryLen)
	k, taggedK, okK := c.source(&newK, width)
	v, taggedV, okV := c.source(&newV, width)
	if !(ok && okK && okV && tagged && taggedK && taggedV) {
		return false
	}
	writes := []span{spanOf(&o.Out, a.OutLen), spanOf(&o.Pages[0].Data, o.Pages[0].Data.Len), spanOf(&o.Pages[1].Data, o.Pages[1].Data.Len)}
	of, attends := weight.Dense(o.Pages[0].Data.DType), a.Chunk.SharedBytes(a.TileRows, attention.ConsumerWarps)
	if !c.fits(shape, of, &c.packing, g.Dim, &c.needs, attends) || !c.apart(nil, writes) {
		return false
	}
	layer := &decodeAttention{
		p:     a.Params,
		links: links{query: uint64(q) + 1, newKeys: uint64(k) + 1, newValues: uint64(v) + 1, out: uint64(c.floats) + 1, slots: a.Slots},
	}
	layer.p.Causal = 0 // a sequence's one new token sees all keys
	part := megakernelLayer{attend: layer, maps: [mostParts]cuda.TensorMap{a.Maps[0], a.Maps[1]}}
	own := *o
	part.alone = func(s *cuda.Stream) error {
		if turns == nil {
			if err := p.Append(s, own.Pages, newK, newV); err != nil {
				return err
			}
			return p.Run(s, &own)
		}
		if err := p.AppendRotated(s, own.Pages, newK, newV, own.Q, rotated, 0); err != nil {
			return err
		}
		o := own
		o.Q = rotated
		return p.Run(s, &o)
	}
	c.read[q], c.read[k], c.read[v] = true, true, true
	c.made[o.Out.Address()] = madeBy{c.floats, a.OutLen}
	c.floats += taggedOf(a.OutLen)
	c.take(part, nil, writes, []gpu.Memory{o.Q, o.Out, o.Pages[0].Data, o.Pages[1].Data, newK, newV, rotated,
		{Buffer: a.Table}, {Buffer: a.Workspace[0]}, {Buffer: a.Workspace[1]}})
	c.plan, c.format, c.dim, c.chunk, c.attends, c.shape, c.turns = p, of, g.Dim, a.Chunk, attends, shape, turns
	return true
}

// Sum is an all-reduce by megakernels of all members over their last layers' outputs. There is one Sum for all
// members. [Sum.Fits] is called for each member before any [Sum.Take].
type Sum struct {
	x *Exchange
	o AllReduce

	members [exchangeMembers]*Megakernel
	at      [exchangeMembers]int64 // each member's offset of the others' words
}

// summing is megakernels of several GPUs that sum: all of them are launched, or none.
type summing struct {
	members [exchangeMembers]*Megakernel
	decided bool
	alone   bool
}

// NewSum returns an all-reduce without bias or residual.
func NewSum(x *Exchange, o *AllReduce) *Sum { return &Sum{x: x, o: *o} }

// elements returns the number of elements.
func (s *Sum) elements() int { return s.o.Rows * s.o.N }

// Fits reports whether a member's megakernel can sum its last output. Fits is called for all members.
func (s *Sum) Fits(c *Megakernel, member int) bool {
	n := s.elements()
	if c.back != nil || len(s.o.B) > 0 || len(s.o.Residual) > 0 || s.x.engines[member] != c.d || len(c.layers) == 0 {
		return false
	}
	last := &c.layers[len(c.layers)-1]
	if l := last.linear; l == nil || last.sum != nil || len(last.weights) != 1 || l.norm != 0 || l.activation != 0 || last.weights[0].Y.Address() != s.o.X[member].Address() || c.rows*last.weights[0].Out != n {
		return false
	}
	if g := c.group; g != nil && g.members[member] != c {
		return false
	}
	s.members[member] = c
	// All sum with the same megakernels, or none has summed yet; and the same thread blocks of all have the same
	// tiles.
	for _, other := range s.members {
		if other != nil && (other.group != c.group || other.blocks() != c.blocks() || len(other.layers) != len(c.layers)) {
			return false
		}
	}
	return c.apart(nil, []span{spanOf(&s.o.Y[member], n)})
}

// Take makes the megakernel of a member sum, after Fits of all members.
func (s *Sum) Take(member int) {
	c, n := s.members[member], s.elements()
	if c.group == nil {
		g := &summing{}
		for m := range s.x.engines {
			s.members[m].group, g.members[m] = g, s.members[m]
		}
	}
	last := &c.layers[len(c.layers)-1]
	x, y := s.o.X[member], s.o.Y[member]
	last.sum = s
	last.linear.y[0] = y.Address()
	c.made[y.Address()] = c.made[x.Address()]
	delete(c.made, x.Address())
	c.exchange, c.member = s.x, member
	s.at[member] = c.floats
	c.floats += taggedOf(n) * int64(len(s.x.engines))
	linear := last.alone
	last.alone = func(stream *cuda.Stream) error {
		if err := linear(stream); err != nil {
			return err
		}
		return c.d.AllReduce(stream, s.x, &s.o, member)
	}
	c.claim(nil, []span{spanOf(&y, n)}, y)
}

// turnsOf returns the rotary embedding as an argument of kernels; nil: none, or one that the kernels lack.
func turnsOf(a *attention.Attending) *decodeTurns {
	r := &a.Problem.Rotary
	if n := r.Turns.Len(); n == 0 || 2*n != a.Problem.Dim || r.Interleaved || n > len(decodeTurns{}.turns) {
		return nil
	}
	t := &decodeTurns{positions: a.Positions, factor: float32(r.Factor)}
	for i := range r.Turns.Len() {
		t.turns[i] = r.Turns.Of(i)
	}
	return t
}
