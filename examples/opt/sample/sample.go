// Package sample chooses the next token from a row of logits.
package sample

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/leanattention/internal/choose"
)

// Config says how a token is chosen from logits x over a vocabulary:
//
//	p[i] = exp(x[i]/Temperature) / sum over j in K of exp(x[j]/Temperature)
//
// for the tokens i in K, and p[i] = 0 for other tokens. K is all tokens, then the TopK most likely, then the smallest
// set of most likely tokens whose probabilities, after TopK, sum to TopP or more. Among equally likely tokens the
// lower id comes first.
type Config struct {
	// Temperature 0 is greedy: the most likely token, and among equals the lowest id. TopK, TopP and Seed then have
	// no effect.
	Temperature float64
	TopK        int     // 0: all tokens
	TopP        float64 // in [0, 1]; 0 and 1: all tokens

	// Seed and Stream choose the random numbers. The samplers of a batch share a Seed and have different Streams, so
	// that the text of one sequence does not depend on the others.
	Seed, Stream uint64
}

// ErrConfig is returned for a value of a [Config] outside its range.
var ErrConfig = errors.New("sample: value out of range")

// ErrLogits is returned for logits without a most likely token: an empty row, or one with a NaN or +Inf.
var ErrLogits = errors.New("sample: logits without a most likely token")

// Validate returns an error for the first value of c that is out of its range.
func (c Config) Validate() error {
	switch {
	case !(c.Temperature >= 0) || math.IsInf(c.Temperature, 1):
		return fmt.Errorf("%w: temperature %v is not a finite number >= 0", ErrConfig, c.Temperature)
	case c.TopK < 0:
		return fmt.Errorf("%w: top-k %d is negative", ErrConfig, c.TopK)
	case !(c.TopP >= 0 && c.TopP <= 1):
		return fmt.Errorf("%w: top-p %v is not in [0, 1]", ErrConfig, c.TopP)
	}
	return nil
}

// Sampler chooses tokens. It is not safe for use by several goroutines at once.
type Sampler struct {
	config Config
	random *rand.Rand
	memory choose.Memory
}

// New makes a sampler.
func New(c Config) (*Sampler, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return &Sampler{config: c, random: rand.New(rand.NewPCG(c.Seed, c.Stream))}, nil
}

// Next chooses a token. A token with a logit of -Inf is never chosen. Next draws one random number a call, and none
// if greedy.
func (s *Sampler) Next(logits []float32) (int, error) {
	best := choose.Largest(logits)
	if best < 0 {
		return 0, wrong(logits)
	}
	if s.config.Temperature == 0 {
		return best, nil
	}
	return s.memory.Token(logits, s.config.Temperature, s.config.TopK, s.config.TopP, s.random.Float64()), nil
}

// wrong returns why no token is the most likely one.
func wrong(logits []float32) error {
	if len(logits) == 0 {
		return fmt.Errorf("%w: none given", ErrLogits)
	}
	for i, x := range logits {
		if !(x <= math.MaxFloat32) {
			return fmt.Errorf("%w: token %d has %v", ErrLogits, i, x)
		}
	}
	return fmt.Errorf("%w: every token has %v", ErrLogits, logits[0])
}
