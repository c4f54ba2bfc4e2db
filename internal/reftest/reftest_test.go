package reftest

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dropout"
	"gorgonia.org/leanattention/internal/half"
)

// brute is attention from its definition: a mask, one exponential a score, no
// shift by the maximum, one sum.
func brute(c *Case) (o, lse []float64) {
	group := c.Heads / c.KVHeads
	for s := range c.Queries {
		for pos := range c.Queries[s] {
			for h := range c.Heads {
				row := make([]float64, c.ValueDim)
				l := math.Exp(c.Sink(h))
				for j := range c.Keys[s] {
					at := c.Keys[s] - c.Queries[s] + pos
					if c.Causal && j > at || c.Window > 0 && at-j >= c.Window && j >= c.SinkTokens {
						continue
					}
					var dot float64
					q, k := c.Query(s, pos, h), c.Key(s, j, h/group)
					for i := range q {
						dot += q[i] * k[i]
					}
					dot *= c.Scale
					if c.SoftCap > 0 {
						dot = c.SoftCap * math.Tanh(dot/c.SoftCap)
					}
					if c.Slopes != nil {
						dot += c.Slopes[h] * float64(j-at)
					}
					if b := c.Bias; b.X != nil {
						one := func(size, i int) int { return i % size } // sizes are 1 or all there is
						dot += b.X[((one(b.Sequences, s)*b.Heads+one(b.Heads, h))*b.Queries+one(b.Queries, pos))*b.Keys+j]
					}
					p := math.Exp(dot)
					l += p
					if p1 := c.Dropout; p1 > 0 && c.Seed != 0 {
						below := math.Round(p1 * (1 << 16))
						numbers := dropout.Philox([4]uint32{uint32(j / 8), uint32(pos), uint32(h), uint32(s)}, [2]uint32{uint32(c.Seed), uint32(uint64(c.Seed) >> 32)})
						if p /= 1 - below/(1<<16); float64(numbers[j%8/2]>>(j%2*16)&0xffff) < below {
							p = 0
						}
					}
					for i, v := range c.Value(s, j, h/group) {
						row[i] += p * v
					}
				}
				for i := range row {
					if l > 0 {
						row[i] /= l
					}
				}
				o = append(o, row...)
				lse = append(lse, math.Log(l))
			}
		}
	}
	return o, lse
}

func TestReferenceIsSoftmax(t *testing.T) {
	rng := Rand(t)
	for i := range 20 {
		for _, in := range []Inputs{Normal, Peaked, Constant} { // without overflow in brute
			s := RandomShape(rng)
			if i%2 == 0 {
				s = RandomScoreMods(rng, s)
				if rng.IntN(3) == 0 {
					s = RandomSinkTokens(rng, s)
				}
				for h, x := range s.Slopes {
					s.Slopes[h] = min(max(x, -1), 1)
				}
				for h, x := range s.Sinks {
					if !math.IsInf(x, -1) {
						s.Sinks[h] = min(max(x, -20), 20)
					}
				}
			}
			if i%3 == 0 && s.QueryRows() > 0 {
				s = RandomBias(rng, s, max(slices.Max(s.Keys), 1))
				for at, x := range s.Bias.X {
					if !math.IsInf(x, -1) {
						s.Bias.X[at] = min(max(x, -20), 20)
					}
				}
			}
			if i%4 == 1 {
				s = RandomDropout(rng, s)
				s.Dropout = math.Round(s.Dropout*1024) / 1024
			}
			c := New(rng, s, in, Float64, Float64)
			p := Precision{Chain: maxKeys(c)}
			want := c.Reference(p)
			o, lse := brute(c)
			if err := Compare(o, want.O, want.OBound, c.QueryRows(), c.Heads, c.ValueDim); err != nil {
				t.Errorf("%v, %v: O: %v", c.Shape, in, err)
			}
			if err := Compare(lse, want.LSE, want.LSEBound, c.QueryRows(), c.Heads); err != nil {
				t.Errorf("%v, %v: LSE: %v", c.Shape, in, err)
			}
		}
	}
}

// A mask of another seed or another probability is found, and one without the factor. The log-sum-exp has no part in it.
func TestDropoutFaultsAreFound(t *testing.T) {
	rng := Rand(t)
	s := Shape{Heads: 2, KVHeads: 1, Dim: 16, ValueDim: 16, Queries: []int{3}, Keys: []int{60}, Dropout: 0.25, Seed: 7}
	c := New(rng, s, Normal, Float32, Float32)
	want := c.Reference(Precision{Acc: Float32})
	for name, change := range map[string]func(*Shape){
		"another seed": func(s *Shape) { s.Seed++ },
		"no seed":      func(s *Shape) { s.Seed = 0 },
		"less":         func(s *Shape) { s.Dropout = 0.249 },
		"none":         func(s *Shape) { s.Dropout = 0 },
	} {
		wrong := *c
		change(&wrong.Shape)
		got := wrong.Reference(Precision{Acc: Float32})
		if Compare(got.O, want.O, want.OBound, 3, 2, 16) == nil {
			t.Errorf("%s: the output passes", name)
		}
		if !slices.Equal(got.LSE, want.LSE) {
			t.Errorf("%s: the log-sum-exp is another", name)
		}
	}
}

// A window, a soft cap or slopes that are off by a little are found.
func TestScoreModFaultsAreFound(t *testing.T) {
	rng := Rand(t)
	s := Shape{
		Heads: 2, KVHeads: 1, Dim: 16, ValueDim: 16, Queries: []int{3}, Keys: []int{60}, Mask: attn.Mask{Causal: true, Window: 20},
		SoftCap: 5, Slopes: []float64{0.25, 0.0625}, Sinks: []float64{0.5, 2},
	}
	c := New(rng, s, Normal, Float32, Float32)
	want := c.Reference(Precision{Acc: Float32})
	for name, change := range map[string]func(*Shape){
		"window of one more": func(s *Shape) { s.Window++ },
		"window of one less": func(s *Shape) { s.Window-- },
		"soft cap":           func(s *Shape) { s.SoftCap *= 1.01 },
		"no soft cap":        func(s *Shape) { s.SoftCap = 0 },
		"slope":              func(s *Shape) { s.Slopes = []float64{0.2501, 0.0626} },
		"slopes of others":   func(s *Shape) { s.Slopes = []float64{0.0625, 0.25} },
		"bias":               func(s *Shape) { s.Bias = Bias{1, 1, 1, 60, slices.Repeat([]float64{0, 0.01}, 30), 1} },
		"sinks":              func(s *Shape) { s.Sinks = []float64{0.502, 1.998} },
		"sinks of others":    func(s *Shape) { s.Sinks = []float64{2, 0.5} },
		"no sinks":           func(s *Shape) { s.Sinks = nil },
		"hidden key":         func(s *Shape) { s.Bias = Bias{1, 1, 1, 60, append(make([]float64, 59), math.Inf(-1)), 1} },
	} {
		wrong := *c
		change(&wrong.Shape)
		got := wrong.Reference(Precision{Acc: Float32})
		if Compare(got.O, want.O, want.OBound, 3, 2, 16) == nil {
			t.Errorf("%s: the output passes", name)
		}
		if Compare(got.LSE, want.LSE, want.LSEBound, 3, 2) == nil {
			t.Errorf("%s: the log-sum-exp passes", name)
		}
	}
	if got, want := s.String(), "h2/1 d16/16 q[3] k[60] causal window 20 cap 5 slopes [0.25 0.0625] sinks [0.5 2]"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func maxKeys(c *Case) int {
	n := 1
	for _, k := range c.Keys {
		n = max(n, k)
	}
	return n
}

// faults are the mistakes of kernels. The zero value is right.
type faults struct {
	scale     float64 // relative error of the scale
	dropFirst bool    // the first key is not seen
	dropLast  bool    // the last visible key is not seen
	future    bool    // one key too many is seen
	head      bool    // KV head of the next group
	norescale bool    // the output is not re-scaled where the maximum rises
	twice     bool    // the last key counts twice
}

// online is attention in float32 as kernels do it: base-4 scores with the factor
// multiplied into q, tiles of keys, a running maximum, weights rounded to p.
func online(c *Case, tile int, p Format, f faults) (o, lse []float32) {
	group := c.Heads / c.KVHeads
	for s := range c.Queries {
		for pos := range c.Queries[s] {
			for h := range c.Heads {
				kv := h / group
				if f.head {
					kv = (kv + 1) % c.KVHeads
				}
				n := c.Visible(s, pos)
				from := 0
				if f.dropFirst && n > 1 {
					from = 1
				}
				if f.dropLast && n > 1 {
					n--
				}
				if f.future {
					n = min(n+1, c.Keys[s])
				}
				q := Convert[float32](c.Query(s, pos, h))
				factor := float32(c.Scale * math.Log2E / 2 * (1 + f.scale))
				for i := range q {
					q[i] *= factor
				}
				row := make([]float32, c.ValueDim)
				m, l := float32(math.Inf(-1)), float32(0)
				for at := from; at < n; at += tile {
					var scores []float32
					top := m
					for j := at; j < min(at+tile, n); j++ {
						var dot float32
						for i, k := range c.Key(s, j, kv) {
							dot += q[i] * float32(k)
						}
						scores = append(scores, dot)
						top = max(top, dot)
					}
					a := float32(math.Exp2(2 * float64(m-top)))
					if f.norescale {
						a = 1
					}
					l *= a
					for i := range row {
						row[i] *= a
					}
					m = top
					for j, x := range scores {
						w := float32(math.Exp2(2 * float64(x-m)))
						if f.twice && at+j == n-1 {
							w *= 2
						}
						l += w
						w = float32(p.Round(float64(w)))
						for i, v := range c.Value(s, at+j, kv) {
							row[i] += w * float32(v)
						}
					}
				}
				for i := range row {
					if l > 0 {
						row[i] /= l
					}
				}
				o = append(o, row...)
				if l == 0 {
					lse = append(lse, float32(math.Inf(-1)))
				} else {
					lse = append(lse, float32(2*math.Ln2*float64(m)+math.Log(float64(l))))
				}
			}
		}
	}
	return o, lse
}

// TestBoundHolds: a right implementation stays within the bound on every kind of
// input, for tiles of all sizes.
func TestBoundHolds(t *testing.T) {
	rng := Rand(t)
	for range 12 {
		shape := RandomShape(rng)
		for _, in := range AllInputs {
			c := New(rng, shape, in, Float32, []Format{Float32, Float16, BFloat16}[rng.IntN(3)])
			tile := 1 << rng.IntN(9)
			for _, p := range []Precision{
				{Acc: Float32, Chain: maxKeys(c)},
				{Acc: Float32, P: Float16, Chain: maxKeys(c)},
				{Acc: Float32, P: BFloat16, Out: BFloat16, Chain: maxKeys(c)},
			} {
				want := c.Reference(p)
				o, lse := online(c, tile, max(p.P, p.Acc), faults{})
				if p.Out != Float64 {
					for i := range o {
						o[i] = float32(p.Out.Round(float64(o[i])))
					}
				}
				if err := Compare(o, want.O, want.OBound, c.QueryRows(), c.Heads, c.ValueDim); err != nil {
					t.Errorf("%v, %v, tile %d, %+v: O: %v", c.Shape, in, tile, p, err)
				}
				if err := Compare(lse, want.LSE, want.LSEBound, c.QueryRows(), c.Heads); err != nil {
					t.Errorf("%v, %v, tile %d, %+v: LSE: %v", c.Shape, in, tile, p, err)
				}
			}
		}
	}
}

// TestFaultsAreFound: each of the usual mistakes exceeds the bound of O alone on
// peaked inputs.
func TestFaultsAreFound(t *testing.T) {
	rng := Rand(t)
	shape := Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{3, 1}, Keys: []int{700, 129}, Mask: attn.Mask{Causal: true}}
	c := New(rng, shape, Peaked, Float32, Float16)
	want := c.Reference(Precision{Acc: Float32})
	compare := func(f faults) error {
		o, _ := online(c, 32, Float32, f)
		return Compare(o, want.O, want.OBound, c.QueryRows(), c.Heads, c.ValueDim)
	}
	if err := compare(faults{}); err != nil {
		t.Fatalf("no fault: %v", err)
	}
	for name, f := range map[string]faults{
		"scale off by 1e-3": {scale: 1e-3},
		"no re-scaling":     {norescale: true},
		"wrong KV head":     {head: true},
	} {
		if compare(f) == nil {
			t.Errorf("%s: not found", name)
		}
	}
	// A key at an edge is found missing by its weight, which peaked inputs give
	// only to some; on N(0,1) inputs all keys have one.
	c = New(rng, shape, Normal, Float32, Float16)
	want = c.Reference(Precision{Acc: Float32})
	for name, f := range map[string]faults{
		"first key dropped":  {dropFirst: true},
		"last key dropped":   {dropLast: true},
		"last key twice":     {twice: true},
		"future key":         {future: true},
		"scale off by 1e-3":  {scale: 1e-3},
		"wrong KV head":      {head: true},
		"future, first gone": {future: true, dropFirst: true},
	} {
		if compare(f) == nil {
			t.Errorf("N(0,1): %s: not found", name)
		}
	}
}

// TestBoundIsTight: on N(0,1) the bound is far below fixed tolerances in use, and
// it grows with rounding.
func TestBoundIsTight(t *testing.T) {
	rng := Rand(t)
	shape := Shape{Heads: 2, KVHeads: 1, Dim: 64, ValueDim: 64, Queries: []int{1}, Keys: []int{4096}}
	c := New(rng, shape, Normal, Float32, Float32)
	top := func(p Precision) float64 {
		m := 0.0
		for _, b := range c.Reference(p).OBound {
			m = max(m, b)
		}
		return m
	}
	limits := []struct {
		p   Precision
		max float64
	}{
		{Precision{}, 4e-13},
		{Precision{Acc: Float32}, 2e-4},
		{Precision{Acc: Float32, P: Float16}, 1e-3},
		{Precision{Acc: Float32, P: BFloat16, Out: BFloat16}, 1e-2},
	}
	last := 0.0
	for _, l := range limits {
		b := top(l.p)
		if b > l.max || b <= last {
			t.Errorf("%+v: bound %g, want at most %g and more than %g", l.p, b, l.max, last)
		}
		last = b
	}
	if a, b := top(Precision{Acc: Float32}), top(Precision{Acc: Float32, Chain: 4096}); b <= a {
		t.Errorf("bound %g with a chain of 4096 additions, %g with one of %d", b, a, 8*64)
	}
}

// TestExtremeIsDecided: where scores are 1e3 and more apart, the largest takes
// all, and the bound says so instead of giving up.
func TestExtremeIsDecided(t *testing.T) {
	rng := Rand(t)
	shape := Shape{Heads: 4, KVHeads: 1, Dim: 16, ValueDim: 3, Queries: []int{2, 2}, Keys: []int{50, 3}}
	c := New(rng, shape, Extreme, Float32, Float32)
	r := c.Reference(Precision{Acc: Float32})
	for s := range shape.Queries {
		for pos := range shape.Queries[s] {
			for h := range shape.Heads {
				best, top, second := 0, math.Inf(-1), math.Inf(-1)
				for j := range shape.Keys[s] {
					var dot float64
					for i, k := range c.Key(s, j, 0) {
						dot += c.Query(s, pos, h)[i] * k
					}
					if dot > top {
						best, top, second = j, dot, top
					} else {
						second = max(second, dot)
					}
				}
				if top-second < 1e-3*math.Abs(top) || top-second < 1e3 {
					continue // too close for float32 to be sure
				}
				for i, v := range c.Value(s, best, 0) {
					at := (2*s+pos)*shape.Heads*3 + h*3 + i
					if r.O[at] != v || r.OBound[at] > 1e-4*(math.Abs(v)+1e-30) {
						t.Errorf("sequence %d, query %d, head %d: %g within %g, want %g", s, pos, h, r.O[at], r.OBound[at], v)
					}
				}
			}
		}
	}
}

func TestCompare(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	want := []float64{0, 1, 2, 3, 4, -inf}
	bound := []float64{0, .1, .1, .1, .1, 0}
	for _, c := range []struct {
		name  string
		got   []float64
		error string // part of it; none when empty
	}{
		{"equal", []float64{0, 1, 2, 3, 4, -inf}, ""},
		{"within", []float64{0, 1.09, 1.91, 3.09, 4, -inf}, ""},
		{"worst of two", []float64{0, 1.2, 2, 3.3, 4, -inf}, "2 of 6 elements are off; worst at [1 0] of [2 3]: got 3.3, want 3"},
		{"exact zero", []float64{1e-300, 1, 2, 3, 4, -inf}, "worst at [0 0]"},
		{"NaN", []float64{0, 1, nan, 3, 9, -inf}, "worst at [0 2]"},
		{"NaN for -Inf", []float64{0, 1, 2, 3, 4, nan}, "worst at [1 2]"},
		{"finite for -Inf", []float64{0, 1, 2, 3, 4, -1e300}, "worst at [1 2]"},
		{"Inf for finite", []float64{0, 1, 2, 3, inf, -inf}, "worst at [1 1]"},
		{"short", want[:5], "5 elements, want 6"},
	} {
		err := Compare(c.got, want, bound, 2, 3)
		if c.error == "" && err != nil || c.error != "" && (err == nil || !strings.Contains(err.Error(), c.error)) {
			t.Errorf("%s: error %v, want %q", c.name, err, c.error)
		}
	}
}

// TestPlantedError: any one element that is off by a little more than its bound
// is found, through Compare and through the functions for other layouts.
func TestPlantedError(t *testing.T) {
	rng := Rand(t)
	shape := Shape{Heads: 3, KVHeads: 1, Dim: 8, ValueDim: 5, Queries: []int{2, 0, 1}, Keys: []int{9, 4, 30}}
	c := New(rng, shape, Peaked, Float32, BFloat16)
	r := c.Reference(Precision{Acc: Float32, Out: Float16})
	row := func(s, pos int) int { return []int{0, 2, 2}[s] + pos }
	check := func(o, lse []float64) (bool, bool, bool, bool) {
		return Compare(o, r.O, r.OBound, 3, 3, 5) == nil, Compare(lse, r.LSE, r.LSEBound, 3, 3) == nil,
			r.CompareO(func(s, pos, h, i int) float64 { return o[(row(s, pos)*3+h)*5+i] }) == nil,
			r.CompareLSE(func(s, pos, h int) float64 { return lse[row(s, pos)*3+h] }) == nil
	}
	for _, f := range []float64{0, 0.99, -0.99, 1.01, -1.01} {
		for range 20 {
			o, lse := append([]float64(nil), r.O...), append([]float64(nil), r.LSE...)
			i, j := rng.IntN(len(o)), rng.IntN(len(lse))
			o[i] += f * r.OBound[i]
			lse[j] += f * r.LSEBound[j]
			want := math.Abs(f) < 1
			if a, b, c, d := check(o, lse); a != want || b != want || c != want || d != want {
				t.Errorf("%v bounds off: passes %t, %t, %t, %t", f, a, b, c, d)
			}
		}
	}
}

func TestInputs(t *testing.T) {
	rng := Rand(t)
	shape := Shape{Heads: 4, KVHeads: 2, Dim: 32, ValueDim: 8, Queries: []int{1, 3}, Keys: []int{400, 400}}
	weights := func(in Inputs) (most float64) {
		c := New(rng, shape, in, Float32, Float16)
		r := c.Reference(Precision{})
		for s := range shape.Queries {
			for j := range shape.Keys[s] {
				var dot float64
				for i, k := range c.Key(s, j, 0) {
					dot += c.Query(s, 0, 0)[i] * k
				}
				most = max(most, math.Exp(c.Scale*dot-r.LSE[s*4]))
			}
		}
		return most
	}
	if w := weights(Normal); w > 0.3 {
		t.Errorf("normal: a key has weight %g", w)
	}
	if w := weights(Constant); math.Abs(w-1.0/400) > 1e-9 {
		t.Errorf("constant: a key has weight %g, want 1/400", w)
	}
	peaked := 0.0
	for range 5 {
		peaked = max(peaked, weights(Peaked))
	}
	if peaked < 0.3 {
		t.Errorf("peaked: no key has a weight of more than %g", peaked)
	}
	for _, in := range AllInputs {
		for _, q := range []Format{Float64, Float32, Float16, BFloat16} {
			for _, kv := range []Format{Float64, Float32, Float16, BFloat16} {
				c := New(rng, shape, in, q, kv)
				for name, x := range map[string]struct {
					x []float64
					f Format
				}{"Q": {c.Q, q}, "K": {c.K, kv}, "V": {c.V, kv}} {
					for _, v := range x.x {
						if math.IsInf(v, 0) || math.IsNaN(v) || x.f.Round(v) != v {
							t.Fatalf("%v %s in %v: %g", in, name, x.f, v)
						}
					}
				}
			}
		}
	}
}

func TestFormat(t *testing.T) {
	for _, c := range []struct {
		f       Format
		x, want float64
	}{
		{Float64, 0.1, 0.1},
		{Float32, 0.1, float64(float32(0.1))},
		{Float16, 0.1, 0.0999755859375},
		{Float16, 65519, 65504},
		{Float16, 65520, math.Inf(1)},
		{BFloat16, 0.1, 0.10009765625},
		{BFloat16, 1 + 1.0/256, 1}, // a tie: to even
	} {
		if got := c.f.Round(c.x); got != c.want {
			t.Errorf("%v of %v is %v, want %v", c.f, c.x, got, c.want)
		}
	}
	rng := Rand(t)
	for _, f := range []Format{Float64, Float32, Float16, BFloat16} {
		worst := 0.0
		for range 10000 {
			x := math.Ldexp(1+rng.Float64(), rng.IntN(20)-10)
			worst = max(worst, math.Abs(f.Round(x)-x)/x)
		}
		if worst > f.Unit() || f != Float64 && worst < f.Unit()/2 {
			t.Errorf("%v: relative rounding of up to %g, unit roundoff %g", f, worst, f.Unit())
		}
	}
}

// TestRoundBits: numbers of all sizes, and ties, are rounded as package half does.
func TestRoundBits(t *testing.T) {
	rng := Rand(t)
	for i := range 100000 {
		x := math.Ldexp(1+rng.Float64(), rng.IntN(300)-150)
		if i%2 == 0 {
			x = math.Ldexp(math.Round(math.Ldexp(1+rng.Float64(), 11)), rng.IntN(300)-150) // a tie of float16, now and then
		}
		if rng.IntN(2) == 0 {
			x = -x
		}
		if got, want := Float16.Round(x), float64(half.FromFloat64(x).Float32()); got != want {
			t.Errorf("float16: %v is %v, want %v", x, got, want)
		}
		if got, want := BFloat16.Round(x), float64(half.BFromFloat64(x).Float32()); got != want {
			t.Errorf("bfloat16: %v is %v, want %v", x, got, want)
		}
	}
}

func TestExpm1(t *testing.T) {
	rng := Rand(t)
	for range 10000 {
		x := 0.1 * math.Exp2(-40*rng.Float64())
		if got, want := expm1(x), math.Expm1(x); math.Abs(got-want) > 1e-13*want {
			t.Errorf("expm1(%v) is %v, want %v", x, got, want)
		}
	}
}

func TestMemory(t *testing.T) {
	f32, f64, u16 := make([]float32, 3), make([]float64, 3), make([]uint16, 3)
	Poison(f32)
	Poison(f64)
	Poison16(u16)
	for i := range f32 {
		if f32[i] == f32[i] || f64[i] == f64[i] || u16[i] != 0xffff {
			t.Errorf("not poisoned: %v, %v, %x", f32, f64, u16)
		}
	}
	c := New(rand.New(rand.NewPCG(1, 2)), Shape{Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 2, Queries: []int{2, 1}, Keys: []int{0, 3}}, Normal, Float32, Float32)
	for _, d := range []struct {
		name               string
		dense              []float64
		row                func(seq, pos, head int) []float64
		lengths            []int
		heads, dim, filled int
	}{
		{"Q", c.DenseQ(5), c.Query, c.Queries, 4, 3, 5},
		{"K", c.DenseK(5), c.Key, c.Keys, 2, 3, 5},
		{"V", c.DenseV(5), c.Value, c.Keys, 2, 2, 5},
	} {
		if want := 2 * d.heads * 5 * d.dim; len(d.dense) != want {
			t.Fatalf("%s has %d elements, want %d", d.name, len(d.dense), want)
		}
		for s := range 2 {
			for h := range d.heads {
				for pos := range 5 {
					for i := range d.dim {
						got := d.dense[((s*d.heads+h)*5+pos)*d.dim+i]
						if pos >= d.lengths[s] {
							if got == got {
								t.Fatalf("%s (%d, %d, %d, %d) is %v, not poisoned", d.name, s, h, pos, i, got)
							}
						} else if want := d.row(s, pos, h)[i]; got != want {
							t.Fatalf("%s (%d, %d, %d, %d) is %v, want %v", d.name, s, h, pos, i, got, want)
						}
					}
				}
			}
		}
	}
}

func TestShapeString(t *testing.T) {
	s := Shape{Heads: 8, KVHeads: 2, Dim: 64, ValueDim: 32, Queries: []int{1, 2}, Keys: []int{5, 9}, Mask: attn.Mask{Causal: true}}
	if got, want := s.String(), "h8/2 d64/32 q[1 2] k[5 9] causal"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for pos, want := range []int{8, 9} {
		if got := s.Visible(1, pos); got != want {
			t.Errorf("position %d sees %d keys, want %d", pos, got, want)
		}
	}
	s.Keys[1] = 1 // fewer keys than queries: the first position sees none
	if a, b := s.Visible(1, 0), s.Visible(1, 1); a != 0 || b != 1 {
		t.Errorf("visible keys %d and %d, want 0 and 1", a, b)
	}
	if AllInputs[1].String() != "peaked" || Float16.String() != "float16" {
		t.Errorf("names %v, %v", AllInputs[1], Float16)
	}
}

// What is kept of the last reference is of these numbers, and no caller's changes are in it.
func TestReferenceAgain(t *testing.T) {
	rng := Rand(t)
	for name, change := range map[string]func(c *Case, p *Precision){
		"nothing":      func(*Case, *Precision) {},
		"queries":      func(c *Case, _ *Precision) { c.Q[len(c.Q)-1]++ },
		"keys":         func(c *Case, _ *Precision) { c.K[0]++ },
		"values":       func(c *Case, _ *Precision) { c.V[1]++ },
		"bias":         func(c *Case, _ *Precision) { c.Bias.X[2]++ },
		"bias's scale": func(c *Case, _ *Precision) { c.Bias.Scale = 2 },
		"scale":        func(c *Case, _ *Precision) { c.Scale++ },
		"mask":         func(c *Case, _ *Precision) { c.Causal = false },
		"window":       func(c *Case, _ *Precision) { c.Window = 2 },
		"soft cap":     func(c *Case, _ *Precision) { c.SoftCap = 2 },
		"slopes":       func(c *Case, _ *Precision) { c.Slopes[1]++ },
		"sinks":        func(c *Case, _ *Precision) { c.Sinks[1]++ },
		"dropout":      func(c *Case, _ *Precision) { c.Dropout, c.Seed = 0.5, 3 },
		"precision":    func(_ *Case, p *Precision) { p.Query = 0.1 },
	} {
		c := New(rng, Shape{Heads: 2, KVHeads: 1, Dim: 3, ValueDim: 4, Queries: []int{2, 3}, Keys: []int{5, 7}, Slopes: []float64{1, 2}, Sinks: []float64{1, 2},
			Mask: attn.Mask{Causal: true}, Bias: Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 7, X: []float64{1, 2, 3, 4, 5, 6, 7}}}, Normal, Float32, Float32)
		p := Precision{Acc: Float32}
		before := c.Reference(p)
		change(c, &p)
		got, want := c.Reference(p), c.reference(p)
		if !reflect.DeepEqual(got, want) || reflect.DeepEqual(before, want) != (name == "nothing") {
			t.Errorf("%s: %v, want %v, before %v", name, got, want, before)
		}
		got.O[0], got.OBound[1], got.LSE[0], got.LSEBound[0] = 1, 2, 3, 4
		if again := c.Reference(p); !reflect.DeepEqual(again, want) {
			t.Errorf("%s: a caller's change is in what is kept", name)
		}
	}
}
