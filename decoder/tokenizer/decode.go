package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// Decode returns the text of ids. Special tokens have none ([Tokenizer.Special]). An added token is its own text. Ids
// outside the vocabulary and invalid UTF-8 give U+FFFD: one for each longest beginning of a character, as in Python
// and Rust. Decode(Encode(s)) is s for every s in UTF-8, if every byte has a token, no added token takes white space,
// and no special added token is in s.
func (t *Tokenizer) Decode(ids []int) string {
	d := t.NewDecoder()
	var text strings.Builder
	for _, id := range ids {
		text.WriteString(d.Add(id))
	}
	text.WriteString(d.Flush())
	return text.String()
}

// Decoder turns ids into text one by one. A character may span several tokens: its bytes are held back until it is
// complete. The results of Add and Flush, joined, are the result of Decode.
type Decoder struct {
	t    *Tokenizer
	held []byte // less than one character
}

// NewDecoder returns a Decoder for the beginning of a text.
func (t *Tokenizer) NewDecoder() *Decoder { return &Decoder{t: t} }

// Add returns the text that the next id completes, which may be empty.
func (d *Decoder) Add(id int) string {
	token, ok := d.t.tokens[id]
	switch {
	case !ok:
		return d.Flush() + string(utf8.RuneError)
	case d.t.special[id]:
		return ""
	}
	if text, ok := d.t.texts[id]; ok {
		d.held = append(d.held, text...)
	} else {
		d.held = appendToken(d.held, token)
	}
	return d.take(false)
}

// Flush ends the text and returns the held bytes: U+FFFD for an incomplete character.
func (d *Decoder) Flush() string { return d.take(true) }

// take returns the held text up to a last, incomplete character, or all of it.
func (d *Decoder) take(all bool) string {
	p := d.held
	if utf8.Valid(p) {
		d.held = p[:0]
		return string(p)
	}
	var text strings.Builder
	for len(p) > 0 && (all || utf8.FullRune(p)) {
		r, size := utf8.DecodeRune(p)
		if r == utf8.RuneError && size == 1 {
			for size < len(p) && !utf8.FullRune(p[:size+1]) {
				size++
			}
		}
		text.WriteRune(r)
		p = p[size:]
	}
	d.held = append(d.held[:0], p...)
	return text.String()
}

// appendToken appends the bytes of a token. A token with a character that stands for no byte, which merges never
// make, stands for itself.
func appendToken(dst []byte, token string) []byte {
	begin := len(dst)
	for _, r := range token {
		b, ok := byteOf[r]
		if !ok {
			return append(dst[:begin], token...)
		}
		dst = append(dst, b)
	}
	return dst
}

// charOf has the character for each byte in vocab.json and merges.txt, and byteOf the reverse. In GPT-2 the printable
// characters of Latin-1 stand for themselves, and the characters from U+0100 on for the other bytes in order, so that
// no token has a space.
var charOf, byteOf = func() (chars [256]rune, bytes map[rune]byte) {
	next := rune(0x100)
	bytes = map[rune]byte{}
	for b := range rune(256) {
		c := b
		if b < '!' || '~' < b && b < '¡' || b == 0xad {
			c, next = next, next+1
		}
		chars[b], bytes[c] = c, byte(b)
	}
	return
}()
