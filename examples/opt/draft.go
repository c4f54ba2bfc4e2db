package main

import "slices"

// lookup drafts what may follow a text from the text itself, as prompt lookup decoding does
// (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding): where the last tokens
// have stood before, what followed them there may follow again.
type lookup struct {
	text  []int // all tokens so far, those of the prompt first
	draft []int // memory of drafts
}

// How many of the last tokens are looked up: most at first, and then fewer. One token
// says too little of what comes next.
const (
	mostLookedUp   = 3
	fewestLookedUp = 2
)

// next is up to so many tokens that may follow; none if the last tokens are new. Where what
// followed reaches the end of the text it goes on with the draft itself: a text that repeats itself
// goes round. It is there until the next call.
func (l *lookup) next(most int) []int {
	l.draft = l.draft[:0]
	for n := min(mostLookedUp, len(l.text)-1); n >= fewestLookedUp; n-- {
		last := l.text[len(l.text)-n:]
		for at := len(l.text) - n - 1; at >= 0; at-- { // the latest place is the likeliest
			if !slices.Equal(l.text[at:at+n], last) {
				continue
			}
			for from := at + n; len(l.draft) < most; from++ {
				if from < len(l.text) {
					l.draft = append(l.draft, l.text[from])
				} else {
					l.draft = append(l.draft, l.draft[from-len(l.text)])
				}
			}
			return l.draft
		}
	}
	return nil
}

// speculate is a step that may take drafts: each sequence that is continued by a token gets one
// of its own length behind it. It says whether there was any; if not, nothing was done.
func (b *batch) speculate(next []int) (done bool, err error) {
	tokens := make([][]int, len(next))
	for i, id := range next {
		s := &b.sequences[i]
		s.draft = nil
		if id < 0 {
			continue
		}
		tokens[i] = next[i : i+1]
		// One more token is chosen than a draft has, and read unless it is the last one.
		if most := min(s.guesses, s.left, b.limit-len(s.result.tokens)-1); most > 0 {
			s.draft = s.lookup.next(most)
			tokens[i] = slices.Concat(tokens[i], s.draft)
			done = done || len(s.draft) > 0
		}
	}
	if !done {
		return false, nil
	}
	err = b.decoder.Verify(tokens)
	for i, ts := range tokens {
		if err == nil && len(ts) == 1 { // nothing was guessed
			err = b.decoder.Accept(i, 1)
		}
	}
	return true, err
}
