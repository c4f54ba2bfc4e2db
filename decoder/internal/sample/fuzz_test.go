package sample

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/quick"
)

// FuzzNext checks that any configuration is an error, or that Next chooses a token of the reference distribution, which expected
// computes by sorting. Text and logits are random, with equal, extreme and -Inf logits.
func FuzzNext(f *testing.F) {
	for _, x := range [][10]float64{
		{1}, {0.5, 3, 0.9, 0.1, 0.8, 1.2, 0.5, 0.1, 4, 2}, {1, 0, 0.5}, {1, 0, 0, 0, 0.5}, {0, 0, 0, 0, 0, 1.5, 1, 1}, {math.NaN()}, {1e300, 2, 1e-300}, {1e-320, 0, 0, 1},
		{1, 0, 0, 0, 0, 1e-300, 1e300, -1e300}, {3, 5, 0.99, 0.2, 0.99, 0, 0, 0, 0, 1e300},
	} {
		for seed := range uint64(20) {
			f.Add(x[0], int(x[1]), x[2], x[3], x[4], x[5], x[6], x[7], int(x[8]), x[9], seed)
		}
	}
	f.Fuzz(func(t *testing.T, temperature float64, topK int, topP, minP, typicalP, repetition, presence, frequency float64, last int, bias float64, seed uint64) {
		c := Config{Temperature: temperature, TopK: topK, TopP: topP, MinP: minP, TypicalP: typicalP, RepetitionPenalty: repetition, PresencePenalty: presence,
			FrequencyPenalty: frequency, LastTokens: last, Seed: seed}
		rng := rand.New(rand.NewPCG(seed, 1))
		vocab := 1 + rng.IntN(200)
		for range rng.IntN(3) {
			c.Forbidden = append(c.Forbidden, rng.IntN(vocab))
		}
		if rng.IntN(2) == 0 {
			c.LogitBias = map[int]float64{rng.IntN(vocab): bias, rng.IntN(vocab): -bias}
		}
		s, err := New(c)
		if err != nil {
			if !errors.Is(err, ErrConfig) || c.Validate() == nil {
				t.Fatal(err)
			}
			return
		}
		odd := []float64{0, 0, 1, 1, -1, math.MaxFloat32, -math.MaxFloat32, math.Inf(-1), math.SmallestNonzeroFloat32}
		scale, often := math.Exp(4*rng.NormFloat64()), rng.IntN(5)
		var text []int
		for range 4 {
			logits := make([]float32, vocab)
			for i := range logits {
				if logits[i] = float32(scale * rng.NormFloat64()); rng.IntN(5) < often {
					logits[i] = float32(odd[rng.IntN(len(odd))])
				}
			}
			before := slices.Clone(logits)
			id, err := s.Next(logits)
			if !slices.Equal(before, logits) {
				t.Fatal("the logits were written")
			}
			x := changed(c, text, logits)
			if most := slices.Max(x); most < -math.MaxFloat32 {
				if !errors.Is(err, ErrLogits) {
					t.Fatalf("no token is left: error %v", err)
				}
			} else if err != nil {
				t.Fatal(err)
			} else if c.Temperature == 0 {
				if x[id] != most || slices.Index(x, most) != id {
					t.Fatalf("token %d has %v; most is %v", id, x[id], most)
				}
			} else {
				// Rounding may add or remove one token at a boundary. Rounding also orders equally typical tokens.
				wide, narrow := c, c
				wide.TypicalP, narrow.TypicalP = 0, 0
				if c.TopP > 0 && c.TopP < 1 {
					wide.TopP, narrow.TopP = min(1, c.TopP*(1+1e-9)+1e-12), max(1e-300, c.TopP*(1-1e-9)-1e-12)
				}
				if wide.MinP *= 1 - 1e-9; c.MinP < 1 {
					narrow.MinP = min(1, c.MinP*(1+1e-9))
				}
				upper, lower := expected(wide, text, logits), expected(narrow, text, logits)
				if upper[id] == 0 {
					t.Fatalf("%+v: token %d of %v", c, id, x)
				}
				got := distribution(t, s, logits)
				sum := 0.0
				for i, p := range got {
					if sum += p; upper[i] == 0 || p < upper[i]*(1-1e-6) {
						t.Fatalf("%+v: token %d of %v has %v, want %v", c, i, x, p, upper[i])
					}
				}
				if math.Abs(sum-1) > 1e-6 {
					t.Fatalf("%+v: probabilities sum to %v", c, sum)
				}
				if c.TypicalP == 0 || c.TypicalP == 1 {
					for i, p := range lower {
						if p > 0 && got[i] == 0 {
							t.Fatalf("%+v: token %d of %v has no probability, want %v", c, i, x, p)
						}
					}
				}
			}
			more := make([]int, rng.IntN(6))
			for i := range more {
				more[i] = rng.IntN(vocab)
			}
			s.Accept(more...)
			text = append(text, more...)
		}
	})
}

// TestWeights compares weights with math.Exp for extreme logits and temperatures.
func TestWeights(t *testing.T) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 4))
	for range 200000 {
		most := float32(math.Exp(20*rng.NormFloat64())) * float32(rng.IntN(3)-1)
		temperature := math.Exp(10 * rng.NormFloat64())
		w := newWeights(most, temperature)
		x := float32(float64(most) - temperature*800*math.Pow(rng.Float64(), 4))
		want := math.Exp((float64(x) - float64(most)) / temperature)
		if got := w.of(x); math.Abs(got-want) > 1e-12*want && want > 1e-300 {
			t.Fatalf("exp((%v - %v) / %v) = %v, want %v", x, most, temperature, got, want)
		}
		if x <= most && want > 1e-300 && !(x > w.floor(want*(1-1e-9))) {
			t.Fatalf("%v has weight %v, and is not above the floor %v; most %v, temperature %v", x, want, w.floor(want), most, temperature)
		}
	}
	inf := float32(math.Inf(-1))
	for _, temperature := range []float64{5e-324, 1e-300, 1, 1e300, math.MaxFloat64} {
		for _, most := range []float32{0, 1, -math.MaxFloat32, math.MaxFloat32, math.SmallestNonzeroFloat32} {
			if w := newWeights(most, temperature); w.of(most) != 1 || w.of(inf) != 0 || w.of(most-1) > 1 || !(most > w.floor(1)) {
				t.Errorf("most %v, temperature %v: %v, %v, %v, floor %v", most, temperature, w.of(most), w.of(inf), w.of(most-1), w.floor(1))
			}
		}
	}
}

// TestLast compares last with a reference that sorts.
func TestLast(t *testing.T) {
	check := func(data []byte, seed uint64, k uint16, share float64) bool {
		rng := rand.New(rand.NewPCG(seed, 2))
		n := 1 + rng.IntN(3000)
		all := make(candidates, n)
		kinds := 1 + rng.IntN(n)
		for i := range all {
			all[i] = candidate{int32(i), float32(rng.IntN(kinds)), float64(rng.IntN(100))}
			if len(data) > 8 { // ascending and other patterns
				all[i].key = float32(binary.LittleEndian.Uint16(data[i%(len(data)-2):]))
			}
		}
		sorted := slices.Clone(all)
		slices.SortFunc(sorted, func(a, b candidate) int { return cmp.Or(cmp.Compare(b.key, a.key), cmp.Compare(a.id, b.id)) })
		count := 1 + int(k)%(n+10)
		if got, want := slices.Clone(all).last(count, math.Inf(1)), sorted[min(count, n)-1]; got != want {
			t.Logf("%d of %d: %v, want %v", count, n, got, want)
			return false
		}
		total := 0.0
		for _, c := range all {
			total += c.weight
		}
		_, share = math.Modf(math.Abs(share))
		enough := math.Floor(share * total)
		sum, want := 0.0, sorted[n-1]
		for _, c := range sorted {
			if sum += c.weight; sum >= enough {
				want = c
				break
			}
		}
		got := slices.Clone(all).last(math.MaxInt, enough)
		if got != want {
			t.Logf("%v of %v: %v, want %v", enough, total, got, want)
		}
		return got == want
	}
	if err := quick.Check(check, &quick.Config{MaxCount: 1000}); err != nil {
		t.Error(err)
	}
}

// TestLogProbs compares LogProbs with the logarithm of the softmax and with sorted tokens.
func TestLogProbs(t *testing.T) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 3))
	inf := float32(math.Inf(-1))
	for range 300 {
		logits := make([]float32, 1+rng.IntN(300))
		finite := 0
		for i := range logits {
			if logits[i] = float32(rng.IntN(20)); rng.IntN(10) == 0 {
				logits[i] = inf
			}
			if logits[i] > inf {
				finite++
			}
		}
		id, k := rng.IntN(len(logits)), rng.IntN(len(logits)+3)
		of, likely, err := LogProbs(logits, id, k)
		if finite == 0 {
			if !errors.Is(err, ErrLogits) {
				t.Fatalf("error %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		sum := 0.0
		order := make([]int, len(logits))
		for i, x := range logits {
			order[i] = i
			sum += math.Exp(float64(x))
		}
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(logits[b], logits[a]) })
		p := func(i int) float64 { return float64(logits[i]) - math.Log(sum) }
		if math.Abs(of-p(id)) > 1e-12 && of != p(id) {
			t.Fatalf("token %d: %v, want %v", id, of, p(id))
		}
		if len(likely) != min(k, finite) {
			t.Fatalf("%d likely tokens of %d, and %d were wanted", len(likely), finite, k)
		}
		for i, l := range likely {
			if l.ID != order[i] || math.Abs(l.LogProb-p(l.ID)) > 1e-12 {
				t.Fatalf("likely %d is %+v, want token %d with %v", i, l, order[i], p(order[i]))
			}
		}
	}
	for _, bad := range [][]float32{nil, {float32(math.NaN()), 1}, {inf, inf}, {float32(math.Inf(1))}} {
		if _, _, err := LogProbs(bad, 0, 1); !errors.Is(err, ErrLogits) {
			t.Errorf("%v: error %v", bad, err)
		}
	}
	for _, id := range []int{-1, 2} {
		if _, _, err := LogProbs([]float32{1, 2}, id, 1); !errors.Is(err, ErrConfig) {
			t.Errorf("token %d: error %v", id, err)
		}
	}
}

// TestTokensOutside checks that a token outside the logits is an error, and that forbidding all tokens is an error.
func TestTokensOutside(t *testing.T) {
	for _, c := range []Config{{LogitBias: map[int]float64{3: 1}}, {Forbidden: []int{5}}} {
		if _, err := mustNew(t, c).Next(make([]float32, 3)); !errors.Is(err, ErrConfig) {
			t.Errorf("%+v: error %v", c, err)
		}
	}
	s := mustNew(t, Config{PresencePenalty: 1})
	s.Accept(1, 2, 3)
	if _, err := s.Next(make([]float32, 3)); !errors.Is(err, ErrConfig) {
		t.Errorf("a text with token 3: error %v", err)
	}
	for _, temperature := range []float64{0, 1} {
		s := mustNew(t, Config{Temperature: temperature, Forbidden: []int{0, 2}})
		if _, err := s.Next([]float32{1, float32(math.Inf(-1)), 2}); !errors.Is(err, ErrLogits) {
			t.Errorf("all tokens are forbidden or at -Inf: error %v", err)
		}
		if _, err := s.Next([]float32{float32(math.NaN()), 1, 2}); !errors.Is(err, ErrLogits) {
			t.Errorf("a forbidden token with NaN: error %v", err)
		}
	}
}

// TestCallersMaps checks that a later change of the caller's map and slice does not change the sampler.
func TestCallersMaps(t *testing.T) {
	c := Config{LogitBias: map[int]float64{1: 10}, Forbidden: []int{0}}
	s := mustNew(t, c)
	c.LogitBias[2], c.Forbidden[0] = 20, 1
	if got := next(t, s, []float32{30, 0, 0}); got != 1 {
		t.Errorf("token %d", got)
	}
}

// TestAllocations checks that the steady state allocates nothing.
func TestAllocations(t *testing.T) {
	if raceDetector {
		t.Skip("a pool drops memory under the race detector")
	}
	logits := randomLogits(2000)
	for _, c := range []Config{
		{}, {Temperature: 1}, {Temperature: 1, TopK: 50}, {Temperature: 1, TopP: 0.9, MinP: 0.01}, {Temperature: 1, TypicalP: 0.9},
		{Temperature: 0.7, TopK: 40, TopP: 0.9, MinP: 0.01, TypicalP: 0.9, RepetitionPenalty: 1.1, FrequencyPenalty: 0.1, LastTokens: 64, LogitBias: map[int]float64{1: 1}, Forbidden: []int{2}},
	} {
		s := mustNew(t, c)
		for range 500 {
			s.Accept(next(t, s, logits))
		}
		if n := testing.AllocsPerRun(300, func() { s.Accept(next(t, s, logits)) }); n > 0 {
			t.Errorf("%+v: %v allocations a token", c, n)
		}
	}
}
