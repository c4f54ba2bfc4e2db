package decoder

import (
	"cmp"
	"errors"
	"math"
	"slices"
)

// ErrLogits is returned for logits without a most likely token: a NaN or an infinity.
var ErrLogits = errors.New("logits have a NaN or an infinity")

// Sampling says how tokens are chosen. The zero value chooses the most likely token.
type Sampling struct{}

// sampler chooses the tokens of one text.
type sampler interface {
	next(logits []float32) (Token, error)
}

// newSampler returns the sampler of a request.
func newSampler(_ Sampling, logprobs int) (sampler, error) { return &greedy{logprobs}, nil }

// greedy chooses the most likely token.
type greedy struct{ logprobs int }

func (g *greedy) next(logits []float32) (t Token, err error) {
	for i, x := range logits {
		if x > logits[t.ID] {
			t.ID = i
		}
		if math.IsNaN(float64(x)) || math.IsInf(float64(x), 1) {
			return t, ErrLogits
		}
	}
	if math.IsInf(float64(logits[t.ID]), -1) {
		return t, ErrLogits
	}
	if g.logprobs > 0 {
		t.LogProb, t.Likely = likelihood(logits, t.ID, g.logprobs)
	}
	return t, nil
}

// likelihood returns the logarithm of a token's probability, and the n most likely tokens.
func likelihood(logits []float32, id, n int) (of float64, likely []Likely) {
	top := float64(slices.Max(logits))
	sum := 0.0
	for _, x := range logits {
		sum += math.Exp(float64(x) - top)
	}
	var order []int
	if n > 0 {
		order = make([]int, len(logits))
	}
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Or(cmp.Compare(logits[b], logits[a]), a-b) })
	log := func(i int) float64 { return float64(logits[i]) - top - math.Log(sum) }
	for _, i := range order[:min(n, len(order))] {
		likely = append(likely, Likely{i, log(i)})
	}
	return log(id), likely
}

// capLogits bounds logits: x becomes limit * tanh(x / limit).
func capLogits(logits []float32, limit float64) {
	for i, x := range logits {
		logits[i] = float32(limit * math.Tanh(float64(x)/limit))
	}
}
