package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// eights are the types of 8 bits, and what tests call them.
var eights = map[attn.DType]reftest.Eight{attn.E4M3: reftest.E4M3, attn.Int8: reftest.Int8}

// hardRow returns a row that is hard to scale.
func hardRow[F lean.Float](rng *rand.Rand, n int) []F {
	row := make([]F, n)
	size := math.Exp2(float64(rng.IntN(30) - 15))
	for i := range row {
		row[i] = F(rng.NormFloat64() * size)
	}
	some := func() *F { return &row[rng.IntN(n)] }
	switch rng.IntN(12) {
	case 0:
		clear(row)
	case 1:
		*some(), *some() = F(math.Inf(1)), F(math.Copysign(0, -1))
	case 2:
		*some() = F(math.Inf(-1))
	case 3:
		*some() = F(math.NaN())
	case 4: // an outlier
		*some() *= 1e5
	case 5:
		*some() = math.MaxFloat32
	case 6: // around the least scale
		for i := range row {
			row[i] = F(rng.NormFloat64() * 448 * 0x1p-126)
		}
	case 7: // subnormal
		for i := range row {
			row[i] = F(rng.NormFloat64() * 0x1p-140)
		}
	case 8: // ties
		for i := range row {
			row[i] = F(rng.IntN(2000)-1000) / 16
		}
		*some() = 448
	}
	return row
}

// TestAppendEight: the bits that are stored are those of the definition in float64, with scales of each kind.
func TestAppendEight(t *testing.T) {
	for range cputest.Cases(t, 20, 60) {
		for d := range eights {
			testAppendEight[float32](t, d)
			testAppendEight[float64](t, d)
		}
	}
}

func testAppendEight[F cpu.Real](t *testing.T, d attn.DType) {
	rng := reftest.Rand(t)
	e, heads, tokens, page, dim := eights[d], 1+rng.IntN(3), 1+rng.IntN(40), 1+rng.IntN(9), 1+rng.IntN(300)
	f := attn.Separate(d, dim, dim, attn.PageStrides{}, attn.PageStrides{}).Packed(heads, page)
	f.Planes[0].Scales, f.Planes[1].Scales, f.Planes[1].Group = attn.ScalesByToken, attn.ScalesByGroup, 1+rng.IntN(dim)
	if rng.IntN(2) == 0 {
		f.Planes[0].Scales, f.Planes[1].Scales, f.Planes[1].Group = attn.ScalesByPage, attn.ScalesByHead, 0
	}
	g := attn.Problem{Heads: heads, KVHeads: heads, Dim: dim, ValueDim: dim, Pages: f, PageTokens: page, Scale: 1}
	pages := attn.Ceil(tokens, page)
	var keep problem[F]
	var to attn.Memory[cpu.Buffer]
	for s := range f.Slabs {
		b := to.At(s)
		*b = keep.buffer(2*s.Plane, s.DType, pages*s.PageBytes(heads, page)/s.DType.Size())
		if s.Scales {
			*b = keep.buffer(2*s.Plane+1, s.DType, pages*s.PageBytes(heads, page)/s.DType.Size())
		}
	}
	given := make([]float64, heads)
	if f.Planes[1].Scales == attn.ScalesByHead {
		to[1].Scales = keep.buffer(3, attn.Float32, heads)
		for h := range given {
			given[h] = math.Exp2(float64(rng.IntN(20) - 10))
		}
		cputest.Store(to[1].Scales.Ptr, attn.Float32, 0, given)
	}
	seqs := []attn.Sequence{{Queries: tokens, Keys: tokens}}
	for _, p := range rng.Perm(pages) {
		seqs[0].Pages = append(seqs[0].Pages, int32(p))
	}
	var rows []F
	for range tokens * heads {
		rows = append(rows, hardRow[F](rng, dim)...)
	}
	var plan Plan
	if err := plan.Build(g, seqs); err != nil {
		t.Fatal(err)
	}
	x := NewRows[F]{rows, attn.PackedRows(heads, dim)}
	if err := AppendLayer(cpu.Default(), &plan, seqs, &to, x, x); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		p, m := &f.Planes[i], &to[i]
		group := dim
		if p.Group > 0 {
			group = p.Group
		}
		for token := range tokens {
			for h := range heads {
				page, slot := int(seqs[0].Pages[token/page]), token%page
				var row []float64
				for _, x := range rows[(token*heads+h)*dim:][:dim] {
					row = append(row, float64(x))
				}
				at, scaleAt := p.At.Offset(page, h, slot), p.ScaleOf(page, h, slot, heads, g.PageTokens)
				for len(row) > 0 {
					part := row[:min(group, len(row))]
					scale := e.Scale(part)
					switch p.Scales {
					case attn.ScalesByHead:
						scale = given[h]
					case attn.ScalesByPage:
						var first []float64
						for _, x := range rows[((token-slot)*heads+h)*dim:][:dim] {
							first = append(first, float64(x))
						}
						scale = e.PageScale(first)
					}
					if got := cputest.Load(m.Scales.Ptr, attn.Float32, scaleAt); math.Float64bits(got) != math.Float64bits(scale) && (got == got || scale == scale) {
						t.Fatalf("%v, %v: scale %v of %v, want %v", d, p.Scales, got, part, scale)
					}
					for j, x := range part {
						want := e.Round(cputest.AccOf[F]().Round(x / scale))
						if got := cputest.Load(m.Data.Ptr, d, at+j); got != want && (got == got || want == want) {
							t.Fatalf("%v, %v: element %v is %v, want %v, scale %v", d, p.Scales, x, got, want, scale)
						}
					}
					at, row, scaleAt = at+len(part), row[len(part):], scaleAt+1
				}
			}
		}
	}
}

// TestEightInPlace attends to packed pages of 8 bits, which kernels read in place, with few and many rows, all masks, score changes and
// trees. Keys that are not visible have NaN as scales.
func TestEightInPlace(t *testing.T) {
	rng := reftest.Rand(t)
	inPlace := 0
	for i := range cputest.Cases(t, 40, 160) {
		s := reftest.RandomShape(rng)
		switch i % 4 {
		case 0:
			s = reftest.RandomScoreMods(rng, s)
		case 1: // sizes with kernels of their own
			rows := []int{1, 1, 2, 7, 40}[rng.IntN(5)]
			s = reftest.Shape{KVHeads: 1 + rng.IntN(2), Queries: []int{rows, 1}, Keys: []int{rows + rng.IntN(1500), 1 + rng.IntN(300)}, Mask: attn.Mask{Causal: true}}
			s.Heads, s.Dim, s.ValueDim = s.KVHeads*[]int{1, 2, 4, 5, 8, 16, 20}[rng.IntN(7)], 16*(1+rng.IntN(8)), 16*(1+rng.IntN(8))
		}
		l := randomLayout(rng)
		l.dtype, l.kind, l.packed, l.slotMajor = []attn.DType{attn.E4M3, attn.Int8}[i%2], scaledTokens, true, false
		in := reftest.AllInputs[rng.IntN(len(reftest.AllInputs))]
		c := reftest.New(rng, s, in, reftest.Float32, reftest.Float32)
		p := place[float32](rng, c, l)
		if readInPlace[float32](&p.g) {
			inPlace++
		}
		if err := p.run(cpu.Default(), randomPolicy(rng), 1+rng.IntN(8), []int{0, 16, 100}[rng.IntN(3)]); err != nil {
			t.Fatal(err)
		}
		if err := p.check(c.Reference(reftest.Precision{Acc: reftest.Float32})); err != nil {
			t.Fatalf("%v, %v, %v: %v", s, in, l, err)
		}
	}
	if inPlace == 0 {
		t.Error("no format was read in place")
	}
}

// BenchmarkEight runs steps on keys and values of 16 and of 8 bits in turn, and prints their speeds in keys. Pages have 64 tokens.
func BenchmarkEight(b *testing.B) {
	for _, heads := range [][3]int{{8, 8, 128}, {32, 8, 128}, {64, 8, 128}, {12, 12, 64}} {
		for _, of := range [][3]int{{1, 1, 4096}, {1, 1, 32768}, {4, 1, 4096}, {1, 64, 4096}} {
			b.Run(fmt.Sprintf("heads=%d,%d,%d/batch=%d/queries=%d/keys=%d", heads[0], heads[1], heads[2], of[0], of[1], of[2]), func(b *testing.B) {
				benchNarrow(b, []attn.DType{attn.Float16, attn.BFloat16, attn.E4M3, attn.Int8}, benchmark{seqs: of[0], heads: heads[0], kvHeads: heads[1], queries: of[1], keys: of[2], dim: heads[2], page: 64})
			})
		}
	}
}

// benchNarrow runs a benchmark with each of some types in turn, in one process.
func benchNarrow(b *testing.B, types []attn.DType, c benchmark) {
	var all []*cputest.Contender
	for _, d := range types {
		c.dtype = d
		g, seqs, o := setUp[float32](c)
		for i := range 2 {
			if p := &g.Pages.Planes[i]; d.Size() == 1 {
				p.Scales = attn.ScalesByToken
				n := p.ScaleLen(len(seqs)*len(seqs[0].Pages), g.KVHeads, g.PageTokens)
				o.Pages[i].Scales = cpu.Buffer{DType: attn.Float32, Ptr: cputest.Noise(attn.Float32, n), Len: n}
			}
		}
		var plan Plan
		if err := plan.Build(g, seqs); err != nil {
			b.Fatal(err)
		}
		all = append(all, &cputest.Contender{Name: d.String(), Work: 1000 * float64(c.seqs*c.kvHeads*c.keys), Run: func() {
			if err := Run(cpu.Default(), &plan, o); err != nil {
				b.Fatal(err)
			}
		}})
	}
	cputest.Compete(b, "M keys/s", all)
}
