package tokenizer

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A pattern is a regular expression of a pre-tokenizer, with the semantics of Oniguruma: the leftmost match, and the first
// alternative that matches. The supported constructs are those of published tokenizers:
//
//	x  .  [a-z\d[é]&&[^x]]  \p{L} \P{L} \p{^L} \p{Han}  \s \S \d \D \w \W  \r \n \t \f \v \x20 \x{20} \u0020
//	xy  x|y  x* x+ x? x{1,3}  x*+ x++ x?+  (x) (?:x) (?>x) (?i:x) (?i)  (?=x) (?!x)  \b \B ^ $ \A \z
//
// The matcher backtracks, because (?!x) and the order of alternatives do not fit a finite automaton. scan bounds the number
// of steps.
//
// Package regexp2 does not fit: its character classes are those of Go's Unicode 15, and its limit is a duration.
type pattern struct {
	source string
	code   []instruction
	first  *class // characters that a match can begin with
}

type opcode uint8

const (
	opMatch   opcode = iota
	opRune           // a character of class
	opRun            // min to max characters of class, greedy
	opAtomic         // opRun without backtracking
	opSplit          // tries x, then y; only y if the next character is not in class
	opJump           // goes on at x
	opLook           // lookahead: the code from the next instruction to opMatch must match; goes on at x
	opNotLook        // negative lookahead, like opLook
	opOnly           // atomic group, like opLook, but goes on behind the match
	opBegin          // beginning of the text
	opLineBegin
	opLineEnd
	opEnd
	opBoundary
	opNotBoundary
)

type instruction struct {
	op       opcode
	class    *class
	min, max int32 // max < 0: no limit
	x, y     int32
}

const (
	maxPattern = 4096  // bytes of a pattern
	maxCode    = 16384 // instructions of a pattern; x{9} compiles to nine copies of x
	maxNesting = 64
)

// node is a part of a parsed pattern.
type node struct {
	kind     nodeKind
	set      set
	subs     []*node
	min, max int32
	keep     bool // possessive: a repetition without backtracking
	op       opcode

	begins     *beginnings // result of first
	class      *class      // class of set
	beginClass *class      // class of begins
}

// beginnings are the characters that a match can begin with. If a match can be empty, any character can follow.
type beginnings struct {
	set   set
	empty bool
}

type nodeKind uint8

const (
	nodeEmpty nodeKind = iota
	nodeSet
	nodeSequence
	nodeChoice
	nodeRepeat
	nodeLook // a lookahead (op is opLook or opNotLook) or an atomic group (op is opOnly)
	nodeAt   // an assertion about a position: op
)

// compilePattern compiles a regular expression. The error for an unsupported construct has the position of the construct.
func compilePattern(source string) (*pattern, error) {
	if len(source) > maxPattern {
		return nil, fmt.Errorf("a pattern of %d bytes, more than %d", len(source), maxPattern)
	}
	if !utf8.ValidString(source) {
		return nil, fmt.Errorf("a pattern %s that is not in UTF-8", quote(source))
	}
	p := &patternParser{text: source}
	n, err := p.choice(0)
	if err == nil && p.at < len(p.text) {
		err = p.fail("an unopened )")
	}
	if err != nil {
		return nil, err
	}
	first, empty := n.first()
	if empty {
		return nil, fmt.Errorf("pattern %s: an empty text matches", quote(source))
	}
	c := &patternCompiler{classes: map[string]*class{}}
	c.add(n)
	c.emit(instruction{op: opMatch})
	if len(c.code) > maxCode {
		return nil, fmt.Errorf("pattern %s: more than %d instructions", quote(source), maxCode)
	}
	return &pattern{source: source, code: c.code, first: newClass(first)}, nil
}

// first returns the characters that a match can begin with, and whether a match can be empty.
func (n *node) first() (s set, empty bool) {
	if n.begins == nil {
		s, empty = n.findFirst()
		n.begins = &beginnings{s, empty}
	}
	return n.begins.set, n.begins.empty
}

func (n *node) findFirst() (s set, empty bool) {
	switch n.kind {
	case nodeSet:
		return n.set, false
	case nodeSequence:
		var all []set
		for _, sub := range n.subs {
			f, e := sub.first()
			all = append(all, f)
			if !e {
				return set(nil).union(all...), false
			}
		}
		return set(nil).union(all...), true
	case nodeChoice:
		var all []set
		for _, sub := range n.subs {
			f, e := sub.first()
			all, empty = append(all, f), empty || e
		}
		return set(nil).union(all...), empty
	case nodeRepeat:
		f, e := n.subs[0].first()
		return f, e || n.min == 0
	case nodeLook:
		if n.op == opOnly {
			return n.subs[0].first()
		}
	}
	return nil, true
}

type patternParser struct {
	text string
	at   int
	fold bool // ignore case
	sets int  // number of open sets
}

func (p *patternParser) fail(format string, args ...any) error {
	return fmt.Errorf("pattern %s: byte %d: %s", quote(p.text), p.at, fmt.Sprintf(format, args...))
}

func (p *patternParser) next(s string) bool {
	if strings.HasPrefix(p.text[p.at:], s) {
		p.at += len(s)
		return true
	}
	return false
}

func (p *patternParser) rune() rune {
	r, size := utf8.DecodeRuneInString(p.text[p.at:])
	p.at += size
	return r
}

func (p *patternParser) choice(depth int) (*node, error) {
	if depth > maxNesting {
		return nil, p.fail("groups are nested more than %d deep", maxNesting)
	}
	fold := p.fold
	defer func() { p.fold = fold }()
	var subs []*node
	for {
		n, err := p.sequence(depth)
		if err != nil {
			return nil, err
		}
		if subs = append(subs, n); !p.next("|") {
			break
		}
	}
	if len(subs) == 1 {
		return subs[0], nil
	}
	return &node{kind: nodeChoice, subs: subs}, nil
}

func (p *patternParser) sequence(depth int) (*node, error) {
	n := &node{kind: nodeSequence}
	for p.at < len(p.text) && p.text[p.at] != '|' && p.text[p.at] != ')' {
		sub, err := p.atom(depth)
		if err != nil {
			return nil, err
		}
		if sub, err = p.repeats(sub); err != nil {
			return nil, err
		}
		n.subs = append(n.subs, sub)
	}
	return n, nil
}

var groups = []struct {
	text string
	op   opcode
}{{"(?:", opMatch}, {"(?=", opLook}, {"(?!", opNotLook}, {"(?>", opOnly}, {"(?i:", opMatch}}

func (p *patternParser) atom(depth int) (*node, error) {
	if p.next("(?i)") {
		p.fold = true // to the end of the group
		return &node{}, nil
	}
	for _, g := range groups {
		if !p.next(g.text) {
			continue
		}
		fold := p.fold
		p.fold = p.fold || g.text == "(?i:"
		n, err := p.group(depth)
		p.fold = fold
		if err != nil || g.op == opMatch {
			return n, err
		}
		return &node{kind: nodeLook, op: g.op, subs: []*node{n}}, nil
	}
	switch c := p.text[p.at]; c {
	case '(':
		if p.at++; p.next("?") {
			return nil, p.fail("a group (?%.10s, which is not known", p.text[p.at:])
		}
		return p.group(depth)
	case '[':
		p.at++
		s, err := p.set(depth)
		return &node{kind: nodeSet, set: s}, err
	case '.':
		p.at++
		return &node{kind: nodeSet, set: set{{'\n', '\n'}}.negate()}, nil
	case '^', '$':
		p.at++
		return &node{kind: nodeAt, op: map[byte]opcode{'^': opLineBegin, '$': opLineEnd}[c]}, nil
	case '*', '+', '?':
		return nil, p.fail("%q repeats nothing", c)
	case '\\':
		if p.at+1 < len(p.text) {
			if op, ok := map[byte]opcode{'b': opBoundary, 'B': opNotBoundary, 'A': opBegin, 'z': opEnd}[p.text[p.at+1]]; ok {
				p.at += 2
				return &node{kind: nodeAt, op: op}, nil
			}
		}
		s, _, err := p.escape()
		return &node{kind: nodeSet, set: s}, err
	}
	r := p.rune()
	return &node{kind: nodeSet, set: p.one(r)}, nil
}

func (p *patternParser) group(depth int) (*node, error) {
	n, err := p.choice(depth + 1)
	if err == nil && !p.next(")") {
		err = p.fail("an unclosed group")
	}
	return n, err
}

// one returns the set of a character, in either case if p.fold is true.
func (p *patternParser) one(r rune) set {
	s := set{{r, r}}
	if p.fold {
		s = s.fold()
	}
	return s
}

// repeats parses the quantifiers after n and returns n with the repetitions.
func (p *patternParser) repeats(n *node) (*node, error) {
	for p.at < len(p.text) {
		begin := p.at
		lo, hi := int32(0), int32(-1)
		switch p.text[p.at] {
		case '*':
		case '+':
			lo = 1
		case '?':
			hi = 1
		case '{':
			end := strings.IndexByte(p.text[p.at:], '}')
			if end < 0 {
				return nil, p.fail("an unclosed {")
			}
			low, high, two := strings.Cut(p.text[p.at+1:p.at+end], ",")
			l, err1 := strconv.ParseUint(low, 10, 10)
			h, err2 := strconv.ParseUint(high, 10, 10)
			if !two {
				h, err2 = l, nil
			}
			if lo, hi = int32(l), int32(h); two && high == "" {
				hi, err2 = -1, nil
			}
			if err1 != nil || err2 != nil || hi >= 0 && hi < lo {
				return nil, p.fail("%s, which is no number of repetitions up to 1023", quote(p.text[p.at:p.at+end+1]))
			}
			p.at += end
		default:
			return n, nil
		}
		p.at++
		counted := p.text[begin] == '{'
		keep := !counted && p.next("+") // in Oniguruma, the + of x{1,2}+ is a second quantifier
		if p.next("?") {
			return nil, p.fail("a repetition that matches as little as it can, which is not known")
		}
		if _, empty := n.first(); empty {
			p.at = begin
			return nil, p.fail("what is repeated can be empty")
		}
		n = &node{kind: nodeRepeat, subs: []*node{n}, min: lo, max: hi, keep: keep}
	}
	return n, nil
}

// escape parses an escape sequence. char is the character, or -1 if the sequence is a character class.
func (p *patternParser) escape() (s set, char rune, err error) {
	begin := p.at
	p.at++
	if p.at == len(p.text) {
		return nil, 0, p.fail("a \\ at the end")
	}
	c := p.rune()
	switch c {
	case 's':
		return spaces, -1, nil
	case 'S':
		return spaces.negate(), -1, nil
	case 'd':
		return digits, -1, nil
	case 'D':
		return digits.negate(), -1, nil
	case 'w', 'W':
		s := wordRunes
		if p.sets == 0 {
			s = s.union(wordNumbers)
		}
		if c == 'W' {
			s = s.negate()
		}
		return s, -1, nil
	case 'p', 'P':
		end := strings.IndexByte(p.text[p.at:], '}')
		if !p.next("{") || end < 0 {
			return nil, 0, p.fail("a property without {}")
		}
		name, not := strings.CutPrefix(p.text[p.at:p.at+end-1], "^")
		s, ok := property(name)
		if !ok {
			return nil, 0, p.fail("property %s is not known", quote(name))
		}
		p.at += end
		if not != (c == 'P') {
			s = s.negate()
		}
		return s, -1, nil
	case 'r', 'n', 't', 'f', 'v', 'a', 'e':
		c = map[rune]rune{'r': '\r', 'n': '\n', 't': '\t', 'f': '\f', 'v': '\v', 'a': '\a', 'e': 0x1b}[c]
	case 'x', 'u':
		digits, short := "", false
		switch rest := p.text[p.at:]; {
		case c == 'x' && strings.HasPrefix(rest, "{") && strings.Contains(rest, "}"):
			digits = rest[1:strings.IndexByte(rest, '}')]
			p.at += len(digits) + 2
		case c == 'x' && len(rest) >= 2:
			digits, short = rest[:2], true
			p.at += 2
		case c == 'u' && len(rest) >= 4:
			digits = rest[:4]
			p.at += 4
		}
		n, err := strconv.ParseUint(digits, 16, 21)
		if err != nil || n > lastRune || short && n > 0x7f {
			p.at = begin
			return nil, 0, p.fail("%s is no character", quote(p.text[p.at:min(len(p.text), p.at+12)]))
		}
		c = rune(n)
	default:
		if c < utf8.RuneSelf && (c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z') {
			p.at = begin
			return nil, 0, p.fail("\\%c is not known", c)
		}
	}
	return p.one(c), c, nil
}

// set parses the rest of a set after [.
func (p *patternParser) set(depth int) (set, error) {
	if depth > maxNesting {
		return nil, p.fail("sets are nested more than %d deep", maxNesting)
	}
	p.sets++
	defer func() { p.sets-- }()
	not := p.next("^")
	all := set{{0, lastRune}} // intersection of the operands before the last &&
	var here []set
	for first := true; ; first = false {
		switch {
		case p.at == len(p.text):
			return nil, p.fail("an unclosed [")
		case p.text[p.at] == ']' && first:
			return nil, p.fail("an empty set, or a ] without \\")
		case p.next("]"):
			s := all.intersect(set(nil).union(here...))
			if p.fold {
				if s.size() > 1<<12 {
					return nil, p.fail("cases of a set of %d characters", s.size())
				}
				s = s.fold()
			}
			if not {
				s = s.negate()
			}
			return s, nil
		case p.next("&&"):
			all, here = all.intersect(set(nil).union(here...)), nil
			continue
		case strings.HasPrefix(p.text[p.at:], "[:"):
			return nil, p.fail("a set of POSIX, which is not known")
		case p.next("["):
			s, err := p.set(depth + 1)
			if err != nil {
				return nil, err
			}
			here = append(here, s)
			continue
		}
		s, lo, err := p.member()
		if err != nil {
			return nil, err
		}
		if lo < 0 || p.at+1 >= len(p.text) || p.text[p.at] != '-' || p.text[p.at+1] == ']' {
			here = append(here, s)
			continue
		}
		p.at++
		_, hi, err := p.member()
		if err != nil {
			return nil, err
		}
		if hi < lo {
			return nil, p.fail("a range that ends before it begins")
		}
		here = append(here, set{{lo, hi}})
	}
}

// member parses a character or an escape sequence of a set.
func (p *patternParser) member() (set, rune, error) {
	if p.text[p.at] == '\\' {
		fold := p.fold
		p.fold = false // set folds the whole set
		s, c, err := p.escape()
		p.fold = fold
		return s, c, err
	}
	c := p.rune()
	return set{{c, c}}, c, nil
}

type patternCompiler struct {
	code    []instruction
	classes map[string]*class
}

func (c *patternCompiler) emit(i instruction) int {
	if len(c.code) <= maxCode { // compilePattern refuses longer code
		c.code = append(c.code, i)
	}
	return len(c.code) - 1
}

// class returns the class of a nodeSet.
func (c *patternCompiler) class(n *node) *class {
	if n.class == nil {
		n.class = c.newClass(n.set)
	}
	return n.class
}

func (c *patternCompiler) newClass(s set) *class {
	key := fmt.Sprint(s)
	k, ok := c.classes[key]
	if !ok {
		k = newClass(s)
		c.classes[key] = k
	}
	return k
}

// split emits an opSplit whose x is the next instruction, where the caller emits the code of n.
func (c *patternCompiler) split(n *node) int {
	in := instruction{op: opSplit, x: c.here() + 1}
	if first, empty := n.first(); !empty {
		if n.beginClass == nil {
			n.beginClass = c.newClass(first)
		}
		in.class = n.beginClass
	}
	return c.emit(in)
}

func (c *patternCompiler) here() int32 { return int32(len(c.code)) }

func (c *patternCompiler) add(n *node) {
	if len(c.code) > maxCode {
		return
	}
	switch n.kind {
	case nodeSet:
		c.emit(instruction{op: opRune, class: c.class(n)})
	case nodeSequence:
		for _, sub := range n.subs {
			c.add(sub)
		}
	case nodeChoice:
		var jumps []int
		for _, sub := range n.subs[:len(n.subs)-1] {
			split := c.split(sub)
			c.add(sub)
			jumps = append(jumps, c.emit(instruction{op: opJump}))
			c.code[split].y = c.here()
		}
		c.add(n.subs[len(n.subs)-1])
		for _, j := range jumps {
			c.code[j].x = c.here()
		}
	case nodeLook:
		look := c.emit(instruction{op: n.op})
		c.add(n.subs[0])
		c.emit(instruction{op: opMatch})
		c.code[look].x = c.here()
	case nodeAt:
		c.emit(instruction{op: n.op})
	case nodeRepeat:
		c.repeat(n)
	}
}

func (c *patternCompiler) repeat(n *node) {
	sub := n.subs[0]
	for sub.kind == nodeSequence && len(sub.subs) == 1 {
		sub = sub.subs[0]
	}
	if sub.kind == nodeSet {
		op := opRun
		if n.keep {
			op = opAtomic
		}
		c.emit(instruction{op: op, class: c.class(sub), min: n.min, max: n.max})
		return
	}
	if n.keep {
		c.add(&node{kind: nodeLook, op: opOnly, subs: []*node{{kind: nodeRepeat, subs: n.subs, min: n.min, max: n.max}}})
		return
	}
	for range n.min {
		c.add(sub)
	}
	if n.max < 0 {
		split := c.split(sub)
		c.add(sub)
		c.emit(instruction{op: opJump, x: int32(split)})
		c.code[split].y = c.here()
		return
	}
	var splits []int
	for range n.max - n.min {
		split := c.split(sub)
		c.add(sub)
		splits = append(splits, split)
	}
	for _, s := range slices.Backward(splits) {
		c.code[s].y = c.here()
	}
}
