package template

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode"

	"github.com/ardanlabs/jinja"
)

// maxValue is the maximum nesting depth of a value.
const maxValue = 200

// The library has no kinds for generators and big integers. Such a value is a callable with a name that no template can write.
const (
	generator = "\x00generator" // a result of some filters; can be iterated once
	bigInt    = "\x00int "      // an integer of more than 64 bits; the digits follow
)

func special(v Value) bool { return v.IsCallable() && strings.HasPrefix(v.AsCallable().Name, "\x00") }

func isGenerator(v Value) bool { return v.IsCallable() && v.AsCallable().Name == generator }

// newGenerator returns a generator. As in Python, a generator can be iterated once.
func newGenerator(items []Value) Value {
	used := false
	return jinja.NewCallable(generator, func([]Value, map[string]Value) (Value, error) {
		if used {
			return jinja.NewList(nil), nil
		}
		used = true
		return jinja.NewList(items), nil
	})
}

// newBig returns an integer of more than 64 bits.
func newBig(digits string) Value {
	return jinja.NewCallable(bigInt+digits, func([]Value, map[string]Value) (Value, error) {
		return Value{}, errors.New("an integer is no function")
	})
}

func bigDigits(v Value) (string, bool) {
	if !v.IsCallable() {
		return "", false
	}
	return strings.CutPrefix(v.AsCallable().Name, bigInt)
}

// kindOf returns the name of a value's kind for errors.
func kindOf(v Value) string {
	switch {
	case v.IsUndefined():
		return "an undefined value"
	case v.IsNone():
		return "none"
	case v.IsBool():
		return "a boolean"
	case v.IsInt():
		return "an integer"
	case v.IsFloat():
		return "a float"
	case v.IsString():
		return "a text"
	case v.IsList():
		return "a list"
	case v.IsDict():
		return "a mapping"
	case isGenerator(v):
		return "a generator"
	}
	if _, ok := bigDigits(v); ok {
		return "an integer of more than 64 bits"
	}
	return "a function"
}

// string implements Python's str.
func (r *run) string(v Value) (string, error) {
	v = r.plain(v)
	if v.IsString() {
		return v.AsString(), nil
	}
	if v.IsUndefined() {
		return "", nil
	}
	var b strings.Builder
	err := r.repr(&b, v, 0)
	return b.String(), err
}

// repr writes Python's repr of v to b.
func (r *run) repr(b *strings.Builder, v Value, depth int) error {
	if depth > maxValue {
		return fmt.Errorf("%w: a value of more than %d levels", ErrLimit, maxValue)
	}
	if b.Len() > r.limits.Output {
		return r.make(b.Len())
	}
	if err := r.step(1); err != nil {
		return err
	}
	switch {
	case r.isSafe(v):
		b.WriteString("Markup(")
		if err := r.repr(b, r.plain(v), depth); err != nil {
			return err
		}
		b.WriteString(")")
	case v.IsUndefined():
		b.WriteString("Undefined")
	case v.IsNone():
		b.WriteString("None")
	case v.IsBool():
		b.WriteString(map[bool]string{false: "False", true: "True"}[v.AsBool()])
	case v.IsInt():
		b.WriteString(strconv.FormatInt(v.AsInt(), 10))
	case v.IsFloat():
		b.WriteString(formatFloat(v.AsFloat()))
	case v.IsString():
		if err := r.make(len(v.AsString())); err != nil {
			return err
		}
		reprString(b, v.AsString())
	case v.IsList():
		items := v.AsList().Items
		open, close := "[", "]"
		if r.tuples[v.AsList()] {
			open, close = "(", ")"
			if len(items) == 1 {
				close = ",)"
			}
		}
		b.WriteString(open)
		for i, item := range items {
			if i > 0 {
				b.WriteString(", ")
			}
			if err := r.repr(b, item, depth+1); err != nil {
				return err
			}
		}
		b.WriteString(close)
	case v.IsDict():
		if r.spaces[v.AsDict()] {
			b.WriteString("<Namespace ")
			defer b.WriteString(">")
		}
		b.WriteString("{")
		for i, k := range v.AsDict().Keys {
			if i > 0 {
				b.WriteString(", ")
			}
			if err := r.make(len(k)); err != nil {
				return err
			}
			if err := r.repr(b, keyValue(k), depth+1); err != nil {
				return err
			}
			b.WriteString(": ")
			if err := r.repr(b, v.AsDict().Data[k], depth+1); err != nil {
				return err
			}
		}
		b.WriteString("}")
	default:
		digits, ok := bigDigits(v)
		if !ok {
			return fmt.Errorf("%s can't be written as text", kindOf(v))
		}
		b.WriteString(digits)
	}
	return nil
}

func reprString(b *strings.Builder, s string) {
	quote := '\''
	if strings.ContainsRune(s, '\'') && !strings.ContainsRune(s, '"') {
		quote = '"'
	}
	b.WriteRune(quote)
	for _, c := range s {
		switch {
		case c == quote || c == '\\':
			b.WriteByte('\\')
			b.WriteRune(c)
		case c == '\n':
			b.WriteString(`\n`)
		case c == '\r':
			b.WriteString(`\r`)
		case c == '\t':
			b.WriteString(`\t`)
		case unicode.IsPrint(c):
			b.WriteRune(c)
		case c < 0x100:
			fmt.Fprintf(b, `\x%02x`, c)
		case c < 0x10000:
			fmt.Fprintf(b, `\u%04x`, c)
		default:
			fmt.Fprintf(b, `\U%08x`, c)
		}
	}
	b.WriteRune(quote)
}

// formatFloat returns Python's repr of a float.
func formatFloat(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

func parseFloat(s string) float64 {
	f, _ := strconv.ParseFloat(s, 64)
	return f
}

// iterate returns the items of a loop over v.
func (r *run) iterate(v Value) ([]Value, error) {
	var items []Value
	switch {
	case v.IsUndefined():
		return nil, nil
	case v.IsList():
		return v.AsList().Items, r.step(1)
	case isGenerator(v):
		l, err := v.AsCallable().Fn(nil, nil)
		if err != nil {
			return nil, err
		}
		return l.AsList().Items, nil
	case v.IsString():
		for _, c := range v.AsString() {
			items = append(items, jinja.NewString(string(c)))
			if len(items)*itemBytes > r.limits.Output {
				break
			}
		}
	case v.IsDict() && !r.spaces[v.AsDict()]:
		for _, k := range v.AsDict().Keys {
			items = append(items, keyValue(k))
		}
	default:
		return nil, fmt.Errorf("%s can't be iterated", kindOf(v))
	}
	return items, r.make(len(items) * itemBytes)
}

// truth implements Python's bool.
func truth(v Value) bool { return v.IsTruthy() }

// whole returns the value of an integer or a boolean.
func whole(v Value) (int64, bool) {
	switch {
	case v.IsInt():
		return v.AsInt(), true
	case v.IsBool():
		if v.AsBool() {
			return 1, true
		}
		return 0, true
	}
	return 0, false
}

func number(v Value) (float64, bool) {
	if v.IsFloat() {
		return v.AsFloat(), true
	}
	n, ok := whole(v)
	return float64(n), ok
}

// equal implements Python's operator ==.
func (r *run) equal(a, b Value, depth int) (bool, error) {
	if depth > maxValue {
		return false, fmt.Errorf("%w: a value of more than %d levels", ErrLimit, maxValue)
	}
	if err := r.step(1); err != nil {
		return false, err
	}
	a, b = r.plain(a), r.plain(b)
	if x, ok := whole(a); ok {
		if y, ok := whole(b); ok {
			return x == y, nil
		}
	}
	if x, ok := number(a); ok {
		y, ok := number(b)
		return ok && x == y, nil
	}
	switch {
	case a.IsString() && b.IsString():
		return a.AsString() == b.AsString(), r.step(min(len(a.AsString()), len(b.AsString())) >> 10)
	case a.IsNone():
		return b.IsNone(), nil
	case a.IsUndefined():
		return b.IsUndefined(), nil
	case a.IsList() && b.IsList():
		x, y := a.AsList(), b.AsList()
		if x.Len() != y.Len() || r.tuples[x] != r.tuples[y] {
			return false, nil
		}
		for i := range x.Items {
			if ok, err := r.equal(x.Items[i], y.Items[i], depth+1); !ok || err != nil {
				return false, err
			}
		}
		return true, nil
	case a.IsDict() && b.IsDict():
		x, y := a.AsDict(), b.AsDict()
		if r.spaces[x] || r.spaces[y] {
			return x == y, nil
		}
		if x.Len() != y.Len() {
			return false, nil
		}
		for _, k := range x.Keys {
			v, ok := y.Get(k)
			if !ok {
				return false, nil
			}
			if ok, err := r.equal(x.Data[k], v, depth+1); !ok || err != nil {
				return false, err
			}
		}
		return true, nil
	}
	x, ok := bigDigits(a)
	y, yes := bigDigits(b)
	return ok && yes && x == y, nil
}

// compare compares two values by the rules of Python's operator <.
func (r *run) compare(a, b Value, depth int) (int, error) {
	if depth > maxValue {
		return 0, fmt.Errorf("%w: a value of more than %d levels", ErrLimit, maxValue)
	}
	if err := r.step(1); err != nil {
		return 0, err
	}
	a, b = r.plain(a), r.plain(b)
	if x, ok := whole(a); ok {
		if y, ok := whole(b); ok {
			switch {
			case x < y:
				return -1, nil
			case x > y:
				return 1, nil
			}
			return 0, nil
		}
	}
	x, ok := number(a)
	y, yes := number(b)
	switch {
	case ok && yes:
		switch {
		case x < y:
			return -1, nil
		case x > y:
			return 1, nil
		case x == y:
			return 0, nil
		}
		return 0, errors.New("a number that is none can't be compared")
	case a.IsString() && b.IsString():
		return strings.Compare(a.AsString(), b.AsString()), r.step(min(len(a.AsString()), len(b.AsString())) >> 10)
	case a.IsList() && b.IsList() && r.tuples[a.AsList()] == r.tuples[b.AsList()]:
		x, y := a.AsList().Items, b.AsList().Items
		for i := range min(len(x), len(y)) {
			same, err := r.equal(x[i], y[i], depth+1)
			if err != nil {
				return 0, err
			}
			if !same {
				return r.compare(x[i], y[i], depth+1)
			}
		}
		return len(x) - len(y), nil
	}
	return 0, fmt.Errorf("%s and %s can't be compared", kindOf(a), kindOf(b))
}

func (r *run) contains(container, item Value) (bool, error) {
	switch {
	case container.IsString():
		if !item.IsString() {
			return false, fmt.Errorf("%s in a text: want a text", kindOf(item))
		}
		return strings.Contains(container.AsString(), item.AsString()), r.step(len(container.AsString()) >> 10)
	case container.IsDict() && !r.spaces[container.AsDict()]:
		k, err := keyOf(item)
		return err == nil && container.AsDict().Has(k), err
	}
	items, err := r.iterate(container)
	if err != nil {
		return false, err
	}
	for _, v := range items {
		if ok, err := r.equal(v, item, 0); ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}
