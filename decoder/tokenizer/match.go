package tokenizer

import (
	"fmt"
	"unicode/utf8"
)

// scanner finds the matches of a pattern in texts.
type scanner struct {
	*pattern
	text  string
	stack []retry
	steps int // number of steps left
	over  bool
}

// retry is a backtracking point: after a failure, matching resumes at instruction code and position at. For a run,
// matching first moves at back by one character, down to least.
type retry struct {
	code      int32
	at, least int
	run       bool
}

// Limits of steps. A step examines one character. The patterns of published tokenizers take up to ten steps a byte.
const (
	stepsPerByte = 256
	stepsAtLeast = 1 << 14
)

// scan calls yield with the byte range [start, end) of each match, in order, until yield returns false. scan returns an
// error if the text takes too many steps.
func (p *pattern) scan(text string, yield func(start, end int) bool) error {
	s := &scanner{pattern: p, text: text, steps: stepsAtLeast + stepsPerByte*len(text)}
	for at := 0; at < len(text); {
		r, size := rune(text[at]), 1
		if r >= utf8.RuneSelf {
			r, size = utf8.DecodeRuneInString(text[at:])
		}
		if !p.first.has(r) {
			at += size
			continue
		}
		end := s.match(0, at, 0)
		switch {
		case s.over:
			return fmt.Errorf("pattern %s takes more than %d steps a byte in a text of %d bytes", quote(p.source), stepsPerByte, len(text))
		case end < 0:
			at += size
		case !yield(at, end):
			return nil
		default:
			at = end // a match is never empty
		}
	}
	return nil
}

// match runs the code at a position up to opMatch, and returns the end of the match, or -1 if there is no match.
func (s *scanner) match(code int32, at, depth int) int {
	base := len(s.stack)
	end := s.run(code, at, depth, base)
	s.stack = s.stack[:base]
	return end
}

// run is match for a stack whose first base entries belong to callers.
func (s *scanner) run(code int32, at, depth, base int) int {
	for {
		if s.steps--; s.steps < 0 || depth > maxNesting {
			s.over = true
			return -1
		}
		in := &s.code[code]
		ok := true
		switch in.op {
		case opMatch:
			return at
		case opRune:
			r, size := s.rune(at)
			if ok = size > 0 && in.class.has(r); ok {
				at += size
			}
			code++
		case opRun, opAtomic:
			begin, least := at, at
			n := int32(0)
			for n != in.max {
				r, size := s.rune(at)
				if size == 0 || !in.class.has(r) {
					break
				}
				at += size
				if n++; n == in.min {
					least = at
				}
			}
			s.steps -= at - begin
			code++
			if ok = n >= in.min; ok && in.op == opRun && at > least {
				s.stack = append(s.stack, retry{code: code, at: at, least: least, run: true})
			}
		case opSplit:
			if in.class != nil {
				if r, size := s.rune(at); size == 0 || !in.class.has(r) {
					code = in.y
					continue
				}
			}
			s.stack = append(s.stack, retry{code: in.y, at: at})
			code = in.x
		case opJump:
			code = in.x
		case opLook, opNotLook, opOnly:
			end := s.match(code+1, at, depth+1)
			if s.over {
				return -1
			}
			ok = end >= 0 != (in.op == opNotLook)
			if ok && in.op == opOnly {
				at = end
			}
			code = in.x
		default:
			ok = s.position(in.op, at)
			code++
		}
		if ok {
			continue
		}
		if len(s.stack) == base {
			return -1
		}
		last := &s.stack[len(s.stack)-1]
		if last.run {
			_, size := utf8.DecodeLastRuneInString(s.text[:last.at])
			last.at -= size
			code, at = last.code, last.at
			if last.at > last.least {
				continue
			}
		} else {
			code, at = last.code, last.at
		}
		s.stack = s.stack[:len(s.stack)-1]
	}
}

func (s *scanner) rune(at int) (rune, int) {
	if at == len(s.text) {
		return 0, 0
	}
	if c := s.text[at]; c < utf8.RuneSelf {
		return rune(c), 1
	}
	return utf8.DecodeRuneInString(s.text[at:])
}

// position reports whether the assertion op holds at a position.
func (s *scanner) position(op opcode, at int) bool {
	switch op {
	case opBegin:
		return at == 0
	case opEnd:
		return at == len(s.text)
	case opLineBegin:
		return at == 0 || s.text[at-1] == '\n' && at < len(s.text)
	case opLineEnd:
		return at == len(s.text) || s.text[at] == '\n'
	}
	before, _ := utf8.DecodeLastRuneInString(s.text[:at])
	after, size := s.rune(at)
	is := (at > 0 && isWordRune(before)) != (size > 0 && isWordRune(after))
	return is == (op == opBoundary)
}

var wordClass = newClass(wordRunes.union(wordNumbers))

func isWordRune(r rune) bool { return wordClass.has(r) }
