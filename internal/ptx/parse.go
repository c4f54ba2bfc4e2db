package ptx

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Module is a parsed PTX text.
type Module struct {
	functions map[string]*function
	shared    []*variable // at module scope
}

// function is an entry or a device function.
type function struct {
	name    string
	entry   bool
	results []*variable
	params  []*variable

	// The body of an entry is parsed when the entry is compiled: a module has many entries, and a program
	// launches few of them.
	sync.Mutex
	tokens []token // the body, until it is parsed

	shared []*variable
	body   []statement
}

// variable is a named range of memory.
type variable struct {
	name         string
	space        string // shared, param, ...
	align, bytes int
	dynamic      bool // the launch decides the size
}

// statement is an instruction, a declaration of registers or parameters, a label, or the start or end of a
// scope.
type statement struct {
	line int
	text string

	label     string
	open, end bool
	registers *registers
	variable  *variable

	guard   string // predicate, or ""
	negated bool
	op      []string // parts of the name, split at the dots
	args    []operand
}

// registers is a declaration of registers of one type. A name with a count n stands for name0 to name<n-1>.
type registers struct {
	kind   string
	names  []string
	counts []int // 0: no count
}

// operand is a word (register, number or name), a list {a, b}, or an address [base+offset]. The address of a
// bulk tensor copy has further parts in the brackets.
type operand struct {
	word   string
	list   []operand
	memory bool
	offset int64
	pipe   string // second destination
}

// token is a word or a punctuation character.
type token struct {
	text string
	line int
}

func isWord(c byte) bool {
	return c == '_' || c == '$' || c == '%' || c == '.' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

func scan(text string) (tokens []token) {
	tokens = make([]token, 0, len(text)/3)
	line := 1
	for i := 0; i < len(text); {
		c := text[i]
		switch {
		case c == '\n':
			line++
			i++
		case c == ' ' || c == '\t' || c == '\r':
			i++
		case strings.HasPrefix(text[i:], "//"):
			for i < len(text) && text[i] != '\n' {
				i++
			}
		case c == '"':
			end := i + 1 + strings.IndexByte(text[i+1:], '"')
			tokens = append(tokens, token{text[i : end+1], line})
			i = end + 1
		case isWord(c):
			j := i
			for j < len(text) && (isWord(text[j]) || strings.HasPrefix(text[j:], "::")) {
				if text[j] == ':' {
					j++
				}
				j++
			}
			tokens = append(tokens, token{text[i:j], line})
			i = j
		default:
			tokens = append(tokens, token{text[i : i+1], line})
			i++
		}
	}
	return tokens
}

// parser reads tokens. It panics with a fault.
type parser struct {
	tokens []token
	at     int
	depth  int // nesting depth of lists
	m      *Module
}

func (p *parser) fail(format string, args ...any) {
	line := 1
	if n := len(p.tokens); n > 0 {
		line = p.tokens[min(max(p.at, 0), n-1)].line
	}
	panic(fault{fmt.Sprintf("line %d: ", line) + fmt.Sprintf(format, args...)})
}

func (p *parser) peek() string {
	if p.at >= len(p.tokens) {
		return ""
	}
	return p.tokens[p.at].text
}

func (p *parser) next() string {
	if p.at >= len(p.tokens) {
		p.fail("the text ends too early")
	}
	p.at++
	return p.tokens[p.at-1].text
}

func (p *parser) accept(text string) bool {
	if p.peek() != text {
		return false
	}
	p.at++
	return true
}

func (p *parser) expect(text string) {
	if got := p.next(); got != text {
		p.at--
		p.fail("%q, want %q", got, text)
	}
}

func (p *parser) number() int64 {
	sign := int64(1)
	if p.accept("-") {
		sign = -1
	}
	n, err := strconv.ParseInt(strings.TrimSuffix(p.next(), "U"), 0, 64)
	if err != nil {
		p.at--
		p.fail("%v", err)
	}
	return sign * n
}

// count parses a number between 0 and most.
func (p *parser) count(most int) int {
	n := p.number()
	if n < 0 || n > int64(most) {
		p.at--
		p.fail("%d of them", n)
	}
	return int(n)
}

func parse(text string) *Module {
	p := &parser{tokens: scan(text), m: &Module{functions: map[string]*function{}}}
	for p.at < len(p.tokens) {
		switch word := p.next(); word {
		case ".version", ".target", ".address_size":
			p.next()
			for p.accept(",") {
				p.next()
			}
		case ".visible", ".weak", ".extern":
		case ".global", ".const":
			for !p.accept(";") { // constants of the source; their uses already contain the values
				p.next()
			}
		case ".shared":
			p.m.shared = append(p.m.shared, p.variable("shared"))
			p.expect(";")
		case ".entry", ".func":
			p.function(word == ".entry")
		default:
			p.at--
			p.fail("%q", word)
		}
	}
	return p.m
}

// Limits, larger than any kernel's needs and small enough for the host.
const (
	mostBytes     = 1 << 20
	mostRegisters = 1 << 18
)

var sizes = map[string]int{"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}

// variable parses a declaration after its space, such as .align 16 .b8 name[48].
func (p *parser) variable(space string) *variable {
	v := &variable{space: space, align: 1}
	for {
		word := p.next()
		if word == ".align" {
			if v.align = p.count(1 << 16); bits.OnesCount(uint(v.align)) != 1 {
				p.at--
				p.fail("an alignment of %d", v.align)
			}
			continue
		}
		n, ok := sizes[strings.TrimPrefix(word, ".")]
		if !ok {
			p.at--
			p.fail("a variable of type %q", word)
		}
		v.bytes, v.align = n, max(v.align, n)
		break
	}
	v.name = p.next()
	if p.accept("[") {
		if p.accept("]") {
			v.dynamic = true
		} else {
			v.bytes *= p.count(mostBytes)
			p.expect("]")
		}
	}
	return v
}

func (p *parser) params() (all []*variable) {
	if !p.accept("(") {
		return nil
	}
	for !p.accept(")") {
		p.expect(".param")
		all = append(all, p.variable("param"))
		p.accept(",")
	}
	return all
}

func (p *parser) function(entry bool) {
	f := &function{entry: entry}
	if !entry {
		f.results = p.params()
	}
	f.name = p.next()
	f.params = p.params()
	for strings.HasPrefix(p.peek(), ".") { // .maxntid 256, 1, 1
		p.next()
		for p.peek() != "{" && p.peek() != ";" && !strings.HasPrefix(p.peek(), ".") {
			p.next()
		}
	}
	if p.accept(";") {
		return // a declaration without a body
	}
	p.expect("{")
	p.m.functions[f.name] = f
	if end := p.end(); entry && end > 0 {
		f.tokens, p.at = p.tokens[p.at:end], end
		return
	}
	p.body(f)
}

// end returns the index after the closing brace of a body, or 0 if the text has no such brace.
func (p *parser) end() int {
	depth := 1
	for i, t := range p.tokens[p.at:] {
		switch t.text {
		case "{":
			depth++
		case "}":
			if depth--; depth == 0 {
				return p.at + i + 1
			}
		}
	}
	return 0
}

// parse parses the body of an entry, if it is not parsed yet.
func (f *function) parse(m *Module) {
	f.Lock()
	defer f.Unlock()
	if f.tokens == nil {
		return
	}
	f.shared, f.body = nil, nil
	p := &parser{tokens: f.tokens, m: m}
	p.body(f)
	if p.at < len(p.tokens) {
		p.fail("%q", p.next())
	}
	f.tokens = nil
}

// body parses a body after its opening brace.
func (p *parser) body(f *function) {
	for depth := 1; depth > 0; {
		from := p.at
		s := p.statement()
		s.line = p.tokens[from].line
		var text strings.Builder
		for i, t := range p.tokens[from:p.at] {
			if i > 0 && t.text != "," && t.text != ";" {
				text.WriteByte(' ')
			}
			text.WriteString(t.text)
		}
		s.text = text.String()
		if s.open {
			if depth++; depth > 100 {
				p.fail("scopes within scopes")
			}
		}
		if s.end {
			depth--
		}
		if v := s.variable; v != nil && v.space == "shared" {
			f.shared = append(f.shared, v)
			continue
		}
		f.body = append(f.body, s)
	}
}

func (p *parser) statement() (s statement) {
	word := p.next()
	switch {
	case word == "{":
		s.open = true
		return s
	case word == "}":
		s.end = true
		return s
	case p.peek() == ":":
		p.next()
		s.label = word
		return s
	case word == ".reg":
		r := &registers{kind: strings.TrimPrefix(p.next(), ".")}
		for {
			name, n := p.next(), 0
			if p.accept("<") {
				n = p.count(mostRegisters)
				p.expect(">")
			}
			r.names, r.counts = append(r.names, name), append(r.counts, n)
			if !p.accept(",") {
				break
			}
		}
		p.expect(";")
		s.registers = r
		return s
	case word == ".param" || word == ".shared" || word == ".local":
		s.variable = p.variable(strings.TrimPrefix(word, "."))
		p.expect(";")
		return s
	case word == ".pragma": // "nounroll";
		for !p.accept(";") {
			p.next()
		}
		return s
	case word == "@":
		s.negated = p.accept("!")
		s.guard = p.next()
		word = p.next()
	}
	s.op = strings.Split(word, ".")
	if slices.Contains(s.op, "") {
		p.at--
		p.fail("%q", word)
	}
	for !p.accept(";") {
		s.args = append(s.args, p.operand())
		p.accept(",")
	}
	return s
}

func (p *parser) operand() (o operand) {
	if p.depth++; p.depth > 10 {
		p.fail("lists within lists")
	}
	defer func() { p.depth-- }()
	switch p.peek() {
	case "{", "(":
		closing := map[string]string{"{": "}", "(": ")"}[p.next()]
		for !p.accept(closing) {
			o.list = append(o.list, p.operand())
			p.accept(",")
		}
		return o
	case "[":
		p.next()
		o.memory = true
		o.word = p.next()
		if p.accept("+") {
			o.offset = p.number()
		}
		for p.accept(",") {
			o.list = append(o.list, p.operand())
		}
		p.expect("]")
		return o
	case "-":
		p.next()
		o.word = "-" + p.next()
		return o
	case "!":
		p.next()
		o.word = "!" + p.next()
		return o
	}
	o.word = p.next()
	if p.accept("|") {
		o.pipe = p.next()
	}
	return o
}
