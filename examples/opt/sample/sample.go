// Package sample chooses the next token from a row of logits.
package sample

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
)

// Config says how a token is chosen from logits x over a vocabulary:
//
//	p[i] = exp(x[i]/Temperature) / sum over j in K of exp(x[j]/Temperature)
//
// for the tokens i in K, and p[i] = 0 for the others. K is everything, then the
// TopK most likely of it, then the smallest set of most likely tokens whose
// probabilities (among those that TopK left) add up to TopP or more. Of equally
// likely tokens the lower id comes first.
type Config struct {
	// Temperature 0 is greedy: the most likely token, and of equals the lowest
	// id. It leaves nothing to TopK, TopP and Seed.
	Temperature float64
	TopK        int     // 0: all tokens
	TopP        float64 // in (0, 1]; 1: all tokens

	// Seed and Stream choose the random numbers. The samplers of a batch have
	// one Seed and each a Stream of its own, so that the text of one sequence
	// does not depend on the others.
	Seed, Stream uint64
}

// ErrConfig is a value of a [Config] outside its range.
var ErrConfig = errors.New("sample: value out of range")

// ErrLogits is a row of logits that has no most likely token: an empty one, or
// one with a NaN or +Inf in it.
var ErrLogits = errors.New("sample: logits without a most likely token")

// Validate tells the first value of c that is out of its range.
func (c Config) Validate() error {
	switch {
	case !(c.Temperature >= 0) || math.IsInf(c.Temperature, 1):
		return fmt.Errorf("%w: temperature %v is not a finite number >= 0", ErrConfig, c.Temperature)
	case c.TopK < 0:
		return fmt.Errorf("%w: top-k %d is negative", ErrConfig, c.TopK)
	case !(c.TopP > 0 && c.TopP <= 1):
		return fmt.Errorf("%w: top-p %v is not in (0, 1]", ErrConfig, c.TopP)
	}
	return nil
}

// Sampler chooses tokens. It is not safe for use by several goroutines at once.
type Sampler struct {
	config     Config
	random     *rand.Rand
	candidates []candidate // reused from call to call
}

// candidate is a token that can still be chosen.
type candidate struct {
	id    int32
	logit float32
	p     float64 // its probability, relative to that of the most likely token
}

// New makes a sampler.
func New(c Config) (*Sampler, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return &Sampler{config: c, random: rand.New(rand.NewPCG(c.Seed, c.Stream))}, nil
}

// Next chooses a token. A logit of -Inf is a token that is never chosen. It
// draws one random number a call, none where it is greedy.
func (s *Sampler) Next(logits []float32) (int, error) {
	best, err := argmax(logits)
	if err != nil || s.config.Temperature == 0 {
		return best, err
	}
	kept := s.weigh(logits, logits[best])
	if s.config.TopP < 1 || s.config.TopK > 0 && s.config.TopK < len(logits) {
		kept = s.truncate(kept)
	}
	total := 0.0
	for _, c := range kept {
		total += c.p
	}
	u := s.random.Float64() * total
	chosen := best
	for _, c := range kept {
		if c.p == 0 {
			continue
		}
		chosen = int(c.id) // also the answer where rounding leaves a little of u
		if u -= c.p; u < 0 {
			break
		}
	}
	return chosen, nil
}

func argmax(logits []float32) (int, error) {
	if len(logits) == 0 {
		return 0, fmt.Errorf("%w: none given", ErrLogits)
	}
	best, top := 0, float32(math.Inf(-1))
	for i := 0; i < len(logits); i++ {
		// By far the most of them are no more than one before: four at a look.
		for i+4 <= len(logits) && logits[i] <= top && logits[i+1] <= top && logits[i+2] <= top && logits[i+3] <= top {
			i += 4
		}
		if i == len(logits) {
			break
		}
		switch x := logits[i]; {
		case x <= top:
		case x <= math.MaxFloat32:
			best, top = i, x
		default:
			return 0, fmt.Errorf("%w: token %d has %v", ErrLogits, i, x)
		}
	}
	if top < -math.MaxFloat32 {
		return 0, fmt.Errorf("%w: every token has %v", ErrLogits, top)
	}
	return best, nil
}

// weigh makes every token a candidate. The most likely one has p = 1, so that
// the sum of all neither overflows nor vanishes at any temperature.
func (s *Sampler) weigh(logits []float32, most float32) []candidate {
	s.candidates = s.candidates[:0]
	for i, x := range logits {
		p := math.Exp((float64(x) - float64(most)) / s.config.Temperature)
		s.candidates = append(s.candidates, candidate{int32(i), x, p})
	}
	return s.candidates
}

// truncate returns the TopK most likely candidates and of them the fewest that
// reach TopP. A heap gives them up one after the other, because few are kept of
// a vocabulary that so is never sorted.
func (s *Sampler) truncate(all []candidate) []candidate {
	heap := tokenHeap(all)
	heap.init()
	// A candidate that leaves the heap takes the place that the heap gives up,
	// so the i-th most likely one ends i places before the end.
	nth := func(i int) candidate {
		for len(all)-len(heap) <= i {
			heap.pop()
		}
		return all[len(all)-1-i]
	}

	k, total := len(all), 0.0
	if s.config.TopK > 0 && s.config.TopK < k {
		k = s.config.TopK
		for i := range k {
			total += nth(i).p
		}
	} else {
		for _, c := range all {
			total += c.p
		}
	}
	keep := k
	if s.config.TopP < 1 {
		sum := nth(0).p
		for keep = 1; keep < k && sum < s.config.TopP*total; keep++ {
			sum += nth(keep).p
		}
	}
	return all[len(all)-keep:]
}

// tokenHeap has the most likely candidate first, of equals the lowest id.
type tokenHeap []candidate

func (h tokenHeap) before(i, j int) bool {
	if h[i].logit != h[j].logit {
		return h[i].logit > h[j].logit
	}
	return h[i].id < h[j].id
}

func (h tokenHeap) init() {
	for i := len(h)/2 - 1; i >= 0; i-- {
		h.down(i)
	}
}

func (h *tokenHeap) pop() {
	last := len(*h) - 1
	(*h)[0], (*h)[last] = (*h)[last], (*h)[0]
	*h = (*h)[:last]
	h.down(0)
}

func (h tokenHeap) down(i int) {
	for {
		first := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(h); child++ {
			if h.before(child, first) {
				first = child
			}
		}
		if first == i {
			return
		}
		h[i], h[first] = h[first], h[i]
		i = first
	}
}
