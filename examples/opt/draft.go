package main

import "slices"

// lookup drafts a continuation of a text from the text itself, as prompt lookup decoding does (Saxena, 2023,
// https://github.com/apoorvumang/prompt-lookup-decoding): if the last tokens occur earlier, the tokens after them
// there are guesses.
type lookup struct {
	text  []int // all tokens so far, the prompt's first
	draft []int // memory of drafts
}

// How many of the last tokens are looked up: most at first, and then fewer. A single token predicts too little.
const (
	mostLookedUp   = 3
	fewestLookedUp = 2
)

// next returns at most the given number of guesses; none if the last tokens are new. If the earlier occurrence
// reaches the end of the text, the guesses continue with the draft itself: repeated text repeats again. The result is
// valid until the next call.
func (l *lookup) next(most int) []int {
	l.draft = l.draft[:0]
	for n := min(mostLookedUp, len(l.text)-1); n >= fewestLookedUp; n-- {
		last := l.text[len(l.text)-n:]
		for at := len(l.text) - n - 1; at >= 0; at-- { // the latest occurrence is the most likely
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

// speculate is a step that may take drafts: each sequence that is continued by a token gets a draft after the token,
// each of its own length. done is false if there is no draft; then nothing was done.
func (b *batch) speculate(next []int) (done bool, err error) {
	tokens := make([][]int, len(next))
	for i, id := range next {
		s := &b.sequences[i]
		s.draft = nil
		if id < 0 {
			continue
		}
		tokens[i] = next[i : i+1]
		// One more token than a draft's is chosen, and is read unless it is the last one.
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
		if err == nil && len(ts) == 1 { // no guesses
			err = b.decoder.Accept(i, 1)
		}
	}
	return true, err
}
