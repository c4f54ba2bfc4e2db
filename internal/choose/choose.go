// Package choose chooses tokens from rows of logits on the CPU, for the nodes of package nn and for callers without a
// graph.
package choose

import (
	"cmp"
	"math"
	"slices"
)

// Largest returns the index of the first largest element of x. Largest returns -1 if x is empty, has a NaN or +Inf,
// or has only -Inf.
func Largest(x []float32) int {
	best, top := -1, float32(math.Inf(-1))
	for i := 0; i < len(x); i++ {
		// Most elements are at most the maximum so far: the loop compares four at a time.
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

// leastWeight is the least probability of a token that can be chosen, relative to the most likely token's. The
// kernels use the same number.
const leastWeight = 0x1p-44

// Memory is the scratch memory of Token, for use from call to call. A Memory is not safe for use by several
// goroutines at once.
type Memory struct{ candidates []candidate }

// candidate is a token that can still be chosen.
type candidate struct {
	id     int32
	logit  float32
	weight float64 // its probability, relative to that of the most likely token
}

// Token chooses a token by a random number u in [0, 1):
//
//	p[i] = exp(x[i]/temperature) / sum over j in K of exp(x[j]/temperature)
//
// for the tokens i in K, and p[i] = 0 for other tokens. Three rules restrict K, in this order:
//
//   - all tokens
//   - the topK most likely tokens (0 or less: all)
//   - the smallest set of most likely tokens whose probabilities, after topK, sum to topP or more (0 or less, 1 or
//     more, and NaN: all)
//
// Among equally likely tokens the lower id comes first. Token returns the first token, in the order of ids, at which
// the sum of probabilities exceeds u.
//
// Temperature 0 is greedy. At temperature +Inf all tokens of K have the same p, except those with a logit of -Inf.
// Token returns -1 if the temperature is negative or NaN, or if the logits have no largest element.
func (m *Memory) Token(logits []float32, temperature float64, topK int, topP, u float64) int {
	best := Largest(logits)
	switch {
	case best < 0 || !(temperature >= 0):
		return -1
	case temperature == 0:
		return best
	}
	kept, total := m.weigh(logits, logits[best], temperature)
	if topK > 0 && topK < len(kept) || topP > 0 && topP < 1 {
		kept, total = truncate(kept, total, topK, topP)
		slices.SortFunc(kept, func(a, b candidate) int { return cmp.Compare(a.id, b.id) })
	}
	sum := 0.0
	for _, c := range kept {
		if sum += c.weight; sum > u*total {
			return int(c.id)
		}
	}
	return int(kept[len(kept)-1].id) // rounding left a part of u
}

// weigh makes candidates of the tokens and sums their weights. The most likely token has weight 1, so the sum neither
// overflows nor underflows at any temperature.
func (m *Memory) weigh(logits []float32, most float32, temperature float64) (all []candidate, total float64) {
	all = m.candidates[:0]
	for i, x := range logits {
		if w := math.Exp((float64(x) - float64(most)) / temperature); w >= leastWeight { // -Inf/Inf is NaN
			all = append(all, candidate{int32(i), x, w})
			total += w
		}
	}
	m.candidates = all
	return all, total
}

// truncate returns the topK most likely candidates, reduced to the fewest that reach topP, and the sum of their
// weights. A heap yields the candidates one by one: few of a vocabulary are kept, so the vocabulary is never sorted.
func truncate(all []candidate, total float64, topK int, topP float64) ([]candidate, float64) {
	h := heap(all)
	h.init()
	// A popped candidate is stored in the slot that the shrinking heap frees, so the i-th most likely candidate is i
	// slots from the end.
	nth := func(i int) candidate {
		for len(all)-len(h) <= i {
			h.pop()
		}
		return all[len(all)-1-i]
	}
	keep := len(all)
	if topK > 0 && topK < keep {
		keep, total = topK, 0
		for i := range keep {
			total += nth(i).weight
		}
	}
	if topP > 0 && topP < 1 {
		most, enough := keep, topP*total
		for keep, total = 1, nth(0).weight; keep < most && total < enough; keep++ {
			total += nth(keep).weight
		}
	}
	return all[len(all)-keep:], total
}

// heap has the most likely candidate first, and the lowest id first among equals.
type heap []candidate

func (h heap) before(i, j int) bool {
	if h[i].logit != h[j].logit {
		return h[i].logit > h[j].logit
	}
	return h[i].id < h[j].id
}

func (h heap) init() {
	for i := len(h)/2 - 1; i >= 0; i-- {
		h.down(i)
	}
}

func (h *heap) pop() {
	last := len(*h) - 1
	(*h)[0], (*h)[last] = (*h)[last], (*h)[0]
	*h = (*h)[:last]
	h.down(0)
}

func (h heap) down(i int) {
	for {
		most := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(h); child++ {
			if h.before(child, most) {
				most = child
			}
		}
		if most == i {
			return
		}
		h[i], h[most] = h[most], h[i]
		i = most
	}
}
