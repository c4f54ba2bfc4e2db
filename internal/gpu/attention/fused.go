package attention

import (
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// What a launch has to know that does a plan's work itself: one that makes new keys and
// values and stores them, or one that attends besides.

// Appending is the storing of a step's new keys and values, as [Plan.Append] queues it.
type Appending struct {
	Problem   *attn.Problem // of the plan, not to be written
	Rows      int           // token rows
	PageBytes int           // of a page's keys, or values; 0 where what lies between two pages is not just that

	// Addresses of int32: of each token row, the row of keys of head 0 that it becomes, or
	// -1; and of the pages that are worth having in the L2 cache before attention runs, how
	// many they are and which.
	Slots, Ahead uint64
	Positions    uint64       // address of int64: where each token row stands in its sequence; there with a rotary embedding
	Table        *cuda.Buffer // that these are in
}

// Attending is attention of one layer, as [Plan.Run] queues it, with queries and new keys that are to be turned if the problem
// has a rotary embedding, but of chunks of keys half as
// large: the way to the end of a part is what counts in a launch that does more.
type Attending struct {
	Appending
	TileRows         int // of an output tile, at most
	QueryLen, OutLen int // elements that queries and outputs reach over
	Params           Params
	Maps             [2]cuda.TensorMap // of keys and of values
	Chunk            Chunk
	Workspace        [2]*cuda.Buffer // that Params has addresses of, besides the table
}

// Chunk is what a chunk of keys and values takes of shared memory.
type Chunk struct {
	Slot         int // bytes of a chunk
	query, width int // as those of a shape
}

// SharedBytes is the shared memory that attention has with so many slots in its ring, as
// [Engine.configure] has it with two buffers of states, but for the barriers.
func (c *Chunk) SharedBytes(rows, slots int) int {
	return c.query + 2*(ConsumerWarps*rows*c.width*4+2*BlockRows*16) + slots*c.Slot
}

// fusedShape is the shape of attention in a launch that does more.
func (e *Engine) fusedShape(element attn.DType, dim int) shape {
	s := e.shape(element, dim)
	s.keys, s.slot = s.keys/2, s.slot/2
	return s
}

// FusedChunk is what [Attending] has for keys of a type and a head dim.
func (e *Engine) FusedChunk(element attn.DType, dim int) Chunk {
	s := e.fusedShape(element, dim)
	return Chunk{Slot: s.slot, query: s.query, width: s.width}
}

// Device is what the plan's memory is on.
func (p *Plan) Device() *cuda.Device { return p.engine.dev }

// FuseAppend offers the storing of one layer's new keys and values to another
// launch. take says whether it does that; then it counts as queued. Nothing is offered where
// Append would be an error.
func (p *Plan) FuseAppend(to Pages, take func(*Appending) bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.canAppend("append") || rotates(&p.form.geometry) || p.checkPages("append", &to) != nil {
		return false
	}
	a := p.appending()
	if !take(&a) {
		return false
	}
	p.stores(&to)
	return true
}

// FuseAttention offers the storing of new keys and values, and the attention behind it, to
// another launch. take says whether it does that, in this step and in all that come: from the
// next Build on the schedule is one for a launch that has all thread blocks anyway. Nothing is
// offered where Append or Run would be an error.
func (p *Plan) FuseAttention(o *Operands, take func(*Attending) bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.canAppend("attention") || p.form.both || p.form.sharing.on() { // that schedule is not one of all sequences and keys
		return false
	}
	if p.form.geometry.Invariant { // such launches have orders of sums of their own
		return false
	}
	if p.checkLaid("attention", o) != nil {
		return false
	}
	if _, err := p.arguments(o); err != nil {
		return false
	}
	g := &p.form.geometry
	element := o.Pages[0].Data.DType
	shape := p.engine.fusedShape(element, g.Dim)
	a := Attending{
		Appending: p.appending(), TileRows: p.form.tileRows, Params: p.params.Params, Chunk: p.engine.FusedChunk(element, g.Dim),
		QueryLen: g.Query.Extent(p.reach, g.Heads, g.Dim), OutLen: g.Out.Extent(p.reach, g.Heads, g.ValueDim),
		Workspace: [2]*cuda.Buffer{p.memory.partials, p.memory.counters},
	}
	box := boxOf(shape.keys, p.form.paged, g.PageTokens)
	a.Params.box, a.Params.tileShift = int32(box), int32(bits.TrailingZeros(uint(tileTokens(g)/shape.keys)))
	if p.engine.hasCopyEngine() {
		for i, m := range [...]*gpu.Memory{&o.Pages[0].Data, &o.Pages[1].Data} {
			var err error
			if a.Maps[i], err = p.engine.tensorMap(m, &shape, box); err != nil {
				return false // Run will say why
			}
		}
	}
	if !take(&a) {
		return false
	}
	p.fused = true
	return true
}

// appending is what launches have to know that append.
func (p *Plan) appending() Appending {
	g := &p.form.geometry
	return Appending{
		Problem: g, Rows: p.form.rows, PageBytes: pageBytes(g),
		Slots: p.slots.address(&p.memory), Ahead: p.ahead.address(&p.memory), Positions: p.positions.address(&p.memory), Table: p.memory.table,
	}
}

// canAppend says whether there are new keys and values to store.
func (p *Plan) canAppend(op string) bool {
	return p.ready(op) == nil && !p.form.idle && p.appends
}
