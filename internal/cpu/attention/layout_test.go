package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// problem is a reftest.Case in memory, laid out as hostile as can be: sequences' rows and pages in
// random places, NaN wherever nothing may be read, and page tables that go on with nonsense.
type problem[F cpu.Real] struct {
	c    *reftest.Case
	g    attn.Problem
	seqs []attn.Sequence
	ops  Operands[F]
	keep [2][]uint64 // the memory of K and V
}

// layout says how a problem lies in memory.
type layout struct {
	dtype     attn.DType
	page      int  // tokens
	slotMajor bool // heads inside slots instead of slots inside heads
}

func (l layout) String() string {
	return fmt.Sprintf("%v pages of %d slotMajor=%v", l.dtype, l.page, l.slotMajor)
}

func randomLayout(rng *rand.Rand) layout {
	return layout{
		dtype:     attn.DType(rng.IntN(attn.DTypes)),
		page:      []int{1, 2, 3, 7, 16, 32, 33, 128, 1000}[rng.IntN(9)],
		slotMajor: rng.IntN(2) == 0,
	}
}

// place lays c out.
func place[F cpu.Real](rng *rand.Rand, c *reftest.Case, l layout) *problem[F] {
	p := &problem[F]{c: c}
	h, d, dv := c.Heads, c.Dim, c.ValueDim
	pad := rng.IntN(3)
	p.g = attn.Problem{
		Heads: h, KVHeads: c.KVHeads, Dim: d, ValueDim: dv, KV: l.dtype,
		Query:      attn.Strides{Row: h*(d+pad) + pad, Head: d + pad},
		Out:        attn.Strides{Row: h*(dv+pad) + pad, Head: dv + pad},
		LSE:        attn.Strides{Row: h + pad, Head: 1},
		Key:        pageStrides(l, c.KVHeads, d, pad),
		Value:      pageStrides(l, c.KVHeads, dv, pad),
		PageTokens: l.page,
		Scale:      c.Scale,
		Mask:       c.Mask,
		Score:      attn.Score{Cap: c.SoftCap, Slopes: attn.NewSlopes(c.Slopes), Bias: cputest.BiasOf(c.Bias), Sinks: c.Sinks != nil, Dropout: c.Dropout},
	}
	p.ops.Seed = c.Seed
	p.ops.Bias = reftest.Convert[F](c.DenseBias())
	if c.Sinks != nil {
		p.ops.Sinks = reftest.Convert[F](c.Sinks)
	}

	// Rows: sequences in random order with gaps.
	rows := 0
	p.seqs = make([]attn.Sequence, len(c.Queries))
	for _, s := range rng.Perm(len(c.Queries)) {
		rows += rng.IntN(3)
		p.seqs[s] = attn.Sequence{Row: rows, Queries: c.Queries[s], Keys: c.Keys[s], Tree: c.TreeOf(s)}
		rows += c.Queries[s]
	}
	p.ops.Q = cputest.Filled[F](rows*p.g.Query.Row + h*(d+pad))
	p.ops.Out = cputest.Filled[F](rows*p.g.Out.Row + h*(dv+pad))
	p.ops.LSE = cputest.Filled[F](rows*p.g.LSE.Row + h)
	for s := range p.seqs {
		for i := range c.Queries[s] {
			for head := range h {
				at := (p.seqs[s].Row+i)*p.g.Query.Row + head*p.g.Query.Head
				for j, x := range c.Query(s, i, head) {
					p.ops.Q[at+j] = F(x)
				}
			}
		}
	}

	// Pages: a random subset of a pool, the rest of which is NaN.
	pool := 2
	for _, n := range c.Keys {
		pool += attn.Ceil(n, l.page) + 1
	}
	free := rng.Perm(pool)
	p.ops.K = p.buffer(0, l.dtype, pool*p.g.Key.Page)
	p.ops.V = p.buffer(1, l.dtype, pool*p.g.Value.Page)
	for s := range p.seqs {
		q := &p.seqs[s]
		for range attn.Ceil(q.Keys, l.page) {
			q.Pages = append(q.Pages, int32(free[0]))
			free = free[1:]
		}
		p.storeKeys(s, q.Keys)
		q.Pages = append(q.Pages, 2147480000, -7)
	}
	return p
}

// storeKeys writes the first n keys and values of a sequence. What no query of it sees is left as it is: NaN, unless
// another sequence has it.
func (p *problem[F]) storeKeys(s, n int) {
	c, q := p.c, &p.seqs[s]
	for j := range n {
		if q.Queries > 0 && j < c.First(s, 0) && j >= c.SinkKeys(s, 0) {
			continue
		}
		page, slot := int(q.Pages[j/p.g.PageTokens]), j%p.g.PageTokens
		for head := range c.KVHeads {
			cputest.Store(p.ops.K.Ptr, p.ops.K.DType, page*p.g.Key.Page+head*p.g.Key.Head+slot*p.g.Key.Row, c.Key(s, j, head))
			cputest.Store(p.ops.V.Ptr, p.ops.V.DType, page*p.g.Value.Page+head*p.g.Value.Head+slot*p.g.Value.Row, c.Value(s, j, head))
		}
	}
}

func pageStrides(l layout, heads, dim, pad int) attn.PageStrides {
	row := dim + pad
	if l.slotMajor {
		return attn.PageStrides{Page: l.page*heads*row + pad, Head: row, Row: heads * row}
	}
	return attn.PageStrides{Page: l.page*heads*row + pad, Head: l.page * row, Row: row}
}

// buffer returns storage for n elements of NaN.
func (p *problem[F]) buffer(i int, d attn.DType, n int) cpu.Buffer {
	p.keep[i] = make([]uint64, n*d.Size()/8+1)
	for j := range p.keep[i] {
		p.keep[i][j] = math.MaxUint64 // all ones are NaN in all four dtypes
	}
	return cpu.Buffer{DType: d, Ptr: unsafe.Pointer(&p.keep[i][0]), Len: n}
}

// run plans and runs the problem on fresh outputs.
func (p *problem[F]) run(e *cpu.Engine, policy lean.Policy, workers, tileTokens int) error {
	g := p.g
	g.Policy, g.Workers, g.TileTokens = policy, workers, tileTokens
	var plan Plan
	if err := plan.Build(g, p.seqs); err != nil {
		return err
	}
	p.forget()
	return Run(e, &plan, &p.ops)
}

// forget makes the outputs untouched again.
func (p *problem[F]) forget() {
	copy(p.ops.Out, cputest.Filled[F](len(p.ops.Out)))
	copy(p.ops.LSE, cputest.Filled[F](len(p.ops.LSE)))
}

// check compares the outputs with the reference, and what lies between them with what was there before.
func (p *problem[F]) check(want *reftest.Result) error {
	owned, lses := make([]bool, len(p.ops.Out)), make([]bool, len(p.ops.LSE))
	out := func(seq, pos, head, i int) float64 {
		at := (p.seqs[seq].Row+pos)*p.g.Out.Row + head*p.g.Out.Head + i
		owned[at] = true
		return float64(p.ops.Out[at])
	}
	lse := func(seq, pos, head int) float64 {
		at := (p.seqs[seq].Row+pos)*p.g.LSE.Row + head*p.g.LSE.Head
		lses[at] = true
		return float64(p.ops.LSE[at])
	}
	if err := want.CompareO(out); err != nil {
		return fmt.Errorf("out: %w", err)
	}
	if p.ops.LSE != nil {
		if err := want.CompareLSE(lse); err != nil {
			return fmt.Errorf("lse: %w", err)
		}
	}
	for i, x := range p.ops.Out {
		if !owned[i] && !cputest.IsUntouched(x) {
			return fmt.Errorf("out[%d], which is nobody's, was written: %v", i, x)
		}
	}
	for i, x := range p.ops.LSE {
		if !lses[i] && !cputest.IsUntouched(x) {
			return fmt.Errorf("lse[%d], which is nobody's, was written: %v", i, x)
		}
	}
	return nil
}

// bits returns a copy of all outputs, to compare bitwise.
func (p *problem[F]) bits() []uint64 {
	var b []uint64
	for _, x := range [][]F{p.ops.Out, p.ops.LSE} {
		for _, y := range x {
			b = append(b, math.Float64bits(float64(y)))
		}
	}
	return b
}
