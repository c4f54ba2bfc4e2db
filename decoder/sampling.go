package decoder

import (
	"maps"
	"math"
	"slices"

	"gorgonia.org/leanattention/decoder/internal/sample"
	"gorgonia.org/leanattention/nn"
)

// ErrLogits is returned for logits without a most likely token: a logit is NaN or +Inf, or every token is at -Inf or forbidden.
var ErrLogits = sample.ErrLogits

// Sampling configures the choice of tokens from the model's logits. The zero value chooses the most likely token.
//
// The fields are applied in this order, to the tokens that [Request].Constraint allows: LogitBias, the penalties, Forbidden, Temperature, TopK, TopP, MinP, TypicalP. Each filter
// applies to the tokens that remain after the filters before, with probabilities that sum to 1. llama.cpp and transformers have
// the same order, with two exceptions: llama.cpp applies Temperature last, and TypicalP before TopP. Among equally likely tokens,
// the token with the lower id comes first.
type Sampling struct {
	// Temperature divides the logits. 0 chooses the most likely token. TopK, TopP, MinP, TypicalP and Seed then have no effect.
	Temperature float64

	// TopK keeps the TopK most likely tokens. 0 keeps all tokens.
	TopK int
	// TopP keeps the smallest set of most likely tokens with a total probability of at least TopP. 0 and 1 keep all tokens.
	TopP float64
	// MinP keeps tokens with at least MinP times the probability of the most likely token. 0 keeps all tokens.
	MinP float64
	// TypicalP keeps the smallest set of most typical tokens with a total probability of at least TypicalP. The most typical
	// token is the token whose negative log probability is nearest to the entropy. 0 and 1 keep all tokens.
	TypicalP float64

	// RepetitionPenalty makes tokens of the text less likely. Positive logits are divided by the penalty, and other logits are
	// multiplied by the penalty. 0 and 1 have no effect. As in llama.cpp and transformers, the text includes the prompt.
	RepetitionPenalty float64
	// PresencePenalty is subtracted from the logit of each token that occurs in the text, including the prompt.
	PresencePenalty float64
	// FrequencyPenalty times the number of occurrences in the text, including the prompt, is subtracted from a token's logit.
	FrequencyPenalty float64
	// LastTokens limits the penalties to the last LastTokens tokens of the text. 0 means the whole text.
	LastTokens int

	// LogitBias maps a token to a number that is added to the token's logit.
	LogitBias map[int]float64
	// Forbidden lists tokens that are never chosen.
	Forbidden []int

	// Seed selects the random numbers. A text depends on Seed, and not on other texts of the engine. Two texts with the same
	// prompt and the same Seed are equal.
	Seed uint64
}

// sampler chooses the tokens of one text.
type sampler struct {
	*sample.Sampler
	logprobs int
	choice   *nn.Choice // the rule by which a GPU may choose; nil: the host chooses
	bounds   Constraint // nil: none
}

// plain reports whether the most likely token, and nothing else, is wanted.
func (s *sampler) plain() bool { return s.choice != nil && s.choice.Temperature == 0 }

// draw draws a random number for a choice, as Next does.
func (s *sampler) draw() draw {
	if s.plain() {
		return draw{}
	}
	return draw{*s.choice, s.Draw()}
}

// newSampler returns the sampler of a text that begins with prompt. draws reports that a GPU can choose by draws.
func newSampler(r *Request, vocab int, prompt []int, draws bool) (*sampler, error) {
	c := &r.Sampling
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
	var choice *nn.Choice
	switch {
	case r.LogProbs > 0 || r.Constraint != nil || config.Changes():
	case c.Temperature == 0:
		choice = &nn.Choice{}
	case draws && c.MinP == 0 && (c.TypicalP == 0 || c.TypicalP == 1):
		choice = &nn.Choice{Temperature: c.Temperature, TopK: c.TopK, TopP: c.TopP}
	}
	return &sampler{s, r.LogProbs, choice, r.Constraint}, nil
}

// next chooses the next token of the text.
func (s *sampler) next(logits []float32) (t Token, err error) {
	if s.bounds != nil {
		s.Allow(s.bounds.Allowed())
	}
	if t.ID, err = s.Next(logits); err != nil {
		return t, err
	}
	s.Accept(t.ID)
	if s.bounds != nil {
		s.bounds.Accept(t.ID)
	}
	if s.logprobs > 0 {
		t.LogProb, t.Likely, err = likelihood(logits, t.ID, s.logprobs)
	}
	return t, err
}

// likelihood returns the natural logarithm of a token's probability, and the n most likely tokens.
func likelihood(logits []float32, id, n int) (of float64, likely []Likely, err error) {
	of, all, err := sample.LogProbs(logits, id, n)
	for _, x := range all {
		likely = append(likely, Likely(x))
	}
	return of, likely, err
}

// capLogits replaces each logit x by limit * tanh(x / limit).
func capLogits(logits []float32, limit float64) {
	for i, x := range logits {
		logits[i] = float32(limit * math.Tanh(float64(x)/limit))
	}
}
