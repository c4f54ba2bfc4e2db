package leanattention_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
	"pgregory.net/rapid"
)

// scored is an attention of one query with one head whose scores are the given ones: q is one
// number, the scale the other factor that a key's type leaves to be desired.
type scored struct {
	query, kv      tensor.Dtype
	dim            int
	q, scale       float64
	scores, values []float64
	bias           []float64
	opts           []la.Option
}

// args returns the operands: only the last element of a row is not 0.
func (s *scored) args() la.Args {
	n := len(s.scores)
	q, k, v := make([]float64, s.dim), make([]float64, n*s.dim), make([]float64, n*s.dim)
	q[s.dim-1] = s.q
	for j, x := range s.scores {
		k[(j+1)*s.dim-1] = x / s.q / s.scale
		v[j*s.dim] = s.values[j]
	}
	a := la.Args{
		Q: graphtest.TensorOf(s.query, q, 1, 1, s.dim), K: graphtest.TensorOf(s.kv, k, 1, n, s.dim), V: graphtest.TensorOf(s.kv, v, 1, n, s.dim),
		Out: graphtest.TensorOf(s.query, make([]float64, s.dim), 1, 1, s.dim), LSE: graphtest.TensorOf(s.query, []float64{0}, 1, 1),
	}
	if s.bias != nil {
		a.Bias = graphtest.TensorOf(s.query, s.bias, 1, 1, n)
	}
	return a
}

func (s *scored) attend(t errorer) (out, lse float64) {
	t.Helper()
	a := s.args()
	if err := la.Attend(a, append(s.opts, la.WithScale(s.scale))...); err != nil {
		t.Fatalf("%v", err)
	}
	return first(a.Out), first(a.LSE)
}

type errorer interface {
	Helper()
	Fatalf(format string, args ...any)
}

func first(v G.Value) float64 {
	switch x := v.Data().(type) {
	case []float32:
		return float64(x[0])
	case []float64:
		return x[0]
	}
	return math.NaN()
}

// want is the softmax by its formula.
func (s *scored) want() (out, lse float64) {
	scores := slices.Clone(s.scores)
	for j, b := range s.bias {
		scores[j] += b
	}
	m, l := slices.Max(scores), 0.0
	for j, x := range scores {
		p := math.Exp(x - m)
		l += p
		out += p * s.values[j]
	}
	return out / l, min(m+math.Log(l), math.MaxFloat64)
}

// check compares with that. Scores that differ differ by far more than rounding.
func (s *scored) check(t errorer) {
	t.Helper()
	out, lse := s.attend(t)
	wantOut, wantLSE := s.want()
	if s.query == tensor.Float32 {
		wantLSE = max(min(wantLSE, math.MaxFloat32), -math.MaxFloat32)
	}
	if !(math.Abs(out-wantOut) <= 1e-5*math.Abs(wantOut)) || !(math.Abs(lse-wantLSE) <= 1e-6*math.Abs(wantLSE)+1e-5) {
		t.Fatalf("%v keys %v, dim %d, scores %v, bias %v: %v and %v, want %v and %v", s.query, s.kv, s.dim, s.scores, s.bias, out, lse, wantOut, wantLSE)
	}
}

// TestHugeScores: a score may be any finite number.
func TestHugeScores(t *testing.T) {
	a := la.Args{
		Q: graphtest.TensorOf(tensor.Float32, []float64{-1}, 1, 1, 1), K: graphtest.TensorOf(tensor.Float32, []float64{2.4e38, 2.4e38}, 1, 2, 1),
		V: graphtest.TensorOf(tensor.Float32, []float64{5, 7}, 1, 2, 1), Out: graphtest.TensorOf(tensor.Float32, []float64{0}, 1, 1, 1),
		LSE: graphtest.TensorOf(tensor.Float32, []float64{0}, 1, 1),
	}
	if err := la.Attend(a, la.WithScale(1)); err != nil {
		t.Fatal(err)
	}
	if out, lse := first(a.Out), first(a.LSE); out != 6 || !(math.Abs(lse/-2.4e38-1) < 1e-6) {
		t.Errorf("%v and %v, want 6 and -2.4e38", out, lse)
	}
}

// TestHugeScoresRandom is that on keys of every type, in as many kernels as dims and numbers of
// keys lead to, with and without partials.
func TestHugeScoresRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := hugeScores(t)
		s.check(t)
	})
}

// hugeScores draws scores up to the largest number, down to its negative, and ordinary ones.
func hugeScores(t *rapid.T) *scored {
	s := &scored{q: 1, scale: 1, dim: rapid.SampledFrom([]int{1, 3, 8, 32, 64, 128}).Draw(t, "dim")}
	types := rapid.SampledFrom(elementTypes).Draw(t, "types")
	s.query, s.kv = types[0], types[1]
	largest := graphtest.Format(s.query).Largest()
	if most := graphtest.Format(s.kv).Largest(); most < largest {
		s.q = math.Ldexp(1, int(math.Round(math.Log2(largest)-math.Log2(most))))
	}
	if s.kv == tensor.Float64 && s.query == tensor.Float32 {
		s.q = 1
	}
	if rapid.Bool().Draw(t, "negative q") {
		s.q = -s.q
	}
	some := rapid.SampledFrom([][]float64{{-1}, {1}, {-1, 1}, {-1, -0.9}, {0.8, 0.9}, {-1, -0.5, 0}, {0.95, 0, -1}}).Draw(t, "of the largest")
	n := rapid.IntRange(1, 300).Draw(t, "keys")
	for range n {
		x := rapid.SampledFrom(some).Draw(t, "score")
		score := x * largest
		k := graphtest.Format(s.kv).Round(score / s.q)
		if math.IsInf(k, 0) {
			k = math.Copysign(graphtest.Format(s.kv).Largest(), k)
		}
		if x == 0 {
			k = float64(rapid.IntRange(-3, 3).Draw(t, "ordinary")) / s.q
			k = graphtest.Format(s.kv).Round(k)
		}
		s.scores = append(s.scores, k*s.q)
		s.values = append(s.values, float64(1+rapid.IntRange(0, 7).Draw(t, "value")))
	}
	s.opts = []la.Option{la.WithTileTokens(rapid.SampledFrom([]int{0, 16, 64}).Draw(t, "tile")), la.WithWorkers(rapid.IntRange(0, 7).Draw(t, "workers"))}
	return s
}

// TestHugeScoresBias: the bias may be what makes a score huge.
func TestHugeScoresBias(t *testing.T) {
	for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		x := graphtest.Format(query).Largest()
		for _, c := range []struct{ scores, bias []float64 }{
			{[]float64{0, 0, 0}, []float64{-x, -x, -x}},
			{[]float64{0, 0, 0}, []float64{x, x, -x}},
			{[]float64{0.5 * x, 0.25 * x, -x}, []float64{0.5 * x, 0.75 * x, 0}},
			{[]float64{-x, -0.5 * x, 3}, []float64{0, -0.5 * x, -x}},
		} {
			s := &scored{query: query, kv: query, dim: 8, q: 1, scale: 1, scores: c.scores, bias: c.bias, values: []float64{1, 2, 4}}
			s.check(t)
		}
	}
}

// TestHugeScoresMasked: a key that a query does not see is none, whatever its score, and an
// infinite one stays one.
func TestHugeScoresMasked(t *testing.T) {
	for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		x, inf := graphtest.Format(query).Largest(), math.Inf(1)
		s := &scored{query: query, kv: query, dim: 8, q: 1, scale: 1, scores: []float64{-x, x, -0.9 * x}, bias: []float64{0, -inf, -inf}, values: []float64{3, 5, 7}}
		s.check(t)
		s.bias = []float64{-inf, -inf, -inf}
		if out, lse := s.attend(t); out != 0 || lse != -inf {
			t.Errorf("%v: no key: %v and %v", query, out, lse)
		}
		s.bias, s.scores = nil, []float64{-inf, -x, -inf}
		if out, _ := s.attend(t); out != 5 {
			t.Errorf("%v: beside -Inf: %v", query, out)
		}
		for _, scores := range [][]float64{{inf, x, x}, {math.NaN(), -x, x}} {
			s.scores = scores
			if out, lse := s.attend(t); out == out || lse == lse {
				t.Errorf("%v: scores %v: %v and %v", query, scores, out, lse)
			}
		}
	}
}

// TestHugeScoresCap: a soft cap is natural, however large it is.
func TestHugeScoresCap(t *testing.T) {
	const x = math.MaxFloat32
	s := &scored{query: tensor.Float32, kv: tensor.Float32, dim: 8, q: 1, scale: 1, scores: []float64{-x, -x}, values: []float64{3, 5}}
	for softCap, want := range map[float64]float64{50: -50, x: -x * math.Tanh(1), math.MaxFloat64: -x} {
		s.opts = []la.Option{la.WithSoftCap(softCap)}
		if out, lse := s.attend(t); out != 4 || !(math.Abs(lse-want) <= 1e-6*math.Abs(want)+1) {
			t.Errorf("cap %v: %v and %v, want 4 and %v", softCap, out, lse, want)
		}
	}
}

// TestHugeScoresCached: in a cache, with tokens of other scores before and behind.
func TestHugeScoresCached(t *testing.T) {
	rng := reftest.Rand(t)
	for turn := range 12 {
		cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: []int{1, 8, 64}[turn%3], PageSize: []int{3, 16}[turn%2],
			Pages: 200, DType: []tensor.Dtype{tensor.Float32, la.BFloat16}[turn/3%2]})
		at := graphtest.Place{ScoreMods: reftest.Shape{Scale: 1}}
		d := graphtest.NewDecoderAt(t, at, cache, 60, 4, tensor.Float32, true, la.WithTileTokens(32), la.WithWorkers(turn%4))
		a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
		d.Do(t, rng, reftest.Huge, graphtest.Appended{To: a, Tokens: 1 + rng.IntN(30)}, graphtest.Appended{To: b, Tokens: 3})
		d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 2}, graphtest.Appended{To: b, Tokens: 1 + rng.IntN(40)})
		d.Do(t, rng, reftest.Huge, graphtest.Appended{To: a, Tokens: 1}, graphtest.Appended{To: b, Tokens: 1})
		closeCache(t, cache)
	}
}

// TestHugeScoresGradient: the gradients compute scores and weights again. With k of -2.4e38 twice, a
// cost of the output is one of the mean of both values.
func TestHugeScoresGradient(t *testing.T) {
	for _, c := range []struct {
		query tensor.Dtype
		score float64
	}{{tensor.Float32, -2.4e38}, {tensor.Float32, 3.3e38}, {tensor.Float64, -1.6e308}, {tensor.Float64, 1.7e308}} {
		root := math.Sqrt(math.Abs(c.score))
		for _, dim := range []int{1, 8} {
			q, k, v := make([]float64, dim), make([]float64, 3*dim), make([]float64, 3*dim)
			q[0] = math.Copysign(root, c.score)
			k[0], k[dim], k[2*dim] = root, root, 0
			want := []float64{0.5, 0.5, 0}
			if c.score < 0 {
				k[2*dim] = 1.001 * root
			}
			copy(v, []float64{5})
			v[dim], v[2*dim] = 7, 9
			g := G.NewGraph()
			nodes := G.Nodes{
				graphtest.Input(g, "q", graphtest.TensorOf(c.query, q, 1, 1, dim)), graphtest.Input(g, "k", graphtest.TensorOf(c.query, k, 1, 3, dim)), graphtest.Input(g, "v", graphtest.TensorOf(c.query, v, 1, 3, dim)),
			}
			out, err := la.Attention(nodes[0], nodes[1], nodes[2], la.WithScale(1))
			if err != nil {
				t.Fatal(err)
			}
			grads, err := G.Grad(G.Must(G.Sum(out)), nodes...)
			if err != nil {
				t.Fatal(err)
			}
			values := make([]G.Value, 3)
			for i, n := range grads {
				G.Read(n, &values[i])
			}
			vm := G.NewTapeMachine(g)
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			// dS of the two keys is -1/2 and 1/2: dK is that times q, and dQ, of which they cancel, 0 within rounding.
			name := fmt.Sprintf("%v, score %v, dim %d", c.query, c.score, dim)
			dk, dv := graphtest.Floats(t, values[1]), graphtest.Floats(t, values[2])
			for j, w := range want {
				if got := dv[j*dim]; !(math.Abs(got-w) < 1e-5) {
					t.Errorf("%s: dV of key %d is %v, want %v", name, j, got, w)
				}
				if got, want := dk[j*dim]/q[0], []float64{-0.5, 0.5, 0}[j]; !(math.Abs(got-want) < 1e-5) {
					t.Errorf("%s: dK of key %d is %v of q, want %v", name, j, got, want)
				}
			}
			if dq := graphtest.Floats(t, values[0])[0]; !(math.Abs(dq) <= 1e-5*root) {
				t.Errorf("%s: dQ %v", name, dq)
			}
			if err := vm.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
