package attention

import (
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// This file describes a plan's work to launches that do that work themselves: a launch that makes new keys and values
// and stores them, or also attends.

// Appending is the storing of a step's new keys and values, as queued by [Plan.Append].
type Appending struct {
	Problem   *attn.Problem // of the plan; read-only
	Rows      int           // token rows
	PageBytes int           // of a page's keys, or values; 0: see pageBytes

	// Slots and Ahead are addresses of int32 lists. Slots has, for each token row, its row of keys in head 0, or -1.
	// Ahead has the number of pages to bring into the L2 cache before attention runs, and the pages.
	Slots, Ahead uint64
	Positions    uint64       // address of int64: the position of each token row in its sequence; with a rotary embedding only
	Table        *cuda.Buffer // the buffer of these lists
}

// Attending is attention of one layer, as queued by [Plan.Run]. If the problem has a rotary embedding, the launch
// rotates queries and new keys. Chunks of keys are half as large as in Run: in a launch with other work, the latency at
// the end of a part counts.
type Attending struct {
	Appending
	TileRows         int // of an output tile, at most
	QueryLen, OutLen int // extents of queries and outputs, in elements
	Params           Params
	Maps             [2]cuda.TensorMap // of keys and of values
	Chunk            Chunk
	Workspace        [2]*cuda.Buffer // buffers, besides the table, whose addresses Params has
}

// Chunk is the shared memory of a chunk of keys and values.
type Chunk struct {
	Slot         int // bytes of a chunk
	query, width int // as in shape
}

// SharedBytes returns the shared memory of attention with `slots` slots in its ring: that of [Engine.configure] with
// two buffers of states, without the barriers.
func (c *Chunk) SharedBytes(rows, slots int) int {
	return c.query + 2*(ConsumerWarps*rows*c.width*4+2*BlockRows*16) + slots*c.Slot
}

// fusedShape returns the shape of attention in a launch with other work.
func (e *Engine) fusedShape(element attn.DType, dim int) shape {
	s := e.shape(element, dim)
	s.keys, s.slot = s.keys/2, s.slot/2
	return s
}

// FusedChunk returns the chunk of [Attending] for a type of keys and a head dim.
func (e *Engine) FusedChunk(element attn.DType, dim int) Chunk {
	s := e.fusedShape(element, dim)
	return Chunk{Slot: s.slot, query: s.query, width: s.width}
}

// Device returns the device of the plan's memory.
func (p *Plan) Device() *cuda.Device { return p.engine.dev }

// FuseAppend offers the storing of one layer's new keys and values to another launch, through take. If take returns
// true, the storing counts as queued. FuseAppend offers nothing where Append would return an error.
func (p *Plan) FuseAppend(to Pages, take func(*Appending) bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.canAppend("append") || p.form.spread.on() || p.form.kernel.family != &decodeFamily || rotates(&p.form.geometry) || p.checkPages("append", &to) != nil {
		return false
	}
	a := p.appending()
	if !take(&a) {
		return false
	}
	p.stores(&to)
	return true
}

// FuseAttention offers the storing of new keys and values, and the attention after it, to another launch, through take.
// If take returns true, that launch does both in this step and in all later steps: from the next Build on, the schedule
// is for a launch that has all thread blocks anyway. FuseAttention offers nothing where Append or Run would return an
// error.
func (p *Plan) FuseAttention(o *Operands, take func(*Attending) bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.canAppend("attention") || p.form.spread.on() || p.form.kernel.family != &decodeFamily || p.form.both || p.form.sharing.on() { // the schedule does not cover all sequences and keys
		return false
	}
	if p.form.geometry.Invariant || p.form.geometry.Measures { // fused launches have their own order of sums
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
			if a.Maps[i], err = p.engine.tensorMap(m, &shape, whole(g.Dim), box); err != nil {
				return false // Run returns the error
			}
		}
	}
	if !take(&a) {
		return false
	}
	p.fused = true
	return true
}

// appending returns the parameters of launches that append.
func (p *Plan) appending() Appending {
	g := &p.form.geometry
	return Appending{
		Problem: g, Rows: p.form.rows, PageBytes: pageBytes(g),
		Slots: p.slots.address(&p.memory), Ahead: p.ahead.address(&p.memory), Positions: p.positions.address(&p.memory), Table: p.memory.table,
	}
}

// canAppend reports whether a launch with other work can store the step's new keys and values: there are some, and no row of a sequence
// is without.
func (p *Plan) canAppend(op string) bool {
	return p.ready(op) == nil && !p.form.idle && p.appends && !p.given
}
