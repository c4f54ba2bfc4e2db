package tokenizer

import (
	"errors"
	"fmt"
	"math"
)

// Errors of EncodeAtMost wrap one of these.
var (
	// ErrTooLong is returned for a text with more tokens than the limit.
	ErrTooLong = errors.New("text too long")
	// ErrNoToken is returned if a byte has no token, and the tokenizer names no unknown token.
	ErrNoToken = errors.New("no token")
)

// Encode returns the ids of a text, with the tokenizer's template around it: OPT's begins with </s>. Special tokens
// in the text are spelled out; other added tokens are tokens. Encode equals transformers' tokenizer(text,
// split_special_tokens=True).
//
// A byte without a token becomes the tokenizer's unknown token; without an unknown token the byte is left out (see
// [Tokenizer.EncodeAtMost]).
func (t *Tokenizer) Encode(text string) []int {
	return t.encode(text, false).ids
}

// EncodeSpecial is Encode, but special tokens in the text are tokens, as in
// transformers' tokenizer(text).
func (t *Tokenizer) EncodeSpecial(text string) []int {
	return t.encode(text, true).ids
}

// EncodeText returns the ids of the text alone, for a text that continues another.
func (t *Tokenizer) EncodeText(text string) []int {
	e := t.encoder(math.MaxInt)
	e.text(text, true)
	return e.ids
}

// EncodeAtMost is Encode, or with special EncodeSpecial, for a text of at most `most` tokens. A longer text is
// ErrTooLong as soon as more tokens are certain: work and memory are bounded by most, not by the text. A byte that
// would be left out is ErrNoToken.
func (t *Tokenizer) EncodeAtMost(text string, most int, special bool) ([]int, error) {
	e := t.encoder(most)
	return e.atMost(text, func() { e.whole(text, special) })
}

// EncodeTextAtMost is EncodeAtMost for a text that continues another: without the template.
func (t *Tokenizer) EncodeTextAtMost(text string, most int, special bool) ([]int, error) {
	e := t.encoder(most)
	return e.atMost(text, func() { e.text(text, !special || t.splitSpecial) })
}

// atMost encodes a text, unless its length alone shows that it has too many tokens.
func (e *encoder) atMost(text string, encode func()) ([]int, error) {
	if e.over = e.t.widest > 0 && len(text)/e.t.widest > e.most; !e.over {
		encode()
	}
	switch {
	case e.over:
		return nil, fmt.Errorf("tokenizer: more than %s: %w", tokens(e.most), ErrTooLong)
	case e.lost >= 0:
		return nil, fmt.Errorf("tokenizer: byte 0x%02x is not in the vocabulary, and no unknown token is named: %w", e.lost, ErrNoToken)
	}
	return e.ids, nil
}

func (t *Tokenizer) encode(text string, special bool) *encoder {
	e := t.encoder(math.MaxInt)
	e.whole(text, special)
	return e
}

func (t *Tokenizer) encoder(most int) *encoder {
	return &encoder{t: t, most: most, ids: []int{}, lost: -1, words: map[string][]int{}}
}

// whole encodes a text with its template.
func (e *encoder) whole(text string, special bool) {
	e.add(e.t.before...)
	e.text(text, !special || e.t.splitSpecial)
	e.add(e.t.after...)
}

// text searches the text for the added tokens of the first kind, then the rest for the others, and cuts the remaining
// text into words.
func (e *encoder) text(text string, spell bool) {
	e.t.added[0].split(text, spell, func(a *addedToken, part string) bool {
		if a != nil {
			return e.add(a.ID)
		}
		return e.t.added[1].split(part, spell, func(a *addedToken, part string) bool {
			if a != nil {
				return e.add(a.ID)
			}
			return e.t.words.split(part, e.word)
		})
	})
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
