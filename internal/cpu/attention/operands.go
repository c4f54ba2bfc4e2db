package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"
)

// spares has the memory of finished runs, which an engine reuses.
type spares[F cpu.Real] struct {
	runs     cpu.Spare[workspace[F]]
	prefixes cpu.Spare[prefixRun[F]]
}

// Operands has the buffers of one layer, in the layout of the plan's Problem:
//
//   - Q, Out and LSE are queries, outputs and log-sum-exps. LSE may be nil.
//   - Pages are the pages of keys and values.
//   - Bias is the Problem's bias, nil without one.
//   - Sinks has a sink for each query head, if the Problem has Sinks.
//   - Tensors are those of the Problem's Variant, in its order.
//   - Entropy, if not nil, has the layout of LSE: the entropies of the rows' weights.
//   - Mass, if not nil, has Tiles numbers for each log-sum-exp, in the same layout: the sums of weights by LeanTiles.
//
// Out, LSE, Entropy and Mass must not overlap the other buffers.
type Operands[F lean.Float] struct {
	Q, Out, LSE []F
	Pages       attn.Memory[cpu.Buffer]
	Bias        []F
	Seed        int64 // of the Problem's Dropout; 0: nothing is dropped
	Sinks       []F
	Tensors     []variant.Tensor
	Entropy     []F
	Mass        []F
	Tiles       int
}

// Sink returns the attention sink of a query head, or -Inf. It is the log-sum-exp of a row without visible keys.
func (o *Operands[F]) Sink(head int) F {
	if o.Sinks == nil {
		return F(math.Inf(-1))
	}
	return o.Sinks[head]
}

// Run computes attention of p on o. It writes every output row of every sequence of the plan, and nothing else. Of keys
// and values it reads live rows only. Everything is checked before anything is written. Errors wrap ErrShape, ErrDType,
// ErrPage, ErrTier, or ErrPanic, after which the outputs are undefined. Run does not allocate once e has run plans of
// this size.
func Run[F lean.Float](e *cpu.Engine, p *Plan, o *Operands[F]) error {
	// F may be a named type, so Run chooses by size.
	if unsafe.Sizeof(F(0)) == 4 {
		return run(e, p, (*Operands[float32])(unsafe.Pointer(o)))
	}
	return run(e, p, (*Operands[float64])(unsafe.Pointer(o)))
}

func run[F cpu.Real](e *cpu.Engine, p *Plan, o *Operands[F]) error {
	if err := cpu.CheckTier(); err != nil {
		return err
	}
	if err := check(p, o); err != nil {
		return err
	}
	if err := checkMass("run", p, o); err != nil {
		return err
	}
	if err := checkEntropy("run", p, o); err != nil {
		return err
	}
	if p.shares {
		return runPrefixes(e, p, o)
	}
	return runOwn(e, p, o)
}

// runOwn is run without prefixes, on checked operands.
func runOwn[F cpu.Real](e *cpu.Engine, p *Plan, o *Operands[F]) error {
	writeMasked(p, o)
	clearMass(p, o)
	clearEntropy(p, o)
	n := p.sched.Workers()
	if n == 0 {
		return nil
	}
	free := &cpu.Own[spares[F]](e).runs
	ws := free.Get()
	ws.prepare(p, o)
	if err := e.RunOn(ws, n, p.threads); err != nil {
		return err // the workspace's counters may be wrong, so it is not reused
	}
	ws.plan, ws.ops = nil, nil
	free.Put(ws)
	return nil
}

// writeMasked writes the outputs of query positions without visible keys, for which no worker has work.
func writeMasked[F cpu.Real](p *Plan, o *Operands[F]) {
	g := &p.g
	for i := range p.seqs {
		s := &p.seqs[i]
		for row := s.row; row < s.row+s.masked; row++ {
			for h := range g.Heads {
				at := row*g.Out.Row + h*g.Out.Head
				clear(o.Out[at : at+g.ValueDim])
				if o.LSE != nil {
					o.LSE[row*g.LSE.Row+h*g.LSE.Head] = o.Sink(h)
				}
			}
		}
	}
}

// check returns an error if o is too small for p or has other types.
func check[F cpu.Real](p *Plan, o *Operands[F]) error {
	const op = "run"
	g := &p.g
	if p.rows == 0 {
		return nil
	}
	if n := g.Query.Extent(p.rows, g.Heads, g.Dim); len(o.Q) < n {
		return attn.Errorf(op, attn.ErrShape, "queries have %d elements, the plan needs %d", len(o.Q), n)
	}
	if n := g.Out.Extent(p.rows, g.Heads, g.ValueDim); len(o.Out) < n {
		return attn.Errorf(op, attn.ErrShape, "the output has %d elements, the plan needs %d", len(o.Out), n)
	}
	if n := g.LSE.Extent(p.rows, g.Heads, 1); o.LSE != nil && len(o.LSE) < n {
		return attn.Errorf(op, attn.ErrShape, "the log-sum-exp has %d elements, the plan needs %d", len(o.LSE), n)
	}
	if n := g.Bias.Size(); len(o.Bias) != n {
		return attn.Errorf(op, attn.ErrShape, "the bias has %d elements, the plan needs %d", len(o.Bias), n)
	}
	if n := len(o.Sinks); g.Sinks && n != g.Heads || !g.Sinks && o.Sinks != nil {
		return attn.Errorf(op, attn.ErrShape, "%d sinks for %d query heads, the plan has sinks: %t", n, g.Heads, g.Sinks)
	}
	if err := p.CheckTensors(o.Tensors); err != nil {
		return attn.Errorf(op, attn.ErrShape, "%v", err)
	}
	if p.lastPage < 0 {
		return nil
	}
	for i := range g.Pages.Planes {
		plane, b, name := &g.Pages.Planes[i], &o.Pages[i].Data, "keys"
		if plane.Dim == 0 {
			break
		}
		if i >= g.Pages.KeyPlanes {
			name = "values"
		}
		if err := b.Check(op, name); err != nil {
			return err
		}
		if b.DType != plane.DType {
			return attn.Errorf(op, attn.ErrDType, "%s are %v, the plan is for %v", name, b.DType, plane.DType)
		}
		if n := plane.At.Extent(p.lastPage+1, g.KVHeads, p.slots, plane.Elements()); b.Len < n {
			return attn.Errorf(op, attn.ErrPage, "page %d of the %s ends at element %d of %d", p.lastPage, name, n, b.Len)
		}
		if plane.Scales == attn.NoScales {
			continue
		}
		scales := &o.Pages[i].Scales
		if err := checkScales(op, scales); err != nil {
			return err
		}
		if n := plane.ScaleLen(p.lastPage+1, g.KVHeads, g.PageTokens); scales.Len < n {
			return attn.Errorf(op, attn.ErrPage, "page %d of the %s ends at scale %d of %d", p.lastPage, name, n, scales.Len)
		}
	}
	return nil
}
