package template

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// method returns the result of v.name(...).
func (r *run) method(v Value, name string, args arguments) (Value, error) {
	switch {
	case r.isSafe(v):
		return r.safeMethod(v, name, args)
	case v.IsUndefined():
		return Value{}, fmt.Errorf("method %s of an undefined value", quote(name))
	case v.IsString():
		if m, ok := stringMethods[name]; ok {
			args.list, args.named = r.plains(args.list), r.plains(args.named)
			a, err := args.need(m.need, name, m.params...)
			if err != nil {
				return Value{}, err
			}
			if err := r.step(1 + len(v.AsString())>>10); err != nil {
				return Value{}, err
			}
			return m.do(r, v.AsString(), a)
		}
		if name == "format" {
			return r.format(v.AsString(), args)
		}
		if name == "join" {
			a, err := args.need(1, name, "iterable")
			if err != nil {
				return Value{}, err
			}
			items, err := r.iterate(a[0])
			if err != nil {
				return Value{}, err
			}
			texts := make([]string, len(items))
			for i, item := range items {
				item = r.plain(item)
				if !item.IsString() {
					return Value{}, fmt.Errorf("join of %s: want texts", kindOf(item))
				}
				texts[i] = item.AsString()
			}
			return r.join(v.AsString(), texts...)
		}
	case v.IsDict() && !r.spaces[v.AsDict()] && r.hasMethod(v, name):
		return r.dictMethod(v.AsDict(), name, args)
	case v.IsDict():
		if f, ok := v.AsDict().Get(name); ok {
			return r.call(f, args, nil)
		}
	case v.IsList() && r.hasMethod(v, name):
		a, err := args.need(1, name, "value")
		if err != nil {
			return Value{}, err
		}
		n := 0
		for i, item := range v.AsList().Items {
			same, err := r.equal(item, a[0], 0)
			if err != nil {
				return Value{}, err
			}
			if same {
				if name == "index" {
					return jinja.NewInt(int64(i)), nil
				}
				n++
			}
		}
		if name == "index" {
			return Value{}, errors.New("index of a value that is not in the list")
		}
		return jinja.NewInt(int64(n)), nil
	}
	return Value{}, fmt.Errorf("method %s of %s is not supported", quote(name), kindOf(v))
}

// hasMethod reports whether this package supports a method of a value. As in Jinja's sandbox, methods that modify lists and
// dictionaries are not supported.
func (r *run) hasMethod(v Value, name string) bool {
	switch {
	case v.IsString():
		_, ok := stringMethods[name]
		return ok || name == "format" || name == "join"
	case v.IsDict() && !r.spaces[v.AsDict()]:
		switch name {
		case "get", "items", "keys", "values", "copy":
			return true
		}
	case v.IsList():
		return name == "index" || name == "count"
	}
	return false
}

func (r *run) dictMethod(d *jinja.Dict, name string, args arguments) (Value, error) {
	if name == "get" {
		a, err := args.need(1, name, "key", "default")
		if err != nil {
			return Value{}, err
		}
		if k, err := keyOf(r.plain(a[0])); err != nil {
			return Value{}, err
		} else if v, ok := d.Get(k); ok {
			return v, nil
		}
		if len(args.list) < 2 && len(args.names) == 0 {
			return jinja.None(), nil
		}
		return a[1], nil
	}
	if _, err := args.bind(name); err != nil {
		return Value{}, err
	}
	if name == "copy" {
		c := jinja.NewDict()
		for _, k := range d.Keys {
			c.AsDict().Set(k, d.Data[k])
		}
		return c, r.make(d.Len() * itemBytes)
	}
	items := make([]Value, 0, d.Len())
	for _, k := range d.Keys {
		switch name {
		case "keys":
			items = append(items, keyValue(k))
		case "values":
			items = append(items, d.Data[k])
		case "items":
			pair, err := r.tuple([]Value{keyValue(k), d.Data[k]})
			if err != nil {
				return Value{}, err
			}
			items = append(items, pair)
		}
	}
	return r.list(items)
}

// A stringMethod is a method of texts. The first need parameters are required.
type stringMethod struct {
	need   int
	params []string
	do     func(r *run, s string, args []Value) (Value, error)
}

func simple(f func(string) string) stringMethod {
	return stringMethod{do: func(r *run, s string, _ []Value) (Value, error) { return r.text(f(s)) }}
}

func stripping(left, right bool) stringMethod {
	return stringMethod{params: []string{"chars"}, do: func(r *run, s string, args []Value) (Value, error) {
		drop := isSpace
		if !args[0].IsNone() && !args[0].IsUndefined() {
			if !args[0].IsString() {
				return Value{}, fmt.Errorf("the characters are %s", kindOf(args[0]))
			}
			chars := map[rune]bool{}
			for _, c := range args[0].AsString() {
				chars[c] = true
			}
			drop = func(c rune) bool { return chars[c] }
		}
		if left {
			s = strings.TrimLeftFunc(s, drop)
		}
		if right {
			s = strings.TrimRightFunc(s, drop)
		}
		return r.text(s)
	}}
}

// every returns a method that reports whether a text is not empty and f is true for all characters.
func every(f func(rune) bool) stringMethod {
	return stringMethod{do: func(r *run, s string, _ []Value) (Value, error) {
		return jinja.NewBool(s != "" && strings.IndexFunc(s, func(c rune) bool { return !f(c) }) < 0), nil
	}}
}

func affix(f func(s, affix string) bool) stringMethod {
	return stringMethod{need: 1, params: []string{"affix"}, do: func(r *run, s string, args []Value) (Value, error) {
		list := args[:1]
		if args[0].IsList() && r.tuples[args[0].AsList()] {
			list = args[0].AsList().Items
		}
		for _, a := range list {
			if !a.IsString() {
				return Value{}, fmt.Errorf("the affix is %s", kindOf(a))
			}
			if f(s, a.AsString()) {
				return jinja.NewBool(true), nil
			}
		}
		return jinja.NewBool(false), nil
	}}
}

// withText returns a method with one text argument.
func withText(f func(r *run, s, t string) (Value, error)) stringMethod {
	return stringMethod{need: 1, params: []string{"text"}, do: func(r *run, s string, args []Value) (Value, error) {
		if !args[0].IsString() {
			return Value{}, fmt.Errorf("the argument is %s, want a text", kindOf(args[0]))
		}
		return f(r, s, args[0].AsString())
	}}
}

// position returns the number of characters before byte i of s. If i is negative, position returns -1.
func position(s string, i int) Value {
	if i < 0 {
		return jinja.NewInt(-1)
	}
	return jinja.NewInt(int64(len([]rune(s[:i]))))
}

func padding(left, right bool) stringMethod {
	return stringMethod{need: 1, params: []string{"width", "fill"}, do: func(r *run, s string, args []Value) (Value, error) {
		n, ok := whole(args[0])
		fill := " "
		if args[1].IsString() {
			fill = args[1].AsString()
		}
		if !ok || len([]rune(fill)) != 1 || !args[1].IsString() && !args[1].IsUndefined() {
			return Value{}, fmt.Errorf("padding of %s with %s", kindOf(args[0]), quote(fill))
		}
		n -= int64(len([]rune(s)))
		if n <= 0 {
			return jinja.NewString(s), nil
		}
		if n > int64(r.limits.Output) {
			return Value{}, r.make(r.limits.Output + 1)
		}
		before := int(n)
		if left && right {
			before = int(n/2 + n&(n+int64(len([]rune(s))))&1)
		} else if !left {
			before = 0
		}
		return r.text(strings.Repeat(fill, before) + s + strings.Repeat(fill, int(n)-before))
	}}
}

var stringMethods = map[string]stringMethod{
	"strip":      stripping(true, true),
	"lstrip":     stripping(true, false),
	"rstrip":     stripping(false, true),
	"upper":      simple(upper),
	"lower":      simple(lower),
	"title":      simple(title),
	"capitalize": simple(capitalize),
	"swapcase":   simple(swapcase),
	"isascii": {do: func(r *run, s string, _ []Value) (Value, error) {
		return jinja.NewBool(strings.IndexFunc(s, func(c rune) bool { return c >= utf8.RuneSelf }) < 0), nil
	}},
	"isdecimal":  every(unicode.IsDigit),
	"isdigit":    every(unicode.IsDigit),
	"isnumeric":  every(unicode.IsNumber),
	"isalpha":    every(unicode.IsLetter),
	"isalnum":    every(func(c rune) bool { return unicode.IsLetter(c) || unicode.IsNumber(c) }),
	"isspace":    every(isSpace),
	"isupper":    {do: func(r *run, s string, _ []Value) (Value, error) { return jinja.NewBool(isUpper(s)), nil }},
	"islower":    {do: func(r *run, s string, _ []Value) (Value, error) { return jinja.NewBool(isLower(s)), nil }},
	"startswith": affix(strings.HasPrefix),
	"endswith":   affix(strings.HasSuffix),
	"find":       withText(func(r *run, s, t string) (Value, error) { return position(s, strings.Index(s, t)), nil }),
	"rfind":      withText(func(r *run, s, t string) (Value, error) { return position(s, strings.LastIndex(s, t)), nil }),
	"index": withText(func(r *run, s, t string) (Value, error) {
		i := strings.Index(s, t)
		if i < 0 {
			return Value{}, errors.New("index of a text that is not there")
		}
		return position(s, i), nil
	}),
	"count":        withText(func(r *run, s, t string) (Value, error) { return jinja.NewInt(int64(strings.Count(s, t))), nil }),
	"removeprefix": withText(func(r *run, s, t string) (Value, error) { return r.text(strings.TrimPrefix(s, t)) }),
	"removesuffix": withText(func(r *run, s, t string) (Value, error) { return r.text(strings.TrimSuffix(s, t)) }),
	"partition": withText(func(r *run, s, t string) (Value, error) {
		i := strings.Index(s, t)
		if i < 0 {
			return r.tuple([]Value{jinja.NewString(s), empty, empty})
		}
		return r.tuple([]Value{jinja.NewString(s[:i]), jinja.NewString(t), jinja.NewString(s[i+len(t):])})
	}),
	"rpartition": withText(func(r *run, s, t string) (Value, error) {
		i := strings.LastIndex(s, t)
		if i < 0 {
			return r.tuple([]Value{empty, empty, jinja.NewString(s)})
		}
		return r.tuple([]Value{jinja.NewString(s[:i]), jinja.NewString(t), jinja.NewString(s[i+len(t):])})
	}),
	"ljust":  padding(false, true),
	"rjust":  padding(true, false),
	"center": padding(true, true),
	"zfill": {need: 1, params: []string{"width"}, do: func(r *run, s string, args []Value) (Value, error) {
		sign := ""
		if s != "" && (s[0] == '+' || s[0] == '-') {
			sign, s = s[:1], s[1:]
		}
		n, ok := whole(args[0])
		if !ok {
			return Value{}, fmt.Errorf("zfill by %s", kindOf(args[0]))
		}
		v, err := padding(true, false).do(r, s, []Value{jinja.NewInt(max(n, 0) - int64(len(sign))), jinja.NewString("0")})
		if err != nil {
			return Value{}, err
		}
		return r.text(sign + v.AsString())
	}},
	"split":  {params: []string{"sep", "maxsplit"}, do: func(r *run, s string, a []Value) (Value, error) { return r.split(s, a, false) }},
	"rsplit": {params: []string{"sep", "maxsplit"}, do: func(r *run, s string, a []Value) (Value, error) { return r.split(s, a, true) }},
	"splitlines": {params: []string{"keepends"}, do: func(r *run, s string, a []Value) (Value, error) {
		var lines []Value
		if err := r.make(strings.Count(s, "\n") * itemBytes); err != nil {
			return Value{}, err
		}
		for _, l := range splitLines(s, truth(a[0])) {
			lines = append(lines, jinja.NewString(l))
		}
		return r.list(lines)
	}},
	"replace": {need: 2, params: []string{"old", "new", "count"}, do: func(r *run, s string, a []Value) (Value, error) {
		if !a[0].IsString() || !a[1].IsString() {
			return Value{}, fmt.Errorf("replace of %s by %s: want texts", kindOf(a[0]), kindOf(a[1]))
		}
		return r.replace(s, a[0].AsString(), a[1].AsString(), a[2])
	}},
}

// replace replaces the first count matches. If count is absent or negative, replace replaces all matches.
func (r *run) replace(s, old, new string, count Value) (Value, error) {
	n := int64(-1)
	if !count.IsUndefined() && !count.IsNone() {
		var ok bool
		if n, ok = whole(count); !ok {
			return Value{}, fmt.Errorf("replace: the number is %s", kindOf(count))
		}
	}
	m := int64(strings.Count(s, old))
	if n < 0 || n > m {
		n = m
	}
	if n > 0 && int64(len(new)) > int64(r.limits.Output)/n {
		return Value{}, r.make(r.limits.Output + 1)
	}
	if err := r.make(len(s) + int(n)*len(new)); err != nil {
		return Value{}, err
	}
	return jinja.NewString(strings.Replace(s, old, new, int(n))), nil
}

func splitLines(s string, keep bool) []string {
	var lines []string
	for s != "" {
		n, m := len(s), len(s)
		for i, c := range s {
			if strings.ContainsRune("\n\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029", c) {
				n, m = i, i+len(string(c))
				if strings.HasPrefix(s[i:], "\r\n") {
					m++
				}
				break
			}
		}
		if keep {
			n = m
		}
		lines = append(lines, s[:n])
		s = s[m:]
	}
	return lines
}

// split implements Python's str.split. If right is set, split implements str.rsplit.
func (r *run) split(s string, args []Value, right bool) (Value, error) {
	n := int64(-1)
	if !args[1].IsUndefined() {
		var ok bool
		if n, ok = whole(args[1]); !ok {
			return Value{}, fmt.Errorf("split: the number is %s", kindOf(args[1]))
		}
	}
	var parts []string
	separators := 0
	if args[0].IsString() {
		separators = strings.Count(s, args[0].AsString())
	} else {
		for _, c := range s {
			if isSpace(c) {
				separators++
			}
		}
	}
	if err := r.make((separators + 1) * itemBytes); err != nil {
		return Value{}, err
	}
	switch {
	case args[0].IsUndefined() || args[0].IsNone():
		if n < 0 {
			parts = strings.FieldsFunc(s, isSpace)
			break
		}
		// The remaining part keeps the white space at its far end.
		if right {
			s = strings.TrimRightFunc(s, isSpace)
			for ; n > 0 && s != ""; n-- {
				i := strings.LastIndexFunc(s, isSpace)
				if i < 0 {
					break
				}
				_, n := utf8.DecodeRuneInString(s[i:])
				parts = append(parts, s[i+n:])
				s = strings.TrimRightFunc(s[:i], isSpace)
			}
			if s != "" {
				parts = append(parts, s)
			}
			slices.Reverse(parts)
			break
		}
		s = strings.TrimLeftFunc(s, isSpace)
		for ; n > 0 && s != ""; n-- {
			i := strings.IndexFunc(s, isSpace)
			if i < 0 {
				break
			}
			parts = append(parts, s[:i])
			s = strings.TrimLeftFunc(s[i:], isSpace)
		}
		if s != "" {
			parts = append(parts, s)
		}
	case !args[0].IsString() || args[0].AsString() == "":
		return Value{}, fmt.Errorf("split: the separator is %s, want a text that is not empty", kindOf(args[0]))
	default:
		sep := args[0].AsString()
		parts = strings.Split(s, sep)
		if n >= 0 && int64(len(parts)) > n+1 {
			m := int(n)
			if right {
				m = len(parts) - m
				parts = append([]string{strings.Join(parts[:m], sep)}, parts[m:]...)
			} else {
				parts = append(parts[:m:m], strings.Join(parts[m:], sep))
			}
		}
	}
	items := make([]Value, len(parts))
	for i, s := range parts {
		items[i] = jinja.NewString(s)
	}
	return r.list(items)
}

// format implements Python's str.format for fields without a format specification.
func (r *run) format(s string, args arguments) (Value, error) {
	var b strings.Builder
	next := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c != '{' && c != '}' {
			b.WriteByte(c)
			continue
		}
		if i+1 < len(s) && s[i+1] == c {
			b.WriteByte(c)
			i++
			continue
		}
		n := strings.IndexByte(s[i:], '}')
		if c == '}' || n < 0 {
			return Value{}, fmt.Errorf("format %s: a bracket alone", quote(s))
		}
		field := s[i+1 : i+n]
		i += n
		var v Value
		found := false
		if field == "" {
			field = strconv.Itoa(next)
			next++
		}
		if k, err := strconv.Atoi(field); err == nil && k >= 0 && k < len(args.list) {
			v, found = args.list[k], true
		}
		for k, name := range args.names {
			if name == field {
				v, found = args.named[k], true
			}
		}
		if !found {
			return Value{}, fmt.Errorf("format %s: field %s is not supported, or has no argument", quote(s), quote(field))
		}
		t, err := r.string(v)
		if err == nil {
			err = r.make(len(t))
		}
		if err != nil {
			return Value{}, err
		}
		b.WriteString(t)
	}
	return r.text(b.String())
}
