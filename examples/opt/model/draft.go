package model

import (
	"fmt"
	"slices"
)

// Verify appends tokens[i] to sequence i: a token as of [Decoder.Step], and behind it a draft of tokens that may follow, at
// most [Options].Drafts. The model reads all of them in one run. What it would not have chosen itself, and what
// comes behind that, is taken back: kept[i] tokens stay, one at least, and [Decoder.Chosen] has what follows these. So
// texts are those of Step, but where two tokens are as likely as each other within rounding. (Speculative decoding:
// Leviathan et al., arXiv:2211.17192, with greedy choices.) It needs Greedy. An empty tokens[i] leaves a sequence alone.
func (d *Decoder) Verify(tokens [][]int) (kept []int, err error) {
	p := d.verify
	if p == nil {
		return nil, fmt.Errorf("%w: drafts are verified with Drafts only", ErrConfig)
	}
	if err := d.check(tokens); err != nil {
		return nil, err
	}
	todo := 0
	for i, ts := range tokens {
		if n := len(ts) - 1; n > d.options.Drafts {
			return nil, fmt.Errorf("%w: a draft of %d tokens for sequence %d, and %d are the most", ErrConfig, n, i, d.options.Drafts)
		}
		p.counts[i] = len(ts)
		todo += len(ts)
	}
	kept = make([]int, len(tokens))
	if todo == 0 {
		return kept, nil
	}
	var logits []float32
	var chosen []int
	if err := d.turn(p, func() (err error) {
		d.fill(p, tokens)
		logits, chosen, err = p.graph.run(true)
		return err
	}); err != nil {
		return nil, err
	}
	width := d.config.VocabSize
	for i, ts := range tokens {
		if len(ts) == 0 {
			continue
		}
		row := p.first[i]
		choose := func() int { // the token behind a row's
			if d.logits[i] = nil; logits != nil {
				d.logits[i] = logits[row*width : (row+1)*width : (row+1)*width]
			}
			if chosen != nil {
				return chosen[row]
			}
			return d.choice(i).Choose(d.logits[i], 0)
		}
		n := 1
		for d.chosen[i] = choose(); n < len(ts) && d.chosen[i] == ts[n]; d.chosen[i] = choose() {
			n, row = n+1, row+1
		}
		kept[i] = n
		d.stats.Drafted += len(ts) - 1
		d.stats.Accepted += n - 1
		d.stats.Decode.Tokens -= len(ts) - n
		if n < len(ts) {
			d.lengths[i] -= len(ts) - n
			if err := d.cache.truncate(i, d.lengths[i]); err != nil {
				return nil, err
			}
		}
	}
	return kept, nil
}

// Lookup drafts what may follow a text: what followed its last tokens where they stood before, the latest place first
// (prompt lookup decoding). It looks for as many of the last tokens as it finds, mostLookup at most and leastLookup at
// least, and returns up to n tokens; none if they are nowhere.
func Lookup(text []int, n int) []int {
	for size := min(mostLookup, len(text)-1); size >= leastLookup; size-- {
		last := text[len(text)-size:]
		for at := len(text) - size - 1; at >= 0; at-- {
			if slices.Equal(text[at:at+size], last) {
				from := at + size
				return text[from:min(from+n, len(text))]
			}
		}
	}
	return nil
}

const (
	mostLookup  = 4
	leastLookup = 2
)
