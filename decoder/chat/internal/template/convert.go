package template

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

func (r *run) toInt(v Value, a []Value) (Value, error) {
	absent := a[0]
	if absent.IsUndefined() {
		absent = jinja.NewInt(0)
	}
	switch {
	case v.IsUndefined():
		return Value{}, errors.New("int of an undefined value")
	case v.IsFloat():
		if f := math.Trunc(v.AsFloat()); math.Abs(f) < 1<<63 {
			return jinja.NewInt(int64(f)), nil
		} else if math.Abs(f) <= math.MaxFloat64 {
			return Value{}, errOverflow
		}
		return absent, nil
	case v.IsString():
		base := int64(10)
		if !a[1].IsUndefined() {
			base, _ = whole(a[1])
		}
		if base < 2 || base > 36 {
			return Value{}, fmt.Errorf("int: base %d is not supported", base)
		}
		s := strings.TrimFunc(v.AsString(), isSpace)
		for _, prefix := range map[int64][]string{2: {"0b", "0B"}, 8: {"0o", "0O"}, 16: {"0x", "0X"}}[base] {
			s = strings.TrimPrefix(s, prefix)
		}
		if len(s) > 10000 {
			return Value{}, errOverflow
		}
		if n, ok := new(big.Int).SetString(strings.ReplaceAll(s, "_", ""), int(base)); ok {
			if !n.IsInt64() {
				return Value{}, errOverflow
			}
			return jinja.NewInt(n.Int64()), nil
		}
		if f, err := strconv.ParseFloat(s, 64); err == nil && math.Abs(f) < 1<<63 {
			return jinja.NewInt(int64(f)), nil
		} else if err == nil && math.Abs(f) <= math.MaxFloat64 {
			return Value{}, errOverflow
		}
		return absent, nil
	}
	if n, ok := whole(v); ok {
		return jinja.NewInt(n), nil
	}
	return absent, nil
}

func (r *run) toFloat(v Value, a []Value) (Value, error) {
	if v.IsUndefined() {
		return Value{}, errors.New("float of an undefined value")
	}
	if f, ok := number(v); ok {
		return jinja.NewFloat(f), nil
	}
	if v.IsString() {
		if f, err := strconv.ParseFloat(strings.TrimFunc(v.AsString(), isSpace), 64); err == nil {
			return jinja.NewFloat(f), nil
		}
	}
	if a[0].IsUndefined() {
		return jinja.NewFloat(0), nil
	}
	return a[0], nil
}

func (r *run) round(v Value, a []Value) (Value, error) {
	f, ok := number(v)
	digits, whole := int64(0), true
	if !a[0].IsUndefined() {
		digits, whole = wholeOf(a[0])
	}
	if !ok || !whole || digits < -300 || digits > 300 {
		return Value{}, fmt.Errorf("round of %s to %s digits", kindOf(v), kindOf(a[0]))
	}
	method := "common"
	if a[1].IsString() {
		method = a[1].AsString()
	}
	power := math.Pow(10, float64(digits))
	switch method {
	case "common":
		if v.IsInt() || v.IsBool() {
			if digits >= 0 {
				return r.unary("+x", v)
			}
			return jinja.NewInt(int64(math.RoundToEven(f*power) / power)), nil
		}
		if digits < 0 {
			return jinja.NewFloat(math.RoundToEven(f*power) / power), nil
		}
		return jinja.NewFloat(parseFloat(strconv.FormatFloat(f, 'f', int(digits), 64))), nil
	case "ceil":
		return jinja.NewFloat(math.Ceil(f*power) / power), nil
	case "floor":
		return jinja.NewFloat(math.Floor(f*power) / power), nil
	}
	return Value{}, fmt.Errorf("round: method %s is not known", quote(method))
}

func wholeOf(v Value) (int64, bool) { return whole(v) }
