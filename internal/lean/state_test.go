package lean

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// keys is a set of scores and values, which a State summarises.
type keys struct {
	s []float64   // base-4 scores
	v [][]float64 // one row a key
}

// attend returns the state of the keys [from, to), computed in F by the definition.
func attend[F Float](k keys, from, to, dim int) State[F] {
	st := State[F]{O: make([]F, dim)}
	st.Reset()
	for _, s := range k.s[from:to] {
		st.M = max(st.M, F(s))
	}
	for j := from; j < to; j++ {
		p := Exp4(F(k.s[j]) - st.M)
		st.L += p
		for i := range st.O {
			st.O[i] += p * F(k.v[j][i])
		}
	}
	return st
}

// clone copies a state, since Merge writes to its receiver.
func clone[F Float](s State[F]) State[F] {
	s.O = append([]F(nil), s.O...)
	return s
}

func merged[F Float](a, b State[F]) State[F] {
	a = clone(a)
	a.Merge(b)
	return a
}

// eps returns the relative rounding error of one operation in F.
func eps[F Float]() float64 {
	if F(1)+F(math.Ldexp(1, -30)) == 1 {
		return math.Ldexp(1, -24)
	}
	return math.Ldexp(1, -53)
}

// same compares two states of the same keys. O and L are sums of positive multiples of v and of 1. Each term was
// rounded once for each operation, so the difference is at most ops*eps times the sum of the terms' absolute values: L
// for L, and L*max|v| for O. A weight 4^x adds an error of eps*ln4*|x| if x, a difference of scores, was rounded.
// 4^x*|x| is less than 1, so this equals two further operations.
func same[F Float](t errorer, what string, got, want State[F], vmax float64, ops int) {
	if got.M != want.M {
		t.Fatalf("%s: M = %v, want %v", what, got.M, want.M)
	}
	bound := float64(ops+2) * eps[F]() * math.Max(float64(want.L), 1)
	if d := math.Abs(float64(got.L - want.L)); !(d <= bound) {
		t.Fatalf("%s: L = %v, want %v within %g", what, got.L, want.L, bound)
	}
	for i := range want.O {
		if d := math.Abs(float64(got.O[i] - want.O[i])); !(d <= bound*vmax) {
			t.Fatalf("%s: O[%d] = %v, want %v within %g", what, i, got.O[i], want.O[i], bound*vmax)
		}
	}
}

// keySets draws keys with scores from moderate to extreme, many of them equal.
func keySets(n, dim int) *rapid.Generator[keys] {
	return rapid.Custom(func(t *rapid.T) keys {
		span := rapid.SampledFrom([]float64{0, 1, 30, 3000, 1e30}).Draw(t, "span")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		k := keys{s: make([]float64, n), v: make([][]float64, n)}
		for j := range k.s {
			k.s[j] = float64(float32(span * (2*rng.Float64() - 1)))
			k.v[j] = make([]float64, dim)
			for i := range k.v[j] {
				k.v[j][i] = float64(float32(2*rng.Float64() - 1))
			}
		}
		return k
	})
}

func TestMergeLaws(t *testing.T) {
	t.Run("float32", rapid.MakeCheck(mergeLaws[float32]))
	t.Run("float64", rapid.MakeCheck(mergeLaws[float64]))
}

func mergeLaws[F Float](t *rapid.T) {
	const n, dim = 24, 5
	k := keySets(n, dim).Draw(t, "keys")
	i := rapid.IntRange(0, n).Draw(t, "i")
	j := rapid.IntRange(i, n).Draw(t, "j")
	// i = 0, j = i and j = n make one, two or all three states empty.
	x, y, z := attend[F](k, 0, i, dim), attend[F](k, i, j, dim), attend[F](k, j, n, dim)
	whole := attend[F](k, 0, n, dim)

	// Each of two merges scales and adds (3 operations). Each state of at most n keys took two operations a key.
	const ops = 2*n + 2*3
	same(t, "(x y) z", merged(merged(x, y), z), whole, 1, ops)
	same(t, "x (y z)", merged(x, merged(y, z)), whole, 1, ops)
	same(t, "(z x) y", merged(merged(z, x), y), whole, 1, ops)
	same(t, "y x", merged(y, x), merged(x, y), 1, ops)

	empty := State[F]{O: make([]F, dim)}
	empty.Reset()
	identical(t, "x and nothing", merged(x, empty), x)
	identical(t, "nothing and x", merged(empty, x), x)
}

// identical compares two states bit for bit.
func identical[F Float](t errorer, what string, got, want State[F]) {
	if got.M != want.M || got.L != want.L {
		t.Fatalf("%s: M, L = %v, %v, want %v, %v", what, got.M, got.L, want.M, want.L)
	}
	for i := range want.O {
		if got.O[i] != want.O[i] {
			t.Fatalf("%s: O[%d] = %v, want %v", what, i, got.O[i], want.O[i])
		}
	}
}

func TestEmptyState(t *testing.T) {
	poisoned := func() State[float32] {
		nan := float32(math.NaN())
		return State[float32]{O: []float32{nan, nan}, M: nan, L: nan}
	}
	inf := float32(math.Inf(-1))
	a, b := poisoned(), poisoned()
	a.Reset()
	b.Reset()
	identical(t, "Reset", a, State[float32]{O: []float32{0, 0}, M: inf})
	a.Merge(b)
	identical(t, "two empties", a, State[float32]{O: []float32{0, 0}, M: inf})
	if !a.Empty() || a.LSE() != inf {
		t.Errorf("two empties: Empty() = %t, LSE() = %v", a.Empty(), a.LSE())
	}
	dst := []float32{7, 7}
	if lse := a.Normalize(dst); lse != inf || dst[0] != 0 || dst[1] != 0 {
		t.Errorf("Normalize of the empty state: %v, %v", dst, lse)
	}
}

// TestEmptyIsNotRead: the O and L of an empty state have no effect on other states.
func TestEmptyIsNotRead(t *testing.T) {
	nan := float32(math.NaN())
	empty := func() State[float32] {
		return State[float32]{O: []float32{nan}, M: float32(math.Inf(-1)), L: nan}
	}
	s := State[float32]{O: []float32{3}, M: 1, L: 1}
	identical(t, "nothing and s", merged(empty(), s), s)
	identical(t, "s and nothing", merged(s, empty()), s)
	e := merged(empty(), empty())
	if dst := []float32{nan}; e.Normalize(dst) != e.M || dst[0] != 0 {
		t.Errorf("Normalize of two empties: %v", dst)
	}
}

func TestNormalize(t *testing.T) {
	// Scores 1.5 and 0.5 (base 4) with values 1 and 5: weights 1 and 1/4.
	s := State[float64]{O: []float64{1 + 5.0/4}, M: 1.5, L: 1.25}
	want := math.Log(8 + 2)
	if got := s.LSE(); math.Abs(got-want) > 1e-15*want {
		t.Errorf("LSE = %v, want %v", got, want)
	}
	if got := s.Normalize(s.O); got != s.LSE() || s.O[0] != 1.8 {
		t.Errorf("Normalize in place: %v and LSE %v, want 1.8 and %v", s.O, got, want)
	}
}

// TestExtremeScores: the largest finite scores of either sign neither overflow nor make a NaN.
func TestExtremeScores(t *testing.T) {
	const big = math.MaxFloat32
	a := State[float32]{O: []float32{2}, M: big, L: 1}
	b := State[float32]{O: []float32{3}, M: -big, L: 1}
	identical(t, "big and -big", merged(a, b), a)
	identical(t, "-big and big", merged(b, a), a)
	identical(t, "big and big", merged(a, a), State[float32]{O: []float32{4}, M: big, L: 2})
}

// TestExtremeLSE: the log-sum-exp of any finite scores is finite.
func TestExtremeLSE(t *testing.T) {
	t.Run("float32", func(t *testing.T) { extremeLSE[float32](t, math.MaxFloat32) })
	t.Run("float64", func(t *testing.T) { extremeLSE[float64](t, math.MaxFloat64) })
}

func extremeLSE[F Float](t *testing.T, largest float64) {
	inf := F(math.Inf(1))
	for _, score := range []float64{largest, 0.9 * largest, -0.9 * largest, -largest} {
		for _, l := range []F{1, 2, 1 << 20} {
			s := State[F]{M: F(score * Log4E), L: l}
			got := s.LSE()
			if math.IsInf(float64(got), 0) || !(math.Abs(float64(got)/score-1) <= 4*eps[F]()) {
				t.Errorf("%v of score %v: %v", l, score, got)
			}
		}
	}
	// An infinite score is not a large score.
	s := State[F]{M: inf, L: F(math.NaN())}
	if got := s.LSE(); got == got {
		t.Errorf("an infinite score: %v", got)
	}
	s.L = 1
	if got := s.LSE(); got != inf {
		t.Errorf("an infinite score: %v", got)
	}
}

// TestNaNIsKept: a NaN among the scores reaches the output and does not count as a missing key.
func TestNaNIsKept(t *testing.T) {
	nan := float32(math.NaN())
	a := State[float32]{O: []float32{nan}, M: nan, L: nan}
	b := State[float32]{O: []float32{3}, M: 1, L: 1}
	empty := State[float32]{O: []float32{0}}
	empty.Reset()
	for what, s := range map[string]State[float32]{
		"NaN and b": merged(a, b), "b and NaN": merged(b, a),
		"NaN and nothing": merged(a, empty), "nothing and NaN": merged(empty, a),
	} {
		if dst := []float32{0}; s.Normalize(dst) == s.Normalize(dst) || dst[0] == dst[0] {
			t.Errorf("%s: output %v, LSE %v", what, dst, s.LSE())
		}
	}
}

// TestSchedulesAgree runs plans on states. Each worker attends to its LeanTiles in order and keeps partials in its
// slots. After all workers, which run in any order, the slots are merged in worker order. All policies and numbers of
// workers give the attention of the whole context.
func TestSchedulesAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const dim, tile = 3, 2 // tile is the number of keys of a LeanTile
		b := batches().Draw(t, "batch")
		outputs := b.outputs()
		sets := make([]keys, len(outputs))
		for i, o := range outputs {
			sets[i] = keySets(int(o.Tiles)*tile, dim).Draw(t, "keys")
		}
		p := b.plan(new(Plan))

		const poison = 1e300
		partials := make([]State[float64], 2*p.Workers())
		for i := range partials {
			partials[i] = State[float64]{O: []float64{poison, poison, poison}, M: poison, L: poison}
		}
		got := make([]State[float64], len(outputs))
		for _, w := range rapid.Permutation(seq(p.Workers())).Draw(t, "order") {
			it := p.Work(w)
			for k, ok := it.Next(); ok; k, ok = it.Next() {
				s := State[float64]{O: make([]float64, dim)}
				s.Reset()
				for i := k.Begin; i < k.End; i++ {
					s.Merge(attend[float64](sets[k.Output], int(i)*tile, int(i+1)*tile, dim))
				}
				if k.Whole() {
					got[k.Output] = s
				} else {
					partials[p.Slot(w, k)] = s
				}
			}
		}
		for _, o := range outputs {
			if o.Tiles == 0 || got[o.Output].O != nil {
				continue
			}
			first, last, _ := p.Sharers(o)
			s := State[float64]{O: make([]float64, dim)}
			s.Reset()
			for w := first; w <= last; w++ {
				if begin, end := p.Range(w); begin < end {
					k := o
					if w > first {
						k.Begin = 1 // any part except the host's
					}
					s.Merge(partials[p.Slot(w, k)])
				}
			}
			got[o.Output] = s
		}
		for i, o := range outputs {
			if o.Tiles > 0 {
				n := int(o.Tiles) * tile
				same(t, "schedule", got[i], attend[float64](sets[i], 0, n, dim), 1, 2*n+3*int(o.Tiles+int64(p.Workers())))
			}
		}
	})
}

func seq(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i
	}
	return s
}

func TestMergeAllocates(t *testing.T) {
	a := State[float32]{O: make([]float32, 64), M: 1, L: 1}
	b := State[float32]{O: make([]float32, 64), M: 2, L: 1}
	if n := testing.AllocsPerRun(10, func() { a.Merge(b); a.Normalize(a.O) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkMerge(b *testing.B) {
	s := State[float32]{O: make([]float32, 64), M: 1, L: 1}
	u := State[float32]{O: make([]float32, 64), M: 1.5, L: 1}
	b.SetBytes(64 * 4)
	for b.Loop() {
		s.L = 1
		s.M = 1
		s.Merge(u)
	}
}

func BenchmarkPlan(b *testing.B) {
	var p Plan
	blocks := []int64{8}
	for b.Loop() {
		p.Reset(8)
		for range 64 {
			p.Add(blocks)
		}
		p.Cut(Policy{}, 8)
		for w := range p.Workers() {
			it := p.Work(w)
			for _, ok := it.Next(); ok; _, ok = it.Next() {
			}
		}
	}
}

// A sink equals a merged state without a value.
func TestStateSink(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := func(name string) float64 {
			if rapid.IntRange(0, 5).Draw(t, name+" hidden") == 0 {
				return math.Inf(-1)
			}
			return rapid.Float64Range(-40, 40).Draw(t, name)
		}
		s := State[float64]{O: []float64{math.NaN(), math.NaN()}, M: number("m"), L: rapid.Float64Range(1, 9).Draw(t, "l")}
		if !s.Empty() {
			s.O = []float64{rapid.Float64Range(-9, 9).Draw(t, "o"), 1}
		}
		x := number("sink")
		want := State[float64]{O: slices.Clone(s.O), M: s.M, L: s.L}
		want.Merge(State[float64]{O: make([]float64, 2), M: x, L: 1})
		s.Sink(x)
		close := func(a, b float64) bool { return a == b || math.Abs(a-b) <= 1e-14*(math.Abs(a)+math.Abs(b)) }
		if s.M != want.M || !s.Empty() && (!close(s.L, want.L) || !close(s.O[0], want.O[0]) || !close(s.O[1], want.O[1])) {
			t.Fatalf("%+v, want %+v", s, want)
		}
	})
}
