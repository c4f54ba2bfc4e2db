package kvstore

import (
	"errors"
	"fmt"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/queue"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// DevicePages are pages in the memory of a GPU, or of several: each member has some KV heads of
// the pages in one place.
type DevicePages struct {
	GPU    *ongpu.GPU
	dealt  int // places that pages are dealt out to
	config *Config
	Parts  []*devicePart // of each member
}

// devicePart is what a member has.
type devicePart struct {
	share
	GPU    *ongpu.GPU
	pages  int                         // in its place
	Layers []attn.Memory[*cuda.Buffer] // of each layer its slabs
}

// share is what a member has of all keys and values.
type share struct {
	heads ongpu.Heads // of the cache's KV heads
	place attn.Place  // of its pages
}

// shares deals keys and values out to the members: KV heads to so many groups of members, in order, and pages to the
// members of a group.
func (c *Config) shares(op string) (all []share, places int, err error) {
	n := len(c.Device.Members)
	groups, err := c.headGroups(op, n)
	if err != nil || n == 0 {
		return nil, 1, err
	}
	places = n / groups
	if places > 1 && c.Pages < places {
		return nil, 0, errs.Errorf(op, errs.ErrUnsupported, "%d pages on %v, sharded by context: each of %d GPUs must have one", c.Pages, c.Device, places)
	}
	for i := range n {
		all = append(all, share{ongpu.HeadsOf(c.KVHeads, groups, i/places), attn.Place{Index: i % places, Of: places}})
	}
	return all, places, nil
}

// headGroups is how many groups of n GPUs have heads of their own.
func (c *Config) headGroups(op string, n int) (int, error) {
	switch {
	case n < 2:
		return 1, nil
	case c.Shard == shardContext && c.Window > 0:
		return 0, errs.Errorf(op, errs.ErrUnsupported, "ShardContext, and a Window of %d keys", c.Window)
	case c.Shard == shardContext:
		return 1, nil
	case c.Shard == shardAuto && c.Window == 0:
		a, b := c.KVHeads, n
		for b > 0 {
			a, b = b, a%b
		}
		return a, nil
	case c.KVHeads < n && c.Window > 0:
		return 0, errs.Errorf(op, errs.ErrUnsupported, "%d KV heads and a Window of %d keys on %v: it is sharded by heads, and each of the %d GPUs must have one", c.KVHeads, c.Window, c.Device, n)
	case c.KVHeads < n:
		return 0, errs.Errorf(op, errs.ErrUnsupported, "ShardHeads, and %d KV heads on %v: each of the %d GPUs must have one", c.KVHeads, c.Device, n)
	}
	return n, nil
}

// NewDevice takes the memory of pages for attention of g, whose query heads are the least that there can be.
func NewDevice(op string, c *Config, g attn.Problem) (*DevicePages, error) {
	shares, places, err := c.shares(op)
	if err != nil {
		return nil, err
	}
	d := &DevicePages{GPU: c.Device, dealt: places, config: c}
	for i, m := range d.GPU.Members {
		d.Parts = append(d.Parts, &devicePart{share: shares[i], GPU: m, pages: shares[i].place.Count(c.Pages)})
	}
	if err := d.Supports(op, &g); err != nil {
		return nil, err
	}
	if err := d.GPU.Enter(op); err != nil {
		return nil, err
	}
	defer d.GPU.Group.Leave()
	for i, m := range d.GPU.Members {
		part := d.Parts[i]
		if err := part.take(c); err != nil {
			err = errors.Join(err, d.Close())
			if free, e := m.Dev.Memory(); e == nil && errors.Is(err, cuda.ErrOutOfMemory) {
				asked := int64(0)
				for s := range c.Format.Slabs {
					asked += int64(c.Layers) * part.bytes(c, s)
				}
				return nil, fmt.Errorf("leanattention: %s: %d bytes asked for on %v, %d of %d free: %w", op, asked, m.Alone(), free.Free, free.Total, err)
			}
			return nil, ongpu.Error(op, err)
		}
	}
	return d, nil
}

// bytes is the memory that the member has of a slab.
func (p *devicePart) bytes(c *Config, s attn.Slab) int64 {
	return int64(p.pages) * int64(s.PageBytes(p.heads.N, c.PageSize))
}

// take takes the memory.
func (p *devicePart) take(c *Config) error {
	return p.GPU.Queue.Submit(func(sub *queue.Submission) (err error) {
		p.Layers = make([]attn.Memory[*cuda.Buffer], c.Layers)
		for i := range p.Layers {
			for s := range c.Format.Slabs {
				if *p.Layers[i].At(s), err = sub.NewBuffer(p.bytes(c, s)); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func (d *DevicePages) Where() string { return d.GPU.String() }
func (d *DevicePages) Places() int   { return d.dealt }

// byContext is what a cache can do whose pages are dealt out: what makes no difference to where a key lies among those before
// the new tokens.
var byContext = attn.Can{
	Name:     "a cache sharded by context",
	Features: attn.InParts,
	KV:       []attn.DType{attn.Float32, attn.Float16, attn.BFloat16},
}

func (d *DevicePages) Supports(op string, g *attn.Problem) error {
	if d.dealt > 1 {
		if err := byContext.Do(op, g); err != nil {
			return errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", d.GPU, err)
		}
		fresh := g.OfNew(1)
		if err := d.GPU.Supports(op, &fresh); err != nil {
			return err
		}
	}
	for i, p := range d.Parts {
		part := p.problem(g)
		if err := d.GPU.Members[i].Supports(op, &part); err != nil {
			return err
		}
	}
	return nil
}

// problem is attention to what a member has, by its heads.
func (p *devicePart) problem(g *attn.Problem) attn.Problem {
	of := p.heads.Part(*g)
	if p.place.Of > 1 {
		of = of.OfPart(g.Heads, p.place.Index == 0)
	}
	return of
}

// Operands takes values that are all on the cache's GPU, or all in host memory:
// those are copied there and back.
func (d *DevicePages) Operands(op string, in []G.Value) (o [4]operand.Operand, err error) {
	names := LayerNames[:]
	at, err := ongpu.SamePlace(op, names, in)
	if err != nil {
		return o, err
	}
	if at != nil && at != d.GPU {
		return o, errs.Errorf(op, errs.ErrUnsupported, "q is on %v and the cache on %s", at, ongpu.OtherName(d.GPU, at))
	}
	for i, v := range in {
		if at != nil {
			o[i] = operand.New(names[i], v.Shape(), v.Dtype())
			continue
		}
		t, err := ongpu.Dense(op, names[i], v)
		if err != nil {
			return o, err
		}
		o[i] = operand.OfTensor(names[i], t)
	}
	return o, nil
}

// CopyPages has each member copy within its own memory, and the first one between two of them.
func (d *DevicePages) CopyPages(op string, copies []Copy) error {
	if len(copies) == 0 {
		return nil
	}
	between := func(c Copy) bool { return int(c.To)%d.dealt != int(c.From)%d.dealt }
	err := d.eachPart(op, func(p *devicePart, s *cuda.Stream) error {
		for _, c := range copies {
			if !between(c) && p.place.Has(c.To) {
				if err := d.copyPage(s, p, p, c); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil || !slices.ContainsFunc(copies, between) {
		return err
	}
	return d.onFirst(op, func(s *cuda.Stream) error {
		for _, c := range copies {
			for _, to := range d.Parts {
				if between(c) && to.place.Has(c.To) {
					if err := d.copyPage(s, to, d.partOf(c.From, to.heads.First), c); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// copyPage queues the copy of a page with the heads that both parts have.
func (d *DevicePages) copyPage(s *cuda.Stream, to, from *devicePart, c Copy) error {
	return d.eachBuffer(to, from, func(slab attn.Slab, dst, src *cuda.Buffer) error {
		n := int64(slab.PageBytes(to.heads.N, d.config.PageSize))
		return s.Copy(dst, int64(to.place.Own(c.To))*n, src, int64(from.place.Own(c.From))*n, n)
	})
}

// eachBuffer visits the buffers of two parts.
func (d *DevicePages) eachBuffer(to, from *devicePart, visit func(s attn.Slab, to, from *cuda.Buffer) error) error {
	for layer := range to.Layers {
		for s := range d.config.Format.Slabs {
			if err := visit(s, *to.Layers[layer].At(s), *from.Layers[layer].At(s)); err != nil {
				return err
			}
		}
	}
	return nil
}

// MoveSlots queues small copies, of which several are one launch. They are in order: where pages are dealt out, the first
// member makes all of them.
func (d *DevicePages) MoveSlots(op string, moves []Move) error {
	if d.dealt == 1 {
		return d.eachPart(op, func(p *devicePart, s *cuda.Stream) error {
			for _, m := range moves {
				if err := d.moveSlot(s, p, p, m); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return d.onFirst(op, func(s *cuda.Stream) error {
		for _, m := range moves {
			for _, to := range d.Parts {
				if to.place.Has(m.To.Page) {
					if err := d.moveSlot(s, to, d.partOf(m.From.Page, to.heads.First), m); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// moveSlot queues the move of a token, for the heads that both parts have.
func (d *DevicePages) moveSlot(s *cuda.Stream, to, from *devicePart, m Move) error {
	m.To.Page, m.From.Page = to.place.Own(m.To.Page), from.place.Own(m.From.Page)
	return d.eachBuffer(to, from, func(slab attn.Slab, dst, src *cuda.Buffer) error {
		for head := range to.heads.N {
			to, from, n := m.bytes(slab, head, to.heads.N, d.config.PageSize)
			if err := s.Copy(dst, int64(to), src, int64(from), int64(n)); err != nil {
				return err
			}
		}
		return nil
	})
}

// eachPart queues work of each member.
func (d *DevicePages) eachPart(op string, work func(*devicePart, *cuda.Stream) error) error {
	return d.submit(op, func(sub *queue.Submission) error {
		return sub.Each(func(i int, sub *queue.Submission) error {
			return sub.Do(func(s *cuda.Stream) error { return work(d.Parts[i], s) })
		})
	})
}

// onFirst queues work of the first member, which reaches the memory of all.
func (d *DevicePages) onFirst(op string, work func(*cuda.Stream) error) error {
	return d.submit(op, func(sub *queue.Submission) error { return sub.Do(work) })
}

func (d *DevicePages) submit(op string, f func(*queue.Submission) error) error {
	if err := d.GPU.Enter(op); err != nil {
		return err
	}
	defer d.GPU.Group.Leave()
	if d.GPU.Group.Recording() { // replays would copy, too
		return ongpu.WithinRecord(op, d.GPU)
	}
	if err := d.GPU.Queue.Submit(f); err != nil {
		return ongpu.Error(op, err)
	}
	return nil
}

func (d *DevicePages) Transfer(op string, t *Transfer, in bool) error {
	if err := d.GPU.Enter(op); err != nil {
		return err
	}
	defer d.GPU.Group.Leave()
	if err := d.transferNow(t, in); err != nil {
		return ongpu.Error(op, err)
	}
	return nil
}

// transferNow is transfer with the GPU entered: by way of pinned memory, which is as the
// caller's. Small copies to the GPU may be put off until somebody waits for them, which so
// tells what went wrong with them.
func (d *DevicePages) transferNow(t *Transfer, in bool) error {
	q := d.GPU.Queue
	p, err := q.TakePinned(len(t.Memory))
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	if in {
		copy(p.Bytes, t.Memory)
	}
	err = q.Submit(func(sub *queue.Submission) error {
		err := d.eachSpan(t, func(b *cuda.Buffer, at, from, n int) error {
			if in {
				return sub.Upload(b, int64(at), p, from, n)
			}
			return sub.Download(p, from, b, int64(at), n)
		})
		if err != nil {
			return err
		}
		return sub.Mark(p)
	})
	if err == nil {
		err = q.Wait(p)
	}
	if err == nil && !in {
		copy(t.Memory, p.Bytes)
	}
	return err
}

// eachSpan visits where a transfer's spans are: n bytes of a member's memory, and where they
// are in the caller's. What is together there may be of several members here.
func (d *DevicePages) eachSpan(t *Transfer, visit func(b *cuda.Buffer, at, from, n int) error) error {
	of := func(p *devicePart) *cuda.Buffer { return *p.Layers[t.Layer].At(t.Slab) }
	from := 0
	if len(d.Parts) == 1 {
		for _, s := range t.Spans {
			if err := visit(of(d.Parts[0]), s.At, from, s.N); err != nil {
				return err
			}
			from += s.N
		}
		return nil
	}
	slab := t.Slab.PageBytes(1, d.config.PageSize) // bytes of a head in a page
	for _, s := range t.Spans {
		for end := s.At + s.N; s.At < end; {
			page, head, in := s.At/slab/d.config.KVHeads, s.At/slab%d.config.KVHeads, s.At%slab
			p := d.partOf(int32(page), head)
			there := min(end, (page*d.config.KVHeads+p.heads.First+p.heads.N)*slab) - s.At // up to the last head of the member
			own := int(p.place.Own(int32(page)))
			if err := visit(of(p), (own*p.heads.N+head-p.heads.First)*slab+in, from, there); err != nil {
				return err
			}
			s.At, from = s.At+there, from+there
		}
	}
	return nil
}

// partOf is that of the member that has a KV head of a page.
func (d *DevicePages) partOf(page int32, head int) *devicePart {
	i := slices.IndexFunc(d.Parts, func(p *devicePart) bool { return p.place.Has(page) && head < p.heads.First+p.heads.N })
	return d.Parts[i]
}

// Close gives the memory back; the GPU may be closed already, and then it is
// given back. The driver waits for queued work.
func (d *DevicePages) Close() (first error) {
	for _, p := range d.Parts {
		for i := range p.Layers {
			for s := range d.config.Format.Slabs {
				b := *p.Layers[i].At(s)
				if b == nil { // taking the memory failed
					continue
				}
				if err := b.Close(); err != nil && first == nil && !errors.Is(err, cuda.ErrClosed) {
					first = err
				}
			}
		}
	}
	d.Parts = nil
	return first
}

func (p *DevicePlan) Attend(op string, c *Call) (out, lse G.Value, err error) {
	if err := p.pages.GPU.Enter(op); err != nil {
		return nil, nil, err
	}
	defer p.pages.GPU.Group.Leave()
	if _, ok := ongpu.Of(c.QKV[0]); ok {
		qkv := ongpu.QKVOf(c.QKV)
		x, failed := p.exchange(op, c, &qkv)
		if failed != nil {
			return nil, nil, failed
		}
		out, lse, err = p.attendThere(c, &qkv, x)
	} else {
		out, lse, err = p.attendFromHost(c)
	}
	if err != nil {
		return nil, nil, ongpu.EngineError(op, c.Node.String(), err)
	}
	return out, lse, nil
}

// newRows are a layer's new keys and values, and memory for its queries where a rotary embedding turns them.
type newRows struct{ k, v, turned ongpu.Mem }

// appendTo queues the storing of new rows in o's keys and values, of which each has so many KV heads (0: the plan's), and
// the turning of o's queries.
func (n newRows) appendTo(plan ongpu.AttentionPlan, s *cuda.Stream, o *ongpu.AttentionOperands, heads int) error {
	if n.turned.Buffer == nil {
		return plan.AppendRows(s, o.Pages, n.k, n.v, heads)
	}
	if err := plan.AppendTurned(s, o.Pages, n.k, n.v, o.Q, n.turned, heads); err != nil {
		return err
	}
	o.Q = n.turned
	return nil
}

// turns says whether there is a rotary embedding.
func (p *DevicePlan) turns() bool { return p.geometry.Rotary != attn.Rotary{} }

// queueAlone is queue of a member that has all that it needs.
func (p *planPart) queueAlone(sub *queue.Submission, n newRows, o *ongpu.AttentionOperands) error {
	// In a recording it may be a part of the megakernel that makes q, k and v, or the launch
	// that makes them may store k and v.
	of := p.plan
	stored := false
	if plan, ok := of.(*attention.Plan); ok {
		switch late := sub.Deferred().(type) {
		case *decoder.Megakernel:
			if late.Attend(plan, o, n.k, n.v, n.turned) {
				return nil
			}
		case *decoder.Projection:
			stored = late.Append(plan, o.Pages, n.k, n.v)
		}
	}
	return sub.Do(func(s *cuda.Stream) error {
		if !stored {
			if err := n.appendTo(of, s, o, 0); err != nil {
				return err
			}
		}
		return of.Run(s, o)
	})
}

// attendThere is attend on tensors of the GPU: it waits for nothing. x is nil, or what members merge through.
func (p *DevicePlan) attendThere(c *Call, qkv *ongpu.QKV, x Exchanging) (out, lse G.Value, err error) {
	defer runtime.KeepAlive(c)
	switch {
	case x != nil:
		return p.attendMerging(c, qkv, x)
	case p.isApart(c, qkv):
		return p.attendApart(c, qkv)
	}
	var o, l *ongpu.Tensor
	err = p.pages.GPU.Queue.Submit(func(sub *queue.Submission) error {
		var frees ongpu.Freeing
		defer frees.All()
		for i, d := range qkv {
			var err error
			if qkv[i], err = p.pages.GPU.Gathered(sub, "CachedAttention", c.Memory, i, d, &frees); err != nil {
				return ongpu.InOperand(LayerNames[i], err)
			}
		}
		q, k, v, err := qkv.Use(sub)
		if err != nil {
			return err
		}
		operands := ongpu.AttentionOperands{Q: q}
		reads := qkv[:]
		if c.Sinks != nil {
			sinks := ongpu.Must(c.Sinks)
			if operands.Sinks, err = sinks.UseAs(sub, "sinks"); err != nil {
				return err
			}
			reads = append(reads, sinks)
		}
		if o, operands.Out, err = qkv.ResultIn(sub, c.Out, c.Memory, c.Rows.Query, c.Rows.outShape(p.geometry.ValueDim)); err != nil {
			return err
		}
		if c.LSE {
			if l, operands.LSE, err = qkv.LogSumExp(sub, c.Memory, c.Rows.LSEType(), c.Rows.LSEShape()); err != nil {
				return err
			}
		}
		rows := newRows{k: k, v: v}
		if p.turns() {
			lead := p.pages.GPU
			turned, free, err := lead.Scratch(sub, c.Memory, &c.Memory.On(lead.Group, 0).Turned, c.Rows.Query, qkv[0].Shape)
			if err != nil {
				return err
			}
			defer free()
			if rows.turned, err = turned.UseAs(sub, "q"); err != nil {
				return err
			}
		}
		if err := p.queue(sub, c.Layer, rows, &operands); err != nil {
			return err
		}
		c.Node.Record(sub, p.now)
		return ongpu.HaveRead(sub, reads...)
	})
	if err != nil {
		return nil, nil, err
	}
	if l == nil {
		return o.Value(), nil, nil
	}
	return o.Value(), l.Value(), nil
}

// isApart says whether each member has the queries, keys and values of its heads.
func (p *DevicePlan) isApart(c *Call, qkv *ongpu.QKV) bool {
	g := p.pages.GPU
	if n := len(g.Members); n == 1 || p.now.context != nil || p.geometry.KVHeads%n != 0 || c.Out != nil {
		return false
	}
	for _, d := range qkv {
		if d.Shards == nil || d.Joined || d.Axis != 1 {
			return false
		}
	}
	return c.Sinks == nil || ongpu.Must(c.Sinks).Replicas != nil
}

// apartLayer is what a member does of a layer with what it has.
type apartLayer struct {
	rows     newRows
	o        ongpu.AttentionOperands
	reads    []*ongpu.Tensor
	free     ongpu.Freeing
	out, lse *ongpu.Tensor
}

// readyApart takes what a member needs for results of these shapes, by its queries, keys and values, and its sinks from one on.
func (p *DevicePlan) readyApart(sub *queue.Submission, c *Call, member int, qkv ongpu.QKV, sink int, outShape, lseShape tensor.Shape) (w apartLayer, err error) {
	m, memory := p.pages.GPU.Members[member], c.Memory.On(p.pages.GPU.Group, member)
	q, k, v, err := qkv.Use(sub)
	if err != nil {
		return w, err
	}
	w = apartLayer{rows: newRows{k: k, v: v}, o: ongpu.AttentionOperands{Q: q}, reads: qkv[:]}
	w.o.Pages = p.layerPages(member, c.Layer)
	if c.Sinks != nil {
		sinks := ongpu.Must(c.Sinks).On(member)
		all, err := sinks.UseAs(sub, "sinks")
		if err != nil {
			return w, err
		}
		w.o.Sinks, w.reads = ongpu.From(all, sink), append(w.reads, sinks)
	}
	if w.out, w.o.Out, err = ongpu.InUse(sub)(m.NodeValue(sub, c.Memory, c.Rows.Query, outShape, qkv[:]...)); err != nil {
		return w, err
	}
	if c.LSE {
		if w.lse, w.o.LSE, err = ongpu.InUse(sub)(m.NextValue(sub, &memory.Rest, c.Rows.LSEType(), lseShape, qkv[:]...)); err != nil {
			return w, err
		}
	}
	if !p.turns() {
		return w, nil
	}
	turned, free, err := m.Scratch(sub, c.Memory, &memory.Turned, c.Rows.Query, qkv[0].Shape)
	if err != nil {
		return w, err
	}
	w.free = append(w.free, free)
	w.rows.turned, err = turned.UseAs(sub, "q")
	return w, err
}

// attendApart is attend where each member has the queries, keys and values of its heads, and makes their outputs.
func (p *DevicePlan) attendApart(c *Call, qkv *ongpu.QKV) (out, lse G.Value, err error) {
	lead := p.pages.GPU
	p.lay(true)
	n := len(lead.Members)
	share := func(shape tensor.Shape) tensor.Shape { return tensor.Shape{shape[0], shape[1] / n} }
	outShape, lseShape := c.Rows.outShape(p.geometry.ValueDim), c.Rows.LSEShape()
	works := make([]apartLayer, n)
	ready := func(i int, sub *queue.Submission) (err error) {
		mine := ongpu.QKV{qkv[0].Shards[i], qkv[1].Shards[i], qkv[2].Shards[i]}
		works[i], err = p.readyApart(sub, c, i, mine, p.pages.Parts[i].heads.First*p.geometry.Group(), share(outShape), share(lseShape))
		return err
	}
	err = lead.Queue.Submit(func(sub *queue.Submission) error {
		if err := sub.Apart(ready, func(i int, sub *queue.Submission) error {
			w := &works[i]
			defer w.free.All()
			if err := p.now.parts[i].queueAlone(sub, w.rows, &w.o); err != nil {
				return err
			}
			return ongpu.HaveRead(sub, w.reads...)
		}); err != nil {
			return err
		}
		c.Node.Record(sub, p.now)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	byMember := func(t tensor.Dtype, shape tensor.Shape, made func(*apartLayer) *ongpu.Tensor) G.Value {
		d := lead.TensorOf(ongpu.Content{Shape: shape, DType: t, Axis: 1, Made: true})
		for i := range works {
			d.Shards = append(d.Shards, made(&works[i]))
		}
		return d.Value()
	}
	out = byMember(c.Rows.Query, outShape, func(w *apartLayer) *ongpu.Tensor { return w.out })
	if c.LSE {
		lse = byMember(c.Rows.LSEType(), lseShape, func(w *apartLayer) *ongpu.Tensor { return w.lse })
	}
	return out, lse, nil
}

// lay says whether the rows of each member's queries and results are those of its heads alone, from now on.
func (p *DevicePlan) lay(apart bool) {
	if p.apart == apart {
		return
	}
	p.apart = apart
	for _, s := range p.schedules {
		for i := range s.parts {
			part := &s.parts[i]
			g := &part.geometry
			g.Query, g.Out, g.LSE = p.geometry.Query, p.geometry.Out, p.geometry.LSE
			if apart {
				g.Query, g.Out, g.LSE = attn.PackedRows(g.Heads, g.Dim), attn.PackedRows(g.Heads, g.ValueDim), attn.PackedRows(g.Heads, 1)
			}
			if part.plan != nil {
				part.plan.Lay(g.Query, g.Out, g.LSE)
			}
		}
	}
}

// attendFromHost is attend on tensors of the host: one copy there, one back, and
// one wait.
func (p *DevicePlan) attendFromHost(c *Call) (out, lse G.Value, err error) {
	q := p.pages.GPU.Queue
	var s stage
	var in [len(LayerNames)]part
	for i, v := range c.QKV {
		in[i] = s.add(operand.RowMajorBytes(v.(*tensor.Dense)), c.Rows.Query)
	}
	if c.Sinks != nil {
		in[3] = s.add(operand.RowMajorBytes(c.Sinks.(*tensor.Dense)), tensor.Float32)
	}
	up := s.bytes
	o := dense.New(c.Rows.Query, c.Rows.outShape(p.geometry.ValueDim)...)
	var results [2]part // the output and the log-sum-exp
	results[0] = s.add(operand.RowMajorBytes(o), c.Rows.Query)
	if c.LSE {
		l := dense.New(tensor.Float32, c.Rows.LSEShape()...)
		results[1], lse = s.add(operand.RowMajorBytes(l), tensor.Float32), l
	}
	down := s.bytes - up
	var turned part
	if p.turns() {
		turned = s.add(in[0].host, c.Rows.Query) // of that length; it stays there
	}
	defer runtime.KeepAlive(c)

	pinned, err := q.TakePinned(max(up, down))
	if err != nil {
		return nil, nil, err
	}
	defer q.GivePinned(pinned)
	for _, x := range in {
		copy(pinned.Bytes[x.at:], x.host)
	}
	err = q.Submit(func(sub *queue.Submission) error {
		m, err := sub.Alloc(int64(s.bytes))
		if err != nil {
			return err
		}
		defer sub.Free(m) // whoever takes it next queues behind this
		b, err := sub.Use(m, sub.Generation(m))
		if err != nil {
			return err
		}
		if err := sub.Upload(b, 0, pinned, 0, up); err != nil {
			return err
		}
		operands := &ongpu.AttentionOperands{Q: in[0].in(b), Out: results[0].in(b)}
		if c.Sinks != nil {
			operands.Sinks = in[3].in(b)
		}
		if c.LSE {
			operands.LSE = results[1].in(b)
		}
		rows := newRows{k: in[1].in(b), v: in[2].in(b)}
		if p.turns() {
			rows.turned = turned.in(b)
		}
		if err := p.queue(sub, c.Layer, rows, operands); err != nil {
			return err
		}
		if err := sub.Download(pinned, 0, b, int64(up), down); err != nil {
			return err
		}
		return sub.Mark(pinned)
	})
	if err != nil {
		return nil, nil, err
	}
	if err := q.Wait(pinned); err != nil {
		return nil, nil, err
	}
	for _, x := range results {
		copy(x.host, pinned.Bytes[max(x.at-up, 0):])
	}
	return o, lse, nil
}

// stage lays operands out one behind the other, as they are on the GPU.
type stage struct{ bytes int }

// Part is one of them.
type part struct {
	host []byte
	at   int
	t    attn.DType
}

// add places an operand at an address that kernels and copies like.
func (s *stage) add(host []byte, t tensor.Dtype) part {
	const align = 256
	p := part{host: host, at: s.bytes}
	p.t, _ = operand.StorageType(t)
	s.bytes += (len(host) + align - 1) / align * align
	return p
}

func (p *part) in(b *cuda.Buffer) ongpu.Mem {
	return ongpu.Mem{Buffer: b, Offset: int64(p.at), DType: p.t, Len: len(p.host) / p.t.Size()}
}
