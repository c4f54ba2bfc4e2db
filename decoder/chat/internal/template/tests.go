package template

import (
	"errors"
	"fmt"

	"github.com/ardanlabs/jinja"
)

// tests maps the name of a test to its number of arguments.
var tests = map[string]int{
	"boolean": 0, "callable": 0, "defined": 0, "even": 0, "false": 0, "filter": 0, "float": 0, "integer": 0, "iterable": 0, "lower": 0,
	"mapping": 0, "none": 0, "number": 0, "odd": 0, "sequence": 0, "string": 0, "test": 0, "true": 0, "undefined": 0, "upper": 0,
	"divisibleby": 1, "in": 1, "sameas": 1,
	"eq": 1, "==": 1, "equalto": 1, "ne": 1, "!=": 1, "lt": 1, "<": 1, "lessthan": 1, "le": 1, "<=": 1,
	"gt": 1, ">": 1, "greaterthan": 1, "ge": 1, ">=": 1,
}

var testOperators = map[string]string{
	"eq": "==", "equalto": "==", "ne": "!=", "lt": "<", "lessthan": "<", "le": "<=", "gt": ">", "greaterthan": ">", "ge": ">=",
	"==": "==", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
}

// test applies the test with the given name.
func (r *run) test(name string, v Value, args arguments) (bool, error) {
	n, ok := tests[name]
	if !ok {
		return false, fmt.Errorf("test %s is not supported", quote(name))
	}
	if len(args.names) > 0 || len(args.list) != n {
		return false, fmt.Errorf("test %s takes %d arguments, %d are given", name, n, len(args.list)+len(args.names))
	}
	if op, ok := testOperators[name]; ok {
		v, err := r.binary(op, v, args.list[0])
		return err == nil && truth(v), err
	}
	isFunction := v.IsCallable() && !special(v)
	_, isBig := bigDigits(v)
	switch name {
	case "boolean":
		return v.IsBool(), nil
	case "callable":
		return isFunction || v.IsUndefined(), nil // in Jinja, an undefined value is callable, and the call fails
	case "defined":
		return !v.IsUndefined(), nil
	case "undefined":
		return v.IsUndefined(), nil
	case "none":
		return v.IsNone(), nil
	case "true", "false":
		return v.IsBool() && v.AsBool() == (name == "true"), nil
	case "float":
		return v.IsFloat(), nil
	case "integer":
		return v.IsInt() || isBig, nil
	case "number":
		return v.IsNumber() || v.IsBool() || isBig, nil
	case "string":
		return v.IsString(), nil
	case "mapping":
		return v.IsDict() && !r.spaces[v.AsDict()], nil
	case "iterable":
		return v.IsString() || v.IsList() || v.IsUndefined() || isGenerator(v) || v.IsDict() && !r.spaces[v.AsDict()], nil
	case "sequence":
		return v.IsString() || v.IsList() || v.IsUndefined() || v.IsDict() && !r.spaces[v.AsDict()], nil
	case "even", "odd", "divisibleby":
		by := jinja.NewInt(2)
		if name == "divisibleby" {
			by = args.list[0]
		}
		if v.IsString() {
			return false, errors.New("division of a text")
		}
		rest, err := r.binary("%", v, by)
		if err != nil {
			return false, err
		}
		want := 0.0
		if name == "odd" {
			want = 1
		}
		f, _ := number(rest)
		return f == want, nil
	case "upper", "lower":
		s, err := r.string(v)
		if name == "upper" {
			return isUpper(s), err
		}
		return isLower(s), err
	case "in":
		return r.contains(args.list[0], v)
	case "sameas":
		return r.same(v, args.list[0])
	case "filter", "test":
		if !v.IsString() {
			return false, nil
		}
		if name == "filter" {
			_, ok = filters[v.AsString()]
		} else {
			_, ok = tests[v.AsString()]
		}
		return ok, nil
	}
	return false, fmt.Errorf("test %s is not supported", quote(name))
}

// same implements Python's operator "is".
func (r *run) same(a, b Value) (bool, error) {
	switch {
	case a.IsDict() && b.IsDict():
		return a.AsDict() == b.AsDict(), nil
	case a.IsList() && b.IsList():
		return a.AsList() == b.AsList(), nil
	case a.IsBool() != b.IsBool(), a.IsInt() != b.IsInt():
		return false, nil
	}
	return r.equal(a, b, 0)
}
