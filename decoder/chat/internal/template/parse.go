package template

import (
	"slices"
	"strconv"
	"strings"
)

// Limits of a template's source.
const (
	maxSource = 1 << 20 // bytes
	maxNest   = 100     // nesting depth of statements, and of brackets in an expression
	maxChain  = 500     // depth of operators in an expression
)

// expression is a translated expression.
type expression struct {
	src   string
	depth int
	// object and attr are x and attr of the expression x.attr. A call of x.attr is a method call.
	object, attr string
	call         bool   // the expression is a call
	name         string // the expression is this name
}

// frame is a scope of the template and the names that the scope assigns.
type frame struct {
	names []string // in the order of their first assignment
	seen  map[string]bool
	loop  bool // the scope is a loop's body: break and continue are allowed
	plain bool // break and continue apply to an enclosing loop: the else part of a loop
}

// parser translates a template to a template for the library (github.com/ardanlabs/jinja). The library runs loops, conditions,
// macros and variables. Operators, filters, tests, methods, functions and output become calls of functions of this package
// (run.go). Names in the translated template:
//
//	v_NAME       a variable of the template
//	l_FUNCTION   a function of this package
//	t_NUMBER     a temporary value
//
// Literal text becomes an index in a table. So the library removes no white space, and the output limit covers literal text.
type parser struct {
	tokens []token
	pos    int
	out    *strings.Builder
	frames []frame
	texts  []string
	marks  []mark
	temps  int
	nest   int
	soft   int // number of enclosing conditions; inside one, unknown filters and tests fail at rendering, as in Jinja
}

func parse(tokens []token) (p *parser, err error) {
	p = &parser{tokens: tokens, out: &strings.Builder{}, frames: []frame{{}}}
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(*Error)
			if !ok {
				panic(r)
			}
			p, err = nil, e
		}
	}()
	p.body()
	return p, nil
}

// fail panics with an error at a place. parse recovers the error.
func (p *parser) fail(at mark, format string, args ...any) { panic(fail(at, format, args...)) }

func (p *parser) peek() token { return p.tokens[p.pos] }

func (p *parser) next() token {
	t := p.tokens[p.pos]
	if t.kind != end {
		p.pos++
	}
	return t
}

func (p *parser) is(k kind, s string) bool { t := p.peek(); return t.kind == k && t.text == s }

func (p *parser) op(s string) bool { return p.is(operator, s) }

func (p *parser) skip(k kind, s string) bool {
	if p.is(k, s) {
		p.pos++
		return true
	}
	return false
}

func (p *parser) unexpected(t token, want string) {
	got := quote(t.text)
	switch t.kind {
	case varEnd, blockEnd:
		got = "the end of the tag"
	case end:
		got = "the end of the template"
	}
	p.fail(t.at, "%s, want %s", got, want)
}

func (p *parser) expect(k kind, s string) token {
	t := p.next()
	if t.kind != k || s != "" && t.text != s {
		want := quote(s)
		switch {
		case k == name && s == "":
			want = "a name"
		case k == blockEnd:
			want = `"%}"`
		case k == varEnd:
			want = `"}}"`
		}
		p.unexpected(t, want)
	}
	return t
}

// mark records a place and returns its number.
func (p *parser) mark(at mark) string {
	p.marks = append(p.marks, at)
	return strconv.Itoa(len(p.marks) - 1)
}

func (p *parser) temp() string { p.temps++; return "t_" + strconv.Itoa(p.temps) }

// emit writes parts of the translated template. emit adds a newline after a statement, and the library removes the newline. To
// trim a statement, the library searches for the nearest text. Without the newlines, these searches take quadratic time.
func (p *parser) emit(parts ...string) {
	for _, s := range parts {
		p.out.WriteString(s)
		if strings.HasSuffix(s, "%}") {
			p.out.WriteByte('\n')
		}
	}
}

func (p *parser) set(name, value string) { p.emit("{% set ", name, " = ", value, " %}") }

func variable(name string) string {
	if name == "loop" || name == "caller" {
		return name
	}
	return "v_" + name
}

// assign records that the innermost scope assigns a name, and returns the name of the variable in the translated template.
func (p *parser) assign(t token) string {
	if t.text == "loop" || t.text == "caller" {
		p.fail(t.at, "%q can't be assigned", t.text)
	}
	f := &p.frames[len(p.frames)-1]
	if !f.seen[t.text] {
		if f.seen == nil {
			f.seen = map[string]bool{}
		}
		f.seen[t.text] = true
		f.names = append(f.names, t.text)
	}
	return variable(t.text)
}

func literal(s string) string {
	return "'" + strings.ReplaceAll(strings.ReplaceAll(s, `\`, `\\`), `'`, `\'`) + "'"
}

// body translates statements up to one of the ends, and returns the token of the end.
func (p *parser) body(ends ...string) token {
	p.nest++
	begin := p.peek().at
	if p.nest > maxNest {
		p.fail(begin, "more than %d statements inside each other", maxNest)
	}
	defer func() { p.nest-- }()
	for {
		t := p.next()
		switch t.kind {
		case text:
			p.texts = append(p.texts, t.text)
			p.emit("{{l_text(", p.mark(t.at), ",", strconv.Itoa(len(p.texts)-1), ")}}")
		case varBegin:
			e := p.tuple(true, false)
			p.expect(varEnd, "")
			p.emit("{{l_out(", p.mark(t.at), ",", e.src, ")}}")
		case blockBegin:
			s := p.expect(name, "")
			if slices.Contains(ends, s.text) {
				return s
			}
			p.statement(s)
		case end:
			if len(ends) > 0 {
				p.fail(begin, "the template ends, and %q is missing for the statement before", ends[len(ends)-1])
			}
			return t
		}
	}
}

func (p *parser) statement(t token) {
	switch t.text {
	case "if":
		p.condition()
	case "for":
		p.loop(t)
	case "set":
		p.assignment(t)
	case "macro":
		p.macro()
	case "call":
		p.callBlock(t)
	case "filter":
		p.filterBlock(t)
	case "generation": // marks the assistant's tokens for training
		p.expect(blockEnd, "")
		p.scoped(frame{}, func() { p.body("endgeneration") })
		p.expect(blockEnd, "")
	case "break", "continue":
		for i := len(p.frames) - 1; ; i-- {
			if i < 0 || !p.frames[i].loop && !p.frames[i].plain {
				p.fail(t.at, "%q is not in a loop", t.text)
			}
			if p.frames[i].loop {
				break
			}
		}
		p.expect(blockEnd, "")
		p.emit("{% ", t.text, " %}")
	default:
		p.fail(t.at, "statement %s is not supported", quote(t.text))
	}
}

func (p *parser) condition() {
	word := "if"
	p.soft++
	for {
		e := p.tuple(false, false)
		p.expect(blockEnd, "")
		p.emit("{% ", word, " ", e.src, " %}")
		t := p.body("elif", "else", "endif")
		word = "elif"
		if t.text == "else" {
			p.expect(blockEnd, "")
			p.emit("{% else %}")
			t = p.body("endif")
		}
		if t.text == "endif" {
			break
		}
	}
	p.soft--
	p.expect(blockEnd, "")
	p.emit("{% endif %}")
}

// inside returns the translated content of a scope and the names that the content assigns.
func (p *parser) inside(f frame, content func()) (string, []string) {
	out := p.out
	p.out = &strings.Builder{}
	p.frames = append(p.frames, f)
	content()
	src := p.out.String()
	f = p.frames[len(p.frames)-1]
	p.frames = p.frames[:len(p.frames)-1]
	p.out = out
	return src, f.names
}

// scoped translates content with a scope of its own. After the content, assigned names have their former values again.
func (p *parser) scoped(f frame, content func()) {
	src, names := p.inside(f, content)
	saved := make([]string, len(names))
	for i, n := range names {
		saved[i] = p.temp()
		p.set(saved[i], variable(n))
	}
	p.emit(src)
	for i, n := range names {
		p.set(variable(n), saved[i])
	}
}

// loop translates a loop. As in Jinja, each iteration begins with the values of variables before the loop.
func (p *parser) loop(t token) {
	var targets []token
	parens := p.skip(operator, "(")
	for len(targets) == 0 || p.skip(operator, ",") {
		if len(targets) > 0 && (p.is(name, "in") || p.op(")")) {
			break
		}
		targets = append(targets, p.expect(name, ""))
	}
	tuple := len(targets) > 1 || p.tokens[p.pos-1].text == ","
	if parens {
		p.expect(operator, ")")
	}
	p.expect(name, "in")
	iter := "l_iter(" + p.mark(t.at) + "," + p.tuple(false, true).src + ")"
	var names []string
	for _, t := range targets {
		if t.text == "loop" || t.text == "caller" {
			p.fail(t.at, "%q can't be assigned", t.text)
		}
		names = append(names, t.text)
	}
	item := variable(names[0])
	unpack := func() {}
	if tuple {
		item = p.temp()
		unpack = func() {
			values := p.temp()
			p.set(values, "l_unpack("+p.mark(t.at)+","+strconv.Itoa(len(names))+","+item+")")
			for i, n := range names {
				p.set(variable(n), values+"["+strconv.Itoa(i)+"]")
			}
		}
	}
	if p.skip(name, "if") {
		test := p.conditional(true)
		list := p.temp()
		p.set(list, "l_list("+p.mark(t.at)+")")
		p.emit("{% for ", item, " in ", iter, " %}")
		unpack()
		p.emit("{% if ", test.src, " %}{{l_push(", p.mark(t.at), ",", list, ",", item, ")}}{% endif %}{% endfor %}")
		iter = list
	}
	if p.is(name, "recursive") {
		p.fail(p.peek().at, "recursive loops are not supported")
	}
	p.expect(blockEnd, "")
	var stop token
	body, assigned := p.inside(frame{loop: true}, func() { stop = p.body("else", "endfor") })
	var reset strings.Builder
	for _, n := range assigned {
		if !slices.Contains(names, n) {
			saved := p.temp()
			p.set(saved, variable(n))
			reset.WriteString("{% set " + variable(n) + " = " + saved + " %}\n")
		}
	}
	p.emit("{% for ", item, " in ", iter, " %}{{l_tick(", p.mark(t.at), ")}}")
	unpack()
	p.emit(reset.String(), body)
	if stop.text == "else" {
		p.expect(blockEnd, "")
		p.emit("{% else %}")
		p.scoped(frame{plain: true}, func() { p.body("endfor") })
	}
	p.expect(blockEnd, "")
	p.emit("{% endfor %}")
}

func (p *parser) assignment(t token) {
	var targets []token
	var attr string
	parens := p.skip(operator, "(")
	for len(targets) == 0 || p.skip(operator, ",") {
		if len(targets) > 0 && (p.op("=") || p.op(")")) {
			break
		}
		targets = append(targets, p.expect(name, ""))
		if len(targets) == 1 && p.skip(operator, ".") {
			attr = p.expect(name, "").text
			break
		}
	}
	tuple := p.tokens[p.pos-1].text == "," || len(targets) > 1
	if parens {
		p.expect(operator, ")")
	}
	store := func(value string) {
		if attr != "" {
			ns := variable(targets[0].text)
			p.emit("{% set ", ns, ".", attr, " = l_store(", p.mark(targets[0].at), ",", ns, ",", value, ") %}")
			return
		}
		p.set(p.assign(targets[0]), value)
	}
	if p.skip(operator, "=") {
		e := p.tuple(true, false)
		p.expect(blockEnd, "")
		if !tuple {
			store(e.src)
			return
		}
		values := p.temp()
		p.set(values, "l_unpack("+p.mark(t.at)+","+strconv.Itoa(len(targets))+","+e.src+")")
		for i, t := range targets {
			p.set(p.assign(t), values+"["+strconv.Itoa(i)+"]")
		}
		return
	}
	if tuple {
		p.unexpected(p.peek(), `"="`)
	}
	value := p.temp()
	e := p.filters(expression{src: value}, "|")
	p.expect(blockEnd, "")
	p.captured(value, "endset")
	store(e.src)
}

// captured translates statements and assigns their output to the name value.
func (p *parser) captured(value, last string) {
	p.scoped(frame{}, func() {
		p.emit("{{l_enter()}}{% set ", value, " %}")
		p.body(last)
		p.emit("{% endset %}{{l_leave()}}")
	})
	p.expect(blockEnd, "")
}

func (p *parser) filterBlock(t token) {
	value := p.temp()
	e := p.filters(expression{src: value}, "")
	p.expect(blockEnd, "")
	p.captured(value, "endfilter")
	p.emit("{{l_out(", p.mark(t.at), ",", e.src, ")}}")
}

// macro translates a macro to a macro with one parameter. The parameter is a list of two items: a list of the positional
// arguments, and a dictionary of the named arguments.
func (p *parser) macro() {
	t := p.expect(name, "")
	own := p.assign(t)
	p.expect(operator, "(")
	params, defaults := p.parameters()
	p.expect(blockEnd, "")
	p.function(t, own, params, defaults, "endmacro")
}

// parameters reads the parameters of a macro or a caller after the opening parenthesis. "" in defaults means no default.
func (p *parser) parameters() (params []token, defaults []string) {
	for !p.op(")") {
		if len(params) > 0 {
			p.expect(operator, ",")
			if p.op(")") {
				break
			}
		}
		param := p.expect(name, "")
		params = append(params, param)
		defaults = append(defaults, "")
		if p.skip(operator, "=") {
			p.soft++
			defaults[len(params)-1] = p.conditional(true).src
			p.soft--
		} else if len(params) > 1 && defaults[len(params)-2] != "" {
			p.fail(param.at, "parameter %q without a default is behind one with a default", param.text)
		}
	}
	p.next()
	return params, defaults
}

// function translates the body of a macro or a caller up to the statement last. own is the name of the translated macro.
func (p *parser) function(t token, own string, params []token, defaults []string, last string) {
	src, _ := p.inside(frame{}, func() {
		p.emit("{{l_params(", p.mark(t.at), ",", literal(t.text), ",t_args")
		for _, param := range params {
			p.emit(",", literal(param.text))
		}
		p.emit(")}}")
		for i, param := range params {
			arg := strconv.Itoa(i) + "," + literal(param.text) + ",t_args)"
			if defaults[i] == "" {
				p.set(p.assign(param), "l_arg("+arg)
			} else {
				p.set(p.assign(param), "(l_arg("+arg+" if l_given("+arg+" else "+defaults[i]+")")
			}
		}
		soft := p.soft
		p.soft = 0
		p.body(last)
		p.soft = soft
	})
	p.expect(blockEnd, "")
	p.emit("{% macro ", own, "(t_args) %}", src, "{% endmacro %}")
	p.set(own, "l_macro("+literal(t.text)+","+own+")")
}

// callBlock translates the statement call. The body becomes a macro, and the called macro can call the body by the name caller.
func (p *parser) callBlock(t token) {
	var params []token
	var defaults []string
	if p.skip(operator, "(") {
		params, defaults = p.parameters()
	}
	e := p.conditional(true)
	if !e.call {
		p.fail(t.at, "the statement call needs a call of a macro")
	}
	p.expect(blockEnd, "")
	own := p.temp()
	p.function(token{kind: name, text: "caller", at: t.at}, own, params, defaults, "endcall")
	p.emit("{{l_block", strings.TrimSuffix(strings.TrimPrefix(e.src, "l_call"), ")"), ",caller=", own, ")}}")
}
