package template

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

// FromJSON decodes a value. FromJSON keeps the order of keys. As in Python, a number is an integer or a float.
func FromJSON(data []byte) (Value, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	v, err := decode(d, 0)
	if err == nil {
		if _, err = d.Token(); err == io.EOF {
			return v, nil
		}
		if err == nil {
			err = errors.New("more than one value")
		}
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return Value{}, fmt.Errorf("JSON %s: %w", quote(string(data[:min(len(data), 64)])), err)
}

func decode(d *json.Decoder, depth int) (Value, error) {
	if depth > maxValue {
		return Value{}, fmt.Errorf("more than %d levels", maxValue)
	}
	t, err := d.Token()
	if err != nil {
		return Value{}, err
	}
	switch t := t.(type) {
	case bool:
		return jinja.NewBool(t), nil
	case string:
		return jinja.NewString(t), nil
	case json.Number:
		return fromNumber(string(t)), nil
	case json.Delim:
		if t == '[' {
			var items []Value
			for d.More() {
				v, err := decode(d, depth+1)
				if err != nil {
					return Value{}, err
				}
				items = append(items, v)
			}
			_, err := d.Token()
			return jinja.NewList(items), err
		}
		dict := jinja.NewDict()
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return Value{}, err
			}
			v, err := decode(d, depth+1)
			if err != nil {
				return Value{}, err
			}
			dict.AsDict().Set(key.(string), v)
		}
		_, err := d.Token()
		return dict, err
	}
	return jinja.None(), nil
}

func fromNumber(s string) Value {
	if strings.ContainsAny(s, ".eE") {
		return jinja.NewFloat(parseFloat(s))
	}
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return jinja.NewInt(n)
	}
	return newBig(s)
}

// jsonWriter writes JSON in the format of Python's json.dumps.
type jsonWriter struct {
	r           *run
	b           strings.Builder
	ascii, sort bool
	indent      string
	lines       bool
	item, key   string
	counted     int
}

func (r *run) toJSON(v Value, a []Value) (Value, error) {
	w := &jsonWriter{r: r, item: ", ", key: ": ", ascii: truth(a[0]), sort: truth(a[3])}
	if n, ok := whole(a[1]); ok {
		if n > int64(r.limits.Output) {
			return Value{}, r.make(r.limits.Output + 1)
		}
		w.lines, w.indent, w.item = true, strings.Repeat(" ", int(max(n, 0))), ","
	} else if a[1].IsString() {
		w.lines, w.indent, w.item = true, a[1].AsString(), ","
	} else if !a[1].IsNone() && !a[1].IsUndefined() {
		return Value{}, fmt.Errorf("tojson: indent is %s", kindOf(a[1]))
	}
	if s := a[2]; !s.IsNone() && !s.IsUndefined() {
		if !s.IsList() || s.AsList().Len() != 2 || !s.AsList().Get(0).IsString() || !s.AsList().Get(1).IsString() {
			return Value{}, errors.New("tojson: separators are not two texts")
		}
		w.item, w.key = s.AsList().Get(0).AsString(), s.AsList().Get(1).AsString()
	}
	if err := w.value(v, 0); err != nil {
		return Value{}, err
	}
	return jinja.NewString(w.b.String()), w.count(0)
}

// count adds the bytes written since the last call to the rendering's total. count returns an error if n more bytes would exceed
// the output limit.
func (w *jsonWriter) count(n int) error {
	if w.b.Len()+n > w.r.limits.Output {
		return w.r.make(w.r.limits.Output + 1)
	}
	made := w.b.Len() - w.counted
	w.counted = w.b.Len()
	return w.r.make(made)
}

func (w *jsonWriter) newline(depth int) error {
	if !w.lines {
		return nil
	}
	if int64(len(w.indent))*int64(depth) > int64(w.r.limits.Output) {
		return w.r.make(w.r.limits.Output + 1)
	}
	if err := w.count(1 + len(w.indent)*depth); err != nil {
		return err
	}
	w.b.WriteByte('\n')
	w.b.WriteString(strings.Repeat(w.indent, depth))
	return nil
}

func (w *jsonWriter) value(v Value, depth int) error {
	if depth > maxValue {
		return fmt.Errorf("%w: a value of more than %d levels", ErrLimit, maxValue)
	}
	if err := w.count(0); err != nil {
		return err
	}
	v = w.r.plain(v)
	switch {
	case v.IsNone():
		w.b.WriteString("null")
	case v.IsBool():
		w.b.WriteString(strconv.FormatBool(v.AsBool()))
	case v.IsInt():
		w.b.WriteString(strconv.FormatInt(v.AsInt(), 10))
	case v.IsFloat():
		switch f := v.AsFloat(); {
		case math.IsNaN(f):
			w.b.WriteString("NaN")
		case math.IsInf(f, 0):
			w.b.WriteString(map[bool]string{true: "Infinity", false: "-Infinity"}[f > 0])
		default:
			w.b.WriteString(formatFloat(f))
		}
	case v.IsString():
		if err := w.count(len(v.AsString())); err != nil {
			return err
		}
		w.string(v.AsString())
	case v.IsList():
		return w.each('[', ']', len(v.AsList().Items), depth, func(i int) error { return w.value(v.AsList().Get(i), depth+1) })
	case v.IsDict() && !w.r.spaces[v.AsDict()]:
		keys := v.AsDict().Keys
		if w.sort {
			keys = slices.Sorted(slices.Values(keys))
		}
		return w.each('{', '}', len(keys), depth, func(i int) error {
			k := keyValue(keys[i])
			switch {
			case k.IsString():
				w.string(keys[i])
			case k.IsInt():
				w.string(strconv.FormatInt(k.AsInt(), 10))
			default:
				w.string("null")
			}
			w.b.WriteString(w.key)
			return w.value(v.AsDict().Data[keys[i]], depth+1)
		})
	default:
		digits, ok := bigDigits(v)
		if !ok {
			return fmt.Errorf("tojson of %s", kindOf(v))
		}
		w.b.WriteString(digits)
	}
	return nil
}

func (w *jsonWriter) each(open, close byte, n, depth int, item func(int) error) error {
	w.b.WriteByte(open)
	for i := range n {
		if i > 0 {
			w.b.WriteString(w.item)
		}
		if err := w.newline(depth + 1); err != nil {
			return err
		}
		if err := item(i); err != nil {
			return err
		}
	}
	if n > 0 {
		if err := w.newline(depth); err != nil {
			return err
		}
	}
	w.b.WriteByte(close)
	return nil
}

func (w *jsonWriter) string(s string) {
	w.b.WriteByte('"')
	for _, c := range s {
		const from, to = "\"\\\b\f\n\r\t", `"\bfnrt`
		if i := strings.IndexRune(from, c); i >= 0 {
			w.b.WriteByte('\\')
			w.b.WriteByte(to[i])
		} else if c < 0x20 || w.ascii && c > 0x7e && c < 0x10000 {
			fmt.Fprintf(&w.b, `\u%04x`, c)
		} else if w.ascii && c >= 0x10000 {
			c -= 0x10000
			fmt.Fprintf(&w.b, `\u%04x\u%04x`, 0xd800+c>>10, 0xdc00+c&0x3ff)
		} else {
			w.b.WriteRune(c)
		}
	}
	w.b.WriteByte('"')
}
