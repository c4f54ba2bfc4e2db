package layers

import (
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Gather is the operands of y[i] = Table[IDs[i]] + Residual[i], of rows of N elements. Table has TableRows rows of
// any type of the kernels, IDs are int32, the others float32. A row with an id outside the table becomes NaN.
type Gather struct {
	Rows, N, TableRows      int
	Table, IDs, Residual, Y gpu.Memory
	Packed                  *weight.Packed // nil: Table has rows of elements
}

// ids returns the memory of IDs with an element type of the same width.
func (o *Gather) ids() gpu.Memory {
	m := o.IDs
	m.DType = attn.Float32
	return m
}

// check checks everything except the type of IDs.
func (o *Gather) check() error {
	const op = "gather"
	if o.Rows < 1 || o.N < 1 || o.TableRows < 1 || max(o.Rows, o.N, o.TableRows) > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements from a table of %d", o.Rows, o.N, o.TableRows)
	}
	if o.Packed != nil {
		if err := o.checkNarrow(op); err != nil {
			return err
		}
	} else if err := o.Table.Check(op, "the table", o.TableRows*o.N); err != nil {
		return err
	}
	ids := o.ids()
	if err := ids.Check(op, "the ids", o.Rows); err != nil {
		return err
	}
	if err := o.Residual.CheckOptional(op, "the residual", o.Rows*o.N); err != nil {
		return err
	}
	return o.Y.CheckFloats(op, "y", o.Rows*o.N)
}

// gatherParams is struct GatherParams.
type gatherParams struct {
	table, ids, residual, y uint64
	second, secondIDs, sum  uint64
	n, rows, dtype          int32
	secondRows, secondType  int32
	_                       [4]byte
}

// params returns the parameters of a launch of o and, if then is not nil, of the Gather whose residual is o's result.
func (o *Gather) params(then *Gather) gatherParams {
	p := gatherParams{table: o.Table.Address(), ids: o.IDs.Address(), residual: o.Residual.AddressOr0(), y: o.Y.Address(),
		n: int32(o.N), rows: int32(o.TableRows), dtype: gpu.Code(o.Table.DType)}
	if then != nil {
		p.second, p.secondIDs, p.sum = then.Table.Address(), then.IDs.Address(), then.Y.Address()
		p.secondRows, p.secondType = int32(then.TableRows), gpu.Code(then.Table.DType)
	}
	return p
}

// Gather queues a Gather.
func (d *Engine) Gather(s *cuda.Stream, o *Gather) error { return d.gatherBoth(s, o, nil) }

// gatherBoth queues o and, if then is not nil, the Gather whose residual is o's result, in one launch.
func (d *Engine) gatherBoth(s *cuda.Stream, o, then *Gather) error {
	if err := o.check(); err != nil {
		return err
	}
	if o.Packed != nil {
		return d.gatherNarrow(s, o)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.args.Reset()
	p := o.params(then)
	cuda.Struct(&d.args, &p)
	if then != nil {
		d.hold(then.Table, then.IDs, then.Y)
	}
	d.hold(o.Table, o.IDs, o.Residual, o.Y)
	return d.gather.Launch(s, cuda.Grid{Blocks: [3]int{o.Rows}, Threads: [3]int{rowThreads}, Overlap: d.overlap(), Waits: true}, &d.args)
}

// Gathers is a Gather that waits for Queue, so that a Gather which adds rows of another table joins the launch:
// tokens and positions. Gathers copies its operands. Gathers is not safe for use by several goroutines at once.
type Gathers struct {
	d     *Engine
	first Gather
	then  *Gather
}

// NewGathers makes a Gathers; nil for invalid operands, which [Engine.Gather] reports.
func (d *Engine) NewGathers(o *Gather) *Gathers {
	if o.check() != nil || o.Packed != nil {
		return nil
	}
	return &Gathers{d: d, first: *o}
}

// Then adds a Gather whose residual is the first one's result. Then returns false if one of them writes what the
// other reads besides: both run at the same time.
func (g *Gathers) Then(o *Gather) bool {
	f := &g.first
	if g.then != nil || o.check() != nil || o.Packed != nil || o.Rows != f.Rows || o.N != f.N || o.Residual.Buffer == nil || o.Residual.Address() != f.Y.Address() {
		return false
	}
	spans := func(o *Gather) []span {
		ids := o.ids()
		return []span{spanOf(&o.Table, o.TableRows*o.N), spanOf(&ids, o.Rows)}
	}
	y, sum := spanOf(&f.Y, f.Rows*f.N), spanOf(&o.Y, o.Rows*o.N)
	reads := spans(f)
	if f.Residual.Buffer != nil {
		reads = append(reads, spanOf(&f.Residual, f.Rows*f.N))
	}
	if y.meets(spans(o)) || sum.meets(slices.Concat(reads, []span{y})) {
		return false
	}
	then := *o
	g.then = &then
	return true
}

// params returns the parameters of the launch.
func (g *Gathers) params() gatherParams { return g.first.params(g.then) }

// all returns the one Gather, or both.
func (g *Gathers) all() []*Gather {
	if g.then == nil {
		return []*Gather{&g.first}
	}
	return []*Gather{&g.first, g.then}
}

// result returns the memory of the last result.
func (g *Gathers) result() *gpu.Memory {
	all := g.all()
	return &all[len(all)-1].Y
}

// Queue queues the launch.
func (g *Gathers) Queue(s *cuda.Stream) error { return g.d.gatherBoth(s, &g.first, g.then) }

// Upload and Close do nothing: there is no memory besides the operands.
func (g *Gathers) Upload() error { return nil }

func (g *Gathers) Close() error { return nil }
