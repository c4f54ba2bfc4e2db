package attention

import (
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
