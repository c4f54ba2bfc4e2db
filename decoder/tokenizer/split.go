package tokenizer

import (
	"iter"
	"strings"
	"unicode"
	"unicode/utf8"
)

// piece is a part of a text on its way to the model.
type piece struct {
	text  string
	first bool // nothing is before the piece
}

// splitter cuts the text between added tokens into words, by a pre-tokenizer of tokenizer.json.
type splitter struct {
	cuts        []cut // in order, each for the result of the cut before it
	prefixSpace bool  // a piece begins with a space
	gpt2        bool  // GPT-2's pattern cuts the pieces (nextWord); otherwise a piece is one word
	removes     bool  // some text is in no piece, or not as it was
}

// cut yields the pieces of a piece that is not empty, until yield returns false. A cut that cannot go on leaves the
// error with the encoder and returns false.
type cut func(e *encoder, p piece, yield func(piece) bool) bool

// split yields the words of a text and reports whether yield returned true for all.
func (s *splitter) split(e *encoder, p piece, yield func(string) bool) bool {
	return s.cut(s.cuts, e, p, yield)
}

// again does what the later cuts do with a short piece of a cut, from memory if there was such a piece.
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

// behaviour says what becomes of the matches of a cut.
type behaviour int

const (
	isolated     behaviour = iota // each match is a piece
	contiguous                    // neighbouring matches are one piece
	removed                       // no match is in a piece
	withPrevious                  // a match ends the piece before it
	withNext                      // a match begins the piece after it
)

var behaviours = map[string]behaviour{
	"Isolated": isolated, "Contiguous": contiguous, "Removed": removed, "MergedWithPrevious": withPrevious, "MergedWithNext": withNext,
}

// finder calls yield with the bytes [start, end) of each match in a text, in order, until yield returns false.
type finder func(text string, yield func(start, end int) bool) error

// cutAt makes a cut. With inverted the text between matches counts as a match, and matches do not.
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

// joiner makes pieces of matches and the text between them.
type joiner struct {
	behaviour
	piece
	yield   func(piece) bool
	stopped bool // yield returned false

	start, end int // a part that waits for the next one
	match      bool
	waits      bool
	was        bool // the part before was a match
	any        bool // there was a part
}

// next takes the next part, which is not empty.
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

// flush yields the part that waits.
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

// find makes a finder of matches.
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

// underline is SentencePiece's character for a space.
const underline = "▁"

// metaspace is the pre-tokenizer of that name: spaces become its character, which begins a piece.
type metaspace struct {
	replacement   string
	always, first bool // the character is put before every piece, or before a text
	split         bool // pieces begin at the character
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
