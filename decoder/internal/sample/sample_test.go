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
		{[]float32{1, 3, 3, 3}, 1}, // the lowest id of equal logits
		{[]float32{-5, -5}, 0},
		{[]float32{inf, -1e38, inf}, 1},
		{[]float32{0, float32(math.Copysign(0, -1))}, 0},
	} {
		s := mustNew(t, Config{TopP: 1})
		if got := next(t, s, c.logits); got != c.want {
			t.Errorf("%v: %d, want %d", c.logits, got, c.want)
		}
		// TopK 1 and a tiny TopP are greedy. A tiny temperature is greedy if TopP is below 1/3, the share of each of three equal
		// tokens.
		for _, config := range []Config{{Temperature: 1e-300, TopP: 0.3}, {Temperature: 5, TopK: 1, TopP: 1}, {Temperature: 1e30, TopP: 1e-300}} {
			if got := next(t, mustNew(t, config), c.logits); got != c.want {
				t.Errorf("%+v, %v: %d, want %d", config, c.logits, got, c.want)
			}
		}
	}
}

// expected returns the distribution that Config describes, computed by sorting.
func expected(c Config, text []int, logits []float32) []float64 {
	x := changed(c, text, logits)
	order := make([]int, len(x))
	most := math.Inf(-1)
	for i, v := range x {
		order[i] = i
		most = max(most, float64(v))
	}
	sort.SliceStable(order, func(a, b int) bool { return x[order[a]] > x[order[b]] })
	if c.TopK > 0 && c.TopK < len(order) {
		order = order[:c.TopK]
	}
	p := make([]float64, len(x))
	norm := func() (total float64) {
		kept := make([]float64, len(x))
		for _, i := range order {
			total += p[i]
		}
		for _, i := range order {
			kept[i] = p[i] / total
		}
		p = kept
		return total
	}
	for _, i := range order {
		if p[i] = math.Exp((float64(x[i]) - most) / c.Temperature); p[i] < leastWeight {
			p[i] = 0
		}
	}
	norm()
	until := func(enough float64) {
		sum := 0.0
		for n, i := range order {
			if sum += p[i]; sum >= enough {
				order = order[:n+1]
				break
			}
		}
		norm()
	}
	if c.TopP > 0 && c.TopP < 1 {
		until(c.TopP)
	}
	if c.MinP > 0 {
		top := slices.Max(p)
		order = slices.DeleteFunc(order, func(i int) bool { return p[i] < c.MinP*top })
		norm()
	}
	if c.TypicalP > 0 && c.TypicalP < 1 {
		order = slices.DeleteFunc(order, func(i int) bool { return p[i] == 0 })
		entropy := 0.0
		for _, i := range order {
			entropy -= p[i] * math.Log(p[i])
		}
		slices.Sort(order)
		sort.SliceStable(order, func(a, b int) bool {
			return math.Abs(-math.Log(p[order[a]])-entropy) < math.Abs(-math.Log(p[order[b]])-entropy)
		})
		until(c.TypicalP)
	}
	return p
}

// changed returns the logits with bias, penalties and forbidden tokens.
func changed(c Config, text []int, logits []float32) []float32 {
	x := slices.Clone(logits)
	if c.RepetitionPenalty == 0 {
		c.RepetitionPenalty = 1
	}
	clamp := func(v float64) float32 { return float32(min(max(v, -math.MaxFloat32), math.MaxFloat32)) }
	for i, b := range c.LogitBias {
		if x[i] >= -math.MaxFloat32 {
			x[i] = clamp(float64(x[i]) + b)
		}
	}
	if c.LastTokens > 0 {
		text = text[max(0, len(text)-c.LastTokens):]
	}
	if c.RepetitionPenalty != 1 || c.PresencePenalty != 0 || c.FrequencyPenalty != 0 {
		for i := range x {
			count := 0
			for _, id := range text {
				if id == i {
					count++
				}
			}
			if count == 0 || x[i] < -math.MaxFloat32 {
				continue
			}
			v := float64(x[i])
			if v > 0 {
				v /= c.RepetitionPenalty
			} else {
				v *= c.RepetitionPenalty
			}
			x[i] = clamp(v - (c.PresencePenalty + float64(count)*c.FrequencyPenalty))
		}
	}
	for _, i := range c.Forbidden {
		x[i] = float32(math.Inf(-1))
	}
	return x
}

// TestDistribution compares the frequencies of many draws with the expected distribution by Pearson's chi-squared test.
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
		{Temperature: 1.5, MinP: 0.2},
		{Temperature: 2, TopP: 0.9, MinP: 0.3},
		{Temperature: 1, TypicalP: 0.6},
		{Temperature: 2, TopK: 9, TopP: 0.95, MinP: 0.05, TypicalP: 0.8},
		{Temperature: 1, RepetitionPenalty: 1.8},
		{Temperature: 1, RepetitionPenalty: 0.4, LastTokens: 3},
		{Temperature: 1, PresencePenalty: 1.2},
		{Temperature: 1, FrequencyPenalty: -0.7, LastTokens: 5},
		{Temperature: 1, LogitBias: map[int]float64{2: 1.5, 5: -2}, Forbidden: []int{3, 7}},
		{Temperature: 0.8, TopK: 8, TopP: 0.97, MinP: 0.02, TypicalP: 0.9, RepetitionPenalty: 1.3, PresencePenalty: 0.2, FrequencyPenalty: 0.3, LastTokens: 6,
			LogitBias: map[int]float64{2: 1, 4: 2}, Forbidden: []int{9}},
	} {
		c.Seed = seed
		logits := make([]float32, 12)
		for i := range logits {
			logits[i] = float32(rng.NormFloat64())
		}
		logits[rng.IntN(12)] = float32(math.Inf(-1))
		text := make([]int, 10)
		for i := range text {
			text[i] = rng.IntN(len(logits))
		}
		want := expected(c, text, logits)
		s, counts := mustNew(t, c), make([]int, len(logits))
		s.Accept(text[:4]...)
		s.Accept(text[4:]...)
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
		// chi has mean f and variance 2f. The limit is eight standard deviations above the mean.
		if limit := float64(freedom) + 8*math.Sqrt(2*float64(freedom)+1); chi > limit {
			t.Errorf("%+v: chi square %.1f with %d degrees of freedom; counts %v, want shares %.3v", c, chi, freedom, counts, want)
		}
	}
}

// TestLaws checks three properties: a chosen token has a positive probability, at least one token is
// always kept, and equal seeds give equal tokens.
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
			// Rounding may add or remove one token at TopP's boundary, so the
			// tokens on both sides of the boundary count as kept.
			wide := c
			if c.TopP > 0 {
				wide.TopP = min(1, c.TopP*(1+1e-9)+1e-12)
			}
			if p := expected(wide, nil, logits); p[i] == 0 {
				t.Fatalf("chose %d of %v", i, p)
			}
		}
	})
}

// TestTies checks that TopK and TopP keep the lower ids of equally likely tokens.
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

// TestStreams checks that different streams and different seeds give different tokens, and that the same stream gives the same
// tokens.
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

// TestArgmax compares greedy Next with a plain loop that returns the first most likely token or an error.
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
		{MinP: -1}, {MinP: 1.1}, {MinP: nan}, {TypicalP: -1}, {TypicalP: 1.1}, {TypicalP: nan},
		{RepetitionPenalty: -1}, {RepetitionPenalty: inf}, {RepetitionPenalty: nan}, {PresencePenalty: inf}, {FrequencyPenalty: nan},
		{LastTokens: -1}, {LogitBias: map[int]float64{-1: 0}}, {LogitBias: map[int]float64{1: nan}}, {LogitBias: map[int]float64{1: -inf}}, {Forbidden: []int{-1}},
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

// TestAllow: tokens that a mask leaves out are as forbidden, and a mask that is too short leaves out the others.
func TestAllow(t *testing.T) {
	r := rand.New(rand.NewPCG(12, rand.Uint64()))
	for range 300 {
		n := 1 + r.IntN(300)
		logits, mask := make([]float32, n), make([]uint64, r.IntN(n/64+2))
		for i := range mask {
			mask[i] = [...]uint64{0, math.MaxUint64, r.Uint64(), 1 << r.IntN(64)}[r.IntN(4)]
		}
		var out []int
		for i := range logits {
			logits[i] = float32(r.NormFloat64())
			if i/64 >= len(mask) || mask[i/64]>>(i%64)&1 == 0 {
				out = append(out, i)
			}
		}
		c := Config{Temperature: float64(r.IntN(2)), TopK: 50 * r.IntN(2), PresencePenalty: float64(r.IntN(2)), LogitBias: map[int]float64{r.IntN(n): 3}, Seed: r.Uint64()}
		s := mustNew(t, c)
		s.Allow(mask)
		c.Forbidden = out
		other := mustNew(t, c)
		for range 5 {
			got, err := s.Next(logits)
			want, e := other.Next(logits)
			if got != want || (err == nil) != (e == nil) || (err != nil) != (len(out) == n) {
				t.Fatalf("%+v: token %d, %v; want %d, %v", c, got, err, want, e)
			}
			s.Accept(got)
			other.Accept(want)
		}
		s.Allow(nil)
		if _, err := s.Next(logits); err != nil {
			t.Fatal(err)
		}
	}
}
