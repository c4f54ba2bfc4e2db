package sample

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// leastWeight is the least probability of a token that can be chosen, relative to the most likely token's.
const leastWeight = 0x1p-44

// candidate is a token that can still be chosen.
type candidate struct {
	id     int32
	key    float32 // the higher, the earlier the candidate comes
	weight float64 // its probability, relative to that of the most likely token
}

type candidates []candidate

// before reports whether a comes before b. Among equals the lower id comes first.
func (a candidate) before(b candidate) bool {
	return a.key > b.key || a.key == b.key && a.id < b.id
}

// restrict makes candidates of the tokens that can be chosen, with their weights, and returns the sum of the weights. most is the
// largest logit. The candidates are in the order of ids.
func (m *memory) restrict(c *Config, logits []float32, most float32) (total float64) {
	topP := c.TopP > 0 && c.TopP < 1
	least := leastWeight
	if !topP { // otherwise TopP needs the sum over all tokens first
		least = max(least, c.MinP)
	}
	// The weight of x is exp((x-most)/Temperature). The bound is a little low: weigh looks closer.
	floor := float64(most) + (1+1e-9)*math.Log(least)*c.Temperature - 1e-6*math.Abs(float64(most)) - 1e-30
	m.collect(logits, math.Nextafter32(float32(floor), float32(math.Inf(-1))), c.TopK)
	total = m.weigh(float64(most), c.Temperature, least)
	if topP {
		_, total = m.keep(math.MaxInt, c.TopP*total)
		if c.MinP > 0 {
			total = m.atLeast(c.MinP)
		}
	}
	if c.TypicalP > 0 && c.TypicalP < 1 {
		m.typical(total)
		_, total = m.keep(math.MaxInt, c.TypicalP*total)
	}
	return total
}

// pick returns the first candidate, in the order of ids, at which the sum of weights exceeds x. By that order, a small change of
// logits seldom changes the choice.
func (m *memory) pick(x float64) int {
	sum := 0.0
	for _, c := range m.candidates {
		if sum += c.weight; sum > x {
			return int(c.id)
		}
	}
	return int(m.candidates[len(m.candidates)-1].id) // rounding left a part of x
}

// collect makes candidates of the tokens with a logit above floor, with the logits as keys. With k > 0, the k first of them are
// candidates. The candidates are in the order of ids.
func (m *memory) collect(logits []float32, floor float32, k int) {
	if k <= 0 || k >= len(logits) {
		k = len(logits)
	}
	// Twice as many candidates as are wanted are collected before the others are dropped, so that each drop, of linear cost, is
	// worth as many collected candidates.
	room := 2*k + 64
	all := m.candidates[:0]
	for i, x := range logits {
		if x <= floor {
			continue
		}
		if all = append(all, candidate{id: int32(i), key: x}); len(all) == room {
			m.candidates = all
			last, _ := m.keep(k, math.Inf(1))
			floor = last.key // an equal logit has a higher id
			all = m.candidates
		}
	}
	if m.candidates = all; len(all) > k {
		m.keep(k, math.Inf(1))
	}
}

// keep keeps the fewest first candidates that are k, or whose weights sum to enough or more. keep returns the last of them and
// the sum of their weights.
func (m *memory) keep(k int, enough float64) (last candidate, total float64) {
	m.ranks = append(m.ranks[:0], m.candidates...)
	last = m.ranks.last(k, enough)
	kept := m.candidates[:0]
	for _, c := range m.candidates {
		if !last.before(c) {
			kept = append(kept, c)
			total += c.weight
		}
	}
	m.candidates = kept
	return last, total
}

// weigh computes the weights of the candidates, whose keys are logits, and drops those below least. The most likely token has
// weight 1, so that the sum, which weigh returns, neither overflows nor underflows at any temperature.
func (m *memory) weigh(most, temperature, least float64) (total float64) {
	kept := m.candidates[:0]
	for _, c := range m.candidates {
		if c.weight = math.Exp((float64(c.key) - most) / temperature); c.weight >= least {
			kept = append(kept, c)
			total += c.weight
		}
	}
	m.candidates = kept
	return total
}

// atLeast keeps the candidates with at least a weight, and returns their sum.
func (m *memory) atLeast(least float64) (total float64) {
	kept := m.candidates[:0]
	for _, c := range m.candidates {
		if c.weight >= least {
			kept = append(kept, c)
			total += c.weight
		}
	}
	m.candidates = kept
	return total
}

// typical gives candidates keys by which the most typical one comes first. total is the sum of their weights.
func (m *memory) typical(total float64) {
	mean := 0.0 // of the logarithm of the weight
	for _, c := range m.candidates {
		mean += c.weight / total * math.Log(c.weight)
	}
	for i, c := range m.candidates {
		m.candidates[i].key = float32(-math.Abs(math.Log(c.weight) - mean))
	}
}

// last returns the last of the fewest first candidates that are k, or whose weights sum to enough or more; if there are too few,
// the last of all. last reorders c.
//
// Quickselect: each round halves what is left, or nearly so. Where it does not, the rest is sorted.
func (c candidates) last(k int, enough float64) candidate {
	for rounds := 2 * bits.Len(uint(len(c))); len(c) > 16; rounds-- {
		if rounds == 0 {
			break
		}
		pivot := c.median()
		at := 0 // those before the pivot come first
		sum := 0.0
		for i, x := range c {
			if x.before(pivot) {
				c[i], c[at] = c[at], x
				at++
				sum += x.weight
			}
		}
		switch {
		case at >= k || sum >= enough && at > 0:
			c = c[:at]
		case at+1 == k || sum+pivot.weight >= enough || at+1 == len(c):
			return pivot
		default: // the pivot stays: candidates are unlike one another, and the pivot comes first in the rest
			c, k, enough = c[at:], k-at, enough-sum
		}
	}
	slices.SortFunc(c, func(a, b candidate) int { return cmp.Or(cmp.Compare(b.key, a.key), cmp.Compare(a.id, b.id)) })
	for i, x := range c {
		if enough -= x.weight; i+1 >= k || enough <= 0 {
			return x
		}
	}
	return c[len(c)-1]
}

// median returns the median of nine candidates' medians of three.
func (c candidates) median() candidate {
	step := len(c) / 9
	var of [3]candidate
	for i := range of {
		of[i] = middle(c[3*i*step], c[(3*i+1)*step], c[(3*i+2)*step])
	}
	return middle(of[0], of[1], of[2])
}

func middle(a, b, c candidate) candidate {
	if b.before(a) {
		a, b = b, a
	}
	switch {
	case c.before(a):
		return a
	case c.before(b):
		return c
	}
	return b
}
