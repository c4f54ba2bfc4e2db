package tokenizer

import (
	"errors"
	"fmt"
	"math"
	"unsafe"
)

// Errors of Encode wrap ErrTooLong, ErrNoToken or [ErrUnsupported].
var (
	// ErrTooLong reports a text with more tokens than Options.AtMost.
	ErrTooLong = errors.New("text too long")
	// ErrNoToken reports a character that has no token, with a tokenizer that has no unknown token.
	ErrNoToken = errors.New("no token")
)

// Options configures Encode. The zero value is safe for untrusted text, such as a prompt.
type Options struct {
	// Special encodes the names of special tokens in the text as the tokens. Otherwise the names are encoded as ordinary
	// text, so that an untrusted text cannot contain an end of text.
	Special bool
	// Bare omits the tokens that the tokenizer adds before and after a text, such as BOS. Set Bare for a text that
	// continues another text, and for the output of a chat template.
	Bare bool
	// AtMost is the maximum number of tokens. 0 means no limit, and a negative number means that no token is allowed. A
	// longer text is an error that wraps ErrTooLong.
	AtMost int
}

// Encode returns the ids of a text.
//
//   - Without an error, the ids are not nil.
//   - Added tokens that are not special are encoded as tokens, regardless of Options.Special.
//   - A character without a token becomes the unknown token. If the tokenizer has no unknown token, the error wraps
//     ErrNoToken, and the ids are those of the text without such characters.
//   - For a text of more than AtMost tokens, the error wraps ErrTooLong. If every byte has a token and the tokenizer
//     neither changes nor removes text, AtMost bounds work and memory, regardless of the length of the text.
//   - For a text of more than 256 MiB, the error wraps ErrTooLong.
//   - If a pattern of the file takes too many steps for the text, the error wraps ErrUnsupported.
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

// maxText is the maximum length of a text in bytes. Positions in a text are int32.
const maxText = 1 << 28

// encoder is the state of one call of Encode.
type encoder struct {
	t      *Tokenizer
	ids    []int
	most   int                // maximum number of ids
	over   bool               // stop: more than most ids, or an error
	err    error              // the error that stopped encoding
	lost   string             // a character without a token; empty: none
	words  map[string][]int   // cached ids of short words
	pieces []map[string][]int // cached ids of short pieces, by the number of cuts that remain

	symbols []symbol    // symbols of the current BPE word
	queue   []candidate // heap of possible merges
	best    []step      // best segmentations of the current Unigram word
}

// fail stops encoding with an error, and returns false.
func (e *encoder) fail(err error) bool {
	e.err, e.over = err, true
	return false
}

// text encodes a text in four steps:
//
//  1. Split the text at the added tokens of t.added[0].
//  2. Normalize the rest.
//  3. Split the rest at the added tokens of t.added[1].
//  4. Split the remaining text into words, and encode each word.
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

// word appends the ids of a word and reports whether encoding goes on.
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

// add appends ids and reports whether encoding goes on.
func (e *encoder) add(ids ...int) bool {
	e.ids = append(e.ids, ids...)
	e.over = e.over || len(e.ids) > e.most
	return !e.over
}

// tokens formats a number of tokens for an error.
func tokens(n int) string {
	if n == 1 {
		return "1 token"
	}
	return fmt.Sprintf("%d tokens", n)
}

// model converts words to ids.
type model interface {
	// encode appends the ids of a nonempty word, and reports whether encoding goes on.
	encode(e *encoder, word string) bool
}
