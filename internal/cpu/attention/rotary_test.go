package attention

import (
	"errors"
	"math"
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"

	"pgregory.net/rapid"
)

// A head that is rotated back is unchanged. Elements before and after the pairs stay. A head may be rotated in place.
func TestTurn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs, rest := rapid.IntRange(1, 20).Draw(t, "pairs"), rapid.IntRange(0, 9).Draw(t, "rest")
		interleaved := rapid.Bool().Draw(t, "interleaved")
		before := rapid.IntRange(0, 9).Draw(t, "before")
		x := rapid.SliceOfN(rapid.Float64Range(-100, 100), before+2*pairs+rest, before+2*pairs+rest).Draw(t, "x")
		cos, sin, back := make([]float64, pairs), make([]float64, pairs), make([]float64, pairs)
		for i := range cos {
			sin[i], cos[i] = math.Sincos(rapid.Float64Range(-4, 4).Draw(t, "angle"))
			back[i] = -sin[i]
		}
		y := make([]float64, len(x))
		Turn(y, x, before, cos, sin, interleaved)
		z := slices.Clone(x)
		if Turn(z, z, before, cos, sin, interleaved); !slices.Equal(y, z) {
			t.Fatalf("%v where it is, %v elsewhere", z, y)
		}
		if end := before + 2*pairs; !slices.Equal(y[end:], x[end:]) || !slices.Equal(y[:before], x[:before]) {
			t.Fatalf("%v around the pairs was %v", y, x)
		}
		a, b := before, before+pairs
		if interleaved {
			b = before + 1
		}
		if want := x[a]*cos[0] - x[b]*sin[0]; math.Abs(y[a]-want) > 1e-12 {
			t.Fatalf("the first element is %v, want %v", y[a], want)
		}
		Turn(z, y, before, cos, back, interleaved)
		for i := range x {
			if math.Abs(z[i]-x[i]) > 1e-12 {
				t.Fatalf("element %d is %v, was %v", i, z[i], x[i])
			}
		}
	})
}

// New keys are stored rotated by their positions, values unchanged, and nothing else is written.
func TestAppendLayer(t *testing.T) {
	for range 20 {
		testAppendLayer[float32](t, 20, 30)
		testAppendLayer[float64](t, 20, 30)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	testAppendLayer[float32](t, 64, 200)
	testAppendLayer[float64](t, 64, 200)
}

func testAppendLayer[F cpu.Real](t *testing.T, longest, many int) {
	var e cpu.Engine
	defer e.Close()
	rng := reftest.Rand(t)
	l := randomLayout(rng)
	heads, dim, valueDim := 1+rng.IntN(4), 2+longest-20+rng.IntN(20), 1+rng.IntN(longest)
	g := attn.Problem{Heads: heads, KVHeads: heads, Dim: dim, ValueDim: valueDim, Pages: attn.Separate(l.dtype, dim, valueDim, attn.PageStrides{}, attn.PageStrides{}), PageTokens: l.page, Mask: attn.Mask{Causal: true, Tree: true}}
	g.Pages.Planes[0].At, g.Pages.Planes[1].At = pageStrides(l, heads, dim, rng.IntN(2)), pageStrides(l, heads, valueDim, rng.IntN(2))
	w := make([]float64, 1+rng.IntN(dim/2))
	for i := range w {
		w[i] = rng.Float64()
	}
	turns := rng.IntN(4) > 0
	if turns {
		g.Rotary = attn.Rotary{HeadDim: dim, First: rng.IntN(dim - 2*len(w) + 1), Interleaved: rng.IntN(2) == 0, Factor: 1.5, Turns: attn.TurningsOf(w)}
	}
	seqs := []attn.Sequence{
		{Row: 3, Queries: 1, Keys: 1 + rng.IntN(50), Before: rng.IntN(min(1<<40, math.MaxInt))},
		{Row: 20, Queries: many, Keys: many + rng.IntN(2)*rng.IntN(100)},
		{Row: 0, Queries: 0, Keys: 7},
		{Row: 10, Queries: 5, Keys: 5 + rng.IntN(9), Tree: reftest.RandomTree(rng, 5)},
	}
	page := 0
	for i := range seqs {
		for range attn.Ceil(seqs[i].Keys, l.page) {
			seqs[i].Pages = append(seqs[i].Pages, int32(page))
			page++
		}
	}
	rows := func(dim int) NewRows[F] {
		r := NewRows[F]{From: attn.Strides{Row: heads*dim + rng.IntN(3), Head: dim}}
		r.Rows = make([]F, (many+30)*r.From.Row)
		for i := range r.Rows {
			r.Rows[i] = F(rng.NormFloat64())
		}
		return r
	}
	var keep problem[F]
	to := attn.InPlanes(keep.buffer(0, l.dtype, page*g.Pages.Planes[0].At.Page), keep.buffer(1, l.dtype, page*g.Pages.Planes[1].At.Page))
	keys, values := rows(dim), rows(valueDim)
	var p Plan
	if err := p.Build(g, seqs); err != nil {
		t.Fatal(err)
	}
	if more := slices.Clone(seqs); turns {
		more[1].Row++
		if err := AppendLayer(&e, &p, more, &to, keys, values); !errors.Is(err, attn.ErrShape) {
			t.Errorf("rows that the plan has not: %v", err)
		}
	}
	short := values
	short.Rows = short.Rows[:(many+19)*short.From.Row]
	if err := AppendLayer(&e, &p, seqs, &to, keys, short); !errors.Is(err, attn.ErrShape) {
		t.Errorf("values of too few rows: %v", err)
	}
	for i := range to[0].Data.Len {
		if !math.IsNaN(cputest.Load(to[0].Data.Ptr, l.dtype, i)) {
			t.Fatalf("%v: element %d was written before values were checked", l, i)
		}
	}
	if err := AppendLayer(&e, &p, seqs, &to, keys, values); err != nil {
		t.Fatal(err)
	}
	cos, sin := make([]float64, len(w)), make([]float64, len(w))
	check := func(name string, to cpu.Buffer, r *NewRows[F], at attn.PageStrides, dim int, want func(head, from []F)) {
		t.Helper()
		owned, head := make([]bool, to.Len), make([]F, dim)
		for _, q := range seqs {
			for i := range q.Queries {
				key, position := q.Keys-q.Queries+i, q.Before+q.Keys-q.Queries+i
				if q.Tree != nil {
					position += q.Tree.Depth(i) - i
				}
				for j := range w {
					s, c := math.Sincos(attn.TurningsOf(w).Of(j).Angle(position))
					cos[j], sin[j] = 1.5*c, 1.5*s
				}
				for h := range heads {
					want(head, r.Rows[(q.Row+i)*r.From.Row+h*r.From.Head:][:dim])
					for x, want := range head {
						e := int(q.Pages[key/l.page])*at.Page + key%l.page*at.Row + h*at.Head + x
						owned[e] = true
						if got := cputest.Load(to.Ptr, to.DType, e); got != cputest.Rounded(float64(want), l.dtype) {
							t.Fatalf("%v: %s, token %d, head %d, element %d: got %v, want %v", l, name, i, h, x, got, want)
						}
					}
				}
			}
		}
		for i, mine := range owned {
			if !mine && !math.IsNaN(cputest.Load(to.Ptr, to.DType, i)) {
				t.Fatalf("%v: %s, unassigned element %d was written", l, name, i)
			}
		}
	}
	asItIs := func(head, from []F) { copy(head, from) }
	turned := asItIs
	if turns {
		turned = func(head, from []F) { Turn(head, from, g.Rotary.First, cos, sin, g.Rotary.Interleaved) }
	}
	check("keys", to[0].Data, &keys, g.Pages.Planes[0].At, dim, turned)
	check("values", to[1].Data, &values, g.Pages.Planes[1].At, valueDim, asItIs)
}
