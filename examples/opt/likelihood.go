package main

import (
	"math"
	"slices"
)

// logSumExp returns log of the sum of exp(x) over a row of logits. x[i] minus this is the log-probability of token i.
func logSumExp(logits []float32) float64 {
	largest := math.Inf(-1)
	for _, x := range logits {
		largest = max(largest, float64(x))
	}
	sum := 0.0
	for _, x := range logits {
		sum += math.Exp(float64(x) - largest)
	}
	return largest + math.Log(sum)
}

// likelihood returns a token with its log-probability and those of the most likely tokens. Among equals the lower id
// comes first; tokens of probability 0 are left out.
func likelihood(logits []float32, id, most int) choiceJSON {
	var top []int
	for i, x := range logits {
		if math.IsInf(float64(x), -1) || len(top) == most && x <= logits[top[most-1]] {
			continue
		}
		at, _ := slices.BinarySearchFunc(top, x, func(j int, x float32) int {
			if logits[j] >= x {
				return -1
			}
			return 1
		})
		if len(top) == most {
			top = top[:most-1]
		}
		top = slices.Insert(top, at, i)
	}
	all := logSumExp(logits)
	token := func(i int) tokenJSON { return tokenJSON{Token: i, Logprob: float64(logits[i]) - all} }
	c := choiceJSON{tokenJSON: token(id), Top: []tokenJSON{}}
	for _, i := range top {
		c.Top = append(c.Top, token(i))
	}
	return c
}
