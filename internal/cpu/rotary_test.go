package cpu

import (
	"errors"
	"math"
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"

	"pgregory.net/rapid"
)

// Turned back, a head is what it was; what is behind the pairs stays, and a head may be turned where it is.
func TestTurn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs, rest := rapid.IntRange(1, 20).Draw(t, "pairs"), rapid.IntRange(0, 9).Draw(t, "rest")
		interleaved := rapid.Bool().Draw(t, "interleaved")
		x := rapid.SliceOfN(rapid.Float64Range(-100, 100), 2*pairs+rest, 2*pairs+rest).Draw(t, "x")
		cos, sin, back := make([]float64, pairs), make([]float64, pairs), make([]float64, pairs)
		for i := range cos {
			sin[i], cos[i] = math.Sincos(rapid.Float64Range(-4, 4).Draw(t, "angle"))
			back[i] = -sin[i]
		}
		y := make([]float64, len(x))
		Turn(y, x, cos, sin, interleaved)
		z := slices.Clone(x)
		if Turn(z, z, cos, sin, interleaved); !slices.Equal(y, z) {
			t.Fatalf("%v where it is, %v elsewhere", z, y)
		}
		if !slices.Equal(y[2*pairs:], x[2*pairs:]) {
			t.Fatalf("%v behind the pairs was %v", y[2*pairs:], x[2*pairs:])
		}
		a, b := 0, pairs
		if interleaved {
			b = 1
		}
		if want := x[a]*cos[0] - x[b]*sin[0]; math.Abs(y[a]-want) > 1e-12 {
			t.Fatalf("the first element is %v, want %v", y[a], want)
		}
		Turn(z, y, cos, back, interleaved)
		for i := range x {
			if math.Abs(z[i]-x[i]) > 1e-12 {
				t.Fatalf("element %d is %v, was %v", i, z[i], x[i])
			}
		}
	})
}

// New keys are stored as they are turned at their positions, and nothing else is written.
func TestAppendTurned(t *testing.T) {
	for range 20 {
		testAppendTurned[float32](t, 20, 30)
		testAppendTurned[float64](t, 20, 30)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	testAppendTurned[float32](t, 64, 200)
	testAppendTurned[float64](t, 64, 200)
}

func testAppendTurned[F real](t *testing.T, longest, many int) {
	var e Engine
	defer e.Close()
	rng := reftest.Rand(t)
	l := randomLayout(rng)
	heads, dim := 1+rng.IntN(4), 2+longest-20+rng.IntN(20)
	g := attn.Problem{Heads: heads, KVHeads: heads, Dim: dim, ValueDim: 1, KV: l.dtype, PageTokens: l.page, Mask: attn.Mask{Causal: true, Tree: true}}
	g.Key = pageStrides(l, heads, dim, rng.IntN(2))
	w := make([]float64, 1+rng.IntN(dim/2))
	for i := range w {
		w[i] = rng.Float64()
	}
	g.Rotary = attn.Rotary{HeadDim: dim, Interleaved: rng.IntN(2) == 0, Factor: 1.5, Turns: attn.TurningsOf(w)}
	seqs := []attn.Sequence{
		{Row: 3, Queries: 1, Keys: 1 + rng.IntN(50), Before: rng.IntN(1 << 40)},
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
	from := attn.Strides{Row: heads*dim + rng.IntN(3), Head: dim}
	src := make([]F, (many+30)*from.Row)
	for i := range src {
		src[i] = F(rng.NormFloat64())
	}
	var keep problem[F]
	dst := keep.buffer(0, l.dtype, page*g.Key.Page)
	var p Plan
	if err := p.Build(g, seqs); err != nil {
		t.Fatal(err)
	}
	more := slices.Clone(seqs)
	more[1].Row++
	if err := AppendTurned(&e, &p, more, dst, src, from); !errors.Is(err, attn.ErrShape) {
		t.Errorf("rows that the plan has not: %v", err)
	}
	if err := AppendTurned(&e, &p, seqs, dst, src, from); err != nil {
		t.Fatal(err)
	}
	owned, head := make([]bool, dst.Len), make([]F, dim)
	cos, sin := make([]float64, len(w)), make([]float64, len(w))
	for _, q := range seqs {
		for i := range q.Queries {
			key, position := q.Keys-q.Queries+i, q.Before+q.Keys-q.Queries+i
			if q.Tree != nil {
				position += q.Tree.Depth(i) - i
			}
			for j := range w {
				s, c := math.Sincos(g.Rotary.Turns.Of(j).Angle(position))
				cos[j], sin[j] = 1.5*c, 1.5*s
			}
			for h := range heads {
				Turn(head, src[(q.Row+i)*from.Row+h*from.Head:][:dim], cos, sin, g.Rotary.Interleaved)
				for x, want := range head {
					e := int(q.Pages[key/l.page])*g.Key.Page + key%l.page*g.Key.Row + h*g.Key.Head + x
					owned[e] = true
					if got := load(&dst, e); got != rounded(float64(want), l.dtype) {
						t.Fatalf("%v: token %d, head %d, element %d: got %v, want %v", l, i, h, x, got, want)
					}
				}
			}
		}
	}
	for i, mine := range owned {
		if !mine && !math.IsNaN(load(&dst, i)) {
			t.Fatalf("%v: element %d of nobody was written", l, i)
		}
	}
}
