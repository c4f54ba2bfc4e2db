package ongpu

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/queue"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// UploadSharded is [GPU.Upload] to several GPUs: the indices of an axis are divided over the [GPU.Members], in order
// and evenly. Package device documents the uses of such tensors.
//
// A sharded tensor can be downloaded, freed, and written by CopyFrom from host memory. All other uses are an error.
// On a single GPU UploadSharded is Upload.
//
// Errors: those of [GPU.Upload], and ErrShape for an axis that x lacks, or that has fewer elements than there are
// GPUs.
func (g *GPU) UploadSharded(x tensor.Tensor, axis int) (d *Tensor, err error) {
	const op = "GPU.UploadSharded"
	defer errs.RecoverTo(op, &err)
	t, err := Dense(op, "x", x)
	if err != nil {
		return nil, err
	}
	if err := CheckShape(op, t.Dtype(), t.Shape()); err != nil {
		return nil, err
	}
	if axis < 0 || axis >= len(t.Shape()) {
		return nil, errs.Errorf(op, errs.ErrShape, "axis %d of shape %v", axis, t.Shape())
	}
	if err := g.Enter(op); err != nil {
		return nil, err
	}
	defer g.Group.Leave()
	if n := len(g.Members); t.Shape()[axis] < n {
		return nil, errs.Errorf(op, errs.ErrShape, "axis %d of shape %v for %d GPUs: each must have one element of it", axis, t.Shape(), n)
	}
	if d, err = g.newSharded(op, t.Dtype(), t.Shape(), axis); err != nil {
		return nil, err
	}
	if err := d.Fill(operand.RowMajorBytes(t)); err != nil {
		return nil, errors.Join(Error(op, err), d.free())
	}
	return d, nil
}

// UploadReplicated is [GPU.Upload] of all of x to each of several GPUs. Package device documents the uses of such
// tensors.
//
// A replicated tensor can be downloaded, freed, and written by CopyFrom. Other uses take the copy on the first GPU.
// On a single GPU UploadReplicated is Upload. Errors: those of [GPU.Upload].
func (g *GPU) UploadReplicated(x tensor.Tensor) (d *Tensor, err error) {
	const op = "GPU.UploadReplicated"
	defer errs.RecoverTo(op, &err)
	return g.upload(op, x, g.newReplicated)
}

// newReplicated allocates the memory. The GPU is entered.
func (g *GPU) newReplicated(op string, t tensor.Dtype, shape tensor.Shape) (d *Tensor, err error) {
	if d, err = g.Alloc(op, t, shape); err != nil {
		return nil, err
	}
	for _, m := range g.Members[1:] {
		r, err := m.Alloc(op, t, shape)
		if err != nil {
			return nil, errors.Join(err, d.free())
		}
		d.Replicas = append(d.Replicas, r)
	}
	return d, nil
}

// eachReplica visits the replicas of a tensor on the members after the first, which submits.
func (d *Tensor) eachReplica(sub *queue.Submission, visit func(b *cuda.Buffer, offset int64) error) error {
	for _, r := range d.Replicas {
		b, offset, err := r.UseAny(sub)
		if err == nil {
			err = visit(b, offset)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// UseAny returns the tensor's memory, for work of any member.
func (d *Tensor) UseAny(sub *queue.Submission) (b *cuda.Buffer, offset int64, err error) {
	b, err = sub.UseAny(d.Memory, d.generation)
	return b, d.offset, err
}

// On returns a member's copy of a replicated tensor.
func (d *Tensor) On(member int) *Tensor {
	switch {
	case d.Shards != nil:
		return d.Shards[member]
	case member == 0:
		return d
	}
	return d.Replicas[member-1]
}

// layout returns which members have a tensor.
func (d *Tensor) layout() Layout {
	return Layout{Replicated: d.Replicas != nil, Sharded: d.Shards != nil, Axis: d.Axis, Members: len(d.GPU.Members)}
}

// newSharded allocates the memory. The GPU is entered.
func (g *GPU) newSharded(op string, t tensor.Dtype, shape tensor.Shape, axis int) (*Tensor, error) {
	if len(g.Members) == 1 {
		return g.Alloc(op, t, shape)
	}
	d := g.TensorOf(Content{Shape: shape.Clone(), DType: t, Axis: axis})
	for i, m := range g.Members {
		s := shape.Clone()
		_, s[axis] = Share(shape[axis], len(g.Members), i)
		part, err := m.Alloc(op, t, s)
		if err != nil {
			return nil, errors.Join(err, freeAll(d.Shards))
		}
		d.Shards = append(d.Shards, part)
	}
	return d, nil
}

// Share returns member i's part of n things.
func Share(n, members, i int) (first, count int) {
	first = i * n / members
	return first, (i+1)*n/members - first
}

// NotWhole returns why a tensor can't be used as a whole, or nil.
func (d *Tensor) NotWhole() error {
	if d.Shards == nil {
		return nil
	}
	return &shardedError{d.Axis, d.GPU}
}

// isSharded reports whether a value is sharded over several GPUs.
func isSharded(v G.Value) bool {
	d, ok := Of(v)
	return ok && d != nil && d.Shards != nil
}

// eachRun visits the runs that are contiguous both in a shard and in the whole: n bytes of the shard from an offset
// on, and their offset in the whole. Of a packed shard, the whole is the shard.
func (d *Tensor) eachRun(shard, from, n int, visit func(at, n int)) {
	if d.Shards[shard].Packed != nil {
		visit(from, n)
		return
	}
	inner := int(d.DType.Size())
	for _, s := range d.Shape[d.Axis+1:] {
		inner *= s
	}
	mine, count := Share(d.Shape[d.Axis], len(d.Shards), shard)
	run := count * inner // contiguous bytes of the shard
	for end := from + n; from < end; {
		outer, in := from/run, from%run
		n := min(run-in, end-from)
		visit(outer*d.Shape[d.Axis]*inner+mine*inner+in, n)
		from += n
	}
}

// move copies between the shards and host memory that has the whole, to the shards if in is set. move waits for
// copies to the host. The GPU is entered.
func (d *Tensor) move(whole []byte, in bool) error {
	type piece struct{ shard, at, n int }
	var pieces []piece
	for i, s := range d.Shards {
		total := int(s.Bytes())
		for at := 0; at < total; at += pieceBytes {
			pieces = append(pieces, piece{i, at, min(pieceBytes, total-at)})
		}
	}
	return eachPiece(len(pieces), func(i int) error {
		p := &pieces[i]
		return d.movePiece(p.shard, p.at, p.n, whole, in)
	})
}

func (d *Tensor) movePiece(shard, at, n int, whole []byte, in bool) error {
	q, s := d.GPU.Queue, d.Shards[shard]
	p, err := q.TakePinned(n)
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	piece := p.Bytes
	if in {
		d.eachRun(shard, at, n, func(from, n int) { piece = piece[copy(piece, whole[from:from+n]):] })
	}
	err = q.Submit(func(sub *queue.Submission) error {
		b, err := sub.UseAny(s.Memory, s.generation)
		if err != nil {
			return err
		}
		if in {
			err = sub.Upload(b, s.offset+int64(at), p, 0, n)
		} else {
			err = sub.Download(p, 0, b, s.offset+int64(at), n)
		}
		if err != nil {
			return err
		}
		return sub.Mark(p)
	})
	if err != nil || in {
		return err
	}
	if err := q.Wait(p); err != nil {
		return err
	}
	d.eachRun(shard, at, n, func(to, n int) { piece = piece[copy(whole[to:to+n], piece):] })
	return nil
}

// freeAll frees the parts that several GPUs have of a tensor, and returns the first error.
func freeAll(parts []*Tensor) (err error) {
	for _, p := range parts {
		if e := p.free(); e != nil && err == nil {
			err = e
		}
	}
	return err
}

// UseShard returns the memory of a member's shard, for work on that member.
func (d *Tensor) UseShard(sub *queue.Submission, member int, name string) (Mem, error) {
	return d.Shards[member].UseAs(sub, name)
}

// spreadOperand returns an input of work that takes sharded inputs. The group's first member submits.
func (d *Tensor) spreadOperand(sub *queue.Submission, name string) (o Operand, err error) {
	if d.Shards == nil {
		return d.wholeOperand(sub, name)
	}
	o.Axis, o.Fixed = d.Axis, true
	for i, s := range d.Shards {
		b, err := sub.UseAny(s.Memory, s.generation)
		if err != nil {
			return o, InOperand(name, err)
		}
		t, _ := operand.StorageType(d.DType)
		first, n := Share(d.Shape[d.Axis], len(d.Shards), i)
		o.Shards = append(o.Shards, Shard{Memory: Mem{Buffer: b, Offset: s.offset, DType: t, Len: s.Size()}, First: first, N: n, Packed: s.Packed})
		o.Fixed = o.Fixed && sub.Fixed(s.Memory)
	}
	return o, nil
}

// computeSharded is [Compute] for inputs of which some are sharded. The GPU is entered.
func (g *GPU) computeSharded(c *Call) (out G.Value, err error) {
	engines := make([]*layers.Engine, len(g.Members))
	for i, m := range g.Members {
		if engines[i], err = m.Layers(c.Op); err != nil {
			return nil, err
		}
	}
	var refused error // by the op
	err = g.Queue.Submit(func(sub *queue.Submission) error {
		lead := &Work{Engine: engines[0], Submission: sub}
		whole, result, err := g.operandsOf(sub, c, lead, (*Tensor).spreadOperand)
		if err != nil {
			return err
		}
		var work Spread
		if work, refused = c.Spread(lead.In, lead.Out); refused != nil {
			return nil
		}
		free, err := g.takeScratch(sub, c.Node, work, engines)
		defer free()
		if err != nil {
			return err
		}
		if err := work.Before(lead); err != nil {
			return err
		}
		if err := sub.Each(func(i int, sub *queue.Submission) error {
			return work.On(i, &Work{Engine: engines[i], Submission: sub})
		}); err != nil {
			return err
		}
		if err := work.After(lead); err != nil {
			return err
		}
		out = result.Value()
		return HaveRead(sub, whole...)
	})
	if refused != nil {
		return nil, refused
	}
	return out, g.computeError(c.Op, err)
}

// takeScratch gives work the memory that it needs on each member. free is called after the work is queued, and after
// an error.
func (g *GPU) takeScratch(sub *queue.Submission, n *Node, work Spread, engines []*layers.Engine) (free func(), err error) {
	all := make([]Mem, len(g.Members))
	var frees []func()
	free = func() {
		for _, f := range frees {
			f()
		}
	}
	for i, m := range g.Members {
		size, err := work.Needs(i, engines[i])
		if err != nil || size == 0 {
			if err != nil {
				return free, err
			}
			continue
		}
		take := func(sub *queue.Submission) error {
			scratch, done, err := m.Scratch(sub, n, &n.On(g.Group, i).Rest, tensor.Float32, tensor.Shape{size})
			if err != nil {
				return err
			}
			if i > 0 { // the member's own queue allocates its memory
				frees = append(frees, func() {
					_ = m.Queue.Submit(func(*queue.Submission) error { done(); return nil })
				})
			} else {
				frees = append(frees, done)
			}
			all[i], err = scratch.Use(sub)
			return err
		}
		if i > 0 {
			err = m.Queue.Submit(take)
		} else {
			err = take(sub)
		}
		if err != nil {
			return free, err
		}
	}
	work.Take(all)
	return free, nil
}

// perGPU returns how the members of a group each do a part of a call's work; nil: the first member leads.
func (g *GPU) perGPU(c *Call) (*PerGPU, error) {
	if len(g.Members) == 1 {
		return nil, nil
	}
	layouts := make([]Layout, len(c.In))
	replicated := true
	for i, v := range c.In {
		layouts[i] = Must(v).layout()
		replicated = replicated && layouts[i].Replicated
	}
	if c.PerGPU != nil {
		if a, err := c.PerGPU(layouts); a != nil || err != nil {
			return a, err
		}
	}
	if !replicated {
		return nil, nil
	}
	return c.Each(), nil
}

// computePerGPU is [Compute] for work in per-GPU mode. The GPU is entered.
func (g *GPU) computePerGPU(c *Call, a *PerGPU) (G.Value, error) {
	var engines []*layers.Engine
	for _, m := range g.Members {
		e, err := m.Layers(c.Op)
		if err != nil {
			return nil, err
		}
		engines = append(engines, e)
	}
	var exchange *layers.Exchange
	if a.Sum || a.Meet != nil {
		var err error
		if exchange, err = g.Exchange(c.Op, engines); err != nil {
			return nil, err
		}
	}
	var values []*Tensor
	err := g.Queue.Submit(func(sub *queue.Submission) error {
		var frees Freeing
		defer frees.All()
		in, err := g.placed(sub, c, a.Replicate, &frees)
		if err != nil {
			return err
		}
		works := make([]memberWork, len(g.Members))
		sum := layers.AllReduce{Rows: 1, N: a.Shape.TotalSize(), X: make([]Mem, len(works)), Y: make([]Mem, len(works))}
		ready := func(i int, sub *queue.Submission) (err error) {
			w := &works[i]
			if *w, err = g.Members[i].readyPerGPU(sub, c, a, in, engines[i], i); err == nil && a.Sum {
				sum.X[i] = w.Out
				sum.Y[i], err = w.value.Use(sub)
			}
			return err
		}
		queue := func(i int, sub *queue.Submission) error {
			w := &works[i]
			defer w.free() // the next owner of the memory comes after the members' common work
			if a.Queue != nil {
				if err := a.Queue(i, &w.Work); err != nil {
					return err
				}
			}
			return HaveRead(sub, w.reads...)
		}
		if err := sub.PerGPU(ready, queue); err != nil {
			return err
		}
		if a.Sum {
			err = sumPerGPU(sub, exchange, &sum, works)
		}
		if err == nil && a.Meet != nil {
			err = meetPerGPU(sub, exchange, a.Meet, works)
		}
		if err != nil {
			if exchange != nil && !sub.Recording() { // a member would wait for members that do not come
				if e := exchange.Realign(sub.Finish); e != nil {
					err = errors.Join(err, e)
				}
			}
			return err
		}
		for i := range works {
			values = append(values, works[i].value)
		}
		return nil
	})
	if err := g.computeError(c.Op, err); err != nil {
		return nil, err
	}
	return g.perGPUValue(c.DType, c.Shape, values, a).Value(), nil
}

// perGPUValue returns the value that the members have made.
func (g *GPU) perGPUValue(t tensor.Dtype, shape tensor.Shape, values []*Tensor, a *PerGPU) *Tensor {
	if a.Layout.Replicated {
		values[0].Replicas = values[1:]
		return values[0]
	}
	return g.TensorOf(Content{Shape: shape.Clone(), DType: t, Axis: a.Layout.Axis, Shards: values, Made: true, Joined: a.Joined})
}

// memberWork is a member's part of a call's work.
type memberWork struct {
	Work
	value *Tensor
	reads []*Tensor
	free  func()
}

// readyPerGPU allocates the memory that a member needs for its part.
func (g *GPU) readyPerGPU(sub *queue.Submission, c *Call, a *PerGPU, in []*Tensor, e *layers.Engine, member int) (w memberWork, err error) {
	w = memberWork{Work: Work{Engine: e, Submission: sub}, free: func() {}}
	for i, d := range in {
		of := d.On(member)
		o, err := of.wholeOperand(sub, c.Names[i])
		if err != nil {
			return w, err
		}
		w.In, w.reads = append(w.In, o), append(w.reads, of)
	}
	if w.value, err = g.NodeValue(sub, c.Node, c.DType, a.Shape, w.reads...); err != nil {
		return w, err
	}
	if w.Out, err = w.value.Use(sub); err != nil {
		return w, err
	}
	n := 0
	if a.Scratch != nil {
		if n, err = a.Scratch(member, e); err != nil {
			return w, err
		}
	}
	partial := 0
	if a.Sum {
		partial = attn.Ceil(a.Shape.TotalSize(), 4) * 4
	}
	if n += partial; n == 0 {
		return w, nil
	}
	scratch, free, err := g.Scratch(sub, c.Node, &c.Node.On(g.Group, member).Rest, tensor.Float32, tensor.Shape{n})
	if err != nil {
		return w, err
	}
	w.free = free
	if w.Scratch, err = scratch.Use(sub); err != nil || !a.Sum {
		return w, err
	}
	w.Out, w.Scratch = w.Scratch, From(w.Scratch, partial)
	w.Out.Len = a.Shape.TotalSize()
	return w, nil
}

// Freeing frees temporary memory.
type Freeing []func()

func (f Freeing) All() {
	for _, free := range f {
		free()
	}
}

// placed returns the inputs of a call, replicated where replicate is set.
func (g *GPU) placed(sub *queue.Submission, c *Call, replicate []bool, frees *Freeing) ([]*Tensor, error) {
	in := make([]*Tensor, len(c.In))
	for i, v := range c.In {
		in[i] = Must(v)
		if len(replicate) == 0 || !replicate[i] || in[i].Replicas != nil {
			continue
		}
		var err error
		if in[i], err = g.Gathered(sub, c.Op, c.Node, i, in[i], frees); err == nil {
			in[i], err = g.replicated(sub, c.Node, i, in[i], frees)
		}
		if err != nil {
			return nil, InOperand(c.Names[i], err)
		}
	}
	return in, nil
}

// Gathered returns an input whole on the first member: the input itself, unless the members have made parts of it.
func (g *GPU) Gathered(sub *queue.Submission, op string, n *Node, input int, d *Tensor, frees *Freeing) (*Tensor, error) {
	if !d.Made {
		return d, nil
	}
	if d.Joined {
		return nil, fmt.Errorf("parts one behind the other, each sharded over %v: %w", g, attn.ErrUnsupported)
	}
	kernels, err := g.Layers(op)
	if err != nil {
		return nil, err
	}
	w, free, err := g.Scratch(sub, n, n.On(g.Group, 0).Input(input), d.DType, d.Shape)
	if err != nil {
		return nil, err
	}
	*frees = append(*frees, free)
	to, err := w.Use(sub)
	if err != nil {
		return nil, err
	}
	outer, inner := 1, 1
	for i, s := range d.Shape {
		if i < d.Axis {
			outer *= s
		} else {
			inner *= s
		}
	}
	part := inner / len(d.Shards)
	for i, s := range d.Shards {
		b, err := sub.UseAny(s.Memory, s.generation)
		if err != nil {
			return nil, err
		}
		x := Mem{Buffer: b, Offset: s.offset, DType: to.DType, Len: s.Size()}
		move := layers.Move{Move: attn.Move{Dims: [3]int{1, 1, outer}, N: part,
			From: attn.Lattice{Steps: [3]int{0, 0, part}}, To: attn.Lattice{At: i * part, Steps: [3]int{0, 0, inner}}}, X: x, Y: to}
		if err := sub.Do(func(s *cuda.Stream) error { return kernels.Move(s, &move) }); err != nil {
			return nil, err
		}
		if err := g.Members[i].read(sub, s); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// isMade reports whether a value consists of parts that members have made.
func isMade(v G.Value) bool {
	d, ok := Of(v)
	return ok && d.Made
}

// gatherInputs gathers inputs that members have made parts of on the first member. free is called after the work is
// queued, and after an error.
func (g *GPU) gatherInputs(c *Call) (free func(), err error) {
	var frees Freeing
	c.In = slices.Clone(c.In)
	err = g.Queue.Submit(func(sub *queue.Submission) error {
		for i, v := range c.In {
			d, err := g.Gathered(sub, c.Op, c.Node, i, Must(v), &frees)
			if err != nil {
				return InOperand(c.Names[i], err)
			}
			c.In[i] = d.Value()
		}
		return nil
	})
	return func() {
		_ = g.Queue.Submit(func(*queue.Submission) error { frees.All(); return nil })
	}, err
}

// read records that reads of a member's tensor are queued. The first member submits.
func (g *GPU) read(sub *queue.Submission, d *Tensor) error {
	if g == g.Members[0] {
		return HaveRead(sub, d)
	}
	return g.Queue.Submit(func(sub *queue.Submission) error { return HaveRead(sub, d) })
}

// replicated copies a whole input to all other members.
func (g *GPU) replicated(sub *queue.Submission, n *Node, input int, d *Tensor, frees *Freeing) (*Tensor, error) {
	from, err := d.Use(sub)
	if err != nil {
		return nil, err
	}
	all := d.part(0, d.Shape)
	for i, m := range g.Members[1:] {
		err := m.Queue.Submit(func(sub *queue.Submission) error {
			r, free, err := m.Scratch(sub, n, n.On(g.Group, i+1).Input(input), d.DType, d.Shape)
			if err != nil {
				return err
			}
			*frees = append(*frees, func() {
				_ = m.Queue.Submit(func(*queue.Submission) error { free(); return nil })
			})
			all.Replicas = append(all.Replicas, r)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return all, sub.Do(func(s *cuda.Stream) error {
		return all.eachReplica(sub, func(b *cuda.Buffer, offset int64) error {
			return s.Copy(b, offset, from.Buffer, from.Offset, d.Bytes())
		})
	})
}
