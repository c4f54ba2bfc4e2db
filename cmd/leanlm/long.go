package main

import (
	"errors"
	"strconv"

	"gorgonia.org/leanattention/decoder"
)

// longFlags say what is done with texts that are longer than the context.
type longFlags struct {
	keep       int
	cut, shift bool
}

func (l *longFlags) add(f *flags) {
	f.each("keep", "shorten a prompt that is longer than the context, which is an error otherwise: its first `tokens` and its last ones stay. The token that begins every text stays, too", func(s string) error {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 {
			return errors.New("not a whole number from 0 on")
		}
		l.keep, l.cut = n, true
		return nil
	})
	f.is(&l.shift, "context-shift", "go on when the context is full: the tokens of -keep stay, the older half of the others is dropped, and those that stay are computed again")
}

// set sets the fields of a request.
func (l *longFlags) set(r *decoder.Request, model *opened) {
	r.Cut, r.Shift = l.cut, l.shift
	if r.Keep = l.keep; (l.cut || l.shift) && len(r.Prompt) > 0 && r.Prompt[0] == model.Tokenizer().BOS() {
		r.Keep++
	}
}
