package e2e

import (
	"gorgonia.org/leanattention/examples/opt/model"
)

// greedy has a decoder choose the most likely tokens where it computes them: on a
// GPU a step then copies a number a sequence to the host, and not all logits.
func greedy(o model.Options) model.Options {
	o.Greedy = true
	return o
}

// mostLikely takes the token that follows each sequence of a decoder, made with o:
// the one that it has chosen, where it does that, and else that of the largest
// logit.
func mostLikely(d *model.Decoder, o model.Options, next []int) error {
	if !o.Greedy {
		return largest(d, next)
	}
	for i := range next {
		next[i] = d.Chosen(i)
	}
	return nil
}
