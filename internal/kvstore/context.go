package kvstore

import (
	"errors"

	"gorgonia.org/leanattention/internal/errs"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/tensor"
)

// queueByContext is queue for a cache that is sharded by context:
//
//  1. Each member appends the new tokens of its pages, and attends to its part of each sequence.
//  2. Each member writes its states to the memory of the first member.
//  3. The first member merges the states in the order of the shards.
//
// If a sequence has several new tokens, members attend only to the keys before the new tokens. The first member then copies the new keys and
// values, and attends to the new tokens among themselves, which gives one more state.
func (p *DevicePlan) queueByContext(sub *queue.Submission, layer int, n newRows, o *ongpu.AttentionOperands) error {
	c := p.now.context
	b, err := sub.Use(c.memory, c.generation)
	if err != nil {
		return err
	}
	to := func(part int) (all ongpu.AttentionOperands) {
		all = ongpu.AttentionOperands{Q: o.Q, Sinks: o.Sinks}
		all.Out, all.LSE = c.parts.State(b, part)
		return all
	}
	err = sub.Each(func(i int, sub *queue.Submission) error {
		all, mine := to(p.pages.Parts[i].shard.Index), n
		if p.turns() {
			mine.rotated = n.each[i]
		}
		return sub.Do(func(stream *cuda.Stream) error {
			if err := p.attendPart(stream, i, layer, mine, &all); err != nil || i > 0 || c.fresh == nil {
				return err
			}
			if p.turns() {
				mine.rotated = n.each[len(p.pages.Parts)]
			}
			fresh := to(p.pages.shards)
			return c.attendFresh(stream, b, mine, &fresh)
		})
	})
	if err != nil {
		return err
	}
	merged := &attention.Merged{Rows: p.rows, Out: o.Out, LSE: o.LSE, OutAt: p.geometry.Out, LSEAt: p.geometry.LSE}
	return sub.Do(func(stream *cuda.Stream) error { return p.pages.GPU.MergeParts(stream, &c.parts, b, merged) })
}

// attendPart queues the work of one member: it appends the new tokens of its pages, attends to its keys, and writes the states to
// rows of all heads.
func (p *DevicePlan) attendPart(stream *cuda.Stream, member, layer int, n newRows, all *ongpu.AttentionOperands) error {
	plan, heads, states := p.now.parts[member].plan, p.pages.Parts[member].heads, p.geometry
	states.Out, states.LSE = attn.PackedRows(states.Heads, states.ValueDim), attn.PackedRows(states.Heads, 1)
	mine := heads.Operands(&states, all)
	mine.Pages = p.layerPages(member, layer)
	rows := newRows{k: ongpu.From(n.k, heads.First*states.Dim), v: ongpu.From(n.v, heads.First*states.ValueDim)}
	if p.turns() {
		first, _ := heads.Queries(&states)
		rows.rotated = ongpu.From(n.rotated, first*states.Query.Head)
	}
	if err := rows.appendTo(plan, stream, &mine, states.KVHeads); err != nil {
		return err
	}
	return plan.Run(stream, &mine)
}

// attendFresh queues attention of new tokens among themselves. It copies their keys and values to b, the memory of c.
func (c *contextStates) attendFresh(stream *cuda.Stream, b *cuda.Buffer, n newRows, o *ongpu.AttentionOperands) error {
	o.Pages = c.pages
	for i := range c.fresh.geometry.Pages.Planes {
		for _, m := range [...]*ongpu.Mem{&o.Pages[i].Data, &o.Pages[i].Scales} {
			if m.Len > 0 {
				m.Buffer = b
			}
		}
	}
	if err := n.appendTo(c.fresh.plan, stream, o, 0); err != nil {
		return err
	}
	return c.fresh.plan.Run(stream, o)
}

// Exchanging is the part of a [layers.Exchange] through which all members merge states.
type Exchanging interface {
	AllGathers(s *cuda.Stream, lists []*layers.AllGather, member int) error
	MergeParts(s *cuda.Stream, o *layers.PartStates, member int) error
	Realign(finish func() error) error
	Failed() error
}

// OpenExchange opens the exchange of g. It is a variable for tests. The caller has entered the GPU.
var OpenExchange = func(g *ongpu.GPU, op string) (Exchanging, error) {
	var engines []*layers.Engine
	for _, m := range g.Members {
		e, err := m.Layers(op)
		if err != nil {
			return nil, err
		}
		engines = append(engines, e)
	}
	x, err := g.Exchange(op, engines)
	if err != nil { // a nil pointer would be a non-nil interface
		return nil, err
	}
	return x, nil
}

// exchange returns the exchange through which all members merge states, and plans the merge. It returns nil if only the first member has
// the queries, keys and values, or some member has parts that it can't gather: then the first member merges. Errors are those for users.
func (p *DevicePlan) exchange(op string, c *Call, qkv *ongpu.QKV) (Exchanging, error) {
	g := p.pages.GPU
	if p.now.context == nil || c.Out != nil || p.rows < 1 || c.Sinks != nil && ongpu.Must(c.Sinks).Replicas == nil {
		return nil, nil
	}
	for _, d := range qkv {
		parts := d.Shards != nil && d.Axis == 1 && !d.Joined && d.DType == tensor.Float32
		if d.Replicas == nil && !parts {
			return nil, nil
		}
	}
	if p.now.others == nil && g.Group.Recording() { // a recording allocates nothing for the other members
		return nil, nil
	}
	x, err := OpenExchange(g, op)
	switch {
	case errors.Is(err, errs.ErrUnsupported): // there are more members than an exchange has
		return nil, nil
	case err != nil:
		return nil, err
	}
	if err := x.Failed(); err != nil {
		return nil, ongpu.Error(op, err)
	}
	if p.merging = true; p.now.others != nil {
		return x, nil
	}
	if err := p.planOthers(op, p.now); err != nil {
		return nil, err
	}
	if err := p.upload(op, p.now); err != nil {
		p.now.others = nil // the next run plans and uploads again
		return nil, err
	}
	return x, nil
}

// attendMerging is Attend for a cache that is sharded by context, if all members have the queries, keys and values. Each member attends to
// its part of each sequence and, if a sequence has several new tokens, to the new tokens among themselves. Then every member merges the states
// of all members. If each member has the queries of its heads, and one group has all heads, a member merges its heads alone; otherwise all heads.
func (p *DevicePlan) attendMerging(c *Call, qkv *ongpu.QKV, x Exchanging) (out, lse G.Value, err error) {
	lead := p.pages.GPU
	n, g := len(lead.Members), &p.geometry
	works, fresh, states := make([]memberLayer, n), make([]ongpu.AttentionOperands, n), make([]*cuda.Buffer, n)
	merge := &layers.PartStates{Rows: p.rows, Heads: g.Heads, Dim: g.ValueDim, Places: p.pages.shards}
	gather := gathering{qkv: *qkv}
	outShape, lseShape := c.Rows.outShape(g.ValueDim), c.Rows.LSEShape()
	of := func(shape tensor.Shape) tensor.Shape { return shape } // of a member
	if merge.Scatter = qkv[0].Shards != nil && p.pages.shards == n && g.Heads%n == 0; merge.Scatter {
		of = p.share
	}
	ready := func(i int, sub *queue.Submission) error {
		mine, err := gather.ready(sub, lead, c, i)
		if err != nil {
			return err
		}
		w, err := p.readyMember(sub, c, i, mine, 0, of(outShape), of(lseShape))
		if err != nil {
			return err
		}
		have := p.now.states(i)
		b, err := sub.Use(have.memory, have.generation)
		if err != nil {
			return err
		}
		put := func(list *[]ongpu.Mem, m ongpu.Mem) {
			if *list == nil {
				*list = make([]ongpu.Mem, n)
			}
			(*list)[i] = m
		}
		put(&merge.Y, w.o.Out)
		if c.LSE {
			put(&merge.YLSE, w.o.LSE)
		}
		w.o.Out, w.o.LSE = have.parts.State(b, 0)
		put(&merge.Out, w.o.Out)
		put(&merge.LSE, w.o.LSE)
		if have.fresh != nil {
			fresh[i] = ongpu.AttentionOperands{Q: w.o.Q}
			fresh[i].Out, fresh[i].LSE = have.parts.State(b, have.parts.Count-1)
			put(&merge.Own, fresh[i].Out)
			put(&merge.OwnLSE, fresh[i].LSE)
		}
		works[i], states[i] = w, b
		return nil
	}
	err = lead.Queue.Submit(func(sub *queue.Submission) error {
		defer gather.free.All()
		// Work that waits for other members is queued after all members have the work that comes before.
		if err := sub.PerGPU(ready, nothing); err != nil {
			return err
		}
		if err := gather.queue(sub, x); err != nil {
			return realigned(sub, x, err)
		}
		if err := sub.PerGPU(nothing, func(i int, sub *queue.Submission) error {
			w, have := &works[i], p.now.states(i)
			defer w.free.All()
			if err := sub.Do(func(s *cuda.Stream) error {
				if err := p.attendPart(s, i, c.Layer, w.rows, &w.o); err != nil || have.fresh == nil {
					return err
				}
				return have.attendFresh(s, states[i], w.rows, &fresh[i])
			}); err != nil {
				return err
			}
			return ongpu.HaveRead(sub, w.reads...)
		}); err != nil {
			return err
		}
		if err := sub.PerGPU(nothing, func(i int, sub *queue.Submission) error {
			return sub.Do(func(s *cuda.Stream) error { return x.MergeParts(s, merge, i) })
		}); err != nil {
			return realigned(sub, x, err)
		}
		c.Node.Record(sub, p.now)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	if merge.Scatter {
		out, lse = p.byMember(c, works)
		return out, lse, nil
	}
	o, l := works[0].out, works[0].lse
	for i := range works[1:] {
		o.Replicas = append(o.Replicas, works[i+1].out)
		if c.LSE {
			l.Replicas = append(l.Replicas, works[i+1].lse)
		}
	}
	if c.LSE {
		return o.Value(), l.Value(), nil
	}
	return o.Value(), nil, nil
}

// realigned returns the error of a failure that left some members waiting for others. It ends the wait first.
func realigned(sub *queue.Submission, x Exchanging, err error) error {
	if sub.Recording() {
		return err
	}
	if e := x.Realign(sub.Finish); e != nil {
		return errors.Join(err, e)
	}
	return err
}

// nothing is the preparation of work that needs none.
func nothing(int, *queue.Submission) error { return nil }

// gathering gives all members whole queries, keys and values, of which each member has a part.
type gathering struct {
	qkv   ongpu.QKV
	lists []*layers.AllGather
	reads [][]*ongpu.Tensor // the parts of each member
	free  ongpu.Freeing     // memory that the members' queues have lent
}

// ready returns the operands of a member. A whole of which the member has a part is new memory.
func (g *gathering) ready(sub *queue.Submission, lead *ongpu.GPU, c *Call, member int) (mine ongpu.QKV, err error) {
	m, n, list := lead.Members[member], len(lead.Members), 0
	if g.reads == nil {
		g.reads = make([][]*ongpu.Tensor, n)
	}
	for i, d := range g.qkv {
		mine[i] = d.On(member)
		if d.Shards == nil {
			continue
		}
		whole, free, err := m.Scratch(sub, c.Memory, c.Memory.On(lead.Group, member).Input(i), d.DType, d.Shape)
		if err != nil {
			return mine, err
		}
		g.free = append(g.free, func() {
			if member == 0 {
				free()
				return
			}
			_ = m.Queue.Submit(func(*queue.Submission) error { free(); return nil })
		})
		if len(g.lists) <= list {
			o := &layers.AllGather{Rows: d.Shape[0], X: make([]ongpu.Mem, n), Y: make([]ongpu.Mem, n)}
			for _, s := range d.Shards {
				o.Columns = append(o.Columns, s.Shape[1])
			}
			g.lists = append(g.lists, o)
		}
		o := g.lists[list]
		if o.X[member], err = mine[i].UseAs(sub, LayerNames[i]); err != nil {
			return mine, err
		}
		if o.Y[member], err = whole.UseAs(sub, LayerNames[i]); err != nil {
			return mine, err
		}
		g.reads[member], mine[i] = append(g.reads[member], mine[i]), whole
		list++
	}
	return mine, nil
}

// queue queues the gathers, after ready was called for all members.
func (g *gathering) queue(sub *queue.Submission, x Exchanging) error {
	if len(g.lists) == 0 {
		return nil
	}
	return sub.PerGPU(nothing, func(i int, sub *queue.Submission) error {
		if err := sub.Do(func(s *cuda.Stream) error { return x.AllGathers(s, g.lists, i) }); err != nil {
			return err
		}
		return ongpu.HaveRead(sub, g.reads[i]...)
	})
}
