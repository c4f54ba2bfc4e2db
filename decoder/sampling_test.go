package decoder

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// start starts a text and returns the text.
func start(t testing.TB, e *Engine, r Request) *Text {
	t.Helper()
	text, err := e.Start(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// randomSampling returns a configuration. Each field has an effect with probability 1/2.
func randomSampling(rng *rand.Rand) Sampling {
	half := func(x float64) float64 {
		if rng.IntN(2) == 0 {
			return 0
		}
		return x
	}
	s := Sampling{
		Temperature: []float64{0, 0.5, 1, 3}[rng.IntN(4)],
		TopK:        int(half(float64(2 + rng.IntN(9)))), TopP: half(0.5 + rng.Float64()/2), MinP: half(0.2 * rng.Float64()), TypicalP: half(0.5 + rng.Float64()/2),
		RepetitionPenalty: half(1 + rng.Float64()/2), PresencePenalty: half(rng.Float64()), FrequencyPenalty: half(0.1 * rng.Float64()),
		LastTokens: int(half(float64(1 + rng.IntN(30)))), Seed: rng.Uint64(),
	}
	if rng.IntN(2) == 0 {
		s.LogitBias = map[int]float64{rng.IntN(13): rng.NormFloat64(), rng.IntN(13): -1}
	}
	if rng.IntN(2) == 0 {
		s.Forbidden = []int{rng.IntN(13)}
	}
	return s
}

// TestSampledTexts checks that a text depends only on its request. The tokens must not change with other texts in the engine, with
// or without guesses, or after a preemption that recomputes the tokens.
func TestSampledTexts(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	reference := smallEngine(t, Options{Context: 200, Exact: true})
	e := smallEngine(t, Options{Context: 200, Tokens: 300, Batch: 5, Chunk: 30, Draft: 20, Exact: true})
	texts := reftest.Cases(t, 75, 150)
	if testing.Short() {
		texts = 40
	}
	requests, running := make([]Request, texts), make([]*Text, texts)
	for i := range requests {
		r := Request{Tokens: 1 + rng.IntN(100), Draft: rng.IntN(7), Ends: []int{}, Sampling: randomSampling(rng), LogProbs: rng.IntN(3)}
		for range 1 + rng.IntN(40) {
			r.Prompt = append(r.Prompt, rng.IntN(13))
		}
		if i > 0 && rng.IntN(3) == 0 { // texts with the same prompt
			r.Prompt = requests[i-1].Prompt
		}
		requests[i], running[i] = r, start(t, e, r)
	}
	different := 0
	for i, r := range requests {
		got, err := ids(running[i])
		if err != nil {
			t.Fatal(err)
		}
		r.Draft = 0
		if want := alone(t, reference, r); !slices.Equal(got, want) {
			t.Errorf("%+v: %v, want %v", requests[i], got, want)
		}
		r.Sampling.Seed++
		if !slices.Equal(got, alone(t, reference, r)) {
			different++
		}
	}
	if err := pagesLost(e); err != nil {
		t.Error(err)
	}
	if st := e.Stats(); st.Preempted == 0 || st.Accepted == 0 || st.Accepted == st.Guessed || st.SharedTokens == 0 || st.MostTexts < 2 {
		t.Errorf("a kind is missing: %+v", st)
	}
	if different < texts/2 {
		t.Errorf("another seed changed %d of %d texts", different, texts)
	}
}

// TestSamplingFields checks the documented effect of each field on a text.
func TestSamplingFields(t *testing.T) {
	e := smallEngine(t, Options{Context: 200, Exact: true})
	prompt := []int{1, 2, 3}
	of := func(s Sampling) []int {
		return alone(t, e, Request{Prompt: prompt, Tokens: 60, Ends: []int{}, Sampling: s})
	}
	kinds := func(ids []int) int {
		slices.Sort(ids)
		return len(slices.Compact(ids))
	}
	greedy := of(Sampling{})
	for _, s := range []Sampling{
		{Temperature: 2, TopK: 1}, {Temperature: 2, TopP: 1e-9}, {Temperature: 2, MinP: 1}, {Temperature: 1e-9}, {Seed: 5, TopK: 3},
		{RepetitionPenalty: 1}, {LogitBias: map[int]float64{3: 0}},
	} {
		if got := of(s); !slices.Equal(got, greedy) {
			t.Errorf("%+v: %v, want the most likely tokens %v", s, got, greedy)
		}
	}
	for _, s := range []Sampling{
		{Temperature: 1}, {RepetitionPenalty: 1.5}, {RepetitionPenalty: 0.5}, {PresencePenalty: 1}, {PresencePenalty: -1}, {FrequencyPenalty: 0.5}, {LogitBias: map[int]float64{greedy[0]: -1}},
		{Forbidden: []int{greedy[0]}}, {Temperature: 1, TypicalP: 0.5},
	} {
		if got := of(s); slices.Equal(got, greedy) {
			t.Errorf("%+v has no effect", s)
		}
	}
	for _, c := range []struct {
		s           Sampling
		least, most int
	}{
		{Sampling{Temperature: 1e9}, 12, 13}, {Sampling{Temperature: 1e9, TopK: 2}, 2, 13},
		{Sampling{Temperature: 1e9, Forbidden: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}, 2, 2},
		{Sampling{Temperature: 1, LogitBias: map[int]float64{7: 1e30}}, 1, 1},
		{Sampling{PresencePenalty: 1e30}, 10, 10}, {Sampling{FrequencyPenalty: 1e30}, 13, 13}, // the prompt has three others
	} {
		if n := kinds(of(c.s)); n < c.least || n > c.most {
			t.Errorf("%+v: %d different tokens, want %d to %d", c.s, n, c.least, c.most)
		}
	}
	// With this penalty, no token occurs twice before every token has occurred once. The prompt's tokens count.
	round := append(slices.Clone(prompt), of(Sampling{FrequencyPenalty: 1e30})...)
	for i := 0; i+13 <= len(round); i += 13 {
		if n := kinds(slices.Clone(round[i : i+13])); n != 13 {
			t.Errorf("tokens %d to %d: %d different ones", i, i+12, n)
		}
	}
	// With LastTokens 1, a text does not repeat its last token, and may repeat the token before the last token.
	last := append(slices.Clone(prompt), of(Sampling{Temperature: 1e9, TopK: 2, PresencePenalty: 1e30, LastTokens: 1})...)
	again := false
	for i := range len(last) - 3 {
		if last[i+3] == last[i+2] {
			t.Errorf("token %d is %d again", i+3, last[i+2])
		}
		again = again || last[i+3] == last[i+1]
	}
	if !again {
		t.Error("no token came back")
	}
}

// TestSampledLogProbs checks that log probabilities are the model's, for any Sampling.
func TestSampledLogProbs(t *testing.T) {
	e := smallEngine(t, Options{Context: 200, Exact: true})
	prompt := []int{1, 2, 3}
	text := start(t, e, Request{Prompt: prompt, Tokens: 40, Ends: []int{}, LogProbs: 3,
		Sampling: Sampling{Temperature: 0.7, PresencePenalty: 0.5, LogitBias: map[int]float64{4: 2}, Forbidden: []int{5}}})
	tokens, likely, logprobs := slices.Clone(prompt), [][]Likely{}, []float64{}
	for token, err := range text.Tokens() {
		if err != nil {
			t.Fatal(err)
		}
		tokens, likely, logprobs = append(tokens, token.ID), append(likely, token.Likely), append(logprobs, token.LogProb)
	}
	want, err := e.LogProbs(context.Background(), tokens)
	if err != nil {
		t.Fatal(err)
	}
	for i, x := range logprobs {
		if math.Abs(x-want[i+2]) > 1e-5 {
			t.Errorf("token %d: %v, want %v", i, x, want[i+2])
		}
		if len(likely[i]) != 3 || likely[i][0].LogProb < likely[i][1].LogProb || likely[i][1].LogProb < likely[i][2].LogProb {
			t.Errorf("token %d: most likely are %v", i, likely[i])
		}
		for _, l := range likely[i] {
			if l.ID == tokens[3+i] && l.LogProb != x {
				t.Errorf("token %d: %v, and %v", i, x, l)
			}
		}
	}
}

// TestSamplingErrors checks that a value out of range is an error with the field's name.
func TestSamplingErrors(t *testing.T) {
	e := smallEngine(t, Options{Context: 200})
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		s    Sampling
		want string
	}{
		{Sampling{Temperature: -1}, "Temperature is -1"}, {Sampling{Temperature: nan}, "Temperature is NaN"}, {Sampling{Temperature: inf}, "Temperature is +Inf"},
		{Sampling{TopK: -1}, "TopK is -1"}, {Sampling{TopP: 1.5}, "TopP is 1.5"}, {Sampling{TopP: nan}, "TopP is NaN"},
		{Sampling{MinP: -0.1}, "MinP is -0.1"}, {Sampling{MinP: 2}, "MinP is 2"}, {Sampling{TypicalP: -1}, "TypicalP is -1"}, {Sampling{TypicalP: 1.1}, "TypicalP is 1.1"},
		{Sampling{RepetitionPenalty: -1}, "RepetitionPenalty is -1"}, {Sampling{RepetitionPenalty: inf}, "RepetitionPenalty is +Inf"},
		{Sampling{PresencePenalty: nan}, "PresencePenalty is NaN"}, {Sampling{FrequencyPenalty: inf}, "FrequencyPenalty is +Inf"},
		{Sampling{LastTokens: -1}, "LastTokens is -1"}, {Sampling{LogitBias: map[int]float64{13: 1}}, "LogitBias has token 13"},
		{Sampling{LogitBias: map[int]float64{-1: 1}}, "LogitBias has token -1"}, {Sampling{LogitBias: map[int]float64{3: -inf}}, "LogitBias[3] is -Inf"},
		{Sampling{Forbidden: []int{1, 13}}, "Forbidden[1] is 13"}, {Sampling{Forbidden: []int{-1}}, "Forbidden[0] is -1"},
	} {
		text, err := e.Start(context.Background(), Request{Prompt: []int{1}, Sampling: c.s})
		if text != nil || !errors.Is(err, ErrConfig) || !strings.HasPrefix(err.Error(), "decoder: Request: Sampling."+c.want) {
			t.Errorf("%+v: error %v", c.s, err)
		}
	}
	all := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	text := start(t, e, Request{Prompt: []int{1}, Sampling: Sampling{Forbidden: all}})
	if _, err := text.Wait(); !errors.Is(err, ErrLogits) || !strings.Contains(err.Error(), "after token 1") {
		t.Errorf("no token is left: error %v", err)
	}
}
