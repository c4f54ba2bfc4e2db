package sample

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// LogProbs returns the natural logarithm of the probability with which Next chooses token id, and the k most likely tokens in
// descending order. The probabilities are the probabilities after all steps of [Config]:
//
//   - A removed token has the logarithm -Inf.
//   - likely has fewer than k tokens if fewer than k tokens remain.
//   - With temperature 0, one token has probability 1.
//
// The function [LogProbs] returns the probabilities of the model. LogProbs draws no random number and does not change logits.
func (s *Sampler) LogProbs(logits []float32, id, k int) (of float64, likely []Likely, err error) {
	best := largest(logits)
	switch {
	case best < 0:
		return 0, nil, wrong(logits)
	case id < 0 || id >= len(logits):
		return 0, nil, fmt.Errorf("sample: %w: token %d, and there are %d logits", ErrConfig, id, len(logits))
	case s.most >= len(logits):
		return 0, nil, fmt.Errorf("sample: %w: token %d of the text or of the configuration, and there are %d logits", ErrConfig, s.most, len(logits))
	}
	m := pool.Get().(*memory)
	defer pool.Put(m)
	if s.changes() {
		logits = s.change(m, logits)
		if best = largest(logits); best < 0 {
			return 0, nil, fmt.Errorf("sample: %w: all tokens that are allowed and not forbidden have -Inf", ErrLogits)
		}
	}
	of = math.Inf(-1)
	if s.config.Temperature == 0 {
		if id == best {
			of = 0
		}
		if k > 0 {
			likely = []Likely{{ID: best}}
		}
		return of, likely, nil
	}
	w, total := newWeights(logits[best], s.config.Temperature), 0.0
	if s.config.restricted(len(logits)) {
		total = m.restrict(&s.config, logits, w)
		for i, c := range m.candidates {
			if int(c.id) == id {
				of = math.Log(c.weight / total)
			}
			m.candidates[i].key = logits[c.id] // TypicalP replaces the keys
		}
	} else {
		total = w.sum(logits)
		if y := w.of(logits[id]); y >= leastWeight {
			of = math.Log(y / total)
		}
		if k > 0 {
			m.collect(logits, w.floor(leastWeight), k)
			m.weigh(w, leastWeight)
		}
	}
	if k <= 0 {
		return of, nil, nil
	}
	if len(m.candidates) > k {
		m.keep(k, math.Inf(1))
	}
	slices.SortFunc(m.candidates, func(a, b candidate) int { return cmp.Or(cmp.Compare(b.key, a.key), cmp.Compare(a.id, b.id)) })
	likely = make([]Likely, len(m.candidates))
	for i, c := range m.candidates {
		likely[i] = Likely{int(c.id), math.Log(c.weight / total)}
	}
	return of, likely, nil
}
