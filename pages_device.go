package leanattention

import (
	"errors"
	"fmt"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/decoder"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// devicePages are pages in the memory of a GPU, or of several: each member has them for
// some KV heads. A page has the same number on all of them.
type devicePages struct {
	gpu     *GPU
	pages   int
	storage attn.DType
	config  *CacheConfig
	parts   []*devicePart // of each member
}

// devicePart is what a member has.
type devicePart struct {
	gpu          *GPU
	heads        headRange      // of the cache's KV heads
	keys, values []*cuda.Buffer // one for each layer
}

// headRange is some heads: the first, and how many.
type headRange struct{ first, n int }

// dealHeads deals KV heads out to the members, in order and evenly.
func (g *GPU) dealHeads(op string, heads int) ([]headRange, error) {
	n := len(g.members)
	if heads < n {
		return nil, errorf(op, ErrUnsupported, "%d KV heads on %v: each of the %d GPUs must have one", heads, g, n)
	}
	ranges := make([]headRange, n)
	for i := range ranges {
		ranges[i] = dealt(heads, n, i)
	}
	return ranges, nil
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
	d := &devicePages{gpu: c.Device, pages: c.Pages, storage: storage, config: c}
	// The query heads are not known yet; the least there can be.
	g := (&tokenRows{heads: c.KVHeads}).geometry(c, &config{mask: attn.Mask{Window: c.Window, SinkTokens: c.SinkTokens}})
	if err := d.supports(op, &g); err != nil {
		return nil, err
	}
	heads, err := d.gpu.dealHeads(op, c.KVHeads)
	if err != nil {
		return nil, err
	}
	if err := d.gpu.enter(op); err != nil {
		return nil, err
	}
	defer d.gpu.group.Leave()
	for i, m := range d.gpu.members {
		part := &devicePart{gpu: m, heads: heads[i]}
		d.parts = append(d.parts, part)
		share := func(elements int) int64 { return int64(elements/c.KVHeads*part.heads.n) * int64(storage.Size()) }
		err := part.take(c.Layers, share(keyElements), share(valueElements))
		if err == nil {
			continue
		}
		err = errors.Join(err, d.close())
		if free, e := m.dev.Memory(); e == nil && errors.Is(err, cuda.ErrOutOfMemory) {
			asked := int64(c.Layers) * (share(keyElements) + share(valueElements))
			return nil, fmt.Errorf("leanattention: %s: %d bytes asked for on %v, %d of %d free: %w", op, asked, m.alone(), free.Free, free.Total, err)
		}
		return nil, gpuError(op, err)
	}
	return d, nil
}

// take takes the memory, so many bytes for each layer.
func (p *devicePart) take(layers int, keys, values int64) error {
	return p.gpu.queue.Submit(func(sub *device.Submission) error {
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

func (d *devicePages) supports(op string, g *attn.Problem) error {
	heads, err := d.gpu.dealHeads(op, g.KVHeads)
	if err != nil {
		return err
	}
	for i, m := range d.gpu.members {
		part := heads[i].part(*g)
		if err := m.supports(op, &part); err != nil {
			return err
		}
	}
	return nil
}

// operands takes values that are all on the cache's GPU, or all in host memory:
// those are copied there and back.
func (d *devicePages) operands(op string, in []G.Value) (o [4]operand, err error) {
	names := layerNames[:]
	at, err := samePlace(op, names, in)
	if err != nil {
		return o, err
	}
	if at != nil && at != d.gpu {
		return o, errorf(op, ErrUnsupported, "q is on %v and the cache on %s", at, otherName(d.gpu, at))
	}
	for i, v := range in {
		if at != nil {
			o[i] = operand{names[i], v.Shape(), v.Dtype()}
			continue
		}
		t, err := denseValue(op, names[i], v)
		if err != nil {
			return o, err
		}
		o[i] = valueOperand(names[i], t)
	}
	return o, nil
}

func (d *devicePages) copyPages(op string, copies []pageCopy) error {
	if len(copies) == 0 {
		return nil
	}
	return d.eachPart(op, func(p *devicePart, s *cuda.Stream) error { return p.copyPages(s, d.pages, copies) })
}

// moveSlots queues small copies, of which several are one launch.
func (d *devicePages) moveSlots(op string, moves []slotMove) error {
	return d.eachPart(op, func(p *devicePart, s *cuda.Stream) error { return p.moveSlots(s, d.config, moves) })
}

// eachPart queues work of each member.
func (d *devicePages) eachPart(op string, queue func(*devicePart, *cuda.Stream) error) error {
	if err := d.gpu.enter(op); err != nil {
		return err
	}
	defer d.gpu.group.Leave()
	err := d.gpu.queue.Submit(func(sub *device.Submission) error {
		return sub.Each(func(i int, sub *device.Submission) error {
			return sub.Do(func(s *cuda.Stream) error { return queue(d.parts[i], s) })
		})
	})
	if err != nil {
		return gpuError(op, err)
	}
	return nil
}

func (p *devicePart) copyPages(s *cuda.Stream, pages int, copies []pageCopy) error {
	for _, buffers := range [...][]*cuda.Buffer{p.keys, p.values} {
		for _, b := range buffers {
			n := b.Len() / int64(pages)
			for _, c := range copies {
				if err := s.Copy(b, int64(c.to)*n, b, int64(c.from)*n, n); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (p *devicePart) moveSlots(s *cuda.Stream, c *CacheConfig, moves []slotMove) error {
	for _, buffers := range [...][]*cuda.Buffer{p.keys, p.values} {
		for _, b := range buffers {
			for _, m := range moves {
				for head := range p.heads.n {
					to, from, n := m.bytes(head, p.heads.n, c.PageSize, int(b.Len())/c.Pages)
					if err := s.Copy(b, int64(to), b, int64(from), int64(n)); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

func (d *devicePages) transfer(op string, t *pageTransfer, in bool) error {
	if err := d.gpu.enter(op); err != nil {
		return err
	}
	defer d.gpu.group.Leave()
	if err := d.transferNow(t, in); err != nil {
		return gpuError(op, err)
	}
	return nil
}

// transferNow is transfer with the GPU entered: by way of pinned memory, which is as the
// caller's. Small copies to the GPU may be put off until somebody waits for them, which so
// tells what went wrong with them.
func (d *devicePages) transferNow(t *pageTransfer, in bool) error {
	q := d.gpu.queue
	p, err := q.TakePinned(len(t.memory))
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	if in {
		copy(p.Bytes, t.memory)
	}
	err = q.Submit(func(sub *device.Submission) error {
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
	slab := int(of(d.parts[0]).Len()) / d.pages / d.parts[0].heads.n // bytes of a head in a page
	for _, s := range t.spans {
		for end := s.at + s.n; s.at < end; {
			page, head := s.at/slab/d.config.KVHeads, s.at/slab%d.config.KVHeads
			p := d.partOf(head)
			there := min(end, (page*d.config.KVHeads+p.heads.first+p.heads.n)*slab) - s.at // up to the last head of the member
			if err := visit(of(p), s.at-(page*(d.config.KVHeads-p.heads.n)+p.heads.first)*slab, from, there); err != nil {
				return err
			}
			s.at, from = s.at+there, from+there
		}
	}
	return nil
}

// partOf is that of the member that has a KV head.
func (d *devicePages) partOf(head int) *devicePart {
	i := slices.IndexFunc(d.parts, func(p *devicePart) bool { return head < p.heads.first+p.heads.n })
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

func (d *devicePages) newPlan(step *Step, g attn.Problem) layerPlan {
	p := &devicePlan{pages: d, step: step, geometry: g}
	for i, s := range [...]*deviceSchedule{&p.chains, &p.trees} {
		g.Tree = i == 1
		for _, part := range d.parts {
			s.parts = append(s.parts, planPart{geometry: part.heads.part(g)})
		}
	}
	return p
}

// devicePlan is a layerPlan for a GPU's engine, or those of several.
//
// Sequences with trees have kernels of their own, so there are two schedules: a recording has that of
// one of them, and what was recorded without trees is as it was behind a step that has some.
type devicePlan struct {
	pages    *devicePages
	step     *Step
	geometry attn.Problem
	chains   deviceSchedule  // of steps without trees
	trees    deviceSchedule  // of those that have some, and, for recordings, of all others then
	now      *deviceSchedule // that layers run by
}

// deviceSchedule is a schedule of each member.
type deviceSchedule struct {
	parts    []planPart
	planned  bool // in the step's last turn
	recorded bool // from now on it is to be
}

// planPart is what a member has of a schedule.
type planPart struct {
	geometry attn.Problem
	plan     attentionPlan // nil before the first build
}

func (p *devicePlan) build(op string, seqs []attn.Sequence, rows int) error {
	lead := p.pages.gpu
	if err := lead.enter(op); err != nil {
		return err
	}
	defer lead.group.Leave()
	if p.now = &p.chains; attn.HasTrees(seqs) {
		p.now = &p.trees
	}
	p.chains.planned, p.trees.planned = false, false
	for _, s := range [...]*deviceSchedule{&p.chains, &p.trees} {
		if s != p.now && !(s == &p.trees && s.recorded) {
			continue
		}
		if err := p.plan(op, s, seqs, rows); err != nil {
			return err
		}
		s.planned = true
	}
	return nil
}

// plan builds one of the schedules.
func (p *devicePlan) plan(op string, s *deviceSchedule, seqs []attn.Sequence, rows int) error {
	lead := p.pages.gpu
	for i := range s.parts {
		gpu, part := lead.members[i], &s.parts[i]
		if part.plan == nil {
			part.plan = gpu.takePlan()
			// A step has no Close: its plans come back when it is garbage.
			runtime.AddCleanup(p, gpu.givePlan, part.plan)
			// Steps of any lengths look alike then, to a recording.
			if err := part.plan.Reserve(capacity(rows, p.pages.pages)); err != nil {
				return deviceEngineError(op, "plan", err)
			}
		}
		if err := gpu.buildPlan(op, part.plan, part.geometry, seqs, rows); err != nil {
			return err
		}
	}
	err := lead.queue.Submit(func(sub *device.Submission) error {
		return sub.Do(func(stream *cuda.Stream) error { return s.upload(stream) })
	})
	if err != nil {
		return deviceEngineError(op, "plan", err)
	}
	return nil
}

func (s *deviceSchedule) upload(stream *cuda.Stream) error {
	for i := range s.parts {
		if err := s.parts[i].plan.Upload(stream); err != nil {
			return err
		}
	}
	return nil
}

func (p *devicePlan) attend(op string, c *layerCall) (out, lse G.Value, err error) {
	if err := p.pages.gpu.enter(op); err != nil {
		return nil, nil, err
	}
	defer p.pages.gpu.group.Leave()
	if _, ok := c.qkv[0].(*DeviceTensor); ok {
		out, lse, err = p.attendThere(c)
	} else {
		out, lse, err = p.attendFromHost(c)
	}
	if err != nil {
		return nil, nil, deviceEngineError(op, c.node.String(), err)
	}
	return out, lse, nil
}

// newRows are a layer's new keys and values, and memory for its queries where a rotary embedding turns them.
type newRows struct{ k, v, turned deviceMemory }

// appendTo queues the storing of new rows in o's keys and values, of which each has so many KV heads (0: the plan's), and
// the turning of o's queries.
func (n newRows) appendTo(plan attentionPlan, s *cuda.Stream, o *deviceOperands, heads int) error {
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

// queue queues the work of a layer. Its operands are on the first member; the others read
// and write what is for their heads there.
func (p *devicePlan) queue(sub *device.Submission, layer int, n newRows, o *deviceOperands) error {
	if len(p.now.parts) == 1 {
		o.K, o.V = p.layerPages(0, layer)
		return p.queueAlone(sub, n, o)
	}
	return sub.Each(func(i int, sub *device.Submission) error {
		part, g := &p.now.parts[i], &p.geometry
		heads := p.pages.parts[i].heads
		mine := heads.operands(g, o)
		mine.K, mine.V = p.layerPages(i, layer)
		rows := newRows{k: from(n.k, heads.first*g.Dim), v: from(n.v, heads.first*g.ValueDim)}
		if p.turns() {
			rows.turned = from(n.turned, heads.first*g.Group()*g.Query.Head)
		}
		return sub.Do(func(s *cuda.Stream) error {
			if err := rows.appendTo(part.plan, s, &mine, g.KVHeads); err != nil {
				return err
			}
			return part.plan.Run(s, &mine)
		})
	})
}

// operands are a member's part of queries, outputs, log-sum-exps and sinks: those of its heads.
func (r headRange) operands(all *attn.Problem, o *deviceOperands) deviceOperands {
	first := r.first * (all.Heads / all.KVHeads)
	mine := deviceOperands{Q: from(o.Q, first*all.Query.Head), Out: from(o.Out, first*all.Out.Head), Bias: o.Bias}
	if o.LSE.Buffer != nil {
		mine.LSE = from(o.LSE, first*all.LSE.Head)
	}
	if o.Sinks.Buffer != nil {
		mine.Sinks = from(o.Sinks, first)
	}
	return mine
}

// from is m from an element on.
func from(m deviceMemory, element int) deviceMemory {
	m.Offset += int64(element) * int64(m.DType.Size())
	m.Len -= element
	return m
}

// layerPages are the keys and values of a layer that a member has.
func (p *devicePlan) layerPages(member, layer int) (k, v deviceMemory) {
	at := func(b *cuda.Buffer) deviceMemory {
		return deviceMemory{Buffer: b, DType: p.pages.storage, Len: int(b.Len()) / p.pages.storage.Size()}
	}
	part := p.pages.parts[member]
	return at(part.keys[layer]), at(part.values[layer])
}

// queueAlone is queue on one GPU.
func (p *devicePlan) queueAlone(sub *device.Submission, n newRows, o *deviceOperands) error {
	// In a recording it may be a part of the megakernel that makes q, k and v, or the launch
	// that makes them may store k and v.
	of := p.now.parts[0].plan
	stored := false
	if plan, ok := of.(*attention.Plan); ok && !p.turns() { // of turning they know nothing
		switch late := sub.Deferred().(type) {
		case *decoder.Megakernel:
			if late.Attend(plan, o, n.k, n.v) {
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

// attendThere is attend on tensors of the GPU: it waits for nothing.
func (p *devicePlan) attendThere(c *layerCall) (out, lse G.Value, err error) {
	qkv := operandTensors(c.qkv)
	defer runtime.KeepAlive(c)
	var o, l *DeviceTensor
	err = p.pages.gpu.queue.Submit(func(sub *device.Submission) error {
		q, k, v, err := qkv.use(sub)
		if err != nil {
			return err
		}
		operands := deviceOperands{Q: q}
		reads := qkv[:]
		if c.sinks != nil {
			sinks := c.sinks.(*DeviceTensor)
			if operands.Sinks, err = sinks.useAs(sub, "sinks"); err != nil {
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
			turned, free, err := lead.scratch(sub, c.memory, &c.memory.On(lead.group, 0).Turned, c.rows.query, qkv[0].shape)
			if err != nil {
				return err
			}
			defer free()
			if rows.turned, err = turned.useAs(sub, "q"); err != nil {
				return err
			}
		}
		if err := p.queue(sub, c.node.layer, rows, &operands); err != nil {
			return err
		}
		p.step.record(sub, c.node, p.now)
		return haveRead(sub, reads...)
	})
	if err != nil {
		return nil, nil, err
	}
	if l == nil {
		return o, nil, nil
	}
	return o, l, nil
}

// attendFromHost is attend on tensors of the host: one copy there, one back, and
// one wait.
func (p *devicePlan) attendFromHost(c *layerCall) (out, lse G.Value, err error) {
	q := p.pages.gpu.queue
	var s stage
	var in [len(layerNames)]part
	for i, v := range c.qkv {
		in[i] = s.add(rowMajorBytes(v.(*tensor.Dense)), c.rows.query)
	}
	if c.sinks != nil {
		in[3] = s.add(rowMajorBytes(c.sinks.(*tensor.Dense)), tensor.Float32)
	}
	up := s.bytes
	o := tensor.New(tensor.Of(c.rows.query), tensor.WithShape(c.rows.outShape(p.geometry.ValueDim)...))
	var results [2]part // the output and the log-sum-exp
	results[0] = s.add(rowMajorBytes(o), c.rows.query)
	if c.lse {
		l := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(c.rows.lseShape()...))
		results[1], lse = s.add(rowMajorBytes(l), tensor.Float32), l
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
	err = q.Submit(func(sub *device.Submission) error {
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
		operands := &deviceOperands{Q: in[0].in(b), Out: results[0].in(b)}
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
	p.t, _ = storageType(t)
	s.bytes += (len(host) + align - 1) / align * align
	return p
}

func (p *part) in(b *cuda.Buffer) deviceMemory {
	return deviceMemory{Buffer: b, Offset: int64(p.at), DType: p.t, Len: len(p.host) / p.t.Size()}
}
