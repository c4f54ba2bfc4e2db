package e2e

import (
	"gorgonia.org/leanattention/examples/opt/model"
)

// greedy returns o with token choice on the decoder's device. On a GPU, a step then copies one number per
// sequence to the host instead of all logits.
func greedy(o model.Options) model.Options {
	o.Greedy = true
	return o
}

// mostLikely sets next to the most likely next token of each sequence. d was made with options o. If o.Greedy
// is set, the decoder has already chosen the tokens. Otherwise mostLikely takes the tokens with the largest
// logits.
func mostLikely(d *model.Decoder, o model.Options, next []int) error {
	if !o.Greedy {
		return largest(d, next)
	}
	for i := range next {
		next[i] = d.Chosen(i)
	}
	return nil
}
