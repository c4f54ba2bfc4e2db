package main

import (
	"strings"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// showSpecial is the help of -special.
const showSpecial = "write the names of special tokens, too, and the token that ends a text; texts of -stop are found in that text"

// decodeToken returns the text of a token. A special token has a text if special is set.
func decodeToken(model *opened, id int, special bool) string {
	if special {
		return namedText(model.Tokenizer(), []int{id})
	}
	return model.Tokenizer().Decode([]int{id})
}

// namedText returns the text of tokens with the names of special tokens.
func namedText(t *tokenizer.Tokenizer, ids []int) string {
	d := t.NewDecoder()
	d.Special = true
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(d.Add(id))
	}
	b.WriteString(d.Flush())
	return b.String()
}

// messageText returns the text of an answer's tokens without the names of special tokens, for a message: the template writes names
// itself. written is the answer with the names. If a stop text has ended the answer, written is the beginning of the text of the tokens.
func messageText(t *tokenizer.Tokenizer, ids []int, written string, stopped bool) string {
	if !stopped {
		return t.Decode(ids)
	}
	var b strings.Builder
	named, plain := t.NewDecoder(), t.NewDecoder()
	named.Special = true
	for left, i := len(written), 0; left > 0 && i < len(ids); i++ {
		piece, own := named.Add(ids[i]), plain.Add(ids[i])
		b.WriteString(own[:min(left, len(own))]) // of a name plain has no byte
		left -= len(piece)
	}
	return b.String()
}
