package decoder

import (
	"maps"
	"math"
	"slices"

	"gorgonia.org/leanattention/decoder/internal/sample"
)

// ErrLogits is returned for logits without a most likely token: a NaN, +Inf, or all tokens at -Inf or forbidden.
var ErrLogits = sample.ErrLogits

// Sampling says how the tokens of a text are chosen from the model's logits. The zero value chooses the most likely token.
//
// The fields are applied in this order: LogitBias, the penalties, Forbidden, Temperature, TopK, TopP, MinP, TypicalP. Each one
// looks at what the fields before it have left. llama.cpp and transformers have the same order, with two exceptions: llama.cpp
// applies Temperature last, and TypicalP before TopP. Among equally likely tokens the lower id comes first.
type Sampling struct {
	// Temperature divides logits. 0 chooses the most likely token: TopK, TopP, MinP, TypicalP and Seed then have no effect.
	Temperature float64

	TopK     int     // as many of the most likely tokens can be chosen; 0: all
	TopP     float64 // the fewest most likely tokens with at least this probability together can be chosen; 0 and 1: all
	MinP     float64 // tokens with at least this share of the most likely token's probability can be chosen; 0: all
	TypicalP float64 // as TopP, with those tokens first whose probability is nearest to the expected one; 0 and 1: all

	// RepetitionPenalty makes tokens of the text less likely: positive logits are divided by it, and others are multiplied. 0 and
	// 1: no change. The tokens of the prompt count, as in llama.cpp and transformers.
	RepetitionPenalty float64
	PresencePenalty   float64 // is subtracted from the logits of tokens of the text, the prompt's included
	FrequencyPenalty  float64 // is subtracted as often as the text has the token, in the prompt, too
	LastTokens        int     // the penalties look at this many tokens at the end of the text; 0: at all

	LogitBias map[int]float64 // is added to the logits of these tokens
	Forbidden []int           // tokens that are never chosen

	// Seed chooses the random numbers. A text depends on its seed, and not on other texts of the engine. Texts with one prompt
	// and one seed are equal: texts that shall differ need different seeds.
	Seed uint64
}

// sampler chooses the tokens of one text.
type sampler struct {
	*sample.Sampler
	logprobs int
}

// newSampler returns the sampler of a text, which begins with a prompt.
func newSampler(c *Sampling, vocab, logprobs int, prompt []int) (*sampler, error) {
	fail := func(err error) error { return requestError(ErrConfig, "Sampling.%v", err) }
	config := sample.Config{
		Temperature: c.Temperature, TopK: c.TopK, TopP: c.TopP, MinP: c.MinP, TypicalP: c.TypicalP,
		RepetitionPenalty: c.RepetitionPenalty, PresencePenalty: c.PresencePenalty, FrequencyPenalty: c.FrequencyPenalty,
		LastTokens: c.LastTokens, LogitBias: c.LogitBias, Forbidden: c.Forbidden, Seed: c.Seed,
	}
	if err := config.Validate(); err != nil {
		return nil, fail(err)
	}
	for _, id := range slices.Sorted(maps.Keys(c.LogitBias)) {
		if id >= vocab {
			return nil, requestError(ErrConfig, "Sampling.LogitBias has token %d, not in [0, %d)", id, vocab)
		}
	}
	for i, id := range c.Forbidden {
		if id >= vocab {
			return nil, requestError(ErrConfig, "Sampling.Forbidden[%d] is %d, not in [0, %d)", i, id, vocab)
		}
	}
	s, err := sample.New(config)
	if err != nil {
		return nil, fail(err)
	}
	s.Accept(prompt...)
	return &sampler{s, logprobs}, nil
}

// next chooses the next token of the text.
func (s *sampler) next(logits []float32) (t Token, err error) {
	if t.ID, err = s.Next(logits); err != nil {
		return t, err
	}
	s.Accept(t.ID)
	if s.logprobs > 0 {
		t.LogProb, t.Likely, err = likelihood(logits, t.ID, s.logprobs)
	}
	return t, err
}

// likelihood returns the logarithm of a token's probability, and the n most likely tokens.
func likelihood(logits []float32, id, n int) (of float64, likely []Likely, err error) {
	of, all, err := sample.LogProbs(logits, id, n)
	for _, x := range all {
		likely = append(likely, Likely(x))
	}
	return of, likely, err
}

// capLogits bounds logits: x becomes limit * tanh(x / limit).
func capLogits(logits []float32, limit float64) {
	for i, x := range logits {
		logits[i] = float32(limit * math.Tanh(float64(x)/limit))
	}
}
