package layers

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Linear layers with weights sharded over the GPUs of a group: each GPU computes some columns of y, so that no sum is
// needed. x and y are in the first GPU's memory, which all GPUs reach.

// Sharded is a [Linear] of a group: each member has some rows of W, and computes these columns of Y.
type Sharded struct {
	// Linear is the whole layer, in the first GPU's memory. W of its Parts has a type alone.
	Linear Linear
	Shards [][]Shard // by member and part

	// Scratch is temporary memory of each member: as many elements as [Engine.ShardScratch] returns. All members read
	// the first member's.
	Scratch []gpu.Memory
}

// Shard is a member's piece of a part: rows [First, First+Out) of W, and of B, which is whole if the shard has no
// buffer.
type Shard struct {
	First, Out int
	W, B       gpu.Memory
	Packed     *weight.Packed // nil: W has rows of elements
}

// scratch allocates from a memory, or counts how much is needed.
type scratch struct {
	of   gpu.Memory
	used int // elements
}

// take returns n elements.
func (r *scratch) take(n int) gpu.Memory { return r.takeOf(n, attn.Float32) }

// takeOf returns n elements of another type.
func (r *scratch) takeOf(n int, t attn.DType) gpu.Memory {
	m := gpu.Memory{Buffer: r.of.Buffer, Offset: r.of.Offset + int64(r.used)*4, DType: t, Len: n}
	r.used += attn.Ceil(attn.Product(n, t.Size()), 16) * 4
	return m
}

// align lets the next piece begin at a multiple of 128 bytes: kernels copy whole lines faster.
func (r *scratch) align() { r.used = attn.Ceil(r.used, 32) * 32 }

// rest returns the remaining elements.
func (r *scratch) rest() gpu.Memory { return r.take(max(r.of.Len-r.used, 0)) }

// elementsFrom returns n elements of m from first on, in place.
func elementsFrom(m gpu.Memory, first, n int) gpu.Memory {
	m.Offset += int64(first) * 4
	m.Len = n
	return m
}

// inPlace reports whether kernels may read or write elements from first on.
func inPlace(first int) bool { return first%4 == 0 }

// direct reports whether each member's columns are contiguous in Y and kernels can write them.
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

// share is a member's work: copies, its columns as a Linear, and copies.
type share struct {
	before []Move
	linear Linear
	after  []Move
	used   int // elements of its scratch before the Linear's
}

// share returns the work of a member. The memory of its scratch may be missing.
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
		*part = LinearPart{W: shard.W, B: shard.B, Out: shard.Out, Packed: shard.Packed}
		if whole.B.Buffer != nil && shard.B.Buffer == nil {
			if part.B = elementsFrom(whole.B, shard.First, shard.Out); !inPlace(shard.First) {
				part.B = mine.take(shard.Out)
				from := flat(shard.Out)
				from.From.At = shard.First
				s.before = append(s.before, Move{from, whole.B, part.B})
			}
		}
		if all.Gate && i > 0 { // the gate's y is the y of both
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

// flat returns a move of contiguous elements.
func flat(n int) attn.Move { return attn.Move{Dims: [3]int{1, 1, 1}, N: n} }

// x returns the layers' input in the first GPU's memory: x, or its norm, which the first GPU makes.
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

// ShardScratch returns how many float32 a member needs as scratch, by the types and sizes of the operands. d is the
// member's engine. The error is the driver's.
func (d *Engine) ShardScratch(o *Sharded, member int) (int, error) {
	s := o.share(member)
	n, err := d.Scratch(&s.linear)
	return s.used + n, err
}

// BeforeShards queues the first member's work before the others begin: the norm of x. BeforeShards checks the shares
// of all members; errors wrap attn.ErrShape, attn.ErrDType, or are the driver's.
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

// Shard queues the share of a member. d is the member's engine.
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

// AfterShards queues the first member's work after all members are done: the residual, if they could not add it.
func (d *Engine) AfterShards(s *cuda.Stream, o *Sharded) error {
	all := &o.Linear
	if all.Residual.Buffer == nil || o.direct() {
		return nil
	}
	y := all.Parts[0].Y
	return d.Elements(s, &Elements{N: all.Rows * all.Parts[0].Out, X: y, Plus: all.Residual, Y: y})
}
