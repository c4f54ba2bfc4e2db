package template

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ardanlabs/jinja"
)

// maxRange is the maximum length of a range. Jinja's sandbox has the same limit.
const maxRange = 100000

type global = func(args []Value, named map[string]Value) (Value, error)

// globals returns the global functions of a template.
func (r *run) globals() map[string]global {
	mapping := func(args []Value, named map[string]Value) (Value, error) {
		d := jinja.NewDict()
		if len(args) > 1 || len(args) == 1 && !args[0].IsDict() {
			return Value{}, errors.New("want a mapping, or arguments with names")
		}
		if len(args) == 1 {
			for _, k := range args[0].AsDict().Keys {
				d.AsDict().Set(k, args[0].AsDict().Data[k])
			}
		}
		for _, k := range r.order {
			d.AsDict().Set(k, named[k])
		}
		return d, r.make(d.AsDict().Len() * itemBytes)
	}
	return map[string]global{
		"dict": mapping,
		"namespace": func(args []Value, named map[string]Value) (Value, error) {
			d, err := mapping(args, named)
			if err != nil {
				return Value{}, err
			}
			if err := r.storable(d, 0); err != nil {
				return Value{}, err
			}
			r.spaces[d.AsDict()] = true
			return d, nil
		},
		"range": func(args []Value, named map[string]Value) (Value, error) {
			var n [3]int64
			for i, a := range args {
				var ok bool
				if i > 2 {
					break
				}
				if n[i], ok = whole(a); !ok {
					return Value{}, fmt.Errorf("range of %s", kindOf(a))
				}
			}
			first, last, step := int64(0), n[0], int64(1)
			switch {
			case len(named) > 0 || len(args) < 1 || len(args) > 3:
				return Value{}, errors.New("range takes one to three integers")
			case len(args) > 1:
				first, last = n[0], n[1]
			}
			if len(args) == 3 {
				if step = n[2]; step == 0 {
					return Value{}, errors.New("range with steps of 0")
				}
			}
			var items []Value
			for i := first; step > 0 && i < last || step < 0 && i > last; {
				if len(items) == maxRange {
					return Value{}, fmt.Errorf("%w: a range of more than %d numbers", ErrLimit, maxRange)
				}
				items = append(items, jinja.NewInt(i))
				next := i + step
				if (next > i) != (step > 0) {
					break
				}
				i = next
			}
			return r.list(items)
		},
		"joiner": func(args []Value, named map[string]Value) (Value, error) {
			separator := jinja.NewString(", ")
			if len(args) > 0 {
				separator = args[0]
			} else if v, ok := named["sep"]; ok {
				separator = v
			}
			used := false
			return jinja.NewCallable("joiner", func([]Value, map[string]Value) (Value, error) {
				if used {
					return separator, nil
				}
				used = true
				return empty, nil
			}), nil
		},
		"cycler": func(args []Value, named map[string]Value) (Value, error) {
			if len(args) == 0 || len(named) > 0 {
				return Value{}, errors.New("cycler needs values")
			}
			items, i := slices.Clone(args), 0
			d := jinja.NewDict()
			d.AsDict().Set("current", items[0])
			d.AsDict().Set("next", jinja.NewCallable("next", func([]Value, map[string]Value) (Value, error) {
				v := items[i]
				i = (i + 1) % len(items)
				d.AsDict().Set("current", items[i])
				return v, nil
			}))
			d.AsDict().Set("reset", jinja.NewCallable("reset", func([]Value, map[string]Value) (Value, error) {
				i = 0
				d.AsDict().Set("current", items[0])
				return jinja.None(), nil
			}))
			return d, nil
		},
		"raise_exception": func(args []Value, named map[string]Value) (Value, error) {
			if v, ok := named["message"]; ok {
				args = append(args, v)
			}
			if len(args) != 1 {
				return Value{}, errors.New("raise_exception takes a message")
			}
			s, err := r.string(args[0])
			if err != nil {
				return Value{}, err
			}
			return Value{}, &Exception{s}
		},
		"strftime_now": func(args []Value, named map[string]Value) (Value, error) {
			if v, ok := named["format"]; ok {
				args = append(args, v)
			}
			if len(args) != 1 || !args[0].IsString() {
				return Value{}, errors.New("strftime_now takes a format")
			}
			s, err := strftime(r.now(), args[0].AsString())
			if err != nil {
				return Value{}, err
			}
			return r.text(s)
		},
	}
}

// layouts maps a directive of strftime to an equivalent layout of package time.
var layouts = map[byte]string{
	'a': "Mon", 'A': "Monday", 'b': "Jan", 'h': "Jan", 'B': "January", 'c': "Mon Jan _2 15:04:05 2006", 'd': "02", 'D': "01/02/06", 'e': "_2",
	'f': "000000", 'F': "2006-01-02", 'H': "15", 'I': "03", 'j': "002", 'm': "01", 'M': "04", 'p': "PM", 'R': "15:04", 'S': "05",
	'T': "15:04:05", 'x': "01/02/06", 'X': "15:04:05", 'y': "06", 'Y': "2006", 'z': "-0700", 'Z': "MST",
}

// strftime implements Python's strftime in the C locale.
func strftime(t time.Time, format string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		i++
		plain := i < len(format) && format[i] == '-'
		if plain {
			i++
		}
		if i >= len(format) {
			return "", fmt.Errorf("strftime_now: format %s ends in a directive", quote(format))
		}
		s, ok := layouts[format[i]]
		switch {
		case format[i] == 'f':
			s = fmt.Sprintf("%06d", t.Nanosecond()/1000)
		case ok:
			s = t.Format(s)
		case format[i] == '%':
			s = "%"
		case format[i] == 'n':
			s = "\n"
		case format[i] == 't':
			s = "\t"
		case format[i] == 's':
			s = strconv.FormatInt(t.Unix(), 10)
		case format[i] == 'w':
			s = strconv.Itoa(int(t.Weekday()))
		case format[i] == 'u':
			s = strconv.Itoa((int(t.Weekday())+6)%7 + 1)
		case format[i] == 'U':
			s = fmt.Sprintf("%02d", (t.YearDay()+6-int(t.Weekday()))/7)
		case format[i] == 'W':
			s = fmt.Sprintf("%02d", (t.YearDay()+6-(int(t.Weekday())+6)%7)/7)
		case format[i] == 'V':
			_, week := t.ISOWeek()
			s = fmt.Sprintf("%02d", week)
		case format[i] == 'G':
			year, _ := t.ISOWeek()
			s = strconv.Itoa(year)
		default:
			return "", fmt.Errorf("strftime_now: directive %s is not supported", quote(format[i-1:i+1]))
		}
		if plain {
			if short := strings.TrimLeft(s, "0 "); short != "" && strings.IndexByte("deHIjmMSyUWV", format[i]) >= 0 {
				s = short
			} else if short == "" {
				s = "0"
			}
		}
		b.WriteString(s)
	}
	return b.String(), nil
}

// quoteLong returns text as a quoted string for an error, cut to n bytes.
func quoteLong(s string, n int) string {
	if len(s) > n {
		s = s[:n] + "..."
	}
	return strconv.Quote(s)
}
