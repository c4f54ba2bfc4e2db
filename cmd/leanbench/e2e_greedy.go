package main

import (
	"gorgonia.org/leanattention/examples/opt/model"
)

// greedy has a decoder choose the most likely tokens where it computes them: on a
// GPU a step then copies a number a sequence to the host, and not all logits.
//
// model.Options has no such option yet. When it does, this sets it:
//
//	o.Greedy = true
func greedy(o model.Options) model.Options { return o }

// mostLikely takes the token that follows each sequence of a decoder, made with o:
// the one that it has chosen, where it does that, and else that of the largest
// logit. When decoders choose, this begins with
//
//	if o.Greedy {
//		for i := range next {
//			next[i] = d.Chosen(i)
//		}
//		return nil
//	}
func mostLikely(d *model.Decoder, o model.Options, next []int) error {
	return largest(d, next)
}
