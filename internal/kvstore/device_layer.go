package kvstore

import (
	"encoding/binary"
	"runtime"

	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/internal/variant"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

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

// newRows is a layer's new keys and values, and memory for the rotated queries of a plan with a rotary embedding. By context, each
// has the memory for the rotated queries of each member, and last that for new tokens among themselves.
type newRows struct {
	k, v, rotated ongpu.Mem
	each          []ongpu.Mem
}

// add adds memory for rotated queries of n elements.
func (r *newRows) add(m ongpu.Mem, n int) {
	m.Len = n
	if r.each = append(r.each, m); len(r.each) == 1 {
		r.rotated = m
	}
}

// rotations returns the number of copies of the rotated queries.
func (p *DevicePlan) rotations() int {
	if p.now.context == nil {
		return 1
	}
	return len(p.pages.Parts) + 1
}

// appendTo queues the append of n to o's pages, and the rotation of o's queries. A row of n has heads KV heads; 0: as many as the plan.
func (n newRows) appendTo(plan ongpu.AttentionPlan, s *cuda.Stream, o *ongpu.AttentionOperands, heads int) error {
	if n.rotated.Buffer == nil {
		return plan.AppendRows(s, o.Pages, n.k, n.v, heads)
	}
	if err := plan.AppendRotated(s, o.Pages, n.k, n.v, o.Q, n.rotated, heads); err != nil {
		return err
	}
	o.Q = n.rotated
	return nil
}

// turns reports whether the plan has a rotary embedding.
func (p *DevicePlan) turns() bool { return p.geometry.Rotary != attn.Rotary{} }

// queueAlone is queue for a member that has all of its operands.
func (p *planPart) queueAlone(sub *queue.Submission, n newRows, o *ongpu.AttentionOperands) error {
	// In a recording, the megakernel that computes q, k and v may attend, too, or the launch that computes them may store k and v.
	of := p.plan
	stored := false
	if plan, ok := of.(*attention.Plan); ok {
		switch late := sub.Deferred().(type) {
		case *layers.Megakernel:
			if late.Attend(plan, o, n.k, n.v, n.rotated) {
				return nil
			}
		case *layers.Projection:
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

// attendThere is Attend for operands on the GPU. It does not wait. If x is not nil, all members merge states through x.
func (p *DevicePlan) attendThere(c *Call, qkv *ongpu.QKV, x Exchanging) (out, lse G.Value, err error) {
	defer runtime.KeepAlive(c)
	switch {
	case x != nil:
		return p.attendMerging(c, qkv, x)
	case p.isPerMember(c, qkv):
		return p.attendPerMember(c, qkv)
	}
	var o, l, entropy, mass *ongpu.Tensor
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
		if err = ongpu.UseTensors(sub, c.There, &operands); err != nil {
			return err
		}
		reads = append(reads, c.There...)
		if o, operands.Out, err = qkv.ResultIn(sub, c.Out, c.Memory, c.Rows.Query, c.Rows.outShape(p.geometry.ValueDim)); err != nil {
			return err
		}
		if c.LSE {
			if l, operands.LSE, err = qkv.LogSumExp(sub, c.Memory, c.Rows.LSEType(), c.Rows.LSEShape()); err != nil {
				return err
			}
		}
		memory := c.Memory.On(p.pages.GPU.Group, 0)
		if c.Entropy != nil {
			if entropy, operands.Entropy, err = qkv.Beside(sub, &memory.Entropy, c.Rows.LSEType(), c.Rows.LSEShape()); err != nil {
				return err
			}
		}
		if c.Mass != nil {
			operands.Places = c.Places
			if mass, operands.Mass, err = qkv.Beside(sub, &memory.Mass, c.Rows.LSEType(), c.Rows.MassShape(c.Places)); err != nil {
				return err
			}
		}
		rows := newRows{k: k, v: v}
		if p.turns() {
			lead, n := p.pages.GPU, qkv[0].Shape.TotalSize()
			rotated, free, err := lead.Scratch(sub, c.Memory, &c.Memory.On(lead.Group, 0).Rotated, c.Rows.Query, tensor.Shape{p.rotations(), n})
			if err != nil {
				return err
			}
			defer free()
			all, err := rotated.UseAs(sub, "q")
			if err != nil {
				return err
			}
			for i := range p.rotations() {
				rows.add(ongpu.From(all, i*n), n)
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
	if c.Entropy != nil {
		*c.Entropy = entropy.Value()
	}
	if c.Mass != nil {
		*c.Mass = mass.Value()
	}
	if l == nil {
		return o.Value(), nil, nil
	}
	return o.Value(), l.Value(), nil
}

// isPerMember reports whether each member has the queries, keys and values of its heads.
func (p *DevicePlan) isPerMember(c *Call, qkv *ongpu.QKV) bool {
	g, copies := p.pages.GPU, p.pages.Parts[0].heads.Copies > 1
	if n := len(g.Members); n == 1 || p.now.context != nil || p.geometry.Heads%n != 0 || !copies && p.geometry.KVHeads%n != 0 || c.Out != nil {
		return false
	}
	for i, d := range qkv {
		if copies && i > 0 {
			if d.Replicas == nil {
				return false
			}
		} else if d.Shards == nil || d.Joined || d.Axis != 1 {
			return false
		}
	}
	return c.Sinks == nil || ongpu.Must(c.Sinks).Replicas != nil
}

// memberLayer is the work of one member on a layer, with operands that the member has.
type memberLayer struct {
	rows     newRows
	o        ongpu.AttentionOperands
	reads    []*ongpu.Tensor
	free     ongpu.Freeing
	out, lse *ongpu.Tensor
}

// readyMember prepares the work of a member for results of these shapes. The member reads qkv, and the sinks from number sink on.
func (p *DevicePlan) readyMember(sub *queue.Submission, c *Call, member int, qkv ongpu.QKV, sink int, outShape, lseShape tensor.Shape) (w memberLayer, err error) {
	m, memory := p.pages.GPU.Members[member], c.Memory.On(p.pages.GPU.Group, member)
	q, k, v, err := qkv.Use(sub)
	if err != nil {
		return w, err
	}
	w = memberLayer{rows: newRows{k: k, v: v}, o: ongpu.AttentionOperands{Q: q}, reads: qkv[:]}
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
	rotated, free, err := m.Scratch(sub, c.Memory, &memory.Rotated, c.Rows.Query, qkv[0].Shape)
	if err != nil {
		return w, err
	}
	w.free = append(w.free, free)
	w.rows.rotated, err = rotated.UseAs(sub, "q")
	return w, err
}

// attendPerMember is Attend if each member has the queries, keys and values of its heads. Each member computes the outputs of its heads.
func (p *DevicePlan) attendPerMember(c *Call, qkv *ongpu.QKV) (out, lse G.Value, err error) {
	lead := p.pages.GPU
	p.lay(true)
	n := len(lead.Members)
	outShape, lseShape := c.Rows.outShape(p.geometry.ValueDim), c.Rows.LSEShape()
	works := make([]memberLayer, n)
	ready := func(i int, sub *queue.Submission) (err error) {
		mine := ongpu.QKV{qkv[0].On(i), qkv[1].On(i), qkv[2].On(i)}
		first, _ := p.pages.Parts[i].heads.Queries(&p.geometry)
		works[i], err = p.readyMember(sub, c, i, mine, first, p.share(outShape), p.share(lseShape))
		return err
	}
	err = lead.Queue.Submit(func(sub *queue.Submission) error {
		if err := sub.PerGPU(ready, func(i int, sub *queue.Submission) error {
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
	out, lse = p.byMember(c, works)
	return out, lse, nil
}

// share returns the shape of a member's part of a result that is sharded by heads.
func (p *DevicePlan) share(shape tensor.Shape) tensor.Shape {
	return tensor.Shape{shape[0], shape[1] / len(p.pages.GPU.Members)}
}

// byMember returns results of which each member has those of its heads.
func (p *DevicePlan) byMember(c *Call, works []memberLayer) (out, lse G.Value) {
	of := func(t tensor.Dtype, shape tensor.Shape, made func(*memberLayer) *ongpu.Tensor) G.Value {
		d := p.pages.GPU.TensorOf(ongpu.Content{Shape: shape, DType: t, Axis: 1, Made: true})
		for i := range works {
			d.Shards = append(d.Shards, made(&works[i]))
		}
		return d.Value()
	}
	out = of(c.Rows.Query, c.Rows.outShape(p.geometry.ValueDim), func(w *memberLayer) *ongpu.Tensor { return w.out })
	if c.LSE {
		lse = of(c.Rows.LSEType(), c.Rows.LSEShape(), func(w *memberLayer) *ongpu.Tensor { return w.lse })
	}
	return out, lse
}

// lay sets the strides of queries and results: perMember means that a row has only the member's heads.
func (p *DevicePlan) lay(perMember bool) {
	if p.perMember == perMember {
		return
	}
	p.perMember = perMember
	for _, s := range p.schedules {
		for i := range s.parts {
			part := &s.parts[i]
			g := &part.geometry
			g.Query, g.Out, g.LSE = p.geometry.Query, p.geometry.Out, p.geometry.LSE
			if perMember {
				g.Query, g.Out, g.LSE = attn.PackedRows(g.Heads, g.Dim), attn.PackedRows(g.Heads, g.ValueDim), attn.PackedRows(g.Heads, 1)
			}
			if part.plan != nil {
				part.plan.Lay(g.Query, g.Out, g.LSE)
			}
		}
	}
}

// attendFromHost is Attend for operands in host memory: one copy to the GPU, one copy back, and one wait.
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
	var tensors []part // of the variant
	for i, v := range c.Values {
		t := v.(*tensor.Dense)
		if ints := &c.Tensors[i]; ints.Int() {
			tensors = append(tensors, s.add(intBytes(ints), tensor.Float32))
		} else {
			tensors = append(tensors, s.add(operand.RowMajorBytes(t), c.Rows.Query))
		}
	}
	up := s.bytes
	o := dense.New(c.Rows.Query, c.Rows.outShape(p.geometry.ValueDim)...)
	var results [4]part // the output, the log-sum-exp, entropies and attention mass
	results[0] = s.add(operand.RowMajorBytes(o), c.Rows.Query)
	if c.LSE {
		l := dense.New(tensor.Float32, c.Rows.LSEShape()...)
		results[1], lse = s.add(operand.RowMajorBytes(l), tensor.Float32), l
	}
	if c.Entropy != nil {
		e := dense.New(tensor.Float32, c.Rows.LSEShape()...)
		results[2], *c.Entropy = s.add(operand.RowMajorBytes(e), tensor.Float32), e
	}
	if c.Mass != nil {
		m := dense.New(tensor.Float32, c.Rows.MassShape(c.Places)...)
		results[3], *c.Mass = s.add(operand.RowMajorBytes(m), tensor.Float32), m
	}
	down := s.bytes - up
	var rotated []part
	for range p.rotations() {
		if p.turns() {
			rotated = append(rotated, s.add(in[0].host, c.Rows.Query)) // as long as q; it stays on the GPU
		}
	}
	defer runtime.KeepAlive(c)

	pinned, err := q.TakePinned(max(up, down))
	if err != nil {
		return nil, nil, err
	}
	defer q.GivePinned(pinned)
	for _, x := range append(in[:], tensors...) {
		copy(pinned.Bytes[x.at:], x.host)
	}
	err = q.Submit(func(sub *queue.Submission) error {
		m, err := sub.Alloc(int64(s.bytes))
		if err != nil {
			return err
		}
		defer sub.Free(m) // the next user of the memory is queued behind this work
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
		for i := range tensors {
			operands.Tensors[i] = attention.Tensor{Memory: tensors[i].in(b), Shape: c.Tensors[i].Shape}
		}
		if c.LSE {
			operands.LSE = results[1].in(b)
		}
		if c.Entropy != nil {
			operands.Entropy = results[2].in(b)
		}
		if c.Mass != nil {
			operands.Mass, operands.Places = results[3].in(b), c.Places
		}
		rows := newRows{k: in[1].in(b), v: in[2].in(b)}
		for i := range rotated {
			m := rotated[i].in(b)
			rows.add(m, m.Len)
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

// intBytes returns a copy of the elements as ints of 32 bits, the type that GPU kernels read.
func intBytes(t *variant.Tensor) []byte {
	b := make([]byte, 0, 4*t.Len())
	for i := range t.Len() {
		b = binary.NativeEndian.AppendUint32(b, uint32(int32(t.At(i))))
	}
	return b
}

// stage is the layout of operands in one block of memory on the GPU.
type stage struct{ bytes int }

// part is an operand of a stage.
type part struct {
	host []byte
	at   int
	t    attn.DType
}

// add appends an operand at an aligned offset.
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
