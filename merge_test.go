package leanattention_test

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Attend of parts of the keys, merged, is Attend of all, in any order and nesting; slices give the same bits as tensors.
func TestMerge(t *testing.T) {
	rng := reftest.Rand(t)
	for range 30 {
		heads, queries, keys, dim := 1+rng.IntN(3), 1+rng.IntN(4), 1+rng.IntN(50), 1+rng.IntN(40)
		random := func(shape ...int) *tensor.Dense {
			x := make([]float32, tensor.Shape(shape).TotalSize())
			for i := range x {
				x[i] = float32(rng.NormFloat64())
			}
			return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
		}
		state := func() la.State {
			s := la.State{Out: random(heads, queries, dim), LSE: random(heads, queries)}
			reftest.Poison(s.Out.Data().([]float32))
			reftest.Poison(s.LSE.Data().([]float32))
			return s
		}
		q, k, v := random(heads, queries, dim), random(heads, keys, dim), random(heads, keys, dim)
		attend := func(from, to int) la.State {
			s := state()
			part := func(x *tensor.Dense) G.Value { // a view, of other strides
				y, err := x.Slice(nil, G.S(from, to), G.S(0, dim))
				if err != nil {
					t.Fatal(err)
				}
				d := y.Materialize().(*tensor.Dense)
				if err := d.Reshape(heads, to-from, dim); err != nil {
					t.Fatal(err)
				}
				return d
			}
			if err := la.Attend(la.Args{Q: q, K: part(k), V: part(v), Out: s.Out, LSE: s.LSE}); err != nil {
				t.Fatal(err)
			}
			return s
		}
		var parts []la.State
		for from := 0; from < keys; {
			to := from + 1 + rng.IntN(keys-from)
			parts = append(parts, attend(from, to))
			from = to
		}
		rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		whole, flat, nested := attend(0, keys), state(), parts[0]
		if err := la.Merge(flat, parts...); err != nil {
			t.Fatal(err)
		}
		for _, p := range parts[1:] {
			to := state()
			if err := la.Merge(to, nested, p); err != nil {
				t.Fatal(err)
			}
			nested = to
		}
		for i, s := range []la.State{flat, nested} {
			for j, x := range [][2]G.Value{{s.Out, whole.Out}, {s.LSE, whole.LSE}} {
				got, want := x[0].Data().([]float32), x[1].Data().([]float32)
				for n := range want {
					if !(math.Abs(float64(got[n]-want[n])) <= 1e-5*(1+math.Abs(float64(want[n])))) {
						t.Fatalf("%d, %d: number %d is %v, want %v", i, j, n, got[n], want[n])
					}
				}
			}
		}
	}
}

// Results that share memory with a state, or with each other, wholly or by a single element, are refused,
// and nothing is written. Neighbours in memory are no overlap.
func testMergeOverlaps[F float32 | float64](t *testing.T) {
	const rows, dim = 2, 3
	names := []string{"out", "lse", "outs[0]", "outs[1]", "lses[0]", "lses[1]"}
	length := func(i int) int { return rows * []int{dim, 1, dim, dim, 1, 1}[i] }
	for to := range 2 {
		for with := range names {
			for _, by := range []int{0, 1, length(with)} { // elements that are shared
				if with == to {
					continue
				}
				memory := make([]F, 100)
				var all [6][]F
				for i := range all {
					all[i] = make([]F, length(i))
				}
				const at = 50
				all[to] = memory[at : at+length(to)]
				all[with] = memory[at-length(with)+by : at+by]
				dst := func(i, last int) *tensor.Dense {
					return tensor.New(tensor.WithShape([]int{rows, last}[:1+last/dim]...), tensor.WithBacking(all[i]))
				}
				err := la.Merge(la.State{Out: dst(0, dim), LSE: dst(1, 1)},
					la.State{Out: dst(2, dim), LSE: dst(4, 1)}, la.State{Out: dst(3, dim), LSE: dst(5, 1)})
				if by == 0 && err != nil {
					t.Errorf("%s behind %s: %v", names[to], names[with], err)
				}
				if by > 0 && (!errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "share")) {
					t.Errorf("%d elements of %s in %s: %v", by, names[with], names[to], err)
				}
				if by > 0 && slices.ContainsFunc(memory, func(x F) bool { return x != 0 }) {
					t.Errorf("%d elements of %s in %s: something was written", by, names[with], names[to])
				}
			}
		}
	}
}

func TestMergeErrors(t *testing.T) {
	of := func(dtype tensor.Dtype, shape ...int) *tensor.Dense {
		return tensor.New(tensor.Of(dtype), tensor.WithShape(shape...))
	}
	f, d := tensor.Float32, tensor.Float64
	good := func() la.State { return la.State{Out: of(f, 2, 3, 4), LSE: of(f, 2, 3)} }
	shared := good()
	turned := la.State{Out: of(f, 4, 3, 2), LSE: of(f, 2, 3)}
	if err := turned.Out.(*tensor.Dense).T(2, 1, 0); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		err  error
		want error
		says string
	}{
		"no states":              {la.Merge(good()), la.ErrShape, "no states"},
		"nil":                    {la.Merge(good(), la.State{}), la.ErrShape, "state 0"},
		"no log-sum-exp":         {la.Merge(la.State{Out: of(f, 2, 3)}, good()), la.ErrShape, "dst.LSE is nil"},
		"another width":          {la.Merge(good(), la.State{Out: of(f, 2, 3, 5), LSE: of(f, 2, 3)}), la.ErrShape, "(2, 3, 5)"},
		"other rows":             {la.Merge(good(), good(), la.State{Out: of(f, 2, 2, 4), LSE: of(f, 2, 2)}), la.ErrShape, "state 1"},
		"rows that do not match": {la.Merge(good(), la.State{Out: of(f, 2, 3, 4), LSE: of(f, 3, 2)}), la.ErrShape, "(3, 2)"},
		"another rank":           {la.Merge(la.State{Out: of(f, 1, 3, 4), LSE: of(f, 1, 3)}, la.State{Out: of(f, 3, 4), LSE: of(f, 3)}), la.ErrShape, "(3, 4)"},
		"a vector":               {la.Merge(la.State{Out: of(f, 2), LSE: of(f, 2)}, good()), la.ErrShape, "dst.Out has shape (2)"},
		"integers":               {la.Merge(good(), la.State{Out: of(tensor.Int, 2, 3, 4), LSE: of(tensor.Int, 2, 3)}), la.ErrDType, "int"},
		"another type":           {la.Merge(good(), la.State{Out: of(d, 2, 3, 4), LSE: of(d, 2, 3)}), la.ErrDType, "float64"},
		"two types":              {la.Merge(la.State{Out: of(f, 2, 3, 4), LSE: of(d, 2, 3)}, good()), la.ErrDType, "dst.LSE"},
		"shared memory":          {la.Merge(shared, shared), la.ErrUnsupported, "shares memory"},
		"a turned result":        {la.Merge(turned, good()), la.ErrUnsupported, "row-major"},
	} {
		if !errors.Is(c.err, c.want) || !strings.Contains(c.err.Error(), c.says) {
			t.Errorf("%s: %v, want %v, and %q", name, c.err, c.want, c.says)
		}
	}
	testMergeOverlaps[float32](t)
	testMergeOverlaps[float64](t)
}
