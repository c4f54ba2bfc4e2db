package tokenizer

import (
	"errors"
	"fmt"
	"math"
	"unsafe"
)

// Errors of Encode wrap one of these, or ErrUnsupported.
var (
	// ErrTooLong is returned for a text with more tokens than the limit.
	ErrTooLong = errors.New("text too long")
	// ErrNoToken is returned if a character has no token, and the tokenizer names no unknown token.
	ErrNoToken = errors.New("no token")
)

// Options say how a text is encoded. The zero value encodes a text from outside, such as a prompt.
type Options struct {
	// Special makes tokens of the special tokens in the text. Otherwise their names are spelled out, so that a text
	// from outside cannot contain an end of text.
	Special bool
	// Bare leaves out the tokens that the tokenizer puts before and after a text, such as BOS. A text that continues
	// another, or that a chat template has made, is bare.
	Bare bool
	// AtMost is the largest number of tokens. 0 is no limit, and a negative number leaves room for none. A longer text
	// is ErrTooLong.
	AtMost int
}

// Encode returns the ids of a text.
//
//   - The ids are never nil without an error.
//   - Added tokens of the text that are not special are tokens in any case.
//   - A character without a token is the unknown token. If there is none, the error is ErrNoToken, and the ids are those
//     of the text without the character.
//   - A text of more than AtMost tokens is ErrTooLong as soon as that is certain. Where every byte has a token and
//     nothing changes the text first, work and memory are bounded by AtMost, not by the text.
//   - A pattern of the file that takes too many steps for the text is ErrUnsupported.
func (t *Tokenizer) Encode(text string, o Options) ([]int, error) {
	e := &encoder{t: t, most: math.MaxInt, ids: []int{}, words: map[string][]int{}}
	if o.AtMost != 0 {
		e.most = max(0, o.AtMost)
	}
	if t.model == nil {
		return nil, fmt.Errorf("tokenizer: a Tokenizer that nothing was loaded into: %w", ErrUnsupported)
	}
	if len(text) > maxText {
		return nil, fmt.Errorf("tokenizer: a text of %d bytes, more than %d: %w", len(text), maxText, ErrTooLong)
	}
	if e.over = t.widest > 0 && len(text)/t.widest > e.most; !e.over {
		if !o.Bare {
			e.add(t.before...)
		}
		e.text(text, !o.Special || t.splitSpecial)
		if !o.Bare {
			e.add(t.after...)
		}
	}
	switch {
	case e.err != nil:
		return nil, fmt.Errorf("tokenizer: %w: %w", e.err, ErrUnsupported)
	case e.over:
		return nil, fmt.Errorf("tokenizer: more than %s: %w", tokens(e.most), ErrTooLong)
	case e.lost != "":
		return e.ids, fmt.Errorf("tokenizer: %q is not in the vocabulary, and no unknown token is named: %w", e.lost, ErrNoToken)
	}
	return e.ids, nil
}

// maxText is the length of the longest text. Positions in a text are 32 bits.
const maxText = 1 << 28

// encoder is the memory of a call of Encode.
type encoder struct {
	t      *Tokenizer
	ids    []int
	most   int                // limit of ids
	over   bool               // there are more ids
	err    error              // what makes encoding impossible
	lost   string             // a character without a token; empty: none
	words  map[string][]int   // ids of the short words so far
	pieces []map[string][]int // and of the short pieces before each number of later cuts

	symbols []symbol    // of the word that is merged
	queue   []candidate // merges
	best    []step      // unigram
}

// fail ends encoding.
func (e *encoder) fail(err error) bool {
	e.err, e.over = err, true
	return false
}

// text searches the text for the added tokens of the first kind, normalizes the rest, searches that for the others, and
// cuts the remaining text into words.
func (e *encoder) text(text string, spell bool) {
	t := e.t
	t.added[0].split(text, spell, func(a *addedToken, part string) bool {
		if a != nil {
			return e.add(a.ID)
		}
		first := unsafe.StringData(part) == unsafe.StringData(text)
		if t.normal != nil {
			var moved bool
			var err error
			if part, moved, err = t.normal(part); err != nil {
				return e.fail(err)
			}
			first = first && !moved
		}
		whole := part
		return t.added[1].split(part, spell, func(a *addedToken, part string) bool {
			if a != nil {
				return e.add(a.ID)
			}
			first := first && unsafe.StringData(part) == unsafe.StringData(whole)
			return t.words.split(e, piece{part, first}, e.word)
		})
	})
}

// maxCached is the length of the longest cached word.
const maxCached = 64

// word appends the ids of a word and reports whether more ids fit.
func (e *encoder) word(word string) bool {
	if len(word) > maxCached {
		return e.t.model.encode(e, word)
	}
	if ids, ok := e.words[word]; ok {
		return e.add(ids...)
	}
	begin := len(e.ids)
	if !e.t.model.encode(e, word) {
		return false
	}
	e.words[word] = e.ids[begin:len(e.ids):len(e.ids)]
	return true
}

// add reports whether more ids fit.
func (e *encoder) add(ids ...int) bool {
	e.ids = append(e.ids, ids...)
	e.over = e.over || len(e.ids) > e.most
	return !e.over
}

// tokens is a number of tokens in words.
func tokens(n int) string {
	if n == 1 {
		return "1 token"
	}
	return fmt.Sprintf("%d tokens", n)
}

// model turns the words of a text into ids.
type model interface {
	// encode appends the ids of a word that is not empty, and reports whether more ids fit.
	encode(e *encoder, word string) bool
}
