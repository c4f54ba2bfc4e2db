package leanattention

import (
	"errors"
	"fmt"

	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// UploadSharded is [GPU.Upload] to several GPUs, a part to each: what an axis has is dealt
// out to the [GPU.Members], in order and evenly. Keys and values that are sharded by heads
// are what [Attend] and [Attention] need to compute on all of them: q, the output and the
// log-sum-exp are whole, on the first one.
//
// Weights of shape (out, in) that are sharded by output features, on axis 0, are what Linear and Linears of
// package nn need for it, with a bias that is whole or sharded as well: each GPU computes its columns of the
// output. What else they take is whole, and so is what they make, on the first GPU.
//
// A sharded tensor can be downloaded, freed, and written by CopyFrom from host memory;
// nothing else takes it, and says so. Of a single GPU it is Upload.
//
// Errors: those of [GPU.Upload], and [ErrShape] for an axis that x has not, or that has
// fewer elements than there are GPUs.
func (g *GPU) UploadSharded(x tensor.Tensor, axis int) (d *DeviceTensor, err error) {
	const op = "GPU.UploadSharded"
	defer recoverTo(op, &err)
	t, err := denseValue(op, "x", x)
	if err != nil {
		return nil, err
	}
	if err := checkDeviceShape(op, t.Dtype(), t.Shape()); err != nil {
		return nil, err
	}
	if axis < 0 || axis >= len(t.Shape()) {
		return nil, errorf(op, ErrShape, "axis %d of shape %v", axis, t.Shape())
	}
	if err := g.enter(op); err != nil {
		return nil, err
	}
	defer g.group.Leave()
	if n := len(g.members); t.Shape()[axis] < n {
		return nil, errorf(op, ErrShape, "axis %d of shape %v for %d GPUs: each must have one element of it", axis, t.Shape(), n)
	}
	if d, err = g.newSharded(op, t.Dtype(), t.Shape(), axis); err != nil {
		return nil, err
	}
	if err := d.fill(rowMajorBytes(t)); err != nil {
		return nil, errors.Join(gpuError(op, err), d.free())
	}
	return d, nil
}

// newSharded takes the memory. The GPU is entered.
func (g *GPU) newSharded(op string, t tensor.Dtype, shape tensor.Shape, axis int) (*DeviceTensor, error) {
	if len(g.members) == 1 {
		return g.newTensor(op, t, shape)
	}
	d := &DeviceTensor{gpu: g, shape: shape.Clone(), dtype: t, axis: axis}
	for i, m := range g.members {
		s := shape.Clone()
		s[axis] = dealt(shape[axis], len(g.members), i).n
		part, err := m.newTensor(op, t, s)
		if err != nil {
			return nil, errors.Join(err, d.free())
		}
		d.shards = append(d.shards, part)
	}
	return d, nil
}

// dealt is the part of n things that one of some members has.
func dealt(n, members, i int) headRange {
	first := i * n / members
	return headRange{first, (i+1)*n/members - first}
}

// notWhole says why a tensor can't be used as a whole.
func (d *DeviceTensor) notWhole() error {
	if d.shards == nil {
		return nil
	}
	return &shardedError{d.axis, d.gpu}
}

// isSharded says whether a value is dealt out over several GPUs.
func isSharded(v G.Value) bool {
	d, ok := v.(*DeviceTensor)
	return ok && d != nil && d.shards != nil
}

// shardedError is the use of a sharded tensor where a whole one is needed.
type shardedError struct {
	axis int
	gpu  *GPU
}

func (e *shardedError) Error() string {
	return fmt.Sprintf("sharded on axis %d over %v", e.axis, e.gpu)
}

// eachRun visits what lies together both in a shard and in the whole: n bytes of the
// shard from one on, and where they are in the whole.
func (d *DeviceTensor) eachRun(shard, from, n int, visit func(at, n int)) {
	inner := int(d.dtype.Size())
	for _, s := range d.shape[d.axis+1:] {
		inner *= s
	}
	mine := dealt(d.shape[d.axis], len(d.shards), shard)
	run := mine.n * inner // bytes of the shard that lie together
	for end := from + n; from < end; {
		outer, in := from/run, from%run
		n := min(run-in, end-from)
		visit(outer*d.shape[d.axis]*inner+mine.first*inner+in, n)
		from += n
	}
}

// move copies between the shards and memory of the host that has the whole, to the shards
// if in is set. It waits where it reads. The GPU is entered.
func (d *DeviceTensor) move(whole []byte, in bool) error {
	type piece struct{ shard, at, n int }
	var pieces []piece
	for i, s := range d.shards {
		total := int(s.bytes())
		for at := 0; at < total; at += pieceBytes {
			pieces = append(pieces, piece{i, at, min(pieceBytes, total-at)})
		}
	}
	return eachPiece(len(pieces), func(i int) error {
		p := &pieces[i]
		return d.movePiece(p.shard, p.at, p.n, whole, in)
	})
}

func (d *DeviceTensor) movePiece(shard, at, n int, whole []byte, in bool) error {
	q, s := d.gpu.queue, d.shards[shard]
	p, err := q.TakePinned(n)
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	piece := p.Bytes
	if in {
		d.eachRun(shard, at, n, func(from, n int) { piece = piece[copy(piece, whole[from:from+n]):] })
	}
	err = q.Submit(func(sub *device.Submission) error {
		b, err := sub.UseAny(s.memory, s.generation)
		if err != nil {
			return err
		}
		if in {
			err = sub.Upload(b, int64(at), p, 0, n)
		} else {
			err = sub.Download(p, 0, b, int64(at), n)
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

// freeShards is free of a sharded tensor: of all of it or nothing.
func (d *DeviceTensor) freeShards() (err error) {
	for _, s := range d.shards {
		if e := s.free(); e != nil && err == nil {
			err = e
		}
	}
	return err
}

// useShard is the memory of a member's shard, to queue work on there.
func (d *DeviceTensor) useShard(sub *device.Submission, member int, name string) (deviceMemory, error) {
	return d.shards[member].useAs(sub, name)
}

// spreadOperand is an input of work that takes sharded ones, to queue work on. The group's first member submits.
func (d *DeviceTensor) spreadOperand(sub *device.Submission, name string) (o ongpu.Operand, err error) {
	if d.shards == nil {
		return d.wholeOperand(sub, name)
	}
	o.Axis, o.Fixed = d.axis, true
	for i, s := range d.shards {
		b, err := sub.UseAny(s.memory, s.generation)
		if err != nil {
			return o, &operandError{name, err}
		}
		t, _ := storageType(d.dtype)
		of := dealt(d.shape[d.axis], len(d.shards), i)
		o.Shards = append(o.Shards, ongpu.Shard{Memory: deviceMemory{Buffer: b, DType: t, Len: s.Size()}, First: of.first, N: of.n})
		o.Fixed = o.Fixed && sub.Fixed(s.memory)
	}
	return o, nil
}

// computeSharded is [ongpu.Compute] of work on inputs of which some are sharded. The GPU is entered.
func (g *GPU) computeSharded(c *ongpu.Call) (out G.Value, err error) {
	engines := make([]*decoder.Engine, len(g.members))
	for i, m := range g.members {
		if engines[i], err = m.layers(c.Op); err != nil {
			return nil, err
		}
	}
	var refused error // by the op
	err = g.queue.Submit(func(sub *device.Submission) error {
		lead := &ongpu.Work{Engine: engines[0], Submission: sub}
		whole, result, err := g.operandsOf(sub, c, lead, (*DeviceTensor).spreadOperand)
		if err != nil {
			return err
		}
		var work ongpu.Spread
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
		if err := sub.Each(func(i int, sub *device.Submission) error {
			return work.On(i, &ongpu.Work{Engine: engines[i], Submission: sub})
		}); err != nil {
			return err
		}
		if err := work.After(lead); err != nil {
			return err
		}
		out = result
		return haveRead(sub, whole...)
	})
	if refused != nil {
		return nil, refused
	}
	return out, g.computeError(c.Op, err)
}

// takeScratch gives work the memory that it needs on each member. free is called when the work is queued, and after an
// error, too.
func (g *GPU) takeScratch(sub *device.Submission, n *ongpu.Node, work ongpu.Spread, engines []*decoder.Engine) (free func(), err error) {
	all := make([]deviceMemory, len(g.members))
	var frees []func()
	free = func() {
		for _, f := range frees {
			f()
		}
	}
	for i, m := range g.members {
		size, err := work.Needs(i, engines[i])
		if err != nil || size == 0 {
			if err != nil {
				return free, err
			}
			continue
		}
		take := func(sub *device.Submission) error {
			scratch, done, err := m.scratch(sub, n, &n.On(g.group, i).Rest, tensor.Float32, tensor.Shape{size})
			if err != nil {
				return err
			}
			if i > 0 { // the member's own queue hands its memory out
				frees = append(frees, func() {
					_ = m.queue.Submit(func(*device.Submission) error { done(); return nil })
				})
			} else {
				frees = append(frees, done)
			}
			all[i], err = scratch.use(sub)
			return err
		}
		if i > 0 {
			err = m.queue.Submit(take)
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
