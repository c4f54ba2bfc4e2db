package bpe

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// nextWord returns the length of the first word of a text that is not empty.
// Words are the matches of GPT-2's pattern,
//
//	's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// where \s is Unicode's White_Space. They cover the text. A byte that is no
// UTF-8 counts as a character that is neither space, letter nor number.
//
// Go's regexp has no (?!\S), and its \s is ASCII; by hand it is also linear.
func nextWord(text string) int {
	for _, c := range [...]string{"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"} {
		if strings.HasPrefix(text, c) {
			return len(c)
		}
	}
	start := 0
	if text[0] == ' ' {
		start = 1
	}
	if k := kindAt(text, start); k != space && k != none {
		return runEnd(text, start, k)
	}
	// White space. All but its last character, so that a space can begin the
	// next word; all of it at the end of the text, or if it is just one.
	end := runEnd(text, 0, space)
	if end < len(text) {
		if _, size := utf8.DecodeLastRuneInString(text[:end]); size < end {
			return end - size
		}
	}
	return end
}

type kind uint8

const (
	none kind = iota // the end of the text
	space
	letter
	number
	other
)

func kindAt(text string, at int) kind {
	if at == len(text) {
		return none
	}
	r, _ := utf8.DecodeRuneInString(text[at:])
	switch {
	case unicode.IsLetter(r):
		return letter
	case unicode.IsSpace(r):
		return space
	case unicode.IsNumber(r):
		return number
	}
	return other
}

// runEnd returns where the characters of kind k that begin at start end.
func runEnd(text string, start int, k kind) int {
	for kindAt(text, start) == k {
		_, size := utf8.DecodeRuneInString(text[start:])
		start += size
	}
	return start
}
