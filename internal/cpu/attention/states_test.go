package attention

import (
	"errors"
	"math"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"

	"pgregory.net/rapid"
)

// merged returns MergeStates in float64, by the definition.
func merged[F lean.Float](dim int, parts []States[F]) States[float64] {
	rows := len(parts[0].LSE)
	s := States[float64]{Out: make([]float64, rows*dim), LSE: make([]float64, rows)}
	for r := range rows {
		top := math.Inf(-1)
		for _, p := range parts {
			top = max(top, float64(p.LSE[r]))
		}
		s.LSE[r] = top
		if math.IsInf(top, -1) {
			continue
		}
		sum := 0.0
		for _, p := range parts {
			w := math.Exp(float64(p.LSE[r]) - top)
			if math.IsInf(float64(p.LSE[r]), -1) {
				continue
			}
			sum += w
			for j := range dim {
				s.Out[r*dim+j] += w * float64(p.Out[r*dim+j])
			}
		}
		for j := range dim {
			s.Out[r*dim+j] /= sum
		}
		s.LSE[r] = top + math.Log(sum)
	}
	return s
}

func poisonedStates[F cpu.Real](rows, dim int) States[F] {
	s := States[F]{Out: make([]F, rows*dim), LSE: make([]F, rows)}
	reftest.Poison(s.Out)
	reftest.Poison(s.LSE)
	return s
}

func testMergeStates[F cpu.Real](t *testing.T, unit float64) {
	var e cpu.Engine
	defer e.Close()
	rapid.Check(t, func(t *rapid.T) {
		rows, dim, n := rapid.IntRange(0, 40).Draw(t, "rows"), rapid.IntRange(1, 70).Draw(t, "dim"), rapid.IntRange(1, 6).Draw(t, "parts")
		if rapid.IntRange(0, 20).Draw(t, "large") == 0 {
			rows, dim = 2000, 64 // several workers
		}
		lse := rapid.OneOf(rapid.Just(math.Inf(-1)), rapid.Float64Range(-3, 3), rapid.Float64Range(-1e4, 1e4))
		var parts []States[F]
		for range n {
			p := poisonedStates[F](rows, dim)
			seed := rapid.Float64Range(-1, 1).Draw(t, "values")
			top := lse.Draw(t, "log-sum-exp")
			for r := range rows {
				if p.LSE[r] = F(top + float64(r%3)); math.IsInf(top, -1) {
					continue // its output stays NaN
				}
				for j := range dim {
					p.Out[r*dim+j] = F(math.Sin(seed * float64(1+r*dim+j)))
				}
			}
			parts = append(parts, p)
		}
		got, want := poisonedStates[F](rows, dim), merged(dim, parts)
		if err := MergeStates(&e, got, dim, parts...); err != nil {
			t.Fatal(err)
		}
		for i, x := range want.Out {
			if d := math.Abs(float64(got.Out[i]) - x); !(d <= float64(2*n+4)*unit) { // values are in [-1, 1]
				t.Fatalf("element %d: %v, want %v", i, got.Out[i], x)
			}
		}
		for r, x := range want.LSE {
			if y := float64(got.LSE[r]); y != x && !(math.Abs(y-x) <= 2*unit*(math.Abs(x)+1)) {
				t.Fatalf("row %d: log-sum-exp %v, want %v", r, y, x)
			}
		}
		// Any number of workers has the same bits, and a single part is copied.
		alone := poisonedStates[F](rows, dim)
		m := merging[F]{dst: alone, dim: dim, parts: parts, workers: 1}
		m.Work(0, 0)
		if !slices.Equal(alone.Out, got.Out) || !slices.Equal(alone.LSE, got.LSE) {
			t.Fatal("other bits with another number of workers")
		}
		if rows == 0 || math.IsInf(float64(parts[0].LSE[0]), -1) {
			return
		}
		if err := MergeStates(&e, alone, dim, parts[0]); err != nil || !slices.Equal(alone.Out, parts[0].Out) || !slices.Equal(alone.LSE, parts[0].LSE) {
			t.Fatalf("one state alone is changed: %v", err)
		}
	})
}

func TestMergeStates(t *testing.T) {
	t.Run("float32", func(t *testing.T) { testMergeStates[float32](t, 0x1p-24) })
	t.Run("float64", func(t *testing.T) { testMergeStates[float64](t, 0x1p-50) })
}

func TestMergeStatesSpecial(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	for _, c := range []struct{ a, b, lse, out float64 }{
		{-inf, -inf, -inf, 0},
		{2, -inf, 2, 1},
		{math.MaxFloat64, 0, math.MaxFloat64, 1},
		{-math.MaxFloat64, -inf, -math.MaxFloat64, 1},
		{1e300, 1e300, 1e300, 1.5},
		{nan, 1, nan, nan},
		{-inf, nan, nan, nan},
		{inf, 1, nan, nan},
	} {
		dst := poisonedStates[float64](1, 1)
		err := MergeStates(cpu.Default(), dst, 1, States[float64]{[]float64{1}, []float64{c.a}}, States[float64]{[]float64{2}, []float64{c.b}})
		same := func(x, y float64) bool { return x == y || math.IsNaN(x) && math.IsNaN(y) }
		if err != nil || !same(dst.LSE[0], c.lse) || !same(dst.Out[0], c.out) {
			t.Errorf("%v and %v: %v, %v, want %v, %v: %v", c.a, c.b, dst.LSE[0], dst.Out[0], c.lse, c.out, err)
		}
	}
}

func TestMergeStatesErrors(t *testing.T) {
	good := func() States[float32] { return poisonedStates[float32](3, 2) }
	for name, err := range map[string]error{
		"no states":        MergeStates(cpu.Default(), good(), 2),
		"no elements":      MergeStates(cpu.Default(), good(), 0, good()),
		"rows of the dst":  MergeStates(cpu.Default(), States[float32]{Out: make([]float32, 6), LSE: make([]float32, 2)}, 2, good()),
		"rows of a state":  MergeStates(cpu.Default(), good(), 2, good(), States[float32]{Out: make([]float32, 6), LSE: make([]float32, 4)}),
		"width of a state": MergeStates(cpu.Default(), good(), 2, States[float32]{Out: make([]float32, 9), LSE: make([]float32, 3)}),
	} {
		if !errors.Is(err, attn.ErrShape) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func BenchmarkMergeStates(b *testing.B) {
	const rows, dim = 32 * 1024, 128
	parts := []States[float32]{poisonedStates[float32](rows, dim), poisonedStates[float32](rows, dim)}
	for _, p := range parts {
		clear(p.Out)
		clear(p.LSE)
	}
	dst := poisonedStates[float32](rows, dim)
	b.SetBytes(3 * rows * (dim + 1) * 4)
	for b.Loop() {
		if err := MergeStates(cpu.Default(), dst, dim, parts...); err != nil {
			b.Fatal(err)
		}
	}
}
