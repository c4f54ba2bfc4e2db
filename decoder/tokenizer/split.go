package tokenizer

import (
	"iter"
	"strings"
	"unicode"
	"unicode/utf8"
)

// splitter cuts the text between added tokens into words, by a pre-tokenizer of tokenizer.json.
type splitter struct {
	cuts        []cut // in order, each for the result of the cut before it
	prefixSpace bool  // a piece begins with a space
	whole       bool  // a piece is one word; otherwise GPT-2's pattern cuts it
	removes     bool  // some text is in no piece
}

// cut yields the pieces of a nonempty text, until yield returns false.
type cut func(text string, yield func(string) bool) bool

// split yields the words of a text and reports whether yield returned true for all.
func (s *splitter) split(text string, yield func(string) bool) bool {
	return s.cut(s.cuts, text, yield)
}

func (s *splitter) cut(cuts []cut, text string, yield func(string) bool) bool {
	if len(cuts) > 0 {
		return cuts[0](text, func(piece string) bool { return s.cut(cuts[1:], piece, yield) })
	}
	if s.prefixSpace && text[0] != ' ' {
		text = " " + text
	}
	if s.whole {
		return yield(text)
	}
	for text != "" {
		n := nextWord(text)
		if !yield(text[:n]) {
			return false
		}
		text = text[n:]
	}
	return true
}

// behaviour says what becomes of the matches of a cut.
type behaviour int

const (
	isolated   behaviour = iota // each match is a piece
	contiguous                  // neighbouring matches are one piece
	removed                     // no match is in a piece
)

// cutAt makes a cut from matches, which yields the bytes [start, end) of each match in a text, in order.
func cutAt(b behaviour, matches func(text string) iter.Seq2[int, int]) cut {
	return func(text string, yield func(string) bool) bool {
		done, begun := 0, -1 // begun: beginning of contiguous matches; -1: none
		for start, end := range matches(text) {
			if begun >= 0 && start > done {
				if !yield(text[begun:done]) {
					return false
				}
				begun = -1
			}
			if done < start && !yield(text[done:start]) {
				return false
			}
			switch {
			case b == isolated && !yield(text[start:end]):
				return false
			case b == contiguous && begun < 0:
				begun = start
			}
			done = end
		}
		if begun >= 0 && !yield(text[begun:done]) {
			return false
		}
		return done == len(text) || yield(text[done:])
	}
}

// runes yields the characters of a text for which is returns true.
func runes(is func(rune) bool) func(text string) iter.Seq2[int, int] {
	return func(text string) iter.Seq2[int, int] {
		return func(yield func(int, int) bool) {
			for i, r := range text {
				if _, size := utf8.DecodeRuneInString(text[i:]); is(r) && !yield(i, i+size) {
					return
				}
			}
		}
	}
}

// occurrences yields the positions of pattern, which is not empty, in a text.
func occurrences(pattern string) func(text string) iter.Seq2[int, int] {
	return func(text string) iter.Seq2[int, int] {
		return func(yield func(int, int) bool) {
			for at := 0; ; {
				i := strings.Index(text[at:], pattern)
				if i < 0 || !yield(at+i, at+i+len(pattern)) {
					return
				}
				at += i + len(pattern)
			}
		}
	}
}

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
	case isLetter(r):
		return letter
	case unicode.IsSpace(r):
		return space
	case isNumber(r):
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
