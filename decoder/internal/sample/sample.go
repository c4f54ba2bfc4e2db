// Package sample chooses the next token of a text from a row of logits.
package sample

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
)

// Config configures the choice of a token from logits x over a vocabulary. The zero value is greedy. The steps, in order:
//
//  1. Bias: LogitBias[i] is added to x[i].
//  2. Penalties: let the text, including the prompt, contain token i count > 0 times. x[i] > 0 is divided by RepetitionPenalty,
//     and x[i] <= 0 is multiplied by RepetitionPenalty. Then PresencePenalty + count*FrequencyPenalty is subtracted.
//  3. Forbidden tokens are removed.
//  4. Temperature 0: the most likely token is chosen, and steps 5 to 9 have no effect.
//  5. p[i] is proportional to exp(x[i]/Temperature).
//  6. TopK: the TopK most likely tokens are kept.
//  7. TopP: the smallest set of most likely tokens with a total probability of at least TopP is kept.
//  8. MinP: tokens with at least MinP times the probability of the most likely token are kept.
//  9. TypicalP: the smallest set of most typical tokens with a total probability of at least TypicalP is kept. The most typical
//     token is the token whose -log p[i] is nearest to the entropy of p (https://arxiv.org/abs/2202.00666).
//
// Each step normalizes the probabilities of the remaining tokens to sum 1. Among equally likely tokens, the token with the lower
// id comes first. A token with less than 2^-44 times the probability of the most likely token is never chosen.
//
// Both transformers (GenerationMixin._get_logits_processor, 5.17) and llama.cpp (default sampler chain) have the order bias,
// penalties, top-k, top-p, min-p. The two differ in two places. Config has the order of transformers, since published
// generation_config.json files are written for transformers:
//
//   - Temperature comes before top-k in transformers, and after all other steps in llama.cpp. With temperature 1 there is no
//     difference.
//   - Typical comes after min-p in transformers, and between top-k and top-p in llama.cpp.
//
// In both, the penalties count the prompt's tokens. transformers has no presence and frequency penalties: step 2 is the step of
// llama.cpp.
type Config struct {
	Temperature float64 // at least 0
	TopK        int     // 0: all tokens
	TopP        float64 // in [0, 1]; 0 and 1: all tokens
	MinP        float64 // in [0, 1]; 0: all tokens
	TypicalP    float64 // in [0, 1]; 0 and 1: all tokens

	RepetitionPenalty float64 // above 0; 0 and 1: none
	PresencePenalty   float64 // 0: none
	FrequencyPenalty  float64 // 0: none
	LastTokens        int     // number of tokens at the end of the text that the penalties count; 0: all tokens

	LogitBias map[int]float64 // by token; finite
	Forbidden []int           // tokens that are never chosen

	// Seed and Stream select the random numbers. Samplers with the same seed and different streams are independent.
	Seed, Stream uint64
}

// ErrConfig is returned for a value of a [Config] outside its range.
var ErrConfig = errors.New("value out of range")

// ErrLogits is returned for logits without a most likely token: the row is empty, a logit is NaN or +Inf, or every token is at
// -Inf or forbidden.
var ErrLogits = errors.New("logits without a most likely token")

// Changes reports whether steps 1 to 3 have an effect.
func (c Config) Changes() bool {
	return c.RepetitionPenalty != 0 && c.RepetitionPenalty != 1 || c.PresencePenalty != 0 || c.FrequencyPenalty != 0 ||
		len(c.LogitBias) > 0 || len(c.Forbidden) > 0
}

// Validate returns an error for the first value of c that is out of its range. The error begins with the field's name.
func (c Config) Validate() error {
	for _, x := range []struct {
		name  string
		value float64
		ok    bool
		want  string
	}{
		{"Temperature", c.Temperature, c.Temperature >= 0, "a finite number of at least 0"},
		{"TopP", c.TopP, c.TopP >= 0 && c.TopP <= 1, "in [0, 1]"},
		{"MinP", c.MinP, c.MinP >= 0 && c.MinP <= 1, "in [0, 1]"},
		{"TypicalP", c.TypicalP, c.TypicalP >= 0 && c.TypicalP <= 1, "in [0, 1]"},
		{"RepetitionPenalty", c.RepetitionPenalty, c.RepetitionPenalty >= 0, "a finite number of at least 0"},
		{"PresencePenalty", c.PresencePenalty, true, "finite"},
		{"FrequencyPenalty", c.FrequencyPenalty, true, "finite"},
	} {
		if !x.ok || math.IsInf(x.value, 0) || math.IsNaN(x.value) {
			return fmt.Errorf("%s is %v, not %s", x.name, x.value, x.want)
		}
	}
	switch {
	case c.TopK < 0:
		return fmt.Errorf("TopK is %d, not at least 0", c.TopK)
	case c.LastTokens < 0:
		return fmt.Errorf("LastTokens is %d, not at least 0", c.LastTokens)
	}
	for _, id := range slices.Sorted(maps.Keys(c.LogitBias)) {
		if b := c.LogitBias[id]; id < 0 {
			return fmt.Errorf("LogitBias has token %d, which is negative", id)
		} else if math.IsNaN(b) || math.IsInf(b, 0) {
			return fmt.Errorf("LogitBias[%d] is %v, not finite: list a token in Forbidden to leave it out", id, b)
		}
	}
	for i, id := range c.Forbidden {
		if id < 0 {
			return fmt.Errorf("Forbidden[%d] is %d, which is negative", i, id)
		}
	}
	return nil
}

// Sampler chooses the tokens of one text. A Sampler is not safe for concurrent use.
type Sampler struct {
	config    Config
	random    *rand.Rand
	bias      []bias
	forbidden []int
	most      int // highest token of the configuration and the text; -1: none

	allowed   []uint64    // see Allow
	penalized bool        // reports whether a penalty has an effect
	counts    map[int]int // number of occurrences in the text by token
	ring      []int       // ring buffer of the last tokens, if LastTokens is not 0
	oldest    int         // index in ring
}

type bias struct {
	id   int
	more float64
}

// New returns a sampler of an empty text.
func New(c Config) (*Sampler, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("sample: %w: %w", ErrConfig, err)
	}
	if c.RepetitionPenalty == 0 {
		c.RepetitionPenalty = 1
	}
	s := &Sampler{config: c, random: rand.New(rand.NewPCG(c.Seed, c.Stream)), forbidden: slices.Clone(c.Forbidden), most: -1}
	for id, b := range c.LogitBias {
		s.bias = append(s.bias, bias{id, b})
		s.most = max(s.most, id)
	}
	for _, id := range c.Forbidden {
		s.most = max(s.most, id)
	}
	s.config.LogitBias, s.config.Forbidden = nil, nil // the caller may change the map and the slice
	if s.penalized = c.RepetitionPenalty != 1 || c.PresencePenalty != 0 || c.FrequencyPenalty != 0; s.penalized {
		s.counts = map[int]int{}
	}
	return s, nil
}

// Accept appends tokens to the text. The caller passes the tokens of the prompt and each chosen token. Accept panics if a
// penalty has an effect and a token is negative.
func (s *Sampler) Accept(tokens ...int) {
	if !s.penalized {
		return
	}
	if n := s.config.LastTokens; n > 0 && len(tokens) > n {
		tokens = tokens[len(tokens)-n:]
	}
	for _, id := range tokens {
		if id < 0 {
			panic(fmt.Sprintf("sample: Accept: token %d", id))
		}
		s.most = max(s.most, id)
		s.counts[id]++
		switch n := s.config.LastTokens; {
		case n == 0:
		case len(s.ring) < n:
			s.ring = append(s.ring, id)
		default:
			old := s.ring[s.oldest]
			if s.counts[old]--; s.counts[old] == 0 {
				delete(s.counts, old)
			}
			s.ring[s.oldest] = id
			s.oldest = (s.oldest + 1) % n
		}
	}
}

// Allow limits later calls of Next to the tokens of a mask: token i has bit i%64 of element i/64, and tokens behind the mask are left out.
// nil allows all tokens. The mask must not change during these calls.
func (s *Sampler) Allow(mask []uint64) { s.allowed = mask }

// memory holds the buffers of a call of Next. Samplers share a pool of buffers, since few of many samplers choose at the same
// time.
type memory struct {
	logits     []float32
	candidates candidates
	ranks      candidates
	sums       []float64 // see draw
}

var pool = sync.Pool{New: func() any { return new(memory) }}

// Next chooses a token and does not append the token to the text. A token with a logit of -Inf is never chosen. Next draws one
// random number per call, or none if Temperature is 0. Next does not change logits.
//
// Cost: linear in the number of logits.
func (s *Sampler) Next(logits []float32) (int, error) {
	best := largest(logits)
	if best < 0 {
		return 0, wrong(logits)
	}
	if s.most >= len(logits) {
		return 0, fmt.Errorf("sample: %w: token %d of the text or of the configuration, and there are %d logits", ErrConfig, s.most, len(logits))
	}
	changes := s.changes()
	if !changes && s.config.Temperature == 0 {
		return best, nil
	}
	m := pool.Get().(*memory)
	defer pool.Put(m)
	if changes {
		logits = s.change(m, logits)
		if best = largest(logits); best < 0 {
			return 0, fmt.Errorf("sample: %w: all tokens that are allowed and not forbidden have -Inf", ErrLogits)
		}
		if s.config.Temperature == 0 {
			return best, nil
		}
	}
	w := newWeights(logits[best], s.config.Temperature)
	if !s.config.restricted(len(logits)) {
		return m.draw(w, logits, s.random.Float64()), nil
	}
	total := m.restrict(&s.config, logits, w)
	return m.pick(total * s.random.Float64()), nil
}

// Draw draws the random number in [0, 1) of a call of Next with a temperature above 0, for a caller that chooses in its place: the
// chosen token is the first one, in the order of ids, at which the sum of probabilities exceeds the number.
func (s *Sampler) Draw() float64 { return s.random.Float64() }

// change returns the logits with bias and penalties, and with -Inf for tokens that are forbidden or not allowed.
func (s *Sampler) change(m *memory, logits []float32) []float32 {
	m.logits = append(m.logits[:0], logits...)
	for _, b := range s.bias {
		m.logits[b.id] = finite(logits[b.id], float64(logits[b.id])+b.more)
	}
	for id, n := range s.counts {
		old := m.logits[id]
		x := float64(old)
		if x > 0 {
			x /= s.config.RepetitionPenalty
		} else {
			x *= s.config.RepetitionPenalty
		}
		m.logits[id] = finite(old, x-(s.config.PresencePenalty+float64(n)*s.config.FrequencyPenalty))
	}
	none := float32(math.Inf(-1))
	for _, id := range s.forbidden {
		m.logits[id] = none
	}
	if s.allowed == nil {
		return m.logits
	}
	for at := 0; at < len(m.logits); at += 64 {
		word := uint64(0)
		if at/64 < len(s.allowed) {
			word = s.allowed[at/64]
		}
		if word == math.MaxUint64 {
			continue
		}
		part := m.logits[at:min(at+64, len(m.logits))]
		for i := range part {
			if word>>i&1 == 0 {
				part[i] = none
			}
		}
	}
	return m.logits
}

// changes reports whether change has an effect.
func (s *Sampler) changes() bool {
	return s.allowed != nil || len(s.bias)+len(s.forbidden)+len(s.counts) > 0
}

// finite returns the new value x of a logit, clamped to finite numbers. If the old value is -Inf, finite returns -Inf.
func finite(old float32, x float64) float32 {
	if math.IsInf(float64(old), -1) {
		return old
	}
	return float32(max(-math.MaxFloat32, min(math.MaxFloat32, x)))
}

// Likely is a token and the natural logarithm of its probability.
type Likely struct {
	ID      int
	LogProb float64
}

// LogProbs returns the natural logarithm of the probability of token id, and the k most likely tokens in descending order. The
// probabilities are the softmax of the logits, without bias, penalties and temperature. likely has fewer than k tokens if fewer
// than k tokens have a logit above -Inf.
func LogProbs(logits []float32, id, k int) (of float64, likely []Likely, err error) {
	best := largest(logits)
	switch {
	case best < 0:
		return 0, nil, wrong(logits)
	case id < 0 || id >= len(logits):
		return 0, nil, fmt.Errorf("sample: %w: token %d, and there are %d logits", ErrConfig, id, len(logits))
	}
	w, sum := newWeights(logits[best], 1), 0.0
	for _, x := range logits {
		sum += w.of(x)
	}
	top, log := w.most, math.Log(sum)
	of = float64(logits[id]) - top - log
	if k <= 0 {
		return of, nil, nil
	}
	m := pool.Get().(*memory)
	defer pool.Put(m)
	m.collect(logits, float32(math.Inf(-1)), k)
	slices.SortFunc(m.candidates, func(a, b candidate) int { return cmp.Or(cmp.Compare(b.key, a.key), cmp.Compare(a.id, b.id)) })
	likely = make([]Likely, len(m.candidates))
	for i, c := range m.candidates {
		likely[i] = Likely{int(c.id), float64(c.key) - top - log}
	}
	return of, likely, nil
}

// largest returns the index of the first largest element of x. largest returns -1 if x is empty, contains NaN or +Inf, or
// contains only -Inf.
func largest(x []float32) int {
	best, top := -1, float32(math.Inf(-1))
	for i := 0; i < len(x); i++ {
		// Most elements are at most the maximum so far. The loop compares four elements at a time.
		for i+4 <= len(x) && x[i] <= top && x[i+1] <= top && x[i+2] <= top && x[i+3] <= top {
			i += 4
		}
		if i == len(x) {
			break
		}
		switch v := x[i]; {
		case v <= top:
		case v <= math.MaxFloat32:
			best, top = i, v
		default:
			return -1
		}
	}
	return best
}

// wrong returns the error of logits without a most likely token.
func wrong(logits []float32) error {
	if len(logits) == 0 {
		return fmt.Errorf("sample: %w: none given", ErrLogits)
	}
	for i, x := range logits {
		if !(x <= math.MaxFloat32) {
			return fmt.Errorf("sample: %w: token %d has %v", ErrLogits, i, x)
		}
	}
	return fmt.Errorf("sample: %w: every token has %v", ErrLogits, logits[0])
}
