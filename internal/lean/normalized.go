package lean

import "math"

// Normalized is a normalised state: the attention output and the log-sum-exp. O is not read if LSE is -Inf, the state
// of no keys.
type Normalized[F Float] struct {
	O   []F
	LSE F
}

// MergeNormalized writes to dst the output of the union of the states' keys, and returns its log-sum-exp:
//
//	lse = ln sum_i e^(LSE_i)
//	dst = sum_i e^(LSE_i-lse) O_i
//
// It is [State.Merge] for normalised states. Sums are in the order of the states. If all states are empty, so is the
// result. A single state is copied. NaN and +Inf make all results NaN. dst may be the first state's O.
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

// Share returns the weight of state i in the union, e^(LSE_i-lse), or 0 for a state of no keys.
func Share[F Float](states []Normalized[F], i int) F {
	if math.IsInf(float64(states[i].LSE), -1) {
		return 0
	}
	top, sum := weigh(states)
	return F(math.Exp(float64(states[i].LSE)-top) / sum)
}

// weigh returns the largest log-sum-exp, and the sum of all weights relative to it, e^(LSE_i-top). It returns -Inf and
// 0 if all states are empty.
func weigh[F Float](states []Normalized[F]) (top, sum float64) {
	top = math.Inf(-1)
	for i := range states {
		top = math.Max(top, float64(states[i].LSE)) // NaN if one is NaN
	}
	if math.IsInf(top, -1) {
		return top, 0
	}
	for i := range states {
		sum += math.Exp(float64(states[i].LSE) - top)
	}
	return top, sum
}
