package template

import (
	"slices"
	"strconv"
	"strings"
)

// apply returns a call of a function of this package. at is the place of the call in the template.
func (p *parser) apply(function string, at mark, args ...expression) expression {
	depth := 0
	var b strings.Builder
	b.WriteString(function + "(" + p.mark(at))
	for _, a := range args {
		b.WriteString("," + a.src)
		depth = max(depth, a.depth)
	}
	b.WriteString(")")
	return p.deeper(expression{src: b.String(), depth: depth}, at)
}

func (p *parser) deeper(e expression, at mark) expression {
	if e.depth++; e.depth > maxChain {
		p.fail(at, "an expression of more than %d operators", maxChain)
	}
	return e
}

func constant(s string) expression { return expression{src: literal(s)} }

// tuple translates an expression, or several expressions separated by commas.
func (p *parser) tuple(conditional, recursive bool) expression {
	at := p.peek().at
	var items []expression
	for {
		if t := p.peek(); len(items) > 0 && (t.kind == varEnd || t.kind == blockEnd || p.op(")") || recursive && p.is(name, "recursive")) {
			break
		}
		items = append(items, p.conditional(conditional))
		if !p.skip(operator, ",") {
			if len(items) == 1 {
				return items[0]
			}
			break
		}
	}
	return p.apply("l_tuple", at, items...)
}

// conditional translates an expression. allowed permits the form "a if b else c".
func (p *parser) conditional(allowed bool) expression {
	p.nest++
	if p.nest > 2*maxNest {
		p.fail(p.peek().at, "more than %d expressions inside each other", maxNest)
	}
	defer func() { p.nest-- }()
	e := p.or()
	for allowed && p.is(name, "if") {
		at := p.next().at
		p.soft++
		test := p.or()
		src, depth := "("+e.src+" if "+test.src, max(e.depth, test.depth)
		if p.skip(name, "else") {
			other := p.conditional(true)
			src, depth = src+" else "+other.src, max(depth, other.depth)
		}
		p.soft--
		e = p.deeper(expression{src: src + ")", depth: depth}, at)
	}
	return e
}

func (p *parser) or() expression {
	e := p.and()
	for p.is(name, "or") {
		at := p.next().at
		r := p.and()
		e = p.deeper(expression{src: "(" + e.src + " or " + r.src + ")", depth: max(e.depth, r.depth)}, at)
	}
	return e
}

func (p *parser) and() expression {
	e := p.not()
	for p.is(name, "and") {
		at := p.next().at
		r := p.not()
		e = p.deeper(expression{src: "(" + e.src + " and " + r.src + ")", depth: max(e.depth, r.depth)}, at)
	}
	return e
}

func (p *parser) not() expression {
	n := 0
	at := p.peek().at
	for p.skip(name, "not") {
		n++
	}
	if n > maxNest {
		p.fail(at, "more than %d expressions inside each other", maxNest)
	}
	e := p.compare()
	for range n {
		e = p.deeper(expression{src: "(not " + e.src + ")", depth: e.depth}, at)
	}
	return e
}

func (p *parser) compare() expression {
	e := p.sum()
	var all []expression
	for left := e; ; {
		t := p.peek()
		op := t.text
		switch {
		case t.kind == operator && slices.Contains([]string{"==", "!=", "<", "<=", ">", ">="}, op), t.kind == name && op == "in":
			p.pos++
		case t.kind == name && op == "not" && p.tokens[p.pos+1].kind == name && p.tokens[p.pos+1].text == "in":
			op = "not in"
			p.pos += 2
		default:
			if len(all) == 0 {
				return e
			}
			e = all[0]
			for _, r := range all[1:] {
				e = p.deeper(expression{src: "(" + e.src + " and " + r.src + ")", depth: max(e.depth, r.depth)}, t.at)
			}
			return e
		}
		right := p.sum()
		all = append(all, p.apply("l_op", t.at, constant(op), left, right))
		left = right
	}
}

// binary translates left-associative operators of one precedence.
func (p *parser) binary(operand func() expression, ops ...string) expression {
	e := operand()
	for p.peek().kind == operator && slices.Contains(ops, p.peek().text) {
		t := p.next()
		e = p.apply("l_op", t.at, constant(t.text), e, operand())
	}
	return e
}

func (p *parser) sum() expression { return p.binary(p.concat, "+", "-") }

func (p *parser) concat() expression { return p.binary(p.product, "~") }

func (p *parser) product() expression { return p.binary(p.power, "*", "/", "//", "%") }

func (p *parser) power() expression {
	return p.binary(func() expression { return p.unary(true) }, "**")
}

func (p *parser) unary(filters bool) expression {
	var e expression
	if t := p.peek(); t.kind == operator && (t.text == "-" || t.text == "+") {
		p.nest++
		if p.nest > 2*maxNest {
			p.fail(t.at, "more than %d expressions inside each other", maxNest)
		}
		p.pos++
		e = p.apply("l_op", t.at, constant(t.text+"x"), p.unary(false))
		p.nest--
	} else {
		e = p.primary()
	}
	e = p.postfix(e)
	if filters {
		e = p.filters(e, "|")
	}
	return e
}

func (p *parser) primary() expression {
	t := p.next()
	switch t.kind {
	case name:
		switch t.text {
		case "true", "True":
			return expression{src: "true"}
		case "false", "False":
			return expression{src: "false"}
		case "none", "None":
			return expression{src: "none"}
		}
		return expression{src: variable(t.text), name: t.text}
	case str:
		var s strings.Builder
		s.WriteString(t.text)
		for p.peek().kind == str {
			s.WriteString(p.next().text)
		}
		return constant(s.String())
	case integer:
		return expression{src: t.text}
	case float:
		return p.apply("l_float", t.at, constant(t.text))
	case operator:
		switch t.text {
		case "(":
			if p.skip(operator, ")") {
				return p.apply("l_tuple", t.at)
			}
			e := p.tuple(true, false)
			p.expect(operator, ")")
			e.call, e.name, e.attr = false, "", ""
			return e
		case "[":
			var items []expression
			for !p.op("]") {
				if len(items) > 0 {
					p.expect(operator, ",")
					if p.op("]") {
						break
					}
				}
				items = append(items, p.conditional(true))
			}
			p.next()
			return p.apply("l_list", t.at, items...)
		case "{":
			var items []expression
			for !p.op("}") {
				if len(items) > 0 {
					p.expect(operator, ",")
					if p.op("}") {
						break
					}
				}
				items = append(items, p.conditional(true))
				p.expect(operator, ":")
				items = append(items, p.conditional(true))
			}
			p.next()
			return p.apply("l_dict", t.at, items...)
		}
	}
	p.unexpected(t, "an expression")
	return expression{}
}

// attributes lists the attributes of loop in Jinja that the library does not support.
var attributes = []string{"depth", "depth0", "changed"}

func (p *parser) postfix(e expression) expression {
	for {
		t := p.peek()
		switch {
		case p.op("."):
			p.pos++
			a := p.next()
			switch a.kind {
			case name:
				if strings.HasPrefix(a.text, "_") {
					p.fail(a.at, "attribute %s is not accessible", quote(a.text))
				}
				if e.name == "loop" && slices.Contains(attributes, a.text) {
					p.fail(a.at, "loop.%s is not supported", a.text)
				}
				object := e
				e = p.apply("l_attr", a.at, constant(a.text), object)
				e.object, e.attr = object.src, a.text
			case integer:
				e = p.apply("l_item", a.at, e, expression{src: a.text})
			default:
				p.unexpected(a, "a name")
			}
		case p.op("["):
			p.pos++
			e = p.subscript(e, t.at)
		case p.op("("):
			e = p.call(e)
		default:
			return e
		}
	}
}

func (p *parser) subscript(e expression, at mark) expression {
	none := expression{src: "none"}
	part := func() expression {
		if p.op(":") || p.op("]") {
			return none
		}
		return p.conditional(true)
	}
	if p.op("]") {
		p.unexpected(p.peek(), "an expression")
	}
	first := part()
	if p.skip(operator, "]") {
		return p.apply("l_item", at, e, first)
	}
	p.expect(operator, ":")
	second, third := part(), none
	if p.skip(operator, ":") {
		third = part()
	}
	p.expect(operator, "]")
	return p.apply("l_slice", at, e, first, second, third)
}

// arguments translates the arguments of a call to a list: the number of positional arguments, the positional arguments, and the
// names and values of the named arguments.
func (p *parser) arguments() []expression {
	p.expect(operator, "(")
	var args, named []expression
	var names []string
	for n := 0; !p.op(")"); n++ {
		if n > 0 {
			p.expect(operator, ",")
			if p.op(")") {
				break
			}
		}
		t := p.peek()
		switch {
		case p.op("*") || p.op("**"):
			p.fail(t.at, "arguments in a list or a dictionary (%s) are not supported", t.text)
		case t.kind == name && p.tokens[p.pos+1].kind == operator && p.tokens[p.pos+1].text == "=":
			p.pos += 2
			if slices.Contains(names, t.text) {
				p.fail(t.at, "argument %s is given twice", quote(t.text))
			}
			names = append(names, t.text)
			named = append(named, constant(t.text), p.conditional(true))
		case len(named) > 0:
			p.fail(t.at, "an argument without a name is behind one with a name")
		default:
			args = append(args, p.conditional(true))
		}
	}
	p.next()
	return slices.Concat([]expression{{src: strconv.Itoa(len(args))}}, args, named)
}

func (p *parser) call(e expression) expression {
	at := p.peek().at
	args := p.arguments()
	if e.attr != "" {
		e = p.apply("l_method", at, append([]expression{constant(e.attr), {src: e.object, depth: e.depth}}, args...)...)
		return e
	}
	e = p.apply("l_call", at, append([]expression{e}, args...)...)
	e.call = true
	return e
}

// filters translates the filters and tests after an expression. If first is "", the first filter has no "|".
func (p *parser) filters(e expression, first string) expression {
	for n := 0; ; n++ {
		switch t := p.peek(); {
		case first == "" && n == 0, p.op("|"):
			if first != "" || n > 0 {
				p.pos++
			}
			t = p.next()
			if t.kind != name {
				p.unexpected(t, "the name of a filter")
			}
			f := p.dotted(t)
			if _, ok := filters[f]; !ok && p.soft == 0 {
				p.fail(t.at, "filter %s is not supported", quote(f))
			}
			args := []expression{{src: "0"}}
			if p.op("(") {
				args = p.arguments()
			}
			e = p.apply("l_filter", t.at, append([]expression{constant(f), e}, args...)...)
		case p.is(name, "is"):
			e = p.test(e)
		case p.op("(") && n > 0:
			e = p.call(e)
		default:
			return e
		}
	}
}

func (p *parser) dotted(t token) string {
	s := t.text
	for p.skip(operator, ".") {
		s += "." + p.expect(name, "").text
	}
	return s
}

func (p *parser) test(e expression) expression {
	p.pos++
	negated := p.skip(name, "not")
	t := p.expect(name, "")
	f := p.dotted(t)
	if _, ok := tests[f]; !ok && p.soft == 0 {
		p.fail(t.at, "test %s is not supported", quote(f))
	}
	args := []expression{{src: "0"}}
	switch n := p.peek(); {
	case p.op("("):
		args = p.arguments()
	case p.is(name, "else"), p.is(name, "or"), p.is(name, "and"):
	case p.is(name, "is"):
		p.fail(n.at, "a test behind a test")
	case n.kind == name, n.kind == str, n.kind == integer, n.kind == float, p.op("["), p.op("{"):
		args = []expression{{src: "1"}, p.postfix(p.primary())}
	}
	e = p.apply("l_test", t.at, append([]expression{constant(f), e}, args...)...)
	if negated {
		e = p.deeper(expression{src: "(not " + e.src + ")", depth: e.depth}, t.at)
	}
	return e
}
