package lean

import "math"

// Normalized is a state that is normalised: the attention output, and the log-sum-exp. Where that is -Inf, the state of no
// key, O is not read.
type Normalized[F Float] struct {
	O   []F
	LSE F
}

// MergeNormalized makes dst the output of the union of the keys of some states, and returns its log-sum-exp:
//
//	lse = ln sum_i e^(LSE_i)
//	dst = sum_i e^(LSE_i-lse) O_i
//
// with sums in the order of the states. It is what [State.Merge] is for states that are not normalised; where all are
// empty, so is what it makes. A single state is copied. NaN and +Inf make all NaN. dst may be the first state's O.
func MergeNormalized[F Float](dst []F, states []Normalized[F]) F {
	top, sum := weigh(states)
	if math.IsInf(top, -1) {
		clear(dst)
		return F(top)
	}
	first := true
	for i := range states {
		s := &states[i]
		if math.IsInf(float64(s.LSE), -1) {
			continue
		}
		from, w := s.O[:len(dst)], F(math.Exp(float64(s.LSE)-top)/sum)
		if first {
			for j, x := range from {
				dst[j] = w * x
			}
		} else {
			for j, x := range from {
				dst[j] += w * x
			}
		}
		first = false
	}
	return F(top + math.Log(sum))
}

// Share is what state i is of all: e^(LSE_i-lse), 0 for one of no key.
func Share[F Float](states []Normalized[F], i int) F {
	if math.IsInf(float64(states[i].LSE), -1) {
		return 0
	}
	top, sum := weigh(states)
	return F(math.Exp(float64(states[i].LSE)-top) / sum)
}

// weigh returns the largest log-sum-exp, -Inf if all are, and the sum of all weights beside it.
func weigh[F Float](states []Normalized[F]) (top, sum float64) {
	top = math.Inf(-1)
	for i := range states {
		top = math.Max(top, float64(states[i].LSE)) // NaN if one is
	}
	if math.IsInf(top, -1) {
		return top, 0
	}
	for i := range states {
		sum += math.Exp(float64(states[i].LSE) - top)
	}
	return top, sum
}
