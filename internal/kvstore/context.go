package kvstore

import (
	"errors"

	"gorgonia.org/leanattention/internal/errs"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/tensor"
)

// queueByContext is queue of a cache that is sharded by context. Each member appends the new tokens of its pages, attends to what it
// has of each sequence, and leaves states in the memory of the first one, which merges them in the order of
// the places. Where sequences have one new token each, that is all. Else members attend to the keys before the new
// tokens, and the first one to these among themselves, by copies of their keys and values: one part more.
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
		all := to(p.pages.Parts[i].place.Index)
		return sub.Do(func(stream *cuda.Stream) error {
			if err := p.attendPart(stream, i, layer, n, &all); err != nil || i > 0 || c.fresh == nil {
				return err
			}
			fresh := to(p.pages.dealt)
			return c.attendFresh(stream, b, n, &fresh)
		})
	})
	if err != nil {
		return err
	}
	merged := &attention.Merged{Rows: p.rows, Out: o.Out, LSE: o.LSE, OutAt: p.geometry.Out, LSEAt: p.geometry.LSE}
	return sub.Do(func(stream *cuda.Stream) error { return p.pages.GPU.MergeParts(stream, &c.parts, b, merged) })
}

// attendPart queues what a member of a cache that is sharded by context does of a layer: it appends the new tokens of its pages, and
// leaves the states of what it has in the rows of all heads.
func (p *DevicePlan) attendPart(stream *cuda.Stream, member, layer int, n newRows, all *ongpu.AttentionOperands) error {
	plan, heads, states := p.now.parts[member].plan, p.pages.Parts[member].heads, p.geometry
	states.Out, states.LSE = attn.PackedRows(states.Heads, states.ValueDim), attn.PackedRows(states.Heads, 1)
	mine := heads.Operands(&states, all)
	mine.Pages = p.layerPages(member, layer)
	rows := newRows{k: ongpu.From(n.k, heads.First*states.Dim), v: ongpu.From(n.v, heads.First*states.ValueDim)}
	if err := rows.appendTo(plan, stream, &mine, states.KVHeads); err != nil {
		return err
	}
	return plan.Run(stream, &mine)
}

// attendFresh queues attention of new tokens among themselves, by copies of their keys and values in b, which is the memory.
func (c *contextStates) attendFresh(stream *cuda.Stream, b *cuda.Buffer, n newRows, o *ongpu.AttentionOperands) error {
	o.Pages = c.pages
	for i := range c.fresh.geometry.Pages.Planes {
		if m := &o.Pages[i].Data; m.Len > 0 {
			m.Buffer = b
		}
	}
	if err := n.appendTo(c.fresh.plan, stream, o, 0); err != nil {
		return err
	}
	return c.fresh.plan.Run(stream, o)
}

// Exchanging is what attention apart by context needs of a [decoder.Exchange].
type Exchanging interface {
	AllGathers(s *cuda.Stream, lists []*decoder.AllGather, member int) error
	MergeParts(s *cuda.Stream, o *decoder.PartStates, member int) error
	Realign(finish func() error) error
	Failed() error
}

// OpenExchange is a variable for tests. The GPU is entered.
var OpenExchange = func(g *ongpu.GPU, op string) (Exchanging, error) {
	var engines []*decoder.Engine
	for _, m := range g.Members {
		e, err := m.Layers(op)
		if err != nil {
			return nil, err
		}
		engines = append(engines, e)
	}
	x, err := g.Exchange(op, engines)
	if err != nil { // not a nil in an interface
		return nil, err
	}
	return x, nil
}

// exchange is what the members of a cache that is sharded by context merge through, where all of them have the queries, keys and
// values, or parts of them that they can gather; nil: the first one has them, and merges. What the members need for that is planned. Errors are
// as users are told.
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
	if p.now.others == nil && g.Group.Recording() { // what the others need is not there
		return nil, nil
	}
	x, err := OpenExchange(g, op)
	switch {
	case errors.Is(err, errs.ErrUnsupported): // as where there are more members than can exchange
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
		p.now.others = nil // the next run plans and brings them again
		return nil, err
	}
	return x, nil
}

// attendMerging is attend of a cache that is sharded by context where all members have the queries, keys and values: each attends to
// what it has of each sequence, and, where sequences have several new tokens, to these among themselves; then all merge the
// states of all.
func (p *DevicePlan) attendMerging(c *Call, qkv *ongpu.QKV, x Exchanging) (out, lse G.Value, err error) {
	lead := p.pages.GPU
	n, g := len(lead.Members), &p.geometry
	works, fresh, states := make([]apartLayer, n), make([]ongpu.AttentionOperands, n), make([]*cuda.Buffer, n)
	merge := &decoder.PartStates{Rows: p.rows, Heads: g.Heads, Dim: g.ValueDim, Places: p.pages.dealt}
	gather := gathering{qkv: *qkv}
	ready := func(i int, sub *queue.Submission) error {
		mine, err := gather.ready(sub, lead, c, i)
		if err != nil {
			return err
		}
		w, err := p.readyApart(sub, c, i, mine, 0, c.Rows.outShape(g.ValueDim), c.Rows.LSEShape())
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
		// What waits for other members is queued when all of them have what is before it.
		if err := sub.Apart(ready, nothing); err != nil {
			return err
		}
		if err := gather.queue(sub, x); err != nil {
			return realigned(sub, x, err)
		}
		if err := sub.Apart(nothing, func(i int, sub *queue.Submission) error {
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
		if err := sub.Apart(nothing, func(i int, sub *queue.Submission) error {
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

// realigned is why members could not all be given what they do together: some wait for others, who do not come.
func realigned(sub *queue.Submission, x Exchanging, err error) error {
	if sub.Recording() {
		return err
	}
	if e := x.Realign(sub.Finish); e != nil {
		return errors.Join(err, e)
	}
	return err
}

// nothing is what is to be ready for work that has all it needs.
func nothing(int, *queue.Submission) error { return nil }

// gathering is how all members get queries, keys and values of which they have parts.
type gathering struct {
	qkv   ongpu.QKV
	lists []*decoder.AllGather
	reads [][]*ongpu.Tensor // of each member: its parts
	free  ongpu.Freeing     // what members' own queues hand out
}

// ready is what a member has, or will have: its parts' wholes are new.
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
			o := &decoder.AllGather{Rows: d.Shape[0], X: make([]ongpu.Mem, n), Y: make([]ongpu.Mem, n)}
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

// queue has members gather, behind ready.
func (g *gathering) queue(sub *queue.Submission, x Exchanging) error {
	if len(g.lists) == 0 {
		return nil
	}
	return sub.Apart(nothing, func(i int, sub *queue.Submission) error {
		if err := sub.Do(func(s *cuda.Stream) error { return x.AllGathers(s, g.lists, i) }); err != nil {
			return err
		}
		return ongpu.HaveRead(sub, g.reads[i]...)
	})
}
