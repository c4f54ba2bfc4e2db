package tokenizer

import (
	"iter"
	"strings"
	"unicode"
	"unicode/utf8"
)

// piece is a part of a text between cuts.
type piece struct {
	text  string
	first bool // the piece is at the beginning of the text
}

// splitter is a pre-tokenizer, which splits the text between added tokens into words.
type splitter struct {
	cuts        []cut // in order; each cut splits the pieces of the previous cut
	prefixSpace bool  // add a space to a piece that does not begin with a space
	gpt2        bool  // split the pieces at GPT-2's pattern (nextWord); otherwise a piece is one word
	removes     bool  // the cuts may remove or change text
}

// cut yields the parts of a nonempty piece, until yield returns false. If a cut fails, the cut passes the error to the
// encoder and returns false.
type cut func(e *encoder, p piece, yield func(piece) bool) bool

// split yields the words of a piece, and reports whether yield returned true for every word.
func (s *splitter) split(e *encoder, p piece, yield func(string) bool) bool {
	return s.cut(s.cuts, e, p, yield)
}

// again applies the remaining cuts to a piece. For a short piece that occurred before, again appends the cached ids.
func (s *splitter) again(cuts []cut, e *encoder, p piece, yield func(string) bool) bool {
	if e == nil || p.first || len(p.text) > maxCached {
		return s.cut(cuts, e, p, yield)
	}
	if e.pieces == nil {
		e.pieces = make([]map[string][]int, len(s.cuts))
		for i := range e.pieces {
			e.pieces[i] = map[string][]int{}
		}
	}
	known := e.pieces[len(cuts)]
	if ids, ok := known[p.text]; ok {
		return e.add(ids...)
	}
	begin := len(e.ids)
	if !s.cut(cuts, e, p, yield) {
		return false
	}
	known[p.text] = e.ids[begin:len(e.ids):len(e.ids)]
	return true
}

func (s *splitter) cut(cuts []cut, e *encoder, p piece, yield func(string) bool) bool {
	if p.text == "" {
		return true
	}
	if len(cuts) > 0 {
		if len(cuts) == 1 {
			return cuts[0](e, p, func(p piece) bool { return s.cut(nil, e, p, yield) })
		}
		return cuts[0](e, p, func(p piece) bool { return s.again(cuts[1:], e, p, yield) })
	}
	text := p.text
	if s.prefixSpace && text[0] != ' ' {
		text = " " + text
	}
	if !s.gpt2 {
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

// behaviour is the treatment of the matches of a cut.
type behaviour int

const (
	isolated     behaviour = iota // each match is a piece
	contiguous                    // adjacent matches are one piece
	removed                       // matches are removed
	withPrevious                  // a match is appended to the previous piece
	withNext                      // a match is prepended to the next piece
)

var behaviours = map[string]behaviour{
	"Isolated": isolated, "Contiguous": contiguous, "Removed": removed, "MergedWithPrevious": withPrevious, "MergedWithNext": withNext,
}

// finder calls yield with the byte range [start, end) of each match in a text, in order, until yield returns false.
type finder func(text string, yield func(start, end int) bool) error

// cutAt returns a cut at matches. With inverted, the text between matches counts as matches, and matches count as text
// between matches.
func cutAt(b behaviour, inverted bool, matches finder) cut {
	return func(e *encoder, p piece, yield func(piece) bool) bool {
		j := joiner{behaviour: b, piece: p, yield: yield}
		done := 0
		err := matches(p.text, func(start, end int) bool {
			ok := done == start || j.next(done, start, inverted)
			done = end
			return ok && j.next(start, end, !inverted)
		})
		if err != nil {
			e.fail(err)
			return false
		}
		return !j.stopped && (done == len(p.text) || j.next(done, len(p.text), inverted)) && j.flush()
	}
}

// joiner joins matches and the text between matches into pieces, by behaviour.
type joiner struct {
	behaviour
	piece
	yield   func(piece) bool
	stopped bool // yield returned false

	start, end int  // the pending part, which may be joined with the next part
	match      bool // the pending part is a match
	waits      bool // there is a pending part
	was        bool // the previous part was a match
	any        bool // there was a previous part
}

// next adds the next part, which must not be empty.
func (j *joiner) next(start, end int, match bool) bool {
	was, any := j.was, j.any
	j.was, j.any = match, true
	switch j.behaviour {
	case isolated:
		return j.put(start, end)
	case removed:
		return match || j.put(start, end)
	case contiguous:
		if any && was == match && j.waits {
			j.end = end
			return true
		}
	case withPrevious:
		if match && !was && j.waits {
			j.end = end
			return true
		}
	case withNext:
		if j.waits && j.match && !match {
			j.waits = false
			return j.put(j.start, end)
		}
	}
	if !j.flush() {
		return false
	}
	j.start, j.end, j.match, j.waits = start, end, match, true
	return true
}

// flush yields the pending part.
func (j *joiner) flush() bool {
	if !j.waits {
		return true
	}
	j.waits = false
	return j.put(j.start, j.end)
}

func (j *joiner) put(start, end int) bool {
	j.stopped = !j.yield(piece{j.text[start:end], j.first && start == 0})
	return !j.stopped
}

// find returns a finder for matches.
func find(matches func(text string) iter.Seq2[int, int]) finder {
	return func(text string, yield func(int, int) bool) error {
		for start, end := range matches(text) {
			if !yield(start, end) {
				break
			}
		}
		return nil
	}
}

// runes yields the byte ranges of the characters for which is returns true.
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

// occurrences yields the byte ranges of the occurrences of a nonempty pattern.
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

// underline is SentencePiece's character for a space.
const underline = "▁"

// metaspace is the pre-tokenizer Metaspace, which replaces spaces with replacement and splits before replacement.
type metaspace struct {
	replacement   string
	always, first bool // prepend replacement to every piece, or to the first piece
	split         bool // split before replacement
}

func (m *metaspace) cut(e *encoder, p piece, yield func(piece) bool) bool {
	text := strings.ReplaceAll(p.text, " ", m.replacement)
	if (m.always || m.first && p.first) && !strings.HasPrefix(text, m.replacement) {
		text = m.replacement + text
	}
	if !m.split {
		return yield(piece{text, p.first})
	}
	return cutAt(withNext, false, find(occurrences(m.replacement)))(e, piece{text, p.first}, yield)
}

// nextWord returns the length of the first word of a nonempty text.
// Words are the matches of GPT-2's pattern,
//
//	's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// where \s is Unicode's White_Space. The matches cover the text. An invalid byte
// of UTF-8 counts as a character that is neither space, letter nor number.
//
// Package regexp does not fit: regexp has no (?!\S), and \s of regexp is ASCII only. nextWord takes linear time.
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
	// The word is white space. The last character is left for the next word,
	// except at the end of the text or if there is only one character.
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

// runEnd returns the end of the run of characters of kind k that begins at start.
func runEnd(text string, start int, k kind) int {
	for kindAt(text, start) == k {
		_, size := utf8.DecodeRuneInString(text[start:])
		start += size
	}
	return start
}
