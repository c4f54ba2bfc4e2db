package leanattention

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

// devicePages are pages in the memory of a GPU, or of several: each member has some KV heads of
// the pages in one place.
type devicePages struct {
	gpu     *ongpu.GPU
	dealt   int // places that pages are dealt out to
	storage attn.DType
	config  *CacheConfig
	parts   []*devicePart // of each member
}

// devicePart is what a member has.
type devicePart struct {
	share
	gpu          *ongpu.GPU
	pages        int            // in its place
	keys, values []*cuda.Buffer // one for each layer
}

// share is what a member has of all keys and values.
type share struct {
	heads headRange  // of the cache's KV heads
	place attn.Place // of its pages
}

// headRange is some heads: the first, and how many.
type headRange struct{ first, n int }

// headsOf is the heads that one of some members has.
func headsOf(heads, members, i int) (r headRange) {
	r.first, r.n = ongpu.Share(heads, members, i)
	return r
}

// shares deals keys and values out to the members: KV heads to so many groups of members, in order, and pages to the
// members of a group.
func (c *CacheConfig) shares(op string) (all []share, places int, err error) {
	n := len(c.Device.Internal().Members)
	groups, err := c.headGroups(op, n)
	if err != nil || n == 0 {
		return nil, 1, err
	}
	places = n / groups
	if places > 1 && c.Pages < places {
		return nil, 0, errs.Errorf(op, ErrUnsupported, "%d pages on %v, sharded by context: each of %d GPUs must have one", c.Pages, c.Device, places)
	}
	for i := range n {
		all = append(all, share{headsOf(c.KVHeads, groups, i/places), attn.Place{Index: i % places, Of: places}})
	}
	return all, places, nil
}

// headGroups is how many groups of n GPUs have heads of their own.
func (c *CacheConfig) headGroups(op string, n int) (int, error) {
	switch {
	case n < 2:
		return 1, nil
	case c.Shard == ShardContext && c.Window > 0:
		return 0, errs.Errorf(op, ErrUnsupported, "ShardContext, and a Window of %d keys", c.Window)
	case c.Shard == ShardContext:
		return 1, nil
	case c.Shard == ShardAuto && c.Window == 0:
		a, b := c.KVHeads, n
		for b > 0 {
			a, b = b, a%b
		}
		return a, nil
	case c.KVHeads < n && c.Window > 0:
		return 0, errs.Errorf(op, ErrUnsupported, "%d KV heads and a Window of %d keys on %v: it is sharded by heads, and each of the %d GPUs must have one", c.KVHeads, c.Window, c.Device, n)
	case c.KVHeads < n:
		return 0, errs.Errorf(op, ErrUnsupported, "ShardHeads, and %d KV heads on %v: each of the %d GPUs must have one", c.KVHeads, c.Device, n)
	}
	return n, nil
}

// part is the heads in a range alone, as a member has them: its queries and outputs are
// parts of longer rows still.
func (r headRange) part(g attn.Problem) attn.Problem {
	perHead := g.Heads / g.KVHeads
	g.Key, g.Value = r.pages(g.Key, g.KVHeads), r.pages(g.Value, g.KVHeads)
	g.Heads, g.KVHeads = r.n*perHead, r.n
	if g.Slopes != "" {
		g.Slopes = g.Slopes.Part(r.first*perHead, g.Heads)
	}
	return g
}

// pages are the strides of pages that have the heads in a range instead of so many.
func (r headRange) pages(s attn.PageStrides, heads int) attn.PageStrides {
	s.Page = s.Page / heads * r.n
	return s
}

func newDevicePages(op string, c *CacheConfig, storage attn.DType, keyElements, valueElements int) (*devicePages, error) {
	shares, places, err := c.shares(op)
	if err != nil {
		return nil, err
	}
	d := &devicePages{gpu: c.Device.Internal(), dealt: places, storage: storage, config: c}
	for i, m := range d.gpu.Members {
		d.parts = append(d.parts, &devicePart{share: shares[i], gpu: m, pages: shares[i].place.Count(c.Pages)})
	}
	// The query heads are not known yet; the least there can be.
	g := (&tokenRows{heads: c.KVHeads}).geometry(c, &config{mask: attn.Mask{Window: c.Window, SinkTokens: c.SinkTokens}})
	if err := d.supports(op, &g); err != nil {
		return nil, err
	}
	if err := d.gpu.Enter(op); err != nil {
		return nil, err
	}
	defer d.gpu.Group.Leave()
	for i, m := range d.gpu.Members {
		part := d.parts[i]
		share := func(elements int) int64 {
			return int64(elements/c.Pages/c.KVHeads*part.heads.n*part.pages) * int64(storage.Size())
		}
		err := part.take(c.Layers, share(keyElements), share(valueElements))
		if err == nil {
			continue
		}
		err = errors.Join(err, d.close())
		if free, e := m.Dev.Memory(); e == nil && errors.Is(err, cuda.ErrOutOfMemory) {
			asked := int64(c.Layers) * (share(keyElements) + share(valueElements))
			return nil, fmt.Errorf("leanattention: %s: %d bytes asked for on %v, %d of %d free: %w", op, asked, m.Alone(), free.Free, free.Total, err)
		}
		return nil, ongpu.Error(op, err)
	}
	return d, nil
}

// take takes the memory, so many bytes for each layer.
func (p *devicePart) take(layers int, keys, values int64) error {
	return p.gpu.Queue.Submit(func(sub *queue.Submission) error {
		for range layers {
			for _, x := range [...]struct {
				list  *[]*cuda.Buffer
				bytes int64
			}{{&p.keys, keys}, {&p.values, values}} {
				b, err := sub.NewBuffer(x.bytes)
				if err != nil {
					return err
				}
				*x.list = append(*x.list, b)
			}
		}
		return nil
	})
}

func (d *devicePages) where() string { return d.gpu.String() }
func (d *devicePages) places() int   { return d.dealt }

// byContext is what a cache can do whose pages are dealt out: what makes no difference to where a key lies among those before
// the new tokens.
var byContext = attn.Can{
	Name:     "a cache sharded by context",
	Features: attn.InParts,
	KV:       []attn.DType{attn.Float32, attn.Float16, attn.BFloat16},
}

func (d *devicePages) supports(op string, g *attn.Problem) error {
	if d.dealt > 1 {
		if err := byContext.Do(op, g); err != nil {
			return errs.Errorf(op, ErrUnsupported, "on %v: %v", d.gpu, err)
		}
		fresh := g.OfNew(1)
		if err := d.gpu.Supports(op, &fresh); err != nil {
			return err
		}
	}
	for i, p := range d.parts {
		part := p.problem(g)
		if err := d.gpu.Members[i].Supports(op, &part); err != nil {
			return err
		}
	}
	return nil
}

// problem is attention to what a member has, by its heads.
func (p *devicePart) problem(g *attn.Problem) attn.Problem {
	of := p.heads.part(*g)
	if p.place.Of > 1 {
		of = of.OfPart(g.Heads, p.place.Index == 0)
	}
	return of
}

// operands takes values that are all on the cache's GPU, or all in host memory:
// those are copied there and back.
func (d *devicePages) operands(op string, in []G.Value) (o [4]operand.Operand, err error) {
	names := layerNames[:]
	at, err := ongpu.SamePlace(op, names, in)
	if err != nil {
		return o, err
	}
	if at != nil && at != d.gpu {
		return o, errs.Errorf(op, ErrUnsupported, "q is on %v and the cache on %s", at, ongpu.OtherName(d.gpu, at))
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

// copyPages has each member copy within its own memory, and the first one between two of them.
func (d *devicePages) copyPages(op string, copies []pageCopy) error {
	if len(copies) == 0 {
		return nil
	}
	between := func(c pageCopy) bool { return int(c.to)%d.dealt != int(c.from)%d.dealt }
	err := d.eachPart(op, func(p *devicePart, s *cuda.Stream) error {
		for _, c := range copies {
			if !between(c) && p.place.Has(c.to) {
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
			for _, to := range d.parts {
				if between(c) && to.place.Has(c.to) {
					if err := d.copyPage(s, to, d.partOf(c.from, to.heads.first), c); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// copyPage queues the copy of a page with the heads that both parts have.
func (d *devicePages) copyPage(s *cuda.Stream, to, from *devicePart, c pageCopy) error {
	return d.eachBuffer(to, from, func(dst, src *cuda.Buffer) error {
		n := dst.Len() / int64(to.pages)
		return s.Copy(dst, int64(to.place.Own(c.to))*n, src, int64(from.place.Own(c.from))*n, n)
	})
}

// eachBuffer visits the buffers of two parts.
func (d *devicePages) eachBuffer(to, from *devicePart, visit func(to, from *cuda.Buffer) error) error {
	for layer := range to.keys {
		if err := visit(to.keys[layer], from.keys[layer]); err != nil {
			return err
		}
		if err := visit(to.values[layer], from.values[layer]); err != nil {
			return err
		}
	}
	return nil
}

// moveSlots queues small copies, of which several are one launch. They are in order: where pages are dealt out, the first
// member makes all of them.
func (d *devicePages) moveSlots(op string, moves []slotMove) error {
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
			for _, to := range d.parts {
				if to.place.Has(m.to.page) {
					if err := d.moveSlot(s, to, d.partOf(m.from.page, to.heads.first), m); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// moveSlot queues the move of a token, for the heads that both parts have.
func (d *devicePages) moveSlot(s *cuda.Stream, to, from *devicePart, m slotMove) error {
	m.to.page, m.from.page = to.place.Own(m.to.page), from.place.Own(m.from.page)
	return d.eachBuffer(to, from, func(dst, src *cuda.Buffer) error {
		for head := range to.heads.n {
			to, from, n := m.bytes(head, to.heads.n, d.config.PageSize, int(dst.Len())/to.pages)
			if err := s.Copy(dst, int64(to), src, int64(from), int64(n)); err != nil {
				return err
			}
		}
		return nil
	})
}

// eachPart queues work of each member.
func (d *devicePages) eachPart(op string, work func(*devicePart, *cuda.Stream) error) error {
	return d.submit(op, func(sub *queue.Submission) error {
		return sub.Each(func(i int, sub *queue.Submission) error {
			return sub.Do(func(s *cuda.Stream) error { return work(d.parts[i], s) })
		})
	})
}

// onFirst queues work of the first member, which reaches the memory of all.
func (d *devicePages) onFirst(op string, work func(*cuda.Stream) error) error {
	return d.submit(op, func(sub *queue.Submission) error { return sub.Do(work) })
}

func (d *devicePages) submit(op string, f func(*queue.Submission) error) error {
	if err := d.gpu.Enter(op); err != nil {
		return err
	}
	defer d.gpu.Group.Leave()
	if d.gpu.Group.Recording() { // replays would copy, too
		return ongpu.WithinRecord(op, d.gpu)
	}
	if err := d.gpu.Queue.Submit(f); err != nil {
		return ongpu.Error(op, err)
	}
	return nil
}

func (d *devicePages) transfer(op string, t *pageTransfer, in bool) error {
	if err := d.gpu.Enter(op); err != nil {
		return err
	}
	defer d.gpu.Group.Leave()
	if err := d.transferNow(t, in); err != nil {
		return ongpu.Error(op, err)
	}
	return nil
}

// transferNow is transfer with the GPU entered: by way of pinned memory, which is as the
// caller's. Small copies to the GPU may be put off until somebody waits for them, which so
// tells what went wrong with them.
func (d *devicePages) transferNow(t *pageTransfer, in bool) error {
	q := d.gpu.Queue
	p, err := q.TakePinned(len(t.memory))
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	if in {
		copy(p.Bytes, t.memory)
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
		copy(t.memory, p.Bytes)
	}
	return err
}

// eachSpan visits where a transfer's spans are: n bytes of a member's memory, and where they
// are in the caller's. What is together there may be of several members here.
func (d *devicePages) eachSpan(t *pageTransfer, visit func(b *cuda.Buffer, at, from, n int) error) error {
	of := func(p *devicePart) *cuda.Buffer {
		if t.values {
			return p.values[t.layer]
		}
		return p.keys[t.layer]
	}
	from := 0
	if len(d.parts) == 1 {
		for _, s := range t.spans {
			if err := visit(of(d.parts[0]), s.at, from, s.n); err != nil {
				return err
			}
			from += s.n
		}
		return nil
	}
	first := d.parts[0]
	slab := int(of(first).Len()) / first.pages / first.heads.n // bytes of a head in a page
	for _, s := range t.spans {
		for end := s.at + s.n; s.at < end; {
			page, head, in := s.at/slab/d.config.KVHeads, s.at/slab%d.config.KVHeads, s.at%slab
			p := d.partOf(int32(page), head)
			there := min(end, (page*d.config.KVHeads+p.heads.first+p.heads.n)*slab) - s.at // up to the last head of the member
			own := int(p.place.Own(int32(page)))
			if err := visit(of(p), (own*p.heads.n+head-p.heads.first)*slab+in, from, there); err != nil {
				return err
			}
			s.at, from = s.at+there, from+there
		}
	}
	return nil
}

// partOf is that of the member that has a KV head of a page.
func (d *devicePages) partOf(page int32, head int) *devicePart {
	i := slices.IndexFunc(d.parts, func(p *devicePart) bool { return p.place.Has(page) && head < p.heads.first+p.heads.n })
	return d.parts[i]
}

// close gives the memory back; the GPU may be closed already, and then it is
// given back. The driver waits for queued work.
func (d *devicePages) close() (first error) {
	for _, p := range d.parts {
		for _, b := range slices.Concat(p.keys, p.values) {
			if err := b.Close(); err != nil && first == nil && !errors.Is(err, cuda.ErrClosed) {
				first = err
			}
		}
	}
	d.parts = nil
	return first
}

func (p *devicePlan) attend(op string, c *layerCall) (out, lse G.Value, err error) {
	if err := p.pages.gpu.Enter(op); err != nil {
		return nil, nil, err
	}
	defer p.pages.gpu.Group.Leave()
	if _, ok := ongpu.Of(c.qkv[0]); ok {
		qkv := operandTensors(c.qkv)
		x, failed := p.exchange(op, c, &qkv)
		if failed != nil {
			return nil, nil, failed
		}
		out, lse, err = p.attendThere(c, &qkv, x)
	} else {
		out, lse, err = p.attendFromHost(c)
	}
	if err != nil {
		return nil, nil, ongpu.EngineError(op, c.node.String(), err)
	}
	return out, lse, nil
}

// newRows are a layer's new keys and values, and memory for its queries where a rotary embedding turns them.
type newRows struct{ k, v, turned ongpu.Mem }

// appendTo queues the storing of new rows in o's keys and values, of which each has so many KV heads (0: the plan's), and
// the turning of o's queries.
func (n newRows) appendTo(plan ongpu.AttentionPlan, s *cuda.Stream, o *ongpu.AttentionOperands, heads int) error {
	if n.turned.Buffer == nil {
		return plan.AppendRows(s, o.K, o.V, n.k, n.v, heads)
	}
	if err := plan.AppendTurned(s, o.K, o.V, n.k, n.v, o.Q, n.turned, heads); err != nil {
		return err
	}
	o.Q = n.turned
	return nil
}

// turns says whether there is a rotary embedding.
func (p *devicePlan) turns() bool { return p.geometry.Rotary != attn.Rotary{} }

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
			stored = late.Append(plan, o.K, o.V, n.k, n.v)
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
func (p *devicePlan) attendThere(c *layerCall, qkv *deviceQKV, x exchanging) (out, lse G.Value, err error) {
	defer runtime.KeepAlive(c)
	switch {
	case x != nil:
		return p.attendMerging(c, qkv, x)
	case p.isApart(c, qkv):
		return p.attendApart(c, qkv)
	}
	var o, l *ongpu.Tensor
	err = p.pages.gpu.Queue.Submit(func(sub *queue.Submission) error {
		var frees ongpu.Freeing
		defer frees.All()
		for i, d := range qkv {
			var err error
			if qkv[i], err = p.pages.gpu.Gathered(sub, "CachedAttention", c.memory, i, d, &frees); err != nil {
				return ongpu.InOperand(layerNames[i], err)
			}
		}
		q, k, v, err := qkv.use(sub)
		if err != nil {
			return err
		}
		operands := ongpu.AttentionOperands{Q: q}
		reads := qkv[:]
		if c.sinks != nil {
			sinks := ongpu.Must(c.sinks)
			if operands.Sinks, err = sinks.UseAs(sub, "sinks"); err != nil {
				return err
			}
			reads = append(reads, sinks)
		}
		if o, operands.Out, err = qkv.resultIn(sub, c.out, c.memory, c.rows.query, c.rows.outShape(p.geometry.ValueDim)); err != nil {
			return err
		}
		if c.lse {
			if l, operands.LSE, err = qkv.logSumExp(sub, c.memory, c.rows.lseType(), c.rows.lseShape()); err != nil {
				return err
			}
		}
		rows := newRows{k: k, v: v}
		if p.turns() {
			lead := p.pages.gpu
			turned, free, err := lead.Scratch(sub, c.memory, &c.memory.On(lead.Group, 0).Turned, c.rows.query, qkv[0].Shape)
			if err != nil {
				return err
			}
			defer free()
			if rows.turned, err = turned.UseAs(sub, "q"); err != nil {
				return err
			}
		}
		if err := p.queue(sub, c.node.layer, rows, &operands); err != nil {
			return err
		}
		p.step.record(sub, c.node, p.now)
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
func (p *devicePlan) isApart(c *layerCall, qkv *deviceQKV) bool {
	g := p.pages.gpu
	if n := len(g.Members); n == 1 || p.now.context != nil || p.geometry.KVHeads%n != 0 || c.out != nil {
		return false
	}
	for _, d := range qkv {
		if d.Shards == nil || d.Joined || d.Axis != 1 {
			return false
		}
	}
	return c.sinks == nil || ongpu.Must(c.sinks).Replicas != nil
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
func (p *devicePlan) readyApart(sub *queue.Submission, c *layerCall, member int, qkv deviceQKV, sink int, outShape, lseShape tensor.Shape) (w apartLayer, err error) {
	m, memory := p.pages.gpu.Members[member], c.memory.On(p.pages.gpu.Group, member)
	q, k, v, err := qkv.use(sub)
	if err != nil {
		return w, err
	}
	w = apartLayer{rows: newRows{k: k, v: v}, o: ongpu.AttentionOperands{Q: q}, reads: qkv[:]}
	w.o.K, w.o.V = p.layerPages(member, c.node.layer)
	if c.sinks != nil {
		sinks := ongpu.Must(c.sinks).On(member)
		all, err := sinks.UseAs(sub, "sinks")
		if err != nil {
			return w, err
		}
		w.o.Sinks, w.reads = ongpu.From(all, sink), append(w.reads, sinks)
	}
	if w.out, w.o.Out, err = inUse(sub)(m.NodeValue(sub, c.memory, c.rows.query, outShape, qkv[:]...)); err != nil {
		return w, err
	}
	if c.lse {
		if w.lse, w.o.LSE, err = inUse(sub)(m.NextValue(sub, &memory.Rest, c.rows.lseType(), lseShape, qkv[:]...)); err != nil {
			return w, err
		}
	}
	if !p.turns() {
		return w, nil
	}
	turned, free, err := m.Scratch(sub, c.memory, &memory.Turned, c.rows.query, qkv[0].Shape)
	if err != nil {
		return w, err
	}
	w.free = append(w.free, free)
	w.rows.turned, err = turned.UseAs(sub, "q")
	return w, err
}

// attendApart is attend where each member has the queries, keys and values of its heads, and makes their outputs.
func (p *devicePlan) attendApart(c *layerCall, qkv *deviceQKV) (out, lse G.Value, err error) {
	lead := p.pages.gpu
	p.lay(true)
	n := len(lead.Members)
	share := func(shape tensor.Shape) tensor.Shape { return tensor.Shape{shape[0], shape[1] / n} }
	outShape, lseShape := c.rows.outShape(p.geometry.ValueDim), c.rows.lseShape()
	works := make([]apartLayer, n)
	ready := func(i int, sub *queue.Submission) (err error) {
		mine := deviceQKV{qkv[0].Shards[i], qkv[1].Shards[i], qkv[2].Shards[i]}
		works[i], err = p.readyApart(sub, c, i, mine, p.pages.parts[i].heads.first*p.geometry.Group(), share(outShape), share(lseShape))
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
		p.step.record(sub, c.node, p.now)
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
	out = byMember(c.rows.query, outShape, func(w *apartLayer) *ongpu.Tensor { return w.out })
	if c.lse {
		lse = byMember(c.rows.lseType(), lseShape, func(w *apartLayer) *ongpu.Tensor { return w.lse })
	}
	return out, lse, nil
}

// lay says whether the rows of each member's queries and results are those of its heads alone, from now on.
func (p *devicePlan) lay(apart bool) {
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
func (p *devicePlan) attendFromHost(c *layerCall) (out, lse G.Value, err error) {
	q := p.pages.gpu.Queue
	var s stage
	var in [len(layerNames)]part
	for i, v := range c.qkv {
		in[i] = s.add(operand.RowMajorBytes(v.(*tensor.Dense)), c.rows.query)
	}
	if c.sinks != nil {
		in[3] = s.add(operand.RowMajorBytes(c.sinks.(*tensor.Dense)), tensor.Float32)
	}
	up := s.bytes
	o := dense.New(c.rows.query, c.rows.outShape(p.geometry.ValueDim)...)
	var results [2]part // the output and the log-sum-exp
	results[0] = s.add(operand.RowMajorBytes(o), c.rows.query)
	if c.lse {
		l := dense.New(tensor.Float32, c.rows.lseShape()...)
		results[1], lse = s.add(operand.RowMajorBytes(l), tensor.Float32), l
	}
	down := s.bytes - up
	var turned part
	if p.turns() {
		turned = s.add(in[0].host, c.rows.query) // of that length; it stays there
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
		if c.sinks != nil {
			operands.Sinks = in[3].in(b)
		}
		if c.lse {
			operands.LSE = results[1].in(b)
		}
		rows := newRows{k: in[1].in(b), v: in[2].in(b)}
		if p.turns() {
			rows.turned = turned.in(b)
		}
		if err := p.queue(sub, c.node.layer, rows, operands); err != nil {
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

// part is one of them.
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
