package jsonschema

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// Errors of schemas.
var (
	// ErrSchema: the schema is malformed, or nothing satisfies it.
	ErrSchema = errors.New("bad schema")
	// ErrUnsupported: the schema has a part that this package does not know, or is too large.
	ErrUnsupported = errors.New("not supported")
)

const (
	mostBytes  = 1 << 20 // of a schema
	mostNested = 128     // of a schema
)

// value is a JSON value. Members keep their order.
type value struct {
	kind   byte     // { [ " 0 t f n
	text   string   // of a string, and the spelling of a number
	keys   []string // of an object
	values []*value // of an object or an array
}

// member returns a member of an object; nil: none.
func (v *value) member(key string) *value {
	for i, k := range v.keys {
		if k == key {
			return v.values[i]
		}
	}
	return nil
}

// parse parses a JSON text.
func parse(data []byte) (*value, error) {
	if len(data) > mostBytes {
		return nil, fmt.Errorf("jsonschema: the schema has %d bytes, more than %d: %w", len(data), mostBytes, ErrUnsupported)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	v, err := parseValue(d, 0)
	if err == nil {
		if _, err = d.Token(); errors.Is(err, io.EOF) {
			return v, nil
		}
		if err == nil {
			err = errors.New("something follows the value")
		}
	}
	if errors.Is(err, ErrUnsupported) {
		return nil, fmt.Errorf("jsonschema: %w", err)
	}
	return nil, fmt.Errorf("jsonschema: no JSON: %w: %w", err, ErrSchema)
}

func parseValue(d *json.Decoder, depth int) (*value, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t := token.(type) {
	case nil:
		return &value{kind: 'n'}, nil
	case bool:
		if t {
			return &value{kind: 't'}, nil
		}
		return &value{kind: 'f'}, nil
	case string:
		return &value{kind: '"', text: t}, nil
	case json.Number:
		return &value{kind: '0', text: t.String()}, nil
	}
	if depth == mostNested {
		return nil, fmt.Errorf("the schema is nested more than %d deep: %w", mostNested, ErrUnsupported)
	}
	v := &value{kind: byte(token.(json.Delim))}
	seen := map[string]bool{}
	for d.More() {
		if v.kind == '{' {
			key, err := d.Token()
			if err != nil {
				return nil, err
			}
			name := key.(string)
			if seen[name] {
				return nil, fmt.Errorf("two members have the name %s", short(name))
			}
			seen[name] = true
			v.keys = append(v.keys, name)
		}
		x, err := parseValue(d, depth+1)
		if err != nil {
			return nil, err
		}
		v.values = append(v.values, x)
	}
	_, err = d.Token()
	return v, err
}

// write writes the only spelling of a value.
func (v *value) write(b *strings.Builder) {
	switch v.kind {
	case 'n':
		b.WriteString("null")
	case 't':
		b.WriteString("true")
	case 'f':
		b.WriteString("false")
	case '0':
		b.WriteString(v.text)
	case '"':
		b.WriteString(quote(v.text))
	default:
		b.WriteByte(v.kind)
		for i, x := range v.values {
			if i > 0 {
				b.WriteByte(',')
			}
			if v.kind == '{' {
				b.WriteString(quote(v.keys[i]) + ":")
			}
			x.write(b)
		}
		b.WriteByte(v.kind + 2) // } and ]
	}
}

// quote returns a string as JSON has it, with no more escapes than are needed.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"', r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case r < ' ':
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// short quotes a text for an error.
func short(text string) string {
	const most = 60
	if len(text) <= most {
		return fmt.Sprintf("%q", text)
	}
	for most := most; ; most-- {
		if utf8.RuneStart(text[most]) {
			return fmt.Sprintf("%q...", text[:most])
		}
	}
}
