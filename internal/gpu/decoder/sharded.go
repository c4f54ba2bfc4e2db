package decoder

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Linear layers whose weights are dealt out over the GPUs of a group: each computes some columns of y, so that
// nothing has to be added up. x and y are in the first GPU's memory, which all of them reach.

// Sharded is a [Linear] of a group: each member has some rows of W, and makes these columns of Y.
type Sharded struct {
	// Linear is the whole of it, in the first GPU's memory. Of W its Parts say the type alone.
	Linear Linear
	Shards [][]Shard // of each member, of each part

	// Scratch is memory of each member for what lies between: as many elements as [Engine.ShardScratch] says. All read
	// that of the first.
	Scratch []gpu.Memory
}

// Shard is what a member has of a part: rows [First, First+Out) of W, and of B, which is whole if there is no buffer
// here.
type Shard struct {
	First, Out int
	W, B       gpu.Memory
}

// scratch hands out memory, or says how much it would be.
type scratch struct {
	of   gpu.Memory
	used int // elements
}

// take is n elements.
func (r *scratch) take(n int) gpu.Memory {
	m := gpu.Memory{Buffer: r.of.Buffer, Offset: r.of.Offset + int64(r.used)*4, DType: attn.Float32, Len: n}
	r.used += attn.Ceil(n, 4) * 4
	return m
}

// rest is what is left.
func (r *scratch) rest() gpu.Memory { return r.take(max(r.of.Len-r.used, 0)) }

// elementsFrom is n elements from one on of what has more, in place.
func elementsFrom(m gpu.Memory, first, n int) gpu.Memory {
	m.Offset += int64(first) * 4
	m.Len = n
	return m
}

// inPlace says whether kernels may read or write elements from one on.
func inPlace(first int) bool { return first%4 == 0 }

// direct says whether each member's columns lie together in Y, where kernels can write them.
func (o *Sharded) direct() bool {
	if o.Linear.Rows > 1 {
		return false
	}
	for _, shards := range o.Shards {
		for i := range shards {
			if !inPlace(shards[i].First) {
				return false
			}
		}
	}
	return true
}

// share is what a member does: copies, its columns as a Linear, and copies.
type share struct {
	before []Move
	linear Linear
	after  []Move
	used   int // of its scratch, but for what is the Linear's
}

// share is that of a member. The memory of its scratch need not be there.
func (o *Sharded) share(member int) (s share) {
	var mine scratch
	if member < len(o.Scratch) {
		mine.of = o.Scratch[member]
	}
	all := &o.Linear
	s.linear = *all
	s.linear.Norm, s.linear.Residual = nil, gpu.Memory{}
	s.linear.Parts = make([]LinearPart, len(all.Parts))
	x := o.x()
	if member > 0 {
		s.linear.X = mine.take(all.Rows * all.In)
		s.before = append(s.before, Move{flat(all.Rows * all.In), x, s.linear.X})
	} else {
		s.linear.X = x
		if all.Norm != nil {
			mine.take(all.Rows * all.In)
		}
	}
	direct := o.direct()
	for i := range all.Parts {
		whole, shard, part := &all.Parts[i], &o.Shards[member][i], &s.linear.Parts[i]
		*part = LinearPart{W: shard.W, B: shard.B, Out: shard.Out}
		if whole.B.Buffer != nil && shard.B.Buffer == nil {
			if part.B = elementsFrom(whole.B, shard.First, shard.Out); !inPlace(shard.First) {
				part.B = mine.take(shard.Out)
				from := flat(shard.Out)
				from.From.At = shard.First
				s.before = append(s.before, Move{from, whole.B, part.B})
			}
		}
		if all.Gate && i > 0 { // the gate's y is that of both
			continue
		}
		if direct {
			part.Y = elementsFrom(whole.Y, shard.First, shard.Out)
			continue
		}
		part.Y = mine.take(all.Rows * shard.Out)
		s.after = append(s.after, Move{attn.Move{
			Dims: [3]int{1, 1, all.Rows}, N: shard.Out,
			From: attn.Lattice{Steps: [3]int{0, 0, shard.Out}}, To: attn.Lattice{At: shard.First, Steps: [3]int{0, 0, whole.Out}},
		}, part.Y, whole.Y})
	}
	if direct && all.Residual.Buffer != nil {
		s.linear.Residual = elementsFrom(all.Residual, o.Shards[member][0].First, o.Shards[member][0].Out)
	}
	s.used = mine.used
	s.linear.Scratch = mine.rest()
	return s
}

// flat is a move of elements that lie together.
func flat(n int) attn.Move { return attn.Move{Dims: [3]int{1, 1, 1}, N: n} }

// x is what the layers read, in the first GPU's memory: x, or its norm, which the first one makes.
func (o *Sharded) x() gpu.Memory {
	if o.Linear.Norm == nil {
		return o.Linear.X
	}
	var first scratch
	if len(o.Scratch) > 0 {
		first.of = o.Scratch[0]
	}
	return first.take(o.Linear.Rows * o.Linear.In)
}

// ShardScratch is how many float32 a member needs as its scratch, of what the types and sizes of the operands say. d is
// the member's. The error is the driver's.
func (d *Engine) ShardScratch(o *Sharded, member int) (int, error) {
	s := o.share(member)
	n, err := d.Scratch(&s.linear)
	return s.used + n, err
}

// BeforeShards queues what the first member does before the others begin: the norm of x. It checks the shares of
// all members; errors wrap attn.ErrShape, attn.ErrDType, or are the driver's.
func (d *Engine) BeforeShards(s *cuda.Stream, o *Sharded) error {
	all := &o.Linear
	if len(all.Parts) > 1 && all.Residual.Buffer != nil && !all.Gate {
		return gpu.Errorf("linear", attn.ErrShape, "a residual of %d layers", len(all.Parts))
	}
	for i := range o.Shards {
		share := o.share(i)
		if err := share.linear.check(); err != nil {
			return err
		}
	}
	switch n := all.Norm; {
	case n == nil:
		return nil
	case n.RMS:
		return d.RMSNorm(s, &RMSNorm{Rows: all.Rows, N: all.In, Eps: n.Eps, UnitOffset: n.UnitOffset, X: all.X, Gamma: n.Gamma, Y: o.x()})
	default:
		return d.Norm(s, all.Rows, all.In, all.X, o.x(), n)
	}
}

// Shard queues the share of a member, whose d is.
func (d *Engine) Shard(s *cuda.Stream, o *Sharded, member int) error {
	share := o.share(member)
	for i := range share.before {
		if err := d.Move(s, &share.before[i]); err != nil {
			return err
		}
	}
	if err := d.Linear(s, &share.linear); err != nil {
		return err
	}
	for i := range share.after {
		if err := d.Move(s, &share.after[i]); err != nil {
			return err
		}
	}
	return nil
}

// AfterShards queues what the first member does when all are done: the residual, where they could not add it.
func (d *Engine) AfterShards(s *cuda.Stream, o *Sharded) error {
	all := &o.Linear
	if all.Residual.Buffer == nil || o.direct() {
		return nil
	}
	y := all.Parts[0].Y
	return d.Elements(s, &Elements{N: all.Rows * all.Parts[0].Out, X: y, Plus: all.Residual, Y: y})
}
