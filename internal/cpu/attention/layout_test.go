package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// problem is a reftest.Case in a hostile memory layout: rows and pages of sequences in random places, NaN in memory
// that must not be read, and invalid page table entries after the live ones.
type problem[F cpu.Real] struct {
	c    *reftest.Case
	g    attn.Problem
	seqs []attn.Sequence
	ops  Operands[F]
	keep [2 * attn.MostPlanes][]uint64 // memory of the planes and of their scales
}

// layout describes a problem's memory layout.
type layout struct {
	dtype     attn.DType
	page      int  // tokens
	slotMajor bool // heads inside slots instead of slots inside heads
	kind      formatKind
	packed    bool // nothing between rows, heads and pages
}

// formatKind is a kind of format of pages.
type formatKind int

const (
	plain       formatKind = iota
	inKeys                 // values are parts of keys
	sideBySide             // keys are two planes, of two types
	scaledHeads            // scales of each kind
	scaledPages
	scaledTokens
	scaledGroups
	latent // two planes: the first has scales of column groups, and values are a part of it
	formatKinds
)

// pages returns the format of c's keys and values. If values are to be parts of keys, it changes the values
// accordingly.
func (l layout) pages(rng *rand.Rand, c *reftest.Case, pad int) attn.Format {
	f := attn.Separate(l.dtype, c.Dim, c.ValueDim, attn.PageStrides{}, attn.PageStrides{})
	wide := attn.Float32 // holds the case's numbers exactly
	if l.dtype == attn.Float64 {
		wide = attn.Float64
	}
	split := 0
	if k := l.kind; (k == sideBySide || k == latent) && c.Dim > 1 {
		least := 1
		if k == latent && c.ValueDim < c.Dim {
			least = c.ValueDim // each layout of one case has its values in the first plane
		}
		split = least + rng.IntN(c.Dim-least)
		f.Planes[2], f.KeyPlanes, f.Value.Plane = f.Planes[1], 2, 2
		f.Planes[0].Dim, f.Planes[1] = split, attn.Plane{DType: wide, Dim: c.Dim - split}
	}
	if part := f.Planes[0].Dim; l.kind == inKeys || l.kind == latent {
		if c.ValueDim > part {
			return layout{dtype: l.dtype, page: l.page, slotMajor: l.slotMajor}.pages(rng, c, pad)
		}
		f.Value.Plane, f.Planes[f.KeyPlanes] = 0, attn.Plane{}
		for s, n := range c.Keys {
			for j := range n {
				for h := range c.KVHeads {
					copy(c.Value(s, j, h), c.Key(s, j, h))
				}
			}
		}
	}
	for i := range f.Planes {
		p := &f.Planes[i]
		if p.Dim == 0 {
			break
		}
		switch {
		case l.kind == latent && i == 0, l.kind == scaledGroups:
			p.Scales, p.Group = attn.ScalesByGroup, 1+rng.IntN(p.Dim)
		case l.kind >= scaledHeads && l.kind < scaledGroups:
			p.Scales = attn.ScalesByHead + attn.Scales(l.kind-scaledHeads)
		}
		p.At = pageStrides(l, c.KVHeads, p.Elements(), pad)
		p.Mixed = p.DType == attn.Q4 && i == 0
	}
	return f
}

func (l layout) String() string {
	return fmt.Sprintf("%v pages of %d slotMajor=%v kind %d", l.dtype, l.page, l.slotMajor, l.kind)
}

func randomLayout(rng *rand.Rand) layout {
	return layout{
		dtype:     cputest.Floats[rng.IntN(len(cputest.Floats))],
		page:      []int{1, 2, 3, 7, 16, 32, 33, 128, 1000}[rng.IntN(9)],
		slotMajor: rng.IntN(2) == 0,
	}
}

// place lays out c in memory.
func place[F cpu.Real](rng *rand.Rand, c *reftest.Case, l layout) *problem[F] {
	p := &problem[F]{c: c}
	h, d, dv := c.Heads, c.Dim, c.ValueDim
	pad := rng.IntN(3)
	if l.packed {
		pad = 0
	}
	p.g = attn.Problem{
		Heads: h, KVHeads: c.KVHeads, Dim: d, ValueDim: dv, Pages: l.pages(rng, c, pad),
		Query: attn.Strides{Row: h*(d+pad) + pad, Head: d + pad},
		Out:   attn.Strides{Row: h*(dv+pad) + pad, Head: dv + pad},
		LSE:   attn.Strides{Row: h + pad, Head: 1},

		PageTokens: l.page,
		Scale:      c.Scale,
		Mask:       c.Mask,
		Score:      attn.Score{Cap: c.SoftCap, Slopes: attn.NewSlopes(c.Slopes), Bias: cputest.BiasOf(c.Bias), Sinks: c.Sinks != nil, Dropout: c.Dropout, Variant: c.Variant},
	}
	p.ops.Seed, p.ops.Tensors = c.Seed, cputest.TensorsOf[F](c.Tensors)
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

	// Pages: a random subset of a pool. The rest of the pool is NaN.
	pool := 2
	for _, n := range c.Keys {
		pool += attn.Ceil(n, l.page) + 1
	}
	free := rng.Perm(pool)
	for i := range p.g.Pages.Planes {
		if x := &p.g.Pages.Planes[i]; x.Dim > 0 {
			p.ops.Pages[i].Data = p.buffer(2*i, x.DType, pool*x.At.Page)
			p.ops.Pages[i].Scales = p.buffer(2*i+1, attn.Float32, x.ScaleLen(pool, c.KVHeads, l.page))
		}
	}
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

// storeKeys writes the first n keys and values of a sequence. Keys that are not visible to its queries stay NaN, unless
// another sequence has written them.
func (p *problem[F]) storeKeys(s, n int) {
	c, q := p.c, &p.seqs[s]
	for j := range n {
		if q.Queries > 0 && j < c.First(s, 0) && j >= c.SinkKeys(s, 0) {
			continue
		}
		page, slot := int(q.Pages[j/p.g.PageTokens]), j%p.g.PageTokens
		for head := range c.KVHeads {
			key := c.Key(s, j, head)
			for i := range p.g.Pages.KeyPlanes {
				dim := p.g.Pages.Planes[i].Dim
				p.storeRow(i, page, head, slot, key[:dim])
				key = key[dim:]
			}
			if i := p.g.Pages.Value.Plane; i >= p.g.Pages.KeyPlanes {
				p.storeRow(i, page, head, slot, c.Value(s, j, head))
			} else {
				copy(c.Value(s, j, head), c.Key(s, j, head)) // 8 bits change it
			}
		}
	}
}

// storeRow stores a row of a plane. Scales are powers of two, so only small numbers of float16 are rounded. Elements of 8 or
// 4 bits are rounded, and then row has what is stored. Their scales fit the row, unless other rows have the same.
func (p *problem[F]) storeRow(plane, page, head, slot int, row []float64) {
	x, m := &p.g.Pages.Planes[plane], &p.ops.Pages[plane]
	at, group := x.At.Offset(page, head, slot), len(row)
	scaleAt := x.ScaleOf(page, head, slot, p.g.KVHeads, p.g.PageTokens)
	if x.Scales == attn.ScalesByGroup {
		group = x.Group
	}
	for ; len(row) > 0; scaleAt++ {
		part, scale := slices.Clone(row[:min(group, len(row))]), 1.0
		if x.Scales != attn.NoScales {
			scale = math.Ldexp(1, scaleAt*7%5)
			if x.DType.Size() == 1 && x.Scales >= attn.ScalesByToken {
				scale = float64(scaleOf(part, largestOf[x.DType]))
			}
			cputest.Store(m.Scales.Ptr, attn.Float32, scaleAt, []float64{scale})
		}
		for i := range part {
			part[i] /= scale
		}
		cputest.Store(m.Data.Ptr, x.DType, at, part)
		if x.DType == attn.Q4 {
			half.DecodeQ4(row, unsafe.Slice((*half.Q4)(m.Data.At(at)), x.Elements()))
		}
		if x.DType.Size() == 1 {
			for i := range part {
				row[i] = float64(F(cputest.Load(m.Data.Ptr, x.DType, at+i)) * F(scale))
			}
		}
		at, row = at+len(part), row[len(part):]
	}
}

func pageStrides(l layout, heads, dim, pad int) attn.PageStrides {
	row := dim + pad
	if l.slotMajor {
		return attn.PageStrides{Page: l.page*heads*row + pad, Head: row, Row: heads * row}
	}
	return attn.PageStrides{Page: l.page*heads*row + pad, Head: l.page * row, Row: row}
}

// buffer returns memory for n elements of NaN.
func (p *problem[F]) buffer(i int, d attn.DType, n int) cpu.Buffer {
	p.keep[i] = make([]uint64, n*d.Size()/8+1)
	for j := range p.keep[i] {
		p.keep[i][j] = math.MaxUint64 // all ones are NaN in all dtypes but one
		if d == attn.Int8 {
			p.keep[i][j] = 0x8080808080808080
		}
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

// forget resets the outputs to untouched.
func (p *problem[F]) forget() {
	copy(p.ops.Out, cputest.Filled[F](len(p.ops.Out)))
	copy(p.ops.LSE, cputest.Filled[F](len(p.ops.LSE)))
}

// check compares the outputs with the reference, and checks that the memory between them is unchanged.
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
			return fmt.Errorf("out[%d], which is unassigned, was written: %v", i, x)
		}
	}
	for i, x := range p.ops.LSE {
		if !lses[i] && !cputest.IsUntouched(x) {
			return fmt.Errorf("lse[%d], which is unassigned, was written: %v", i, x)
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
