package template

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/ardanlabs/jinja"
)

// A filterFunc is a filter. params names the parameters after the value. The first need parameters are required.
type filterFunc struct {
	need   int
	params []string
	do     func(r *run, v Value, args []Value) (Value, error)
}

// filters maps a name to a filter. init fills the map, since the filters map and select look up other filters.
var filters map[string]filterFunc

func init() {
	textual := func(f func(string) string) filterFunc {
		return filterFunc{do: func(r *run, v Value, _ []Value) (Value, error) {
			s, err := r.string(v)
			if err != nil {
				return Value{}, err
			}
			if err := r.step(1 + len(s)>>10); err != nil {
				return Value{}, err
			}
			return r.text(f(s))
		}}
	}
	length := filterFunc{do: func(r *run, v Value, _ []Value) (Value, error) { return r.length(v) }}
	escape := filterFunc{do: func(r *run, v Value, _ []Value) (Value, error) {
		s, err := r.string(v)
		if err != nil {
			return Value{}, err
		}
		if err := r.make(6 * len(s)); err != nil {
			return Value{}, err
		}
		return r.newSafe(htmlEscaper.Replace(s))
	}}
	orDefault := filterFunc{params: []string{"default_value", "boolean"}, do: func(r *run, v Value, a []Value) (Value, error) {
		if !v.IsUndefined() && !(truth(a[1]) && !truth(v)) {
			return v, nil
		}
		if a[0].IsUndefined() {
			return empty, nil
		}
		return a[0], nil
	}}
	filters = map[string]filterFunc{
		"abs": {do: func(r *run, v Value, _ []Value) (Value, error) {
			if f, ok := number(v); ok && f < 0 {
				return r.unary("-x", v)
			}
			return r.unary("+x", v)
		}},
		"attr": {need: 1, params: []string{"name"}, do: func(r *run, v Value, a []Value) (Value, error) {
			if v.IsDict() && !r.spaces[v.AsDict()] && a[0].IsString() && !r.hasMethod(v, a[0].AsString()) {
				return jinja.Undefined(), nil
			}
			s, err := r.string(a[0])
			if err != nil {
				return Value{}, err
			}
			return r.attribute(v, s)
		}},
		"batch":      {need: 1, params: []string{"linecount", "fill_with"}, do: (*run).batch},
		"capitalize": textual(capitalize),
		"center": {params: []string{"width"}, do: func(r *run, v Value, a []Value) (Value, error) {
			s, err := r.string(v)
			if err != nil {
				return Value{}, err
			}
			if a[0].IsUndefined() {
				a[0] = jinja.NewInt(80)
			}
			return padding(true, true).do(r, s, []Value{a[0], jinja.Undefined()})
		}},
		"count":    length,
		"d":        orDefault,
		"default":  orDefault,
		"dictsort": {params: []string{"case_sensitive", "by", "reverse"}, do: (*run).dictsort},
		"e":        escape,
		"escape":   escape,
		"first": {do: func(r *run, v Value, _ []Value) (Value, error) {
			items, err := r.iterate(v)
			if err != nil || len(items) == 0 {
				return jinja.Undefined(), err
			}
			return items[0], nil
		}},
		"float":  {params: []string{"default"}, do: (*run).toFloat},
		"indent": {params: []string{"width", "first", "blank"}, do: (*run).indent},
		"int":    {params: []string{"default", "base"}, do: (*run).toInt},
		"items": {do: func(r *run, v Value, _ []Value) (Value, error) {
			if v.IsUndefined() {
				return newGenerator(nil), nil
			}
			if !v.IsDict() || r.spaces[v.AsDict()] {
				return Value{}, fmt.Errorf("items of %s: want a mapping", kindOf(v))
			}
			list, err := r.dictMethod(v.AsDict(), "items", arguments{})
			if err != nil {
				return Value{}, err
			}
			return newGenerator(list.AsList().Items), nil
		}},
		"join": {params: []string{"d", "attribute"}, do: func(r *run, v Value, a []Value) (Value, error) {
			items, err := r.attributes(v, a[1], jinja.Undefined())
			if err != nil {
				return Value{}, err
			}
			separator, err := r.string(a[0])
			if err != nil {
				return Value{}, err
			}
			texts := make([]string, len(items))
			for i, item := range items {
				if texts[i], err = r.string(item); err != nil {
					return Value{}, err
				}
			}
			return r.join(separator, texts...)
		}},
		"last": {do: func(r *run, v Value, _ []Value) (Value, error) {
			if isGenerator(v) {
				return Value{}, errors.New("last of a generator")
			}
			items, err := r.iterate(v)
			if err != nil || len(items) == 0 {
				return jinja.Undefined(), err
			}
			return items[len(items)-1], nil
		}},
		"length": length,
		"list": {do: func(r *run, v Value, _ []Value) (Value, error) {
			items, err := r.iterate(v)
			if err != nil {
				return Value{}, err
			}
			return r.list(slices.Clone(items))
		}},
		"lower": textual(lower),
		"max":   {params: []string{"case_sensitive", "attribute"}, do: extreme(1)},
		"min":   {params: []string{"case_sensitive", "attribute"}, do: extreme(-1)},
		"replace": {need: 2, params: []string{"old", "new", "count"}, do: func(r *run, v Value, a []Value) (Value, error) {
			var texts [3]string
			for i, v := range []Value{v, a[0], a[1]} {
				var err error
				if texts[i], err = r.string(v); err != nil {
					return Value{}, err
				}
			}
			return r.replace(texts[0], texts[1], texts[2], a[2])
		}},
		"reverse": {do: func(r *run, v Value, _ []Value) (Value, error) {
			items, err := r.iterate(v)
			if err != nil {
				return Value{}, err
			}
			items = slices.Clone(items)
			slices.Reverse(items)
			if !v.IsString() {
				return newGenerator(items), r.make(len(items) * itemBytes)
			}
			var b strings.Builder
			for _, c := range items {
				b.WriteString(c.AsString())
			}
			return r.text(b.String())
		}},
		"round": {params: []string{"precision", "method"}, do: (*run).round},
		"safe": {do: func(r *run, v Value, _ []Value) (Value, error) {
			s, err := r.string(v)
			if err != nil {
				return Value{}, err
			}
			return r.newSafe(s)
		}},
		"sort": {params: []string{"reverse", "case_sensitive", "attribute"}, do: (*run).sort},
		"string": {do: func(r *run, v Value, _ []Value) (Value, error) {
			return r.asText(v)
		}},
		"sum":   {params: []string{"attribute", "start"}, do: (*run).sum},
		"title": textual(titleWords),
		"tojson": {params: []string{"ensure_ascii", "indent", "separators", "sort_keys"}, do: func(r *run, v Value, a []Value) (Value, error) {
			return r.toJSON(v, a)
		}},
		"trim": {params: []string{"chars"}, do: func(r *run, v Value, a []Value) (Value, error) {
			s, err := r.string(v)
			if err != nil {
				return Value{}, err
			}
			return stripping(true, true).do(r, s, a)
		}},
		"unique": {params: []string{"case_sensitive", "attribute"}, do: (*run).unique},
		"upper":  textual(upper),
		"wordcount": {do: func(r *run, v Value, _ []Value) (Value, error) {
			s, err := r.string(v)
			words := strings.FieldsFunc(s, func(c rune) bool { return c != '_' && !unicode.IsLetter(c) && !unicode.IsNumber(c) })
			return jinja.NewInt(int64(len(words))), err
		}},
		// Method filter implements the following filters. Their arguments can include the name and the arguments of another
		// filter or test.
		"format": {}, "map": {}, "reject": {}, "rejectattr": {}, "select": {}, "selectattr": {},
	}
}

// filter applies the filter with the given name.
func (r *run) filter(name string, v Value, args arguments) (Value, error) {
	if r.isSafe(v) {
		switch {
		case name == "e" || name == "escape":
			return v, nil
		case name == "d" || name == "default":
		case slices.Contains(safeFilters, name):
			return r.again(r.filter(name, r.plain(v), args))
		default:
			v = r.plain(v)
		}
	}
	switch name {
	case "format":
		s, err := r.string(v)
		if err != nil {
			return Value{}, err
		}
		if len(args.names) > 0 {
			return Value{}, errors.New("format: arguments with names are not supported")
		}
		t, err := r.tuple(args.list)
		if err != nil {
			return Value{}, err
		}
		return r.percent(s, t)
	case "map":
		return r.mapped(v, args)
	case "select", "reject", "selectattr", "rejectattr":
		return r.selected(v, args, name[:6] == "select", strings.HasSuffix(name, "attr"))
	}
	f, ok := filters[name]
	if !ok {
		return Value{}, fmt.Errorf("filter %s is not supported", quote(name))
	}
	args.list, args.named = r.plains(args.list), r.plains(args.named)
	a, err := args.need(f.need, "filter "+name, f.params...)
	if err != nil {
		return Value{}, err
	}
	return f.do(r, v, a)
}

func (r *run) asText(v Value) (Value, error) {
	s, err := r.string(v)
	if err != nil {
		return Value{}, err
	}
	return r.text(s)
}

func (r *run) length(v Value) (Value, error) {
	switch {
	case v.IsUndefined():
		return jinja.NewInt(0), nil
	case v.IsString():
		return jinja.NewInt(int64(len([]rune(v.AsString())))), r.step(len(v.AsString()) >> 10)
	case v.IsList():
		return jinja.NewInt(int64(v.AsList().Len())), nil
	case v.IsDict() && !r.spaces[v.AsDict()]:
		return jinja.NewInt(int64(v.AsDict().Len())), nil
	}
	return Value{}, fmt.Errorf("%s has no length", kindOf(v))
}

// field returns the value at a path of attributes. A path has names and numbers separated by dots.
func (r *run) field(v, path Value) (Value, error) {
	if path.IsInt() {
		return r.item(v, path)
	}
	if !path.IsString() {
		return Value{}, fmt.Errorf("an attribute's name is %s", kindOf(path))
	}
	var err error
	for part := range strings.SplitSeq(path.AsString(), ".") {
		key := jinja.NewString(part)
		if n, e := strconv.ParseInt(part, 10, 64); e == nil && n >= 0 {
			key = jinja.NewInt(n)
		}
		if v, err = r.item(v, key); err != nil {
			return Value{}, err
		}
	}
	return v, nil
}

// attributes returns the items of a value, or the value at a path in each item. absent replaces undefined values.
func (r *run) attributes(v, path, absent Value) ([]Value, error) {
	items, err := r.iterate(v)
	if err != nil || path.IsNone() || path.IsUndefined() {
		return items, err
	}
	out := make([]Value, len(items))
	for i, item := range items {
		if out[i], err = r.field(item, path); err != nil {
			return nil, err
		}
		if out[i].IsUndefined() {
			out[i] = absent
		}
	}
	return out, r.make(len(out) * itemBytes)
}

func (r *run) mapped(v Value, args arguments) (Value, error) {
	if !truth(v) {
		return newGenerator(nil), nil
	}
	if len(args.list) == 0 && len(args.names) > 0 {
		a, err := args.bind("filter map", "attribute", "default")
		if err != nil {
			return Value{}, err
		}
		out, err := r.attributes(v, a[0], a[1])
		return newGenerator(out), err
	}
	if len(args.list) == 0 || !args.list[0].IsString() {
		return Value{}, errors.New("filter map needs the name of a filter, or the argument attribute")
	}
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, err
	}
	out := make([]Value, len(items))
	for i, item := range items {
		out[i], err = r.filter(args.list[0].AsString(), item, arguments{args.list[1:], args.names, args.named})
		if err != nil {
			return Value{}, err
		}
	}
	return newGenerator(out), r.make(len(out) * itemBytes)
}

func (r *run) selected(v Value, args arguments, want, attr bool) (Value, error) {
	path := jinja.Undefined()
	if attr {
		if len(args.list) == 0 {
			return Value{}, errors.New("the name of an attribute is missing")
		}
		path, args.list = args.list[0], args.list[1:]
	}
	if !truth(v) {
		return newGenerator(nil), nil
	}
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, err
	}
	var out []Value
	for _, item := range items {
		of := item
		if attr {
			if of, err = r.field(item, path); err != nil {
				return Value{}, err
			}
		}
		ok := truth(of)
		if len(args.list) > 0 {
			if !args.list[0].IsString() {
				return Value{}, fmt.Errorf("the name of a test is %s", kindOf(args.list[0]))
			}
			if ok, err = r.test(args.list[0].AsString(), of, arguments{args.list[1:], args.names, args.named}); err != nil {
				return Value{}, err
			}
		}
		if ok == want {
			out = append(out, item)
		}
	}
	return newGenerator(out), r.make(len(out) * itemBytes)
}

func (r *run) batch(v Value, a []Value) (Value, error) {
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, err
	}
	n, ok := whole(a[0])
	if !ok || n < 1 || n > math.MaxInt32 {
		return Value{}, fmt.Errorf("batch of %s items", kindOf(a[0]))
	}
	var out []Value
	for chunk := range slices.Chunk(items, int(n)) {
		chunk = slices.Clone(chunk)
		if !a[1].IsUndefined() && !a[1].IsNone() {
			if err := r.make(int(min(n*itemBytes, int64(r.limits.Output)+1))); err != nil {
				return Value{}, err
			}
			for len(chunk) < int(n) {
				chunk = append(chunk, a[1])
			}
		}
		l, err := r.list(chunk)
		if err != nil {
			return Value{}, err
		}
		out = append(out, l)
	}
	return newGenerator(out), nil
}

// lowered returns v as a sort key. Unless sensitive is set, a text becomes lower case.
func (r *run) lowered(v Value, sensitive bool) (Value, error) {
	if v = r.plain(v); v.IsString() && !sensitive {
		return r.text(lower(v.AsString()))
	}
	return v, nil
}

func (r *run) dictsort(v Value, a []Value) (Value, error) {
	if !v.IsDict() || r.spaces[v.AsDict()] {
		return Value{}, fmt.Errorf("dictsort of %s: want a mapping", kindOf(v))
	}
	by := 0
	switch {
	case a[1].IsUndefined(), a[1].IsString() && a[1].AsString() == "key":
	case a[1].IsString() && a[1].AsString() == "value":
		by = 1
	default:
		return Value{}, errors.New(`dictsort: by is neither "key" nor "value"`)
	}
	list, err := r.dictMethod(v.AsDict(), "items", arguments{})
	if err != nil {
		return Value{}, err
	}
	items := list.AsList().Items
	return r.sorted(items, truth(a[2]), func(v Value) (Value, error) { return r.lowered(v.AsList().Get(by), truth(a[0])) })
}

// sorted returns the items in a stable order by key.
func (r *run) sorted(items []Value, reverse bool, key func(Value) (Value, error)) (Value, error) {
	type pair struct{ key, value Value }
	pairs := make([]pair, len(items))
	var err error
	for i, v := range items {
		pairs[i].value = v
		if pairs[i].key, err = key(v); err != nil {
			return Value{}, err
		}
	}
	slices.SortStableFunc(pairs, func(a, b pair) int {
		if err != nil {
			return 0
		}
		var c int
		c, err = r.compare(a.key, b.key, 0)
		if reverse {
			return -c
		}
		return c
	})
	if err != nil {
		return Value{}, err
	}
	out := make([]Value, len(pairs))
	for i, p := range pairs {
		out[i] = p.value
	}
	return r.list(out)
}

func (r *run) sort(v Value, a []Value) (Value, error) {
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, err
	}
	return r.sorted(items, truth(a[0]), func(v Value) (Value, error) {
		if a[2].IsUndefined() || a[2].IsNone() {
			return r.lowered(v, truth(a[1]))
		}
		if !a[2].IsString() {
			v, err := r.field(v, a[2])
			if err != nil {
				return Value{}, err
			}
			return r.lowered(v, truth(a[1]))
		}
		var keys []Value
		for path := range strings.SplitSeq(a[2].AsString(), ",") {
			k, err := r.field(v, jinja.NewString(path))
			if err != nil {
				return Value{}, err
			}
			if k, err = r.lowered(k, truth(a[1])); err != nil {
				return Value{}, err
			}
			keys = append(keys, k)
		}
		return jinja.NewList(keys), nil
	})
}

// key returns the value by which unique, min and max compare an item: the item, or the attribute a[1] of the item if a[1] is
// given. Texts become lower case unless a[0] is true.
func (r *run) key(item Value, a []Value) (key Value, err error) {
	if key = item; !a[1].IsUndefined() && !a[1].IsNone() {
		if key, err = r.field(item, a[1]); err != nil {
			return Value{}, err
		}
	}
	return r.lowered(key, truth(a[0]))
}

func (r *run) unique(v Value, a []Value) (Value, error) {
	items, err := r.iterate(v)
	if err != nil {
		return Value{}, err
	}
	var out, seen []Value
next:
	for _, item := range items {
		key, err := r.key(item, a)
		if err != nil {
			return Value{}, err
		}
		for _, s := range seen {
			same, err := r.equal(s, key, 0)
			if err != nil {
				return Value{}, err
			}
			if same {
				continue next
			}
		}
		seen = append(seen, key)
		out = append(out, item)
	}
	return newGenerator(out), r.make(len(out) * itemBytes)
}

func extreme(sign int) func(r *run, v Value, a []Value) (Value, error) {
	return func(r *run, v Value, a []Value) (Value, error) {
		items, err := r.iterate(v)
		if err != nil || len(items) == 0 {
			return jinja.Undefined(), err
		}
		best, bestKey := items[0], Value{}
		for i, item := range items {
			key, err := r.key(item, a)
			if err != nil {
				return Value{}, err
			}
			if i == 0 {
				bestKey = key
				continue
			}
			c, err := r.compare(key, bestKey, 0)
			if err != nil {
				return Value{}, err
			}
			if c*sign > 0 {
				best, bestKey = item, key
			}
		}
		return best, nil
	}
}

func (r *run) sum(v Value, a []Value) (Value, error) {
	items, err := r.attributes(v, a[0], jinja.Undefined())
	if err != nil {
		return Value{}, err
	}
	total := a[1]
	if total.IsUndefined() {
		total = jinja.NewInt(0)
	}
	for _, item := range items {
		if total, err = r.binary("+", total, item); err != nil {
			return Value{}, err
		}
	}
	return total, nil
}

func (r *run) indent(v Value, a []Value) (Value, error) {
	if !v.IsString() && !r.isSafe(v) {
		return Value{}, fmt.Errorf("indent of %s, want a text", kindOf(v))
	}
	s, err := r.string(v)
	if err != nil {
		return Value{}, err
	}
	pad := "    "
	if a[0].IsString() {
		pad = a[0].AsString()
	} else if !a[0].IsUndefined() {
		n, ok := whole(a[0])
		if !ok {
			return Value{}, fmt.Errorf("indent by %s", kindOf(a[0]))
		}
		if n > int64(r.limits.Output) {
			return Value{}, r.make(r.limits.Output + 1)
		}
		pad = strings.Repeat(" ", int(max(n, 0)))
	}
	lines := splitLines(s+"\n", false)
	if int64(len(pad)+1)*int64(len(lines))+int64(len(s)) > int64(r.limits.Output) {
		return Value{}, r.make(r.limits.Output + 1)
	}
	for i, l := range lines {
		if i == 0 && truth(a[1]) || i > 0 && (l != "" || truth(a[2])) {
			lines[i] = pad + l
		}
	}
	return r.join("\n", lines...)
}
