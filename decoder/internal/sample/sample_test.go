package sample

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func mustNew(t testing.TB, c Config) *Sampler {
	t.Helper()
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func next(t testing.TB, s *Sampler, logits []float32) int {
	t.Helper()
	id, err := s.Next(logits)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestGreedy(t *testing.T) {
	inf := float32(math.Inf(-1))
	for _, c := range []struct {
		logits []float32
		want   int
	}{
		{[]float32{3}, 0},
		{[]float32{1, 3, 2}, 1},
		{[]float32{1, 3, 3, 3}, 1}, // of equals the lowest id
		{[]float32{-5, -5}, 0},
		{[]float32{inf, -1e38, inf}, 1},
		{[]float32{0, float32(math.Copysign(0, -1))}, 0},
	} {
		s := mustNew(t, Config{TopP: 1})
		if got := next(t, s, c.logits); got != c.want {
			t.Errorf("%v: %d, want %d", c.logits, got, c.want)
		}
		// A tiny temperature, with less of TopP than three equals have each, and TopK 1 are greedy too.
		for _, config := range []Config{{Temperature: 1e-300, TopP: 0.3}, {Temperature: 5, TopK: 1, TopP: 1}, {Temperature: 1e30, TopP: 1e-300}} {
			if got := next(t, mustNew(t, config), c.logits); got != c.want {
				t.Errorf("%+v, %v: %d, want %d", config, c.logits, got, c.want)
			}
		}
	}
}

// expected is the distribution that Config describes, computed by sorting.
func expected(c Config, logits []float32) []float64 {
	order := make([]int, len(logits))
	most := math.Inf(-1)
	for i, x := range logits {
		order[i] = i
		most = max(most, float64(x))
	}
	sort.SliceStable(order, func(a, b int) bool { return logits[order[a]] > logits[order[b]] })
	if c.TopK > 0 && c.TopK < len(order) {
		order = order[:c.TopK]
	}
	p, total := make([]float64, len(logits)), 0.0
	for _, i := range order {
		p[i] = math.Exp((float64(logits[i]) - most) / c.Temperature)
		total += p[i]
	}
	kept, sum := make([]float64, len(logits)), 0.0
	for _, i := range order {
		kept[i] = p[i]
		if sum += p[i]; c.TopP > 0 && c.TopP < 1 && sum >= c.TopP*total {
			break
		}
	}
	sum = 0
	for _, v := range kept {
		sum += v
	}
	for i := range kept {
		kept[i] /= sum
	}
	return kept
}

// TestDistribution draws often and compares frequencies, by Pearson's test.
func TestDistribution(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for _, c := range []Config{
		{Temperature: 1, TopP: 1},
		{Temperature: 0.5, TopP: 1},
		{Temperature: 3, TopP: 1, TopK: 4},
		{Temperature: 1},
		{Temperature: 2, TopK: 5},
		{Temperature: 1, TopP: 0.7},
		{Temperature: 2, TopP: 0.8, TopK: 6},
	} {
		c.Seed = seed
		logits := make([]float32, 12)
		for i := range logits {
			logits[i] = float32(rng.NormFloat64())
		}
		logits[rng.IntN(12)] = float32(math.Inf(-1))
		want := expected(c, logits)
		s, counts := mustNew(t, c), make([]int, len(logits))
		const draws = 40000
		for range draws {
			counts[next(t, s, logits)]++
		}
		chi, freedom := 0.0, -1
		for i, n := range counts {
			if want[i] == 0 {
				if n > 0 {
					t.Errorf("%+v: token %d was chosen %d times, and its probability is 0", c, i, n)
				}
				continue
			}
			e := want[i] * draws
			chi += (float64(n) - e) * (float64(n) - e) / e
			freedom++
		}
		// Mean f and variance 2f; eight deviations do not happen by chance.
		if limit := float64(freedom) + 8*math.Sqrt(2*float64(freedom)+1); chi > limit {
			t.Errorf("%+v: chi square %.1f with %d degrees of freedom; counts %v, want shares %.3v", c, chi, freedom, counts, want)
		}
	}
}

// TestLaws: what is chosen has a probability, at least one token is always
// kept, and equal seeds give equal tokens.
func TestLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		logit := rapid.OneOf(rapid.Float32Range(-5, 5), rapid.SampledFrom([]float32{0, 1, 1, -1e30, 3e38, -3e38}))
		logits := rapid.SliceOfN(logit, 1, 40).Draw(t, "logits")
		c := Config{
			Temperature: rapid.SampledFrom([]float64{1e-9, 0.3, 1, 2, 1e9}).Draw(t, "temperature"),
			TopK:        rapid.IntRange(0, 45).Draw(t, "topK"),
			TopP:        rapid.SampledFrom([]float64{0, 1e-12, 0.1, 0.5, 0.9, 0.999999, 1}).Draw(t, "topP"),
			Seed:        rapid.Uint64().Draw(t, "seed"),
		}
		a, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := New(c)
		before := slices.Clone(logits)
		for range 5 {
			i, err := a.Next(logits)
			if err != nil {
				t.Fatal(err)
			}
			if j, _ := b.Next(logits); i != j {
				t.Fatalf("equal samplers chose %d and %d", i, j)
			}
			if !slices.Equal(before, logits) {
				t.Fatal("the logits were written")
			}
			// Rounding may move TopP's border by one token, so the token
			// before and the one after it count as kept.
			wide := c
			if c.TopP > 0 {
				wide.TopP = min(1, c.TopP*(1+1e-9)+1e-12)
			}
			if p := expected(wide, logits); p[i] == 0 {
				t.Fatalf("chose %d of %v", i, p)
			}
		}
	})
}

// TestTies: where the border of TopK or TopP falls between equals, the lower
// ids stay.
func TestTies(t *testing.T) {
	logits := []float32{0, 2, 2, 2, 2, 1}
	for _, c := range []struct {
		config Config
		want   []int
	}{
		{Config{Temperature: 1, TopK: 2, TopP: 1}, []int{1, 2}},
		{Config{Temperature: 1e9, TopK: 3, TopP: 1}, []int{1, 2, 3}},
		{Config{Temperature: 0.01, TopP: 0.5}, []int{1, 2}},
		{Config{Temperature: 0.01, TopK: 4, TopP: 0.7}, []int{1, 2, 3}},
	} {
		s, seen := mustNew(t, c.config), map[int]bool{}
		for range 500 {
			seen[next(t, s, logits)] = true
		}
		got := []int{}
		for id := range seen {
			got = append(got, id)
		}
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v: chose %v, want %v", c.config, got, c.want)
		}
	}
}

// TestStreams: the sequences of a batch differ, as seeds do, and a stream repeats itself.
func TestStreams(t *testing.T) {
	logits := make([]float32, 100)
	draw := func(seed, stream uint64) []int {
		s := mustNew(t, Config{Temperature: 1, TopP: 1, Seed: seed, Stream: stream})
		ids := make([]int, 20)
		for i := range ids {
			ids[i] = next(t, s, logits)
		}
		return ids
	}
	if !slices.Equal(draw(7, 0), draw(7, 0)) {
		t.Error("a stream does not repeat itself")
	}
	if slices.Equal(draw(7, 0), draw(7, 1)) {
		t.Error("two streams are the same")
	}
	if slices.Equal(draw(7, 0), draw(8, 0)) {
		t.Error("two seeds are the same")
	}
}

// TestArgmax: the first of the most likely tokens, or an error, as a plain loop
// has it, wherever it lies.
func TestArgmax(t *testing.T) {
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
	odd := []float64{math.NaN(), math.Inf(1), math.Inf(-1), math.Inf(-1), math.MaxFloat32, -math.MaxFloat32}
	s := mustNew(t, Config{TopP: 1})
	for range 50000 {
		logits := make([]float32, 1+rng.IntN(14))
		want, wrong := -1, false
		for i := range logits {
			v := float64(rng.IntN(4))
			if rng.IntN(5) == 0 {
				v = odd[rng.IntN(len(odd))]
			}
			logits[i] = float32(v)
			wrong = wrong || v != v || math.IsInf(v, 1)
			if v > math.Inf(-1) && (want < 0 || logits[i] > logits[want]) {
				want = i
			}
		}
		got, err := s.Next(logits)
		if wrong = wrong || want < 0; wrong != errors.Is(err, ErrLogits) || !wrong && got != want {
			t.Fatalf("of %v token %d, error %v", logits, got, err)
		}
	}
}

func TestErrors(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []Config{
		{Temperature: -1, TopP: 1}, {Temperature: nan, TopP: 1}, {Temperature: inf, TopP: 1},
		{TopK: -1, TopP: 1}, {TopP: 1.5}, {TopP: nan}, {TopP: -0.5},
	} {
		if s, err := New(c); s != nil || !errors.Is(err, ErrConfig) {
			t.Errorf("%+v: error %v", c, err)
		}
	}
	f := func(v float64) float32 { return float32(v) }
	for _, logits := range [][]float32{nil, {1, f(nan), 2}, {f(nan)}, {f(inf), 0}, {f(-inf)}, {f(-inf), f(-inf)}} {
		for _, temperature := range []float64{0, 1} {
			_, err := mustNew(t, Config{Temperature: temperature, TopP: 1}).Next(logits)
			if !errors.Is(err, ErrLogits) {
				t.Errorf("logits %v: error %v", logits, err)
				continue
			}
			want := "every token has -Inf"
			switch i := slices.IndexFunc(logits, func(x float32) bool { return x != x || x > 0 && math.IsInf(float64(x), 1) }); {
			case len(logits) == 0:
				want = "none given"
			case i >= 0:
				want = fmt.Sprintf("token %d has %v", i, logits[i])
			}
			if !strings.HasSuffix(err.Error(), want) {
				t.Errorf("logits %v: %v, want %s", logits, err, want)
			}
		}
	}
}

func BenchmarkNext(b *testing.B) {
	logits := make([]float32, 50272) // OPT's vocabulary
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range logits {
		logits[i] = float32(3 * rng.NormFloat64())
	}
	for _, c := range []struct {
		name   string
		config Config
	}{
		{"greedy", Config{TopP: 1}},
		{"temperature", Config{Temperature: 1, TopP: 1}},
		{"top-k50", Config{Temperature: 1, TopK: 50, TopP: 1}},
		{"top-p0.9", Config{Temperature: 1, TopP: 0.9}},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := mustNew(b, c.config)
			b.ReportAllocs()
			for b.Loop() {
				next(b, s, logits)
			}
		})
	}
}
