package sample

import (
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestSamplerLogProbs compares the probabilities after all steps with a reference that sorts. Calls of LogProbs must not change
// the tokens that Next draws.
func TestSamplerLogProbs(t *testing.T) {
	r := rand.New(rand.NewPCG(11, rand.Uint64()))
	few, left := 0, 0
	for range 400 {
		n := 1 + r.IntN(60)
		logits := make([]float32, n)
		for i := range logits {
			logits[i] = float32(r.NormFloat64() * 3)
		}
		pick := func(values ...float64) float64 { return values[r.IntN(len(values))] }
		c := Config{Temperature: pick(0.5, 1, 1, 2), TopK: int(pick(0, 0, 1, 5, 40)), TopP: pick(0, 0, 0.5, 0.9), MinP: pick(0, 0, 0.05), TypicalP: pick(0, 0, 0.4, 0.9),
			RepetitionPenalty: pick(0, 1.3), PresencePenalty: pick(0, 0.5), FrequencyPenalty: pick(0, 0.2), Seed: r.Uint64()}
		if r.IntN(3) == 0 && n > 2 {
			c.Forbidden = []int{r.IntN(n)}
			c.LogitBias = map[int]float64{r.IntN(n): 2}
		}
		text := []int{r.IntN(n), r.IntN(n), r.IntN(n)}
		s, alone := mustNew(t, c), mustNew(t, c)
		s.Accept(text...)
		alone.Accept(text...)
		want := expected(c, text, logits)
		order := make([]int, 0, n)
		for i, p := range want {
			if p > 0 {
				order = append(order, i)
			}
		}
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(want[b], want[a]) })
		k := 1 + r.IntN(n)
		before := slices.Clone(logits)
		for id := range logits {
			of, likely, err := s.LogProbs(logits, id, k)
			if err != nil {
				t.Fatal(err)
			}
			if !(math.Abs(math.Exp(of)-want[id]) < 1e-9) {
				t.Fatalf("%+v: token %d has probability %g, want %g", c, id, math.Exp(of), want[id])
			}
			if want[id] == 0 && !math.IsInf(of, -1) {
				t.Fatalf("%+v: token %d was left out and has %g", c, id, of)
			}
			if len(likely) != min(k, len(order)) {
				t.Fatalf("%+v: %d tokens of %d that stayed, asked for %d", c, len(likely), len(order), k)
			}
			for i, l := range likely {
				if math.Abs(math.Exp(l.LogProb)-want[order[i]]) > 1e-9 || math.Abs(math.Exp(l.LogProb)-want[l.ID]) > 1e-9 {
					t.Fatalf("%+v: rank %d is token %d with %g, want token %d with %g", c, i, l.ID, math.Exp(l.LogProb), order[i], want[order[i]])
				}
			}
		}
		if len(order) < k {
			few++
		}
		if len(order) < n {
			left++
		}
		if !slices.Equal(before, logits) {
			t.Fatal("LogProbs changed the logits")
		}
		if a, b := next(t, s, logits), next(t, alone, logits); a != b {
			t.Fatalf("%+v: Next chose %d after LogProbs, and %d without", c, a, b)
		}
	}
	if few == 0 || left == 0 {
		t.Errorf("%d cases with fewer tokens than asked for, %d where some were left out: none was tested", few, left)
	}
}

func TestSamplerLogProbsGreedy(t *testing.T) {
	s := mustNew(t, Config{LogitBias: map[int]float64{2: 5}})
	logits := []float32{1, 3, 0}
	for id, want := range []float64{math.Inf(-1), math.Inf(-1), 0} {
		of, likely, err := s.LogProbs(logits, id, 3)
		if err != nil || of != want || len(likely) != 1 || likely[0] != (Likely{ID: 2}) {
			t.Errorf("token %d: %g, %v, %v; want %g and token 2 alone", id, of, likely, err, want)
		}
	}
	if _, likely, err := s.LogProbs(logits, 0, 0); err != nil || likely != nil {
		t.Errorf("with k 0: %v, %v", likely, err)
	}
}

func TestSamplerLogProbsErrors(t *testing.T) {
	nan := float32(math.NaN())
	for _, x := range []struct {
		c      Config
		logits []float32
		id     int
		want   error
	}{
		{Config{Temperature: 1}, []float32{1, nan}, 0, ErrLogits},
		{Config{Temperature: 1}, []float32{1, float32(math.Inf(1))}, 0, ErrLogits},
		{Config{Temperature: 1}, nil, 0, ErrLogits},
		{Config{Temperature: 1}, []float32{1, 2}, 2, ErrConfig},
		{Config{Temperature: 1}, []float32{1, 2}, -1, ErrConfig},
		{Config{Temperature: 1, Forbidden: []int{2}}, []float32{1, 2}, 0, ErrConfig},
		{Config{Temperature: 1, Forbidden: []int{0, 1}}, []float32{1, 2}, 0, ErrLogits},
	} {
		if _, _, err := mustNew(t, x.c).LogProbs(x.logits, x.id, 1); !errors.Is(err, x.want) {
			t.Errorf("%+v, %v, token %d: error %v, want %v", x.c, x.logits, x.id, err, x.want)
		}
	}
}
