package template

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strings"

	"github.com/ardanlabs/jinja"
)

var errOverflow = errors.New("an integer of more than 64 bits")

func (r *run) unary(op string, v Value) (Value, error) {
	if n, ok := whole(v); ok {
		if op == "-x" {
			if n == math.MinInt64 {
				return Value{}, errOverflow
			}
			n = -n
		}
		return jinja.NewInt(n), nil
	}
	if f, ok := number(v); ok {
		if op == "-x" {
			f = -f
		}
		return jinja.NewFloat(f), nil
	}
	return Value{}, fmt.Errorf("%s of %s", op[:1], kindOf(v))
}

func (r *run) binary(op string, a, b Value) (Value, error) {
	if r.isSafe(a) || r.isSafe(b) {
		switch op {
		case "+":
			return r.addSafe(a, b)
		case "*":
			if r.isSafe(a) {
				return r.again(r.repeat(r.plain(a), b))
			}
			return r.again(r.repeat(r.plain(b), a))
		case "%":
			if r.isSafe(a) {
				return Value{}, errors.New("% of a safe text is not supported")
			}
		}
		a, b = r.plain(a), r.plain(b)
	}
	boolean := func(ok bool, err error) (Value, error) { return jinja.NewBool(ok), err }
	switch op {
	case "==":
		return boolean(r.equal(a, b, 0))
	case "!=":
		ok, err := r.equal(a, b, 0)
		return boolean(!ok, err)
	case "<", "<=", ">", ">=":
		c, err := r.compare(a, b, 0)
		return boolean(op == "<" && c < 0 || op == "<=" && c <= 0 || op == ">" && c > 0 || op == ">=" && c >= 0, err)
	case "in":
		return boolean(r.contains(b, a))
	case "not in":
		ok, err := r.contains(b, a)
		return boolean(!ok, err)
	case "~":
		x, err := r.string(a)
		if err != nil {
			return Value{}, err
		}
		y, err := r.string(b)
		if err != nil {
			return Value{}, err
		}
		return r.join("", x, y)
	}
	switch {
	case op == "+" && a.IsString() && b.IsString():
		return r.join("", a.AsString(), b.AsString())
	case op == "+" && a.IsList() && b.IsList() && r.tuples[a.AsList()] == r.tuples[b.AsList()]:
		x, y := a.AsList().Items, b.AsList().Items
		if err := r.make((len(x) + len(y)) * itemBytes); err != nil {
			return Value{}, err
		}
		sum := jinja.NewList(append(append(make([]Value, 0, len(x)+len(y)), x...), y...))
		if r.tuples[a.AsList()] {
			r.tuples[sum.AsList()] = true
		}
		return sum, nil
	case op == "*" && (a.IsString() || a.IsList()):
		return r.repeat(a, b)
	case op == "*" && (b.IsString() || b.IsList()):
		return r.repeat(b, a)
	case op == "%" && a.IsString():
		return r.percent(a.AsString(), b)
	}
	x, ok := whole(a)
	y, yes := whole(b)
	if ok && yes {
		return integers(op, x, y)
	}
	f, ok := number(a)
	g, yes := number(b)
	if !ok || !yes {
		return Value{}, fmt.Errorf("%s %s %s", kindOf(a), op, kindOf(b))
	}
	return floats(op, f, g)
}

func integers(op string, x, y int64) (Value, error) {
	if y == 0 && (op == "/" || op == "//" || op == "%") {
		return Value{}, errors.New("division by zero")
	}
	n, over := int64(0), false
	switch op {
	case "+":
		n = x + y
		over = (x < 0) == (y < 0) && (n < 0) != (x < 0)
	case "-":
		n = x - y
		over = (x < 0) != (y < 0) && (n < 0) != (x < 0)
	case "*":
		n, over = multiply(x, y)
	case "/":
		return jinja.NewFloat(float64(x) / float64(y)), nil
	case "//":
		if over = x == math.MinInt64 && y == -1; !over {
			if n = x / y; x%y != 0 && (x < 0) != (y < 0) {
				n--
			}
		}
	case "%":
		if y != -1 {
			if n = x % y; n != 0 && (n < 0) != (y < 0) {
				n += y
			}
		}
	case "**":
		if y < 0 {
			return floats(op, float64(x), float64(y))
		}
		if n = 1; x >= -1 && x <= 1 {
			y = min(y, 2-y%2) // powers of -1, 0 and 1 depend only on whether y is 0, odd or even
		}
		for ; y > 0 && !over; y-- {
			n, over = multiply(n, x)
		}
	}
	if over {
		return Value{}, errOverflow
	}
	return jinja.NewInt(n), nil
}

func multiply(x, y int64) (int64, bool) {
	if x == math.MinInt64 || y == math.MinInt64 {
		return x * y, x != 0 && y != 0 && x != 1 && y != 1
	}
	hi, lo := bits.Mul64(uint64(max(x, -x)), uint64(max(y, -y)))
	return x * y, hi != 0 || lo > math.MaxInt64
}

func floats(op string, f, g float64) (Value, error) {
	if g == 0 && (op == "/" || op == "//" || op == "%") || op == "**" && f == 0 && g < 0 {
		return Value{}, errors.New("division by zero")
	}
	switch op {
	case "+":
		f += g
	case "-":
		f -= g
	case "*":
		f *= g
	case "/":
		f /= g
	case "//":
		f = math.Floor(f / g)
	case "%":
		if f = math.Mod(f, g); f != 0 && (f < 0) != (g < 0) {
			f += g
		}
	case "**":
		if f < 0 && g != math.Trunc(g) {
			return Value{}, errors.New("a power that is a complex number")
		}
		if f, g = math.Pow(f, g), f; math.IsInf(f, 0) && !math.IsInf(g, 0) {
			return Value{}, errors.New("a power that is too large")
		}
	}
	return jinja.NewFloat(f), nil
}

// repeat returns a text or a list repeated the given number of times.
func (r *run) repeat(v, times Value) (Value, error) {
	n, ok := whole(times)
	if !ok {
		return Value{}, fmt.Errorf("%s * %s", kindOf(v), kindOf(times))
	}
	n = min(max(n, 0), math.MaxInt32)
	if v.IsString() {
		if n > 0 && int64(len(v.AsString())) > int64(r.limits.Output)/n {
			return Value{}, r.make(r.limits.Output + 1)
		}
		return r.text(strings.Repeat(v.AsString(), int(n)))
	}
	items := v.AsList().Items
	if n > 0 && int64(len(items)*itemBytes) > int64(r.limits.Output)/n {
		return Value{}, r.make(r.limits.Output + 1)
	}
	if len(items) == 0 {
		n = 0
	}
	var all []Value
	for range n {
		all = append(all, items...)
	}
	if r.tuples[v.AsList()] {
		return r.tuple(all)
	}
	return r.list(all)
}

// join returns the texts joined by a separator.
func (r *run) join(separator string, texts ...string) (Value, error) {
	n := 0
	for i, s := range texts {
		if i > 0 {
			n += len(separator)
		}
		if n += len(s); n > r.limits.Output {
			break
		}
	}
	if err := r.make(n); err != nil {
		return Value{}, err
	}
	return jinja.NewString(strings.Join(texts, separator)), nil
}

// percent implements Python's % formatting of a text.
func (r *run) percent(format string, v Value) (Value, error) {
	args := []Value{v}
	if v.IsList() && r.tuples[v.AsList()] {
		args = v.AsList().Items
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		if i++; i < len(format) && format[i] == '%' {
			b.WriteByte('%')
			continue
		}
		if len(args) == 0 {
			return Value{}, errors.New("fewer values than the format has")
		}
		s, err := "", error(nil)
		switch verb := format[min(i, len(format)-1)]; {
		case verb == 's':
			s, err = r.string(args[0])
		case verb == 'r':
			var q strings.Builder
			err = r.repr(&q, args[0], 0)
			s = q.String()
		case verb == 'd' || verb == 'i':
			if f, ok := number(args[0]); ok && math.Abs(f) < 1<<53 {
				s = fmt.Sprint(int64(f))
				break
			}
			fallthrough
		default:
			err = fmt.Errorf("format %s of %s is not supported", quote(format), kindOf(args[0]))
		}
		if err != nil {
			return Value{}, err
		}
		if err := r.make(len(s)); err != nil {
			return Value{}, err
		}
		b.WriteString(s)
		args = args[1:]
	}
	if len(args) > 0 {
		return Value{}, errors.New("more values than the format has")
	}
	return r.text(b.String())
}

// attribute returns v.name. A method takes precedence over the value of a key.
func (r *run) attribute(v Value, name string) (Value, error) {
	if v.IsUndefined() {
		return Value{}, fmt.Errorf("attribute %s of an undefined value", quote(name))
	}
	if r.hasMethod(v, name) {
		return jinja.NewCallable(name, func(args []Value, named map[string]Value) (Value, error) {
			a := arguments{list: args}
			for n, v := range named {
				a.names, a.named = append(a.names, n), append(a.named, v)
			}
			return r.method(v, name, a)
		}), nil
	}
	if v.IsDict() {
		if value, ok := v.AsDict().Get(name); ok {
			return value, nil
		}
	}
	return jinja.Undefined(), nil
}

// item returns v[key]. The value of a key takes precedence over a method.
func (r *run) item(v, key Value) (Value, error) {
	if v.IsUndefined() {
		return Value{}, errors.New("an item of an undefined value")
	}
	if v.IsDict() && !r.spaces[v.AsDict()] {
		k, err := keyOf(key)
		if err != nil {
			return jinja.Undefined(), nil
		}
		if value, ok := v.AsDict().Get(k); ok {
			return value, nil
		}
	}
	if i, ok := whole(key); ok {
		switch {
		case v.IsList():
			if i, ok := index(i, v.AsList().Len()); ok {
				return v.AsList().Get(i), nil
			}
		case v.IsString():
			s := []rune(v.AsString())
			if i, ok := index(i, len(s)); ok {
				return jinja.NewString(string(s[i])), r.step(1 + len(s)>>10)
			}
		}
		return jinja.Undefined(), nil
	}
	if key.IsString() && !v.IsString() && !v.IsList() {
		return r.attribute(v, key.AsString())
	}
	if key.IsString() && r.hasMethod(v, key.AsString()) {
		return r.attribute(v, key.AsString())
	}
	return jinja.Undefined(), nil
}

func index(i int64, n int) (int, bool) {
	if i < 0 {
		i += int64(n)
	}
	return int(i), i >= 0 && i < int64(n)
}

// slice returns v[from:to:by].
func (r *run) slice(v, from, to, by Value) (Value, error) {
	if v.IsUndefined() {
		return Value{}, errors.New("an item of an undefined value")
	}
	if r.isSafe(v) {
		return r.again(r.slice(r.plain(v), from, to, by))
	}
	if !v.IsList() && !v.IsString() {
		return Value{}, fmt.Errorf("a slice of %s, want a list or a text", kindOf(v))
	}
	var chars []rune
	n := 0
	if v.IsString() {
		chars = []rune(v.AsString())
		n = len(chars)
	} else {
		n = v.AsList().Len()
	}
	bound := func(v Value, absent int64) (int64, error) {
		if v.IsNone() {
			return absent, nil
		}
		i, ok := whole(v)
		if !ok {
			return 0, fmt.Errorf("a slice's bound is %s", kindOf(v))
		}
		return i, nil
	}
	step, err := bound(by, 1)
	if err == nil && step == 0 {
		err = errors.New("a slice's step is 0")
	}
	if err != nil {
		return Value{}, err
	}
	step = min(max(step, -math.MaxInt32), math.MaxInt32)
	low, high := int64(0), int64(n)
	if step < 0 {
		low, high = -1, int64(n)-1
	}
	clamp := func(v Value, absent int64) (int64, error) {
		i, err := bound(v, math.MinInt64)
		if err != nil || v.IsNone() {
			return absent, err
		}
		if i < 0 {
			i = max(i, math.MinInt64+int64(n)) + int64(n)
		}
		return min(max(i, low), high), nil
	}
	first, last := low, high
	if step < 0 {
		first, last = high, low
	}
	if first, err = clamp(from, first); err != nil {
		return Value{}, err
	}
	if last, err = clamp(to, last); err != nil {
		return Value{}, err
	}
	var text []rune
	var items []Value
	for i := first; step > 0 && i < last || step < 0 && i > last; i += step {
		if chars != nil {
			text = append(text, chars[i])
		} else {
			items = append(items, v.AsList().Get(int(i)))
		}
	}
	if v.IsString() {
		return r.text(string(text))
	}
	if r.tuples[v.AsList()] {
		return r.tuple(items)
	}
	return r.list(items)
}
