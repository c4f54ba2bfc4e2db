package template

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

// The filters safe and escape return a safe text. Text that is added to a safe text is escaped for HTML. The library has no kind
// for safe texts, so a safe text is a list that is a key of run.safe. The list is empty if and only if the text is empty, so the
// truth value of the list equals the truth value of the text.

func (r *run) newSafe(s string) (Value, error) {
	var items []Value
	if s != "" {
		items = []Value{empty}
	}
	v := jinja.NewList(items)
	r.safe[v.AsList()] = s
	return v, r.make(len(s) + itemBytes)
}

func (r *run) isSafe(v Value) bool {
	if len(r.safe) == 0 || !v.IsList() {
		return false
	}
	_, ok := r.safe[v.AsList()]
	return ok
}

// plain returns a safe text as a plain text, and any other value unchanged.
func (r *run) plain(v Value) Value {
	if len(r.safe) > 0 && v.IsList() {
		if s, ok := r.safe[v.AsList()]; ok {
			return jinja.NewString(s)
		}
	}
	return v
}

func (r *run) plains(list []Value) []Value {
	if len(r.safe) == 0 || !slices.ContainsFunc(list, r.isSafe) {
		return list
	}
	list = slices.Clone(list)
	for i, v := range list {
		list[i] = r.plain(v)
	}
	return list
}

var htmlEscaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&#34;", "'", "&#39;")

// addSafe returns a + b. At least one of a and b is a safe text.
func (r *run) addSafe(a, b Value) (Value, error) {
	sum := ""
	for _, v := range []Value{a, b} {
		switch p := r.plain(v); {
		case r.isSafe(v):
			sum += p.AsString()
		case v.IsString():
			sum += htmlEscaper.Replace(v.AsString())
		default:
			return Value{}, fmt.Errorf("a safe text + %s", kindOf(v))
		}
	}
	return r.newSafe(sum)
}

// again converts the result of an operation on a safe text: a text, or each text of a list, becomes safe.
func (r *run) again(v Value, err error) (Value, error) {
	switch {
	case err != nil:
		return v, err
	case v.IsString():
		return r.newSafe(v.AsString())
	case v.IsList():
		for i, item := range v.AsList().Items {
			if item.IsString() {
				if v.AsList().Items[i], err = r.newSafe(item.AsString()); err != nil {
					return Value{}, err
				}
			}
		}
	}
	return v, nil
}

// safeMethod returns the result of a method of a safe text.
func (r *run) safeMethod(v Value, name string, args arguments) (Value, error) {
	switch name {
	case "format", "join", "replace":
		return Value{}, fmt.Errorf("method %s of a safe text is not supported", name)
	}
	args.list, args.named = r.plains(args.list), r.plains(args.named)
	return r.again(r.method(r.plain(v), name, args))
}

// safeFilters lists the filters whose result for a safe text is safe.
var safeFilters = []string{"capitalize", "center", "indent", "lower", "reverse", "safe", "string", "trim", "upper", "e", "escape"}

// keyMark begins the text of a dictionary key that is an integer or none. The library supports only texts as keys.
const keyMark = "\x00key "

func keyOf(v Value) (string, error) {
	switch {
	case v.IsString():
		return v.AsString(), nil
	case v.IsInt():
		return keyMark + strconv.FormatInt(v.AsInt(), 10), nil
	case v.IsNone():
		return keyMark + "None", nil
	}
	return "", errors.New("a key is " + kindOf(v) + ": texts, integers and none are supported")
}

func keyValue(key string) Value {
	rest, ok := strings.CutPrefix(key, keyMark)
	if !ok {
		return jinja.NewString(key)
	}
	if n, err := strconv.ParseInt(rest, 10, 64); err == nil {
		return jinja.NewInt(n)
	}
	return jinja.None()
}
