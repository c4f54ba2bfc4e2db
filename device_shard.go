package leanattention

import (
	"errors"
	"fmt"

	"gorgonia.org/leanattention/internal/device"

	"gorgonia.org/tensor"
)

// UploadSharded is [GPU.Upload] to several GPUs, a part to each: what an axis has is dealt
// out to the [GPU.Members], in order and evenly. Keys and values that are sharded by heads
// are what [Attend] and [Attention] need to compute on all of them: q, the output and the
// log-sum-exp are whole, on the first one.
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

// shardedError is the use of a sharded tensor where a whole one is needed.
type shardedError struct {
	axis int
	gpu  *GPU
}

func (e *shardedError) Error() string {
	return fmt.Sprintf("sharded on axis %d over %v", e.axis, e.gpu)
}

// eachPiece visits what lies together both in a shard and in the whole: n bytes of the
// shard from one on, and where they are in the whole.
func (d *DeviceTensor) eachPiece(shard, from, n int, visit func(at, n int)) {
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
	for i, s := range d.shards {
		total := int(s.bytes())
		for at := 0; at < total; at += pieceBytes {
			if err := d.movePiece(i, at, min(pieceBytes, total-at), whole, in); err != nil {
				return err
			}
		}
	}
	return nil
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
		d.eachPiece(shard, at, n, func(from, n int) { piece = piece[copy(piece, whole[from:from+n]):] })
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
	d.eachPiece(shard, at, n, func(to, n int) { piece = piece[copy(whole[to:to+n], piece):] })
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
