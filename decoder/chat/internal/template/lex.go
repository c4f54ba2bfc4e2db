package template

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A kind is the kind of a token. The tokens of a tag are between its begin token and its end token.
type kind uint8

const (
	text kind = iota // literal text, after the removal of white space
	varBegin
	varEnd
	blockBegin
	blockEnd
	name
	str // a string literal, decoded
	integer
	float
	operator
	end // of the template
)

type token struct {
	kind kind
	text string
	at   mark
}

// mark is a place in a template: a line and a column. Both count from 1. Columns count characters.
type mark struct{ line, col int }

// Error is an error at a place in a template.
type Error struct {
	Line, Col int
	Text      string
	Err       error // the wrapped error, or nil
}

func (e *Error) Error() string { return fmt.Sprintf("line %d, column %d: %s", e.Line, e.Col, e.Text) }

func (e *Error) Unwrap() error { return e.Err }

func fail(at mark, format string, args ...any) *Error {
	return &Error{Line: at.line, Col: at.col, Text: fmt.Sprintf(format, args...), Err: ErrSyntax}
}

// quote returns s as a quoted string for an error, cut to 60 bytes.
func quote(s string) string {
	if len(s) > 60 {
		s = s[:60] + "..."
	}
	return strconv.Quote(s)
}

// lexer splits a template into tokens by the rules of Jinja with trim_blocks and lstrip_blocks.
type lexer struct {
	src     string
	pos     int
	at      mark
	newline bool // the last tag ended with a newline, or nothing has been read
	tokens  []token
}

func lex(src string) ([]token, error) {
	src = strings.ReplaceAll(strings.ReplaceAll(src, "\r\n", "\n"), "\r", "\n")
	src = strings.TrimSuffix(src, "\n")
	if !utf8.ValidString(src) {
		return nil, fail(mark{1, 1}, "the template is not UTF-8")
	}
	l := &lexer{src: src, at: mark{1, 1}, newline: true}
	for l.pos < len(l.src) {
		if err := l.next(); err != nil {
			return nil, err
		}
	}
	l.add(end, "", l.at)
	return l.tokens, nil
}

func (l *lexer) add(k kind, s string, at mark) { l.tokens = append(l.tokens, token{k, s, at}) }

// skip advances by n bytes and returns the skipped text.
func (l *lexer) skip(n int) string {
	s := l.src[l.pos : l.pos+n]
	l.pos += n
	if i := strings.LastIndexByte(s, '\n'); i >= 0 {
		l.at.line += strings.Count(s, "\n")
		l.at.col = 1
		l.at.col += utf8.RuneCountInString(s[i+1:])
	} else {
		l.at.col += utf8.RuneCountInString(s)
	}
	return s
}

func (l *lexer) rest() string { return l.src[l.pos:] }

// spaces returns the length of the white space at the beginning of s.
func spaces(s string) int { return len(s) - len(strings.TrimLeftFunc(s, isSpace)) }

// isSpace reports whether Python's str.isspace is true for r.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// next reads text and the tag after the text.
func (l *lexer) next() error {
	tag := -1
	for i := l.pos; i+1 < len(l.src); i++ {
		if l.src[i] == '{' && strings.IndexByte("{%#", l.src[i+1]) >= 0 {
			tag = i
			break
		}
	}
	at := l.at
	if tag < 0 {
		l.add(text, l.skip(len(l.src)-l.pos), at)
		return nil
	}
	before := l.src[l.pos:tag]
	sign := byte(0)
	if tag+2 < len(l.src) && (l.src[tag+2] == '-' || l.src[tag+2] == '+') {
		sign = l.src[tag+2]
	}
	if s := l.strip(before, sign, l.src[tag+1] != '{'); s != "" {
		l.add(text, s, at)
	}
	l.skip(len(before))
	at = l.at
	open := l.skip(2)
	if sign != 0 {
		l.skip(1)
	}
	switch open {
	case "{#":
		n := strings.Index(l.rest(), "#}")
		if n < 0 {
			return fail(at, "a comment begins here and has no end")
		}
		l.closed(l.skip(n), "#}", true)
		return nil
	case "{%":
		if n, ok := rawTag(l.rest(), "raw"); ok {
			return l.raw(at, n)
		}
		return l.tag(at, blockBegin, blockEnd, "%}")
	}
	return l.tag(at, varBegin, varEnd, "}}")
}

// strip returns text without the white space that a tag with the given sign removes before the tag.
func (l *lexer) strip(s string, sign byte, block bool) string {
	if sign == '-' {
		return strings.TrimRightFunc(s, isSpace)
	}
	if sign != '+' && block {
		line := strings.LastIndexByte(s, '\n') + 1
		if (line > 0 || l.newline) && spaces(s[line:]) == len(s)-line {
			return s[:line]
		}
	}
	return s
}

// closed reads the end of a tag and the white space that the tag removes after the tag. inside is the content of the tag.
func (l *lexer) closed(inside, closer string, block bool) {
	l.skip(len(closer))
	l.newline = false
	switch {
	case strings.HasSuffix(inside, "-"):
		if n := spaces(l.rest()); n > 0 {
			l.newline = strings.HasSuffix(l.skip(n), "\n")
		}
	case block && !strings.HasSuffix(inside, "+") && strings.HasPrefix(l.rest(), "\n"):
		l.skip(1)
		l.newline = true
	}
}

// rawTag reports whether s begins with the rest of a tag of one word, after "{%" and an optional sign. rawTag also returns the
// length of the rest.
func rawTag(s, word string) (int, bool) {
	n := spaces(s)
	if !strings.HasPrefix(s[n:], word) {
		return 0, false
	}
	n += len(word)
	n += spaces(s[n:])
	if strings.HasPrefix(s[n:], "-%}") || strings.HasPrefix(s[n:], "+%}") {
		return n + 3, true
	}
	return n + 2, strings.HasPrefix(s[n:], "%}")
}

// raw reads the remaining n bytes of {% raw %} and the text up to the end of {% endraw %}.
func (l *lexer) raw(at mark, n int) error {
	inside := l.skip(n)
	l.newline = false
	if strings.HasSuffix(inside, "-%}") {
		l.skip(spaces(l.rest()))
	}
	for i := l.pos; ; i += 2 {
		j := strings.Index(l.src[i:], "{%")
		if j < 0 {
			return fail(at, "raw begins here and has no endraw")
		}
		i += j
		sign, from := byte(0), i+2
		if from < len(l.src) && (l.src[from] == '-' || l.src[from] == '+') {
			sign = l.src[from]
			from++
		}
		m, ok := rawTag(l.src[from:], "endraw")
		if !ok {
			continue
		}
		begin := l.at
		if s := l.strip(l.src[l.pos:i], sign, true); s != "" {
			l.add(text, s, begin)
		}
		l.skip(from + m - 2 - l.pos)
		l.closed(l.src[:l.pos], "%}", true)
		return nil
	}
}

// operators lists the operators. Longer operators come first.
var operators = []string{"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";"}

// tag reads the tokens of a tag.
func (l *lexer) tag(at mark, begin, close kind, closer string) error {
	l.add(begin, "", at)
	var open []byte
	for {
		l.skip(spaces(l.rest()))
		s := l.rest()
		if s == "" {
			return fail(at, "a tag begins here and has no %q", closer)
		}
		here := l.at
		if len(open) == 0 {
			n := 0
			if s[0] == '-' || s[0] == '+' && close == blockEnd {
				n = 1
			}
			if strings.HasPrefix(s[n:], closer) {
				l.skip(n)
				l.closed(s[:n], closer, close == blockEnd)
				l.add(close, "", here)
				return nil
			}
		}
		switch c := s[0]; {
		case c == '\'' || c == '"':
			n := 1
			for n < len(s) && s[n] != c {
				if s[n] == '\\' {
					n++
				}
				n++
			}
			if n >= len(s) {
				return fail(here, "a string begins here and has no end")
			}
			v, err := unescape(s[1:n])
			if err != nil {
				return fail(here, "%v", err)
			}
			l.add(str, v, here)
			l.skip(n + 1)
		case c >= '0' && c <= '9':
			if err := l.number(); err != nil {
				return err
			}
		case isName(rune(c), true):
			n := 1
			for n < len(s) && isName(rune(s[n]), false) {
				n++
			}
			l.add(name, l.skip(n), here)
		default:
			op := ""
			for _, o := range operators {
				if strings.HasPrefix(s, o) {
					op = o
					break
				}
			}
			switch op {
			case "":
				r, _ := utf8.DecodeRuneInString(s)
				return fail(here, "unexpected character %q", r)
			case "(", "[", "{":
				open = append(open, ")]}"[strings.Index("([{", op)])
			case ")", "]", "}":
				if len(open) == 0 || open[len(open)-1] != op[0] {
					return fail(here, "unexpected %q", op)
				}
				open = open[:len(open)-1]
			}
			l.add(operator, l.skip(len(op)), here)
		}
	}
}

func isName(r rune, first bool) bool {
	return r == '_' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || !first && r >= '0' && r <= '9'
}

// number reads an integer or a float.
func (l *lexer) number() error {
	s, at := l.rest(), l.at
	n := 0
	for n < len(s) && (isName(rune(s[n]), false) || s[n] == '.' && n+1 < len(s) && s[n+1] >= '0' && s[n+1] <= '9') {
		n++
		if n < len(s) && (s[n] == '+' || s[n] == '-') && (s[n-1] == 'e' || s[n-1] == 'E') && !strings.HasPrefix(s, "0x") {
			n++
		}
	}
	if last := len(l.tokens) - 1; last >= 0 && l.tokens[last].kind == operator && l.tokens[last].text == "." {
		n = len(s) - len(strings.TrimLeft(s, "0123456789")) // x.0.1 means x[0][1]
	}
	digits := s[:n]
	if v, err := strconv.ParseInt(digits, 0, 64); err == nil && (len(digits) == 1 || digits[0] != '0' || strings.Trim(digits, "0_") == "" || !isDigits(digits)) {
		l.add(integer, strconv.FormatInt(v, 10), at)
	} else if v, err := strconv.ParseFloat(strings.ReplaceAll(digits, "_", ""), 64); err == nil && strings.ContainsAny(digits, ".eE") && !strings.ContainsAny(digits, "xXpPnN") {
		l.add(float, strconv.FormatFloat(v, 'g', -1, 64), at)
	} else {
		return fail(at, "%s is no number of 64 bits", quote(digits))
	}
	l.skip(n)
	return nil
}

func isDigits(s string) bool { return strings.Trim(s, "0123456789_") == "" }

// unescape decodes the escapes of a string literal by Python's rules.
func unescape(s string) (string, error) {
	if strings.IndexByte(s, '\\') < 0 {
		return s, nil
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			b.WriteByte(s[i])
			continue
		}
		i++
		const from, to = `\'"abfnrtv`, "\\'\"\a\b\f\n\r\t\v"
		if j := strings.IndexByte(from, s[i]); j >= 0 {
			b.WriteByte(to[j])
			continue
		}
		digits, base := 0, 16
		switch s[i] {
		case '\n':
			continue
		case 'x':
			digits = 2
		case 'u':
			digits = 4
		case 'U':
			digits = 8
		case 'N':
			return "", fmt.Errorf("%s: names of characters (\\N) are not supported", quote(s))
		case '0', '1', '2', '3', '4', '5', '6', '7':
			base = 8
			for digits < 3 && i+digits < len(s) && s[i+digits] >= '0' && s[i+digits] <= '7' {
				digits++
			}
			i--
		default:
			b.WriteByte('\\')
			b.WriteByte(s[i])
			continue
		}
		if i+1+digits > len(s) {
			return "", fmt.Errorf("%s: an escape is too short", quote(s))
		}
		v, err := strconv.ParseUint(s[i+1:i+1+digits], base, 32)
		if err != nil || v > utf8.MaxRune || v >= 0xd800 && v < 0xe000 {
			return "", fmt.Errorf("%s: \\%s is no character", quote(s), s[i:i+1+digits])
		}
		b.WriteRune(rune(v))
		i += digits
	}
	return b.String(), nil
}
