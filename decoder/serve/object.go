package serve

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
)

// apiError is an error of a request.
type apiError struct {
	status  int
	param   string // the field; "": none
	code    string // "": none
	message string
}

func (e *apiError) Error() string { return e.message }

// wrong returns an error of a field.
func wrong(param, format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, param: param, message: param + ": " + fmt.Sprintf(format, args...)}
}

// body returns the JSON of an error.
func (e *apiError) body() []byte {
	type detail struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	}
	d := detail{Message: e.message, Type: "invalid_request_error"}
	switch {
	case e.status == http.StatusTooManyRequests:
		d.Type = "rate_limit_error"
	case e.status == http.StatusUnauthorized:
		d.Type = "authentication_error"
	case e.status == http.StatusForbidden:
		d.Type = "permission_error"
	case e.status >= 500:
		d.Type = "server_error"
	}
	if e.param != "" {
		d.Param = &e.param
	}
	if e.code != "" {
		d.Code = &e.code
	}
	b, _ := json.Marshal(map[string]detail{"error": d}) // strings marshal
	return b
}

// members are the fields of an object. The function of a field reads a value that is not null.
type members map[string]func(raw json.RawMessage) error

// read reads an object. at names the object in errors; "": the body.
func (m members) read(data []byte, at string) error {
	d := json.NewDecoder(bytes.NewReader(data))
	bad := func(err error) error {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("it ends early")
		}
		if at == "" {
			return &apiError{status: http.StatusBadRequest, message: fmt.Sprintf("the body is no JSON object: %v", err)}
		}
		return wrong(at, "no JSON object: %v", err)
	}
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		if err == nil {
			err = fmt.Errorf("it begins with %v", t)
		}
		return bad(err)
	}
	seen := map[string]bool{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return bad(err)
		}
		key := t.(string)
		name := key
		if at != "" {
			name = at + "." + key
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return bad(err)
		}
		take, ok := m[key]
		switch {
		case !ok:
			return wrong(name, "the server does not know this field; it knows %s", strings.Join(m.names(), ", "))
		case seen[key]:
			return wrong(name, "the field is given twice")
		}
		seen[key] = true
		if string(raw) == "null" {
			continue
		}
		if err := take(raw); err != nil {
			var e *apiError
			if errors.As(err, &e) {
				return err
			}
			return wrong(name, "%v", err)
		}
	}
	if _, err := d.Token(); err != nil {
		return bad(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return bad(errors.New("something follows the object"))
	}
	return nil
}

func (m members) names() (names []string) {
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// into returns the function of a field that is stored as it is.
func into[T any](to *T) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		if err := json.Unmarshal(raw, to); err != nil {
			return fmt.Errorf("%s is no %s", short(raw), kindOf(to))
		}
		return nil
	}
}

// kindOf names what a field wants.
func kindOf(to any) string {
	switch to.(type) {
	case *bool:
		return "true or false"
	case *int, *int64, *uint64:
		return "whole number of this size"
	case *float64:
		return "number"
	case *string:
		return "text"
	case *[]string:
		return "list of texts"
	}
	return "value of this field"
}

// within returns the function of a number in [least, most].
func within[T int | float64](to *T, least, most T) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		if err := into(to)(raw); err != nil {
			return err
		}
		if !(*to >= least && *to <= most) {
			return fmt.Errorf("%v is not in [%v, %v]", *to, least, most)
		}
		return nil
	}
}

// ignored returns the function of a field without effect, which must have the type of T.
func ignored[T any]() func(json.RawMessage) error { return into(new(T)) }

// only returns the function of a field that has one valid value.
func only(value string) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		if string(raw) != value {
			return fmt.Errorf("%s, want %s", short(raw), value)
		}
		return nil
	}
}

// short returns a text for an error.
func short[T string | json.RawMessage](text T) string {
	const most = 60
	if len(text) <= most {
		return string(text)
	}
	return strings.ToValidUTF8(string(text[:most]), "") + "..."
}
